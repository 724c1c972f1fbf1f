#include "error.h"
#include "mla_decode.h"
#include "mla_prefill.h"

namespace piccard::mla_paged_attention {

namespace {

using cuda::at;
using cuda::DecodePlan;
using cuda::Gpu;
using cuda::narrow;

// Rotates queries and keys, normalises latents, and writes the step's entries.
void rotate(Call& call, Gpu& gpu, const Sizes& sizes, const void* q, void* target, int64_t token_stride, int64_t head_stride) {
  using Rope = kernels::rope_cache;
  const Rope::Dims dims{.half = sizes.rope / 2,
                        .heads = sizes.heads,
                        .interleaved = call.value(name::interleaved),
                        .rank = sizes.rank,
                        .tokens = sizes.T};
  gpu.launch<Rope>(gpu.choose<Rope>(dims), dims,
                   {.q_ptr = at(q, sizes.nope),
                    .out_ptr = target,
                    .latent_ptr = call.input(input::entries).data,
                    .weight_ptr = call.input(input::latent_norm).data,
                    .cache_ptr = call.output(output::cache_out).data,
                    .table_ptr = call.input(input::rotations).data,
                    .positions_ptr = call.input(input::positions).data,
                    .slots_ptr = call.input(input::slots).data,
                    .q_token_stride = narrow(sizes.heads * sizes.q_width()),
                    .q_head_stride = narrow(sizes.q_width()),
                    .out_token_stride = narrow(token_stride),
                    .out_head_stride = narrow(head_stride),
                    .latent_stride = narrow(sizes.entry()),
                    .cache_stride = narrow(sizes.entry()),
                    .heads = narrow(sizes.heads),
                    .rank = narrow(sizes.rank),
                    .half = narrow(sizes.rope / 2),
                    .eps = call.real(real::latent_epsilon)});
}

}  // namespace

void compute(Call& call) {
  const Sizes sizes(call);
  const int64_t R = call.value(name::R);
  Gpu gpu(call);
  const cuda::Leading leading = cuda::leading(call.input(input::host_batch).as<int32_t>(), R, sizes.T);
  const DecodePlan plan = cuda::decode_plan(gpu, leading, sizes.heads, sizes.page, sizes.rank, sizes.rope);
  void* const y = call.output(output::y).data;
  const void* q = call.input(input::q).data;
  if (plan.sequences == R) {
    void* const rotated = gpu.scratch_elements(sizes.T * sizes.heads * sizes.rope);
    rotate(call, gpu, sizes, q, rotated, sizes.heads * sizes.rope, sizes.rope);
    return decode(call, gpu, sizes, plan, {q, rotated, sizes.rope}, y);
  }
  // Long sequences want their queries whole. The input itself is another node's, or the caller's.
  const int64_t line = sizes.heads * sizes.q_width();
  void* const whole = gpu.scratch_elements(sizes.T * line);
  gpu.copy(whole, q, sizes.T * line * gpu.kElementBytes);
  rotate(call, gpu, sizes, whole, at(whole, sizes.nope), line, sizes.q_width());
  if (plan.sequences > 0) decode(call, gpu, sizes, plan, {whole, at(whole, sizes.nope), sizes.q_width()}, y);
  prefill(call, gpu, sizes, plan.sequences, plan.rows, whole, y);
}

}  // namespace piccard::mla_paged_attention
