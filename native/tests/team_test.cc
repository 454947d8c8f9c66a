#include "cpu/runtime/team.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/runtime/features.h"
#include "cpu/runtime/fp_state.h"
#include "cpu/runtime/per_process.h"
#include "tests/check.h"
#include "tests/team_helpers.h"

namespace {

using namespace ostinato::testing;
using ostinato::cpu::FlushDenormals;
using ostinato::cpu::NumThreads;
using ostinato::cpu::PerProcess;
using ostinato::cpu::Pool;
using ostinato::cpu::SetNumThreads;

void NumThreadsStaysInBounds() {
  CHECK_EQ(NumThreads(), ostinato::cpu::UsableCpus());
  SetNumThreads(0);
  CHECK_EQ(NumThreads(), 1);
  SetNumThreads(1 << 30);
  CHECK_EQ(NumThreads() >= 64 && NumThreads() < 4096, true);
  SetNumThreads(kThreads);
  CHECK_EQ(NumThreads(), kThreads);
}

void CheckWorksAlone(Team& team) {
  CHECK_EQ(team.threads(), 1);
  int runs = 0;
  team.Run([&](Worker& worker) {
    ++runs;
    CHECK_EQ(worker.index(), 0);
    CHECK_EQ(worker.size(), 1);
    worker.Sync();
  });
  CHECK_EQ(runs, 1);
  int64_t next = 0;
  team.ForEach(5, [&](int64_t i) { CHECK_EQ(i, next++); });
  CHECK_EQ(next, 5);
}

void ATeamOfOneWorksAlone() {
  for (const int32_t most : {1, 0, -1}) {
    Team team(most);
    CheckWorksAlone(team);
  }
  SetNumThreads(1);
  {
    Team team(kThreads);
    CheckWorksAlone(team);
  }
  SetNumThreads(kThreads);
}

void ForEachDoesEveryItemOnce() {
  Team team(kThreads);
  for (const int64_t n : {0, 1, 2, 3, 1000}) {
    std::vector<std::atomic<int>> times(static_cast<size_t>(n));
    team.ForEach(n, [&](int64_t i) { ++times[static_cast<size_t>(i)]; });
    int64_t once = 0;
    for (const auto& count : times) once += count.load() == 1;
    CHECK_EQ(once, n);
  }
}

void ForEachWaitsForItemsInProgress() {
  std::atomic<int> begun{0}, ended{0};
  ForEachWithAHelper([&] {
    ++begun;
    std::this_thread::sleep_for(milliseconds(20));
    ++ended;
  });
  CHECK_EQ(ended.load(), begun.load());
}

void ExchangesAreMeasuredWithHelpers() {
  {
    Team alone(1);
    CHECK_EQ(alone.ExchangeNs(), 0);
  }
  Eventually([](Team& team) {
    const int64_t measured = team.ExchangeNs();
    if (measured == 0) return false;
    CHECK_EQ(measured > 0, true);
    return true;
  });
}

void TeamsAreNoLargerThanAsked() {
  for (int call = 0; call < 100; ++call) {
    Team team(2);
    CHECK_EQ(team.threads() <= 2, true);
    std::atomic<int> workers{0};
    team.Run([&](Worker&) { ++workers; });
    CHECK_EQ(workers.load() <= 2, true);
  }
}

void RunsWaitForHelpersThatSleep() {
  Pool& pool = PerProcess<Pool>::Get();
  CHECK_EQ(pool.TryOwn(), true);
  for (int call = 0; call < 3; ++call) {
    std::this_thread::sleep_for(milliseconds(2));  // nobody stays awake for so long
    constexpr int64_t kTenSeconds = 10'000'000'000;
    CHECK_EQ(pool.Open(1, kTenSeconds), 1);
    std::atomic<int> workers{0};
    pool.Run(
        [](const void* count, Worker&) {
          ++*static_cast<std::atomic<int>*>(const_cast<void*>(count));
        },
        &workers);
    CHECK_EQ(workers.load(), 2);
  }
  pool.Disown();
}

void ASecondTeamWorksAlone() {
  Eventually([](Team& team) {
    Team same_thread(kThreads);
    CheckWorksAlone(same_thread);
    std::thread([] {
      Team other_thread(kThreads);
      CheckWorksAlone(other_thread);
    }).join();
    std::atomic<int> larger{0};
    team.ForEach(kThreads, [&](int64_t) {
      Team nested(kThreads);
      larger += nested.threads() > 1;
    });
    CHECK_EQ(larger.load(), 0);
    return true;
  });
}

void ForEachThrowsWhatAnItemThrew() {
  std::atomic<int> done{0};
  const std::string message = MessageOf([&] {
    Team team(kThreads);
    team.ForEach(100, [&](int64_t i) {
      ++done;
      if (i % 2 == 1) throw std::runtime_error("item");
    });
  });
  CHECK_EQ(message, "item");
  CHECK_EQ(done.load() > 1, true);
  CHECK_EQ(
      MessageOf([] { ForEachWithAHelper([] { throw std::runtime_error("helper"); }); }),
      "helper");
  ForEachDoesEveryItemOnce();
}

#if defined(__x86_64__) || defined(__aarch64__)
bool KeepsDenormals() {
  volatile float smallest = 1.17549435e-38f;  // of the normal numbers
  volatile float half = 0.5f;
  return smallest * half != 0;
}

void DenormalsAreFlushedForAWhile() {
  CHECK_EQ(KeepsDenormals(), true);
  {
    const FlushDenormals flush;
    CHECK_EQ(KeepsDenormals(), false);
    {
      const FlushDenormals nested;
      CHECK_EQ(KeepsDenormals(), false);
    }
    CHECK_EQ(KeepsDenormals(), false);
  }
  CHECK_EQ(KeepsDenormals(), true);
  std::atomic<bool> kept{true};
  ForEachWithAHelper([&] { kept.store(KeepsDenormals()); });
  CHECK_EQ(kept.load(), false);
}
#else
void DenormalsAreFlushedForAWhile() {}
#endif

// There is no barrier, so a helper that is held up costs only the item that it has.
void SlowedItemsAreSharedNonetheless() {
  Eventually([](Team& team) {
    for (int i = 0; i < 4; ++i) {
      CHECK_EQ(SharesItems(team, [] { std::this_thread::sleep_for(milliseconds(20)); }),
               true);
    }
    return true;
  });
}

// The result of a call that uses all of a team, right or wrong.
int64_t WrongResults(int runs) {
  Team team(kThreads);
  int64_t cells[kThreads] = {};
  std::atomic<int64_t> wrong{0}, sum{0};
  for (int run = 0; run < runs; ++run) {
    team.Run([&](Worker& worker) { wrong += CountWrongSums(worker, cells, 3); });
    team.ForEach(10, [&](int64_t i) { sum += i; });
  }
  return wrong.load() + (sum.load() != 45 * runs);
}

void ManyThreadsCallAtOnce() {
  std::vector<std::thread> threads;
  std::atomic<int64_t> wrong{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < 200; ++call) wrong += WrongResults(5);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
}

// The child has none of the helpers, and another thread may own the pool at the fork.
void ChildrenOfABusyProcessHaveTeams() {
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop.load()) WrongResults(5);
  });
  for (int i = 0; i < 4; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      ForEachWithAHelper([] {});
      CHECK_EQ(WrongResults(5), 0);
      _exit(ostinato::testing::failures == 0 ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQ(WIFEXITED(status) && WEXITSTATUS(status) == 0, true);
  }
  stop.store(true);
  other.join();
}

}  // namespace

// An argument leaves out what the thread sanitizer cannot follow.
int main(int argc, char**) {
  NumThreadsStaysInBounds();
  ATeamOfOneWorksAlone();
  ForEachDoesEveryItemOnce();
  ForEachWaitsForItemsInProgress();
  ExchangesAreMeasuredWithHelpers();
  TeamsAreNoLargerThanAsked();
  RunsWaitForHelpersThatSleep();
  ASecondTeamWorksAlone();
  ForEachThrowsWhatAnItemThrew();
  DenormalsAreFlushedForAWhile();
  SlowedItemsAreSharedNonetheless();
  ManyThreadsCallAtOnce();
  if (argc == 1) ChildrenOfABusyProcessHaveTeams();
  return Summary();
}
