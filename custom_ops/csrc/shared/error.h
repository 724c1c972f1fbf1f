// Errors of this library, turned into the runtime's at its edge.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace piccard {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(text.str());
}

}  // namespace piccard
