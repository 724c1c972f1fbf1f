// The part of the CUDA driver's interface that this library uses. libcuda is opened at run time, so that the library
// builds and loads where there is none; types are opaque and numbers are those of the driver's stable interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace piccard::cuda {

struct Context_;
struct Module_;
struct Function_;
struct Stream_;
using ContextHandle = Context_*;
using ModuleHandle = Module_*;
using FunctionHandle = Function_*;
using StreamHandle = Stream_*;
using Result = int;
using Address = unsigned long long;

constexpr int kMultiprocessorCount = 16, kCapabilityMajor = 75, kCapabilityMinor = 76;  // CUdevice_attribute
constexpr int kMaxDynamicSharedSize = 8;                                                // CUfunction_attribute
constexpr int kProgrammaticStreamSerialization = 6;                                     // CUlaunchAttributeID

// CUlaunchAttribute
struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    int allowed;
  } value;
};

// CUlaunchConfig
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  StreamHandle stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

// CUDA_MEMCPY2D
struct Copy2D {
  size_t source_x, source_y;
  int source_type;
  const void* source_host;
  Address source;
  void* source_array;
  size_t source_pitch;
  size_t target_x, target_y;
  int target_type;
  void* target_host;
  Address target;
  void* target_array;
  size_t target_pitch;
  size_t width, height;
};
constexpr int kDeviceMemory = 2;  // CUmemorytype

// name, type of the function
#define PICCARD_DRIVER_FUNCTIONS(FUNCTION)                                                     \
  FUNCTION(cuInit, Result (*)(unsigned))                                                       \
  FUNCTION(cuGetErrorName, Result (*)(Result, const char**))                                   \
  FUNCTION(cuGetErrorString, Result (*)(Result, const char**))                                 \
  FUNCTION(cuCtxGetCurrent, Result (*)(ContextHandle*))                                        \
  FUNCTION(cuCtxGetDevice, Result (*)(int*))                                                   \
  FUNCTION(cuDeviceGetAttribute, Result (*)(int*, int, int))                                   \
  FUNCTION(cuModuleLoadData, Result (*)(ModuleHandle*, const void*))                           \
  FUNCTION(cuModuleGetFunction, Result (*)(FunctionHandle*, ModuleHandle, const char*))        \
  FUNCTION(cuFuncSetAttribute, Result (*)(FunctionHandle, int, int))                           \
  FUNCTION(cuLaunchKernelEx, Result (*)(const LaunchConfig*, FunctionHandle, void**, void**))  \
  FUNCTION(cuStreamIsCapturing, Result (*)(StreamHandle, int*))                                \
  FUNCTION(cuMemAlloc_v2, Result (*)(Address*, size_t))                                        \
  FUNCTION(cuMemcpyDtoDAsync_v2, Result (*)(Address, Address, size_t, StreamHandle))           \
  FUNCTION(cuMemcpyHtoDAsync_v2, Result (*)(Address, const void*, size_t, StreamHandle))       \
  FUNCTION(cuMemcpy2DAsync_v2, Result (*)(const Copy2D*, StreamHandle))                        \
  FUNCTION(cuMemsetD16Async, Result (*)(Address, unsigned short, size_t, StreamHandle))

struct Driver {
#define PICCARD_DRIVER_MEMBER(name, type) \
  using name##_type = type;               \
  name##_type name;
  PICCARD_DRIVER_FUNCTIONS(PICCARD_DRIVER_MEMBER)
#undef PICCARD_DRIVER_MEMBER
};

// Opened once: PICCARD_CUDA_DRIVER, or libcuda.so.1. Throws Error where there is none, or it lacks a function.
const Driver& driver();

// Throws Error, naming the call, where it did not succeed.
void check(Result result, const char* call);

inline Address address(const void* pointer) { return reinterpret_cast<Address>(pointer); }

// The first of `names` that opens, or what the environment's `variable` names; null where none does, and why.
void* open_library(const char* variable, const char* const* names, int count, std::string* opened, std::string* why);

}  // namespace piccard::cuda
