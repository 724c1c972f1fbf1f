// Memory for what every step reads from beginning to end.
#pragma once

#include <cstddef>
#include <memory>

namespace piccard {

// `bytes` of memory, a multiple of 64 as its address is, in pages of 2 MiB where the system gives them: a model of a
// thousand weights lies on more pages of 4 KiB than a processor has the addresses of at hand. Several share a page.
std::shared_ptr<char> huge_memory(size_t bytes);

}  // namespace piccard
