// One device context: what it is, and the kernels that were loaded into it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "driver.h"
#include "kernel.h"

namespace piccard::cuda {

class Device {
 public:
  // Of the context that is current on this thread. Throws Error where there is none, or no kernel is for the device.
  static Device& current();

  int architecture() const { return architecture_; }
  int64_t multiprocessors() const { return multiprocessors_; }
  // Loaded at its first use, which must not be while a graph is captured. Throws Error.
  FunctionHandle function(int image, StreamHandle stream);

 private:
  explicit Device(ContextHandle context);
  FunctionHandle load(int image, StreamHandle stream);

  ContextHandle context_;
  int architecture_ = -1;
  int64_t multiprocessors_ = 0;
  std::mutex loading_;
  std::unique_ptr<std::atomic<FunctionHandle>[]> functions_;
};

// Whether the stream's launches are captured for a graph and not run.
bool is_capturing(StreamHandle stream);

}  // namespace piccard::cuda
