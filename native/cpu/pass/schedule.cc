#include "cpu/pass/schedule.h"

#include <algorithm>

#include "cpu/runtime/caches.h"

namespace ostinato::cpu {
namespace {

// A thread with fewer rows than this multiplies slower than one that has the units
// of all rows to share.
constexpr int64_t kRowsPerThread = 6;
// Multiplications that take about as long as waking or awaiting another thread.
constexpr int64_t kWorthJoining = 200'000, kWorthSharingAStep = 6'000;

}  // namespace

Work WorkOf(const Network& network, int64_t entries, int64_t batch) {
  const int64_t rows = network.gates() * network.hidden_size;
  const int64_t out = network.output_size();
  const int64_t recurrent = rows * out + network.proj_size * network.hidden_size;
  int64_t all = 0;
  for (int64_t layer = 0; layer < network.num_layers; ++layer) {
    const int64_t inputs = network.has_w_ih(layer) ? network.inputs(layer) : 0;
    all += network.num_directions * (recurrent + rows * inputs);
  }
  return {batch,
          network.num_layers,
          network.num_directions,
          CeilDiv(entries, std::max<int64_t>(1, batch)),
          batch * recurrent,
          all * entries};
}

int32_t ThreadsFor(const Work& work) {
  return static_cast<int32_t>(std::min<int64_t>(1 + work.all / kWorthJoining, 1 << 16));
}

Work Work::OfLayer(int64_t rows) const {
  Work work = *this;
  work.layers = 1;
  work.step = step / std::max<int64_t>(1, batch) * rows;
  work.batch = rows;
  return work;
}

Plan PlanOf(const Work& work, int32_t threads) {
  if (threads == 1 || work.batch >= kRowsPerThread * threads) return Plan::kRows;
  if (work.directions == 2 && threads == 2) return Plan::kDirections;
  // Layers are at work at once only between the first wave and the last.
  const bool waves = work.directions == 1 && work.layers > 1 &&
                     work.steps > work.layers * kStepsPerWave;
  if (waves && work.layers >= threads) return Plan::kWavefront;
  if (work.step >= 2 * kWorthSharingAStep) return Plan::kUnits;
  if (work.directions == 2) return Plan::kDirections;
  return waves ? Plan::kWavefront : Plan::kRows;
}

int64_t SlicesFor(const Work& work, int32_t threads) {
  const int64_t most = std::max<int64_t>(1, work.batch);
  const int64_t each = CeilDiv(most, RowsPerSlice(Caches()) * threads);
  return std::min(most, each * threads);
}

Parts PartsOf(const Member& member, int64_t directions) {
  Parts parts;
  const int64_t index = member.index(), size = member.size();
  if (size >= directions) {
    const int64_t direction = index % directions;
    parts.parts_[parts.count_++] = {
        direction, {index / directions, CeilDiv(size - direction, directions)}};
  } else {
    for (int64_t d = 0; d < directions; ++d) parts.parts_[parts.count_++] = {d, {}};
  }
  return parts;
}

}  // namespace ostinato::cpu
