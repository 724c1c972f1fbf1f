#include "node.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "error.h"

namespace piccard {

namespace {

std::string node_name(const ort::KernelInfo* info) {
  size_t size = 0;
  succeeded(ort::call<ort::KernelInfo_GetNodeName_>(info, static_cast<char*>(nullptr), &size));
  if (size == 0) return "";
  std::vector<char> text(size);
  check(ort::call<ort::KernelInfo_GetNodeName_>(info, text.data(), &size));
  return text.data();
}

std::string listed(uint32_t types) {
  std::string text;
  for (int type = 0; type < 32; ++type) {
    if (types >> type & 1u) text += (text.empty() ? "" : ", ") + std::string(element_name(type));
  }
  return text;
}

// Whether the node has an attribute of that name, of whichever kind: the runtime tells the number of its integers, which
// is 0 for other kinds, and fails only where there is none.
bool has_attribute(const ort::KernelInfo* info, const char* name) {
  size_t size = 0;
  return succeeded(
      ort::call<ort::KernelInfoGetAttributeArray_int64_>(info, name, static_cast<int64_t*>(nullptr), &size));
}

const char* described(Kind kind) {
  return kind == Kind::kInteger ? "an integer" : kind == Kind::kReal ? "a float" : "a string";
}

}  // namespace

Shape shape_of(const Parameter& input, const ort::TensorInfo* info) {
  size_t rank = 0;
  check(ort::call<ort::GetDimensionsCount_>(info, &rank));
  if (rank > kMaxRank) fail("input ", input.name, " has ", rank, " dimensions; it has to have ", input.rank);
  Shape shape;
  shape.rank = static_cast<int>(rank);
  check(ort::call<ort::GetDimensions_>(info, shape.dims, rank));
  return shape;
}

void check(ort::Status* status) {
  if (status == nullptr) return;
  std::string message = ort::call<ort::GetErrorMessage_>(static_cast<const ort::Status*>(status));
  ort::call<ort::ReleaseStatus_>(status);
  throw Error(message);
}

bool succeeded(ort::Status* status) {
  if (status == nullptr) return true;
  ort::call<ort::ReleaseStatus_>(status);
  return false;
}

const char* element_name(int type) {
  static const char* const names[] = {"undefined", "float",  "uint8",     "int8",      "uint16",     "int16",
                                      "int32",     "int64",  "string",    "bool",      "float16",    "double",
                                      "uint32",    "uint64", "complex64", "complex128", "bfloat16",   "float8e4m3fn"};
  return type >= 0 && type < 18 ? names[type] : "of another type";
}

int64_t checked_integer(const Attribute& attribute, int64_t value) {
  if (value < attribute.minimum || value > kMaxInteger) {
    fail("attribute ", attribute.name, " is ", value, "; it has to be from ", attribute.minimum, " to ", kMaxInteger);
  }
  return value;
}

int64_t checked_choice(const Attribute& attribute, const char* value) {
  std::string known;
  for (int i = 0; i < attribute.count; ++i) {
    known += (i ? ", " : "") + std::string(attribute.choices[i]);
    if (std::strcmp(attribute.choices[i], value) != 0) continue;
    if (attribute.refusals[i]) fail("attribute ", attribute.name, " = ", value, " asks for ", attribute.refusals[i]);
    return i;
  }
  fail("attribute ", attribute.name, " is ", value, "; it may be ", known);
}

Node::Node(const OperatorSpec& spec, const ort::KernelInfo* info) : spec_(spec) {
  head_ = std::string("com.deepseek.") + spec.name + ", node '" + node_name(info) + "': ";
  try {
    read_attributes(info);
    read_inputs(info);
  } catch (const Error& error) {
    throw Error(head_ + error.what());
  }
}

void Node::read_attributes(const ort::KernelInfo* info) {
  for (int i = 0; i < spec_.attribute_count; ++i) {
    const Attribute& attribute = spec_.attributes[i];
    bool given = false;
    if (attribute.kind == Kind::kReal) {
      float real = attribute.real;
      given = succeeded(ort::call<ort::KernelInfoGetAttribute_float_>(info, attribute.name, &real));
      if (!std::isfinite(real)) fail("attribute ", attribute.name, " is ", real, "; it has to be finite");
      reals_[attribute.index] = real;
    } else if (attribute.kind == Kind::kInteger) {
      int64_t value = attribute.integer;
      given = succeeded(ort::call<ort::KernelInfoGetAttribute_int64_>(info, attribute.name, &value));
      if (given || !attribute.required) attributes_.set(attribute.index, checked_integer(attribute, value));
    } else {
      size_t size = 0;
      attributes_.set(attribute.index, attribute.integer);
      if (succeeded(ort::call<ort::KernelInfoGetAttribute_string_>(info, attribute.name, static_cast<char*>(nullptr),
                                                                  &size))) {
        std::vector<char> text(size + 1);
        check(ort::call<ort::KernelInfoGetAttribute_string_>(info, attribute.name, text.data(), &size));
        attributes_.set(attribute.index, checked_choice(attribute, text.data()));
        given = true;
      }
    }
    // An attribute of another kind is not one that is left out: its default would be another model's.
    if (!given && has_attribute(info, attribute.name)) {
      fail("attribute ", attribute.name, " is of another type; it has to be ", described(attribute.kind));
    }
    if (attribute.required && !given) fail("attribute ", attribute.name, " is missing");
  }
}

void Node::read_inputs(const ort::KernelInfo* info) {
  size_t count = 0;
  check(ort::call<ort::KernelInfo_GetInputCount_>(info, &count));
  Shape shapes[kMaxInputs];
  const ort::Value* constants[kMaxInputs] = {};
  for (int i = 0; i < spec_.input_count && i < static_cast<int>(count); ++i) {
    ort::Owned<ort::TypeInfo, ort::ReleaseTypeInfo_> type_info;
    // An optional input that is left out has no type.
    if (!succeeded(ort::call<ort::KernelInfo_GetInputTypeInfo_>(info, static_cast<size_t>(i), &type_info.held))) continue;
    const ort::TensorInfo* tensor = nullptr;
    check(ort::call<ort::CastTypeInfoToTensorInfo_>(static_cast<const ort::TypeInfo*>(type_info.held), &tensor));
    if (tensor == nullptr) continue;
    int type = 0;
    check(ort::call<ort::GetTensorElementType_>(tensor, &type));
    types_[i] = static_cast<ElementType>(type);
    if (types_[i] == kUndefined) continue;
    if (spec_.inputs[i].refusal != nullptr) fail("input ", spec_.inputs[i].name, " is not taken: ", spec_.inputs[i].refusal);
    check_type(i);
    shapes[i] = shape_of(spec_.inputs[i], tensor);
    // A shape that is not known shows as one without dimensions, which no input has.
    if (shapes[i].rank == 0) shapes[i].rank = -1;
    int constant = 0;
    const ort::Value* value = nullptr;
    if (succeeded(ort::call<ort::KernelInfoGetConstantInput_tensor_>(info, static_cast<size_t>(i), &constant, &value)) &&
        constant) {
      constants_[i] = shapes[i];
      constants[i] = value;
    }
  }
  Binding binding = attributes_;
  binding.bind(spec_, shapes);
  for (int i = 0; i < spec_.input_count; ++i) {
    const bool whole = constants_[i].rank == spec_.inputs[i].rank && constants_[i].count() > 0;
    if (spec_.inputs[i].panels && constants[i] != nullptr && whole) {
      panels_[i] = packed(types_[i], constants_[i], constants[i]);
    }
  }
}

void Node::check_type(int input) {
  const Parameter& parameter = spec_.inputs[input];
  const Constraint& constraint = spec_.constraints[parameter.constraint];
  const uint32_t bit = types_[input] < 32 ? 1u << types_[input] : 0u;
  if (!(constraint.types & bit)) {
    fail("input ", parameter.name, " is of type ", element_name(types_[input]), "; constraint ", constraint.name,
         " takes ", listed(constraint.types));
  }
  if (constraint.refused & bit) {
    fail("input ", parameter.name, " of type ", element_name(types_[input]), " is ", constraint.refusal);
  }
  for (int i = 0; i < input; ++i) {
    if (spec_.inputs[i].constraint == parameter.constraint && types_[i] != kUndefined && types_[i] != types_[input]) {
      fail("inputs ", spec_.inputs[i].name, " and ", parameter.name, " are of types ", element_name(types_[i]), " and ",
           element_name(types_[input]), "; constraint ", constraint.name, " makes them equal");
    }
  }
}

}  // namespace piccard
