#include "cpu/runtime/barrier.h"

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>

#include "tests/check.h"
#include "tests/team_helpers.h"

namespace {

using namespace ostinato::testing;

void WorkersAreNumbered() {
  std::atomic<int> times[kThreads] = {};
  std::atomic<int> sizes{0};
  std::thread::id first;
  int32_t size = 0;
  RunWithHelpers([&](Worker& worker) {
    ++times[worker.index()];
    sizes += worker.size();
    if (worker.index() == 0) {
      first = std::this_thread::get_id();
      size = worker.size();
    }
  });
  CHECK_EQ(first == std::this_thread::get_id(), true);
  CHECK_EQ(size <= kThreads, true);
  CHECK_EQ(sizes.load(), size * size);
  for (int32_t i = 0; i < kThreads; ++i) CHECK_EQ(times[i].load(), i < size ? 1 : 0);
}

void SyncMakesWritesVisible() {
  int64_t cells[kThreads] = {};
  std::atomic<int64_t> wrong{0};
  RunWithHelpers([&](Worker& worker) { wrong += CountWrongSums(worker, cells, 100); });
  CHECK_EQ(wrong.load(), 0);
}

// Also when the workers of one Run called it more often than those of the next.
void SyncForgetsEarlierRuns() {
  Eventually([](Team& team) {
    int64_t cells[kThreads] = {};
    std::atomic<int64_t> wrong{0};
    int joined = 0;
    for (int run = 0; run < 200; ++run) {
      team.Run([&](Worker& worker) {
        if (worker.index() == 0) joined += worker.size() > 1;
        wrong += CountWrongSums(worker, cells, run % 5);
      });
    }
    CHECK_EQ(wrong.load(), 0);
    return joined > 0;
  });
}

// Where one worker is held up long enough, all of them stop after the same step.
void WorkersStopTogether() {
  constexpr int kSteps = 20;
  std::atomic<int> first{-1}, others{-1};
  RunWithHelpers([&](Worker& worker) {
    int steps = 0;
    for (bool continues = true; continues && steps < kSteps; ++steps) {
      if (worker.index() == 1 && steps == 3)
        std::this_thread::sleep_for(milliseconds(9));
      continues = worker.SyncAndContinue();
    }
    (worker.index() == 0 ? first : others).store(steps);
  });
  CHECK_EQ(first.load(), others.load());
  CHECK_EQ(first.load() < kSteps, true);
}

// Whichever worker throws, the others are let through their Syncs.
void RunThrowsWhatAWorkerThrew() {
  for (const int32_t thrower : {0, 1}) {
    const std::string message = MessageOf([&] {
      RunWithHelpers([&](Worker& worker) {
        worker.Sync();
        if (worker.index() == thrower) throw std::runtime_error("worker");
        for (int i = 0; i < 10; ++i) worker.Sync();
      });
    });
    CHECK_EQ(message, "worker");
    SyncMakesWritesVisible();
  }
}

}  // namespace

int main() {
  ostinato::cpu::SetNumThreads(kThreads);
  WorkersAreNumbered();
  SyncMakesWritesVisible();
  SyncForgetsEarlierRuns();
  WorkersStopTogether();
  RunThrowsWhatAWorkerThrew();
  return Summary();
}
