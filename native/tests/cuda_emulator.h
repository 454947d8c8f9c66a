// A CPU in the place of a GPU: it stands before the text of a kernel, like primitives.h
// of the package, and runs it. Every thread of a block is a fiber with its own stack.
// Blocks, and the threads of a block, take their turns in random order, so that a
// missing wait shows. Accesses to arrays are checked, and shared memory begins as
// noise.
//
// OSTINATO_EMULATED(name), behind the text, exports what runs the kernel `name`.
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define OSTINATO_KERNEL static
#define OSTINATO_DEVICE inline
#define OSTINATO_UNROLL

using Index = long long;

namespace emulator {

// An array that a kernel may use.
struct Array {
  const char* begin;
  size_t bytes;
};

// Where a kernel runs, as the driver says it.
struct Run {
  void** parameters;
  unsigned blocks, threads, shared_bytes;
  const Array* arrays;
  size_t count;
  unsigned seed;
  char* error;  // [256], empty if all went well
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Index thread;
  bool done, waits;
};

constexpr size_t kStack = 1 << 16;

struct Machine {
  const Run* run = nullptr;
  void (*call)(void** parameters) = nullptr;
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  Fiber* current = nullptr;
  Index block = 0;
  std::vector<unsigned char> shared;
  std::string error;
};
static Machine machine;

inline void CheckAccess(const void* p, size_t bytes) {
  const char* const at = static_cast<const char*>(p);
  for (size_t i = 0; i < machine.run->count; ++i) {
    const Array& array = machine.run->arrays[i];
    if (at >= array.begin && at + bytes <= array.begin + array.bytes) return;
  }
  const unsigned char* const shared = machine.shared.data();
  const auto* const byte = reinterpret_cast<const unsigned char*>(at);
  if (byte >= shared && byte + bytes <= shared + machine.shared.size()) return;
  throw std::runtime_error("an access is outside of all arrays");
}

inline void RunFiber() {
  try {
    machine.call(machine.run->parameters);
  } catch (const std::exception& error) {
    if (machine.error.empty()) machine.error = error.what();
  }
  machine.current->done = true;
  swapcontext(&machine.current->context, &machine.scheduler);
}

inline void Resume(Fiber* fiber) {
  machine.current = fiber;
  swapcontext(&machine.scheduler, &fiber->context);
}

// Runs the fibers of a block to their ends.
inline void RunBlock(std::vector<size_t> order, std::mt19937* random) {
  for (Fiber& fiber : machine.fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    makecontext(&fiber.context, RunFiber, 0);
    fiber.done = fiber.waits = false;
  }
  while (machine.error.empty()) {
    std::shuffle(order.begin(), order.end(), *random);
    for (const size_t i : order) {
      Fiber& fiber = machine.fibers[i];
      if (!fiber.done && !fiber.waits) Resume(&fiber);
    }
    size_t done = 0, waiting = 0;
    for (const Fiber& fiber : machine.fibers) {
      done += fiber.done;
      waiting += fiber.waits;
    }
    if (done == order.size()) return;
    if (waiting < order.size() && done > 0)
      throw std::runtime_error("a thread waits for one that has ended");
    for (Fiber& fiber : machine.fibers) fiber.waits = false;
  }
}

inline void RunAll() {
  std::mt19937 random(machine.run->seed);
  std::vector<size_t> threads(machine.run->threads);
  for (size_t i = 0; i < threads.size(); ++i) threads[i] = i;
  std::vector<Index> blocks(machine.run->blocks);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<Index>(i);
  std::shuffle(blocks.begin(), blocks.end(), random);
  machine.fibers.clear();
  machine.fibers.resize(threads.size());
  for (size_t i = 0; i < threads.size(); ++i) {
    machine.fibers[i].stack.reset(new char[kStack]);
    machine.fibers[i].thread = static_cast<Index>(i);
  }
  for (const Index block : blocks) {
    machine.block = block;
    machine.shared.resize(machine.run->shared_bytes);
    for (unsigned char& byte : machine.shared) byte = random() & 0xff;
    RunBlock(threads, &random);
    if (!machine.error.empty()) return;
  }
}

inline void Emulate(const Run& run, void (*call)(void** parameters)) {
  machine.run = &run;
  machine.call = call;
  machine.error.clear();
  try {
    RunAll();
  } catch (const std::exception& error) {
    machine.error = error.what();
  }
  machine.fibers.clear();
  strncpy(run.error, machine.error.c_str(), 255);
}

template <typename... Types, size_t... kIndices>
void Call(void (*kernel)(Types...), void** parameters,
          std::index_sequence<kIndices...>) {
  kernel(*static_cast<std::remove_const_t<Types>*>(parameters[kIndices])...);
}
template <typename... Types>
void Call(void (*kernel)(Types...), void** parameters) {
  Call(kernel, parameters, std::index_sequence_for<Types...>{});
}

}  // namespace emulator

#define OSTINATO_EMULATED(name)                                         \
  extern "C" void emulated_##name(const emulator::Run* run) {           \
    emulator::Emulate(*run, [](void** p) { emulator::Call(name, p); }); \
  }

inline Index ThreadOfBlock() { return emulator::machine.current->thread; }
inline Index Block() { return emulator::machine.block; }
inline Index ThreadsOfBlock() { return emulator::machine.run->threads; }
inline unsigned char* SharedMemory() { return emulator::machine.shared.data(); }

inline void WaitForBlock() {
  emulator::Fiber* const fiber = emulator::machine.current;
  fiber->waits = true;
  swapcontext(&fiber->context, &emulator::machine.scheduler);
}

template <typename T>
T Load(const T* p) {
  emulator::CheckAccess(p, sizeof(T));
  T value;
  memcpy(&value, p, sizeof(T));
  return value;
}
template <typename T>
void Store(T* p, T value) {
  emulator::CheckAccess(p, sizeof(T));
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
