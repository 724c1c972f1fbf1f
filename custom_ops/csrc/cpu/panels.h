// A weight that never changes, copied into the panels of Isa once for all runs of a session.
#pragma once

#include "huge_memory.h"
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
  Format format_;
  int64_t columns_, matrix_bytes_;
  std::shared_ptr<char> data_;
};

}  // namespace piccard
