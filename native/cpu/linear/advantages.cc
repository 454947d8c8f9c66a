#include "cpu/linear/advantages.h"

#include <algorithm>

#include "cpu/network/network.h"
#include "cpu/runtime/team.h"

namespace ostinato::cpu {
namespace {

constexpr int64_t kStepsPerThread = 1 << 14;
constexpr int64_t kWidest = 128;  // sequences side by side

// Some sequences that lie side by side, or one.
template <typename T>
void RunSome(const Advantages<T>& c, int64_t first, int64_t count) {
  const int64_t sequence = c.time_major ? 1 : c.steps;
  const int64_t step = c.time_major ? c.batch : 1;
  T carry[kWidest] = {}, after[kWidest], one_discount[kWidest], one_lambda[kWidest];
  for (int64_t i = 0; i < count; ++i) {
    after[i] = c.last[first + i];
    if (c.one_discount) one_discount[i] = *c.discounts;
    if (c.one_lambda) one_lambda[i] = *c.lambdas;
  }
  for (int64_t t = c.steps - 1; t >= 0; --t) {
    const int64_t at = first * sequence + t * step;
    const T* const r = c.rewards + at;
    const T* const v = c.values + at;
    const T* const d = c.one_discount ? one_discount : c.discounts + at;
    const T* const l = c.one_lambda ? one_lambda : c.lambdas + at;
    T* const advantages = c.advantages + at;
    T* const returns = c.returns + at;
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

template <typename T>
void RunAdvantages(const Advantages<T>& call) {
  Team team(static_cast<int32_t>(
      std::min<int64_t>(1 + call.batch * call.steps / kStepsPerThread, kMostThreads)));
  const int64_t even = CeilDiv(call.batch, team.threads());
  const int64_t each =
      call.time_major ? std::clamp<int64_t>((even + 15) / 16 * 16, 1, kWidest) : 1;
  team.ForEach(CeilDiv(call.batch, each), [&](int64_t i) {
    RunSome(call, i * each, std::min(each, call.batch - i * each));
  });
}

template void RunAdvantages(const Advantages<float>&);
template void RunAdvantages(const Advantages<double>&);

}  // namespace ostinato::cpu
