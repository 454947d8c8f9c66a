// On which CPUs threads run.
#ifndef OSTINATO_CPU_RUNTIME_AFFINITY_H_
#define OSTINATO_CPU_RUNTIME_AFFINITY_H_

#include <cstdint>

namespace ostinato::cpu {

// The CPU of the calling thread; -1 where the system does not tell.
int CurrentCpu() noexcept;

// How many CPUs the process may use: the affinity mask of its main thread. Others may
// have been given one CPU each, and the first to call us does not speak for all.
int32_t ProcessCpus();

// Lets the calling thread run on these CPUs. A new thread has the mask of the one that
// started it.
void RunWhereProcessMay() noexcept;

// Moves the calling thread to another CPU if it is on this one and may run elsewhere.
//
// A system that wakes a thread likes to put it where its waker runs. Two threads that
// wait for each other on one CPU need a switch for every step of a network, and it
// takes the system milliseconds to part them.
void LeaveCpu(int cpu) noexcept;

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_AFFINITY_H_
