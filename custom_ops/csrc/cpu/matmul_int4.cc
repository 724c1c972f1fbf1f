#include "int4_weight.h"
#include "normed_rows.h"
#include "operators.generated.h"

namespace piccard::matmul_int4 {

void compute(Call& call) {
  const int64_t T = call.value(name::T), K = call.value(name::K), N = call.value(name::N);
  const NormedRows x(call, input::x, input::norm, call.real(real::epsilon));
  const Floats bias(call.input(input::bias)), residual(call.input(input::residual));
  const Int4Tensors tensors{call.input(input::weight), call.input(input::scales), call.input(input::zeros)};
  const Int4Weight weight(tensors, 0, K, call.value(name::group_size));
  Result y(call, output::y);
  linear(call, x.data(), T, K, weight, N, bias.data(), residual.data(), y.data());
  y.finish();
}

}  // namespace piccard::matmul_int4
