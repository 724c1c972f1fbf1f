#include "panels.h"

namespace piccard {

Panels::Panels(Format format, const void* data, int64_t matrices, int64_t N, int64_t K)
    : format_(format), columns_(K), matrix_bytes_(ceil_div(N, isa().panel) * isa().panel * K * bytes_of(format)) {
  data_.reset(static_cast<char*>(::operator new[](static_cast<size_t>(matrices * matrix_bytes_), kAlignment)));
  const Matrix all{format, data, K};
  for (int64_t i = 0; i < matrices; ++i) isa().pack_panels(all.row(i * N), N, K, data_.get() + i * matrix_bytes_);
}

}  // namespace piccard
