// What the text of a kernel calls, on the machine.
#include <stdexcept>

#include "tests/cuda_machine.h"

namespace emulator {
namespace {

// Runs an operation of all lanes of the current warp; `then(&warp)` computes it.
template <typename Then>
Warp& InWarp(const char* operation, size_t count, const Word* given, const Then& then) {
  Warp& warp = CurrentBlock().warps[machine.current->thread / kLanes];
  if (warp.meeting.waiting.empty()) warp.operation = operation;
  if (warp.operation != operation)
    throw std::runtime_error("the lanes of a warp do different things");
  for (size_t i = 0; i < count; ++i)
    warp.given[machine.current->thread % kLanes][i] = given[i];
  Meet(&warp.meeting, [&] { then(&warp); });
  return warp;
}

void Parts(Word x, BFloat16, float* values) {
  values[0] = Widen(BFloat16{static_cast<uint16_t>(x)});
  values[1] = Widen(BFloat16{static_cast<uint16_t>(x >> 16)});
}
void Parts(Word x, float, float* values) { values[0] = AsFloat(x & ~0x1fffu); }

template <typename Storage>
void MultiplyInWarp(Warp* warp, Storage type) {
  constexpr int kParts = 4 / sizeof(Storage);
  float a[16][8 * kParts], b[8][8 * kParts];
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const Word* const given = warp->given[lane];
    const size_t row = lane / 4, word = lane % 4;
    Parts(given[0], type, a[row] + word * kParts);
    Parts(given[1], type, a[row + 8] + word * kParts);
    Parts(given[2], type, a[row] + (word + 4) * kParts);
    Parts(given[3], type, a[row + 8] + (word + 4) * kParts);
    Parts(given[4], type, b[row] + word * kParts);
    Parts(given[5], type, b[row] + (word + 4) * kParts);
  }
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      float sum = 0;
      for (int k = 0; k < 8 * kParts; ++k) sum += a[row][k] * b[column][k];
      const size_t lane = row % 8 * 4 + column / 2;
      warp->returned[lane][row / 8 * 2 + column % 2] = AsWord(sum);
    }
  }
}

template <typename Storage>
void Multiply(float* sum, const Word (&given)[6], Storage type) {
  const auto multiply = [type](Warp* warp) { MultiplyInWarp(warp, type); };
  const Warp& warp = InWarp("MultiplyTiles", 6, given, multiply);
  for (int i = 0; i < 4; ++i)
    sum[i] += AsFloat(warp.returned[machine.current->thread % kLanes][i]);
}

}  // namespace
}  // namespace emulator

using namespace emulator;  // NOLINT: what follows is global since texts call it so

Index ThreadOfBlock() { return machine.current->thread; }
Index Block() { return CurrentBlock().number; }
Index ThreadsOfBlock() { return machine.run->threads; }
unsigned char* SharedMemory() { return CurrentBlock().shared.data(); }
void WaitForBlock() { Meet(&CurrentBlock().meeting); }

float OfLane(float x, int mask) {
  const Word given = AsWord(x);
  Warp& warp = InWarp("OfLane", 1, &given, [mask](Warp* w) {
    for (size_t i = 0; i < kLanes; ++i) w->returned[i][0] = w->given[i ^ mask][0];
  });
  return AsFloat(warp.returned[ThreadOfBlock() % kLanes][0]);
}

void LoadMatrices(const Word* row, Word* result) {
  if (PlaceOf(row, 16) % 16 != 0)
    throw std::runtime_error("a row of a matrix is not aligned");
  const size_t lane = ThreadOfBlock() % kLanes;
  CurrentBlock().warps[ThreadOfBlock() / kLanes].rows[lane] = row;
  Warp& warp = InWarp("LoadMatrices", 0, nullptr, [](Warp* w) {
    for (size_t i = 0; i < kLanes; ++i)
      for (size_t m = 0; m < 4; ++m) w->returned[i][m] = w->rows[m * 8 + i / 4][i % 4];
  });
  memcpy(result, warp.returned[lane], sizeof warp.returned[lane]);
}

void MultiplyTiles(float* sum, const Word* a, Word b_0, Word b_1, BFloat16 type) {
  Multiply(sum, {a[0], a[1], a[2], a[3], b_0, b_1}, type);
}
void MultiplyTiles(float* sum, const Word* a, Word b_0, Word b_1, float type) {
  Multiply(sum, {a[0], a[1], a[2], a[3], b_0, b_1}, type);
}

// ------------------------------------------------------------------ clusters of blocks

void WaitForCluster() { Meet(&machine.cluster); }

void ArriveAtCluster() {
  Arrival& arrival = machine.arrival;
  if (machine.current->arrived)
    throw std::runtime_error("a thread arrives twice without a wait");
  machine.current->arrived = true;
  machine.current->phase = arrival.phase;
  if (++arrival.here < arrival.wanted) return;
  arrival.here = 0;
  ++arrival.phase;
  MakeReady(&arrival.waiting);
}
void WaitForArrived() {
  Fiber* const self = machine.current;
  if (!self->arrived) throw std::runtime_error("a thread waits before it arrives");
  if (machine.arrival.phase == self->phase) {
    machine.arrival.waiting.push_back(self);
    Leave();
  }
  self->arrived = false;
}

void Begin(Arrivals* arrivals) {
  const size_t place = PlaceOf(arrivals, sizeof(Arrivals));
  CurrentBlock().counters[place] = {1, 0, 0, {}};
}
static Counter& CounterOf(const Arrivals* arrivals) {
  const size_t place = PlaceOf(arrivals, sizeof(Arrivals));
  return CounterAt(&CurrentBlock(), place);
}
void Expect(Arrivals* arrivals, int bytes) {
  Counter& counter = CounterOf(arrivals);
  if (counter.pending == 0)
    throw std::runtime_error("bytes are expected twice in a phase");
  counter.bytes += bytes;
  --counter.pending;
  EndPhase(&counter);
}
void WaitFor(Arrivals* arrivals, int parity) {
  Counter& counter = CounterOf(arrivals);
  while (counter.phase % 2 == static_cast<unsigned>(parity)) {
    counter.waiting.push_back(machine.current);
    Leave();
  }
}
void Send(Word* place, Word value, Arrivals* arrivals, int block) {
  machine.messages.push_back({&machine.blocks.at(block), PlaceOf(place, sizeof(Word)),
                              PlaceOf(arrivals, sizeof(Arrivals)), value});
}
void Send(Word* place, Word first, Word second, Arrivals* arrivals, int block) {
  if (PlaceOf(place, 8) % 8 != 0) throw std::runtime_error("two words are not aligned");
  Send(place, first, arrivals, block);
  Send(place + 1, second, arrivals, block);
}
