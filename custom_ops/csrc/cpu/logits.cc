#include "operators.generated.h"
#include "weight.h"

namespace piccard::logits {

void compute(Call& call) {
  const int64_t T = call.value(name::T), K = call.value(name::K), N = call.value(name::N);
  const Floats x(call.input(input::x));
  const std::unique_ptr<Weight> weight = float_weight(call, input::weight, 0);
  Result logits(call, output::logits);
  linear(call, x.data(), T, K, *weight, N, nullptr, nullptr, logits.data());
  logits.finish();
}

}  // namespace piccard::logits
