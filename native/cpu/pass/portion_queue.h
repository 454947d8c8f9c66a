// Rows of a batch on their way through layers and steps, for threads that may be late
// or stopped at any moment: nobody has rows of his own, everybody takes what is
// furthest behind.
#ifndef OSTINATO_CPU_PASS_PORTION_QUEUE_H_
#define OSTINATO_CPU_PASS_PORTION_QUEUE_H_

#include <cstdint>
#include <mutex>

#include "cpu/network/sequences.h"
#include "cpu/runtime/scratch.h"

namespace ostinato::cpu {

// Rows that have come equally far.
struct Portion {
  Slice rows;
  int64_t pass = 0;  // through a pseudo-layer
  int64_t step = 0;  // of it
};

class RowQueue {
 public:
  // `slices` of a batch of `batch` rows are to make `passes` passes.
  RowQueue(const Slice* slices, int64_t count, int64_t batch, int64_t passes,
           Scratch& scratch);

  // Takes back the portion that the calling thread has moved on, null at first, and
  // gives it the one that is furthest behind, half of it if another thread is without
  // work. Waits while others have all that is left; null once everything is done.
  Portion* Next(Portion* moved);

 private:
  Portion* TakeFurthestBehind();

  const int64_t passes_;
  std::mutex mutex_;  // guards all of these
  Portion* portions_;
  Portion** free_;  // those that no thread has
  int64_t count_ = 0, free_count_ = 0, unfinished_ = 0, waiting_ = 0;
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_PORTION_QUEUE_H_
