// One node of a session: its attributes and what is known of its inputs before it runs.
#pragma once

#include <memory>
#include <string>

#include "binding.h"
#include "ort_abi.h"

namespace piccard {

class Panels;

class Node {
 public:
  // Throws Error where an attribute, a type or a static shape is not what the operator takes.
  Node(const OperatorSpec& spec, const ort::KernelInfo* info);

  const OperatorSpec& spec() const { return spec_; }
  // "com.deepseek.DeepSeekRMSNorm, node 'norm': "
  const std::string& head() const { return head_; }
  const Binding& attributes() const { return attributes_; }
  float real(int index) const { return reals_[index]; }
  // The shape of an input that never changes; of rank -1 for the others.
  const Shape& constant_shape(int input) const { return constants_[input]; }
  // A constant input that is read in panels, or null.
  const Panels* panels(int input) const { return panels_[input].get(); }
  ElementType type(int input) const { return types_[input]; }

 private:
  void read_attributes(const ort::KernelInfo* info);
  void read_inputs(const ort::KernelInfo* info);
  void check_type(int input);

  const OperatorSpec& spec_;
  std::string head_;
  Binding attributes_;
  float reals_[kMaxReals] = {};
  ElementType types_[kMaxInputs] = {};
  Shape constants_[kMaxInputs];
  std::shared_ptr<const Panels> panels_[kMaxInputs];
};

// A weight that never changes in the order in which the provider's products read it, or null where that is its own.
std::shared_ptr<const Panels> packed(ElementType type, const Shape& shape, const ort::Value* value);

// A tensor's shape. Throws Error where it has more dimensions than any operator takes.
Shape shape_of(const Parameter& input, const ort::TensorInfo* info);

// An attribute's value in the wanted range, or its default. Throws Error.
int64_t checked_integer(const Attribute& attribute, int64_t value);
int64_t checked_choice(const Attribute& attribute, const char* value);

// Throws Error with the status's message and releases it.
void check(ort::Status* status);
// Whether it was fine; releases it.
bool succeeded(ort::Status* status);

}  // namespace piccard
