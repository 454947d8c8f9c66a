#include "cpu/runtime/features.h"
#include "ffi/handler.h"
#include "ostinato/abi.h"

namespace {

namespace ffi = ::xla::ffi;
using Int32s = ffi::BufferR1<ffi::S32>;

// Writes [ABI version, ISA level, usable CPUs].
ffi::Error CpuFeatures(ffi::Result<Int32s> features) {
  if (features->element_count() != 3) {
    return ffi::Error::InvalidArgument("ostinato_cpu_features: the result has " +
                                       std::to_string(features->element_count()) +
                                       " elements, want 3");
  }
  int32_t* out = features->typed_data();
  out[0] = ostinato::kAbiVersion;
  out[1] = static_cast<int32_t>(ostinato::cpu::DetectIsa());
  out[2] = ostinato::cpu::UsableCpus();
  return ffi::Error::Success();
}

}  // namespace

OSTINATO_FFI_HANDLER(ostinato_cpu_features, CpuFeatures,
                     ffi::Ffi::Bind().Ret<Int32s>());
