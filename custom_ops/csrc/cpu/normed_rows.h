// Rows that are normalised before an operator reads them.
#pragma once

#include "floats.h"

namespace piccard {

// to = weight * cast(from / sqrt(mean(from^2) + epsilon)) over `count` columns; `to` may be `from`. The cast rounds to
// `type`, as the reference does before it multiplies by the weight.
void normalise(const float* from, const float* weight, int64_t count, float epsilon, ElementType type, float* to);

// Rounded to `type` and back.
void round_to(ElementType type, float* x, int64_t count);

// The rows [T, K] of an input, normalised by the weight of another one where that is given.
class NormedRows {
 public:
  NormedRows(const Call& call, int x, int norm, float epsilon);
  const float* data() const { return own_ ? own_.get() : x_.data(); }

 private:
  Floats x_;
  std::unique_ptr<float[]> own_;
};

}  // namespace piccard
