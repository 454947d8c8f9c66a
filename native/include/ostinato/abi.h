// The handshake between the shared library and the Python package.
#ifndef OSTINATO_ABI_H_
#define OSTINATO_ABI_H_

#include <cstdint>

namespace ostinato {

// Grows whenever a target appears, disappears or changes its operands, results or
// attributes. _native.py holds the number that it was written for and leaves a library
// with any other number alone.
inline constexpr int32_t kAbiVersion = 6;

}  // namespace ostinato

#endif  // OSTINATO_ABI_H_
