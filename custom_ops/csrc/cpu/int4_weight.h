// Weights of four bits with a scale and a zero a group of columns.
#pragma once

#include "weight.h"

namespace piccard {

// q [rows, ceil(columns / 2)], scales [rows, groups], zeros the same or absent for 8.
struct Int4Tensors {
  const Tensor &q, &scales, &zeros;
};

class Int4Weight : public PackedWeight {
 public:
  // The rows from `first` on.
  Int4Weight(const Int4Tensors& tensors, int64_t first, int64_t columns, int64_t group_size)
      : PackedWeight(columns),
        columns_(columns),
        row_bytes_(ceil_div(columns, 2)),
        groups_(ceil_div(columns, group_size)),
        group_size_(group_size),
        q_(tensors.q.as<uint8_t>() + first * row_bytes_),
        scales_(matrix_of(tensors.scales, groups_).row(first)),
        zeros_(tensors.zeros.present() ? tensors.zeros.as<uint8_t>() + first * groups_ : nullptr) {}

  void dot(const float* x, int64_t x_stride, int64_t M, int64_t first, int64_t last, float* out,
           int64_t out_stride) const override {
    const bool taken = group_size_ % kInt4Group == 0 && kLargestInt4Group % group_size_ == 0;
    if (M > kInt4Rows || !taken) return PackedWeight::dot(x, x_stride, M, first, last, out, out_stride);
    const Int4Rows rows{q_ + first * row_bytes_, row_bytes_, scales_.row(first),
                        zeros_ == nullptr ? nullptr : zeros_ + first * groups_, group_size_};
    isa().dot_int4(x, x_stride, M, rows, last - first, columns_, out, out_stride);
  }

 protected:
  void unpack(int64_t row, int64_t first, int64_t count, float* out) const override {
    for (int64_t k = first; k < first + count;) {
      const int64_t group = k / group_size_;
      const int64_t part = min((group + 1) * group_size_, first + count) - k;
      const float zero = zeros_ == nullptr ? 8.0f : static_cast<float>(zeros_[row * groups_ + group]);
      // Groups are of 8 columns and more, and parts begin at multiples of 8: at a whole byte.
      float scale = 0;
      isa().widen(scales_.format, scales_.at(row, group).data, &scale, 1);
      isa().int4(q_ + row * row_bytes_ + k / 2, zero, scale, out + k - first, part);
      k += part;
    }
  }

 private:
  int64_t columns_, row_bytes_, groups_, group_size_;
  const uint8_t* q_;
  Matrix scales_;
  const uint8_t* zeros_;
};

}  // namespace piccard
