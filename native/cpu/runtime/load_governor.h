// Whether threads that wait for each other at barriers are worth it on a busy machine.
#ifndef OSTINATO_CPU_RUNTIME_LOAD_GOVERNOR_H_
#define OSTINATO_CPU_RUNTIME_LOAD_GOVERNOR_H_

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/runtime/wait.h"

namespace ostinato::cpu {

// Other programs that keep the processors busy stop our threads at times, and a stopped
// thread stops those that wait for it at a barrier. A little of that is the price of
// working together: work earns credit, waiting spends it. Once the credit is used up,
// Runs have one worker for a while, and for longer each time if the last pause did not
// help.
class LoadGovernor {
 public:
  // Whether Runs have one worker now.
  bool Pauses() const {
    const int64_t until = until_.load(std::memory_order_relaxed);
    return until != 0 && NowNs() < until;
  }

  // Called by the owner of the pool alone: for how long, in ns, a Run took, and how
  // long its workers waited for stopped ones in all.
  void Account(int64_t took, int64_t waited) {
    credit_ = std::min(credit_ + took / kWorkPerWait - waited, kMostCredit);
    if (credit_ >= 0) return;
    const int64_t now = NowNs();
    // Much longer than what trying has cost, and longer still if it is soon in vain.
    const bool again = now - until_.load(std::memory_order_relaxed) < 4 * length_;
    length_ = std::max(10 * waited, again ? 2 * length_ : 0);
    length_ = std::clamp(length_, kShortest, kLongest);
    until_.store(now + length_, std::memory_order_relaxed);
    credit_ = 0;
  }

 private:
  static constexpr int64_t kWorkPerWait = 5;
  static constexpr int64_t kMostCredit = 1'000'000;                        // ns
  static constexpr int64_t kShortest = 4'000'000, kLongest = 200'000'000;  // ns

  std::atomic<int64_t> until_{0};
  int64_t length_ = 0;  // ns of the last pause
  int64_t credit_ = kMostCredit;
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_LOAD_GOVERNOR_H_
