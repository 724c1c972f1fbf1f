#include "floats.h"
#include "isa.h"
#include "operators.generated.h"

namespace piccard::swiglu {

void compute(Call& call) {
  const int64_t T = call.value(name::T), half = call.value(name::D) / 2;
  const Floats gate_up(call.input(input::gate_up));
  Result y(call, output::y);
  for (int64_t t = 0; t < T; ++t) {
    const float* row = gate_up.data() + t * 2 * half;
    isa().swiglu(row, row + half, 1.0f, y.data() + t * half, half);
  }
  y.finish();
}

}  // namespace piccard::swiglu
