#include "panels.h"

#include "node.h"

namespace piccard {

Panels::Panels(Format format, const void* data, int64_t matrices, int64_t N, int64_t K)
    : format_(format), columns_(K), matrix_bytes_(ceil_div(N, isa().panel) * isa().panel * K * bytes_of(format)) {
  data_ = huge_memory(static_cast<size_t>(matrices * matrix_bytes_));
  const Matrix all{format, data, K};
  for (int64_t i = 0; i < matrices; ++i) isa().pack_panels(all.row(i * N), N, K, data_.get() + i * matrix_bytes_);
}

std::shared_ptr<const Panels> packed(ElementType type, const Shape& shape, const ort::Value* value) {
  void* data = nullptr;
  check(ort::call<ort::GetTensorMutableData_>(const_cast<ort::Value*>(value), &data));
  const int64_t rows = shape.dims[shape.rank - 2], columns = shape.dims[shape.rank - 1];
  return std::make_shared<const Panels>(format_of(type), data, shape.count() / rows / columns, rows, columns);
}

}  // namespace piccard
