// Latent attention of few rows a sequence: queries are absorbed and meet the cache itself.
#pragma once

#include "mla_plan.h"
#include "mla_sizes.h"

namespace piccard::mla_paged_attention {

// The plan's leading sequences; y [rows, heads * v]. Throws Error.
void decode(Call& call, cuda::Gpu& gpu, const Sizes& sizes, const cuda::DecodePlan& plan, const Queries& queries, void* y);

}  // namespace piccard::mla_paged_attention
