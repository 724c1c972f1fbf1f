#include "blas.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "error.h"

namespace piccard::cuda {

namespace {

struct Handle_;
using Handle = Handle_*;

// Numbers of cublas_api.h and library_types.h.
constexpr int kTransposed = 1, kAsIs = 0;
constexpr int kReal16 = 2, kBrain16 = 14, kReal32 = 0;
constexpr int kComputeFloat32 = 68, kDefaultAlgorithm = -1;
// What PyTorch gives cuBLAS on Hopper: less makes it choose slower products there.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;
constexpr int64_t kOnes = 1 << 16;
constexpr unsigned short kOneBits[] = {0x3f80, 0x3c00};  // In the order of DTYPES.

#define PICCARD_BLAS_FUNCTIONS(FUNCTION)                                                                              \
  FUNCTION(cublasCreate_v2, Result (*)(Handle*))                                                                      \
  FUNCTION(cublasSetStream_v2, Result (*)(Handle, StreamHandle))                                                      \
  FUNCTION(cublasSetWorkspace_v2, Result (*)(Handle, void*, size_t))                                                  \
  FUNCTION(cublasGemmEx, Result (*)(Handle, int, int, int, int, int, const void*, const void*, int, int, const void*, \
                                    int, int, const void*, void*, int, int, int, int))

struct Blas {
#define PICCARD_BLAS_MEMBER(name, type) \
  using name##_type = type;             \
  name##_type name;
  PICCARD_BLAS_FUNCTIONS(PICCARD_BLAS_MEMBER)
#undef PICCARD_BLAS_MEMBER
};

const Blas* load(std::string* why) {
  // The first is the one that the runtime uses, where it uses one.
  static const char* const names[] = {"libcublas.so.13", "libcublas.so.12"};
  std::string name;
  void* library = open_library("PICCARD_CUBLAS", names, 2, &name, why);
  if (library == nullptr) return nullptr;
  auto* made = new Blas{};
#define PICCARD_BLAS_LOAD(function, type)                             \
  made->function = reinterpret_cast<type>(dlsym(library, #function)); \
  if (made->function == nullptr) {                                    \
    *why = name + " lacks " #function;                                \
    return nullptr;                                                   \
  }
  PICCARD_BLAS_FUNCTIONS(PICCARD_BLAS_LOAD)
#undef PICCARD_BLAS_LOAD
  return made;
}

const Blas& blas() {
  static std::string why;
  static const Blas* const loaded = load(&why);
  if (loaded == nullptr) fail("cuBLAS cannot be used, which products of several rows need: ", why);
  return *loaded;
}

void check_blas(Result result, const char* call) {
  if (result != 0) fail(call, " gives the cuBLAS status ", result);
}

Address allocate(size_t bytes) {
  Address memory = 0;
  check(driver().cuMemAlloc_v2(&memory, bytes), "cuMemAlloc");
  return memory;
}

// What a stream of a context has for good: captured graphs name its memory.
struct PerStream {
  Handle handle = nullptr;
  Address ones[kDtypeCount] = {};
};

PerStream& of_stream(const Gpu& gpu) {
  ContextHandle context = nullptr;
  check(driver().cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  static std::mutex mutex;
  static auto* const known = new std::map<std::pair<ContextHandle, StreamHandle>, std::unique_ptr<PerStream>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<PerStream>& found = (*known)[{context, gpu.stream()}];
  if (found) return *found;
  if (is_capturing(gpu.stream())) {
    fail("cuBLAS is not set up for the stream yet, and a graph is being captured: run these shapes once before the capture");
  }
  auto made = std::make_unique<PerStream>();
  check_blas(blas().cublasCreate_v2(&made->handle), "cublasCreate");
  check_blas(blas().cublasSetStream_v2(made->handle, gpu.stream()), "cublasSetStream");
  // Of its own memory: cuBLAS would allocate within the graph otherwise.
  check_blas(blas().cublasSetWorkspace_v2(made->handle, reinterpret_cast<void*>(allocate(kWorkspaceBytes)), kWorkspaceBytes),
             "cublasSetWorkspace");
  for (int dtype = 0; dtype < kDtypeCount; ++dtype) {
    made->ones[dtype] = allocate(kOnes * sizeof(unsigned short));
    check(driver().cuMemsetD16Async(made->ones[dtype], kOneBits[dtype], kOnes, gpu.stream()), "cuMemsetD16Async");
  }
  found = std::move(made);
  return *found;
}

}  // namespace

void product(const Gpu& gpu, const void* x, const void* weight, void* y, int64_t M, int64_t N, int64_t K,
             const ProductOptions& options) {
  const float alpha = 1.0f, beta = options.add ? 1.0f : 0.0f;
  const int type = gpu.dtype() == 1 ? kReal16 : kBrain16;
  // Its matrices are column-major: y^T = weight x^T.
  check_blas(blas().cublasGemmEx(of_stream(gpu).handle, kTransposed, kAsIs, narrow(N), narrow(M), narrow(K), &alpha, weight,
                                 type, narrow(K), x, type, narrow(options.stride ? options.stride : K), &beta, y,
                                 options.wide ? kReal32 : type, narrow(options.out_stride ? options.out_stride : N),
                                 kComputeFloat32, kDefaultAlgorithm),
             "cublasGemmEx");
}

const void* ones(const Gpu& gpu, int64_t count) {
  if (count > kOnes) fail("a product with a bias has ", count, " rows; it may have ", kOnes);
  return reinterpret_cast<const void*>(of_stream(gpu).ones[gpu.dtype()]);
}

}  // namespace piccard::cuda
