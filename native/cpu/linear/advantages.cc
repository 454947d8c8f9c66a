#include "cpu/linear/advantages.h"

#include <algorithm>

#include "cpu/network/network.h"
#include "cpu/runtime/team.h"

namespace ostinato::cpu {
namespace {

constexpr int64_t kStepsPerThread = 1 << 14;
// Sequences that a task takes, whose steps lie side by side.
constexpr int64_t kTogether = 8;

}  // namespace

template <typename T>
void RunAdvantages(const Advantages<T>& call, AdvantagesKernel<T> kernel) {
  Team team(static_cast<int32_t>(
      std::min<int64_t>(1 + call.batch * call.steps / kStepsPerThread, kMostThreads)));
  const int64_t even = CeilDiv(call.batch, team.threads());
  const int64_t each = call.time_major
                           ? std::clamp<int64_t>(RoundUp(even, 16), 1, kMostSequences)
                           : std::clamp<int64_t>(even, 1, kTogether);
  team.ForEach(CeilDiv(call.batch, each), [&](int64_t i) {
    kernel(call, i * each, std::min(each, call.batch - i * each));
  });
}

template void RunAdvantages(const Advantages<float>&, AdvantagesKernel<float>);
template void RunAdvantages(const Advantages<double>&, AdvantagesKernel<double>);

}  // namespace ostinato::cpu
