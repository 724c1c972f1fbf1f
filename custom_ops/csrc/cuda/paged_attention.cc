#include "error.h"
#include "operators.generated.h"
#include "paged_sizes.h"

namespace piccard::paged_attention {

namespace {

using cuda::Gpu;
using cuda::GroupedPlan;
using cuda::GroupedSizes;
using cuda::narrow;

constexpr int64_t kFloat = sizeof(float);

// Normalises and rotates queries and keys, and writes the step's entries.
void rotate(Call& call, Gpu& gpu, const GroupedSizes& sizes, void* rotated) {
  using Rope = kernels::grouped_rope_cache;
  const Tensor &q = call.input(input::q), &k = call.input(input::k);
  const Tensor &q_norm = call.input(input::q_norm), &k_norm = call.input(input::k_norm);
  if (q_norm.present() != k_norm.present()) fail("inputs q_norm and k_norm have to be given both or neither");
  const Rope::Dims dims{.half = sizes.width / 2,
                        .heads = sizes.heads,
                        .interleaved = call.value(name::interleaved),
                        .key_heads = sizes.key_heads,
                        .norm = q_norm.present(),
                        .tokens = call.value(name::T)};
  const int32_t q_row = narrow(sizes.heads * sizes.width), k_row = narrow(sizes.key_heads * sizes.width);
  const int32_t width = narrow(sizes.width);
  gpu.launch<Rope>(gpu.choose<Rope>(dims), dims,
                   {.q_ptr = q.data,
                    .out_ptr = rotated,
                    .k_ptr = k.data,
                    .v_ptr = call.input(input::v).data,
                    // Without norms nothing is read through these.
                    .q_weight_ptr = q_norm.present() ? q_norm.data : q.data,
                    .k_weight_ptr = k_norm.present() ? k_norm.data : k.data,
                    .keys_ptr = call.output(output::key_cache_out).data,
                    .values_ptr = call.output(output::value_cache_out).data,
                    .table_ptr = call.input(input::rotations).data,
                    .positions_ptr = call.input(input::positions).data,
                    .slots_ptr = call.input(input::slots).data,
                    .q_token_stride = q_row,
                    .q_head_stride = width,
                    .out_token_stride = q_row,
                    .out_head_stride = width,
                    .k_token_stride = k_row,
                    .k_head_stride = width,
                    .v_token_stride = k_row,
                    .v_head_stride = width,
                    .keys_stride = k_row,
                    .values_stride = k_row,
                    .heads = narrow(sizes.heads),
                    .key_heads = narrow(sizes.key_heads),
                    .half = narrow(sizes.width / 2),
                    .eps = call.real(real::norm_epsilon)});
}

void decode(Call& call, Gpu& gpu, const GroupedSizes& sizes, const GroupedPlan& plan, const void* q, void* y, void* lse) {
  using Decode = kernels::grouped_decode;
  using Merge = kernels::mla_merge;
  const kernels::grouped_decode_workspace workspace{.WIDTH = plan.block_width(),
                                                    .key_heads = sizes.key_heads,
                                                    .rows = plan.lines,
                                                    .sequences = plan.sequences,
                                                    .workers = plan.workers};
  void *const parts = gpu.scratch(workspace.parts_bytes()), *const part_lse = gpu.scratch(workspace.part_lse_bytes());
  const void *lengths = call.input(input::context_lengths).data, *starts = call.input(input::query_starts).data;
  const void* const cut = cuda::plan_of(gpu, call.input(input::plan), plan.sequences, plan.workers, plan.tile(), lengths,
                                        workspace.plan_bytes());
  const Tensor& tables = call.input(input::block_tables);
  const int32_t part_rows = narrow(sizes.key_heads * plan.lines), row = narrow(sizes.key_heads * sizes.width);
  const Decode::Dims dims{.key_heads = sizes.key_heads,
                          .page = sizes.page,
                          .rows = plan.lines,
                          .sequences = plan.sequences,
                          .width = sizes.width,
                          .workers = plan.workers};
  gpu.launch<Decode>(*plan.row, dims,
                     {.q_ptr = q,
                      .keys_ptr = call.input(input::key_cache).data,
                      .values_ptr = call.input(input::value_cache).data,
                      .table_ptr = tables.data,
                      .table_rows_ptr = call.input(input::table_rows).data,
                      .lengths_ptr = lengths,
                      .query_starts_ptr = starts,
                      .plan_ptr = cut,
                      .out_ptr = y,
                      .lse_ptr = lse,
                      .part_ptr = parts,
                      .part_lse_ptr = part_lse,
                      .q_token_stride = narrow(sizes.heads * sizes.width),
                      .q_head_stride = narrow(sizes.width),
                      .keys_stride = row,
                      .values_stride = row,
                      .table_stride = narrow(tables.shape.dims[1]),
                      .sequences = narrow(plan.sequences),
                      .key_heads = narrow(sizes.key_heads),
                      .group = narrow(sizes.group()),
                      .width = narrow(sizes.width),
                      .part_rows = part_rows,
                      .scale = call.real(real::scale)});
  const Merge::Dims merged{.rank = plan.block_width(), .rows = part_rows, .sequences = plan.sequences};
  gpu.launch<Merge>(gpu.choose<Merge>(merged), merged,
                    {.query_starts_ptr = starts,
                     .plan_ptr = cut,
                     .out_ptr = y,
                     .lse_ptr = lse,
                     .part_ptr = parts,
                     .part_lse_ptr = part_lse,
                     .heads = narrow(sizes.heads),
                     .rank = narrow(sizes.width),
                     .part_rows = part_rows});
}

// The sequences from `first` on, whose keys are read from the cache as they lie.
void prefill(Call& call, Gpu& gpu, const GroupedSizes& sizes, int64_t first, const void* q, void* y, void* lse) {
  using Prefill = kernels::grouped_prefill;
  const int64_t R = call.value(name::R);
  const int32_t* host_batch = call.input(input::host_batch).as<int32_t>();
  int64_t longest = 0;
  for (int64_t r = first; r < R; ++r) longest = max(longest, int64_t{host_batch[2 * r]});
  const Tensor& tables = call.input(input::block_tables);
  const int32_t row = narrow(sizes.key_heads * sizes.width);
  const Prefill::Dims dims{.group = sizes.group(),
                           .key_heads = sizes.key_heads,
                           .longest = longest,
                           .page = sizes.page,
                           .sequences = R - first,
                           .width = sizes.width};
  gpu.launch<Prefill>(gpu.choose<Prefill>(dims), dims,
                      {.q_ptr = q,
                       .keys_ptr = call.input(input::key_cache).data,
                       .values_ptr = call.input(input::value_cache).data,
                       .table_ptr = tables.data,
                       .table_rows_ptr = call.input(input::table_rows).as<int32_t>() + first,
                       .lengths_ptr = call.input(input::context_lengths).as<int32_t>() + first,
                       .query_starts_ptr = call.input(input::query_starts).as<int32_t>() + first,
                       .out_ptr = y,
                       .lse_ptr = lse,
                       .q_token_stride = narrow(sizes.heads * sizes.width),
                       .q_head_stride = narrow(sizes.width),
                       .keys_stride = row,
                       .values_stride = row,
                       .table_stride = narrow(tables.shape.dims[1]),
                       .key_heads = narrow(sizes.key_heads),
                       .group = narrow(sizes.group()),
                       .width = narrow(sizes.width),
                       .scale = call.real(real::scale)});
}

}  // namespace

void compute(Call& call) {
  const int64_t R = call.value(name::R), T = call.value(name::T);
  const GroupedSizes sizes{call.value(name::num_heads), call.value(name::num_key_value_heads), call.value(name::head_dim),
                           call.value(name::S)};
  Gpu gpu(call);
  const cuda::Leading leading = cuda::leading(call.input(input::host_batch).as<int32_t>(), R, T);
  const GroupedPlan plan = cuda::grouped_plan(gpu, leading, sizes);
  void* const y = call.output(output::y).data;
  void* const rotated = gpu.scratch_elements(T * sizes.heads * sizes.width);
  void* const lse = gpu.scratch(T * sizes.heads * kFloat);
  rotate(call, gpu, sizes, rotated);
  if (plan.sequences > 0) decode(call, gpu, sizes, plan, rotated, y, lse);
  if (plan.sequences < R) prefill(call, gpu, sizes, plan.sequences, rotated, y, lse);
}

}  // namespace piccard::paged_attention
