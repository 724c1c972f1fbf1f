#include "device.h"

#include <map>

#include "error.h"

namespace piccard::cuda {

namespace {

constexpr unsigned kSharedWithoutAsking = 48 * 1024;

int attribute_of(int device, int attribute) {
  int value = 0;
  check(driver().cuDeviceGetAttribute(&value, attribute, device), "cuDeviceGetAttribute");
  return value;
}

}  // namespace

Device::Device(ContextHandle context) : context_(context) {
  int device = 0;
  check(driver().cuCtxGetDevice(&device), "cuCtxGetDevice");
  const int capability = 10 * attribute_of(device, kCapabilityMajor) + attribute_of(device, kCapabilityMinor);
  architecture_ = piccard::nearest_architecture(capability);
  if (architecture_ < 0) {
    fail("the device is sm_", capability, "; the kernels are for sm_80, sm_89, sm_90 and their minor versions");
  }
  multiprocessors_ = attribute_of(device, kMultiprocessorCount);
  functions_.reset(new std::atomic<FunctionHandle>[static_cast<size_t>(kImageCount)]());
}

Device& Device::current() {
  ContextHandle context = nullptr;
  check(driver().cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  if (context == nullptr) fail("no CUDA context is current on this thread: run the session on CUDAExecutionProvider");
  static std::mutex mutex;
  // Modules end with their context, which ends with the process.
  static auto* const known = new std::map<ContextHandle, std::unique_ptr<Device>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Device>& found = (*known)[context];
  if (!found) found.reset(new Device(context));
  return *found;
}

FunctionHandle Device::function(int image, StreamHandle stream) {
  const FunctionHandle found = functions_[static_cast<size_t>(image)].load(std::memory_order_acquire);
  return found != nullptr ? found : load(image, stream);
}

FunctionHandle Device::load(int image, StreamHandle stream) {
  const std::lock_guard<std::mutex> lock(loading_);
  std::atomic<FunctionHandle>& place = functions_[static_cast<size_t>(image)];
  if (const FunctionHandle found = place.load(std::memory_order_acquire)) return found;
  if (is_capturing(stream)) {
    fail("it is not loaded yet, and a graph is being captured: run these shapes once before the capture");
  }
  const Image& wanted = kImages[image];
  ModuleHandle module = nullptr;
  FunctionHandle function = nullptr;
  check(driver().cuModuleLoadData(&module, wanted.content), "cuModuleLoadData");
  check(driver().cuModuleGetFunction(&function, module, wanted.entry), "cuModuleGetFunction");
  if (wanted.shared_bytes > kSharedWithoutAsking) {
    check(driver().cuFuncSetAttribute(function, kMaxDynamicSharedSize, static_cast<int>(wanted.shared_bytes)),
          "cuFuncSetAttribute");
  }
  place.store(function, std::memory_order_release);
  return function;
}

bool is_capturing(StreamHandle stream) {
  int status = 0;
  check(driver().cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  return status != 0;
}

}  // namespace piccard::cuda
