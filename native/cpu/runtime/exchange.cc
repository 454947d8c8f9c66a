#include "cpu/runtime/exchange.h"

#include <algorithm>
#include <atomic>

#include "cpu/runtime/wait.h"

namespace ostinato::cpu {
namespace {

// Odd, so that one is in the middle; threads begin together after the first.
constexpr int kSteps = 9;

// The states of a small network: four cache lines, of which one word each is used.
constexpr int kLines = 4, kWordsOfLine = 16, kMessages = 8;
struct alignas(128) Message {
  std::atomic<int32_t> words[kLines * kWordsOfLine];
};

}  // namespace

int64_t MeasureExchange(Team& team) {
  Message messages[kMessages]{};
  int64_t took[kSteps]{};
  team.Run([&](Worker& worker) {
    if (worker.size() == 1) return;
    Message& mine = messages[worker.index() % kMessages];
    Message& other = messages[(worker.index() + 1) % worker.size() % kMessages];
    int64_t before = NowNs();
    for (int32_t step = 0; step < kSteps; ++step) {
      for (int i = 0; i < kLines; ++i) {
        mine.words[i * kWordsOfLine].store(step, std::memory_order_relaxed);
      }
      worker.Sync();
      for (int i = 0; i < kLines; ++i) {
        // Waits for the line: what is added depends on it.
        before += other.words[i * kWordsOfLine].load(std::memory_order_relaxed) >> 30;
      }
      if (worker.index() != 0) continue;
      const int64_t now = NowNs();
      took[step] = now - before;
      before = now;
    }
  });
  std::nth_element(took, took + kSteps / 2, took + kSteps);
  return took[kSteps / 2];
}

}  // namespace ostinato::cpu
