#include "split_sum.h"

#include "blas.h"

namespace piccard::cuda {

bool begin_sum(Gpu& gpu, int64_t M, int64_t N, const Added& added, void* y) {
  if (added.residual != nullptr) gpu.copy(y, added.residual, M * N * Gpu::kElementBytes);
  // A bias is a product of depth 1 with a column of ones.
  if (added.bias != nullptr) product(gpu, ones(gpu, M), added.bias, y, M, N, 1, {.add = added.residual != nullptr});
  return added.bias != nullptr || added.residual != nullptr;
}

void sum_parts(Gpu& gpu, const void* parts, int64_t splits, int64_t M, int64_t N, const Added& added, void* y) {
  using Sum = kernels::sum_parts;
  const Sum::Dims dims{.columns = N, .rows = M};
  gpu.launch<Sum>(gpu.choose<Sum>(dims), dims,
                  {.part_ptr = parts,
                   .bias_ptr = added.bias_or(y),
                   .residual_ptr = added.residual_or(y),
                   .out_ptr = y,
                   .rows = narrow(M),
                   .columns = narrow(N),
                   .splits = narrow(splits),
                   .with_bias = added.with_bias(),
                   .with_residual = added.with_residual()});
}

}  // namespace piccard::cuda
