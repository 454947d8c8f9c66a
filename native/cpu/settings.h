// What the process asks for; see _config.py. Set once, before the first call.
#ifndef OSTINATO_CPU_SETTINGS_H_
#define OSTINATO_CPU_SETTINGS_H_

#include "cpu/features.h"
#include "cpu/kernels.h"

namespace ostinato::cpu {

// Caps the instruction set of later calls; the machine's own level caps it too.
void SetIsaCap(Isa cap) noexcept;

// The tables that calls use.
const KernelSet& CurrentKernels() noexcept;

// Calls body(kernels) with the forward table of S: pairs where the processor has them.
template <typename S, typename Body>
auto WithForwardKernels(const Body& body) {
  const KernelSet& set = CurrentKernels();
  if constexpr (sizeof(S) == 8) {
    return body(*set.f64);
  } else if constexpr (sizeof(S) == 4) {
    return body(*set.f32);
  } else {
    return set.bf16_pairs != nullptr ? body(*set.bf16_pairs) : body(*set.bf16);
  }
}

// The table whose products multiply what sums are kept in, as gradients need it.
template <typename S>
const auto& WideKernels() {
  const KernelSet& set = CurrentKernels();
  if constexpr (sizeof(S) == 8) {
    return *set.f64;
  } else if constexpr (sizeof(S) == 4) {
    return *set.f32;
  } else {
    return *set.bf16;
  }
}

// The table in which everything is what sums are kept in.
template <typename R>
const Kernels<R, R, R>& RealKernels() {
  return WideKernels<R>();
}

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_SETTINGS_H_
