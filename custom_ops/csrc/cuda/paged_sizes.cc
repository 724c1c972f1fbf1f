#include "paged_sizes.h"

namespace piccard::cuda {

GroupedPlan grouped_plan(const Gpu& gpu, const Leading& leading, const GroupedSizes& sizes) {
  using Decode = kernels::grouped_decode;
  GroupedPlan plan{leading};
  if (plan.sequences == 0) return plan;
  plan.lines = sizes.group() * plan.queries;
  plan.row = &gpu.choose<Decode>({.key_heads = sizes.key_heads,
                                  .page = sizes.page,
                                  .rows = plan.lines,
                                  .sequences = plan.sequences,
                                  .width = sizes.width});
  plan.workers = workers_for(gpu, *plan.row, sizes.key_heads * ceil_div(plan.lines, plan.row->constants[Decode::BLOCK_ROWS]));
  return plan;
}

}  // namespace piccard::cuda
