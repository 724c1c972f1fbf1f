// A step's choices of experts in the order of their experts, which products over tiles of them take.
#pragma once

#include "gpu.h"

namespace piccard::cuda {

// The sizes of one run.
struct MoeSizes {
  int64_t tokens, pairs, experts, hidden, intermediate, top_k;

  MoeSizes(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden, int64_t intermediate)
      : tokens(tokens), pairs(tokens * top_k), experts(experts), hidden(hidden), intermediate(intermediate), top_k(top_k) {}
  // Choices an expert gets on average.
  int64_t load() const { return ceil_div(pairs, experts); }
};

// Sorts them, and has scratch memory for what is made of them. Throws Error.
struct SortedChoices {
  // `experts` int32 [tokens, top_k]; tiles of `block_m` choices.
  SortedChoices(Gpu& gpu, const MoeSizes& sizes, int64_t block_m, const void* experts);
  // y [tokens, hidden] = the sums of each token's outputs.
  void combine(void* y) const;

  void *sorted, *tile_experts, *tiles, *inner, *outputs;

 private:
  Gpu& gpu_;
  MoeSizes sizes_;
  const void* experts_;
};

}  // namespace piccard::cuda
