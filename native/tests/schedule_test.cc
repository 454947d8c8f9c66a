#include "cpu/pass/schedule.h"

#include "tests/check.h"

namespace {

using ostinato::cpu::CostModelOf;
using ostinato::cpu::Mode;
using ostinato::cpu::Network;
using ostinato::cpu::Schedule;
using ostinato::cpu::ScheduleOf;

constexpr int64_t kNear = 100, kFar = 700;  // ns

int ScheduleFor(int64_t units, int64_t layers, int64_t directions, int64_t batch,
                int64_t steps, int32_t threads = 2, int64_t heads = 1,
                int64_t exchange_ns = kNear) {
  Network network{};
  network.mode = Mode::kLstm;
  network.input_size = network.hidden_size = units;
  network.num_layers = layers;
  network.num_directions = directions;
  network.num_heads = heads;
  return static_cast<int>(ScheduleOf(CostModelOf(network, batch * steps, batch, 16),
                                     threads, [&] { return exchange_ns; }));
}

constexpr int kSequences = static_cast<int>(Schedule::kSequences);
constexpr int kDirections = static_cast<int>(Schedule::kDirections);
constexpr int kWavefront = static_cast<int>(Schedule::kWavefront);
constexpr int kHeads = static_cast<int>(Schedule::kHeads);
constexpr int kUnits = static_cast<int>(Schedule::kUnits);

void LargeBatchesAreCutIntoRows() {
  CHECK_EQ(ScheduleFor(256, 1, 1, 12, 100), kSequences);
  CHECK_EQ(ScheduleFor(256, 3, 2, 32, 1), kSequences);
  CHECK_EQ(ScheduleFor(256, 1, 1, 12, 100, 3), kUnits);
  CHECK_EQ(ScheduleFor(256, 3, 1, 1, 100, 1), kSequences);
}

void FewRowsAreSharedByDirectionsOrUnits() {
  CHECK_EQ(ScheduleFor(256, 2, 2, 1, 100), kDirections);
  CHECK_EQ(ScheduleFor(256, 1, 1, 1, 100), kUnits);
  CHECK_EQ(ScheduleFor(16, 1, 1, 1, 100), kSequences);
}

void SmallStepsAreDividedAmongCoresThatAreNear() {
  const auto schedule = [](int64_t units, int64_t exchange_ns) {
    return ScheduleFor(units, 1, 1, 1, 100, 2, 1, exchange_ns);
  };
  CHECK_EQ(schedule(48, 0), kSequences);
  CHECK_EQ(schedule(64, kNear), kUnits);
  CHECK_EQ(schedule(64, kFar), kSequences);
  CHECK_EQ(schedule(128, kFar), kUnits);
  CHECK_EQ(schedule(256, 1'000'000), kUnits);
  CHECK_EQ(schedule(64, 0), kUnits);  // no helper was there to measure with
}

void LayersOverlapWhereThereAreStepsEnough() {
  CHECK_EQ(ScheduleFor(256, 2, 1, 1, 100), kWavefront);
  CHECK_EQ(ScheduleFor(16, 2, 1, 1, 100), kWavefront);
  CHECK_EQ(ScheduleFor(256, 2, 1, 1, 100, 3), kUnits);
  CHECK_EQ(ScheduleFor(16, 2, 1, 1, 100, 3), kWavefront);
  for (const int64_t steps : {1, 4, 32}) {
    CHECK_EQ(ScheduleFor(256, 2, 1, 1, steps), kUnits);
    CHECK_EQ(ScheduleFor(256, 4, 1, 2, steps), kUnits);
    CHECK_EQ(ScheduleFor(16, 2, 1, 1, steps), kSequences);
  }
}

void PartsOfHeadsRunAloneWhereTheyAreEqual() {
  CHECK_EQ(ScheduleFor(256, 1, 1, 32, 100, 2, 4), kSequences);
  CHECK_EQ(ScheduleFor(256, 1, 1, 2, 100, 2, 4), kHeads);
  CHECK_EQ(ScheduleFor(256, 2, 1, 1, 100, 2, 256), kHeads);
  CHECK_EQ(ScheduleFor(256, 2, 1, 2, 100, 2, 256), kSequences);  // no products
  CHECK_EQ(ScheduleFor(256, 1, 2, 2, 100, 2, 4), kDirections);
  CHECK_EQ(ScheduleFor(256, 1, 2, 2, 100, 4, 4), kHeads);
  CHECK_EQ(ScheduleFor(240, 1, 1, 2, 100, 2, 3), kUnits);   // three groups
  CHECK_EQ(ScheduleFor(248, 1, 1, 8, 100, 2, 62), kUnits);  // the last one is smaller
  CHECK_EQ(ScheduleFor(32, 1, 1, 1, 100, 2, 32), kHeads);
}

void NoRowsAreNoTrouble() {
  CHECK_EQ(ScheduleFor(256, 2, 1, 0, 100), kSequences);
  CHECK_EQ(ScheduleFor(256, 2, 2, 0, 0), kDirections);
}

}  // namespace

int main() {
  LargeBatchesAreCutIntoRows();
  FewRowsAreSharedByDirectionsOrUnits();
  SmallStepsAreDividedAmongCoresThatAreNear();
  LayersOverlapWhereThereAreStepsEnough();
  PartsOfHeadsRunAloneWhereTheyAreEqual();
  NoRowsAreNoTrouble();
  return ostinato::testing::Summary();
}
