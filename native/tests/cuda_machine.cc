// The machine of cuda_emulator.h: clusters of blocks, whose threads are fibers, and the
// scheduler that runs them.
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/cuda_emulator.h"

namespace emulator {
namespace {

constexpr size_t kStack = 1 << 16;
constexpr size_t kLanes = 32;

struct Block;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Block* block;
  Index thread;
  bool arrived;    // and has not waited yet
  unsigned phase;  // of `Machine::arrival`, when it arrived
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

// A meeting whose threads say that they are here, and wait later.
struct Arrival {
  size_t wanted, here;
  unsigned phase;
  std::vector<Fiber*> waiting;
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
  // For some time, one warp seldom gets a turn, and one turn in so many is a message's.
  size_t slow = 0, seldom = 8;
  Meeting cluster;
  Arrival arrival;
  Fiber* current = nullptr;
  std::string error;
};
Machine machine;

Block& CurrentBlock() { return *machine.current->block; }

size_t PlaceOf(const void* p, size_t bytes) {
  const std::vector<unsigned char>& shared = CurrentBlock().shared;
  const auto* const byte = static_cast<const unsigned char*>(p);
  if (byte < shared.data() || byte + bytes > shared.data() + shared.size())
    throw std::runtime_error("an address is outside of shared memory");
  return byte - shared.data();
}

// ------------------------------------------------------------------- the scheduler

void RunFiber() {
  try {
    machine.call(machine.run->parameters);
  } catch (const std::exception& error) {
    if (machine.error.empty()) machine.error = error.what();
  }
  --CurrentBlock().running;
  swapcontext(&machine.current->context, &machine.scheduler);
}

// Leaves the current thread until somebody makes it ready.
void Leave() { swapcontext(&machine.current->context, &machine.scheduler); }

void MakeReady(std::vector<Fiber*>* waiting) {
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
void Meet(Meeting* meeting) {
  Meet(meeting, [] {});
}

Counter& CounterAt(Block* block, size_t place) {
  const auto found = block->counters.find(place);
  if (found == block->counters.end())
    throw std::runtime_error("arrivals are counted where nobody began");
  return found->second;
}

void EndPhase(Counter* counter) {
  if (counter->pending != 0 || counter->bytes != 0) return;
  counter->pending = 1;
  ++counter->phase;
  MakeReady(&counter->waiting);
}

size_t AnyOf(size_t count) { return machine.random() % count; }

template <typename T>
T TakeAny(std::vector<T>* values) {
  const size_t i = AnyOf(values->size());
  const T value = (*values)[i];
  (*values)[i] = values->back();
  values->pop_back();
  return value;
}

void Deliver() {
  const Message message = TakeAny(&machine.messages);
  if (message.block->running == 0)
    throw std::runtime_error("a store arrives in a block that has ended");
  memcpy(message.block->shared.data() + message.place, &message.value, sizeof(Word));
  Counter& counter = CounterAt(message.block, message.counter);
  counter.bytes -= sizeof(Word);
  EndPhase(&counter);
}

// A block begins when all others wait, or have ended.
void Start(const Block* block) {
  for (Fiber& fiber : machine.fibers)
    if (fiber.block == block) machine.ready.push_back(&fiber);
}

bool IsSlow(const Fiber* fiber) {
  return (fiber - machine.fibers.data()) / kLanes == machine.slow;
}

void RunCluster() {
  while (machine.error.empty()) {
    const bool idle = machine.ready.empty();
    if (AnyOf(1024) == 0) {
      machine.slow = AnyOf(machine.fibers.size() / kLanes + 1);
      machine.seldom = size_t{1} << AnyOf(6);
    }
    if (!machine.messages.empty() && (idle || AnyOf(machine.seldom) == 0)) {
      Deliver();
    } else if (!idle) {
      machine.current = TakeAny(&machine.ready);
      if (IsSlow(machine.current) && AnyOf(64) != 0) {
        machine.ready.push_back(machine.current);
      } else {
        swapcontext(&machine.scheduler, &machine.current->context);
      }
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

void Prepare(Index first, size_t blocks) {
  const size_t threads = machine.run->threads;
  machine.ready.clear();
  machine.messages.clear();
  machine.late.clear();
  machine.cluster = {threads * blocks, {}};
  machine.arrival = {threads * blocks, 0, 0, {}};
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
      fiber.arrived = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStack;
      makecontext(&fiber.context, RunFiber, 0);
    }
    machine.late.push_back(&block);
  }
}

void RunAll() {
  machine.random.seed(machine.run->seed);
  machine.slow = 0;
  machine.seldom = 8;
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

// ------------------------------------------------------- products of tiles, in warps

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

void CheckAccess(const void* p, size_t bytes, size_t alignment) {
  if (reinterpret_cast<uintptr_t>(p) % alignment != 0)
    throw std::runtime_error("an access is not aligned");
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

void Emulate(const Run& run, void (*call)(void** parameters)) {
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
