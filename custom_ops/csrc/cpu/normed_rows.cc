#include "normed_rows.h"

#include <cmath>

#include "isa.h"

namespace piccard {

void round_to(ElementType type, float* x, int64_t count) {
  if (type == kFloat) return;
  uint16_t half[256];
  for (int64_t i = 0; i < count; i += 256) {
    const int64_t n = min(count - i, int64_t{256});
    isa().narrow(format_of(type), x + i, half, n);
    isa().widen(format_of(type), half, x + i, n);
  }
}

void normalise(const float* from, const float* weight, int64_t count, float epsilon, ElementType type, float* to) {
  const float mean = isa().sum_of_squares(from, count) / static_cast<float>(count);
  isa().scaled(from, 1.0f / std::sqrt(mean + epsilon), to, count);
  round_to(type, to, count);
  isa().product(to, weight, to, count);
}

NormedRows::NormedRows(const Call& call, int x, int norm, float epsilon) : x_(call.input(x)) {
  if (!call.input(norm).present()) return;
  const Floats weight(call.input(norm));
  const Shape& shape = call.input(x).shape;
  const int64_t rows = shape.dims[0], columns = shape.dims[1];
  own_.reset(new float[static_cast<size_t>(rows * columns)]);
  for (int64_t t = 0; t < rows; ++t) {
    float* row = own_.get() + t * columns;
    normalise(x_.data() + t * columns, weight.data(), columns, epsilon, call.input(x).type, row);
    round_to(call.input(x).type, row, columns);
  }
}

}  // namespace piccard
