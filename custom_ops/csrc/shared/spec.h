// What the generated header describes operators with. The rows themselves stand in deepseek_ops/operators/.
#pragma once

#include <algorithm>
#include <cstdint>

namespace piccard {

class Call;

enum ElementType : int {
  kUndefined = 0,
  kFloat = 1,
  kUint8 = 2,
  kInt32 = 6,
  kInt64 = 7,
  kFloat16 = 10,
  kBfloat16 = 16,
  kFloat8 = 17,
};

constexpr int kMaxRank = 4;
constexpr int kMaxNames = 24;
constexpr int kMaxInputs = 16;
constexpr int kMaxOutputs = 4;
constexpr int kMaxReals = 4;
// Of attributes and of a sequence's length: buffers are sized by products of two and small factors, which have to fit.
constexpr int64_t kMaxInteger = int64_t{1} << 24;
// Of a dimension, far above any tensor that a machine holds: formulas over sizes and attributes have to fit too.
constexpr int64_t kMaxSize = int64_t{1} << 48;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t next_power_of_2(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}
using std::max;
using std::min;

// A size over the operator's names: attributes that are integers or choices first, then free sizes.
struct Formula {
  const char* text;
  int name;        // The free size that it is, or -1.
  uint64_t reads;  // A bit for every name that it reads.
  int64_t (*evaluate)(const int64_t* values);
};

struct Constraint {
  const char* name;
  uint32_t types;            // A bit for every element type.
  uint32_t refused;          // Of these, the ones that are known but not built.
  const char* refusal;       // Why, or null.
};

struct Parameter {
  const char* name;
  int constraint;
  int rank;
  const Formula* shape;
  bool optional;
  int alias;    // Of an output: the input whose memory it has to share, or -1.
  bool panels;  // Of an input: a weight that only products read, in panels where it never changes.
  bool host;    // Of an input: it is read in the host's memory.
  const char* refusal;  // Of an input: what to do instead where the provider does not take it, or null.
};

enum class Kind { kInteger, kReal, kChoice };

struct Attribute {
  const char* name;
  Kind kind;
  int index;  // Among the names, or among the reals.
  bool required;
  int64_t integer;
  float real;
  int64_t minimum;
  const char* const* choices;
  const char* const* refusals;  // Null where a choice is built.
  int count;
};

struct Requirement {
  const char* text;
  bool equal;
  uint64_t reads;
  int64_t (*left)(const int64_t* values);
  int64_t (*right)(const int64_t* values);
};

struct OperatorSpec {
  const char* name;
  int since_version;
  void (*compute)(Call&);
  const Constraint* constraints;
  const Parameter* inputs;
  int input_count;
  const Parameter* outputs;
  int output_count;
  const Attribute* attributes;
  int attribute_count;
  const Requirement* requirements;
  int requirement_count;
  // The inputs whose types decide the outputs'.
  const int* anchors;
  int anchor_count;
};

const char* element_name(int type);

}  // namespace piccard
