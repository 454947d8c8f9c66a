// How a call is cut into pieces for threads. It decides who computes what and when,
// never what is computed: every cut gives the same bits.
#ifndef OSTINATO_CPU_PASS_SCHEDULE_H_
#define OSTINATO_CPU_PASS_SCHEDULE_H_

#include <cstdint>

#include "cpu/network/network.h"
#include "cpu/pass/layer_pass.h"
#include "cpu/runtime/team.h"

namespace ostinato::cpu {

enum class Plan {
  kRows,        // slices of the batch
  kDirections,  // one thread for each of two directions
  kWavefront,   // layers of one direction, each some steps behind the one below
  kUnits,       // the units of every step
};

struct Work {
  int64_t batch, layers, directions;
  int64_t steps;  // of a row, on average
  int64_t step;   // multiplications of a recurrent step of one pseudo-layer, all rows
  int64_t all;    // multiplications in all

  // The same of one layer by itself, in steps that have `rows` rows.
  Work OfLayer(int64_t rows) const;
};

// `entries` steps in all, of `batch` rows.
Work WorkOf(const Network& network, int64_t entries, int64_t batch);

Plan PlanOf(const Work& work, int32_t threads);

// Slices for Plan::kRows.
int64_t SlicesFor(const Work& work, int32_t threads);

// Steps that a layer is behind the one below it under Plan::kWavefront.
inline constexpr int64_t kStepsPerWave = 16;

// Steps in one Run under Plan::kUnits, where threads meet after each: few, so that a
// helper that wakes up late can join soon, and one that is held up can be left out.
inline constexpr int64_t kStepsPerRun = 32;

// How many threads a call is worth waking.
int32_t ThreadsFor(const Work& work);

// What one member of a team does under Plan::kUnits: shares of one direction, or of
// all, one after another, if it is alone.
struct Part {
  int64_t direction;
  Share share;
};
class Parts {
 public:
  const Part* begin() const { return parts_; }
  const Part* end() const { return parts_ + count_; }

 private:
  friend Parts PartsOf(const Member& member, int64_t directions);
  Part parts_[2];
  int64_t count_ = 0;
};
Parts PartsOf(const Member& member, int64_t directions);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_SCHEDULE_H_
