// What an operator's names stand for in one node or one call: attributes and sizes.
#pragma once

#include <cstdint>

#include "spec.h"

namespace piccard {

struct Shape {
  int rank = -1;  // -1: absent, or not known.
  int64_t dims[kMaxRank] = {};  // -1: not known.

  int64_t count() const {
    int64_t product = 1;
    for (int i = 0; i < rank; ++i) product *= dims[i];
    return product;
  }
};

struct Binding {
  int64_t values[kMaxNames] = {};
  uint64_t known = 0;

  void set(int name, int64_t value) {
    values[name] = value;
    known |= uint64_t{1} << name;
  }
  bool knows(uint64_t reads) const { return (reads & ~known) == 0; }

  // Bind the free sizes that the inputs' shapes give, and check every size that is known and the requirements.
  // Throws Error, naming the constraint.
  void bind(const OperatorSpec& spec, const Shape* shapes);

  // What is known of an output's shape.
  Shape output(const Parameter& parameter) const;
};

}  // namespace piccard
