// Weights in any format, as rows that can be multiplied with.
#pragma once

#include "floats.h"
#include "isa.h"
#include "panels.h"

namespace piccard {

// [out, in].
class Weight {
 public:
  virtual ~Weight() = default;
  // How many rows are read at once: a part that begins at a multiple leaves nothing to do twice.
  virtual int64_t together() const { return kWeightRows; }
  // out[m, n - first] = x[m] . w[n], first <= n < last
  virtual void dot(const float* x, int64_t x_stride, int64_t M, int64_t first, int64_t last, float* out,
                   int64_t out_stride) const = 0;
};

// One whose elements are read as they are.
class PlainWeight : public Weight {
 public:
  PlainWeight(Matrix matrix, int64_t columns) : matrix_(matrix), columns_(columns) {}
  void dot(const float* x, int64_t x_stride, int64_t M, int64_t first, int64_t last, float* out,
           int64_t out_stride) const override {
    isa().dot_rows(x, x_stride, M, matrix_.row(first), last - first, columns_, out, out_stride, false);
  }

 private:
  Matrix matrix_;
  int64_t columns_;
};

// One that was copied into panels.
class PanelWeight : public Weight {
 public:
  PanelWeight(const Panels& panels, int64_t matrix) : panels_(panels), data_(panels.matrix(matrix)) {}
  int64_t together() const override { return isa().panel; }
  void dot(const float* x, int64_t x_stride, int64_t M, int64_t first, int64_t last, float* out,
           int64_t out_stride) const override {
    isa().dot_panels(x, x_stride, M, panels_.format(), data_, first, last, panels_.columns(), out, out_stride);
  }

 private:
  const Panels& panels_;
  const void* data_;
};

// One whose rows are packed; `unpack` writes the columns first .. first + count - 1 of a row, first a multiple of 8.
class PackedWeight : public Weight {
 public:
  explicit PackedWeight(int64_t columns) : columns_(columns) {}
  void dot(const float* x, int64_t x_stride, int64_t M, int64_t first, int64_t last, float* out,
           int64_t out_stride) const override;

 protected:
  virtual void unpack(int64_t row, int64_t first, int64_t count, float* out) const = 0;

 private:
  int64_t columns_;
};

inline Matrix matrix_of(const Tensor& tensor, int64_t stride) { return {format_of(tensor.type), tensor.data, stride}; }

// The `matrix`-th [N, K] of an input [.., N, K] of floats; in panels where the session's input never changes.
std::unique_ptr<Weight> float_weight(const Call& call, int input, int64_t matrix);

// y = x w^T + bias + residual for M rows, on all threads; bias and residual may be null.
void linear(Call& call, const float* x, int64_t M, int64_t K, const Weight& weight, int64_t N, const float* bias,
            const float* residual, float* y);

// How many parts to cut `multiplications` into, at most `parts`: one that is too small costs more than it saves.
int64_t parts_for(int64_t multiplications, int64_t parts);

}  // namespace piccard
