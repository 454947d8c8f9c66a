#include "cpu/pass/schedule.h"

#include <algorithm>

#include "cpu/network/heads.h"
#include "cpu/runtime/caches.h"

namespace ostinato::cpu {
namespace {

// A thread with fewer sequences than this multiplies slower than one that takes some of
// the units of all sequences.
constexpr int64_t kSequencesPerThread = 6;
// Multiplications that take about as long as waking another thread.
constexpr int64_t kWorthWaking = 200'000;
// Steps with fewer multiplications than the first number are never divided, with as
// many as the second always, however far apart the cores are.
constexpr int64_t kLeastToDivide = 12'000, kMostToDivide = 100'000;

// Whether threads that share the units of a step gain more than they lose by waiting
// for each other. With few sequences a lane of a vector takes about 1.6 multiplications
// in a ns.
bool WorthDividing(const CostModel& cost, const std::function<int64_t()>& exchange_ns) {
  if (cost.step < kLeastToDivide) return false;
  if (cost.step >= kMostToDivide) return true;
  const int64_t lanes = cost.lanes > 0 ? cost.lanes : 16;
  return cost.step >= 2 * exchange_ns() * lanes * 8 / 5;
}

}  // namespace

CostModel CostModelOf(const Network& network, int64_t tokens, int64_t batch,
                      int64_t lanes) {
  const int64_t rows = network.gates() * network.hidden_size;
  const int64_t out = network.output_size();
  const int64_t recurrent =
      (rows * out + network.proj_size * network.hidden_size) / network.num_heads;
  int64_t all = 0;
  for (int64_t layer = 0; layer < network.num_layers; ++layer) {
    const int64_t inputs = network.has_w_ih(layer) ? network.inputs(layer) : 0;
    all += network.num_directions * (recurrent + rows * inputs);
  }
  CostModel cost{batch,
                 network.num_layers,
                 network.num_directions,
                 CeilDiv(tokens, std::max<int64_t>(1, batch)),
                 batch * recurrent,
                 all * tokens};
  cost.lanes = lanes;
  if (lanes > 0) {
    const Heads heads(network, lanes);
    if (heads.units.size % heads.units.group == 0) cost.groups = heads.groups;
    cost.products = heads.units.head > 1 || network.num_heads == 1;
  }
  return cost;
}

int64_t HeadPartsFor(const CostModel& cost, int32_t threads) {
  int64_t parts = std::max<int64_t>(1, threads / cost.directions);
  while (cost.groups % parts != 0) --parts;
  return parts;
}

int32_t ThreadsFor(const CostModel& cost) {
  return static_cast<int32_t>(std::min<int64_t>(1 + cost.all / kWorthWaking, 1 << 16));
}

CostModel CostModel::OfLayer(int64_t active) const {
  CostModel cost = *this;
  cost.layers = 1;
  cost.step = step / std::max<int64_t>(1, batch) * active;
  cost.batch = active;
  return cost;
}

Schedule ScheduleOf(const CostModel& cost, int32_t threads,
                    const std::function<int64_t()>& exchange_ns) {
  const int64_t enough = cost.products ? kSequencesPerThread : 1;
  if (threads == 1 || cost.batch >= enough * threads) return Schedule::kSequences;
  if (cost.directions == 2 && threads == 2) return Schedule::kDirections;
  if (HeadPartsFor(cost, threads) * cost.directions >= threads) return Schedule::kHeads;
  // All layers are at work at once only between the first wave and the last.
  const bool waves = cost.directions == 1 && cost.layers > 1 &&
                     cost.steps > cost.layers * kStepsPerWave;
  if (waves && cost.layers >= threads) return Schedule::kWavefront;
  if (WorthDividing(cost, exchange_ns)) return Schedule::kUnits;
  if (cost.directions == 2) return Schedule::kDirections;
  return waves ? Schedule::kWavefront : Schedule::kSequences;
}

int64_t PortionsFor(const CostModel& cost, int32_t threads) {
  const int64_t most = std::max<int64_t>(1, cost.batch);
  const int64_t each = CeilDiv(most, SequencesPerPortion(Caches()) * threads);
  return std::min(most, each * threads);
}

Assignments AssignmentsOf(const Worker& worker, int64_t directions) {
  Assignments assignments;
  const int64_t index = worker.index(), size = worker.size();
  if (size >= directions) {
    const int64_t direction = index % directions;
    assignments.assignments_[assignments.count_++] = {
        direction, {index / directions, CeilDiv(size - direction, directions)}};
  } else {
    for (int64_t d = 0; d < directions; ++d)
      assignments.assignments_[assignments.count_++] = {d, {}};
  }
  return assignments;
}

}  // namespace ostinato::cpu
