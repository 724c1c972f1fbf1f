// Products of many rows with a packed weight: it is unpacked part by part, and cuBLAS multiplies.
#pragma once

#include "blas.h"
#include "split_sum.h"

#ifndef PICCARD_UNPACKED_BYTES
#define PICCARD_UNPACKED_BYTES (128 << 20)
#endif

namespace piccard::cuda {

// UNPACKED_BYTES of unpacked_product.py: scratch memory for a part of the weight, at most; a row where that holds none.
constexpr int64_t kUnpackedBytes = PICCARD_UNPACKED_BYTES;
// WHOLE_ROWS there: what a part's rows are a multiple of where they are more.
constexpr int64_t kWholeRows = 256;

inline int64_t rows_a_part(int64_t N, int64_t K) {
  const int64_t most = max(int64_t{1}, kUnpackedBytes / (K * Gpu::kElementBytes));
  return min(N, most < kWholeRows ? most : most / kWholeRows * kWholeRows);
}

// y [M, N] = x [M, K] w^T, and what is added; unpack(first, rows, part) writes the weight's rows from `first` on to
// part [rows, K] in the activations' type. Throws Error.
template <typename Unpack>
void unpacked_product(Gpu& gpu, const void* x, int64_t M, int64_t N, int64_t K, const Added& added, void* y,
                      const Unpack& unpack) {
  const int64_t most = rows_a_part(N, K);
  void* const part = gpu.scratch_elements(most * K);
  const bool adds = begin_sum(gpu, M, N, added, y);
  for (int64_t first = 0; first < N; first += most) {
    const int64_t rows = min(most, N - first);
    unpack(first, rows, part);
    product(gpu, x, part, at(y, first), M, rows, K, {.add = adds, .out_stride = N});
  }
}

}  // namespace piccard::cuda
