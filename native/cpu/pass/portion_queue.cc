#include "cpu/pass/portion_queue.h"

#include <algorithm>
#include <utility>

#include "cpu/runtime/members.h"
#include "cpu/runtime/wait.h"

namespace ostinato::cpu {
namespace {

// Fewer sequences than this are not worth reading the weights for.
constexpr int64_t kLeastSequences = 4;

bool Behind(const Portion* a, const Portion* b) {
  return a->pseudo_layer != b->pseudo_layer ? a->pseudo_layer < b->pseudo_layer
                                            : a->step < b->step;
}

}  // namespace

PortionQueue::PortionQueue(const Sequences* portions, int64_t count, int64_t batch,
                           int64_t pseudo_layers, Scratch& scratch)
    : pseudo_layers_(pseudo_layers),
      portions_(scratch.Take<Portion>(std::max(count, batch))),
      free_(scratch.Take<Portion*>(std::max(count, batch))),
      count_(count),
      free_count_(count),
      unfinished_(count) {
  for (int64_t i = 0; i < count; ++i) {
    portions_[i] = {portions[i]};
    free_[i] = &portions_[i];
  }
}

Portion* PortionQueue::Next(Portion* moved) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (moved != nullptr) TakeBack(moved);
  if (Members::Borrows()) {  // from a thread that can now go on with the portion
    lock.unlock();
    Members::ReturnCpu();
    lock.lock();
  }
  const auto ready = [&] { return free_count_ > 0 || unfinished_ == 0; };
  if (!ready()) {
    ++waiting_;
    lock.unlock();
    WaitUntil([&] {
      if (!ready() || !lock.try_lock()) return false;
      if (ready()) return true;  // and keeps the lock
      lock.unlock();
      return false;
    });
    --waiting_;
  }
  return unfinished_ > 0 ? TakeFurthestBehind() : nullptr;
}

void PortionQueue::TakeBack(Portion* moved) {
  if (moved->pseudo_layer == pseudo_layers_) {
    --unfinished_;
  } else {
    free_[free_count_++] = moved;
  }
}

Portion* PortionQueue::TakeFurthestBehind() {
  Portion** const furthest = std::min_element(free_, free_ + free_count_, Behind);
  Portion* const taken = *furthest;
  *furthest = free_[--free_count_];
  if (free_count_ < waiting_ && taken->sequences.size >= 2 * kLeastSequences) {
    const int64_t kept = taken->sequences.size / 2;
    Portion* const rest = &portions_[count_++];
    *rest = *taken;
    rest->sequences.index += kept;
    rest->sequences.length += kept;
    rest->sequences.first += kept;
    rest->sequences.size -= kept;
    taken->sequences.size = kept;
    free_[free_count_++] = rest;
    ++unfinished_;
  }
  return taken;
}

}  // namespace ostinato::cpu
