#include "cpu/runtime/scratch.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <set>
#include <thread>
#include <vector>

#include "tests/check.h"

namespace {

using ostinato::cpu::Scratch;

uintptr_t Address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

// A forked child shares no memory with this process: it can only exit with a number.
int ExitCodeOfChild(void (*work)()) {
  const pid_t child = fork();
  if (child == 0) {
    work();
    _exit(ostinato::testing::failures == 0 ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void PiecesAreAlignedAndApart() {
  Scratch scratch;
  std::vector<std::pair<char*, int64_t>> pieces;
  for (const int64_t bytes :
       {0, 1, 64, 4096, 4096, 100'000, 3'000'000, 5'000'000, 0, 7}) {
    pieces.emplace_back(scratch.Take<char>(bytes), bytes);
  }
  char mark = 0;
  for (const auto& [data, bytes] : pieces) {
    CHECK_EQ(data != nullptr, true);
    CHECK_EQ(Address(data) % 64, uintptr_t{0});
    std::memset(data, ++mark, static_cast<size_t>(bytes));
  }
  mark = 0;
  for (const auto& [data, bytes] : pieces) {
    ++mark;
    int64_t kept = 0;
    for (int64_t i = 0; i < bytes; ++i) kept += data[i] == mark;
    CHECK_EQ(kept, bytes);
  }
}

void LargePiecesStartAtDifferentOffsetsOfAPage() {
  Scratch scratch;
  std::set<uintptr_t> offsets;
  for (int i = 0; i < 64; ++i) {
    offsets.insert(Address(scratch.Take<float>(1024 * (1 + i % 3))) % 4096);
  }
  CHECK_EQ(offsets.size(), size_t{64});
}

void ZeroedMemoryIsZero() {
  for (int call = 0; call < 2; ++call) {  // the second one gets used memory
    Scratch scratch;
    constexpr int64_t kCount = 10'000;
    double* const data = scratch.TakeZeroed<double>(kCount);
    int64_t zeros = 0;
    for (int64_t i = 0; i < kCount; ++i) zeros += data[i] == 0;
    CHECK_EQ(zeros, kCount);
    std::memset(data, 0x55, kCount * sizeof(double));
  }
}

bool Refuses(int64_t count) {
  Scratch scratch;
  try {
    scratch.Take<double>(count);
  } catch (const std::bad_alloc&) {
    return true;
  }
  return false;
}

void ImpossibleSizesAreRefused() {
  CHECK_EQ(Refuses(-1), true);
  CHECK_EQ(Refuses(std::numeric_limits<int64_t>::max()), true);
  CHECK_EQ(Refuses(std::numeric_limits<int64_t>::max() / 8), true);
}

constexpr int64_t kMega = int64_t{1} << 20;

// Where two pieces of three megabytes lie that one call takes, one after the other.
std::pair<uintptr_t, uintptr_t> TakeTwo() {
  Scratch scratch;
  const uintptr_t first = Address(scratch.Take<char>(3 * kMega));
  return {first, Address(scratch.Take<char>(3 * kMega))};
}

void TheNextCallGetsTheSameMemoryInOneBlock() {
  TakeTwo();
  const auto second = TakeTwo();
  const auto third = TakeTwo();
  CHECK_EQ(second.first, third.first);
  CHECK_EQ(second.second, third.second);
  CHECK_EQ(second.second - second.first < uintptr_t{3 * kMega + 2 * 4096}, true);
}

int64_t PageFaults() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

void ManySmallBlocksLeaveRoomForALargeOne() {
  {
    std::vector<std::unique_ptr<Scratch>> many;
    for (int64_t bytes = 0; bytes < Scratch::kMostKept; bytes += kMega) {
      many.push_back(std::make_unique<Scratch>());
      many.back()->Take<char>(kMega);
    }
  }
  int64_t faults = 0;
  for (int call = 0; call < 3; ++call) {
    const int64_t before = PageFaults();
    Scratch scratch;
    std::memset(scratch.Take<char>(64 * kMega), call, 64 * kMega);
    faults = PageFaults() - before;
  }
  CHECK_EQ(faults < 16, true);  // even in huge pages it would be twice as many
}

// Blocks are filled to the last byte, however the sizes fall: the address sanitizer
// watches where this runs.
void AnySizesFitTwice() {
  uint32_t random = 1;
  for (int call = 0; call < 50; ++call) {
    Scratch scratch;
    for (int piece = 0; piece < 20; ++piece) {
      random = random * 1664525 + 1013904223;
      const int64_t bytes = random >> (8 + random % 20);
      std::memset(scratch.Take<char>(bytes), 1, static_cast<size_t>(bytes));
    }
  }
}

void ThreadsDoNotShareMemory() {
  std::vector<std::thread> threads;
  std::atomic<int64_t> spoilt{0};
  for (int64_t mark = 0; mark < 8; ++mark) {
    threads.emplace_back([&spoilt, mark] {
      for (int call = 0; call < 100; ++call) {
        Scratch scratch;
        constexpr int64_t kCount = 5'000;
        for (int piece = 0; piece < 3; ++piece) {
          int64_t* const data = scratch.Take<int64_t>(kCount);
          for (int64_t i = 0; i < kCount; ++i) data[i] = mark;
          spoilt += kCount - std::count(data, data + kCount, mark);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(spoilt.load(), int64_t{0});
}

// A lock that another thread holds at the fork stays locked in the child for ever.
void ChildrenOfABusyProcessHaveScratch() {
  std::atomic<bool> stop{false};
  std::thread other([&stop] {
    while (!stop.load()) {
      Scratch scratch;
      scratch.Take<char>(1);
    }
  });
  for (int i = 0; i < 50; ++i) CHECK_EQ(ExitCodeOfChild(ZeroedMemoryIsZero), 0);
  stop.store(true);
  other.join();
}

void HugePagesLeaveValuesAlone() {
  std::vector<char> data(9 * kMega, 3);
  ostinato::cpu::AdviseHugePages(data.data(), 9 * kMega);
  ostinato::cpu::AdviseHugePages(data.data() + 1, 4 * kMega);
  ostinato::cpu::AdviseHugePages(nullptr, 4 * kMega);
  int64_t kept = 0;
  for (const char value : data) kept += value == 3;
  CHECK_EQ(kept, 9 * kMega);
}

}  // namespace

// An argument leaves out what the thread sanitizer cannot follow.
int main(int argc, char**) {
  PiecesAreAlignedAndApart();
  LargePiecesStartAtDifferentOffsetsOfAPage();
  ZeroedMemoryIsZero();
  ImpossibleSizesAreRefused();
  TheNextCallGetsTheSameMemoryInOneBlock();
  ManySmallBlocksLeaveRoomForALargeOne();
  AnySizesFitTwice();
  ThreadsDoNotShareMemory();
  if (argc == 1) ChildrenOfABusyProcessHaveScratch();
  HugePagesLeaveValuesAlone();
  return ostinato::testing::Summary();
}
