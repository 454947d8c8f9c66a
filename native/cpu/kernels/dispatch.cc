#include "cpu/kernels/dispatch.h"

#include <atomic>

namespace ostinato::cpu {
namespace {

std::atomic<Isa> cap{Isa::kAvx512Amx};
std::atomic<const KernelsBf16Pairs*> tiles_for_tests{nullptr};

}  // namespace

void SetIsaCap(Isa isa) noexcept { cap.store(isa, std::memory_order_relaxed); }

Isa CurrentIsa() noexcept { return DetectIsa(cap.load(std::memory_order_relaxed)); }

const KernelSet& CurrentKernels() noexcept { return KernelsFor(CurrentIsa()); }

const KernelsBf16Pairs* CurrentTiles() noexcept {
  const auto* const tiles = tiles_for_tests.load(std::memory_order_acquire);
  return tiles != nullptr ? tiles : CurrentKernels().bf16_tiles;
}

void UseTiles(const KernelsBf16Pairs* tiles) noexcept {
  tiles_for_tests.store(tiles, std::memory_order_release);
}

}  // namespace ostinato::cpu
