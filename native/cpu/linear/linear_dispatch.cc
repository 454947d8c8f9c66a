#include "cpu/kernels/dispatch.h"
#include "cpu/linear/kernels.h"

namespace ostinato::cpu {

const LinearKernelSet& CurrentLinearKernels() noexcept {
  const Isa isa = CurrentIsa();
  if (isa >= Isa::kAvx512 && kAvx512Linear != nullptr) return *kAvx512Linear;
  if (isa >= Isa::kAvx2 && kAvx2Linear != nullptr) return *kAvx2Linear;
  return *kPortableLinear;
}

}  // namespace ostinato::cpu
