#include "cpu/runtime/affinity.h"

#include <thread>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <vector>
#endif

namespace ostinato::cpu {

#if defined(__linux__)

namespace {

using Mask = std::vector<cpu_set_t>;

size_t Bytes(const Mask& mask) { return mask.size() * sizeof(cpu_set_t); }

bool Has(const Mask& mask, int cpu) {
  return cpu >= 0 && static_cast<size_t>(cpu) < 8 * Bytes(mask) &&
         CPU_ISSET_S(cpu, Bytes(mask), mask.data());
}

// The affinity mask of the main thread; empty if the system does not tell.
Mask MaskOfProcess() {
  // The kernel refuses a mask shorter than its own, whose length it does not tell.
  for (size_t sets = 1; sets <= 1024; sets *= 2) {
    Mask mask(sets);
    if (sched_getaffinity(getpid(), Bytes(mask), mask.data()) == 0) return mask;
    if (errno != EINVAL) break;
  }
  return {};
}

void Set(pthread_t thread, const Mask& mask) {
  if (!mask.empty()) pthread_setaffinity_np(thread, Bytes(mask), mask.data());
}

}  // namespace

int CurrentCpu() noexcept { return sched_getcpu(); }

int32_t ProcessCpus() {
  const Mask mask = MaskOfProcess();
  if (mask.empty()) return static_cast<int32_t>(std::thread::hardware_concurrency());
  return CPU_COUNT_S(Bytes(mask), mask.data());
}

void RunWhereProcessMay(pthread_t thread) noexcept try {
  Set(thread, MaskOfProcess());
} catch (const std::exception&) {  // the thread stays where it is
}

void KeepOffCpu(pthread_t thread, int cpu) noexcept try {
  Mask mask = MaskOfProcess();
  if (!Has(mask, cpu)) return;
  CPU_CLR_S(cpu, Bytes(mask), mask.data());
  Set(thread, mask);  // which the system refuses if no CPU is left
} catch (const std::exception&) {
}

void KeepOnCpu(pthread_t thread, int cpu) noexcept try {
  Mask mask = MaskOfProcess();
  if (!Has(mask, cpu)) return;
  CPU_ZERO_S(Bytes(mask), mask.data());
  CPU_SET_S(cpu, Bytes(mask), mask.data());
  Set(thread, mask);
} catch (const std::exception&) {
}

void LeaveCpu(int cpu) noexcept {
  if (cpu < 0 || sched_getcpu() != cpu) return;
  KeepOffCpu(pthread_self(), cpu);  // moves it at once
  RunWhereProcessMay(pthread_self());
}

void ShortenTimeSlices() noexcept {
  struct {  // sched_attr of Linux, which before 6.12 takes no notice of `runtime`
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;  // ns
  } mine{};
  if (syscall(SYS_sched_getattr, 0, &mine, sizeof mine, 0) != 0) return;
  if (mine.policy != SCHED_OTHER) return;
  mine.runtime = 100'000;  // the least
  syscall(SYS_sched_setattr, 0, &mine, 0);
}

bool YieldsToAll() noexcept { return sched_getscheduler(0) == SCHED_OTHER; }

int64_t CpuTimeNs(pthread_t thread) noexcept {
  clockid_t clock;
  timespec time;
  if (pthread_getcpuclockid(thread, &clock) != 0) return -1;
  if (clock_gettime(clock, &time) != 0) return -1;
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

#else

int CurrentCpu() noexcept { return -1; }
int32_t ProcessCpus() {
  return static_cast<int32_t>(std::thread::hardware_concurrency());
}
void RunWhereProcessMay(pthread_t) noexcept {}
void KeepOffCpu(pthread_t, int) noexcept {}
void KeepOnCpu(pthread_t, int) noexcept {}
void LeaveCpu(int) noexcept {}
void ShortenTimeSlices() noexcept {}
bool YieldsToAll() noexcept { return true; }
int64_t CpuTimeNs(pthread_t) noexcept { return -1; }

#endif

}  // namespace ostinato::cpu
