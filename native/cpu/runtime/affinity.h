// On which CPUs threads run.
#ifndef OSTINATO_CPU_RUNTIME_AFFINITY_H_
#define OSTINATO_CPU_RUNTIME_AFFINITY_H_

#include <pthread.h>

#include <cstdint>

#if defined(__linux__)
#include <sched.h>
#endif

namespace ostinato::cpu {

#if defined(__linux__)
using CpuSet = cpu_set_t;
#else
struct CpuSet {};
#endif

// The CPU of the calling thread; -1 where the system does not tell.
int CurrentCpu() noexcept;

// How many CPUs the process may use: the affinity mask of its main thread. Others may
// have been given one CPU each, and the first to call us does not speak for all.
int32_t ProcessCpus();

// Lets the calling thread run on these CPUs. A new thread has the mask of the one that
// started it.
void RunWhereProcessMay() noexcept;

// The CPUs on which a thread may run; false where the system does not tell.
bool GetCpus(pthread_t thread, CpuSet& cpus) noexcept;
void SetCpus(pthread_t thread, const CpuSet& cpus) noexcept;
bool Contains(const CpuSet& cpus, int cpu) noexcept;

// Lets a thread run on this CPU alone.
void MoveToCpu(pthread_t thread, int cpu) noexcept;

// Keeps a thread off a CPU for as long as this lives, if it may run on others.
//
// A system that wakes a thread likes to put it where its waker runs. There it waits
// until the waker has used up a time slice, which is longer than most calls.
class OffCpu {
 public:
  OffCpu(pthread_t thread, int cpu) noexcept;
  ~OffCpu();
  OffCpu(const OffCpu&) = delete;
  OffCpu& operator=(const OffCpu&) = delete;

 private:
  const pthread_t thread_;
  CpuSet before_;
  bool known_;
};

// Moves the calling thread to another CPU if it is on this one and may run elsewhere.
//
// Two threads that wait for each other on one CPU need a switch for every step of a
// network, and it takes the system milliseconds to part them.
void LeaveCpu(int cpu) noexcept;

// Asks the system for short time slices: a thread that has them interrupts those that
// have long ones when it is woken, and has no more time than they.
void ShortenTimeSlices() noexcept;

// For how many ns a thread has run; -1 where the system does not tell.
int64_t CpuTimeNs(pthread_t thread) noexcept;

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_AFFINITY_H_
