// Entry point of the library: makes the runtime's operators out of the generated rows.
#include <atomic>
#include <mutex>
#include <vector>

#include "call.h"
#include "error.h"
#include "operators.generated.h"

namespace piccard {

std::atomic<uint64_t> g_computed{0};

namespace {

// One kernel of an operator, as the runtime sees it. The runtime chooses among those of a name by the types of the
// anchors, which decide those of the outputs; any other input may be of any type there, and is checked by Node, whose
// errors name the constraint. For the same reason every type that an anchor may not be has a kernel that refuses it.
struct Registered : ort::CustomOp {
  const OperatorSpec* spec;
  int input_types[kMaxInputs];
  int output_types[kMaxOutputs];
};

constexpr int kAnyTypes[] = {1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 16, 17};

const Registered& self(const ort::CustomOp* op) { return *static_cast<const Registered*>(op); }

template <typename Function>
ort::Status* guarded(const Function& function) {
  try {
    function();
    return nullptr;
  } catch (const std::exception& error) {
    return ort::call<ort::CreateStatus_>(ort::kInvalidArgument, error.what());
  }
}

ort::Status* create_kernel(const ort::CustomOp* op, const ort::Api*, const ort::KernelInfo* info, void** kernel) {
  return guarded([&] { *kernel = new Node(*self(op).spec, info); });
}

ort::Status* compute(void* kernel, ort::KernelContext* context) {
  const auto& node = *static_cast<Node*>(kernel);
  g_computed.fetch_add(1, std::memory_order_relaxed);
  return guarded([&] {
    try {
      Call call(node, context);
      node.spec().compute(call);
    } catch (const std::exception& error) {
      throw Error(node.head() + error.what());
    }
  });
}

int64_t inferred_attribute(const Attribute& attribute, ort::ShapeInferContext* context, bool* known) {
  const ort::OpAttr* found = nullptr;
  *known = !attribute.required;
  if (!succeeded(ort::call<ort::ShapeInferContext_GetAttribute_>(
          static_cast<const ort::ShapeInferContext*>(context), attribute.name, &found))) {
    return attribute.integer;
  }
  int64_t value = 0;
  size_t size = 0;
  *known = succeeded(ort::call<ort::ReadOpAttr_>(found, ort::kAttrInt, static_cast<void*>(&value), sizeof value, &size));
  return *known ? checked_integer(attribute, value) : 0;
}

// The types and shapes of the inputs, and the names of free sizes that are not known as numbers.
struct Inferred {
  int types[kMaxInputs] = {};
  Shape shapes[kMaxInputs];
  const char* symbols[kMaxNames] = {};

  Inferred(const OperatorSpec& spec, const ort::ShapeInferContext* context) {
    size_t count = 0;
    check(ort::call<ort::ShapeInferContext_GetInputCount_>(context, &count));
    for (int i = 0; i < spec.input_count && i < static_cast<int>(count); ++i) {
      ort::TensorInfo* info = nullptr;
      // The runtime owns it.
      if (!succeeded(ort::call<ort::ShapeInferContext_GetInputTypeShape_>(context, static_cast<size_t>(i), &info))) {
        continue;
      }
      check(ort::call<ort::GetTensorElementType_>(static_cast<const ort::TensorInfo*>(info), &types[i]));
      read(spec.inputs[i], info, &shapes[i]);
    }
  }

  void read(const Parameter& input, const ort::TensorInfo* info, Shape* shape) {
    size_t rank = 0;
    check(ort::call<ort::GetDimensionsCount_>(info, &rank));
    // An input of unknown rank shows as one without dimensions.
    if (static_cast<int>(rank) != input.rank) return;
    shape->rank = input.rank;
    check(ort::call<ort::GetDimensions_>(info, shape->dims, rank));
    const char* names[kMaxRank] = {};
    check(ort::call<ort::GetSymbolicDimensions_>(info, names, rank));
    for (int d = 0; d < input.rank; ++d) {
      const int name = input.shape[d].name;
      if (name >= 0 && symbols[name] == nullptr && names[d] != nullptr && names[d][0] != '\0') symbols[name] = names[d];
    }
  }
};

int lowest(uint32_t types) { return __builtin_ctz(types); }

// The type of an output: its anchor's, or the first that there may be where that one is refused.
int output_type(const OperatorSpec& spec, int output, const int* input_types) {
  const int constraint = spec.outputs[output].constraint;
  const uint32_t types = spec.constraints[constraint].types;
  for (int i = 0; i < spec.anchor_count; ++i) {
    const int anchor = spec.anchors[i], type = input_types[anchor];
    if (spec.inputs[anchor].constraint == constraint && type > 0 && type < 32 && types >> type & 1u) return type;
  }
  return lowest(types);
}

void set_output(ort::ShapeInferContext* context, const OperatorSpec& spec, int index, const Binding& binding,
                const Inferred& inferred) {
  const Parameter& output = spec.outputs[index];
  const Shape shape = binding.output(output);
  const char* names[kMaxRank] = {"", "", "", ""};
  for (int d = 0; d < shape.rank; ++d) {
    if (shape.dims[d] >= 0) continue;
    const int name = output.shape[d].name;
    if (name < 0 || inferred.symbols[name] == nullptr) return;
    names[d] = inferred.symbols[name];
  }
  ort::TensorInfo* info = nullptr;
  check(ort::call<ort::CreateTensorTypeAndShapeInfo_>(&info));
  const size_t rank = static_cast<size_t>(shape.rank);
  check(ort::call<ort::SetTensorElementType_>(info, output_type(spec, index, inferred.types)));
  if (succeeded(ort::call<ort::SetDimensions_>(info, static_cast<const int64_t*>(shape.dims), rank)) &&
      succeeded(ort::call<ort::SetSymbolicDimensions_>(info, static_cast<const char**>(names), rank))) {
    succeeded(ort::call<ort::ShapeInferContext_SetOutputTypeShape_>(static_cast<const ort::ShapeInferContext*>(context),
                                                                   static_cast<size_t>(index),
                                                                   static_cast<const ort::TensorInfo*>(info)));
  }
  ort::call<ort::ReleaseTensorTypeAndShapeInfo_>(info);
}

// The runtime drops what goes wrong here; Node finds it again.
ort::Status* infer_shapes(const ort::CustomOp* op, ort::ShapeInferContext* context) {
  const OperatorSpec& spec = *self(op).spec;
  return guarded([&] {
    Binding binding;
    for (int i = 0; i < spec.attribute_count; ++i) {
      const Attribute& attribute = spec.attributes[i];
      if (attribute.kind != Kind::kInteger) continue;
      bool known = false;
      const int64_t value = inferred_attribute(attribute, context, &known);
      if (known) binding.set(attribute.index, value);
    }
    const Inferred inferred(spec, context);
    binding.bind(spec, inferred.shapes);
    for (int i = 0; i < spec.output_count; ++i) set_output(context, spec, i, binding, inferred);
  });
}

Registered registered(const OperatorSpec& spec) {
  Registered op{};
  op.spec = &spec;
  op.version = ort::kApiVersion;
  op.GetName = [](const ort::CustomOp* op) { return self(op).spec->name; };
  op.GetExecutionProviderType = [](const ort::CustomOp*) { return kProvider; };
  op.GetInputType = [](const ort::CustomOp* op, size_t i) { return self(op).input_types[i]; };
  op.GetInputTypeCount = [](const ort::CustomOp* op) { return static_cast<size_t>(self(op).spec->input_count); };
  op.GetOutputType = [](const ort::CustomOp* op, size_t i) { return self(op).output_types[i]; };
  op.GetOutputTypeCount = [](const ort::CustomOp* op) { return static_cast<size_t>(self(op).spec->output_count); };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Node*>(kernel); };
  op.GetInputCharacteristic = [](const ort::CustomOp* op, size_t i) { return self(op).spec->inputs[i].optional ? 1 : 0; };
  op.GetOutputCharacteristic = [](const ort::CustomOp* op, size_t i) {
    return self(op).spec->outputs[i].optional ? 1 : 0;
  };
  op.GetInputMemoryType = [](const ort::CustomOp* op, size_t i) -> int {
    return self(op).spec->inputs[i].host ? ort::kCpuInput : ort::kDeviceMemory;
  };
  op.GetVariadicInputMinArity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicOutputMinArity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicOutputHomogeneity = [](const ort::CustomOp*) { return 1; };
  op.CreateKernelV2 = create_kernel;
  op.KernelComputeV2 = compute;
  op.InferOutputShapeFn = infer_shapes;
  op.GetStartVersion = [](const ort::CustomOp* op) { return self(op).spec->since_version; };
  op.GetEndVersion = [](const ort::CustomOp*) { return 1 << 30; };
  op.GetMayInplace = [](int**, int**) { return size_t{0}; };
  op.ReleaseMayInplace = [](int*, int*) {};
  op.GetAliasMap = [](int**, int**) { return size_t{0}; };
  op.ReleaseAliasMap = [](int*, int*) {};
  return op;
}

// `refusing`: an anchor before is of a type that it may not be, which is told once.
void expand(const OperatorSpec& spec, Registered op, int anchor, bool refusing, std::vector<Registered>* all) {
  if (anchor == spec.anchor_count) {
    for (int i = 0; i < spec.output_count; ++i) op.output_types[i] = output_type(spec, i, op.input_types);
    all->push_back(op);
    return;
  }
  const int input = spec.anchors[anchor];
  const uint32_t types = spec.constraints[spec.inputs[input].constraint].types;
  for (const int type : kAnyTypes) {
    const bool taken = types >> type & 1u;
    if (!taken && refusing) continue;
    op.input_types[input] = type;
    expand(spec, op, anchor + 1, refusing || !taken, all);
  }
}

const std::vector<Registered>& all_registered() {
  static const std::vector<Registered>* const all = [] {
    auto* made = new std::vector<Registered>;
    for (const OperatorSpec* spec : kOperators) expand(*spec, registered(*spec), 0, false, made);
    return made;
  }();
  return *all;
}

}  // namespace

}  // namespace piccard

extern "C" __attribute__((visibility("default"))) piccard::ort::Status* RegisterCustomOps(
    piccard::ort::SessionOptions* options, const piccard::ort::ApiBase* base) {
  using namespace piccard;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const ort::Api* api = base->GetApi(ort::kApiVersion);
  // Every runtime has the slot of CreateStatus, whichever version it is asked for.
  const auto refuse = [](const ort::Api* runtime, const char* why) {
    using CreateStatus = ort::CreateStatus_::Function;
    return reinterpret_cast<CreateStatus>(reinterpret_cast<void* const*>(runtime)[ort::CreateStatus_::kSlot])(ort::kFail,
                                                                                                           why);
  };
  if (api == nullptr) {
    return refuse(base->GetApi(1), "the com.deepseek operators need ONNX Runtime 1.18 or newer: install a newer onnxruntime");
  }
  if (ort::g_api != nullptr && ort::g_api != api) {
    return refuse(api, "the com.deepseek operators serve another ONNX Runtime of this process already: use one of the two");
  }
  ort::g_api = api;
  return guarded([&] {
    // A domain belongs to every session that it was added to, and outlives them.
    static ort::OpDomain* domain = nullptr;
    if (domain == nullptr) {
      ort::OpDomain* made = nullptr;
      check(ort::call<ort::CreateCustomOpDomain_>(kDomain, &made));
      for (const Registered& op : all_registered()) {
        check(ort::call<ort::CustomOpDomain_Add_>(made, static_cast<const ort::CustomOp*>(&op)));
      }
      domain = made;
    }
    check(ort::call<ort::AddCustomOpDomain_>(options, domain));
  });
}

// How many kernels this process has begun: it shows other threads that a long run gets on.
extern "C" __attribute__((visibility("default"))) uint64_t piccard_ops_computed() {
  return piccard::g_computed.load(std::memory_order_relaxed);
}
