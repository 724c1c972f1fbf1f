// A device kernel with its rows, as deepseek_engine/kernels/variants.py has them; the tables are generated.
#pragma once

#include <cstddef>
#include <cstdint>

#include "spec.h"

namespace piccard {

// The order of ARCHITECTURES and DTYPES in variants.py.
constexpr int kArchitectures[] = {80, 89, 90};
constexpr int kArchitectureCount = 3;
constexpr int kDtypeCount = 2;
constexpr int kHopper = 2;

struct Range {
  int dimension;
  int64_t low, high;
};

struct Row {
  const char* name;
  int warps;
  int blocks_per_multiprocessor;
  uint32_t architectures;  // A bit for each.
  uint32_t dtypes;
  const Range* when;
  int when_count;
  const int64_t* constants;
  const int (*images)[kDtypeCount];  // Of each architecture; -1 where the library has none.

  // The first row that fits is taken; a dimension that is not given is -1 and lies in no range.
  bool fits(const int64_t* dims) const {
    for (int i = 0; i < when_count; ++i) {
      const int64_t found = dims[when[i].dimension];
      if (found < when[i].low || found > when[i].high) return false;
    }
    return true;
  }
};

struct Argument {
  enum Kind { kPointer, kInt32, kInt64, kFloat32 };
  const char* name;
  Kind kind;
  size_t offset;
  int64_t alignment;  // What it is declared a multiple of, or 0.
};

struct Kernel {
  const char* name;
  bool typed;    // Whether its binaries differ by dtype.
  bool chained;  // Whether it may start while the launch before it ends, where the architecture can.
  const Argument* arguments;
  int argument_count;
  const char* const* dims;
  int dim_count;
  const Row* rows;
  int row_count;
  void (*grid)(const int64_t* dims, const int64_t* constants, int64_t* blocks);

  const Row* choose(int architecture, int dtype, const int64_t* wanted) const {
    for (int i = 0; i < row_count; ++i) {
      const Row& row = rows[i];
      const bool of_type = !typed || (row.dtypes >> dtype & 1u);
      if (of_type && (row.architectures >> architecture & 1u) && row.fits(wanted)) return &row;
    }
    return nullptr;
  }
};

// The place among kArchitectures whose binaries run on a device of `capability` (86 runs those of 80), or -1.
inline int nearest_architecture(int capability) {
  int found = -1;
  for (int i = 0; i < kArchitectureCount; ++i) {
    if (kArchitectures[i] <= capability && kArchitectures[i] / 10 == capability / 10) found = i;
  }
  return found;
}

// One embedded binary.
struct Image {
  const unsigned char* content;
  const char* entry;
  unsigned shared_bytes;
};

extern const Image kImages[];
extern const int kImageCount;

}  // namespace piccard
