// Grouped attention in one run: its sizes, and how its leading sequences are decoded.
#pragma once

#include "mla_plan.h"

namespace piccard::cuda {

struct GroupedSizes {
  int64_t heads, key_heads, width, page;

  int64_t group() const { return heads / key_heads; }
};

struct GroupedPlan : Leading {
  const Row* row = nullptr;
  int64_t lines = 0;  // Rows of one key head.
  int64_t workers = 0;

  int64_t tile() const { return row->constants[kernels::grouped_decode::TILE]; }
  int64_t block_width() const { return row->constants[kernels::grouped_decode::WIDTH]; }
};

// Throws Error where no row is for the sizes.
GroupedPlan grouped_plan(const Gpu& gpu, const Leading& leading, const GroupedSizes& sizes);

}  // namespace piccard::cuda
