#include "call.h"

#include <new>

#include "error.h"
#include "isa.h"

namespace piccard {

Floats::Floats(const Tensor& tensor) {
  if (!tensor.present()) return;
  if (tensor.type == kFloat) {
    data_ = tensor.as<float>();
    return;
  }
  const int64_t count = tensor.shape.count();
  copy_.reset(new float[static_cast<size_t>(count)]);
  isa().widen(format_of(tensor.type), tensor.data, copy_.get(), count);
  data_ = copy_.get();
}

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

Tensor Call::output(int index) {
  const Parameter& parameter = node_.spec().outputs[index];
  Tensor tensor;
  tensor.shape = binding_.output(parameter);
  // Constraint names decide: the first input of the same one has the output's type.
  tensor.type = kUndefined;
  for (int i = 0; i < node_.spec().input_count && tensor.type == kUndefined; ++i) {
    if (node_.spec().inputs[i].constraint == parameter.constraint) tensor.type = node_.type(i);
  }
  ort::Value* value = nullptr;
  check(ort::call<ort::KernelContext_GetOutput_>(context_, static_cast<size_t>(index),
                                                static_cast<const int64_t*>(tensor.shape.dims),
                                                static_cast<size_t>(tensor.shape.rank), &value));
  if (value == nullptr) fail("output ", parameter.name, " is not wanted by the graph and has to be");
  check(ort::call<ort::GetTensorMutableData_>(value, &tensor.data));
  if (parameter.alias >= 0 && tensor.data != inputs_[parameter.alias].data) {
    fail("output ", parameter.name, " has to share the memory of input ", node_.spec().inputs[parameter.alias].name,
         ", which is written in place: bind both to one address on the operator's own device, with no copy between");
  }
  return tensor;
}

void Call::run(void (*step)(void*, size_t), size_t count, void* data) {
  check(ort::call<ort::KernelContext_ParallelFor_>(static_cast<const ort::KernelContext*>(context_), step, count,
                                                  size_t{0}, data));
}

Result::Result(Call& call, int index) : tensor_(call.output(index)) {
  if (tensor_.type == kFloat) {
    data_ = static_cast<float*>(tensor_.data);
    return;
  }
  buffer_.reset(new float[static_cast<size_t>(tensor_.shape.count())]);
  data_ = buffer_.get();
}

void Result::finish() {
  if (buffer_) isa().narrow(format_of(tensor_.type), buffer_.get(), tensor_.data, tensor_.shape.count());
}

float* thread_floats(int64_t count) {
  struct Buffer {
    float* data = nullptr;
    int64_t size = 0;
    ~Buffer() { ::operator delete[](data, std::align_val_t{64}); }
  };
  static thread_local Buffer buffer;
  if (buffer.size < count) {
    ::operator delete[](buffer.data, std::align_val_t{64});
    buffer.data = nullptr;
    buffer.size = 0;
    buffer.data = static_cast<float*>(::operator new[](static_cast<size_t>(count) * sizeof(float), std::align_val_t{64}));
    buffer.size = count;
  }
  return buffer.data;
}

}  // namespace piccard
