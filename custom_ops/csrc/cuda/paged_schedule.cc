#include "operators.generated.h"
#include "paged_sizes.h"

namespace piccard::paged_schedule {

void compute(Call& call) {
  cuda::Gpu gpu(call);
  const int64_t R = call.value(name::R);
  const int32_t* host_batch = call.input(input::host_batch).as<int32_t>();
  const cuda::GroupedSizes sizes{call.value(name::num_heads), call.value(name::num_key_value_heads),
                                 call.value(name::head_dim), call.value(name::S)};
  const cuda::GroupedPlan plan =
      cuda::grouped_plan(gpu, cuda::leading(host_batch, R, cuda::rows_of(host_batch, R)), sizes);
  void* const target = call.output(output::plan).data;
  const void* lengths = call.input(input::context_lengths).data;
  if (plan.sequences > 0) cuda::schedule(gpu, plan.sequences, plan.workers, plan.tile(), lengths, target);
}

}  // namespace piccard::paged_schedule
