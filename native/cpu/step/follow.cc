#include "cpu/step/follow.h"

#include <algorithm>
#include <atomic>

#include "cpu/runtime/wait.h"

namespace ostinato::cpu {
namespace {

// Steps that a thread runs before it tells the follower; whole tiles of products.
constexpr int64_t kTogether = 24;
// Steps that the follower takes at once, at most: the other thread waits for it at the
// end.
constexpr int64_t kMostTogether = 4 * kTogether;

// How far the steps have run.
struct Progress {
  std::atomic<int64_t> step;
  std::atomic<bool> ended{false};

  struct Ender {
    Progress& progress;
    ~Ender() { progress.ended.store(true, std::memory_order_release); }
  };
};

}  // namespace

template <typename T>
void RunFollowed(StepTile<T>& tile, StepGradients<T>& gradients, int64_t begin,
                 int64_t end, Team& team) {
  tile.Begin(begin, end, &team);
  Progress progress{begin};
  int64_t followed = begin;
  const auto lead = [&] {
    const Progress::Ender ender{progress};  // after an exception, too
    for (int64_t n = begin; n < end;) {
      const int64_t next = std::min(n + kTogether, end);
      tile.RunSteps(n, next, nullptr);
      progress.step.store(n = next, std::memory_order_release);
    }
  };
  const auto follow = [&] {
    Team alone(1);
    const auto ready = [&] {
      return progress.step.load(std::memory_order_acquire) - followed;
    };
    const auto ended = [&] { return progress.ended.load(std::memory_order_acquire); };
    while (!ended()) {
      WaitUntil([&] { return ready() >= kTogether || ended(); });
      if (ended()) return;  // what is left is worth sharing
      const int64_t next = followed + std::min(ready(), kMostTogether);
      tile.RunAfter(followed, next, nullptr);
      gradients.Add(followed, next, alone);
      followed = next;
    }
  };
  // The first one is begun first, and the second one ends with it.
  team.ForEach(2, [&](int64_t i) { i == 0 ? lead() : follow(); });
  tile.RunAfter(followed, end, &team);
  gradients.Add(followed, end, team);
  tile.End(end);
}

template void RunFollowed(StepTile<float>&, StepGradients<float>&, int64_t, int64_t,
                          Team&);
template void RunFollowed(StepTile<double>&, StepGradients<double>&, int64_t, int64_t,
                          Team&);

}  // namespace ostinato::cpu
