#include "error.h"
#include "experts.h"
#include "operators.generated.h"

namespace piccard::moe {

namespace {

Expert expert_of(const Tensor& gate_up, const Tensor& down, int64_t index, int64_t D, int64_t inner) {
  return {std::make_unique<PlainWeight>(matrix_of(gate_up, D).row(index * 2 * inner), D),
          std::make_unique<PlainWeight>(matrix_of(down, inner).row(index * D), inner), inner};
}

}  // namespace

void compute(Call& call) {
  const int64_t T = call.value(name::T), D = call.value(name::D), I = call.value(name::I);
  const Tensor &gate_up = call.input(input::gate_up), &down = call.input(input::down);
  const Tensor &shared_gate_up = call.input(input::shared_gate_up), &shared_down = call.input(input::shared_down);
  if (shared_gate_up.present() != shared_down.present()) {
    fail("inputs shared_gate_up and shared_down have to be given both or neither");
  }
  const Floats x(call.input(input::x)), residual(call.input(input::residual));
  const Routing routing{call.input(input::weights).as<float>(), call.input(input::experts).as<int64_t>(),
                        call.value(name::K)};
  std::unique_ptr<Expert> shared;
  if (shared_down.present()) {
    shared = std::make_unique<Expert>(expert_of(shared_gate_up, shared_down, 0, D, call.value(name::J)));
  }
  Result y(call, output::y);
  run_experts(
      call, x.data(), T, D, routing, call.value(name::E),
      [&](int64_t index) { return expert_of(gate_up, down, index, D, I); }, std::move(shared), residual.data(),
      y.data());
  y.finish();
}

}  // namespace piccard::moe
