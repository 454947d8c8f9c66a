// Advantages of sequences that lie side by side, step by step, or of one sequence.
#ifndef OSTINATO_CPU_LINEAR_ADVANTAGES_INL_H_
#define OSTINATO_CPU_LINEAR_ADVANTAGES_INL_H_

#include <cstdint>

#include "cpu/linear/kernels.h"

namespace ostinato::cpu {
namespace {

// One sequence whose steps lie side by side. Only the last sum waits for the one
// before.
template <typename T>
void EstimateOne(const Advantages<T>& c, int64_t sequence) {
  const int64_t first = sequence * c.steps;
  const T* __restrict r = c.rewards + first;
  const T* __restrict v = c.values + first;
  const T* __restrict d = c.one_discount ? c.discounts : c.discounts + first;
  const T* __restrict l = c.one_lambda ? c.lambdas : c.lambdas + first;
  const int64_t d_step = c.one_discount ? 0 : 1, l_step = c.one_lambda ? 0 : 1;
  const uint8_t* ends = c.ends == nullptr ? nullptr : c.ends + first;
  const uint8_t* cuts = c.cuts == nullptr ? nullptr : c.cuts + first;
  T* __restrict advantages = c.advantages + first;
  T* __restrict returns = c.returns + first;
  const int64_t length = c.lengths == nullptr ? c.steps : c.lengths[sequence];
  for (int64_t t = c.steps - 1; t >= length; --t) advantages[t] = returns[t] = 0;
  T carry = 0, after = c.last[sequence];
  for (int64_t t = length - 1; t >= 0; --t) {
    const T discount = ends != nullptr && ends[t] != 0 ? 0 : d[t * d_step];
    const T delta = r[t] + discount * after - v[t];
    carry = delta + discount * l[t * l_step] * carry;
    if (cuts != nullptr && cuts[t] != 0) carry = 0;
    after = v[t];
    advantages[t] = carry;
    returns[t] = carry + after;
  }
}

template <typename T>
void EstimateAdvantages(const Advantages<T>& c, int64_t first, int64_t count) {
  if (!c.time_major) {
    for (int64_t i = 0; i < count; ++i) EstimateOne(c, first + i);
    return;
  }
  T carry[kMostSequences] = {}, after[kMostSequences], one_discount[kMostSequences],
    one_lambda[kMostSequences];
  for (int64_t i = 0; i < count; ++i) {
    after[i] = c.last[first + i];
    if (c.one_discount) one_discount[i] = *c.discounts;
    if (c.one_lambda) one_lambda[i] = *c.lambdas;
  }
  for (int64_t t = c.steps - 1; t >= 0; --t) {
    const int64_t at = t * c.batch + first;
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
