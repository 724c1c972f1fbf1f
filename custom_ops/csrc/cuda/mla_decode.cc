#include "mla_decode.h"

namespace piccard::mla_paged_attention {

namespace {

using cuda::at;
using cuda::DecodePlan;
using cuda::Gpu;
using cuda::narrow;

template <typename K>
struct Kind {
  using type = K;
};

struct Strided {
  const void* data;
  int64_t token_stride, head_stride;
};

// out[t, h] = x[t, h] W[h], a head's weight `both` rows of kv_b apart.
void multiply_heads(Gpu& gpu, const Sizes& sizes, int64_t tokens, const Strided& x, const void* weight, const Strided& out,
                    int64_t columns, int64_t depth, bool by_column) {
  using Gemm = kernels::head_gemm;
  const Gemm::Dims dims{.by_column = by_column, .columns = columns, .heads = sizes.heads, .tokens = tokens};
  gpu.launch<Gemm>(gpu.choose<Gemm>(dims), dims,
                   {.x_ptr = x.data,
                    .weight_ptr = weight,
                    .out_ptr = out.data,
                    .x_token_stride = narrow(x.token_stride),
                    .x_head_stride = narrow(x.head_stride),
                    .out_token_stride = narrow(out.token_stride),
                    .out_head_stride = narrow(out.head_stride),
                    .weight_stride = narrow(sizes.both() * sizes.rank),
                    .tokens = narrow(tokens),
                    .columns = narrow(columns),
                    .depth = narrow(depth)});
}

}  // namespace

void decode(Call& call, Gpu& gpu, const Sizes& sizes, const DecodePlan& plan, const Queries& queries, void* y) {
  using Merge = kernels::mla_merge;
  const void *kv_b = call.input(input::kv_b).data, *starts = call.input(input::query_starts).data;
  const void* lengths = call.input(input::context_lengths).data;
  const Tensor& tables = call.input(input::block_tables);
  const int64_t latents = sizes.heads * sizes.rank, lines = sizes.heads * plan.queries;
  const int64_t rank_block = plan.rank_block;
  const kernels::mla_decode_workspace workspace{.BLOCK_ROWS = plan.block_rows,
                                                .RANK = rank_block,
                                                .rows = lines,
                                                .sequences = plan.sequences,
                                                .workers = plan.workers};
  void *const absorbed = gpu.scratch_elements(plan.rows * latents), *const mixed = gpu.scratch_elements(plan.rows * latents);
  void* const lse = gpu.scratch(plan.rows * sizes.heads * static_cast<int64_t>(sizeof(float)));
  void *const parts = gpu.scratch(workspace.parts_bytes()), *const part_lse = gpu.scratch(workspace.part_lse_bytes());
  const void* const cut = cuda::plan_of(gpu, call.input(input::plan), plan.sequences, plan.workers, plan.tile, lengths,
                                        workspace.plan_bytes());
  multiply_heads(gpu, sizes, plan.rows, {queries.nope, sizes.heads * sizes.q_width(), sizes.q_width()}, kv_b,
                 {absorbed, latents, sizes.rank}, sizes.rank, sizes.nope, false);
  const auto attend = [&](auto kernel, const auto& dims) {
    using Decode = typename decltype(kernel)::type;
    gpu.launch<Decode>(*plan.row, dims,
                     {.q_ptr = absorbed,
                      .q_pe_ptr = queries.rotated,
                      .cache_ptr = call.input(input::cache).data,
                      .table_ptr = tables.data,
                      .table_rows_ptr = call.input(input::table_rows).data,
                      .lengths_ptr = lengths,
                      .query_starts_ptr = starts,
                      .plan_ptr = cut,
                      .out_ptr = mixed,
                      .lse_ptr = lse,
                      .part_ptr = parts,
                      .part_lse_ptr = part_lse,
                      .q_stride = narrow(sizes.rank),
                      .q_pe_stride = narrow(queries.stride),
                      .cache_stride = narrow(sizes.entry()),
                      .table_stride = narrow(tables.shape.dims[1]),
                      .sequences = narrow(plan.sequences),
                      .heads = narrow(sizes.heads),
                      .rank = narrow(sizes.rank),
                      .rotary = narrow(sizes.rope),
                      .scale = call.real(real::scale)});
  };
  if (plan.wide) {
    using Wide = kernels::mla_decode_wide;
    attend(Kind<Wide>{}, Wide::Dims{.page = sizes.page,
                                    .rank = sizes.rank,
                                    .rotary = sizes.rope,
                                    .rows = lines,
                                    .workers = plan.workers});
  } else {
    using Narrow = kernels::mla_decode;
    attend(Kind<Narrow>{}, Narrow::Dims{.page = sizes.page,
                                        .rank = sizes.rank,
                                        .rotary = sizes.rope,
                                        .rows = lines,
                                        .sequences = plan.sequences,
                                        .workers = plan.workers});
  }
  const Merge::Dims merged{.rank = rank_block, .rows = lines, .sequences = plan.sequences};
  gpu.launch<Merge>(gpu.choose<Merge>(merged), merged,
                    {.query_starts_ptr = starts,
                     .plan_ptr = cut,
                     .out_ptr = mixed,
                     .lse_ptr = lse,
                     .part_ptr = parts,
                     .part_lse_ptr = part_lse,
                     .heads = narrow(sizes.heads),
                     .rank = narrow(sizes.rank),
                     .part_rows = narrow(plan.row_blocks * plan.block_rows)});
  multiply_heads(gpu, sizes, plan.rows, {mixed, latents, sizes.rank}, at(kv_b, sizes.nope * sizes.rank),
                 {y, sizes.heads * sizes.v, sizes.v}, sizes.v, sizes.rank, true);
}

}  // namespace piccard::mla_paged_attention
