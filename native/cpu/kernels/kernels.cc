#include "cpu/kernels/kernels.h"

#include "cpu/kernels/tables.h"

namespace ostinato::cpu {

const KernelSet& KernelsFor(Isa isa, bool pairs_are_slow) noexcept {
  const KernelSet* const pairs = pairs_are_slow ? &kAvx512WidenedSet : &kAvx512Bf16Set;
  const KernelSet* const sets[] = {&kPortableSet, &kAvx2Set, &kAvx512Set, pairs,
                                   &kAvx512AmxSet};
  auto level = static_cast<int32_t>(isa);
  while (sets[level]->f32 == nullptr) --level;  // kPortableSet is always there
  return *sets[level];
}

}  // namespace ostinato::cpu
