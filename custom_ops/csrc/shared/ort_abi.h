// The part of ONNX Runtime's C interface that this library uses, by slot number. The interface is append-only, so that
// numbers stay; its types are opaque here. No ONNX Runtime header is needed to build.
#pragma once

#include <cstddef>
#include <cstdint>

namespace piccard::ort {

struct Api;  // A table of function pointers.
struct Status;
struct Value;
struct TypeInfo;
struct TensorInfo;
struct KernelInfo;
struct KernelContext;
struct ShapeInferContext;
struct SessionOptions;
struct OpDomain;
struct OpAttr;
struct CustomOp;

// The version whose table holds every slot below, and the layout of CustomOp.
constexpr uint32_t kApiVersion = 18;

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };
enum AttrType : int { kAttrInt = 1 };
enum MemoryType : int { kCpuInput = -2, kDeviceMemory = 0 };

struct MemoryInfo;

struct Allocator;

// name, slot, type of the function
#define PICCARD_ORT_SLOTS(SLOT)                                                                       \
  SLOT(CreateStatus, 0, Status* (*)(ErrorCode, const char*))                                          \
  SLOT(GetErrorMessage, 2, const char* (*)(const Status*))                                            \
  SLOT(CreateCustomOpDomain, 26, Status* (*)(const char*, OpDomain**))                                \
  SLOT(CustomOpDomain_Add, 27, Status* (*)(OpDomain*, const CustomOp*))                               \
  SLOT(AddCustomOpDomain, 28, Status* (*)(SessionOptions*, OpDomain*))                                \
  SLOT(GetTensorMutableData, 51, Status* (*)(Value*, void**))                                         \
  SLOT(CastTypeInfoToTensorInfo, 55, Status* (*)(const TypeInfo*, const TensorInfo**))                \
  SLOT(CreateTensorTypeAndShapeInfo, 57, Status* (*)(TensorInfo**))                                   \
  SLOT(SetTensorElementType, 58, Status* (*)(TensorInfo*, int))                                       \
  SLOT(SetDimensions, 59, Status* (*)(TensorInfo*, const int64_t*, size_t))                           \
  SLOT(GetTensorElementType, 60, Status* (*)(const TensorInfo*, int*))                                \
  SLOT(GetDimensionsCount, 61, Status* (*)(const TensorInfo*, size_t*))                               \
  SLOT(GetDimensions, 62, Status* (*)(const TensorInfo*, int64_t*, size_t))                           \
  SLOT(GetSymbolicDimensions, 63, Status* (*)(const TensorInfo*, const char**, size_t))               \
  SLOT(GetTensorTypeAndShape, 65, Status* (*)(const Value*, TensorInfo**))                            \
  SLOT(AllocatorAlloc, 75, Status* (*)(Allocator*, size_t, void**))                                   \
  SLOT(AllocatorFree, 76, Status* (*)(Allocator*, void*))                                             \
  SLOT(KernelInfoGetAttribute_float, 85, Status* (*)(const KernelInfo*, const char*, float*))         \
  SLOT(KernelInfoGetAttribute_int64, 86, Status* (*)(const KernelInfo*, const char*, int64_t*))       \
  SLOT(KernelInfoGetAttribute_string, 87, Status* (*)(const KernelInfo*, const char*, char*, size_t*)) \
  SLOT(KernelContext_GetInputCount, 88, Status* (*)(const KernelContext*, size_t*))                   \
  SLOT(KernelContext_GetOutputCount, 89, Status* (*)(const KernelContext*, size_t*))                  \
  SLOT(KernelContext_GetInput, 90, Status* (*)(const KernelContext*, size_t, const Value**))          \
  SLOT(KernelContext_GetOutput, 91, Status* (*)(KernelContext*, size_t, const int64_t*, size_t, Value**)) \
  SLOT(ReleaseStatus, 93, void (*)(Status*))                                                          \
  SLOT(ReleaseTypeInfo, 98, void (*)(TypeInfo*))                                                      \
  SLOT(ReleaseTensorTypeAndShapeInfo, 99, void (*)(TensorInfo*))                                      \
  SLOT(ReleaseAllocator, 132, void (*)(Allocator*))                                                   \
  SLOT(KernelInfoGetAttributeArray_int64, 163, Status* (*)(const KernelInfo*, const char*, int64_t*, size_t*)) \
  SLOT(KernelContext_GetGPUComputeStream, 193, Status* (*)(const KernelContext*, void**))             \
  SLOT(GetTensorMemoryInfo, 194, Status* (*)(const Value*, const MemoryInfo**))                       \
  SLOT(KernelInfo_GetInputCount, 230, Status* (*)(const KernelInfo*, size_t*))                        \
  SLOT(KernelInfo_GetInputTypeInfo, 234, Status* (*)(const KernelInfo*, size_t, TypeInfo**))          \
  SLOT(KernelInfo_GetNodeName, 244, Status* (*)(const KernelInfo*, char*, size_t*))                   \
  SLOT(KernelInfoGetConstantInput_tensor, 249, Status* (*)(const KernelInfo*, size_t, int*, const Value**)) \
  SLOT(KernelContext_GetAllocator, 253, Status* (*)(const KernelContext*, const MemoryInfo*, Allocator**)) \
  SLOT(ShapeInferContext_GetInputCount, 267, Status* (*)(const ShapeInferContext*, size_t*))          \
  SLOT(ShapeInferContext_GetInputTypeShape, 268, Status* (*)(const ShapeInferContext*, size_t, TensorInfo**)) \
  SLOT(ShapeInferContext_GetAttribute, 269, Status* (*)(const ShapeInferContext*, const char*, const OpAttr**)) \
  SLOT(ShapeInferContext_SetOutputTypeShape, 270, Status* (*)(const ShapeInferContext*, size_t, const TensorInfo*)) \
  SLOT(SetSymbolicDimensions, 271, Status* (*)(TensorInfo*, const char**, size_t))                    \
  SLOT(ReadOpAttr, 272, Status* (*)(const OpAttr*, AttrType, void*, size_t, size_t*))                 \
  SLOT(KernelContext_ParallelFor, 274, Status* (*)(const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*)) \
  SLOT(KernelContext_GetScratchBuffer, 277, Status* (*)(const KernelContext*, const MemoryInfo*, size_t, void**))

struct ApiBase {
  const Api* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// The order is the runtime's.
struct CustomOp {
  uint32_t version;
  void* (*CreateKernel)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*GetName)(const CustomOp*);
  const char* (*GetExecutionProviderType)(const CustomOp*);
  int (*GetInputType)(const CustomOp*, size_t);
  size_t (*GetInputTypeCount)(const CustomOp*);
  int (*GetOutputType)(const CustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const CustomOp*);
  void (*KernelCompute)(void*, KernelContext*);
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const CustomOp*, size_t);
  int (*GetOutputCharacteristic)(const CustomOp*, size_t);
  int (*GetInputMemoryType)(const CustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const CustomOp*);
  int (*GetVariadicInputHomogeneity)(const CustomOp*);
  int (*GetVariadicOutputMinArity)(const CustomOp*);
  int (*GetVariadicOutputHomogeneity)(const CustomOp*);
  Status* (*CreateKernelV2)(const CustomOp*, const Api*, const KernelInfo*, void**);
  Status* (*KernelComputeV2)(void*, KernelContext*);
  Status* (*InferOutputShapeFn)(const CustomOp*, ShapeInferContext*);
  int (*GetStartVersion)(const CustomOp*);
  int (*GetEndVersion)(const CustomOp*);
  size_t (*GetMayInplace)(int**, int**);
  void (*ReleaseMayInplace)(int*, int*);
  size_t (*GetAliasMap)(int**, int**);
  void (*ReleaseAliasMap)(int*, int*);
};

#define PICCARD_ORT_FUNCTION(name, slot, type)                                  \
  struct name##_ {                                                              \
    using Function = type;                                                      \
    static constexpr size_t kSlot = slot;                                       \
  };
PICCARD_ORT_SLOTS(PICCARD_ORT_FUNCTION)
#undef PICCARD_ORT_FUNCTION

// The runtime that loaded the library.
inline const Api* g_api = nullptr;

template <typename Slot, typename... Arguments>
inline auto call(Arguments... arguments) {
  using Function = typename Slot::Function;
  return reinterpret_cast<Function>(reinterpret_cast<void* const*>(g_api)[Slot::kSlot])(arguments...);
}

// Released at the end of the scope, after an error too.
template <typename Info, typename Release>
struct Owned {
  Info* held = nullptr;

  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (held != nullptr) call<Release>(held);
  }
};

}  // namespace piccard::ort
