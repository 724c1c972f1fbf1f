#include "binding.h"

#include "error.h"

namespace piccard {

namespace {

std::string described(const Parameter& parameter) {
  std::string text = "[";
  for (int i = 0; i < parameter.rank; ++i) text += (i ? ", " : "") + std::string(parameter.shape[i].text);
  return text + "]";
}

std::string described(const Shape& shape) {
  std::string text = "[";
  for (int i = 0; i < shape.rank; ++i) {
    text += (i ? ", " : "") + (shape.dims[i] < 0 ? std::string("?") : std::to_string(shape.dims[i]));
  }
  return text + "]";
}

void check_ranks(const OperatorSpec& spec, const Shape* shapes) {
  for (int i = 0; i < spec.input_count; ++i) {
    const Parameter& input = spec.inputs[i];
    if (shapes[i].rank >= 0 && shapes[i].rank != input.rank) {
      fail("input ", input.name, " has shape ", described(shapes[i]), "; it has to be ", described(input));
    }
  }
}

}  // namespace

void Binding::bind(const OperatorSpec& spec, const Shape* shapes) {
  check_ranks(spec, shapes);
  for (int i = 0; i < spec.input_count; ++i) {
    const Parameter& input = spec.inputs[i];
    for (int d = 0; d < shapes[i].rank; ++d) {
      const int64_t size = shapes[i].dims[d];
      if (size == 0) fail("input ", input.name, " is empty: its shape is ", described(shapes[i]));
      if (size > kMaxSize) {
        fail("input ", input.name, " has shape ", described(shapes[i]), "; a size has to be at most ", kMaxSize);
      }
      const int name = input.shape[d].name;
      if (size > 0 && name >= 0 && !knows(uint64_t{1} << name)) set(name, size);
    }
  }
  for (int i = 0; i < spec.input_count; ++i) {
    const Parameter& input = spec.inputs[i];
    for (int d = 0; d < shapes[i].rank; ++d) {
      const Formula& formula = input.shape[d];
      const int64_t size = shapes[i].dims[d];
      if (size < 0 || !knows(formula.reads)) continue;
      const int64_t wanted = formula.evaluate(values);
      if (size != wanted) {
        fail("input ", input.name, " has shape ", described(shapes[i]), "; it has to be ", described(input), " with ",
             formula.text, " = ", wanted);
      }
    }
  }
  for (int i = 0; i < spec.requirement_count; ++i) {
    const Requirement& requirement = spec.requirements[i];
    if (!knows(requirement.reads)) continue;
    const int64_t left = requirement.left(values), right = requirement.right(values);
    if (requirement.equal ? left != right : left > right) {
      fail(requirement.text, " does not hold: ", left, " and ", right);
    }
  }
}

Shape Binding::output(const Parameter& parameter) const {
  Shape shape;
  shape.rank = parameter.rank;
  for (int d = 0; d < parameter.rank; ++d) {
    shape.dims[d] = knows(parameter.shape[d].reads) ? parameter.shape[d].evaluate(values) : -1;
  }
  return shape;
}

}  // namespace piccard
