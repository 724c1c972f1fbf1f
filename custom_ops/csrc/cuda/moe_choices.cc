#include "moe_choices.h"

namespace piccard::cuda {

SortedChoices::SortedChoices(Gpu& gpu, const MoeSizes& sizes, int64_t block_m, const void* experts)
    : gpu_(gpu), sizes_(sizes), experts_(experts) {
  using Sort = kernels::moe_sort;
  const kernels::moe_experts_workspace workspace{.BLOCK_M = block_m,
                                                 .element_bytes = Gpu::kElementBytes,
                                                 .experts = sizes.experts,
                                                 .hidden = sizes.hidden,
                                                 .intermediate = sizes.intermediate,
                                                 .pairs = sizes.pairs};
  sorted = gpu.scratch(workspace.sorted_bytes());
  tile_experts = gpu.scratch(workspace.tile_experts_bytes());
  tiles = gpu.scratch(workspace.tiles_bytes());
  inner = gpu.scratch(workspace.inner_bytes());
  outputs = gpu.scratch(workspace.outputs_bytes());
  const Sort::Dims dims{.block_m = block_m, .experts = sizes.experts, .pairs = sizes.pairs};
  gpu.launch<Sort>(gpu.choose<Sort>(dims), dims,
                   {.experts_ptr = experts,
                    .sorted_ptr = sorted,
                    .tile_experts_ptr = tile_experts,
                    .tiles_ptr = tiles,
                    .pairs = narrow(sizes.pairs),
                    .experts = narrow(sizes.experts)});
}

void SortedChoices::combine(void* y) const {
  using Combine = kernels::moe_combine;
  const Combine::Dims dims{.hidden = sizes_.hidden, .tokens = sizes_.tokens};
  gpu_.launch<Combine>(gpu_.choose<Combine>(dims), dims,
                       {.outputs_ptr = outputs,
                        .experts_ptr = experts_,
                        .out_ptr = y,
                        .hidden = narrow(sizes_.hidden),
                        .experts = narrow(sizes_.experts),
                        .top_k = narrow(sizes_.top_k)});
}

}  // namespace piccard::cuda
