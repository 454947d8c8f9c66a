// The arithmetic of linear recurrences, compiled once for every instruction set.
//
// A recurrence is h_t = a_t h_{t-1} + b_t. In its transpose the factor acts after the
// step instead of before it: s_t = b_t + c_{t-1}, c_t = a_t s_t. A kernel runs one
// segment: some steps of some neighbouring units of one sequence. What stays from step
// to step is in `state`, which holds h, or c, before the segment and after it.
//
// Complex numbers are pairs of neighbours, so counts of units, and distances, are in
// real numbers everywhere. Nothing here allocates or throws.
#ifndef OSTINATO_CPU_LINEAR_KERNELS_H_
#define OSTINATO_CPU_LINEAR_KERNELS_H_

#include <cstdint>

#include "cpu/kernels/kernels.h"

namespace ostinato::cpu {

// The factors of a segment. Distances are from step to step in the order of the run,
// negative where it runs backwards.
template <typename Storage>
struct Factors {
  const Storage* a;
  int64_t a_step;         // 0: the same at every step
  bool shared;            // one factor for all units, else one for each
  const uint8_t* resets;  // not 0 where h_{t-1} counts as 0; null: nowhere
  int64_t reset_step;
};

template <typename Storage, typename Accum>
struct ForwardSegment {
  int64_t steps, units;
  int64_t step;  // of b and h
  bool stream;   // store h past the caches; rows must begin at whole lines of a cache
  const Storage* b;
  Storage* h;
  Accum* state;  // [units]
};

// The run of the transpose, from the last step to the first, with the gradient of the
// factors: db_t = dh_t + c_{t+1}, c_t = a_t db_t, da_t = db_t h_{t-1}.
template <typename Storage, typename Accum>
struct BackwardSegment {
  int64_t steps, units;
  int64_t step;           // of dh, db and h_prev
  bool stream;            // store db and da past the caches
  const Storage* h_prev;  // h_{t-1}
  const Storage* dh;
  Storage* db;
  Accum* state;  // c, [units]
  // The gradient of a, in one of three forms.
  Storage* da;      // a factor for each unit and step: [steps][units]
  int64_t da_step;  // of da
  Accum* sums;      // the same factor at every step: [units], added to
  Accum* shared;    // one factor for all units: [steps], or pairs, added to
  int64_t parts;    // real numbers of a factor: 1 or 2
};

// 2x2 blocks: units come in pairs (h0, h1), complex ones in fours, and a has for each
// the numbers a00 a01 a10 a11. `shared` of Factors is false.
template <typename Storage, typename Accum>
struct LinearKernels {
  using Forward = void (*)(const Factors<Storage>&,
                           const ForwardSegment<Storage, Accum>&);
  using Backward = void (*)(const Factors<Storage>&,
                            const BackwardSegment<Storage, Accum>&);
  Forward forward, forward_after;  // the factor before or after the step
  Forward blocks_forward, blocks_forward_after;
  Backward backward;
};

// Recursive filters over channels, of which each has its steps side by side.
template <typename T>
struct FilterSegment {
  int64_t order;  // 1..kMostOrder
  int64_t steps;
  bool reverse;                // from the last step to the first
  const T *b, *a;              // [order + 1] and [order]
  int64_t b_stride, a_stride;  // from channel to channel; 0: all have the same
  const T* x;                  // [channels][steps]
  T* y;
};
inline constexpr int64_t kMostOrder = 8;

// Runs `channels` from `channel` on, at most `lanes` of them.
template <typename T>
struct FilterKernel {
  int64_t lanes;
  void (*run)(const FilterSegment<T>& filter, int64_t channel, int64_t channels);
};

// Generalised advantage estimates,
// A_t = r_t + d_t v_{t+1} - v_t + d_t l_t A_{t+1}, from the last step to the first; the
// returns are A + v. Where `ends` is set d counts as 0, and where `cuts` is, A is 0;
// nothing passes there, not even a NaN. Arrays are [batch][steps], or [steps][batch];
// results are 0 past the end.
template <typename T>
struct Advantages {
  int64_t batch, steps;
  bool time_major;
  const T *rewards, *values;
  const T* last;  // [batch], the value after the last step
  const T *discounts, *lambdas;
  bool one_discount, one_lambda;  // a single number each, not arrays
  const uint8_t *ends, *cuts;     // or null
  const int32_t* lengths;         // [batch], or null
  T *advantages, *returns;
};

// Runs `count` sequences from `first` on, at most kMostSequences.
template <typename T>
using AdvantagesKernel = void (*)(const Advantages<T>& call, int64_t first,
                                  int64_t count);
inline constexpr int64_t kMostSequences = 128;

struct LinearKernelSet {
  LinearKernels<float, float> f32, c64;
  LinearKernels<double, double> f64, c128;
  LinearKernels<BFloat16, float> bf16;
  FilterKernel<float> filter_f32;
  FilterKernel<double> filter_f64;
  AdvantagesKernel<float> advantages_f32;
  AdvantagesKernel<double> advantages_f64;
};

// Null where the file was compiled for a processor that cannot have the instructions.
extern const LinearKernelSet* const kPortableLinear;
extern const LinearKernelSet* const kAvx2Linear;
extern const LinearKernelSet* const kAvx512Linear;

// The tables that calls use: those of the instruction set of CurrentIsa(), or of the
// highest one below it that was compiled.
const LinearKernelSet& CurrentLinearKernels() noexcept;

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_LINEAR_KERNELS_H_
