#include "isa.h"
#include "normed_rows.h"
#include "operators.generated.h"

namespace piccard::rms_norm {

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
      normalise(from, weight.data(), N, call.real(real::epsilon), type, to);
      for (int64_t i = N; i < width; ++i) to[i] = from[i];
    }
  }
  y.finish();
  if (sum) sum->finish();
}

}  // namespace piccard::rms_norm
