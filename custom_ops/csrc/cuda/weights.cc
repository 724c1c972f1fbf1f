// On a GPU products read weights as they are stored.
#include "node.h"

namespace piccard {

std::shared_ptr<const Panels> packed(ElementType, const Shape&, const ort::Value*) { return nullptr; }

}  // namespace piccard
