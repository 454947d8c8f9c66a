// Waiting for another thread: by polling, and by letting it run if it does not.
#ifndef OSTINATO_CPU_RUNTIME_WAIT_H_
#define OSTINATO_CPU_RUNTIME_WAIT_H_

#include <chrono>
#include <cstdint>
#include <thread>

#include "cpu/runtime/members.h"

namespace ostinato::cpu {

// For how many polls of some 20 ns a thread waits before it looks at the time.
inline constexpr int kPatience = 200;

// Shorter waits than this, in ns, are uneven work, as where threads share the way to
// memory; longer ones are for threads that the system has stopped, mostly for
// milliseconds.
inline constexpr int64_t kStoppedNs = 100'000;

// After so many ns a thread that waits looks whether the others run.
inline constexpr int64_t kLendNs = 40'000;

inline int64_t NowNs() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

// Returns as soon as ready() has returned true: the ns that it took if somebody was
// stopped, else 0.
template <typename Ready>
int64_t WaitUntil(const Ready& ready) {
  const auto polled = [&] {
    for (int i = 0; i < kPatience; ++i) {
      if (ready()) return true;
      Pause();
    }
    return false;
  };
  if (polled()) return 0;
  const int64_t start = NowNs();
  Members::Waiter waiter;
  while (!polled()) {
    if (NowNs() - start >= kLendNs && waiter.ShouldYield()) std::this_thread::yield();
  }
  const int64_t took = NowNs() - start;
  return took < kStoppedNs ? 0 : took;
}

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_WAIT_H_
