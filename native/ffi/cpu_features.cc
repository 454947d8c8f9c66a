#include "cpu/runtime/features.h"
#include "ffi/handler.h"
#include "ostinato/abi.h"

namespace {

namespace ffi = ::xla::ffi;
using Int32s = ffi::BufferR1<ffi::S32>;

// Writes [ABI version, ISA level, at most `most_isa`, usable CPUs].
ffi::Error CpuFeatures(int32_t most_isa, ffi::Result<Int32s> features) {
  if (features->element_count() != 3) {
    return ffi::Error::InvalidArgument("ostinato_cpu_features: the result has " +
                                       std::to_string(features->element_count()) +
                                       " elements, want 3");
  }
  int32_t* out = features->typed_data();
  out[0] = ostinato::kAbiVersion;
  out[1] = static_cast<int32_t>(
      ostinato::cpu::DetectIsa(static_cast<ostinato::cpu::Isa>(most_isa)));
  out[2] = ostinato::cpu::UsableCpus();
  return ffi::Error::Success();
}

}  // namespace

OSTINATO_FFI_HANDLER(ostinato_cpu_features, CpuFeatures,
                     ffi::Ffi::Bind().Attr<int32_t>("most_isa").Ret<Int32s>());
