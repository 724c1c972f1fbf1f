#include "driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "error.h"

namespace piccard::cuda {

namespace {

const Driver* load(std::string* why) {
  static const char* const names[] = {"libcuda.so.1"};
  std::string name;
  void* library = open_library("PICCARD_CUDA_DRIVER", names, 1, &name, why);
  if (library == nullptr) return nullptr;
  auto* made = new Driver{};
#define PICCARD_DRIVER_LOAD(function, type)                                         \
  made->function = reinterpret_cast<type>(dlsym(library, #function));               \
  if (made->function == nullptr) {                                                  \
    *why = name + " lacks " #function ": install a newer NVIDIA driver (12.0 or later)"; \
    return nullptr;                                                                 \
  }
  PICCARD_DRIVER_FUNCTIONS(PICCARD_DRIVER_LOAD)
#undef PICCARD_DRIVER_LOAD
  const Result result = made->cuInit(0);
  if (result != 0) {
    *why = name + ": cuInit gives error " + std::to_string(result) + ": is there an NVIDIA GPU, and may this process use it?";
    return nullptr;
  }
  return made;
}

}  // namespace

void* open_library(const char* variable, const char* const* names, int count, std::string* opened, std::string* why) {
  const char* asked = std::getenv(variable);
  if (asked != nullptr && asked[0] != '\0') {
    names = &asked;
    count = 1;
  }
  for (int i = 0; i < count; ++i) {
    if (void* library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL)) {
      *opened = names[i];
      return library;
    }
    const char* said = dlerror();
    *why += (i ? "; " : "") + std::string(said == nullptr ? names[i] : said);
  }
  return nullptr;
}

const Driver& driver() {
  static std::string why;
  static const Driver* const loaded = load(&why);
  if (loaded == nullptr) fail("the CUDA driver cannot be used: ", why);
  return *loaded;
}

void check(Result result, const char* call) {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  driver().cuGetErrorName(result, &name);
  driver().cuGetErrorString(result, &text);
  fail(call, " gives ", name == nullptr ? std::to_string(result) : name, text == nullptr ? "" : " (", text == nullptr ? "" : text,
       text == nullptr ? "" : ")");
}

}  // namespace piccard::cuda
