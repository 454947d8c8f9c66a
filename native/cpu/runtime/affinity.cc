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

// The affinity mask of the main thread; empty if the system does not tell.
std::vector<cpu_set_t> MaskOfProcess() {
  // The kernel refuses a mask shorter than its own, whose length it does not tell.
  for (size_t sets = 1; sets <= 1024; sets *= 2) {
    std::vector<cpu_set_t> mask(sets);
    if (sched_getaffinity(getpid(), sets * sizeof(cpu_set_t), mask.data()) == 0) {
      return mask;
    }
    if (errno != EINVAL) break;
  }
  return {};
}

}  // namespace

int32_t ProcessCpus() {
  const std::vector<cpu_set_t> mask = MaskOfProcess();
  if (mask.empty()) return static_cast<int32_t>(std::thread::hardware_concurrency());
  return CPU_COUNT_S(mask.size() * sizeof(cpu_set_t), mask.data());
}

void RunWhereProcessMay() noexcept try {
  const std::vector<cpu_set_t> mask = MaskOfProcess();
  const size_t bytes = mask.size() * sizeof(cpu_set_t);
  std::vector<cpu_set_t> own(mask.size());
  if (mask.empty() || sched_getaffinity(0, bytes, own.data()) != 0) return;
  if (!CPU_EQUAL_S(bytes, own.data(), mask.data())) {
    sched_setaffinity(0, bytes, mask.data());
  }
} catch (const std::exception&) {  // the thread stays where it is
}

int CurrentCpu() noexcept { return sched_getcpu(); }

bool GetCpus(pthread_t thread, CpuSet& cpus) noexcept {
  return pthread_getaffinity_np(thread, sizeof cpus, &cpus) == 0;
}

void SetCpus(pthread_t thread, const CpuSet& cpus) noexcept {
  pthread_setaffinity_np(thread, sizeof cpus, &cpus);
}

bool Contains(const CpuSet& cpus, int cpu) noexcept {
  return cpu >= 0 && cpu < CPU_SETSIZE && CPU_ISSET(cpu, &cpus);
}

void MoveToCpu(pthread_t thread, int cpu) noexcept {
  CpuSet one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  SetCpus(thread, one);
}

OffCpu::OffCpu(pthread_t thread, int cpu) noexcept
    : thread_(thread), known_(GetCpus(thread, before_)) {
  if (!known_ || !Contains(before_, cpu)) return;
  CpuSet others = before_;
  CPU_CLR(cpu, &others);
  SetCpus(thread, others);  // which the system refuses if there are none
}

OffCpu::~OffCpu() {
  if (known_) SetCpus(thread_, before_);
}

void LeaveCpu(int cpu) noexcept {
  if (sched_getcpu() == cpu) OffCpu(pthread_self(), cpu);  // which moves it at once
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

int64_t CpuTimeNs(pthread_t thread) noexcept {
  clockid_t clock;
  timespec time;
  if (pthread_getcpuclockid(thread, &clock) != 0) return -1;
  if (clock_gettime(clock, &time) != 0) return -1;
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

#else

int32_t ProcessCpus() {
  return static_cast<int32_t>(std::thread::hardware_concurrency());
}
void RunWhereProcessMay() noexcept {}
int CurrentCpu() noexcept { return -1; }
bool GetCpus(pthread_t, CpuSet&) noexcept { return false; }
void SetCpus(pthread_t, const CpuSet&) noexcept {}
bool Contains(const CpuSet&, int) noexcept { return false; }
void MoveToCpu(pthread_t, int) noexcept {}
OffCpu::OffCpu(pthread_t thread, int) noexcept : thread_(thread), known_(false) {}
OffCpu::~OffCpu() = default;
void LeaveCpu(int) noexcept {}
void ShortenTimeSlices() noexcept {}
int64_t CpuTimeNs(pthread_t) noexcept { return -1; }

#endif

}  // namespace ostinato::cpu
