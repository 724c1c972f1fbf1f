#include "error.h"
#include "experts.h"
#include "operators.generated.h"

namespace piccard::moe {

namespace {

Expert expert_of(const Call& call, int gate_up, int down, int64_t index, int64_t inner) {
  return {float_weight(call, gate_up, index), float_weight(call, down, index), inner};
}

}  // namespace

void compute(Call& call) {
  const int64_t T = call.value(name::T), D = call.value(name::D), I = call.value(name::I);
  const bool has_shared = call.input(input::shared_down).present();
  if (call.input(input::shared_gate_up).present() != has_shared) {
    fail("inputs shared_gate_up and shared_down have to be given both or neither");
  }
  const Floats x(call.input(input::x)), residual(call.input(input::residual));
  const Routing routing{call.input(input::weights).as<float>(), call.input(input::experts).as<int32_t>(),
                        call.value(name::K)};
  std::unique_ptr<Expert> shared;
  if (has_shared) {
    shared = std::make_unique<Expert>(expert_of(call, input::shared_gate_up, input::shared_down, 0, call.value(name::J)));
  }
  Result y(call, output::y);
  run_experts(
      call, x.data(), T, D, routing, call.value(name::E),
      [&](int64_t index) { return expert_of(call, input::gate_up, input::down, index, I); }, std::move(shared), residual.data(),
      y.data());
  y.finish();
}

}  // namespace piccard::moe
