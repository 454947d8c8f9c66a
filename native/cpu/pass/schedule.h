// How a call is divided among threads. The schedule decides who computes what and when,
// never what is computed: every schedule gives the same bits.
#ifndef OSTINATO_CPU_PASS_SCHEDULE_H_
#define OSTINATO_CPU_PASS_SCHEDULE_H_

#include <cstdint>
#include <functional>

#include "cpu/network/network.h"
#include "cpu/runtime/team.h"

namespace ostinato::cpu {

enum class Schedule {
  kSequences,   // portions of the batch
  kDirections,  // one thread for each of two directions
  kWavefront,   // layers of one direction, each some steps behind the one below
  kHeads,       // groups of heads, which do not read each other's states
  kUnits,       // the units of every step
};

// The cost of a call, in multiplications.
struct CostModel {
  int64_t batch, layers, directions;
  int64_t steps;         // of a sequence, on average
  int64_t step;          // one recurrent step of one pseudo-layer, for all sequences
  int64_t all;           // the whole call
  int64_t groups = 1;    // equal groups of heads
  bool products = true;  // a step has recurrent products: heads of one unit have none
  int64_t lanes = 0;     // of a vector; 0: not known

  // The same of one layer by itself, in steps in which `active` sequences are active.
  CostModel OfLayer(int64_t active) const;
};

// `lanes` of the kernels decides the groups of heads; 0 counts none.
CostModel CostModelOf(const Network& network, int64_t tokens, int64_t batch,
                      int64_t lanes = 0);

// `exchange_ns` is asked where it decides: how long the threads need to wait for each
// other and to read what the others have written.
Schedule ScheduleOf(const CostModel& cost, int32_t threads,
                    const std::function<int64_t()>& exchange_ns);
inline Schedule ScheduleOf(const CostModel& cost, Team& team) {
  return ScheduleOf(cost, team.threads(), [&] { return team.ExchangeNs(); });
}

// Parts of each direction for Schedule::kHeads: a divisor of the groups.
int64_t HeadPartsFor(const CostModel& cost, int32_t threads);

// Portions for Schedule::kSequences.
int64_t PortionsFor(const CostModel& cost, int32_t threads);

// Steps that a layer is behind the one below it under Schedule::kWavefront.
inline constexpr int64_t kStepsPerWave = 16;

// Steps in one Run under Schedule::kUnits, with a barrier after each: few, so that a
// helper that wakes up late can join soon, and one that is held up can be left out.
inline constexpr int64_t kStepsPerRun = 32;

// How many threads a call is worth waking.
int32_t ThreadsFor(const CostModel& cost);

// One of `size` equal slices of the units or columns of a step.
struct Slice {
  int64_t index = 0, size = 1;

  int64_t begin(int64_t count) const { return count * index / size; }
  int64_t end(int64_t count) const { return count * (index + 1) / size; }
};

// The work of one worker under Schedule::kUnits: a slice of one direction, or if it is
// alone all of every direction, one after another.
struct Assignment {
  int64_t direction;
  Slice slice;
};
class Assignments {
 public:
  const Assignment* begin() const { return assignments_; }
  const Assignment* end() const { return assignments_ + count_; }

 private:
  friend Assignments AssignmentsOf(const Worker& worker, int64_t directions);
  Assignment assignments_[2];
  int64_t count_ = 0;
};
Assignments AssignmentsOf(const Worker& worker, int64_t directions);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_SCHEDULE_H_
