#include "paged_batch.h"

#include "error.h"

namespace piccard {

std::vector<Sequence> sequences_of(const Tensor& block_tables, const Tensor& query_starts,
                                   const Tensor& context_lengths, int64_t rows, int64_t blocks, int64_t block_size) {
  const int64_t count = context_lengths.shape.dims[0], places = block_tables.shape.dims[1];
  const auto* starts = query_starts.as<int64_t>();
  const auto* lengths = context_lengths.as<int64_t>();
  if (starts[0] != 0 || starts[count] != rows) {
    fail("query_starts has to begin with 0 and end with the number of rows, ", rows, "; it has ", starts[0], " and ",
         starts[count]);
  }
  std::vector<Sequence> sequences;
  for (int64_t r = 0; r < count; ++r) {
    if (starts[r + 1] <= starts[r] || starts[r + 1] > rows) {
      fail("query_starts[", r + 1, "] is ", starts[r + 1], " after ", starts[r], "; every sequence has to have a row");
    }
    const Sequence sequence{starts[r], starts[r + 1] - starts[r], lengths[r], block_tables.as<int64_t>() + r * places};
    if (sequence.length < sequence.rows) {
      fail("context_lengths[", r, "] is ", sequence.length, ", below the sequence's ", sequence.rows, " rows");
    }
    // Division, so that no length overflows.
    const int64_t used = (sequence.length - 1) / block_size + 1;
    if (used > places) {
      fail("context_lengths[", r, "] is ", sequence.length, ", but its block table has room for ", places, " blocks of ",
           block_size);
    }
    // A block may stand in a table often, so that the cache does not bound a length.
    if (sequence.length > kMaxInteger) {
      fail("context_lengths[", r, "] is ", sequence.length, "; it has to be at most ", kMaxInteger);
    }
    for (int64_t i = 0; i < used; ++i) {
      if (sequence.blocks[i] < 0 || sequence.blocks[i] >= blocks) {
        fail("block_tables[", r, ", ", i, "] is ", sequence.blocks[i], "; the cache has ", blocks, " blocks");
      }
    }
    sequences.push_back(sequence);
  }
  return sequences;
}

void write_entries(const std::vector<Sequence>& sequences, const Plane& plane, const float* entries, int64_t width) {
  for (const Sequence& sequence : sequences) {
    for (int64_t row = sequence.first; row < sequence.first + sequence.rows; ++row) {
      const Matrix place = plane.entry(sequence, sequence.visible(row) - 1);
      isa().narrow(place.format, entries + row * width, const_cast<void*>(place.data), width);
    }
  }
}

std::vector<AttentionTask> attention_tasks(const std::vector<Sequence>& sequences, int64_t tile, int64_t heads,
                                           int64_t group) {
  std::vector<AttentionTask> tasks;
  for (const Sequence& sequence : sequences) {
    const int64_t end = sequence.first + sequence.rows;
    for (int64_t row = sequence.first; row < end; row += tile) {
      for (int64_t head = 0; head < heads; head += group) {
        tasks.push_back({&sequence, row, min(end, row + tile), head, min(group, heads - head)});
      }
    }
  }
  return tasks;
}

}  // namespace piccard
