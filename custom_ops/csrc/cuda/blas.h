// Products of many rows by cuBLAS, which the runtime's CUDA provider has loaded already; opened at run time.
#pragma once

#include "gpu.h"

namespace piccard::cuda {

struct ProductOptions {
  bool add = false;     // Add to y instead of writing it.
  bool wide = false;    // y is float32 and not of the activations' type.
  int64_t stride = 0;   // Elements from row to row of x; 0 for K.
  int64_t out_stride = 0;  // The same of y; 0 for N.
};

// y[m, n] = sum_k x[m, k] weight[n, k], sums in float32. Throws Error.
void product(const Gpu& gpu, const void* x, const void* weight, void* y, int64_t M, int64_t N, int64_t K,
             const ProductOptions& options = {});

// A constant buffer of ones of the activations' type, at least `count`. Throws Error.
const void* ones(const Gpu& gpu, int64_t count);

}  // namespace piccard::cuda
