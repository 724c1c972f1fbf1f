#include "gpu.h"
#include "operators.generated.h"

namespace piccard::rotary_embedding {

void compute(Call& call) {
  using Rotary = kernels::rotary;
  cuda::Gpu gpu(call);
  const int64_t heads = call.value(name::num_heads), half = call.value(name::F);
  const Rotary::Dims dims{
      .half = half, .heads = heads, .interleaved = call.value(name::interleaved), .rows = call.value(name::T)};
  gpu.launch<Rotary>(gpu.choose<Rotary>(dims), dims,
                     {.x_ptr = call.input(input::x).data,
                      .positions_ptr = call.input(input::positions).data,
                      .inv_freq_ptr = call.input(input::inv_freq).data,
                      .out_ptr = call.output(output::y).data,
                      .heads = cuda::narrow(heads),
                      .width = cuda::narrow(call.value(name::D) / heads),
                      .half = cuda::narrow(half),
                      .scale = call.real(real::scale)});
}

}  // namespace piccard::rotary_embedding
