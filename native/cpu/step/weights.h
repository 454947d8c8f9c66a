// The weights of a step program in the order in which products read them.
#ifndef OSTINATO_CPU_STEP_WEIGHTS_H_
#define OSTINATO_CPU_STEP_WEIGHTS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "cpu/runtime/team.h"
#include "cpu/step/loop.h"

namespace ostinato::cpu {

template <typename T>
const Kernels<T, T, T>& KernelsOf(const KernelSet& set) {
  if constexpr (sizeof(T) == 4)
    return *set.f32;
  else
    return *set.f64;
}

template <typename T>
const StepKernels<T>& StepKernelsOf(const KernelSet& set) {
  if constexpr (sizeof(T) == 4)
    return *set.step_f32;
  else
    return *set.step_f64;
}

// Whether products with a weight multiply pairs of bfloat16. A pair of its panels takes
// the place of one element of the others.
inline bool MultipliesPairs(const StepCall& call, const StepWeight& weight,
                            const KernelsBf16Pairs* pairs) {
  return weight.half && pairs != nullptr && call.operands[weight.array].bytes == 2;
}
// Rows of the panels of a weight.
inline int64_t PanelRows(const StepWeight& weight, bool pairs) {
  return pairs ? (weight.depth + 1) / 2 : weight.depth;
}

// Packs all weights into memory that `take` returns for a number of elements.
template <typename T>
std::vector<const T*> PackWeights(const StepCall& call,
                                  const std::function<T*(int64_t)>& take, Team& team);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_STEP_WEIGHTS_H_
