// The sequences of a step and where their cache entries lie.
#pragma once

#include <vector>

#include "call.h"
#include "isa.h"

namespace piccard {

// One sequence: the last `rows` of its `length` entries are this step's.
struct Sequence {
  int64_t first;   // Its first row in the batch.
  int64_t rows;
  int64_t length;
  const int64_t* blocks;

  // Entries that the row sees, itself included.
  int64_t visible(int64_t row) const { return length - rows + row - first + 1; }
};

// One layer's plane: blocks of `block_size` entries of `width` elements.
struct Plane {
  Matrix entries;
  int64_t block_size;

  Matrix entry(const Sequence& sequence, int64_t position) const {
    return entries.row(sequence.blocks[position / block_size] * block_size + position % block_size);
  }
  // Call visit(position, count, entries) for each run of entries below `length` that lie one after the other.
  template <typename Visit>
  void runs(const Sequence& sequence, int64_t length, const Visit& visit) const {
    for (int64_t position = 0; position < length; position += block_size) {
      visit(position, min(block_size, length - position), entry(sequence, position));
    }
  }
};

// Checked: every entry of every sequence lies in the cache of `blocks` blocks. Throws Error.
std::vector<Sequence> sequences_of(const Tensor& block_tables, const Tensor& query_starts,
                                   const Tensor& context_lengths, int64_t rows, int64_t blocks, int64_t block_size);

// Writes this step's entries [T, width] into the plane.
void write_entries(const std::vector<Sequence>& sequences, const Plane& plane, const float* entries, int64_t width);

// Some rows of one sequence and some heads: what one thread does at a time.
struct AttentionTask {
  const Sequence* sequence;
  int64_t first, last;  // Rows of the batch.
  int64_t head, heads;
};

// Every row and head once. Rows are taken `tile` at a time, heads `group`.
std::vector<AttentionTask> attention_tasks(const std::vector<Sequence>& sequences, int64_t tile, int64_t heads,
                                           int64_t group);

// softmax of scores [rows, stride]: of the row r only the first visible(r) count, and the rest up to `length` is 0.
void causal_softmax(const AttentionTask& task, float* scores, int64_t stride, int64_t heads, int64_t length, float scale);

}  // namespace piccard
