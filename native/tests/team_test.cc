#include "cpu/runtime/team.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/runtime/features.h"
#include "cpu/runtime/fp_state.h"
#include "tests/check.h"

namespace {

using ostinato::cpu::FlushDenormals;
using ostinato::cpu::Member;
using ostinato::cpu::NumThreads;
using ostinato::cpu::SetNumThreads;
using ostinato::cpu::Team;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr int32_t kThreads = 3;  // more than there may be processors

// Calls attempt(team) with teams that own the pool until it returns true. On a busy
// machine Runs have one member for a while, and helpers may come late; in the end they
// come.
template <typename Attempt>
void Eventually(const Attempt& attempt) {
  const auto deadline = steady_clock::now() + seconds(60);
  while (steady_clock::now() < deadline) {
    {
      Team team(kThreads);
      if (team.threads() > 1 && attempt(team)) return;
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
  CHECK_EQ("a minute without helpers", std::string());
}

// Calls body(member) in a Run that at least one helper has joined.
template <typename Body>
void RunWithHelpers(const Body& body) {
  Eventually([&](Team& team) {
    int32_t size = 0;
    team.Run([&](Member& member) {
      if (member.index() == 0) size = member.size();
      if (member.size() > 1) body(member);
    });
    return size > 1;
  });
}

// Keeps the calling thread in its item until a helper has taken the other one, for ten
// seconds at most; returns whether one has. With two helpers the calling thread may
// have no item, and on_helper() runs twice.
template <typename Item>
bool SharesItems(Team& team, const Item& on_helper) {
  const auto caller = std::this_thread::get_id();
  const auto deadline = steady_clock::now() + seconds(10);
  std::atomic<bool> shared{false};
  team.ForEach(2, [&](int64_t) {
    if (std::this_thread::get_id() == caller) {
      while (!shared.load() && steady_clock::now() < deadline) {
        std::this_thread::yield();
      }
    } else {
      shared.store(true);
      on_helper();
    }
  });
  return shared.load();
}

template <typename Item>
void ForEachWithAHelper(const Item& on_helper) {
  Eventually([&](Team& team) { return SharesItems(team, on_helper); });
}

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
  team.Run([&](Member& member) {
    ++runs;
    CHECK_EQ(member.index(), 0);
    CHECK_EQ(member.size(), 1);
    member.Sync();
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

void MembersAreNumbered() {
  std::atomic<int> times[kThreads] = {};
  std::atomic<int> sizes{0};
  std::thread::id first;
  int32_t size = 0;
  RunWithHelpers([&](Member& member) {
    ++times[member.index()];
    sizes += member.size();
    if (member.index() == 0) {
      first = std::this_thread::get_id();
      size = member.size();
    }
  });
  CHECK_EQ(first == std::this_thread::get_id(), true);
  CHECK_EQ(size <= kThreads, true);
  CHECK_EQ(sizes.load(), size * size);
  for (int32_t i = 0; i < kThreads; ++i) CHECK_EQ(times[i].load(), i < size ? 1 : 0);
}

void TeamsAreNoLargerThanAsked() {
  for (int call = 0; call < 100; ++call) {
    Team team(2);
    CHECK_EQ(team.threads() <= 2, true);
    std::atomic<int> members{0};
    team.Run([&](Member&) { ++members; });
    CHECK_EQ(members.load() <= 2, true);
  }
}

// Sums what all members wrote before Sync; plain memory, so that the thread sanitizer
// sees it too.
int64_t CountWrongSums(Member& member, int64_t* cells, int rounds) {
  int64_t wrong = 0;
  for (int round = 0; round < rounds; ++round) {
    cells[member.index()] = round;
    member.Sync();
    for (int32_t i = 0; i < member.size(); ++i) wrong += cells[i] != round;
    member.Sync();
  }
  return wrong;
}

void SyncMakesWritesVisible() {
  int64_t cells[kThreads] = {};
  std::atomic<int64_t> wrong{0};
  RunWithHelpers([&](Member& member) { wrong += CountWrongSums(member, cells, 100); });
  CHECK_EQ(wrong.load(), 0);
}

// Also when the members of one Run called it more often than those of the next.
void SyncForgetsEarlierRuns() {
  Eventually([](Team& team) {
    int64_t cells[kThreads] = {};
    std::atomic<int64_t> wrong{0};
    int joined = 0;
    for (int run = 0; run < 200; ++run) {
      team.Run([&](Member& member) {
        if (member.index() == 0) joined += member.size() > 1;
        wrong += CountWrongSums(member, cells, run % 5);
      });
    }
    CHECK_EQ(wrong.load(), 0);
    return joined > 0;
  });
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

template <typename Call>
std::string MessageOf(const Call& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing thrown";
}

// Whichever member throws, the others are let through their Syncs.
void RunThrowsWhatAMemberThrew() {
  for (const int32_t thrower : {0, 1}) {
    const std::string message = MessageOf([&] {
      RunWithHelpers([&](Member& member) {
        member.Sync();
        if (member.index() == thrower) throw std::runtime_error("member");
        for (int i = 0; i < 10; ++i) member.Sync();
      });
    });
    CHECK_EQ(message, "member");
    SyncMakesWritesVisible();
  }
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

int32_t SizeOfARun(Team& team) {
  int32_t size = 0;
  team.Run([&](Member& member) {
    if (member.index() == 0) size = member.size();
  });
  return size;
}

// As if the system had stopped a helper: the others wait, and that is most of the time.
void SlowedRunsHaveOneMember() {
  Eventually([](Team& team) {
    bool joined = false;
    team.Run([&](Member& member) {
      if (member.index() == 0) joined = member.size() > 1;
      if (member.index() == 1) std::this_thread::sleep_for(milliseconds(20));
      member.Sync();
    });
    if (!joined) return false;
    CHECK_EQ(SizeOfARun(team), 1);
    return true;
  });
  {
    Team next(kThreads);
    CHECK_EQ(SizeOfARun(next), 1);
  }
  SyncMakesWritesVisible();  // and not for ever
}

// Nobody meets there, so a helper that is held up costs only the item that it has.
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
    team.Run([&](Member& member) { wrong += CountWrongSums(member, cells, 3); });
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

// Where one member is held up long enough, all of them part after the same step.
void MembersPartTogether() {
  constexpr int kSteps = 20;
  std::atomic<int> first{-1}, others{-1};
  RunWithHelpers([&](Member& member) {
    int steps = 0;
    for (bool goes_on = true; goes_on && steps < kSteps; ++steps) {
      if (member.index() == 1 && steps == 3)
        std::this_thread::sleep_for(milliseconds(9));
      goes_on = member.SyncAndGoOn();
    }
    (member.index() == 0 ? first : others).store(steps);
  });
  CHECK_EQ(first.load(), others.load());
  CHECK_EQ(first.load() < kSteps, true);
}

}  // namespace

// An argument leaves out what the thread sanitizer cannot follow.
int main(int argc, char**) {
  NumThreadsStaysInBounds();
  ATeamOfOneWorksAlone();
  ForEachDoesEveryItemOnce();
  ForEachWaitsForItemsInProgress();
  MembersAreNumbered();
  TeamsAreNoLargerThanAsked();
  SyncMakesWritesVisible();
  SyncForgetsEarlierRuns();
  MembersPartTogether();
  ASecondTeamWorksAlone();
  RunThrowsWhatAMemberThrew();
  ForEachThrowsWhatAnItemThrew();
  DenormalsAreFlushedForAWhile();
  SlowedRunsHaveOneMember();
  SlowedItemsAreSharedNonetheless();
  ManyThreadsCallAtOnce();
  if (argc == 1) ChildrenOfABusyProcessHaveTeams();
  return ostinato::testing::Summary();
}
