#include "mla_plan.h"
#include "operators.generated.h"

namespace piccard::mla_schedule {

void compute(Call& call) {
  cuda::Gpu gpu(call);
  const int64_t R = call.value(name::R), rotary = call.value(name::qk_rope_head_dim);
  const int32_t* host_batch = call.input(input::host_batch).as<int32_t>();
  const cuda::Leading leading = cuda::leading(host_batch, R, cuda::rows_of(host_batch, R));
  const cuda::DecodePlan plan = cuda::decode_plan(gpu, leading, call.value(name::num_heads), call.value(name::S),
                                                  call.value(name::D) - rotary, rotary);
  void* const target = call.output(output::plan).data;
  const void* lengths = call.input(input::context_lengths).data;
  if (plan.sequences > 0) cuda::schedule(gpu, plan.sequences, plan.workers, plan.tile, lengths, target);
}

}  // namespace piccard::mla_schedule
