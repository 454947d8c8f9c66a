// How long threads need to hand data to each other.
#ifndef OSTINATO_CPU_RUNTIME_EXCHANGE_H_
#define OSTINATO_CPU_RUNTIME_EXCHANGE_H_

#include <cstdint>

#include "cpu/runtime/team.h"

namespace ostinato::cpu {

// Returns the ns from one step to the next of threads that do nothing but write some
// cache lines, wait for each other, and read what another has written; 0 if no helper
// shows up. It takes some microseconds.
int64_t MeasureExchange(Team& team);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_EXCHANGE_H_
