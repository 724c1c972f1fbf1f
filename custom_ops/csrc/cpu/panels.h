// A weight that never changes, copied into the panels of Isa once for all runs of a session.
#pragma once

#include <memory>
#include <new>

#include "isa.h"

namespace piccard {

class Panels {
 public:
  // Of `matrices` weights [N, K] that lie one after the other, with no padding; none of the three is 0.
  Panels(Format format, const void* data, int64_t matrices, int64_t N, int64_t K);

  Format format() const { return format_; }
  int64_t columns() const { return columns_; }
  const void* matrix(int64_t index) const { return data_.get() + index * matrix_bytes_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Delete {
    void operator()(char* data) const { ::operator delete[](data, kAlignment); }
  };

  Format format_;
  int64_t columns_, matrix_bytes_;
  std::unique_ptr<char[], Delete> data_;
};

}  // namespace piccard
