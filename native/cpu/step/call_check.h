// Whether the arrays of a call are those that its program needs.
#ifndef OSTINATO_CPU_STEP_CALL_CHECK_H_
#define OSTINATO_CPU_STEP_CALL_CHECK_H_

#include <cstdint>

#include "cpu/step/loop.h"

namespace ostinato::cpu {

// Throws std::invalid_argument unless all arrays are there and have the elements that
// the program reads and writes. `bytes` are those of an element that it computes with.
void CheckArrays(const StepCall& call, int64_t bytes);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_STEP_CALL_CHECK_H_
