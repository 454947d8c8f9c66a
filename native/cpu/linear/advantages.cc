#include "cpu/linear/advantages.h"

#include <algorithm>

#include "cpu/network/network.h"
#include "cpu/runtime/team.h"

namespace ostinato::cpu {
namespace {

// Steps that take longer than waking a thread and fetching from its cache what it
// wrote.
constexpr int64_t kStepsPerThread = 1 << 16;

}  // namespace

template <typename T>
void RunAdvantages(const Advantages<T>& call, AdvantagesKernel<T> kernel) {
  Team team(static_cast<int32_t>(
      std::min<int64_t>(1 + call.batch * call.steps / kStepsPerThread, kMostThreads)));
  const int64_t even = RoundUp(CeilDiv(call.batch, team.threads()), 16);
  const int64_t each = std::clamp<int64_t>(even, 1, kMostSequences);
  team.ForEach(CeilDiv(call.batch, each), [&](int64_t i) {
    kernel(call, i * each, std::min(each, call.batch - i * each));
  });
}

template void RunAdvantages(const Advantages<float>&, AdvantagesKernel<float>);
template void RunAdvantages(const Advantages<double>&, AdvantagesKernel<double>);

}  // namespace ostinato::cpu
