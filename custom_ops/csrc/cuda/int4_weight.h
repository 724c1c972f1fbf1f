// Weights of four bits with a scale and a zero a group of columns, as kernels take them.
#pragma once

#include "gpu.h"

namespace piccard::cuda {

// BLOCK_COLUMNS of int4_gemm_triton.py: columns that are unpacked together, whole blocks of which lie in one group.
constexpr int64_t kInt4Block = 32;

struct Int4Weight {
  const void *q, *scales, *zeros;
  int64_t depth, groups, group_size;
  int32_t zero_row, zero_step;
  // Whether nothing of it is written during a run.
  bool constant;

  // The input at `first`, then its scales and zeros; `columns` of it. Throws Error.
  Int4Weight(Gpu& gpu, const Call& call, int first, int64_t columns, int64_t group_size);

  // Whether the kernels for whole blocks take it.
  bool blocked() const {
    return depth % kInt4Block == 0 && (group_size == 32 || group_size == 64 || group_size == 128);
  }
  int32_t blocks() const { return narrow(depth / kInt4Block); }
  int32_t group_shift() const { return group_size == 128 ? 2 : group_size == 64 ? 1 : 0; }
};

}  // namespace piccard::cuda
