// What the process asks for; see _config.py. Set once, before the first call.
#ifndef OSTINATO_CPU_KERNELS_DISPATCH_H_
#define OSTINATO_CPU_KERNELS_DISPATCH_H_

#include <type_traits>

#include "cpu/kernels/kernels.h"
#include "cpu/runtime/features.h"

namespace ostinato::cpu {

// Caps the instruction set of later calls; the machine's own level caps it too.
void SetIsaCap(Isa cap) noexcept;

// The tables that calls use.
const KernelSet& CurrentKernels() noexcept;
// Of these, bfloat16 in tiles; null without.
const KernelsBf16Pairs* CurrentTiles() noexcept;
// For tests: from now on calls use this table as that, whatever the level; null: none.
void UseTiles(const KernelsBf16Pairs* tiles) noexcept;

// Calls body(kernels) with the forward table of S: tiles or pairs where the processor
// has them.
template <typename S, typename Body>
auto WithForwardKernels(const Body& body) {
  const KernelSet& set = CurrentKernels();
  if constexpr (sizeof(S) == 8) {
    return body(*set.f64);
  } else if constexpr (sizeof(S) == 4) {
    return body(*set.f32);
  } else {
    if (const KernelsBf16Pairs* tiles = CurrentTiles()) return body(*tiles);
    return set.bf16_pairs != nullptr ? body(*set.bf16_pairs) : body(*set.bf16);
  }
}

// Calls body(kernels) with the table of S for gradients: one whose products multiply
// what sums are kept in, as cotangents need it, but for tiles.
template <typename S, typename Body>
auto WithBackwardKernels(const Body& body) {
  const KernelSet& set = CurrentKernels();
  if constexpr (sizeof(S) == 8) {
    return body(*set.f64);
  } else if constexpr (sizeof(S) == 4) {
    return body(*set.f32);
  } else {
    const KernelsBf16Pairs* tiles = CurrentTiles();
    return tiles != nullptr ? body(*tiles) : body(*set.bf16);
  }
}

// The table that sums rows of what the products of `kernels` multiply.
template <typename S, typename O, typename R>
const Kernels<O, O, R>& SumKernels(const Kernels<S, O, R>& kernels) {
  if constexpr (std::is_same_v<S, O>) {
    return kernels;
  } else {
    return *CurrentKernels().f32;
  }
}

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_DISPATCH_H_
