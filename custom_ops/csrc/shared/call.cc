#include "call.h"

#include "error.h"

namespace piccard {

Call::Call(const Node& node, ort::KernelContext* context)
    : node_(node), context_(context), binding_(node.attributes()) {
  const OperatorSpec& spec = node.spec();
  size_t count = 0;
  check(ort::call<ort::KernelContext_GetInputCount_>(static_cast<const ort::KernelContext*>(context), &count));
  check(ort::call<ort::KernelContext_GetOutputCount_>(static_cast<const ort::KernelContext*>(context), &output_count_));
  Shape shapes[kMaxInputs];
  for (int i = 0; i < spec.input_count && i < static_cast<int>(count); ++i) {
    const ort::Value* value = nullptr;
    check(ort::call<ort::KernelContext_GetInput_>(static_cast<const ort::KernelContext*>(context),
                                                 static_cast<size_t>(i), &value));
    if (value == nullptr) continue;
    Tensor& tensor = inputs_[i];
    tensor.type = node.type(i);
    tensor.shape = node.constant_shape(i);
    if (tensor.shape.rank < 0) {
      ort::Owned<ort::TensorInfo, ort::ReleaseTensorTypeAndShapeInfo_> info;
      check(ort::call<ort::GetTensorTypeAndShape_>(value, &info.held));
      tensor.shape = shape_of(spec.inputs[i], info.held);
    }
    shapes[i] = tensor.shape;
    check(ort::call<ort::GetTensorMutableData_>(const_cast<ort::Value*>(value), &tensor.data));
  }
  binding_.bind(spec, shapes);
}

bool Call::wants(int index) const {
  // A graph may leave the name of an output empty, which is counted all the same.
  return static_cast<size_t>(index) < output_count_ &&
         value_of(index, binding_.output(node_.spec().outputs[index])) != nullptr;
}

ort::Value* Call::value_of(int output, const Shape& shape) const {
  ort::Value* value = nullptr;
  check(ort::call<ort::KernelContext_GetOutput_>(context_, static_cast<size_t>(output),
                                                static_cast<const int64_t*>(shape.dims),
                                                static_cast<size_t>(shape.rank), &value));
  return value;
}

Tensor Call::output(int index) {
  const Parameter& parameter = node_.spec().outputs[index];
  Tensor tensor;
  tensor.shape = binding_.output(parameter);
  // Constraint names decide: the first input of the same one has the output's type.
  tensor.type = kUndefined;
  for (int i = 0; i < node_.spec().input_count && tensor.type == kUndefined; ++i) {
    if (node_.spec().inputs[i].constraint == parameter.constraint) tensor.type = node_.type(i);
  }
  ort::Value* const value = value_of(index, tensor.shape);
  if (value == nullptr) fail("output ", parameter.name, " is not wanted by the graph and has to be");
  check(ort::call<ort::GetTensorMutableData_>(value, &tensor.data));
  if (parameter.alias >= 0 && tensor.data != inputs_[parameter.alias].data) {
    fail("output ", parameter.name, " has to share the memory of input ", node_.spec().inputs[parameter.alias].name,
         ", which is written in place: bind both to one address on the operator's own device, with no copy between");
  }
  return tensor;
}

const ort::MemoryInfo* Call::memory(int input) const {
  const ort::Value* value = nullptr;
  const ort::MemoryInfo* memory = nullptr;
  check(ort::call<ort::KernelContext_GetInput_>(static_cast<const ort::KernelContext*>(context_),
                                               static_cast<size_t>(input), &value));
  check(ort::call<ort::GetTensorMemoryInfo_>(value, &memory));
  return memory;
}

void Call::run(void (*step)(void*, size_t), size_t count, void* data) {
  check(ort::call<ort::KernelContext_ParallelFor_>(static_cast<const ort::KernelContext*>(context_), step, count,
                                                  size_t{0}, data));
}

}  // namespace piccard
