#include "cpu/runtime/barrier.h"

#include "cpu/runtime/members.h"
#include "cpu/runtime/wait.h"

namespace ostinato::cpu {
namespace {

// A Run whose worker 0 has waited longer than this for stopped threads had better end.
constexpr int64_t kMostWaitNs = 1'000'000;

}  // namespace

bool Worker::Barrier(bool may_end) {
  ++round_;
  Members::ReturnCpu();
  Slot& mine = slots_[index_];
  // Worker 0 decides. It comes no further before all have come to this round, so nobody
  // can take its word for that of another round.
  if (may_end && index_ == 0 && waited_ > kMostWaitNs) {
    mine.last_round.store(round_, std::memory_order_relaxed);
  }
  mine.round.store(round_, std::memory_order_release);
  for (int32_t i = 0; i < size_; ++i) {
    if (i == index_) continue;
    const Slot& slot = slots_[i];
    waited_ += WaitUntil([&] {
      return slot.round.load(std::memory_order_acquire) >= round_ ||
             slot.left.load(std::memory_order_acquire) == base_;
    });
  }
  return slots_[0].last_round.load(std::memory_order_relaxed) != round_;
}

}  // namespace ostinato::cpu
