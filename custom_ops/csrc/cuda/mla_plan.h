// How latent attention of a step is planned: by what the host knows of its sequences.
#pragma once

#include "gpu.h"
#include "host_batch.h"

namespace piccard::cuda {

// MOST_WORKERS of operators/attention.py: what a plan has room for.
constexpr int64_t kMostWorkers = 1024;

// How the leading sequences are decoded.
struct DecodePlan : Leading {
  const Row* row = nullptr;
  bool wide = false;  // Whether the row is mla_decode_wide's, the twin for many heads.
  int64_t block_rows = 0, row_blocks = 0, workers = 0, rank_block = 0, tile = 0;
};

// Throws Error where no row is for the sizes.
DecodePlan decode_plan(const Gpu& gpu, const Leading& leading, int64_t heads, int64_t page, int64_t rank, int64_t rotary);

// Spans into which the work is cut: one for each block that the device holds at once. Throws Error.
int64_t workers_for(const Gpu& gpu, const Row& row, int64_t blocks);

// Cuts the step's tiles into spans, on the device: fills plan int32 [2 + sequences + workers].
void schedule(Gpu& gpu, int64_t sequences, int64_t workers, int64_t tile, const void* lengths, void* plan);

// The plan that a node was given, or one made here; of `bytes`. Throws Error where it has too little room.
const void* plan_of(Gpu& gpu, const Tensor& given, int64_t sequences, int64_t workers, int64_t tile, const void* lengths,
                    int64_t bytes);

}  // namespace piccard::cuda
