#include "isa.h"

#include <cstdlib>
#include <cstring>

namespace piccard {

namespace {

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

const Isa& choose() {
  __builtin_cpu_init();
  const char* asked = std::getenv("PICCARD_OPS_ISA");
  const bool generic = asked != nullptr && std::strcmp(asked, kGenericIsa.name) == 0;
  const bool avx2 = asked != nullptr && std::strcmp(asked, kAvx2Isa.name) == 0;
  if (generic || !has_avx2()) return kGenericIsa;
  return avx2 || !has_avx512() ? kAvx2Isa : kAvx512Isa;
}
#else
const Isa& choose() { return kGenericIsa; }
#endif

}  // namespace

const Isa& isa() {
  static const Isa& chosen = choose();
  return chosen;
}

}  // namespace piccard

// The name of the loops that serve on this machine, for tests.
extern "C" __attribute__((visibility("default"))) const char* piccard_ops_isa() { return piccard::isa().name; }
