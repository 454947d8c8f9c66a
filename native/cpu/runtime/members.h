// The threads that work on a call together, and how one that waits for another lends it
// a CPU.
#ifndef OSTINATO_CPU_RUNTIME_MEMBERS_H_
#define OSTINATO_CPU_RUNTIME_MEMBERS_H_

#include <pthread.h>

#include <atomic>
#include <cstdint>

#include "cpu/runtime/affinity.h"

namespace ostinato::cpu {

inline constexpr int32_t kMostThreads = 256;

// Where other programs, or another library's threads that spin on after a call, keep
// the CPUs busy, the system stops a thread for milliseconds in the middle of its work,
// and those that wait for this work can only wait. They have a CPU, though: the stopped
// thread finishes what it has begun on theirs, and then leaves it.
class Members {
  struct Member;

 public:
  // The calling thread works as this member, the caller being the first one, until it
  // calls Exit.
  void Enter(int32_t index) noexcept;
  static void Exit() noexcept;

  // Called by members between two pieces of work: returns a CPU that was lent.
  static void ReturnCpu() noexcept {
    if (mine == nullptr) return;
    if (mine->loan.load(std::memory_order_relaxed) != Loan::kNone) EndLoan();
  }

  // One who waits, for as long as it waits. It has to call sched_yield over and over,
  // so that the other can use its CPU.
  class Lender {
   public:
    ~Lender();
    // Looks at the next member that works. False if it runs: better keep the CPU. If
    // it does not, the CPU is lent to it.
    bool MayLend() noexcept;

   private:
    void Lend(Member& member, pthread_t thread) noexcept;

    Member* borrower_ = nullptr;
    int32_t next_ = 0;
    CpuSet cpus_;  // where it might run before
  };

 private:
  enum class Loan { kNone, kOffered, kMade };
  struct alignas(128) Member {
    std::atomic<bool> works{false};  // others may wait for what it does
    std::atomic<pthread_t> thread{};
    std::atomic<Loan> loan{Loan::kNone};
    int lent = -1;  // the CPU, and where it might run before; valid once it is made
    CpuSet cpus;
  };

  static bool IsCaller(const Member* member) noexcept;
  static void EndLoan() noexcept;

  inline static thread_local Member* mine = nullptr;

  std::atomic<int32_t> count_{0};
  Member members_[kMostThreads];
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_MEMBERS_H_
