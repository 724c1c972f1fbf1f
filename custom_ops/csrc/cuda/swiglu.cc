#include "gpu.h"
#include "operators.generated.h"

namespace piccard::swiglu {

void compute(Call& call) {
  using Swiglu = kernels::swiglu;
  cuda::Gpu gpu(call);
  const int64_t half = call.value(name::D) / 2;
  const Swiglu::Dims dims{.rows = call.value(name::T), .width = half};
  gpu.launch<Swiglu>(gpu.choose<Swiglu>(dims), dims,
                     {.x_ptr = call.input(input::gate_up).data,
                      .out_ptr = call.output(output::y).data,
                      .width = cuda::narrow(half)});
}

}  // namespace piccard::swiglu
