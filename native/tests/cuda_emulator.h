// A CPU in the place of a GPU: it stands before the text of a kernel, like primitives.h
// of the package, and runs it. Every thread of a cluster of blocks is a fiber with its
// own stack. Clusters, and the threads of a cluster, take their turns in random order,
// one warp for some time seldom, and what a block sends to another one arrives late and
// in random order, so that a missing wait shows. Accesses to arrays are checked, and
// shared memory begins as noise.
//
// cuda_machine.cc and cuda_primitives.cc define what is only declared here, since each
// text is compiled anew.
// OSTINATO_EMULATED(name), behind the text, exports what runs the kernel `name`.
#ifndef OSTINATO_TESTS_CUDA_EMULATOR_H_
#define OSTINATO_TESTS_CUDA_EMULATOR_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#define OSTINATO_KERNEL static
#define OSTINATO_KERNEL_OF(threads) static
#define OSTINATO_DEVICE inline
#define OSTINATO_UNROLL

#define OSTINATO_EMULATED(name)                                         \
  extern "C" void emulated_##name(const emulator::Run* run) {           \
    emulator::Emulate(*run, [](void** p) { emulator::Call(name, p); }); \
  }

using Index = long long;
using Word = unsigned;

namespace emulator {

// An array that a kernel may use.
struct Array {
  const char* begin;
  size_t bytes;
};

// Where a kernel runs, as the driver says it.
struct Run {
  void** parameters;
  unsigned blocks, threads, shared_bytes, cluster;
  const Array* arrays;
  size_t count;
  unsigned seed;
  char* error;  // [256], empty if all went well
};

void Emulate(const Run& run, void (*call)(void** parameters));

template <typename... Types, size_t... kIndices>
void Call(void (*kernel)(Types...), void** parameters,
          std::index_sequence<kIndices...>) {
  kernel(*static_cast<std::remove_const_t<Types>*>(parameters[kIndices])...);
}
template <typename... Types>
void Call(void (*kernel)(Types...), void** parameters) {
  Call(kernel, parameters, std::index_sequence_for<Types...>{});
}

// Throws unless the bytes lie in an array or in shared memory.
void CheckAccess(const void* p, size_t bytes, size_t alignment);

}  // namespace emulator

Index ThreadOfBlock();
Index Block();
Index ThreadsOfBlock();
unsigned char* SharedMemory();
void WaitForBlock();

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

float OfLane(float x, int mask);
void LoadMatrices(const Word* row, Word* result);
void MultiplyTiles(float* sum, const Word* a, Word b_0, Word b_1, BFloat16 type);
void MultiplyTiles(float* sum, const Word* a, Word b_0, Word b_1, float type);

// ------------------------------------------------------------------ clusters of blocks

void WaitForCluster();
void ArriveAtCluster();
void WaitForArrived();

struct alignas(8) Arrivals {
  unsigned long long state;
};
void Begin(Arrivals* arrivals);
void Expect(Arrivals* arrivals, int bytes);
void WaitFor(Arrivals* arrivals, int parity);
void Send(Word* place, Word value, Arrivals* arrivals, int block);
void Send(Word* place, Word first, Word second, Arrivals* arrivals, int block);

#endif  // OSTINATO_TESTS_CUDA_EMULATOR_H_
