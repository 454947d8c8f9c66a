#include "cpu/settings.h"

#include <algorithm>
#include <atomic>

namespace ostinato::cpu {
namespace {

std::atomic<Isa> cap{Isa::kAvx512Bf16};

}  // namespace

void SetIsaCap(Isa isa) noexcept { cap.store(isa, std::memory_order_relaxed); }

const KernelSet& CurrentKernels() noexcept {
  static const Isa machine = DetectIsa();
  return KernelsFor(std::min(machine, cap.load(std::memory_order_relaxed)));
}

}  // namespace ostinato::cpu
