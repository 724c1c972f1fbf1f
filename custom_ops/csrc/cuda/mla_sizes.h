// Latent attention in one run: its sizes and its queries.
#pragma once

#include "gpu.h"
#include "operators.generated.h"

namespace piccard::mla_paged_attention {

// The sizes of one run.
struct Sizes {
  int64_t T, heads, nope, rope, v, rank, page;

  explicit Sizes(const Call& call)
      : T(call.value(name::T)),
        heads(call.value(name::num_heads)),
        nope(call.value(name::qk_nope_head_dim)),
        rope(call.value(name::qk_rope_head_dim)),
        v(call.value(name::v_head_dim)),
        rank(call.value(name::C)),
        page(call.value(name::S)) {}
  int64_t q_width() const { return nope + rope; }
  int64_t entry() const { return rank + rope; }
  int64_t both() const { return nope + v; }
};

// Queries: the nope columns as they came and the rotated ones, which follow each other a head at a stride.
struct Queries {
  const void* nope;
  const void* rotated;
  int64_t stride;
};

}  // namespace piccard::mla_paged_attention
