// Sequences of a batch on their way through layers and steps, for threads that may be
// late or stopped at any moment: no thread has sequences of its own, each takes those
// that are furthest behind.
#ifndef OSTINATO_CPU_PASS_PORTION_QUEUE_H_
#define OSTINATO_CPU_PASS_PORTION_QUEUE_H_

#include <atomic>
#include <cstdint>
#include <mutex>

#include "cpu/network/sequences.h"
#include "cpu/runtime/scratch.h"

namespace ostinato::cpu {

// Sequences that have come equally far.
struct Portion {
  Sequences sequences;
  int64_t pseudo_layer = 0;
  int64_t step = 0;  // of the pseudo-layer
};

class PortionQueue {
 public:
  // `portions` of a batch of `batch` sequences are to pass all pseudo-layers.
  PortionQueue(const Sequences* portions, int64_t count, int64_t batch,
               int64_t pseudo_layers, Scratch& scratch);

  // Takes back the portion that the calling thread has moved on, null at first, and
  // returns the one that is furthest behind, or half of it if another thread has no
  // work. Waits while others have all that is left; null once everything is done.
  Portion* Next(Portion* moved);

 private:
  void TakeBack(Portion* moved);
  Portion* TakeFurthestBehind();

  const int64_t pseudo_layers_;
  std::mutex mutex_;  // guards all of these
  Portion* portions_;
  Portion** free_;  // those that no thread has
  int64_t count_ = 0, waiting_ = 0;
  std::atomic<int64_t> free_count_, unfinished_;  // who waits may look at them
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_PORTION_QUEUE_H_
