// The rotary embedding of one row of one head.
#pragma once

#include <cstdint>

namespace piccard {

// Turns F pairs of columns, (2i, 2i + 1) where `interleaved` and else (i, i + F); `to` may be `from`.
inline void rotate_pairs(const float* cosines, const float* sines, int64_t F, bool interleaved, const float* from, float* to) {
  const int64_t step = interleaved ? 2 : 1, apart = interleaved ? 1 : F;
  for (int64_t i = 0; i < F; ++i) {
    const float a = from[i * step], b = from[i * step + apart];
    to[i * step] = a * cosines[i] - b * sines[i];
    to[i * step + apart] = a * sines[i] + b * cosines[i];
  }
}

}  // namespace piccard
