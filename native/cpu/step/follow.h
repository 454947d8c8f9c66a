// A chunk of steps of one sequence, which two threads run.
#ifndef OSTINATO_CPU_STEP_FOLLOW_H_
#define OSTINATO_CPU_STEP_FOLLOW_H_

#include <cstdint>

#include "cpu/runtime/team.h"
#include "cpu/step/gradients.h"
#include "cpu/step/tile.h"

namespace ostinato::cpu {

// Runs steps begin .. end - 1 of the only tile and adds to gradients. While one thread
// runs the steps, which wait for each other, another does what no step reads for those
// that have run; all share what is left then. tile.CanFollow() holds.
template <typename T>
void RunFollowed(StepTile<T>& tile, StepGradients<T>& gradients, int64_t begin,
                 int64_t end, Team& team);

extern template void RunFollowed(StepTile<float>&, StepGradients<float>&, int64_t,
                                 int64_t, Team&);
extern template void RunFollowed(StepTile<double>&, StepGradients<double>&, int64_t,
                                 int64_t, Team&);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_STEP_FOLLOW_H_
