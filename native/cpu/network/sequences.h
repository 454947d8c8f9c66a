// The sequences of a batch, longest first: those active at a step are a prefix.
#ifndef OSTINATO_CPU_NETWORK_SEQUENCES_H_
#define OSTINATO_CPU_NETWORK_SEQUENCES_H_

#include <cstdint>

#include "cpu/runtime/scratch.h"

namespace ostinato::cpu {

// Some sequences of a batch, in an order of falling lengths. Their states stand in
// consecutive rows of arrays [B, ...], from row `first` on.
struct Sequences {
  const int32_t* index;   // in the batch
  const int64_t* length;  // 0..T
  int64_t size;
  int64_t first;

  // How many of them have a step `step`.
  int64_t Active(int64_t step) const;
  // Steps of the longest.
  int64_t steps() const { return size > 0 ? length[0] : 0; }
};

// Deals the sequences of a batch to `count` portions in turn, so that each portion gets
// as many of the long ones. Where `lengths` is null, all have `steps` steps.
const Sequences* SplitBatch(const int32_t* lengths, int64_t batch, int64_t steps,
                            int64_t count, Scratch& scratch);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_NETWORK_SEQUENCES_H_
