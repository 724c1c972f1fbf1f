#include "moe_choices.h"
#include "operators.generated.h"

namespace piccard::moe {

namespace {

// Few rows: a chosen expert's rows are read as matrix-vector products. False where no row is for so many.
bool run_few(Call& call, cuda::Gpu& gpu, const cuda::MoeSizes& sizes, void* y) {
  using Up = kernels::moe_few_gate_up;
  using Down = kernels::moe_few_down;
  const Up::Dims up_dims{.intermediate = sizes.intermediate, .pairs = sizes.pairs, .tokens = sizes.tokens};
  const Down::Dims down_dims{.hidden = sizes.hidden, .intermediate = sizes.intermediate, .tokens = sizes.tokens};
  const Row *up = gpu.seek<Up>(up_dims), *down = gpu.seek<Down>(down_dims);
  if (up == nullptr || down == nullptr) return false;
  void* const inner = gpu.scratch(kernels::moe_experts_few_workspace{
      .element_bytes = gpu.kElementBytes, .intermediate = sizes.intermediate, .pairs = sizes.pairs}
                                      .inner_bytes());
  const void* experts = call.input(input::experts).data;
  gpu.launch<Up>(*up, up_dims,
                 {.x_ptr = call.input(input::x).data,
                  .weight_ptr = call.input(input::gate_up).data,
                  .experts_ptr = experts,
                  .inner_ptr = inner,
                  .x_stride = cuda::narrow(sizes.hidden),
                  .expert_stride = 2 * sizes.intermediate * sizes.hidden,
                  .hidden = cuda::narrow(sizes.hidden),
                  .intermediate = cuda::narrow(sizes.intermediate),
                  .experts = cuda::narrow(sizes.experts),
                  .top_k = cuda::narrow(sizes.top_k)});
  gpu.launch<Down>(*down, down_dims,
                   {.inner_ptr = inner,
                    .weight_ptr = call.input(input::down).data,
                    .weights_ptr = call.input(input::weights).data,
                    .experts_ptr = experts,
                    .out_ptr = y,
                    .expert_stride = sizes.hidden * sizes.intermediate,
                    .hidden = cuda::narrow(sizes.hidden),
                    .intermediate = cuda::narrow(sizes.intermediate),
                    .experts = cuda::narrow(sizes.experts),
                    .top_k = cuda::narrow(sizes.top_k)});
  return true;
}

// Products over tiles of sorted choices.
void run_sorted(Call& call, cuda::Gpu& gpu, const cuda::MoeSizes& sizes, void* y) {
  using Up = kernels::moe_gate_up;
  using Down = kernels::moe_down;
  const Up::Dims up_dims{
      .experts = sizes.experts, .intermediate = sizes.intermediate, .load = sizes.load(), .pairs = sizes.pairs};
  const Down::Dims down_dims{
      .experts = sizes.experts, .hidden = sizes.hidden, .load = sizes.load(), .pairs = sizes.pairs};
  const Row &up = gpu.choose<Up>(up_dims), &down = gpu.choose<Down>(down_dims);
  const cuda::SortedChoices choices(gpu, sizes, up.constants[Up::BLOCK_M], call.input(input::experts).data);
  const int32_t hidden = cuda::narrow(sizes.hidden), intermediate = cuda::narrow(sizes.intermediate);
  gpu.launch<Up>(up, up_dims,
                 {.x_ptr = call.input(input::x).data,
                  .weight_ptr = call.input(input::gate_up).data,
                  .inner_ptr = choices.inner,
                  .sorted_ptr = choices.sorted,
                  .tile_experts_ptr = choices.tile_experts,
                  .tiles_ptr = choices.tiles,
                  .x_stride = hidden,
                  .expert_stride = 2 * sizes.intermediate * sizes.hidden,
                  .hidden = hidden,
                  .intermediate = intermediate,
                  .top_k = cuda::narrow(sizes.top_k)});
  gpu.launch<Down>(down, down_dims,
                   {.inner_ptr = choices.inner,
                    .weight_ptr = call.input(input::down).data,
                    .weights_ptr = call.input(input::weights).data,
                    .outputs_ptr = choices.outputs,
                    .sorted_ptr = choices.sorted,
                    .tile_experts_ptr = choices.tile_experts,
                    .tiles_ptr = choices.tiles,
                    .expert_stride = sizes.hidden * sizes.intermediate,
                    .hidden = hidden,
                    .intermediate = intermediate});
  choices.combine(y);
}

}  // namespace

void compute(Call& call) {
  cuda::Gpu gpu(call);
  const cuda::MoeSizes sizes(call.value(name::T), call.value(name::K), call.value(name::E), call.value(name::D),
                             call.value(name::I));
  void* const y = call.output(output::y).data;
  if (!run_few(call, gpu, sizes, y)) run_sorted(call, gpu, sizes, y);
}

}  // namespace piccard::moe
