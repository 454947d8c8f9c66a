#include "cpu/pass/portion_queue.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace ostinato::cpu {
namespace {

// Fewer rows than this are not worth a walk through the weights.
constexpr int64_t kLeastRows = 4;

bool Behind(const Portion* a, const Portion* b) {
  return a->pass != b->pass ? a->pass < b->pass : a->step < b->step;
}

}  // namespace

RowQueue::RowQueue(const Slice* slices, int64_t count, int64_t batch, int64_t passes,
                   Scratch& scratch)
    : passes_(passes),
      portions_(scratch.Take<Portion>(std::max(count, batch))),
      free_(scratch.Take<Portion*>(std::max(count, batch))),
      count_(count),
      free_count_(count),
      unfinished_(count) {
  for (int64_t i = 0; i < count; ++i) {
    portions_[i] = {slices[i]};
    free_[i] = &portions_[i];
  }
}

Portion* RowQueue::Next(Portion* moved) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (moved != nullptr) {
    if (moved->pass == passes_) {
      --unfinished_;
    } else {
      free_[free_count_++] = moved;
    }
  }
  if (free_count_ == 0 && unfinished_ > 0) {
    ++waiting_;
    while (free_count_ == 0 && unfinished_ > 0) {
      lock.unlock();
      std::this_thread::yield();  // what we wait for may need this core
      lock.lock();
    }
    --waiting_;
  }
  return unfinished_ > 0 ? TakeFurthestBehind() : nullptr;
}

Portion* RowQueue::TakeFurthestBehind() {
  Portion** const place = std::min_element(free_, free_ + free_count_, Behind);
  Portion* const taken = *place;
  *place = free_[--free_count_];
  if (free_count_ < waiting_ && taken->rows.size >= 2 * kLeastRows) {
    const int64_t kept = taken->rows.size / 2;
    Portion* const rest = &portions_[count_++];
    *rest = *taken;
    rest->rows.row += kept;
    rest->rows.length += kept;
    rest->rows.first += kept;
    rest->rows.size -= kept;
    taken->rows.size = kept;
    free_[free_count_++] = rest;
    ++unfinished_;
  }
  return taken;
}

}  // namespace ostinato::cpu
