#include "cpu/pass/portion_queue.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "tests/check.h"

namespace {

using ostinato::cpu::MakeSlices;
using ostinato::cpu::Portion;
using ostinato::cpu::RowQueue;
using ostinato::cpu::Scratch;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr int64_t kPasses = 2;

// Lets a portion make `steps` more steps; counts those of each row, in plain memory, so
// that the thread sanitizer sees whether two threads ever have the same row.
void MoveOn(Portion& portion, int64_t steps, std::vector<int64_t>& made) {
  const auto& rows = portion.rows;
  for (int64_t n = 0; n < steps && portion.step < rows.Steps(); ++n, ++portion.step) {
    for (int64_t i = 0; i < rows.Active(portion.step); ++i) ++made[rows.row[i]];
  }
  if (portion.step < rows.Steps()) return;
  ++portion.pass;
  portion.step = 0;
}

void EveryRowMakesEveryStepOnce(int64_t slices, int threads) {
  const std::vector<int32_t> lengths{9,  0, 3, 30, 7,  1,  12, 30,
                                     30, 2, 5, 8,  30, 17, 30};
  const auto batch = static_cast<int64_t>(lengths.size());
  Scratch scratch;
  RowQueue queue(MakeSlices(lengths.data(), batch, 30, slices, scratch), slices, batch,
                 kPasses, scratch);
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
  for (int64_t b = 0; b < batch; ++b) CHECK_EQ(made[b], kPasses * lengths[b]);
}

void TheFurthestBehindComeFirst() {
  Scratch scratch;
  RowQueue queue(MakeSlices(nullptr, 12, 10, 3, scratch), 3, 12, kPasses, scratch);
  std::vector<int64_t> made(12);
  Portion* const stopped = queue.Next(nullptr);
  Portion* portion = queue.Next(nullptr);
  for (int64_t turn = 1; turn <= 3; ++turn) {
    for (int slice = 0; slice < 2; ++slice) {
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
  RowQueue queue(MakeSlices(nullptr, 16, 10, 2, scratch), 2, 16, kPasses, scratch);
  std::vector<int64_t> made(16);
  Portion* mine = queue.Next(nullptr);
  std::thread other([&] {
    Portion* portion = nullptr;
    while ((portion = queue.Next(portion)) != nullptr) MoveOn(*portion, 1, made);
  });
  // As if this thread had been stopped, until the other one has done all it could.
  const auto deadline = steady_clock::now() + seconds(10);
  while (mine->rows.size == 8 && steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(1));
    mine = queue.Next(mine);
  }
  const int64_t size = mine->rows.size;
  while (mine != nullptr) {
    MoveOn(*mine, 1, made);
    mine = queue.Next(mine);
  }
  other.join();
  CHECK_EQ(size, 4);
  for (const int64_t steps : made) CHECK_EQ(steps, kPasses * 10);
}

}  // namespace

int main() {
  EveryRowMakesEveryStepOnce(1, 1);
  EveryRowMakesEveryStepOnce(2, 3);
  EveryRowMakesEveryStepOnce(5, 3);
  TheFurthestBehindComeFirst();
  AThreadWithoutWorkGetsHalf();
  return ostinato::testing::Summary();
}
