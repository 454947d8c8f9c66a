#include "cpu/runtime/affinity.h"

#include <thread>

#if defined(__linux__)
#include <sched.h>
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

void LeaveCpu(int cpu) noexcept {
  if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getcpu() != cpu) return;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  if (!CPU_ISSET(cpu, &allowed) || CPU_COUNT(&allowed) < 2) return;
  cpu_set_t others = allowed;
  CPU_CLR(cpu, &others);
  // The first moves the thread at once, the second lets it run anywhere again.
  if (sched_setaffinity(0, sizeof others, &others) == 0) {
    sched_setaffinity(0, sizeof allowed, &allowed);
  }
}

#else

int32_t ProcessCpus() {
  return static_cast<int32_t>(std::thread::hardware_concurrency());
}
void RunWhereProcessMay() noexcept {}
int CurrentCpu() noexcept { return -1; }
void LeaveCpu(int) noexcept {}

#endif

}  // namespace ostinato::cpu
