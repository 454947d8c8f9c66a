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

// The caller stays where it is alone, as it does in the rest of the program, and the
// lender leaves.
bool Members::IsCaller(const Member* member) noexcept {
  return member == PerProcess<Members>::Get().members_;
}

void Members::EndLoan() noexcept {
  if (mine->loan.load(std::memory_order_acquire) != Loan::kMade) return;
  SetCpus(pthread_self(), mine->cpus);
  if (!IsCaller(mine)) LeaveCpu(mine->lent);
  mine->loan.store(Loan::kNone, std::memory_order_release);
}

bool Members::Lender::MayLend() noexcept {
  if (borrower_ != nullptr) return true;
  Members& all = PerProcess<Members>::Get();
  const int32_t count = all.count_.load(std::memory_order_relaxed);
  for (int32_t i = 0; i < count; ++i) {
    Member& member = all.members_[next_++ % count];
    if (&member == mine || !member.works.load(std::memory_order_acquire)) continue;
    const pthread_t thread = member.thread.load(std::memory_order_relaxed);
    if (Runs(thread)) return false;
    Lend(member, thread);
    return true;
  }
  return true;
}

void Members::Lender::Lend(Member& member, pthread_t thread) noexcept {
  const int cpu = CurrentCpu();
  if (!GetCpus(thread, cpus_) || !Contains(cpus_, cpu)) return;
  Loan none = Loan::kNone;  // else another thread has been faster
  if (!member.loan.compare_exchange_strong(none, Loan::kOffered)) return;
  member.lent = cpu;
  member.cpus = cpus_;
  // It may run, instead of this thread, from the moment that it is moved.
  member.loan.store(Loan::kMade, std::memory_order_release);
  borrower_ = &member;
  MoveToCpu(thread, cpu);
  if (IsCaller(&member)) LeaveCpu(cpu);
}

Members::Lender::~Lender() {
  // It may still be in its piece of work: others did what this one waited for.
  if (borrower_ != nullptr) SetCpus(borrower_->thread.load(), cpus_);
}

}  // namespace ostinato::cpu
