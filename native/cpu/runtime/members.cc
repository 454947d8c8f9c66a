#include "cpu/runtime/members.h"

#include "cpu/runtime/per_process.h"
#include "cpu/runtime/wait.h"

namespace ostinato::cpu {
namespace {

// Whether a thread runs, as its clock shows; true where the system does not tell.
bool Runs(pthread_t thread) noexcept {
  constexpr int kPolls = 50;  // of some 20 ns
  const int64_t time = CpuTimeNs(thread);
  for (int i = 0; i < kPolls; ++i) Pause();
  return time < 0 || CpuTimeNs(thread) != time;
}

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

void Members::EndLoan() noexcept {
  if (mine->loan.load(std::memory_order_acquire) != Loan::kMade) return;
  SetCpus(pthread_self(), mine->cpus);
  // The caller stays: other libraries expect its thread where it was alone last.
  if (mine != PerProcess<Members>::Get().members_) LeaveCpu(mine->lent);
  mine->loan.store(Loan::kNone, std::memory_order_release);
}

bool Members::Lender::MayLend() noexcept {
  if (borrower_ != nullptr) return true;
  bool some_run = false;
  Members& all = PerProcess<Members>::Get();
  const int cpu = CurrentCpu();
  for (int32_t i = 0; i < all.count_.load(std::memory_order_relaxed); ++i) {
    Member& member = all.members_[i];
    if (&member == mine || !member.works.load(std::memory_order_acquire)) continue;
    const pthread_t thread = member.thread.load(std::memory_order_relaxed);
    if (Runs(thread)) {
      some_run = true;
      continue;
    }
    if (!GetCpus(thread, cpus_) || !Contains(cpus_, cpu)) continue;
    Loan none = Loan::kNone;
    if (!member.loan.compare_exchange_strong(none, Loan::kOffered)) continue;
    member.lent = cpu;
    member.cpus = cpus_;
    // It may run, instead of this thread, from the moment that it is moved.
    member.loan.store(Loan::kMade, std::memory_order_release);
    borrower_ = &member;
    MoveToCpu(thread, cpu);
    if (i == 0) LeaveCpu(cpu);
    return true;
  }
  return !some_run;
}

Members::Lender::~Lender() {
  // It may still be in its piece of work: others did what this one waited for.
  if (borrower_ != nullptr) SetCpus(borrower_->thread.load(), cpus_);
}

}  // namespace ostinato::cpu
