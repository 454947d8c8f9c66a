// The machine of cuda_emulator.h: clusters of blocks, whose threads are fibers.
#ifndef OSTINATO_TESTS_CUDA_MACHINE_H_
#define OSTINATO_TESTS_CUDA_MACHINE_H_

#include <ucontext.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/cuda_emulator.h"

namespace emulator {

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
extern Machine machine;

inline Block& CurrentBlock() { return *machine.current->block; }

// Returns how far into the shared memory of the current block the bytes lie.
size_t PlaceOf(const void* p, size_t bytes);

// Leaves the current thread until somebody makes it ready.
void Leave();
void MakeReady(std::vector<Fiber*>* waiting);

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

Counter& CounterAt(Block* block, size_t place);
void EndPhase(Counter* counter);

}  // namespace emulator

#endif  // OSTINATO_TESTS_CUDA_MACHINE_H_
