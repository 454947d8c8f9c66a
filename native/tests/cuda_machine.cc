// The scheduler of the machine, and the checks of its memory.
#include "tests/cuda_machine.h"

#include <algorithm>
#include <stdexcept>

namespace emulator {

Machine machine;

size_t PlaceOf(const void* p, size_t bytes) {
  const std::vector<unsigned char>& shared = CurrentBlock().shared;
  const auto* const byte = static_cast<const unsigned char*>(p);
  if (byte < shared.data() || byte + bytes > shared.data() + shared.size())
    throw std::runtime_error("an address is outside of shared memory");
  return byte - shared.data();
}

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

void Leave() { swapcontext(&machine.current->context, &machine.scheduler); }

void MakeReady(std::vector<Fiber*>* waiting) {
  machine.ready.insert(machine.ready.end(), waiting->begin(), waiting->end());
  waiting->clear();
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

namespace {

void RunFiber() {
  try {
    machine.call(machine.run->parameters);
  } catch (const std::exception& error) {
    if (machine.error.empty()) machine.error = error.what();
  }
  --CurrentBlock().running;
  swapcontext(&machine.current->context, &machine.scheduler);
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

}  // namespace

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
