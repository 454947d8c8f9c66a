#include "cpu/runtime/members.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "cpu/runtime/affinity.h"
#include "cpu/runtime/per_process.h"
#include "cpu/runtime/wait.h"
#include "tests/check.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace {

using ostinato::cpu::CurrentCpu;
using ostinato::cpu::KeepOffCpu;
using ostinato::cpu::KeepOnCpu;
using ostinato::cpu::LeaveCpu;
using ostinato::cpu::Members;
using ostinato::cpu::PerProcess;
using ostinato::cpu::ProcessCpus;
using ostinato::cpu::RunWhereProcessMay;
using ostinato::cpu::WaitUntil;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr int32_t kCaller = 0;

#if defined(__linux__)

// A thread that works as a member. While `busy` is false it sleeps in the middle of its
// work, which looks like a thread that the system has stopped.
class Working {
 public:
  explicit Working(int32_t index, bool busy = false)
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

  cpu_set_t cpus() {
    cpu_set_t cpus;
    const int failed = pthread_getaffinity_np(handle(), sizeof cpus, &cpus);
    CHECK_EQ(failed, 0);
    return cpus;
  }
  bool OnlyOn(int cpu) {
    const cpu_set_t mine = cpus();
    return CPU_COUNT(&mine) == 1 && CPU_ISSET(cpu, &mine);
  }
  bool Anywhere() {
    const cpu_set_t mine = cpus();
    return CPU_COUNT(&mine) == ProcessCpus();
  }
  pthread_t handle() { return thread_.native_handle(); }

 private:
  void Work(int32_t index) {
    PerProcess<Members>::Get().Enter(index);
    works_.store(true);
    while (!ends_.load()) {
      if (!busy_) std::this_thread::sleep_for(milliseconds(50));
    }
    Members::ReturnCpu();
    ended_.store(true);
    while (!exits_.load()) std::this_thread::sleep_for(milliseconds(1));
    Members::Exit();
  }

  const bool busy_;
  std::atomic<bool> works_{false}, ends_{false}, ended_{false}, exits_{false};
  std::thread thread_;
};

// Calls body(cpu) on a thread that stays on this CPU, so that it lends this one.
template <typename Body>
void OnOneCpu(const Body& body) {
  std::thread([&] {
    const int cpu = CurrentCpu();
    KeepOnCpu(pthread_self(), cpu);
    body(cpu);
  }).join();
}

void AStoppedHelperHasTheCpuUntilItsPieceOfWorkEnds() {
  Working stopped(1);
  OnOneCpu([&](int cpu) {
    Members::Waiter waiter;
    CHECK_EQ(waiter.ShouldYield(), true);
    CHECK_EQ(stopped.OnlyOn(cpu), true);
    CHECK_EQ(waiter.ShouldYield(), true);
    CHECK_EQ(stopped.OnlyOn(cpu), true);
    stopped.End();
    CHECK_EQ(stopped.Anywhere(), true);
    while (!stopped.OnlyOn(cpu)) waiter.ShouldYield();  // it may borrow again
  });
  CHECK_EQ(stopped.Anywhere(), true);
}

void ALoanEndsWithTheWait() {
  Working stopped(2);
  for (int wait = 0; wait < 2; ++wait) {
    OnOneCpu([&](int cpu) {
      Members::Waiter waiter;
      CHECK_EQ(waiter.ShouldYield(), true);
      CHECK_EQ(stopped.OnlyOn(cpu), true);
    });
    CHECK_EQ(stopped.Anywhere(), true);
  }
}

void OneLendsAtATime() {
  Working stopped(1);
  OnOneCpu([&](int cpu) {
    Members::Waiter first;
    CHECK_EQ(first.ShouldYield(), true);
    {
      Members::Waiter second;
      CHECK_EQ(second.ShouldYield(), true);
    }
    CHECK_EQ(stopped.OnlyOn(cpu), true);  // the second one has nothing to take back
  });
}

void WaitersLookAtOneMemberAfterTheOther() {
  Working one(1), two(2);
  OnOneCpu([&](int cpu) {
    Members::Waiter a, b;
    CHECK_EQ(a.ShouldYield() && b.ShouldYield(), true);
    for (int i = 0; i < 3; ++i) b.ShouldYield();  // its first find may be taken
    CHECK_EQ(one.OnlyOn(cpu), true);
    CHECK_EQ(two.OnlyOn(cpu), true);
  });
}

// On a busy machine a thread that works may be stopped at times.
void AHelperThatRunsGetsNoCpu() {
  Working running(1, true);
  const auto deadline = steady_clock::now() + seconds(60);
  while (steady_clock::now() < deadline) {
    Members::Waiter waiter;
    if (waiter.ShouldYield()) continue;
    CHECK_EQ(running.Anywhere(), true);
    return;
  }
  CHECK_EQ("a minute without a helper that runs", std::string());
}

void TheCallerAndThoseWithoutWorkGetNone() {
  {
    const Working earlier(1);
  }
  PerProcess<Members>::Get().Enter(3);
  Members::Waiter waiter;
  CHECK_EQ(waiter.ShouldYield(), true);  // a thread does not wait for itself
  Working caller(kCaller);
  CHECK_EQ(waiter.ShouldYield(), true);
  CHECK_EQ(caller.Anywhere(), true);
  Members::Exit();
}

void WhoWaitsForAStoppedHelperLendsItsCpu() {
  Working stopped(1);
  OnOneCpu([&](int cpu) { WaitUntil([&] { return stopped.OnlyOn(cpu); }); });
  CHECK_EQ(stopped.Anywhere(), true);
}

void HelpersRunWhereTheMainThreadMay() {
  Working helper(1);
  const int cpu = CurrentCpu();
  KeepOffCpu(helper.handle(), cpu);
  cpu_set_t others = helper.cpus();
  CHECK_EQ(CPU_COUNT(&others) == ProcessCpus() - 1 && !CPU_ISSET(cpu, &others), true);
  KeepOnCpu(helper.handle(), cpu);
  CHECK_EQ(helper.OnlyOn(cpu), true);
  RunWhereProcessMay(helper.handle());
  CHECK_EQ(helper.Anywhere(), true);

  cpu_set_t before, one;
  pthread_getaffinity_np(pthread_self(), sizeof before, &before);
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  pthread_setaffinity_np(pthread_self(), sizeof one, &one);
  RunWhereProcessMay(helper.handle());
  CHECK_EQ(helper.OnlyOn(cpu), true);
  KeepOffCpu(helper.handle(), cpu);  // there is no other
  CHECK_EQ(helper.OnlyOn(cpu), true);
  KeepOnCpu(helper.handle(), cpu == 0 ? 1 : 0);  // which the process may not use
  CHECK_EQ(helper.OnlyOn(cpu), true);
  pthread_setaffinity_np(pthread_self(), sizeof before, &before);
}

void ThreadsLeaveACpuIfTheyHaveAnother() {
  std::thread([] {
    const int cpu = CurrentCpu();
    KeepOffCpu(pthread_self(), cpu);
    CHECK_EQ(CurrentCpu() != cpu, true);
    int moved = 0;  // the system may move it back at any moment
    for (int i = 0; i < 20; ++i) {
      const int left = CurrentCpu();
      LeaveCpu(left);
      moved += CurrentCpu() != left;
      cpu_set_t cpus;
      pthread_getaffinity_np(pthread_self(), sizeof cpus, &cpus);
      CHECK_EQ(CPU_COUNT(&cpus), ProcessCpus());
    }
    CHECK_EQ(moved > 10, true);
  }).join();
}

#endif

}  // namespace

int main() {
#if defined(__linux__)
  if (ProcessCpus() > 1) {
    AStoppedHelperHasTheCpuUntilItsPieceOfWorkEnds();
    ALoanEndsWithTheWait();
    OneLendsAtATime();
    WaitersLookAtOneMemberAfterTheOther();
    AHelperThatRunsGetsNoCpu();
    TheCallerAndThoseWithoutWorkGetNone();
    WhoWaitsForAStoppedHelperLendsItsCpu();
    HelpersRunWhereTheMainThreadMay();
    ThreadsLeaveACpuIfTheyHaveAnother();
  }
#endif
  return ostinato::testing::Summary();
}
