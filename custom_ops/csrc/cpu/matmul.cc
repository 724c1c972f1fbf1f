#include "normed_rows.h"
#include "operators.generated.h"
#include "weight.h"

namespace piccard::matmul {

void compute(Call& call) {
  const int64_t T = call.value(name::T), K = call.value(name::K), N = call.value(name::N);
  const NormedRows x(call, input::x, input::norm, call.real(real::epsilon));
  const Floats bias(call.input(input::bias)), residual(call.input(input::residual));
  const std::unique_ptr<Weight> weight = float_weight(call, input::weight, 0);
  Result y(call, output::y);
  linear(call, x.data(), T, K, *weight, N, bias.data(), residual.data(), y.data());
  y.finish();
}

}  // namespace piccard::matmul
