#include "error.h"
#include "int4_weight.h"
#include "moe_choices.h"
#include "operators.generated.h"

namespace piccard::moe_int4 {

namespace {

// Kernels of tiles take the size of a group, those that keep unpacked weights in registers the shift that it is.
template <typename Arguments>
auto set_group(Arguments& arguments, const cuda::Int4Weight& weight, int) -> decltype(arguments.group_shift, void()) {
  arguments.group_shift = weight.group_shift();
}
template <typename Arguments>
auto set_group(Arguments& arguments, const cuda::Int4Weight& weight, long) -> decltype(arguments.group_size, void()) {
  arguments.group_size = cuda::narrow(weight.group_size);
}

template <typename Up>
typename Up::Dims up_dims(const cuda::MoeSizes& sizes) {
  return {.experts = sizes.experts, .intermediate = sizes.intermediate, .load = sizes.load(), .pairs = sizes.pairs};
}
template <typename Down>
typename Down::Dims down_dims(const cuda::MoeSizes& sizes) {
  return {.experts = sizes.experts, .hidden = sizes.hidden, .load = sizes.load(), .pairs = sizes.pairs};
}

struct Experts {
  Call& call;
  cuda::Gpu& gpu;
  const cuda::MoeSizes& sizes;
  const cuda::Int4Weight &gate_up, &down;

  template <typename Up, typename Down>
  void multiply(const Row& up_row, const Row& down_row) const {
    const cuda::SortedChoices choices(gpu, sizes, up_row.constants[Up::BLOCK_M], call.input(input::experts).data);
    typename Up::Arguments up_arguments{.x_ptr = call.input(input::x).data,
                                        .weight_ptr = gate_up.q,
                                        .scales_ptr = gate_up.scales,
                                        .zeros_ptr = gate_up.zeros,
                                        .inner_ptr = choices.inner,
                                        .sorted_ptr = choices.sorted,
                                        .tile_experts_ptr = choices.tile_experts,
                                        .tiles_ptr = choices.tiles,
                                        .blocks = gate_up.blocks(),
                                        .groups = cuda::narrow(gate_up.groups)};
    set_group(up_arguments, gate_up, 0);
    up_arguments.zero_row = gate_up.zero_row;
    up_arguments.zero_step = gate_up.zero_step;
    up_arguments.intermediate = cuda::narrow(sizes.intermediate);
    up_arguments.top_k = cuda::narrow(sizes.top_k);
    gpu.launch<Up>(up_row, up_dims<Up>(sizes), up_arguments);
    typename Down::Arguments down_arguments{.inner_ptr = choices.inner,
                                            .weight_ptr = down.q,
                                            .scales_ptr = down.scales,
                                            .zeros_ptr = down.zeros,
                                            .weights_ptr = call.input(input::weights).data,
                                            .outputs_ptr = choices.outputs,
                                            .sorted_ptr = choices.sorted,
                                            .tile_experts_ptr = choices.tile_experts,
                                            .tiles_ptr = choices.tiles,
                                            .blocks = down.blocks(),
                                            .groups = cuda::narrow(down.groups)};
    set_group(down_arguments, down, 0);
    down_arguments.zero_row = down.zero_row;
    down_arguments.zero_step = down.zero_step;
    down_arguments.hidden = cuda::narrow(sizes.hidden);
    gpu.launch<Down>(down_row, down_dims<Down>(sizes), down_arguments);
    choices.combine(call.output(output::y).data);
  }
};

}  // namespace

void compute(Call& call) {
  using Up = kernels::moe_gate_up_int4;
  using Down = kernels::moe_down_int4;
  using UpRows = kernels::moe_gate_up_int4_rows;
  using DownRows = kernels::moe_down_int4_rows;
  cuda::Gpu gpu(call);
  const int64_t group_size = call.value(name::group_size);
  const cuda::MoeSizes sizes(call.value(name::T), call.value(name::K), call.value(name::E), call.value(name::D),
                             call.value(name::P) / 2);
  const cuda::Int4Weight gate_up(gpu, call, input::gate_up, sizes.hidden, group_size);
  const cuda::Int4Weight down(gpu, call, input::down, sizes.intermediate, group_size);
  if (!gate_up.blocked() || !down.blocked()) {
    fail("packed experts have D = ", sizes.hidden, " and P // 2 = ", sizes.intermediate, " columns in groups of ",
         group_size, ": on CUDA they have to be multiples of 32, in groups of 32, 64 or 128");
  }
  const Experts experts{call, gpu, sizes, gate_up, down};
  const Row* const up_rows = gpu.seek<UpRows>(up_dims<UpRows>(sizes));
  const Row* const down_rows = gpu.seek<DownRows>(down_dims<DownRows>(sizes));
  if (up_rows != nullptr && down_rows != nullptr) return experts.multiply<UpRows, DownRows>(*up_rows, *down_rows);
  experts.multiply<Up, Down>(gpu.choose<Up>(up_dims<Up>(sizes)), gpu.choose<Down>(down_dims<Down>(sizes)));
}

}  // namespace piccard::moe_int4
