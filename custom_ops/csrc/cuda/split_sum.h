// Products whose sums are split over programs.
#pragma once

#include "gpu.h"

namespace piccard::cuda {

// What is added to a product: null where there is none.
struct Added {
  const void *bias, *residual;

  int32_t with_bias() const { return bias != nullptr; }
  int32_t with_residual() const { return residual != nullptr; }
  // A kernel's argument has to be some address.
  const void* bias_or(const void* other) const { return bias != nullptr ? bias : other; }
  const void* residual_or(const void* other) const { return residual != nullptr ? residual : other; }
};

// y [M, N] = what is added to a product that cuBLAS makes; whether there is anything. Throws Error.
bool begin_sum(Gpu& gpu, int64_t M, int64_t N, const Added& added, void* y);

// y [M, N] = the sum of parts float32 [splits, M, N], and what is added. Throws Error.
void sum_parts(Gpu& gpu, const void* parts, int64_t splits, int64_t M, int64_t N, const Added& added, void* y);

}  // namespace piccard::cuda
