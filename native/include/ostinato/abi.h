// The handshake between the shared library and the Python package.
#ifndef OSTINATO_ABI_H_
#define OSTINATO_ABI_H_

#include <cstdint>

namespace ostinato {

// Grows whenever a target or an exported function appears, disappears or changes its
// meaning. _native.py holds the number that it was written for and does not use a
// library with any other number. Operands, results, attributes and numbers of a call
// need no new version: ostinato_contract() tells them.
inline constexpr int32_t kAbiVersion = 14;

}  // namespace ostinato

#endif  // OSTINATO_ABI_H_
