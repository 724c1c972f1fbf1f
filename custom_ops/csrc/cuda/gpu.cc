#include "gpu.h"

#include <limits>

#include "error.h"

namespace piccard::cuda {

namespace {

// Every kernel ends with two pointers to scratch memory of the compiler's, which none of these uses.
constexpr int kHiddenArguments = 2;
constexpr int kMaxArguments = 40;
constexpr unsigned kWarp = 32;
constexpr int64_t kMostBlocks[] = {0x7fffffff, 65535, 65535};

void check_alignment(const Argument& argument, const char* at) {
  if (argument.alignment == 0) return;
  int64_t number = 0;
  if (argument.kind == Argument::kInt32) {
    int32_t small = 0;
    std::memcpy(&small, at, sizeof small);
    number = small;
  } else {
    std::memcpy(&number, at, sizeof number);
  }
  if (number % argument.alignment != 0) {
    fail("argument ", argument.name, " is declared a multiple of ", argument.alignment, " and is ", number,
         ": pad the rows or align the buffer");
  }
}

// Every input of a half type is of one.
int dtype_of(const Call& call) {
  for (int i = 0; i < kMaxInputs; ++i) {
    if (call.input(i).type == kFloat16) return 1;
    if (call.input(i).type == kBfloat16) return 0;
  }
  return 0;
}

}  // namespace

int32_t narrow(int64_t value) {
  if (value < 0 || value > std::numeric_limits<int32_t>::max()) {
    fail("a size is ", value, "; kernels take sizes of up to ", std::numeric_limits<int32_t>::max());
  }
  return static_cast<int32_t>(value);
}

Gpu::Gpu(Call& call)
    : call_(call), device_(Device::current()), dtype_(dtype_of(call)) {
  void* stream = nullptr;
  piccard::check(ort::call<ort::KernelContext_GetGPUComputeStream_>(static_cast<const ort::KernelContext*>(call.context()), &stream));
  stream_ = static_cast<StreamHandle>(stream);
}

Gpu::~Gpu() {
  release(0);
  if (allocator_ != nullptr) ort::call<ort::ReleaseAllocator_>(allocator_);
}

void Gpu::release(size_t kept) {
  while (held_.size() > kept) {
    succeeded(ort::call<ort::AllocatorFree_>(allocator_, held_.back()));
    held_.pop_back();
  }
}

void* Gpu::scratch(int64_t bytes) {
  if (allocator_ == nullptr) {
    memory_ = call_.memory(0);
    piccard::check(ort::call<ort::KernelContext_GetAllocator_>(static_cast<const ort::KernelContext*>(call_.context()), memory_, &allocator_));
  }
  void* memory = nullptr;
  const size_t size = static_cast<size_t>(max(bytes, int64_t{16}));
  // The runtime hands out memory by streams, where there are streams.
  if (stream_ != nullptr) {
    piccard::check(ort::call<ort::KernelContext_GetScratchBuffer_>(static_cast<const ort::KernelContext*>(call_.context()), memory_, size, &memory));
  } else {
    piccard::check(ort::call<ort::AllocatorAlloc_>(allocator_, size, &memory));
  }
  if (memory == nullptr) fail("the session's allocator has no ", size, " bytes of scratch memory left");
  held_.push_back(memory);
  return memory;
}

void Gpu::launch(const Kernel& kernel, const Row& row, const int64_t* dims, const char* arguments, bool follows) {
  int64_t blocks[3] = {1, 1, 1};
  kernel.grid(dims, row.constants, blocks);
  if (blocks[0] == 0 || blocks[1] == 0 || blocks[2] == 0) return;
  try {
    for (int i = 0; i < 3; ++i) {
      if (blocks[i] < 0 || blocks[i] > kMostBlocks[i]) fail("its grid has ", blocks[i], " blocks in dimension ", i);
    }
    void* values[kMaxArguments + kHiddenArguments];
    if (kernel.argument_count > kMaxArguments) fail("it has ", kernel.argument_count, " arguments: raise kMaxArguments");
    for (int i = 0; i < kernel.argument_count; ++i) {
      const char* at = arguments + kernel.arguments[i].offset;
      check_alignment(kernel.arguments[i], at);
      values[i] = const_cast<char*>(at);
    }
    const void* nothing = nullptr;
    for (int i = 0; i < kHiddenArguments; ++i) values[kernel.argument_count + i] = &nothing;
    const int image = row.images[device_.architecture()][kernel.typed ? dtype_ : 0];
    if (image < 0) fail("the library was built without sm_", kArchitectures[device_.architecture()]);
    const FunctionHandle function = device_.function(image, stream_);
    LaunchAttribute attribute{};
    attribute.id = kProgrammaticStreamSerialization;
    attribute.value.allowed = 1;
    const bool chained = kernel.chained && follows && device_.architecture() >= kHopper;
    const LaunchConfig config{{static_cast<unsigned>(blocks[0]), static_cast<unsigned>(blocks[1]),
                               static_cast<unsigned>(blocks[2])},
                              {static_cast<unsigned>(row.warps) * kWarp, 1, 1},
                              kImages[image].shared_bytes,
                              stream_,
                              chained ? &attribute : nullptr,
                              chained ? 1u : 0u};
    check(driver().cuLaunchKernelEx(&config, function, values, nullptr), "cuLaunchKernelEx");
  } catch (const Error& error) {
    fail("kernel ", kernel.name, ", row ", row.name, ": ", error.what());
  }
}

void Gpu::refuse(const Kernel& kernel, const int64_t* dims) const {
  std::string shape;
  for (int i = 0; i < kernel.dim_count; ++i) {
    if (dims[i] >= 0) shape += std::string(", ") + kernel.dims[i] + " " + std::to_string(dims[i]);
  }
  fail("kernel ", kernel.name, " has no row for sm_", kArchitectures[device_.architecture()], shape,
       ": declare one in its variant table and build the library again");
}

void* Gpu::upload(const std::vector<int32_t>& numbers) {
  const int64_t bytes = static_cast<int64_t>(numbers.size() * sizeof(int32_t));
  void* const to = scratch(bytes);
  check(driver().cuMemcpyHtoDAsync_v2(address(to), numbers.data(), static_cast<size_t>(bytes), stream_), "cuMemcpyHtoDAsync");
  return to;
}

const void* Gpu::filled(unsigned short pattern) {
  constexpr int64_t kBytes = 16;
  void* const to = scratch(kBytes);
  check(driver().cuMemsetD16Async(address(to), pattern, kBytes / sizeof pattern, stream_), "cuMemsetD16Async");
  return to;
}

void Gpu::copy(void* to, const void* from, int64_t bytes) {
  check(driver().cuMemcpyDtoDAsync_v2(address(to), address(from), static_cast<size_t>(bytes), stream_), "cuMemcpyDtoDAsync");
}

}  // namespace piccard::cuda
