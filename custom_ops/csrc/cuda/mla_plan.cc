#include "mla_plan.h"

#include "error.h"

namespace piccard::cuda {

namespace {

template <typename K>
void read(DecodePlan* plan) {
  plan->block_rows = plan->row->constants[K::BLOCK_ROWS];
  plan->rank_block = plan->row->constants[K::RANK];
  plan->tile = plan->row->constants[K::TILE];
}

}  // namespace

DecodePlan decode_plan(const Gpu& gpu, const Leading& leading, int64_t heads, int64_t page, int64_t rank, int64_t rotary) {
  DecodePlan plan{leading};
  if (plan.sequences == 0) return plan;
  const int64_t lines = heads * plan.queries;
  plan.row = gpu.seek<kernels::mla_decode_wide>(
      {.page = page, .rank = rank, .rotary = rotary, .rows = lines, .workers = -1});
  plan.wide = plan.row != nullptr;
  if (plan.wide) {
    read<kernels::mla_decode_wide>(&plan);
  } else {
    plan.row = &gpu.choose<kernels::mla_decode>(
        {.page = page, .rank = rank, .rotary = rotary, .rows = lines, .sequences = plan.sequences});
    read<kernels::mla_decode>(&plan);
  }
  plan.row_blocks = ceil_div(lines, plan.block_rows);
  plan.workers = workers_for(gpu, *plan.row, plan.row_blocks);
  return plan;
}

int64_t workers_for(const Gpu& gpu, const Row& row, int64_t blocks) {
  const int64_t workers = max(int64_t{1}, gpu.multiprocessors() * row.blocks_per_multiprocessor / blocks);
  if (workers > kMostWorkers) fail("the device has room for ", workers, " workers: raise MOST_WORKERS and build again");
  return workers;
}

void schedule(Gpu& gpu, int64_t sequences, int64_t workers, int64_t tile, const void* lengths, void* plan) {
  using Schedule = kernels::mla_schedule;
  const Schedule::Dims dims{.sequences = sequences, .tile = tile, .workers = workers};
  gpu.launch<Schedule>(gpu.choose<Schedule>(dims), dims,
                       {.lengths_ptr = lengths,
                        .plan_ptr = plan,
                        .sequences = narrow(sequences),
                        .workers = narrow(workers),
                        .least_tiles = 1,
                        .splits = 0});
}

const void* plan_of(Gpu& gpu, const Tensor& given, int64_t sequences, int64_t workers, int64_t tile, const void* lengths,
                    int64_t bytes) {
  if (given.present()) {
    if (given.shape.dims[0] * static_cast<int64_t>(sizeof(int32_t)) < bytes) {
      fail("plan has ", given.shape.dims[0], " places for ", sequences, " sequences: it has to come from the schedule's node");
    }
    return given.data;
  }
  void* const own = gpu.scratch(bytes);
  schedule(gpu, sequences, workers, tile, lengths, own);
  return own;
}

}  // namespace piccard::cuda
