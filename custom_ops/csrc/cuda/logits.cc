#include "blas.h"
#include "operators.generated.h"

namespace piccard::logits {

void compute(Call& call) {
  cuda::Gpu gpu(call);
  const int64_t T = call.value(name::T), K = call.value(name::K), N = call.value(name::N);
  const void *x = call.input(input::x).data, *weight = call.input(input::weight).data;
  void* const logits = call.output(output::logits).data;
  if (T > 1) return cuda::product(gpu, x, weight, logits, T, N, K, {.wide = true});
  using Gemv = kernels::row_gemv_fp32;
  const Gemv::Dims dims{.columns = N, .epilogue = 0, .norm = 0, .rows = 1};
  gpu.launch<Gemv>(gpu.choose<Gemv>(dims), dims,
                   {.x_ptr = x,
                    .weight_ptr = weight,
                    .norm_ptr = x,
                    .residual_ptr = x,
                    .out_ptr = logits,
                    .columns = cuda::narrow(N),
                    .depth = cuda::narrow(K),
                    .eps = 0.0f},
                   call.is_constant(input::weight));
}

}  // namespace piccard::logits
