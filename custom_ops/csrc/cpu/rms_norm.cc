#include <cmath>

#include "floats.h"
#include "isa.h"
#include "operators.generated.h"

namespace piccard::rms_norm {

namespace {

// Rounded to the output's type, as the reference rounds before it multiplies by the weight.
void round_to(ElementType type, float* x, int64_t count) {
  if (type == kFloat) return;
  uint16_t half[256];
  for (int64_t i = 0; i < count; i += 256) {
    const int64_t n = min(count - i, int64_t{256});
    isa().narrow(format_of(type), x + i, half, n);
    isa().widen(format_of(type), half, x + i, n);
  }
}

}  // namespace

void compute(Call& call) {
  const int64_t T = call.value(name::T), D = call.value(name::D), N = call.value(name::N);
  const int64_t heads = call.value(name::num_heads), width = D / heads;
  const ElementType type = call.input(input::x).type;
  const Floats x(call.input(input::x)), weight(call.input(input::weight)), residual(call.input(input::residual));
  Result y(call, output::y);
  std::unique_ptr<Result> sum;
  if (call.wants(output::sum)) sum = std::make_unique<Result>(call, output::sum);
  std::unique_ptr<float[]> own;
  if (residual.data() != nullptr && !sum) own.reset(new float[static_cast<size_t>(D)]);
  for (int64_t t = 0; t < T; ++t) {
    const float* row = x.data() + t * D;
    if (float* added = sum ? sum->data() + t * D : own.get()) {
      for (int64_t i = 0; i < D; ++i) added[i] = row[i];
      if (residual.data() != nullptr) isa().added(residual.data() + t * D, added, D);
      round_to(type, added, D);
      row = added;
    }
    for (int64_t h = 0; h < heads; ++h) {
      const float* from = row + h * width;
      float* to = y.data() + t * D + h * width;
      const float mean = isa().sum_of_squares(from, N) / static_cast<float>(N);
      isa().scaled(from, 1.0f / std::sqrt(mean + call.real(real::epsilon)), to, N);
      round_to(type, to, N);
      isa().product(to, weight.data(), to, N);
      for (int64_t i = N; i < width; ++i) to[i] = from[i];
    }
  }
  y.finish();
  if (sum) sum->finish();
}

}  // namespace piccard::rms_norm
