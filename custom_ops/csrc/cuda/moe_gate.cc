#include "error.h"
#include "gpu.h"
#include "operators.generated.h"

namespace piccard::moe_gate {

void compute(Call& call) {
  using Logits = kernels::gate_logits;
  using Choose = kernels::gate_choose;
  const int64_t T = call.value(name::T), E = call.value(name::E), D = call.value(name::D);
  const int64_t groups = call.value(name::n_group), method = call.value(name::topk_method);
  const Tensor &x = call.input(input::x), &weight = call.input(input::weight), &bias = call.input(input::bias);
  const Tensor& slots = call.input(input::slots);
  if (method == topk_method::noaux_tc && !bias.present()) fail("topk_method noaux_tc needs the input bias");
  if (method == topk_method::greedy && groups != 1) fail("topk_method greedy knows no groups: n_group has to be 1");
  cuda::Gpu gpu(call);
  const Logits::Dims dims{.experts = E, .tokens = T};
  const Row& row = gpu.choose<Logits>(dims);
  const int64_t splits = row.constants[Logits::SPLITS];
  void* const logits = gpu.scratch(
      kernels::moe_gate_workspace{.SPLITS = splits, .experts = E, .tokens = T}.logits_bytes());
  gpu.launch<Logits>(row, dims,
                     {.x_ptr = x.data,
                      .weight_ptr = weight.data,
                      .logits_ptr = logits,
                      .x_stride = cuda::narrow(D),
                      .tokens = cuda::narrow(T),
                      .experts = cuda::narrow(E),
                      .hidden = cuda::narrow(D)});
  const Choose::Dims wanted{.experts = E,
                            .groups = groups,
                            .method = method,
                            .normalize = call.value(name::norm_topk_prob),
                            .shared = call.value(name::n_shared_experts),
                            .tokens = T,
                            .top_k = call.value(name::num_experts_per_tok),
                            .topk_groups = call.value(name::topk_group)};
  gpu.launch<Choose>(gpu.choose<Choose>(wanted), wanted,
                     {.logits_ptr = logits,
                      .bias_ptr = bias.present() ? bias.data : weight.data,
                      .slots_ptr = slots.data,
                      .weights_ptr = call.output(output::weights).data,
                      .experts_ptr = call.output(output::experts).data,
                      .tokens = cuda::narrow(T),
                      .experts = cuda::narrow(E),
                      .group_size = cuda::narrow(E / groups),
                      .scaling = call.real(real::routed_scaling_factor),
                      .splits = cuda::narrow(splits),
                      .padded = slots.present() ? 1 : 0});
}

}  // namespace piccard::moe_gate
