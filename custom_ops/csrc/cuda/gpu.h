// One run of a node on a GPU: its stream, its scratch memory, and launches by the tables.
#pragma once

#include <cstring>
#include <vector>

#include "call.h"
#include "device.h"
#include "kernels.generated.h"

namespace piccard::cuda {

class Gpu {
 public:
  // Throws Error where the driver or the device cannot be used.
  explicit Gpu(Call& call);
  // Scratch memory goes back to the session's allocator: what runs after this call on the stream may have it.
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  StreamHandle stream() const { return stream_; }
  int64_t multiprocessors() const { return device_.multiprocessors(); }
  // Of the activations: a place among DTYPES, and bytes.
  int dtype() const { return dtype_; }
  static constexpr int64_t kElementBytes = 2;

  // Memory of the device until the end of this run.
  void* scratch(int64_t bytes);
  void* scratch_elements(int64_t count) { return scratch(count * kElementBytes); }

  // Scratch memory that was asked for since goes back at the end of the scope.
  class Mark {
   public:
    explicit Mark(Gpu& gpu) : gpu_(gpu), held_(gpu.held_.size()) {}
    ~Mark() { gpu_.release(held_); }
    Mark(const Mark&) = delete;
    Mark& operator=(const Mark&) = delete;

   private:
    Gpu& gpu_;
    size_t held_;
  };

  // The first row that fits, or null.
  template <typename K>
  const Row* seek(const typename K::Dims& dims) const {
    return K::kernel.choose(device_.architecture(), dtype_, values(dims));
  }
  // Throws Error where none does.
  template <typename K>
  const Row& choose(const typename K::Dims& dims) const {
    const Row* row = seek<K>(dims);
    if (row == nullptr) refuse(K::kernel, values(dims));
    return *row;
  }
  // `follows`: whether the kernel may start while the launch before it ends; false where it reads early what that one
  // writes. Nothing happens where a grid has no blocks. Throws Error.
  template <typename K>
  void launch(const Row& row, const typename K::Dims& dims, const typename K::Arguments& arguments, bool follows = true) {
    static_assert(std::is_standard_layout_v<typename K::Arguments>);
    launch(K::kernel, row, values(dims), reinterpret_cast<const char*>(&arguments), follows);
  }

  void copy(void* to, const void* from, int64_t bytes);
  // 16 bytes of scratch memory of one pattern.
  const void* filled(unsigned short pattern);
  // Numbers of the host, which may be gone afterwards, in scratch memory. Not while a graph is captured. Throws Error.
  void* upload(const std::vector<int32_t>& numbers);

 private:
  template <typename Dims>
  static const int64_t* values(const Dims& dims) {
    static_assert(std::is_standard_layout_v<Dims> && sizeof(Dims) % sizeof(int64_t) == 0);
    return reinterpret_cast<const int64_t*>(&dims);
  }
  void launch(const Kernel& kernel, const Row& row, const int64_t* dims, const char* arguments, bool follows);
  void release(size_t kept);
  [[noreturn]] void refuse(const Kernel& kernel, const int64_t* dims) const;

  Call& call_;
  Device& device_;
  StreamHandle stream_ = nullptr;
  int dtype_;
  const ort::MemoryInfo* memory_ = nullptr;
  ort::Allocator* allocator_ = nullptr;
  std::vector<void*> held_;
};

// `count` elements after a pointer to a half type.
inline const void* at(const void* data, int64_t count) { return static_cast<const char*>(data) + count * Gpu::kElementBytes; }
inline void* at(void* data, int64_t count) { return static_cast<char*>(data) + count * Gpu::kElementBytes; }
// A size as kernels take it. Throws Error where it does not fit.
int32_t narrow(int64_t value);

}  // namespace piccard::cuda
