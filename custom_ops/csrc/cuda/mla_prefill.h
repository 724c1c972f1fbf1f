// Latent attention of many rows a sequence: keys and values are expanded from the cache first.
#pragma once

#include "mla_sizes.h"

namespace piccard::mla_paged_attention {

// The sequences from `first` on, whose rows begin at `first_row`; q [T, heads, nope + rope], rotated; y [T, heads * v].
// Needs exact numbers in host_batch. Throws Error.
void prefill(Call& call, cuda::Gpu& gpu, const Sizes& sizes, int64_t first, int64_t first_row, const void* q, void* y);

}  // namespace piccard::mla_paged_attention
