#include "cpu/runtime/pool.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "cpu/runtime/affinity.h"
#include "cpu/runtime/fp_state.h"
#include "cpu/runtime/wait.h"

namespace ostinato::cpu {
namespace {

// For how many polls of some 20 ns a Run waits for one more helper if more look awake.
constexpr int kGrace = 50;

// How long a helper without work stays awake: longer than the time between two calls
// of a busy program, shorter than what a person would see as load.
constexpr int64_t kAwakeNs = 150'000;

// For how long a measured exchange counts.
constexpr int64_t kExchangeCountsNs = 100'000'000;

// For how long calls do without threads that the system has refused.
constexpr int64_t kRefusedNs = 1'000'000'000;

}  // namespace

bool Pool::TryOwn() {
  if (owned_.exchange(true, std::memory_order_acquire)) return false;
  members_.Enter(0);
  return true;
}

void Pool::Disown() {
  Members::Exit();
  owned_.store(false, std::memory_order_release);
}

int32_t Pool::Open(int32_t wanted, int64_t patience) {
  const int64_t now = NowNs();
  caller_cpu_.store(CurrentCpu(), std::memory_order_relaxed);
  while (started_ < wanted && now >= retry_at_) {
    try {
      std::thread([this, index = started_] { Serve(index); }).detach();
    } catch (const std::exception&) {  // of the system, or std::bad_alloc
      retry_at_ = now + kRefusedNs;
      break;
    }
    ++started_;
  }
  const int32_t helpers = std::min(wanted, started_);
  helpers_.store(helpers, std::memory_order_relaxed);
  Wake(helpers);
  deadline_ = NowNs() + patience;
  return helpers;
}

void Pool::Serve(int32_t index) {
  const FlushDenormals flush;
  ShortenTimeSlices();
  helper_[index].thread = pthread_self();
  RunWhereProcessMay(pthread_self());
  while (true) {
    LeaveCpu(caller_cpu_.load(std::memory_order_relaxed));
    helper_[index].state.store(HelperState::kAwake, std::memory_order_relaxed);
    int64_t idle_since = NowNs();
    while (NowNs() - idle_since < kAwakeNs) {
      for (int i = 0; i < kPatience; ++i) {
        const bool may = index < helpers_.load(std::memory_order_relaxed);
        const int64_t ticket = may ? TakeTicket() : 0;
        if (ticket == 0) {
          Pause();
          continue;
        }
        Work(index, ticket);
        idle_since = NowNs();
        i = 0;
      }
    }
    RunWhereProcessMay(pthread_self());  // which may have changed
    Sleep(index);
  }
}

void Pool::Work(int32_t index, int64_t ticket) {
  members_.Enter(1 + index);
  call_ != nullptr ? TakeSlot(ticket) : DoItem(ticket);
  Members::Exit();
}

// Sequential consistency: either the helper sees the tickets or Wake sees it asleep.
void Pool::Sleep(int32_t index) {
  Helper& me = helper_[index];
  std::unique_lock<std::mutex> lock(me.mutex);
  me.state.store(HelperState::kAsleep);
  if (tickets_.load() > 0 && index < helpers_.load()) {
    me.state.store(HelperState::kAwake);
    return;
  }
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
      if (helper.state.load() != HelperState::kAsleep) continue;
      helper.state.store(HelperState::kCalled);
    }
    // A system that wakes a thread likes to put it where its waker runs. There it
    // waits for the end of the waker's time slice, which is longer than most calls.
    KeepOffCpu(helper.thread, caller_cpu_.load(std::memory_order_relaxed));
    helper.called.notify_one();
    RunWhereProcessMay(helper.thread);
  }
  return awake;
}

// Ends the taking of slots once all but `absent` are taken or nobody comes any more,
// and the deadline of the others is over; returns how many stay free.
int32_t Pool::Close(int32_t absent) {
  int64_t free = tickets_.load(std::memory_order_relaxed);
  for (int polls = 0; polls < kGrace && free > absent; ++polls) {
    Pause();
    const int64_t before =
        std::exchange(free, tickets_.load(std::memory_order_relaxed));
    if (free != before) polls = 0;
  }
  while (free > 0 && NowNs() < deadline_) {
    Pause();
    free = tickets_.load(std::memory_order_relaxed);
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

void Pool::TakeSlot(int64_t ticket) {
  LeaveCpu(caller_cpu_.load(std::memory_order_relaxed));
  const auto index = static_cast<int32_t>(count_ - ticket + 1);
  auto size = static_cast<int32_t>(count_ + 1);
  if (ticket > 1) {  // who takes the last slot need not wait to hear that all are taken
    WaitUntil([&] { return (size = size_.load(std::memory_order_acquire)) != 0; });
  }
  Worker worker(slots_, index, size, base_);
  try {
    call_(body_, worker);
  } catch (...) {
    KeepException();
  }
  slots_[index].left.store(worker.base_, std::memory_order_release);
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

int64_t Pool::KnownExchangeNs() const {
  return NowNs() < exchange_until_ ? exchange_ns_ : 0;
}

void Pool::KeepExchangeNs(int64_t ns) {
  exchange_ns_ = ns;
  exchange_until_ = NowNs() + kExchangeCountsNs;
}

void Pool::Run(BodyCall call, const void* body) {
  caller_cpu_.store(CurrentCpu(), std::memory_order_relaxed);
  const int32_t helpers = helpers_.load(std::memory_order_relaxed);
  call_ = call;
  body_ = body;
  count_ = helpers;
  size_.store(0, std::memory_order_relaxed);
  tickets_.store(helpers);
  const int32_t size = helpers + 1 - Close(helpers - Wake(helpers));
  size_.store(size, std::memory_order_release);

  Worker worker(slots_, 0, size, base_);
  try {
    call(body, worker);
  } catch (...) {
    KeepException();
  }
  slots_[0].left.store(base_, std::memory_order_release);
  int64_t last_round = worker.round_;
  for (int32_t i = 1; i < size; ++i) {
    const Slot& slot = slots_[i];
    WaitUntil([&] { return slot.left.load(std::memory_order_acquire) == base_; });
    last_round = std::max(last_round, slot.round.load(std::memory_order_relaxed));
  }
  base_ = last_round + 1;
  Rethrow();
}

void Pool::ForEach(int64_t n, ItemCall call, const void* body) {
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

}  // namespace ostinato::cpu
