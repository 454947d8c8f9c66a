// The helper threads of the process, and how they join the calling thread's work.
#ifndef OSTINATO_CPU_RUNTIME_POOL_H_
#define OSTINATO_CPU_RUNTIME_POOL_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>

#include "cpu/runtime/barrier.h"
#include "cpu/runtime/members.h"
#include "cpu/runtime/per_process.h"

namespace ostinato::cpu {

// A job is a number of tickets: slots of a Run, or items of a ForEach. Who takes one
// has to be waited for; nobody else is. All of the job is written before the tickets
// are handed out, and stays until the last one that was taken has been dealt with.
class Pool {
 public:
  using BodyCall = void (*)(const void* body, Worker& worker);
  using ItemCall = void (*)(const void* body, int64_t item);

  // The calling thread owns the pool until Disown, if nobody else does.
  bool TryOwn();
  void Disown();

  // Lets `wanted` helpers take tickets, as far as the system grants threads, and wakes
  // them; returns their number. Runs wait for those that were asleep, for `patience` ns
  // from then at most.
  int32_t Open(int32_t wanted, int64_t patience);

  void Run(BodyCall call, const void* body);
  void ForEach(int64_t n, ItemCall call, const void* body);

  // Returns what the last exchange between threads took, or 0 if that is so long ago
  // that they may have moved. Only the owner may call this and the next.
  int64_t KnownExchangeNs() const;
  void KeepExchangeNs(int64_t ns);

 private:
  enum class HelperState { kAwake, kAsleep, kCalled };
  struct alignas(128) Helper {
    std::atomic<HelperState> state{HelperState::kCalled};
    pthread_t thread{};  // written before it is first asleep
    std::mutex mutex;
    std::condition_variable called;
  };

  void Serve(int32_t index);
  void Work(int32_t index, int64_t ticket);
  void Sleep(int32_t index);
  int32_t Wake(int32_t most);
  int32_t Close(int32_t absent);

  int64_t TakeTicket();
  void TakeSlot(int64_t ticket);
  void DoItem(int64_t ticket);
  void KeepException() noexcept;
  void Rethrow();

  // The fields that helpers poll, and those that they read next, in one cache line.
  alignas(128) std::atomic<int64_t> tickets_{0};
  std::atomic<int32_t> helpers_{0};  // the first so many may take tickets
  std::atomic<int> caller_cpu_{-1};  // where the thread runs that woke helpers last
  BodyCall call_ = nullptr;          // of a Run, else null
  ItemCall item_call_ = nullptr;     // of a ForEach
  const void* body_ = nullptr;
  int64_t count_ = 0;  // tickets at first
  int64_t base_ = 1;   // of the rounds of a Run, larger than any round before

  alignas(128) std::atomic<int32_t> size_{0};  // workers of a Run; 0: not decided yet
  std::atomic<int64_t> done_{0};               // items
  std::atomic<bool> failed_{false};
  std::exception_ptr exception_;

  Members& members_ = PerProcess<Members>::Get();
  alignas(128) std::atomic<bool> owned_{false};
  int32_t started_ = 0;
  int64_t retry_at_ = 0;  // ns until when no thread is started
  int64_t deadline_ = 0;  // ns until when to wait for helpers that were asleep
  int64_t exchange_ns_ = 0;
  int64_t exchange_until_ = 0;  // ns until when it counts
  Helper helper_[kMostThreads];
  Slot slots_[kMostThreads];
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_POOL_H_
