#include "cpu/runtime/members.h"

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "cpu/runtime/per_process.h"
#include "cpu/runtime/wait.h"
#include "tests/check.h"

namespace {

using ostinato::cpu::Contains;
using ostinato::cpu::CpuSet;
using ostinato::cpu::CurrentCpu;
using ostinato::cpu::GetCpus;
using ostinato::cpu::LeaveCpu;
using ostinato::cpu::Members;
using ostinato::cpu::OffCpu;
using ostinato::cpu::PerProcess;
using ostinato::cpu::ProcessCpus;
using ostinato::cpu::SetCpus;
using ostinato::cpu::WaitUntil;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

CpuSet CpusOf(pthread_t thread) {
  CpuSet cpus;
  CHECK_EQ(GetCpus(thread, cpus), true);
  return cpus;
}

// A thread that works as a member. While `busy` is false it sleeps in the middle of its
// work, which a system that keeps it from running looks like.
class Working {
 public:
  Working(int32_t index, bool busy)
      : busy_(busy), thread_([this, index] { Work(index); }) {
    while (!works_.load()) std::this_thread::yield();
    if (!busy) std::this_thread::sleep_for(milliseconds(5));  // until it sleeps
  }
  ~Working() {
    End();
    exits_.store(true);
    thread_.join();
  }

  // Comes to the end of a piece of work.
  void End() {
    ends_.store(true);
    while (!ended_.load()) std::this_thread::yield();
  }

  pthread_t thread() { return thread_.native_handle(); }
  int cpu() const { return cpu_.load(); }  // after that piece

 private:
  void Work(int32_t index) {
    PerProcess<Members>::Get().Enter(index);
    works_.store(true);
    while (!ends_.load()) {
      if (!busy_) std::this_thread::sleep_for(milliseconds(50));
    }
    Members::ReturnCpu();
    cpu_.store(CurrentCpu());
    ended_.store(true);
    while (!exits_.load()) std::this_thread::sleep_for(milliseconds(1));
    Members::Exit();
  }

  const bool busy_;
  std::atomic<bool> works_{false}, ends_{false}, ended_{false}, exits_{false};
  std::atomic<int> cpu_{-1};
  std::thread thread_;
};

#if defined(__linux__)

bool SameCpus(const CpuSet& a, const CpuSet& b) { return CPU_EQUAL(&a, &b) != 0; }

// Keeps the calling thread on its CPU, so that it lends this one.
class OnOneCpu {
 public:
  OnOneCpu() : before_(CpusOf(pthread_self())), cpu_(CurrentCpu()) {
    ostinato::cpu::MoveToCpu(pthread_self(), cpu_);
  }
  ~OnOneCpu() { SetCpus(pthread_self(), before_); }
  int cpu() const { return cpu_; }

 private:
  const CpuSet before_;
  const int cpu_;
};

void AStoppedMemberGetsTheCpuUntilItsPieceOfWorkEnds() {
  for (const int32_t index : {0, 1}) {
    Working stopped(index, false);
    const CpuSet before = CpusOf(stopped.thread());
    const OnOneCpu here;
    Members::Lender lender;
    CHECK_EQ(lender.MayLend(), true);
    const CpuSet lent = CpusOf(stopped.thread());
    CHECK_EQ(CPU_COUNT(&lent), 1);
    CHECK_EQ(Contains(lent, here.cpu()), true);
    CHECK_EQ(lender.MayLend(), true);  // the loan that there is
    stopped.End();
    CHECK_EQ(SameCpus(CpusOf(stopped.thread()), before), true);
    // The first member is the caller, which stays; others leave.
    CHECK_EQ(index == 0 || stopped.cpu() != here.cpu(), true);
  }
}

void ALoanEndsWithTheWait() {
  Working stopped(2, false);
  const CpuSet before = CpusOf(stopped.thread());
  {
    Members::Lender lender;
    CHECK_EQ(lender.MayLend(), true);
    CHECK_EQ(SameCpus(CpusOf(stopped.thread()), before), false);
  }
  CHECK_EQ(SameCpus(CpusOf(stopped.thread()), before), true);
}

// On a busy machine a thread that works may be stopped at times.
void AMemberThatRunsGetsNoCpu() {
  Working running(1, true);
  const CpuSet before = CpusOf(running.thread());
  const auto deadline = steady_clock::now() + seconds(60);
  while (steady_clock::now() < deadline) {
    Members::Lender lender;
    if (lender.MayLend()) continue;
    CHECK_EQ(SameCpus(CpusOf(running.thread()), before), true);
    return;
  }
  CHECK_EQ("a minute without a member that runs", std::string());
}

void OnlyMembersThatWorkGetACpu() {
  {
    const Working earlier(1, false);
  }
  Members::Lender lender;
  const CpuSet before = CpusOf(pthread_self());
  PerProcess<Members>::Get().Enter(3);
  CHECK_EQ(lender.MayLend(), true);  // nobody is known to run
  Members::Exit();
  CHECK_EQ(SameCpus(CpusOf(pthread_self()), before), true);
}

void AMemberThatMayNotRunHereStaysWhereItIs() {
  Working stopped(1, false);
  const OnOneCpu here;
  const OffCpu away(stopped.thread(), here.cpu());
  const CpuSet before = CpusOf(stopped.thread());
  Members::Lender lender;
  lender.MayLend();
  CHECK_EQ(SameCpus(CpusOf(stopped.thread()), before), true);
}

void WhoWaitsForAStoppedThreadLendsItsCpu() {
  Working stopped(1, false);
  const OnOneCpu here;
  WaitUntil([&] {
    const CpuSet cpus = CpusOf(stopped.thread());
    return CPU_COUNT(&cpus) == 1 && Contains(cpus, here.cpu());
  });
}

void ThreadsLeaveACpuIfTheyHaveAnother() {
  const CpuSet before = CpusOf(pthread_self());
  const int cpu = CurrentCpu();
  {
    const OffCpu away(pthread_self(), cpu);
    CHECK_EQ(CurrentCpu() != cpu, true);
  }
  for (int i = 0; i < 10; ++i) {  // it may be moved back at any moment
    const int left = CurrentCpu();
    LeaveCpu(left);
    CHECK_EQ(SameCpus(CpusOf(pthread_self()), before), true);
  }
  const OnOneCpu here;
  const OffCpu nowhere(pthread_self(), here.cpu());
  LeaveCpu(here.cpu());
  CHECK_EQ(CurrentCpu(), here.cpu());
}

#endif

}  // namespace

int main() {
#if defined(__linux__)
  if (ProcessCpus() > 1) {
    AStoppedMemberGetsTheCpuUntilItsPieceOfWorkEnds();
    ALoanEndsWithTheWait();
    AMemberThatRunsGetsNoCpu();
    OnlyMembersThatWorkGetACpu();
    AMemberThatMayNotRunHereStaysWhereItIs();
    WhoWaitsForAStoppedThreadLendsItsCpu();
    ThreadsLeaveACpuIfTheyHaveAnother();
  }
#endif
  return ostinato::testing::Summary();
}
