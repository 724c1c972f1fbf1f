#include "floats.h"

#include <new>

#include "isa.h"

namespace piccard {

Floats::Floats(const Tensor& tensor) {
  if (!tensor.present()) return;
  if (tensor.type == kFloat) {
    data_ = tensor.as<float>();
    return;
  }
  const int64_t count = tensor.shape.count();
  copy_.reset(new float[static_cast<size_t>(count)]);
  isa().widen(format_of(tensor.type), tensor.data, copy_.get(), count);
  data_ = copy_.get();
}

Result::Result(Call& call, int index) : tensor_(call.output(index)) {
  if (tensor_.type == kFloat) {
    data_ = static_cast<float*>(tensor_.data);
    return;
  }
  buffer_.reset(new float[static_cast<size_t>(tensor_.shape.count())]);
  data_ = buffer_.get();
}

void Result::finish() {
  if (buffer_) isa().narrow(format_of(tensor_.type), buffer_.get(), tensor_.data, tensor_.shape.count());
}

float* thread_floats(int64_t count) {
  struct Buffer {
    float* data = nullptr;
    int64_t size = 0;
    ~Buffer() { ::operator delete[](data, std::align_val_t{64}); }
  };
  static thread_local Buffer buffer;
  if (buffer.size < count) {
    ::operator delete[](buffer.data, std::align_val_t{64});
    buffer.data = nullptr;
    buffer.size = 0;
    buffer.data = static_cast<float*>(::operator new[](static_cast<size_t>(count) * sizeof(float), std::align_val_t{64}));
    buffer.size = count;
  }
  return buffer.data;
}

}  // namespace piccard
