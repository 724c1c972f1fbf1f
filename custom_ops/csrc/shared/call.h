// One run of a node: its tensors, its sizes, and the runtime's threads.
#pragma once

#include <atomic>
#include <exception>
#include <memory>

#include "node.h"

namespace piccard {

struct Tensor {
  void* data = nullptr;
  ElementType type = kUndefined;
  Shape shape;

  bool present() const { return data != nullptr; }
  template <typename T>
  const T* as() const {
    return static_cast<const T*>(data);
  }
};

class Call {
 public:
  // Throws Error where a shape is not what the operator takes.
  Call(const Node& node, ort::KernelContext* context);

  int64_t value(int name) const { return binding_.values[name]; }
  float real(int index) const { return node_.real(index); }
  const Tensor& input(int index) const { return inputs_[index]; }
  // A constant input that is read in panels, or null.
  const Panels* panels(int input) const { return node_.panels(input); }
  // Whether an input never changes.
  bool is_constant(int input) const { return node_.constant_shape(input).rank >= 0; }

  ort::KernelContext* context() const { return context_; }
  // Where an input that is present lies.
  const ort::MemoryInfo* memory(int input) const;

  // Whether an optional output is wanted.
  bool wants(int index) const;
  // The output's memory. Throws Error where it has to be an input's and is not.
  Tensor output(int index);

  // Run task(0) .. task(count - 1) on the runtime's threads; they may throw.
  template <typename Task>
  void parallel(int64_t count, const Task& task) {
    if (count == 1) return task(int64_t{0});
    Job<Task> job{&task, nullptr, {}};
    run(&Job<Task>::step, static_cast<size_t>(count), &job);
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  template <typename Task>
  struct Job {
    const Task* task;
    std::exception_ptr error;
    std::atomic_flag failed = ATOMIC_FLAG_INIT;

    static void step(void* data, size_t index) noexcept {
      auto* job = static_cast<Job*>(data);
      try {
        (*job->task)(static_cast<int64_t>(index));
      } catch (...) {
        if (!job->failed.test_and_set()) job->error = std::current_exception();
      }
    }
  };

  // Makes the output; null where the graph has no name for it.
  ort::Value* value_of(int output, const Shape& shape) const;
  void run(void (*step)(void*, size_t), size_t count, void* data);

  const Node& node_;
  ort::KernelContext* context_;
  size_t output_count_ = 0;
  Binding binding_;
  Tensor inputs_[kMaxInputs];
};

}  // namespace piccard
