#include "cpu/runtime/team.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "cpu/runtime/affinity.h"
#include "cpu/runtime/features.h"
#include "cpu/runtime/fp_state.h"
#include "cpu/runtime/per_process.h"

namespace ostinato::cpu {
namespace {

constexpr int32_t kMostThreads = 256;

// In polls of some 20 ns: how long a thread waits before it lets others run on its
// core, and how long a Run waits for one more helper if more look awake.
constexpr int kPatience = 200;
constexpr int kGrace = 50;

// How long a helper without work stays awake: longer than the time between two calls
// of a busy program, shorter than what a person would see as load.
constexpr int64_t kAwakeNs = 150'000;

int64_t Now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

// Shorter waits than this are uneven work, longer ones are threads that were stopped.
constexpr int64_t kStoppedNs = 20'000;

// A Run that has lost more than this to stopped threads had better end.
constexpr int64_t kMostLost = 1'000'000;

// Returns when ready() holds; the time that it took, in ns, if somebody was stopped.
template <typename Ready>
int64_t WaitUntil(const Ready& ready) {
  for (int i = 0; i < kPatience; ++i) {
    if (ready()) return 0;
    Pause();
  }
  const int64_t start = Now();
  while (!ready()) std::this_thread::yield();  // what we wait for may need this core
  const int64_t took = Now() - start;
  return took < kStoppedNs ? 0 : took;
}

std::atomic<int32_t> num_threads{0};  // 0: not known yet

// Other programs that keep the processors busy stop our threads at times, and one that
// is stopped stops those that meet it after every step. A little of that is the price
// of working together; where it takes a large part of the time, threads that would meet
// work alone for a while, for longer each time if it was not over after the last.
class Overload {
 public:
  bool Lasts() const {
    const int64_t until = until_.load(std::memory_order_relaxed);
    return until != 0 && Now() < until;
  }

  // Only the owner of the pool calls this: for how long, in ns, a Run took, and how
  // much of that its members have lost.
  void Count(int64_t took, int64_t lost) {
    credit_ = std::min(credit_ + took / kWorkPerLoss - lost, kMostCredit);
    if (credit_ >= 0) return;
    const int64_t now = Now();
    // Much longer than what trying has cost, and longer still if it is soon in vain.
    const bool again = now - until_.load(std::memory_order_relaxed) < 4 * length_;
    length_ = std::max(10 * lost, again ? 2 * length_ : 0);
    length_ = std::clamp(length_, kShortest, kLongest);
    until_.store(now + length_, std::memory_order_relaxed);
    credit_ = 0;
  }

 private:
  static constexpr int64_t kWorkPerLoss = 20;
  static constexpr int64_t kMostCredit = 1'000'000;                          // ns
  static constexpr int64_t kShortest = 4'000'000, kLongest = 2'000'000'000;  // ns

  std::atomic<int64_t> until_{0};
  int64_t length_ = 0, credit_ = kMostCredit;
};

Overload overload;

enum class HelperState { kAwake, kAsleep, kCalled };

struct alignas(128) Helper {
  std::atomic<HelperState> state{HelperState::kCalled};
  std::mutex mutex;
  std::condition_variable called;
};

}  // namespace

// What a member of a Run tells the others. Two cache lines, which some processors
// fetch together.
struct alignas(128) Seat {
  std::atomic<int64_t> round{0};       // the Syncs that it has come to
  std::atomic<int64_t> last_round{0};  // of the first member: where it ends the Run
  std::atomic<int64_t> left{0};        // base of the last Run whose body it has left
  int64_t lost = 0;                    // ns in that Run; valid once it has left
};

// A job is a number of tickets: seats of a Run, or items of a ForEach. Who takes one
// has to be waited for; nobody else is. All of the job is written before the tickets
// are handed out, and stays until the last one that was taken has been dealt with.
class Pool {
 public:
  bool TryOwn() { return !owned_.exchange(true, std::memory_order_acquire); }
  void Disown() { owned_.store(false, std::memory_order_release); }

  // Lets `wanted` helpers take tickets, as far as the system grants threads, and wakes
  // them; returns their number.
  int32_t Open(int32_t wanted);

  // For how long, in ns, members have waited for stopped ones in all.
  int64_t Run(Team::BodyCall call, const void* body);
  void ForEach(int64_t n, Team::ItemCall call, const void* body);

 private:
  void Serve(int32_t index);
  void Sleep(int32_t index);
  int32_t Wake(int32_t most);
  int32_t Close(int32_t absent);

  int64_t TakeTicket();
  void TakeSeat(int64_t ticket);
  void DoItem(int64_t ticket);
  void KeepException() noexcept;
  void Rethrow();

  // What helpers poll, and what they read next, in one cache line.
  alignas(128) std::atomic<int64_t> tickets_{0};
  std::atomic<int32_t> helpers_{0};     // the first so many may take tickets
  std::atomic<int> caller_cpu_{-1};     // where the thread runs that woke helpers last
  Team::BodyCall call_ = nullptr;       // of a Run, else null
  Team::ItemCall item_call_ = nullptr;  // of a ForEach
  const void* body_ = nullptr;
  int64_t count_ = 0;  // tickets at first
  int64_t base_ = 1;   // of the rounds of a Run, larger than any round before

  alignas(128) std::atomic<int32_t> size_{0};  // members of a Run; 0: not decided yet
  std::atomic<int64_t> done_{0};               // items
  std::atomic<bool> failed_{false};
  std::exception_ptr exception_;

  alignas(128) std::atomic<bool> owned_{false};
  int32_t started_ = 0;
  Helper helper_[kMostThreads];
  Seat seat_[kMostThreads];
};

int32_t Pool::Open(int32_t wanted) {
  caller_cpu_.store(CurrentCpu(), std::memory_order_relaxed);
  while (started_ < wanted) {
    try {
      std::thread([this, index = started_] { Serve(index); }).detach();
    } catch (const std::system_error&) {
      break;
    }
    ++started_;
  }
  const int32_t helpers = std::min(wanted, started_);
  helpers_.store(helpers, std::memory_order_relaxed);
  Wake(helpers);
  return helpers;
}

void Pool::Serve(int32_t index) {
  const FlushDenormals flush;
  while (true) {
    LeaveCpu(caller_cpu_.load(std::memory_order_relaxed));
    helper_[index].state.store(HelperState::kAwake, std::memory_order_relaxed);
    int64_t idle_since = Now();
    while (Now() - idle_since < kAwakeNs) {
      for (int i = 0; i < kPatience; ++i) {
        const bool may = index < helpers_.load(std::memory_order_relaxed);
        const int64_t ticket = may ? TakeTicket() : 0;
        if (ticket == 0) {
          Pause();
          continue;
        }
        call_ != nullptr ? TakeSeat(ticket) : DoItem(ticket);
        idle_since = Now();
        i = 0;
      }
    }
    Sleep(index);
  }
}

// Sequential consistency: either the helper sees the tickets or Wake sees it asleep.
void Pool::Sleep(int32_t index) {
  Helper& me = helper_[index];
  std::unique_lock<std::mutex> lock(me.mutex);
  me.state.store(HelperState::kAsleep);
  if (tickets_.load() > 0 && index < helpers_.load()) return;
  me.called.wait(lock, [&] { return me.state.load() == HelperState::kCalled; });
}

// Calls those of the first `most` helpers that sleep; returns how many are awake.
int32_t Pool::Wake(int32_t most) {
  int32_t awake = 0;
  for (int32_t i = 0; i < most; ++i) {
    Helper& helper = helper_[i];
    const HelperState state = helper.state.load();
    awake += state == HelperState::kAwake;
    if (state != HelperState::kAsleep) continue;
    {
      const std::lock_guard<std::mutex> lock(helper.mutex);
      helper.state.store(HelperState::kCalled);
    }
    helper.called.notify_one();
  }
  return awake;
}

// Ends the taking of seats once all but `absent` are taken or nobody comes any more;
// returns how many stay free.
int32_t Pool::Close(int32_t absent) {
  int64_t free = tickets_.load(std::memory_order_relaxed);
  for (int polls = 0; polls < kGrace && free > absent; ++polls) {
    Pause();
    const int64_t before =
        std::exchange(free, tickets_.load(std::memory_order_relaxed));
    if (free != before) polls = 0;
  }
  return static_cast<int32_t>(free > 0 ? tickets_.exchange(0) : 0);
}

// The number of tickets that there were, or 0. It does not matter of which job they
// were when we looked: nothing of the job is read before one is ours.
int64_t Pool::TakeTicket() {
  int64_t tickets = tickets_.load(std::memory_order_relaxed);
  while (tickets > 0 && !tickets_.compare_exchange_weak(tickets, tickets - 1,
                                                        std::memory_order_acquire,
                                                        std::memory_order_relaxed)) {
  }
  return tickets;
}

void Pool::TakeSeat(int64_t ticket) {
  LeaveCpu(caller_cpu_.load(std::memory_order_relaxed));
  const auto index = static_cast<int32_t>(count_ - ticket + 1);
  auto size = static_cast<int32_t>(count_ + 1);
  if (ticket > 1) {  // who takes the last seat need not wait to hear that all are taken
    WaitUntil([&] { return (size = size_.load(std::memory_order_acquire)) != 0; });
  }
  Member member(seat_, index, size, base_);
  try {
    call_(body_, member);
  } catch (...) {
    KeepException();
  }
  Seat& mine = seat_[index];
  mine.lost = member.lost_;
  mine.left.store(member.base_, std::memory_order_release);
}

void Pool::DoItem(int64_t ticket) {
  try {
    item_call_(body_, count_ - ticket);
  } catch (...) {
    KeepException();
  }
  done_.fetch_add(1, std::memory_order_release);
}

void Pool::KeepException() noexcept {
  if (!failed_.exchange(true)) exception_ = std::current_exception();
}

void Pool::Rethrow() {
  if (!failed_.load(std::memory_order_relaxed)) return;
  failed_.store(false, std::memory_order_relaxed);
  std::rethrow_exception(std::exchange(exception_, nullptr));
}

int64_t Pool::Run(Team::BodyCall call, const void* body) {
  caller_cpu_.store(CurrentCpu(), std::memory_order_relaxed);
  const int32_t helpers = helpers_.load(std::memory_order_relaxed);
  call_ = call;
  body_ = body;
  count_ = helpers;
  size_.store(0, std::memory_order_relaxed);
  tickets_.store(helpers);
  const int32_t size = helpers + 1 - Close(helpers - Wake(helpers));
  size_.store(size, std::memory_order_release);

  Member member(seat_, 0, size, base_);
  try {
    call(body, member);
  } catch (...) {
    KeepException();
  }
  seat_[0].left.store(base_, std::memory_order_release);
  int64_t lost = member.lost_;
  int64_t last_round = member.round_;
  for (int32_t i = 1; i < size; ++i) {
    const Seat& seat = seat_[i];
    lost +=
        WaitUntil([&] { return seat.left.load(std::memory_order_acquire) == base_; });
    lost += seat.lost;
    last_round = std::max(last_round, seat.round.load(std::memory_order_relaxed));
  }
  base_ = last_round + 1;
  Rethrow();
  return lost;
}

void Pool::ForEach(int64_t n, Team::ItemCall call, const void* body) {
  const int32_t helpers = helpers_.load(std::memory_order_relaxed);
  caller_cpu_.store(CurrentCpu(), std::memory_order_relaxed);
  call_ = nullptr;
  item_call_ = call;
  body_ = body;
  count_ = n;
  done_.store(0, std::memory_order_relaxed);
  tickets_.store(n);
  Wake(static_cast<int32_t>(std::min<int64_t>(helpers, n - 1)));
  while (const int64_t ticket = TakeTicket()) DoItem(ticket);
  WaitUntil([&] { return done_.load(std::memory_order_acquire) == n; });
  Rethrow();
}

bool Member::Meet(bool may_end) {
  ++round_;
  Seat& mine = seats_[index_];
  // The first member decides. It comes no further before all have come to this round,
  // so nobody can take its word for that of another.
  if (may_end && index_ == 0 && lost_ > kMostLost) {
    mine.last_round.store(round_, std::memory_order_relaxed);
  }
  mine.round.store(round_, std::memory_order_release);
  for (int32_t i = 0; i < size_; ++i) {
    if (i == index_) continue;
    const Seat& seat = seats_[i];
    lost_ += WaitUntil([&] {
      return seat.round.load(std::memory_order_acquire) >= round_ ||
             seat.left.load(std::memory_order_acquire) == base_;
    });
  }
  return seats_[0].last_round.load(std::memory_order_relaxed) != round_;
}

void SetNumThreads(int32_t threads) noexcept {
  num_threads.store(std::clamp(threads, int32_t{1}, kMostThreads));
}

int32_t NumThreads() {
  if (num_threads.load() == 0) {
    int32_t unset = 0;  // one that another thread has set meanwhile stays
    num_threads.compare_exchange_strong(unset, std::min(UsableCpus(), kMostThreads));
  }
  return num_threads.load();
}

Team::Team(int32_t most) {
  const int32_t threads = most > 1 ? std::min(most, NumThreads()) : 1;
  if (threads == 1) return;
  Pool& pool = PerProcess<Pool>::Get();
  if (!pool.TryOwn()) return;
  pool_ = &pool;
  threads_ = 1 + pool.Open(threads - 1);
}

Team::~Team() {
  if (pool_ != nullptr) pool_->Disown();
}

void Team::RunBody(BodyCall call, const void* body) {
  if (pool_ == nullptr || overload.Lasts()) {
    Member alone;
    call(body, alone);
  } else {
    const int64_t start = Now();
    const int64_t lost = pool_->Run(call, body);
    overload.Count(Now() - start, lost);
  }
}

void Team::RunItems(int64_t n, ItemCall call, const void* body) {
  if (pool_ == nullptr || n <= 1) {
    for (int64_t i = 0; i < n; ++i) call(body, i);
  } else {
    pool_->ForEach(n, call, body);
  }
}

}  // namespace ostinato::cpu
