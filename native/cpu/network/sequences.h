// The rows of a batch, longest first: what is active at a step is a prefix.
#ifndef OSTINATO_CPU_NETWORK_SEQUENCES_H_
#define OSTINATO_CPU_NETWORK_SEQUENCES_H_

#include <cstdint>

#include "cpu/runtime/scratch.h"

namespace ostinato::cpu {

// Some rows of a batch, in an order of falling lengths. `first` is the place of row 0
// among the rows of all slices, where its state stands.
struct Slice {
  const int32_t* row;     // index in the batch
  const int64_t* length;  // 0..T
  int64_t size;
  int64_t first;

  // Rows that have a step `step`.
  int64_t Active(int64_t step) const;
  // Steps of the longest row.
  int64_t Steps() const { return size > 0 ? length[0] : 0; }
};

// Deals the rows of a batch to `count` slices in turn, so that each gets its share of
// the long ones. `lengths` null: all of `steps`.
const Slice* MakeSlices(const int32_t* lengths, int64_t batch, int64_t steps,
                        int64_t count, Scratch& scratch);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_NETWORK_SEQUENCES_H_
