// Activations as float32, whatever type they have in the graph.
#pragma once

#include <memory>

#include "call.h"

namespace piccard {

// A tensor's elements as float32: itself, or a widened copy.
class Floats {
 public:
  explicit Floats(const Tensor& tensor);
  const float* data() const { return data_; }

 private:
  std::unique_ptr<float[]> copy_;
  const float* data_ = nullptr;
};

// Float32 rows that become an output: its own memory, or a buffer that is narrowed at the end.
class Result {
 public:
  Result(Call& call, int index);
  float* data() { return data_; }
  // Has to be called once the rows are whole.
  void finish();

 private:
  Tensor tensor_;
  std::unique_ptr<float[]> buffer_;
  float* data_;
};

// At least `count` floats of this thread's own memory, until it asks again.
float* thread_floats(int64_t count);

}  // namespace piccard
