// Advantages of sequences that lie side by side, step by step, or of one sequence.
#ifndef OSTINATO_CPU_LINEAR_ADVANTAGES_INL_H_
#define OSTINATO_CPU_LINEAR_ADVANTAGES_INL_H_

#include <cstdint>

#include "cpu/linear/kernels.h"

namespace ostinato::cpu {
namespace {

template <typename T>
void EstimateAdvantages(const Advantages<T>& c, int64_t first, int64_t count) {
  const int64_t sequence = c.time_major ? 1 : c.steps;
  const int64_t step = c.time_major ? c.batch : 1;
  T carry[kMostSequences] = {}, after[kMostSequences], one_discount[kMostSequences],
    one_lambda[kMostSequences];
  for (int64_t i = 0; i < count; ++i) {
    after[i] = c.last[first + i];
    if (c.one_discount) one_discount[i] = *c.discounts;
    if (c.one_lambda) one_lambda[i] = *c.lambdas;
  }
  for (int64_t t = c.steps - 1; t >= 0; --t) {
    const int64_t at = first * sequence + t * step;
    const T* __restrict r = c.rewards + at;
    const T* __restrict v = c.values + at;
    const T* const d = c.one_discount ? one_discount : c.discounts + at;
    const T* const l = c.one_lambda ? one_lambda : c.lambdas + at;
    T* __restrict advantages = c.advantages + at;
    T* __restrict returns = c.returns + at;
    if (c.ends == nullptr && c.cuts == nullptr && c.lengths == nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        carry[i] = r[i] + d[i] * after[i] - v[i] + d[i] * l[i] * carry[i];
        after[i] = v[i];
        advantages[i] = carry[i];
        returns[i] = carry[i] + v[i];
      }
      continue;
    }
    for (int64_t i = 0; i < count; ++i) {
      if (c.lengths != nullptr && t >= c.lengths[first + i]) {
        advantages[i] = returns[i] = 0;
        continue;
      }
      const T discount = c.ends != nullptr && c.ends[at + i] != 0 ? 0 : d[i];
      const bool cut = c.cuts != nullptr && c.cuts[at + i] != 0;
      carry[i] =
          cut ? 0 : r[i] + discount * after[i] - v[i] + discount * l[i] * carry[i];
      after[i] = v[i];
      advantages[i] = carry[i];
      returns[i] = carry[i] + v[i];
    }
  }
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_LINEAR_ADVANTAGES_INL_H_
