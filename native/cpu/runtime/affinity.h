// On which CPUs threads run.
#ifndef OSTINATO_CPU_RUNTIME_AFFINITY_H_
#define OSTINATO_CPU_RUNTIME_AFFINITY_H_

#include <pthread.h>

#include <cstdint>

namespace ostinato::cpu {

// The CPU of the calling thread; -1 where the system does not tell.
int CurrentCpu() noexcept;

// How many CPUs the process may use: the affinity mask of its main thread. Others may
// have been given one CPU each, and the first to call us does not speak for all.
int32_t ProcessCpus();

// These set on which CPUs a thread may run. They are for helpers alone: the masks of
// other threads are the user's, and nobody has to remember those of helpers, since
// between calls they are that of the main thread. Nothing happens where the system
// refuses, as a sandbox does.
void RunWhereProcessMay(pthread_t thread) noexcept;
void KeepOffCpu(pthread_t thread, int cpu) noexcept;
void KeepOnCpu(pthread_t thread, int cpu) noexcept;

// Moves the calling thread to another CPU if it is on this one, and lets it run where
// the process may.
//
// Two threads that wait for each other on one CPU need a switch for every step of a
// network, and it takes the system milliseconds to part them.
void LeaveCpu(int cpu) noexcept;

// Asks the system for short time slices for the calling thread, which then interrupts
// threads with long ones when it is woken. Its share of the time is no larger.
void ShortenTimeSlices() noexcept;

// Whether the calling thread lets every other one run when it calls sched_yield. One
// with a real-time policy does not.
bool YieldsToAll() noexcept;

// For how many ns a thread has run; -1 where the system does not tell.
int64_t CpuTimeNs(pthread_t thread) noexcept;

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_AFFINITY_H_
