#include "blas.h"
#include "operators.generated.h"
#include "split_sum.h"

namespace piccard::matmul {

namespace {

// One row is bound by reading the weight, which a kernel asks for before the launch ahead of it has ended.
void multiply_row(Call& call, cuda::Gpu& gpu, const void* added, void* y) {
  using Gemv = kernels::row_gemv;
  const int64_t N = call.value(name::N), K = call.value(name::K);
  const Gemv::Dims dims{.columns = N, .epilogue = added == nullptr ? 0 : 1, .norm = 0, .rows = 1};
  const void* x = call.input(input::x).data;
  gpu.launch<Gemv>(gpu.choose<Gemv>(dims), dims,
                   {.x_ptr = x,
                    .weight_ptr = call.input(input::weight).data,
                    .norm_ptr = x,
                    .residual_ptr = added == nullptr ? x : added,
                    .out_ptr = y,
                    .columns = cuda::narrow(N),
                    .depth = cuda::narrow(K),
                    .eps = 0.0f},
                   call.is_constant(input::weight));
}

}  // namespace

void compute(Call& call) {
  cuda::Gpu gpu(call);
  const int64_t T = call.value(name::T), K = call.value(name::K), N = call.value(name::N);
  const Tensor &bias = call.input(input::bias), &residual = call.input(input::residual);
  void* const y = call.output(output::y).data;
  if (T == 1 && !(bias.present() && residual.present())) {
    return multiply_row(call, gpu, bias.present() ? bias.data : residual.data, y);
  }
  const bool adds = cuda::begin_sum(gpu, T, N, {bias.data, residual.data}, y);
  cuda::product(gpu, call.input(input::x).data, call.input(input::weight).data, y, T, N, K, {.add = adds});
}

}  // namespace piccard::matmul
