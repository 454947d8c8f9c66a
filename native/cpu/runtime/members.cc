#include "cpu/runtime/members.h"

#include "cpu/runtime/affinity.h"
#include "cpu/runtime/per_process.h"
#include "cpu/runtime/wait.h"

namespace ostinato::cpu {
namespace {

// A thread that runs is seen to do so by its clock within so many polls of some 20 ns.
constexpr int kGlance = 50;

}  // namespace

void Members::Enter(int32_t index) noexcept {
  mine = &members_[index];
  mine->thread.store(pthread_self(), std::memory_order_relaxed);
  mine->works.store(true, std::memory_order_release);
  int32_t count = count_.load(std::memory_order_relaxed);
  while (count <= index && !count_.compare_exchange_weak(count, index + 1)) {
  }
}

void Members::Exit() noexcept {
  mine->works.store(false, std::memory_order_relaxed);
  ReturnCpu();
  mine = nullptr;
}

void Members::Return() noexcept { LeaveCpu(mine->lent.exchange(-1)); }

// Waiters begin with different members.
Members::Waiter::Waiter() noexcept
    : next_(mine == nullptr
                ? 0
                : static_cast<uint32_t>(mine - PerProcess<Members>::Get().members_) +
                      1) {}

Members::Waiter::~Waiter() {
  if (borrower_ != nullptr) TakeBack();
}

bool Members::Waiter::ShouldYield() noexcept {
  if (borrower_ != nullptr) {
    if (borrower_->lent.load() == cpu_) return true;
    TakeBack();
  }
  Members& all = PerProcess<Members>::Get();
  const auto count = static_cast<uint32_t>(all.count_.load(std::memory_order_relaxed));
  for (uint32_t i = 0; i < count; ++i) {
    Member& member = all.members_[next_++ % count];
    if (&member == mine || !member.works.load(std::memory_order_acquire)) continue;
    const pthread_t thread = member.thread.load(std::memory_order_relaxed);
    const int64_t time = CpuTimeNs(thread);
    if (time < 0) return true;
    for (int poll = 0; poll < kGlance; ++poll) Pause();
    if (CpuTimeNs(thread) != time) return false;
    if (&member != all.members_) Lend(member);
    return true;
  }
  return true;
}

void Members::Waiter::Lend(Member& member) noexcept {
  const int cpu = CurrentCpu();
  int none = -1;
  if (cpu < 0 || !YieldsToAll()) return;
  if (!member.lent.compare_exchange_strong(none, cpu)) return;  // another was faster
  borrower_ = &member;
  cpu_ = cpu;
  // It may run from now on, in place of this thread.
  KeepOnCpu(member.thread.load(std::memory_order_relaxed), cpu);
  // It may also have come to the end of its piece of work before it was moved.
  if (member.lent.load() != cpu) TakeBack();
}

void Members::Waiter::TakeBack() noexcept {
  borrower_->lent.compare_exchange_strong(cpu_, -1);
  RunWhereProcessMay(borrower_->thread.load(std::memory_order_relaxed));
  borrower_ = nullptr;
}

}  // namespace ostinato::cpu
