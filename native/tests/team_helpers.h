// What the tests of teams and barriers share: ways to get helpers to take part.
#ifndef OSTINATO_TESTS_TEAM_HELPERS_H_
#define OSTINATO_TESTS_TEAM_HELPERS_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>

#include "cpu/runtime/team.h"
#include "tests/check.h"

namespace ostinato::testing {

using cpu::Team;
using cpu::Worker;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

inline constexpr int32_t kThreads = 3;  // more than there may be processors

// Calls attempt(team) with teams that own the pool until it returns true. On a busy
// machine Runs have one worker for a while, and helpers may come late; in the end they
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

// Calls body(worker) in a Run that at least one helper has joined.
template <typename Body>
void RunWithHelpers(const Body& body) {
  Eventually([&](Team& team) {
    int32_t size = 0;
    team.Run([&](Worker& worker) {
      if (worker.index() == 0) size = worker.size();
      if (worker.size() > 1) body(worker);
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

// Sums what all workers wrote before Sync; plain memory, so that the thread sanitizer
// sees it too.
inline int64_t CountWrongSums(Worker& worker, int64_t* cells, int rounds) {
  int64_t wrong = 0;
  for (int round = 0; round < rounds; ++round) {
    cells[worker.index()] = round;
    worker.Sync();
    for (int32_t i = 0; i < worker.size(); ++i) wrong += cells[i] != round;
    worker.Sync();
  }
  return wrong;
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

}  // namespace ostinato::testing

#endif  // OSTINATO_TESTS_TEAM_HELPERS_H_
