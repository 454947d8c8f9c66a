#include "ostinato/abi.h"

#include "ffi/handler.h"

// Read through ctypes before any target is registered.
extern "C" OSTINATO_EXPORT int32_t ostinato_abi_version() {
  return ostinato::kAbiVersion;
}
