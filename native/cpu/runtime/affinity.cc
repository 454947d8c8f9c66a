#include "cpu/runtime/affinity.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace ostinato::cpu {

#if defined(__linux__)

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

int CurrentCpu() noexcept { return -1; }
void LeaveCpu(int) noexcept {}

#endif

}  // namespace ostinato::cpu
