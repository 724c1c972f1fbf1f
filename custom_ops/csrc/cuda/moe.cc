#include "gpu.h"
#include "operators.generated.h"

namespace piccard::moe {

namespace {

// The sizes of one run, and what several launches are given.
struct Sizes {
  int64_t tokens, pairs, experts, hidden, intermediate, top_k;

  explicit Sizes(const Call& call)
      : tokens(call.value(name::T)),
        pairs(tokens * call.value(name::K)),
        experts(call.value(name::E)),
        hidden(call.value(name::D)),
        intermediate(call.value(name::I)),
        top_k(call.value(name::K)) {}
  int64_t gate_up_stride() const { return 2 * intermediate * hidden; }
  int64_t down_stride() const { return hidden * intermediate; }
};

// Few rows: a chosen expert's rows are read as matrix-vector products. False where no row is for so many.
bool run_few(Call& call, cuda::Gpu& gpu, const Sizes& sizes, void* y) {
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
                  .expert_stride = sizes.gate_up_stride(),
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
                    .expert_stride = sizes.down_stride(),
                    .hidden = cuda::narrow(sizes.hidden),
                    .intermediate = cuda::narrow(sizes.intermediate),
                    .experts = cuda::narrow(sizes.experts),
                    .top_k = cuda::narrow(sizes.top_k)});
  return true;
}

// Choices in the order of their experts, and products over tiles of them.
void run_sorted(Call& call, cuda::Gpu& gpu, const Sizes& sizes, void* y) {
  using Sort = kernels::moe_sort;
  using Up = kernels::moe_gate_up;
  using Down = kernels::moe_down;
  using Combine = kernels::moe_combine;
  const int64_t load = ceil_div(sizes.pairs, sizes.experts);
  const Up::Dims up_dims{
      .experts = sizes.experts, .intermediate = sizes.intermediate, .load = load, .pairs = sizes.pairs};
  const Down::Dims down_dims{.experts = sizes.experts, .hidden = sizes.hidden, .load = load, .pairs = sizes.pairs};
  const Row &up = gpu.choose<Up>(up_dims), &down = gpu.choose<Down>(down_dims);
  const int64_t block_m = up.constants[Up::BLOCK_M];
  const Sort::Dims sort_dims{.block_m = block_m, .experts = sizes.experts, .pairs = sizes.pairs};
  const Combine::Dims combine_dims{.hidden = sizes.hidden, .tokens = sizes.tokens};
  const kernels::moe_experts_workspace workspace{.BLOCK_M = block_m,
                                                 .element_bytes = gpu.kElementBytes,
                                                 .experts = sizes.experts,
                                                 .hidden = sizes.hidden,
                                                 .intermediate = sizes.intermediate,
                                                 .pairs = sizes.pairs};
  void *const sorted = gpu.scratch(workspace.sorted_bytes()), *const tile_experts = gpu.scratch(workspace.tile_experts_bytes());
  void *const tiles = gpu.scratch(workspace.tiles_bytes()), *const inner = gpu.scratch(workspace.inner_bytes());
  void* const outputs = gpu.scratch(workspace.outputs_bytes());
  const void* experts = call.input(input::experts).data;
  const int32_t hidden = cuda::narrow(sizes.hidden), intermediate = cuda::narrow(sizes.intermediate);
  const int32_t count = cuda::narrow(sizes.experts), top_k = cuda::narrow(sizes.top_k);
  gpu.launch<Sort>(gpu.choose<Sort>(sort_dims), sort_dims,
                   {.experts_ptr = experts,
                    .sorted_ptr = sorted,
                    .tile_experts_ptr = tile_experts,
                    .tiles_ptr = tiles,
                    .pairs = cuda::narrow(sizes.pairs),
                    .experts = count});
  gpu.launch<Up>(up, up_dims,
                 {.x_ptr = call.input(input::x).data,
                  .weight_ptr = call.input(input::gate_up).data,
                  .inner_ptr = inner,
                  .sorted_ptr = sorted,
                  .tile_experts_ptr = tile_experts,
                  .tiles_ptr = tiles,
                  .x_stride = hidden,
                  .expert_stride = sizes.gate_up_stride(),
                  .hidden = hidden,
                  .intermediate = intermediate,
                  .top_k = top_k});
  gpu.launch<Down>(down, down_dims,
                   {.inner_ptr = inner,
                    .weight_ptr = call.input(input::down).data,
                    .weights_ptr = call.input(input::weights).data,
                    .outputs_ptr = outputs,
                    .sorted_ptr = sorted,
                    .tile_experts_ptr = tile_experts,
                    .tiles_ptr = tiles,
                    .expert_stride = sizes.down_stride(),
                    .hidden = hidden,
                    .intermediate = intermediate});
  gpu.launch<Combine>(gpu.choose<Combine>(combine_dims), combine_dims,
                      {.outputs_ptr = outputs,
                       .experts_ptr = experts,
                       .out_ptr = y,
                       .hidden = hidden,
                       .experts = count,
                       .top_k = top_k});
}

}  // namespace

void compute(Call& call) {
  cuda::Gpu gpu(call);
  const Sizes sizes(call);
  void* const y = call.output(output::y).data;
  if (!run_few(call, gpu, sizes, y)) run_sorted(call, gpu, sizes, y);
}

}  // namespace piccard::moe
