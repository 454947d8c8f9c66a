// The threads that work on a call together, and how one that waits for another lets it
// run.
#ifndef OSTINATO_CPU_RUNTIME_MEMBERS_H_
#define OSTINATO_CPU_RUNTIME_MEMBERS_H_

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace ostinato::cpu {

inline constexpr int32_t kMostThreads = 256;

// Where other programs, or another library's threads that spin on after a call, keep
// the CPUs busy, the system stops a thread for milliseconds in the middle of its work.
// A thread that waits for this work has a CPU, though, and lends it: the stopped one
// finishes what it has begun there, and then leaves. Only helpers borrow; the caller is
// a thread of the user, who says where it runs.
class Members {
  struct Member;

 public:
  // The calling thread works, as the caller (0) or as a helper (1 and up), until Exit.
  void Enter(int32_t index) noexcept;
  static void Exit() noexcept;

  // Called by helpers between two pieces of work: returns a CPU that was lent.
  static void ReturnCpu() noexcept {
    if (Borrows()) Return();
  }
  static bool Borrows() noexcept {
    return mine != nullptr && mine->lent.load(std::memory_order_relaxed) >= 0;
  }

  // A thread that waits, for as long as it does.
  class Waiter {
   public:
    Waiter() noexcept;
    ~Waiter();

    // Whether to call sched_yield: not if the next member that works is seen to run.
    // To one that is stopped it lends the CPU, which sched_yield then hands over.
    bool ShouldYield() noexcept;

   private:
    void Lend(Member& member) noexcept;
    void TakeBack() noexcept;

    uint32_t next_;
    Member* borrower_ = nullptr;
    int cpu_ = -1;  // the one that is lent
  };

 private:
  struct alignas(128) Member {
    std::atomic<bool> works{false};
    std::atomic<pthread_t> thread{};
    std::atomic<int> lent{-1};  // the CPU that somebody lends to it
  };

  static void Return() noexcept;

  inline static thread_local Member* mine = nullptr;

  std::atomic<int32_t> count_{0};
  Member members_[kMostThreads];
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_MEMBERS_H_
