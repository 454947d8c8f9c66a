// A CPU in the place of a GPU: it stands before the text of a kernel, like primitives.h
// of the package, and runs it. Every thread of a cluster of blocks is a fiber with its
// own stack. Clusters, and the threads of a cluster, take their turns in random order,
// and what a block sends to another one arrives late and in random order, so that a
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
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define OSTINATO_KERNEL static
#define OSTINATO_KERNEL_OF(threads) static
#define OSTINATO_DEVICE inline
#define OSTINATO_UNROLL

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

constexpr size_t kStack = 1 << 16;
constexpr size_t kLanes = 32;

struct Block;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block* block;
  Index thread;
};

// Where some threads wait until all of them have come.
struct Meeting {
  size_t wanted;
  std::vector<Fiber*> waiting;
};

// What the lanes of a warp give to an operation of all of them, and what it returns.
struct Warp {
  Meeting meeting;
  const char* operation;
  Word given[kLanes][6], returned[kLanes][4];
  const Word* rows[kLanes];
};

// The state of `Arrivals`.
struct Counter {
  int pending;
  long long bytes;
  unsigned phase;
  std::vector<Fiber*> waiting;
};

struct Block {
  Index number;
  std::vector<unsigned char> shared;
  std::vector<Warp> warps;
  Meeting meeting;
  std::map<size_t, Counter> counters;  // by their places in shared memory
  size_t running;                      // threads
};

// A word on its way to a block.
struct Message {
  Block* block;
  size_t place, counter;
  Word value;
};

struct Machine {
  const Run* run = nullptr;
  void (*call)(void** parameters) = nullptr;
  ucontext_t scheduler;
  std::mt19937 random;
  std::vector<Fiber> fibers;
  std::vector<Block> blocks;  // of the cluster that runs
  std::vector<Fiber*> ready;
  std::vector<Message> messages;
  std::vector<Block*> late;  // those that have not begun
  Meeting cluster;
  Fiber* current = nullptr;
  std::string error;
};
static Machine machine;

inline Block& CurrentBlock() { return *machine.current->block; }

inline size_t PlaceOf(const void* p, size_t bytes) {
  const std::vector<unsigned char>& shared = CurrentBlock().shared;
  const auto* const byte = static_cast<const unsigned char*>(p);
  if (byte < shared.data() || byte + bytes > shared.data() + shared.size())
    throw std::runtime_error("an address is outside of shared memory");
  return byte - shared.data();
}

inline void CheckAccess(const void* p, size_t bytes) {
  const char* const at = static_cast<const char*>(p);
  for (size_t i = 0; i < machine.run->count; ++i) {
    const Array& array = machine.run->arrays[i];
    if (at >= array.begin && at + bytes <= array.begin + array.bytes) return;
  }
  const std::vector<unsigned char>& shared = CurrentBlock().shared;
  const auto* const byte = reinterpret_cast<const unsigned char*>(at);
  if (byte >= shared.data() && byte + bytes <= shared.data() + shared.size()) return;
  throw std::runtime_error("an access is outside of all arrays");
}

// ------------------------------------------------------------------------ the
// scheduler

inline void RunFiber() {
  try {
    machine.call(machine.run->parameters);
  } catch (const std::exception& error) {
    if (machine.error.empty()) machine.error = error.what();
  }
  --CurrentBlock().running;
  swapcontext(&machine.current->context, &machine.scheduler);
}

// Leaves the current thread until somebody makes it ready.
inline void Leave() { swapcontext(&machine.current->context, &machine.scheduler); }

inline void MakeReady(std::vector<Fiber*>* waiting) {
  machine.ready.insert(machine.ready.end(), waiting->begin(), waiting->end());
  waiting->clear();
}

// Waits for all; the last one runs `then` before the others go on.
template <typename Then>
void Meet(Meeting* meeting, const Then& then) {
  if (meeting->waiting.size() + 1 == meeting->wanted) {
    then();
    MakeReady(&meeting->waiting);
    return;
  }
  meeting->waiting.push_back(machine.current);
  Leave();
}
inline void Meet(Meeting* meeting) {
  Meet(meeting, [] {});
}

inline Counter& CounterAt(Block* block, size_t place) {
  const auto found = block->counters.find(place);
  if (found == block->counters.end())
    throw std::runtime_error("arrivals are counted where nobody began");
  return found->second;
}

inline void EndPhase(Counter* counter) {
  if (counter->pending != 0 || counter->bytes != 0) return;
  counter->pending = 1;
  ++counter->phase;
  MakeReady(&counter->waiting);
}

inline size_t AnyOf(size_t count) { return machine.random() % count; }

template <typename T>
T TakeAny(std::vector<T>* values) {
  const size_t i = AnyOf(values->size());
  const T value = (*values)[i];
  (*values)[i] = values->back();
  values->pop_back();
  return value;
}

inline void Deliver() {
  const Message message = TakeAny(&machine.messages);
  if (message.block->running == 0)
    throw std::runtime_error("a store arrives in a block that has ended");
  memcpy(message.block->shared.data() + message.place, &message.value, sizeof(Word));
  Counter& counter = CounterAt(message.block, message.counter);
  counter.bytes -= sizeof(Word);
  EndPhase(&counter);
}

// A block begins when all others wait, or have ended.
inline void Start(const Block* block) {
  for (Fiber& fiber : machine.fibers)
    if (fiber.block == block) machine.ready.push_back(&fiber);
}

inline void RunCluster() {
  while (machine.error.empty()) {
    const bool idle = machine.ready.empty();
    if (!machine.messages.empty() && (idle || AnyOf(8) == 0)) {
      Deliver();
    } else if (!idle) {
      machine.current = TakeAny(&machine.ready);
      swapcontext(&machine.scheduler, &machine.current->context);
    } else if (!machine.late.empty()) {
      Start(TakeAny(&machine.late));
    } else {
      break;
    }
  }
  for (const Block& block : machine.blocks)
    if (block.running != 0 && machine.error.empty())
      throw std::runtime_error("threads wait for what never comes");
}

inline void Prepare(Index first, size_t blocks) {
  const size_t threads = machine.run->threads;
  machine.ready.clear();
  machine.messages.clear();
  machine.late.clear();
  machine.cluster = {threads * blocks, {}};
  machine.blocks.clear();
  machine.blocks.resize(blocks);
  machine.fibers.resize(threads * blocks);
  for (size_t b = 0; b < blocks; ++b) {
    Block& block = machine.blocks[b];
    block.number = first + static_cast<Index>(b);
    block.shared.resize(machine.run->shared_bytes);
    for (unsigned char& byte : block.shared) byte = machine.random() & 0xff;
    block.meeting = {threads, {}};
    block.running = threads;
    block.warps.resize((threads + kLanes - 1) / kLanes);
    for (size_t w = 0; w < block.warps.size(); ++w) {
      block.warps[w].meeting = {std::min(kLanes, threads - w * kLanes), {}};
      block.warps[w].operation = nullptr;
    }
    for (size_t i = 0; i < threads; ++i) {
      Fiber& fiber = machine.fibers[b * threads + i];
      if (fiber.stack == nullptr) fiber.stack.reset(new char[kStack]);
      fiber.block = &block;
      fiber.thread = static_cast<Index>(i);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStack;
      makecontext(&fiber.context, RunFiber, 0);
    }
    machine.late.push_back(&block);
  }
}

inline void RunAll() {
  machine.random.seed(machine.run->seed);
  const size_t each = machine.run->cluster;
  std::vector<Index> firsts(machine.run->blocks / each);
  for (size_t i = 0; i < firsts.size(); ++i) firsts[i] = static_cast<Index>(i * each);
  std::shuffle(firsts.begin(), firsts.end(), machine.random);
  for (const Index first : firsts) {
    Prepare(first, each);
    RunCluster();
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
inline Index Block() { return emulator::CurrentBlock().number; }
inline Index ThreadsOfBlock() { return emulator::machine.run->threads; }
inline unsigned char* SharedMemory() { return emulator::CurrentBlock().shared.data(); }
inline void WaitForBlock() { emulator::Meet(&emulator::CurrentBlock().meeting); }

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
