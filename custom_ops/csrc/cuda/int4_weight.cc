#include "int4_weight.h"

namespace piccard::cuda {

namespace {

constexpr unsigned short kEights = 0x0808;

}  // namespace

Int4Weight::Int4Weight(Gpu& gpu, const Call& call, int first, int64_t columns, int64_t size)
    : q(call.input(first).data),
      scales(call.input(first + 1).data),
      zeros(call.input(first + 2).data),
      depth(columns),
      groups(ceil_div(columns, size)),
      group_size(size),
      zero_row(narrow(groups)),
      zero_step(1),
      constant(call.is_constant(first) && call.is_constant(first + 1) && call.is_constant(first + 2)) {
  if (zeros != nullptr) return;
  // One zero stands for all.
  zeros = gpu.filled(kEights);
  zero_row = zero_step = 0;
  constant = false;
}

}  // namespace piccard::cuda
