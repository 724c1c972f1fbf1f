#include <cmath>
#include <vector>

#include "error.h"
#include "floats.h"
#include "operators.generated.h"
#include "pair_rotation.h"

namespace piccard::rotary_embedding {

void compute(Call& call) {
  const int64_t T = call.value(name::T), D = call.value(name::D), F = call.value(name::F);
  const int64_t heads = call.value(name::num_heads), width = D / heads;
  const int64_t bound = call.value(name::max_position_embeddings);
  const bool interleaved = call.value(name::interleaved) != 0;
  const float scale = call.real(real::scale);
  const auto* positions = call.input(input::positions).as<int64_t>();
  const auto* inv_freq = call.input(input::inv_freq).as<float>();
  for (int64_t t = 0; t < T; ++t) {
    if (positions[t] < 0 || (bound > 0 && positions[t] >= bound)) {
      fail("positions[", t, "] is ", positions[t], "; it has to be at least 0",
           bound > 0 ? " and below max_position_embeddings = " + std::to_string(bound) : "");
    }
  }
  const Floats x(call.input(input::x));
  Result y(call, output::y);
  std::vector<float> cosines(static_cast<size_t>(F)), sines(static_cast<size_t>(F));
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t i = 0; i < F; ++i) {
      // The angle is rounded to float32 as in the reference; its functions need not be.
      const double angle = static_cast<float>(positions[t]) * inv_freq[i];
      cosines[static_cast<size_t>(i)] = static_cast<float>(std::cos(angle)) * scale;
      sines[static_cast<size_t>(i)] = static_cast<float>(std::sin(angle)) * scale;
    }
    for (int64_t h = 0; h < heads; ++h) {
      const float* from = x.data() + t * D + h * width;
      float* to = y.data() + t * D + h * width;
      const int64_t kept = width - 2 * F;
      for (int64_t i = 0; i < kept; ++i) to[i] = from[i];
      rotate_pairs(cosines.data(), sines.data(), F, interleaved, from + kept, to + kept);
    }
  }
  y.finish();
}

}  // namespace piccard::rotary_embedding
