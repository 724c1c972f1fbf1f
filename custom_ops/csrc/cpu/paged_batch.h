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

constexpr int64_t kLine = 64;            // Bytes that come from memory at once.
constexpr int64_t kMostAsked = 1 << 13;  // Bytes that are asked for at once: more would drive out what is in use.
constexpr int64_t kMostAhead = 1 << 17;  // Bytes of what is next that the second-level cache has room for.

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
  // Ask memory for the block at `position`, if there is one: where it lies a processor cannot foresee.
  void ask(const Sequence& sequence, int64_t position, int64_t length) const {
    if (position >= length) return;
    const auto* from = static_cast<const char*>(entry(sequence, position).data);
    const int64_t bytes = min(min(block_size, length - position) * entries.stride * bytes_of(entries.format), kMostAsked);
    for (int64_t i = 0; i < bytes; i += kLine) __builtin_prefetch(from + i);
  }
};

// Asks memory for a sequence's entries, some lines at a time, between the computations of whoever is before it: so many
// at once would wait for each other, and everything after them.
class Ahead {
 public:
  // `sequence` may be null: nothing is asked for.
  Ahead(const Plane& plane, const Sequence* sequence, int64_t parts)
      : plane_(plane), sequence_(sequence), bytes_(plane.entries.stride * bytes_of(plane.entries.format)) {
    if (sequence != nullptr) share_ = ceil_div(min(sequence->length * bytes_, kMostAhead), parts * kLine);
  }
  void ask() {
    for (int64_t i = 0; i < share_; ++i) {
      if (line_ == end_ && !begin_block()) return;
      __builtin_prefetch(line_, 0, 2);
      line_ = end_ - line_ > kLine ? line_ + kLine : end_;
    }
  }

 private:
  bool begin_block() {
    if (position_ >= sequence_->length) {
      share_ = 0;
      return false;
    }
    line_ = static_cast<const char*>(plane_.entry(*sequence_, position_).data);
    end_ = line_ + min(plane_.block_size, sequence_->length - position_) * bytes_;
    position_ += plane_.block_size;
    return true;
  }

  const Plane& plane_;
  const Sequence* sequence_;
  int64_t bytes_, share_ = 0, position_ = 0;
  const char *line_ = nullptr, *end_ = nullptr;
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
// `after` is called after each.
template <typename After>
void causal_softmax(const AttentionTask& task, float* scores, int64_t stride, int64_t heads, int64_t length, float scale,
                    const After& after) {
  for (int64_t row = task.first; row < task.last; ++row) {
    const int64_t visible = task.sequence->visible(row);
    for (int64_t h = 0; h < heads; ++h) {
      float* line = scores + ((row - task.first) * heads + h) * stride;
      isa().softmax(line, visible, scale);
      for (int64_t i = visible; i < length; ++i) line[i] = 0.0f;
      after();
    }
  }
}

}  // namespace piccard
