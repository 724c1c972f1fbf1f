#include "error.h"
#include "gpu.h"
#include "operators.generated.h"

namespace piccard::rms_norm {

void compute(Call& call) {
  const int64_t D = call.value(name::D), N = call.value(name::N), heads = call.value(name::num_heads);
  if (N * heads != D) {
    fail("weight has N = ", N, " columns and a head has D // num_heads = ", D / heads,
         ": on CUDA a norm covers whole heads; the latent's norm is part of DeepSeekMLAPagedAttention");
  }
  cuda::Gpu gpu(call);
  const int64_t rows = call.value(name::T) * heads;
  const Tensor& x = call.input(input::x);
  const void* weight = call.input(input::weight).data;
  void* const y = call.output(output::y).data;
  const int32_t width = cuda::narrow(N);
  const float eps = call.real(real::epsilon);
  if (!call.input(input::residual).present()) {
    using Norm = kernels::rms_norm;
    const Norm::Dims dims{.rows = rows, .width = N};
    gpu.launch<Norm>(gpu.choose<Norm>(dims), dims,
                     {.x_ptr = x.data,
                      .weight_ptr = weight,
                      .out_ptr = y,
                      .x_stride = width,
                      .out_stride = width,
                      .width = width,
                      .eps = eps});
    if (call.wants(output::sum)) gpu.copy(call.output(output::sum).data, x.data, x.shape.count() * gpu.kElementBytes);
    return;
  }
  using Norm = kernels::add_rms_norm;
  const Norm::Dims dims{.rows = rows, .width = N};
  void* const sum = call.wants(output::sum) ? call.output(output::sum).data : gpu.scratch_elements(rows * N);
  gpu.launch<Norm>(gpu.choose<Norm>(dims), dims,
                   {.x_ptr = x.data,
                    .residual_ptr = call.input(input::residual).data,
                    .weight_ptr = weight,
                    .out_ptr = y,
                    .sum_ptr = sum,
                    .x_stride = width,
                    .residual_stride = width,
                    .out_stride = width,
                    .sum_stride = width,
                    .width = width,
                    .eps = eps});
}

}  // namespace piccard::rms_norm
