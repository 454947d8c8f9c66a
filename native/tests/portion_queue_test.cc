#include "cpu/pass/portion_queue.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "tests/check.h"

namespace {

using ostinato::cpu::Portion;
using ostinato::cpu::PortionQueue;
using ostinato::cpu::Scratch;
using ostinato::cpu::SplitBatch;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr int64_t kPseudoLayers = 2;

// Lets a portion make `steps` more steps; counts those of each sequence, in plain
// memory, so that the thread sanitizer sees whether two threads ever have the same one.
void MoveOn(Portion& portion, int64_t steps, std::vector<int64_t>& made) {
  const auto& sequences = portion.sequences;
  for (int64_t n = 0; n < steps && portion.step < sequences.steps();
       ++n, ++portion.step) {
    for (int64_t i = 0; i < sequences.Active(portion.step); ++i)
      ++made[sequences.index[i]];
  }
  if (portion.step < sequences.steps()) return;
  ++portion.pseudo_layer;
  portion.step = 0;
}

void EverySequenceMakesEveryStepOnce(int64_t portions, int threads) {
  const std::vector<int32_t> lengths{9,  0, 3, 30, 7,  1,  12, 30,
                                     30, 2, 5, 8,  30, 17, 30};
  const auto batch = static_cast<int64_t>(lengths.size());
  Scratch scratch;
  PortionQueue queue(SplitBatch(lengths.data(), batch, 30, portions, scratch), portions,
                     batch, kPseudoLayers, scratch);
  std::vector<int64_t> made(lengths.size());
  std::vector<std::thread> others;
  for (int thread = 0; thread < threads; ++thread) {
    others.emplace_back([&, thread] {
      Portion* portion = nullptr;
      while ((portion = queue.Next(portion)) != nullptr) {
        // One thread is slow, as if others had its processor.
        if (thread == 0) std::this_thread::sleep_for(milliseconds(1));
        MoveOn(*portion, 3, made);
      }
    });
  }
  for (std::thread& other : others) other.join();
  for (int64_t b = 0; b < batch; ++b) CHECK_EQ(made[b], kPseudoLayers * lengths[b]);
}

void TheFurthestBehindComeFirst() {
  Scratch scratch;
  PortionQueue queue(SplitBatch(nullptr, 12, 10, 3, scratch), 3, 12, kPseudoLayers,
                     scratch);
  std::vector<int64_t> made(12);
  Portion* const stopped = queue.Next(nullptr);
  Portion* portion = queue.Next(nullptr);
  for (int64_t turn = 1; turn <= 3; ++turn) {
    for (int sequences = 0; sequences < 2; ++sequences) {
      CHECK_EQ(portion == stopped, false);
      MoveOn(*portion, 1, made);
      CHECK_EQ(portion->step, turn);
      portion = queue.Next(portion);
    }
  }
  MoveOn(*portion, 1, made);
  CHECK_EQ(queue.Next(portion) == portion, false);
  CHECK_EQ(queue.Next(stopped), stopped);
  CHECK_EQ(stopped->step, 0);
}

void AThreadWithoutWorkGetsHalf() {
  Scratch scratch;
  PortionQueue queue(SplitBatch(nullptr, 16, 10, 2, scratch), 2, 16, kPseudoLayers,
                     scratch);
  std::vector<int64_t> made(16);
  Portion* mine = queue.Next(nullptr);
  std::thread other([&] {
    Portion* portion = nullptr;
    while ((portion = queue.Next(portion)) != nullptr) MoveOn(*portion, 1, made);
  });
  // As if this thread had been stopped, until the other one has done all it could.
  const auto deadline = steady_clock::now() + seconds(10);
  while (mine->sequences.size == 8 && steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(1));
    mine = queue.Next(mine);
  }
  const int64_t size = mine->sequences.size;
  while (mine != nullptr) {
    MoveOn(*mine, 1, made);
    mine = queue.Next(mine);
  }
  other.join();
  CHECK_EQ(size, 4);
  for (const int64_t steps : made) CHECK_EQ(steps, kPseudoLayers * 10);
}

}  // namespace

int main() {
  EverySequenceMakesEveryStepOnce(1, 1);
  EverySequenceMakesEveryStepOnce(2, 3);
  EverySequenceMakesEveryStepOnce(5, 3);
  TheFurthestBehindComeFirst();
  AThreadWithoutWorkGetsHalf();
  return ostinato::testing::Summary();
}
