// Which tables of kernels calls use: those of the machine's instruction set, or below
// it where the process asks for that (_config.py; set once, before the first call).
#ifndef OSTINATO_CPU_KERNELS_DISPATCH_H_
#define OSTINATO_CPU_KERNELS_DISPATCH_H_

#include <type_traits>

#include "cpu/kernels/kernels.h"
#include "cpu/runtime/features.h"

namespace ostinato::cpu {

// Caps the instruction set of later calls; the machine's own level caps it too.
void SetIsaCap(Isa cap) noexcept;

// The instruction set of calls: the machine's, or the cap below it.
Isa CurrentIsa() noexcept;

const KernelSet& CurrentKernels() noexcept;
// The table of bfloat16 in tiles; null where there is none.
const KernelsBf16Pairs* CurrentTiles() noexcept;
// For tests: from now on calls use this table for tiles, whatever the level; null ends
// that.
void UseTiles(const KernelsBf16Pairs* tiles) noexcept;

// Calls body(kernels) with the table of Storage: tiles or pairs where the processor has
// them, in which gradients multiply bfloat16, too.
template <typename Storage, typename Body>
auto WithKernels(const Body& body) {
  const KernelSet& set = CurrentKernels();
  if constexpr (sizeof(Storage) == 8) {
    return body(*set.f64);
  } else if constexpr (sizeof(Storage) == 4) {
    return body(*set.f32);
  } else {
    if (const KernelsBf16Pairs* tiles = CurrentTiles()) return body(*tiles);
    return set.bf16_pairs != nullptr ? body(*set.bf16_pairs) : body(*set.bf16);
  }
}

// The table that adds up rows of what the products of `kernels` multiply.
template <typename Storage, typename Operand, typename Accum>
const Kernels<Operand, Operand, Accum>& SumKernels(
    const Kernels<Storage, Operand, Accum>& kernels) {
  if constexpr (std::is_same_v<Storage, Operand>) {
    return kernels;
  } else {
    return *CurrentKernels().f32;
  }
}

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_DISPATCH_H_
