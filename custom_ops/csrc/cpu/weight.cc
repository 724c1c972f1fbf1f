#include "weight.h"

namespace piccard {

namespace {

constexpr int64_t kUnpackedRows = kWeightRows;
// A multiple of 8, as unpack wants; it may cut a group of columns that shares a scale.
constexpr int64_t kUnpackedColumns = 512;
// Multiplications that take about as long as it takes to share them.
constexpr int64_t kPart = 1 << 17;
constexpr int64_t kMaxParts = 64;

}  // namespace

void PackedWeight::dot(const float* x, int64_t x_stride, int64_t M, int64_t first, int64_t last, float* out,
                       int64_t out_stride) const {
  alignas(64) float tile[kUnpackedRows * kUnpackedColumns];
  for (int64_t n = first; n < last; n += kUnpackedRows) {
    const int64_t rows = min(last - n, kUnpackedRows);
    for (int64_t k = 0; k < columns_; k += kUnpackedColumns) {
      const int64_t count = min(columns_ - k, kUnpackedColumns);
      for (int64_t i = 0; i < rows; ++i) unpack(n + i, k, count, tile + i * count);
      isa().dot_rows(x + k, x_stride, M, {Format::kF32, tile, count}, rows, count, out + n - first, out_stride, k > 0);
    }
  }
}

std::unique_ptr<Weight> float_weight(const Call& call, int input, int64_t matrix) {
  if (const Panels* panels = call.panels(input)) return std::make_unique<PanelWeight>(*panels, matrix);
  const Tensor& tensor = call.input(input);
  const int64_t rows = tensor.shape.dims[tensor.shape.rank - 2], columns = tensor.shape.dims[tensor.shape.rank - 1];
  return std::make_unique<PlainWeight>(matrix_of(tensor, columns).row(matrix * rows), columns);
}

int64_t parts_for(int64_t multiplications, int64_t parts) {
  return max(int64_t{1}, min(min(multiplications / kPart, parts), kMaxParts));
}

void linear(Call& call, const float* x, int64_t M, int64_t K, const Weight& weight, int64_t N, const float* bias,
            const float* residual, float* y) {
  const int64_t together = weight.together(), groups = ceil_div(N, together);
  const int64_t parts = parts_for(M * N * K, groups);
  call.parallel(parts, [&](int64_t part) {
    const int64_t first = groups * part / parts * together, last = min(N, groups * (part + 1) / parts * together);
    if (first >= last) return;
    weight.dot(x, K, M, first, last, y + first, N);
    for (int64_t m = 0; m < M; ++m) {
      if (bias != nullptr) isa().added(bias + first, y + m * N + first, last - first);
      if (residual != nullptr) isa().added(residual + m * N + first, y + m * N + first, last - first);
    }
  });
}

}  // namespace piccard
