// Generalised advantage estimates in one pass over all arrays.
#ifndef OSTINATO_CPU_LINEAR_ADVANTAGES_H_
#define OSTINATO_CPU_LINEAR_ADVANTAGES_H_

#include "cpu/linear/kernels.h"

namespace ostinato::cpu {

// Runs the kernel for all sequences.
template <typename T>
void RunAdvantages(const Advantages<T>& call, AdvantagesKernel<T> kernel);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_LINEAR_ADVANTAGES_H_
