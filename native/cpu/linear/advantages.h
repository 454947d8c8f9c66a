// Generalised advantage estimates in one pass over all arrays.
#ifndef OSTINATO_CPU_LINEAR_ADVANTAGES_H_
#define OSTINATO_CPU_LINEAR_ADVANTAGES_H_

#include <cstdint>

namespace ostinato::cpu {

// A_t = r_t + d_t v_{t+1} - v_t + d_t l_t A_{t+1}, from the last step to the first; the
// returns are A + v. Where `ends` is set d counts as 0, and where `cuts` is, A is 0.
// Arrays are [batch][steps], or [steps][batch]; results are 0 past the end.
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

template <typename T>
void RunAdvantages(const Advantages<T>& call);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_LINEAR_ADVANTAGES_H_
