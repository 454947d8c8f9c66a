// Linear recurrences h_t = a_t h_{t-1} + b_t over batches of sequences, and the
// gradient of all their operands; see kernels.h for the two places of the factor.
#ifndef OSTINATO_CPU_LINEAR_RECURRENCE_H_
#define OSTINATO_CPU_LINEAR_RECURRENCE_H_

#include <cstdint>

#include "cpu/linear/kernels.h"

namespace ostinato::cpu {

// The sizes of a call. All counts and distances are in real numbers: a complex number
// is two of them.
struct LinearShape {
  int64_t batch, steps;
  int64_t groups, width;              // units of a step: [groups][width]
  int64_t batch_stride, step_stride;  // of b, h and their cotangents
  // Of a; 0 along what all share. With `shared` a group has one factor, else groups
  // = 1.
  int64_t a_batch, a_step, a_group;
  int64_t da_batch, da_step;  // of the gradient of a, which sequences never share
  int64_t parts;              // real numbers of one number: 1 or 2
  bool shared, blocks;
  bool reverse;  // from the last step to the first
  bool after;    // the factor acts after the step

  const int32_t* lengths;  // [batch], in 0..steps; or null
  const uint8_t* resets;   // or null
  int64_t reset_batch, reset_step;

  int64_t units() const { return groups * width; }
};

// Past the end of a sequence h is 0. h_n is the state after its last step, with `after`
// times the factor of that step; h_0 for a sequence of length 0.
template <typename Storage>
struct LinearForwardArrays {
  const Storage *a, *b, *h_0;
  Storage *h, *h_n;
};

// The transpose of a forward pass with `after` false, and the gradient of the factors:
// the sum over steps where a_step is 0. Not with `blocks`.
template <typename Storage>
struct LinearBackwardArrays {
  const Storage *a, *h, *h_0, *dh, *dh_n;
  Storage *da, *db, *dh_0;
};

template <typename Storage, typename Accum>
void RunLinearForward(const LinearShape& shape,
                      const LinearKernels<Storage, Accum>& kernels,
                      const LinearForwardArrays<Storage>& arrays);

template <typename Storage, typename Accum>
void RunLinearBackward(const LinearShape& shape,
                       const LinearKernels<Storage, Accum>& kernels,
                       const LinearBackwardArrays<Storage>& arrays);

// Runs filters over `channels`. Throws std::invalid_argument for an order that there is
// no kernel for.
template <typename T>
void RunFilter(const FilterSegment<T>& filter, int64_t channels,
               const FilterKernel<T>& kernel);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_LINEAR_RECURRENCE_H_
