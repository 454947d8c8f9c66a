#include "cpu/runtime/scratch.h"

#include <mutex>
#include <utility>

#include "cpu/runtime/per_process.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ostinato::cpu {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kLeastBlock = int64_t{256} << 10;

// Large blocks start where a huge page may; a few of them pay for their faults.
constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kHugeFrom = 2 * kHugePage;

// Pieces shorter than this stand side by side; larger ones are kept apart:
constexpr int64_t kSkewedFrom = 2048;
// From one start in a page to the next: an odd number of cache lines, so that 64
// pieces in a row start in 64 different sets of the L1 cache.
constexpr int64_t kSkew = 5 * 64;

constexpr int64_t RoundedUp(int64_t bytes, int64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

std::align_val_t AlignmentOf(int64_t bytes) {
  return std::align_val_t(bytes >= kHugeFrom ? kHugePage : kPage);
}

}  // namespace

struct alignas(64) Scratch::Block {
  Block* next;
  int64_t bytes;

  static Block* New(int64_t bytes) {
    void* const memory = ::operator new(static_cast<size_t>(bytes), AlignmentOf(bytes));
    AdviseHugePages(memory, bytes);
    return new (memory) Block{nullptr, bytes};
  }

  static void DeleteAll(Block* first) noexcept {
    while (first != nullptr) {
      Block* const block = std::exchange(first, first->next);
      ::operator delete(block, AlignmentOf(block->bytes));
    }
  }
};

// The blocks that no Scratch holds, the largest first.
class Scratch::Cache {
 public:
  // The largest block, or null.
  Block* Take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    Block* const block = first_;
    if (block != nullptr) {
      first_ = std::exchange(block->next, nullptr);
    }
    return block;
  }

  // Keeps `block`, in place of smaller ones where all would be too much. Returns the
  // blocks that are not kept.
  Block* Keep(Block* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int64_t left = kMostKept;
    Block** place = &first_;
    for (; *place != nullptr && (*place)->bytes > block->bytes;
         place = &(*place)->next) {
      left -= (*place)->bytes;
    }
    if (block->bytes > left) return block;
    block->next = std::exchange(*place, block);
    while (*place != nullptr && (*place)->bytes <= left) {
      left -= (*place)->bytes;
      place = &(*place)->next;
    }
    return std::exchange(*place, nullptr);
  }

 private:
  std::mutex mutex_;
  Block* first_ = nullptr;
};

// One block for all that this call took replaces several: the next call of the same
// size faults in its pages once, and those that follow find them there.
Scratch::~Scratch() {
  if (block_ == nullptr) return;
  if (block_->next != nullptr) {
    const int64_t bytes = RoundedUp(full_ + used_, kPage);
    Block::DeleteAll(block_);
    try {
      block_ = Block::New(bytes);
    } catch (const std::bad_alloc&) {
      return;
    }
  }
  Block::DeleteAll(PerProcess<Cache>::Get().Keep(block_));
}

int64_t Scratch::NextStart(int64_t bytes) const {
  if (bytes < kSkewedFrom) return RoundedUp(used_, 64);
  const int64_t start = used_ / kPage * kPage + skew_;
  return start < used_ ? start + kPage : start;
}

void* Scratch::TakeBytes(int64_t bytes) {
  if (block_ == nullptr) {
    block_ = PerProcess<Cache>::Get().Take();
    used_ = sizeof(Block);
  }
  if (block_ == nullptr || NextStart(bytes) + bytes > block_->bytes) {
    if (block_ != nullptr) full_ += used_ + kPage;  // and what skewing may add
    const int64_t least = RoundedUp(bytes + 2 * kPage, kPage);
    Block* const block = Block::New(std::max({least, full_, kLeastBlock}));
    block->next = block_;
    block_ = block;
    used_ = sizeof(Block);
  }
  const int64_t start = NextStart(bytes);
  used_ = start + bytes;
  if (bytes >= kSkewedFrom) skew_ = (skew_ + kSkew) % kPage;
  return reinterpret_cast<char*>(block_) + start;
}

void AdviseHugePages(void* data, int64_t bytes) noexcept {
#if defined(__linux__)
  if (data == nullptr || bytes < kHugePage) return;
  const auto address = reinterpret_cast<int64_t>(data);
  // With the pages at its ends, so that arrays which follow one another can share a
  // huge page.
  const int64_t begin = address / kPage * kPage;
  const int64_t end = RoundedUp(address + bytes, kPage);
  madvise(reinterpret_cast<void*>(begin), static_cast<size_t>(end - begin),
          MADV_HUGEPAGE);
#else
  static_cast<void>(data);
  static_cast<void>(bytes);
#endif
}

}  // namespace ostinato::cpu
