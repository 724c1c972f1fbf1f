// Weights of four bits with a scale and a zero a group of columns.
#pragma once

#include "weight.h"

namespace piccard {

class Int4Weight : public PackedWeight {
 public:
  // q [rows, ceil(columns / 2)], scales [rows, groups], zeros the same or null for 8.
  Int4Weight(const uint8_t* q, Matrix scales, const uint8_t* zeros, int64_t columns, int64_t group_size)
      : PackedWeight(columns),
        q_(q),
        scales_(scales),
        zeros_(zeros),
        row_bytes_(ceil_div(columns, 2)),
        groups_(ceil_div(columns, group_size)),
        group_size_(group_size) {}

 protected:
  void unpack(int64_t row, int64_t first, int64_t count, float* out) const override {
    for (int64_t k = first; k < first + count;) {
      const int64_t group = k / group_size_;
      const int64_t part = min((group + 1) * group_size_, first + count) - k;
      const int64_t place = row * groups_ + group;
      const float zero = zeros_ == nullptr ? 8.0f : static_cast<float>(zeros_[place]);
      // Groups are of 8 columns and more, and parts begin at multiples of 8: at a whole byte.
      float scale = 0;
      isa().widen(scales_.format, scales_.at(0, place).data, &scale, 1);
      isa().int4(q_ + row * row_bytes_ + k / 2, zero, scale, out + k - first, part);
      k += part;
    }
  }

 private:
  const uint8_t* q_;
  Matrix scales_;
  const uint8_t* zeros_;
  int64_t row_bytes_, groups_, group_size_;
};

}  // namespace piccard
