#include "error.h"
#include "experts.h"
#include "int4_weight.h"
#include "operators.generated.h"

namespace piccard::moe_int4 {

namespace {

Int4Tensors tensors_of(const Call& call, int first) {
  return {call.input(first), call.input(first + 1), call.input(first + 2)};
}

Expert expert_of(const Int4Tensors& gate_up, const Int4Tensors& down, int64_t index, int64_t D, int64_t inner,
                 int64_t group_size) {
  return {std::make_unique<Int4Weight>(gate_up, index * 2 * inner, D, group_size),
          std::make_unique<Int4Weight>(down, index * D, inner, group_size), inner};
}

// Whether there is a shared expert. Throws Error where a part of it is left out.
bool has_shared(const Int4Tensors& gate_up, const Int4Tensors& down) {
  const bool present = down.q.present();
  if (gate_up.q.present() != present || gate_up.scales.present() != present || down.scales.present() != present) {
    fail("inputs shared_gate_up, shared_gate_up_scales, shared_down and shared_down_scales have to be given all or ",
         "none");
  }
  if (!present && (gate_up.zeros.present() || down.zeros.present())) {
    fail("inputs shared_gate_up_zeros and shared_down_zeros are of a shared expert, which is not given");
  }
  return present;
}

}  // namespace

void compute(Call& call) {
  const int64_t T = call.value(name::T), D = call.value(name::D), I = call.value(name::P) / 2;
  const int64_t group_size = call.value(name::group_size);
  const Int4Tensors gate_up = tensors_of(call, input::gate_up), down = tensors_of(call, input::down);
  const Int4Tensors shared_gate_up = tensors_of(call, input::shared_gate_up);
  const Int4Tensors shared_down = tensors_of(call, input::shared_down);
  const Floats x(call.input(input::x)), residual(call.input(input::residual));
  const Routing routing{call.input(input::weights).as<float>(), call.input(input::experts).as<int32_t>(),
                        call.value(name::K)};
  std::unique_ptr<Expert> shared;
  if (has_shared(shared_gate_up, shared_down)) {
    shared = std::make_unique<Expert>(
        expert_of(shared_gate_up, shared_down, 0, D, call.value(name::Q) / 2, group_size));
  }
  Result y(call, output::y);
  run_experts(
      call, x.data(), T, D, routing, call.value(name::E),
      [&](int64_t index) { return expert_of(gate_up, down, index, D, I, group_size); }, std::move(shared),
      residual.data(), y.data());
  y.finish();
}

}  // namespace piccard::moe_int4
