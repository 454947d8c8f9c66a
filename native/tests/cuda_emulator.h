// A CPU in the place of a GPU: it stands before the text of a kernel, like primitives.h
// of the package, and runs it. Every thread of a cluster of blocks is a fiber with its
// own stack. Clusters, and the threads of a cluster, take their turns in random order,
// one warp for some time seldom, and what a block sends to another one arrives late and
// in random order, so that a missing wait shows. Accesses to arrays are checked, and
// shared memory begins as noise.
//
// OSTINATO_EMULATED(name), behind the text, exports what runs the kernel `name`.
#include "tests/cuda_machine.h"

#define OSTINATO_KERNEL static
#define OSTINATO_KERNEL_OF(threads) static
#define OSTINATO_DEVICE inline
#define OSTINATO_UNROLL

#define OSTINATO_EMULATED(name)                                         \
  extern "C" void emulated_##name(const emulator::Run* run) {           \
    emulator::Emulate(*run, [](void** p) { emulator::Call(name, p); }); \
  }

inline Index ThreadOfBlock() { return emulator::machine.current->thread; }
inline Index Block() { return emulator::CurrentBlock().number; }
inline Index ThreadsOfBlock() { return emulator::machine.run->threads; }
inline unsigned char* SharedMemory() { return emulator::CurrentBlock().shared.data(); }
inline void WaitForBlock() { emulator::Meet(&emulator::CurrentBlock().meeting); }

template <typename T>
T Load(const T* p) {
  emulator::CheckAccess(p, sizeof(T), alignof(T));
  T value;
  memcpy(&value, p, sizeof(T));
  return value;
}
template <typename T>
void Store(T* p, T value) {
  emulator::CheckAccess(p, sizeof(T), alignof(T));
  memcpy(p, &value, sizeof(T));
}

struct BFloat16 {
  uint16_t bits;
};
inline float Widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}
inline float Widen(float x) { return x; }
inline double Widen(double x) { return x; }
inline void Narrow(float x, BFloat16* result) {  // to the nearest, ties to even
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const bool nan = std::isnan(x);
  result->bits = nan ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline void Narrow(float x, float* result) { *result = x; }
inline void Narrow(double x, double* result) { *result = x; }

// ------------------------------------------------------- products of tiles, in warps

inline float AsFloat(Word x) {
  float result;
  memcpy(&result, &x, sizeof x);
  return result;
}
inline Word AsWord(float x) {
  Word result;
  memcpy(&result, &x, sizeof x);
  return result;
}
inline Word Pack(float low, float high) {
  BFloat16 first, second;
  Narrow(low, &first);
  Narrow(high, &second);
  return first.bits | static_cast<Word>(second.bits) << 16;
}
inline Word RoundFactor(float x) { return (AsWord(x) + 0x1000) & ~0x1fffu; }
inline float Exp2(float x) { return std::exp2(x); }
inline float Log2(float x) { return std::log2(x); }
inline float Reciprocal(float x) { return 1.f / x; }

namespace emulator {

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

inline void Parts(Word x, BFloat16, float* values) {
  values[0] = Widen(BFloat16{static_cast<uint16_t>(x)});
  values[1] = Widen(BFloat16{static_cast<uint16_t>(x >> 16)});
}
inline void Parts(Word x, float, float* values) { values[0] = AsFloat(x & ~0x1fffu); }

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

}  // namespace emulator

inline float OfLane(float x, int mask) {
  const Word given = AsWord(x);
  emulator::Warp& warp =
      emulator::InWarp("OfLane", 1, &given, [mask](emulator::Warp* w) {
        for (size_t i = 0; i < emulator::kLanes; ++i)
          w->returned[i][0] = w->given[i ^ mask][0];
      });
  return AsFloat(warp.returned[ThreadOfBlock() % emulator::kLanes][0]);
}

inline void LoadMatrices(const Word* row, Word* result) {
  if (emulator::PlaceOf(row, 16) % 16 != 0)
    throw std::runtime_error("a row of a matrix is not aligned");
  const size_t lane = ThreadOfBlock() % emulator::kLanes;
  emulator::CurrentBlock().warps[ThreadOfBlock() / emulator::kLanes].rows[lane] = row;
  emulator::Warp& warp =
      emulator::InWarp("LoadMatrices", 0, nullptr, [](emulator::Warp* w) {
        for (size_t i = 0; i < emulator::kLanes; ++i)
          for (size_t m = 0; m < 4; ++m)
            w->returned[i][m] = w->rows[m * 8 + i / 4][i % 4];
      });
  memcpy(result, warp.returned[lane], sizeof warp.returned[lane]);
}

template <typename Storage>
void MultiplyTiles(float* sum, const Word* a, Word b_0, Word b_1, Storage type) {
  const Word given[] = {a[0], a[1], a[2], a[3], b_0, b_1};
  const auto multiply = [type](emulator::Warp* w) {
    emulator::MultiplyInWarp(w, type);
  };
  emulator::Warp& warp = emulator::InWarp("MultiplyTiles", 6, given, multiply);
  for (int i = 0; i < 4; ++i)
    sum[i] += AsFloat(warp.returned[ThreadOfBlock() % emulator::kLanes][i]);
}

// ------------------------------------------------------------------ clusters of blocks

inline void WaitForCluster() { emulator::Meet(&emulator::machine.cluster); }

inline void ArriveAtCluster() { emulator::Arrive(); }
inline void WaitForArrived() { emulator::WaitForArrived(); }

struct alignas(8) Arrivals {
  unsigned long long state;
};
inline void Begin(Arrivals* arrivals) {
  const size_t place = emulator::PlaceOf(arrivals, sizeof(Arrivals));
  emulator::CurrentBlock().counters[place] = {1, 0, 0, {}};
}
inline emulator::Counter& CounterOf(const Arrivals* arrivals) {
  const size_t place = emulator::PlaceOf(arrivals, sizeof(Arrivals));
  return emulator::CounterAt(&emulator::CurrentBlock(), place);
}
inline void Expect(Arrivals* arrivals, int bytes) {
  emulator::Counter& counter = CounterOf(arrivals);
  if (counter.pending == 0)
    throw std::runtime_error("bytes are expected twice in a phase");
  counter.bytes += bytes;
  --counter.pending;
  emulator::EndPhase(&counter);
}
inline void WaitFor(Arrivals* arrivals, int parity) {
  emulator::Counter& counter = CounterOf(arrivals);
  while (counter.phase % 2 == static_cast<unsigned>(parity)) {
    counter.waiting.push_back(emulator::machine.current);
    emulator::Leave();
  }
}
inline void Send(Word* place, Word value, Arrivals* arrivals, int block) {
  emulator::machine.messages.push_back(
      {&emulator::machine.blocks.at(block), emulator::PlaceOf(place, sizeof(Word)),
       emulator::PlaceOf(arrivals, sizeof(Arrivals)), value});
}
inline void Send(Word* place, Word first, Word second, Arrivals* arrivals, int block) {
  if (emulator::PlaceOf(place, 8) % 8 != 0)
    throw std::runtime_error("two words are not aligned");
  Send(place, first, arrivals, block);
  Send(place + 1, second, arrivals, block);
}
