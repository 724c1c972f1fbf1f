/* A CUDA driver and a cuBLAS for tests on a machine without a GPU: device memory is the host's, launches and products
   are handed to callbacks, and any call can be made to fail. */
#include <stdlib.h>
#include <string.h>

typedef unsigned long long Address;

typedef void (*LaunchCallback)(const char* image, const unsigned* grid, const unsigned* block, unsigned shared_bytes,
                               int chained, void** arguments);
typedef void (*ProductCallback)(int transposed, int rows, int columns, int depth, int stride, const void* a, const void* b, float beta,
                                void* c, int c_stride, int type, int out_type);

struct Module { const char* image; };
struct Attribute { int id; char pad[4]; union { char bytes[64]; int allowed; } value; };
struct Config { unsigned grid[3], block[3], shared_bytes; void* stream; struct Attribute* attributes; unsigned count; };
struct Copy2D {
  size_t source_x, source_y; int source_type; const void* source_host; Address source; void* source_array;
  size_t source_pitch, target_x, target_y; int target_type; void* target_host; Address target; void* target_array;
  size_t target_pitch, width, height;
};

static LaunchCallback launch_callback;
static ProductCallback product_callback;
static const char* failing;
static int failing_code, capturing, capability = 90, context = 1, loads;

void fake_cuda_listen(LaunchCallback launches, ProductCallback products) {
  launch_callback = launches;
  product_callback = products;
}
void fake_cuda_fail(const char* call, int code) {
  free((void*)failing);
  failing = call ? strdup(call) : NULL;
  failing_code = code;
}
void fake_cuda_set(int is_capturing, int its_capability, int has_context) {
  capturing = is_capturing;
  capability = its_capability;
  context = has_context;
}
int fake_cuda_loads(void) { return loads; }

static int result(const char* call) { return failing && strcmp(call, failing) == 0 ? failing_code : 0; }

int cuInit(unsigned flags) { (void)flags; return result("cuInit"); }
int cuGetErrorName(int code, const char** name) { *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE"; return 0; }
int cuGetErrorString(int code, const char** text) { (void)code; *text = "as the test asked"; return 0; }
int cuCtxGetCurrent(void** current) { *current = context ? (void*)&context : NULL; return result("cuCtxGetCurrent"); }
int cuCtxGetDevice(int* device) { *device = 0; return result("cuCtxGetDevice"); }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == 16 ? 3 : attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : -1;
  return result("cuDeviceGetAttribute");
}
int cuModuleLoadData(void** module, const void* image) {
  struct Module* made = malloc(sizeof *made);
  made->image = image;
  *module = made;
  ++loads;
  return result("cuModuleLoadData");
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  (void)name;
  *function = module;
  return result("cuModuleGetFunction");
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  (void)function, (void)attribute, (void)value;
  return result("cuFuncSetAttribute");
}
int cuLaunchKernelEx(const struct Config* config, void* function, void** arguments, void** extra) {
  (void)extra;
  int code = result("cuLaunchKernelEx");
  int chained = config->count == 1 && config->attributes[0].id == 6 && config->attributes[0].value.allowed == 1;
  if (code == 0 && launch_callback) {
    launch_callback(((struct Module*)function)->image, config->grid, config->block, config->shared_bytes, chained, arguments);
  }
  return code;
}
int cuStreamIsCapturing(void* stream, int* status) { (void)stream; *status = capturing; return result("cuStreamIsCapturing"); }
int cuMemAlloc_v2(Address* memory, size_t bytes) { *memory = (Address)malloc(bytes); return result("cuMemAlloc"); }
int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* stream) {
  (void)stream;
  memcpy((void*)to, (const void*)from, bytes);
  return result("cuMemcpyDtoDAsync");
}
int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
  (void)stream;
  memcpy((void*)to, from, bytes);
  return result("cuMemcpyHtoDAsync");
}
int cuMemcpy2DAsync_v2(const struct Copy2D* copy, void* stream) {
  (void)stream;
  for (size_t row = 0; row < copy->height; ++row) {
    memcpy((char*)copy->target + row * copy->target_pitch, (const char*)copy->source + row * copy->source_pitch, copy->width);
  }
  return result("cuMemcpy2DAsync");
}
int cuMemsetD16Async(Address to, unsigned short value, size_t count, void* stream) {
  (void)stream;
  for (size_t i = 0; i < count; ++i) ((unsigned short*)to)[i] = value;
  return result("cuMemsetD16Async");
}

int cublasCreate_v2(void** handle) { *handle = &context; return result("cublasCreate"); }
int cublasSetStream_v2(void* handle, void* stream) { (void)handle, (void)stream; return result("cublasSetStream"); }
int cublasSetWorkspace_v2(void* handle, void* memory, size_t bytes) {
  (void)handle, (void)memory, (void)bytes;
  return result("cublasSetWorkspace");
}
int cublasGemmEx(void* handle, int of_a, int of_b, int m, int n, int k, const void* alpha, const void* a, int a_type, int lda,
                 const void* b, int b_type, int ldb, const void* beta, void* c, int c_type, int ldc, int compute, int algorithm) {
  (void)handle, (void)alpha, (void)compute, (void)algorithm;
  int code = result("cublasGemmEx");
  if (of_b != 0 || a_type != b_type || lda != k || ldb < k || ldc < m) return 7;
  if (code == 0 && product_callback) product_callback(of_a, n, m, k, ldb, b, a, *(const float*)beta, c, ldc, a_type, c_type);
  return code;
}
