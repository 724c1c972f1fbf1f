#include "error.h"
#include "int4_weight.h"
#include "moe_choices.h"
#include "operators.generated.h"

namespace piccard::moe_int4 {

void compute(Call& call) {
  using Up = kernels::moe_gate_up_int4;
  using Down = kernels::moe_down_int4;
  cuda::Gpu gpu(call);
  const int64_t group_size = call.value(name::group_size);
  const cuda::MoeSizes sizes(call.value(name::T), call.value(name::K), call.value(name::E), call.value(name::D),
                             call.value(name::P) / 2);
  const cuda::Int4Weight gate_up(gpu, call, input::gate_up, sizes.hidden, group_size);
  const cuda::Int4Weight down_weight(gpu, call, input::down, sizes.intermediate, group_size);
  if (!gate_up.blocked() || !down_weight.blocked()) {
    fail("packed experts have D = ", sizes.hidden, " and P // 2 = ", sizes.intermediate, " columns in groups of ",
         group_size, ": on CUDA they have to be multiples of 32, in groups of 32, 64 or 128");
  }
  const Up::Dims up_dims{
      .experts = sizes.experts, .intermediate = sizes.intermediate, .load = sizes.load(), .pairs = sizes.pairs};
  const Down::Dims down_dims{
      .experts = sizes.experts, .hidden = sizes.hidden, .load = sizes.load(), .pairs = sizes.pairs};
  const Row &up = gpu.choose<Up>(up_dims), &down = gpu.choose<Down>(down_dims);
  const cuda::SortedChoices choices(gpu, sizes, up.constants[Up::BLOCK_M], call.input(input::experts).data);
  gpu.launch<Up>(up, up_dims,
                 {.x_ptr = call.input(input::x).data,
                  .weight_ptr = gate_up.q,
                  .scales_ptr = gate_up.scales,
                  .zeros_ptr = gate_up.zeros,
                  .inner_ptr = choices.inner,
                  .sorted_ptr = choices.sorted,
                  .tile_experts_ptr = choices.tile_experts,
                  .tiles_ptr = choices.tiles,
                  .blocks = gate_up.blocks(),
                  .groups = cuda::narrow(gate_up.groups),
                  .group_size = cuda::narrow(group_size),
                  .zero_row = gate_up.zero_row,
                  .zero_step = gate_up.zero_step,
                  .intermediate = cuda::narrow(sizes.intermediate),
                  .top_k = cuda::narrow(sizes.top_k)});
  gpu.launch<Down>(down, down_dims,
                   {.inner_ptr = choices.inner,
                    .weight_ptr = down_weight.q,
                    .scales_ptr = down_weight.scales,
                    .zeros_ptr = down_weight.zeros,
                    .weights_ptr = call.input(input::weights).data,
                    .outputs_ptr = choices.outputs,
                    .sorted_ptr = choices.sorted,
                    .tile_experts_ptr = choices.tile_experts,
                    .tiles_ptr = choices.tiles,
                    .blocks = down_weight.blocks(),
                    .groups = cuda::narrow(down_weight.groups),
                    .group_size = cuda::narrow(group_size),
                    .zero_row = down_weight.zero_row,
                    .zero_step = down_weight.zero_step,
                    .hidden = cuda::narrow(sizes.hidden)});
  choices.combine(call.output(output::y).data);
}

}  // namespace piccard::moe_int4
