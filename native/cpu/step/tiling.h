// How a loop is divided: among threads, into tiles of sequences and chunks of steps.
#ifndef OSTINATO_CPU_STEP_TILING_H_
#define OSTINATO_CPU_STEP_TILING_H_

#include <cstdint>
#include <vector>

#include "cpu/step/loop.h"

namespace ostinato::cpu {

// Threads that are worth waking for the loops of so many members, with `lanes` elements
// of a vector.
int32_t ThreadsFor(const StepCall& call, int64_t lanes, int64_t members = 1);

// Steps at a time, with elements of so many bytes.
int64_t ChunkOf(const StepCall& call, int64_t bytes);

// Sequences whose sums over steps are one. Neither this nor the order depends on the
// threads, so the bits of sums do not.
int64_t GroupOf(const StepCall& call);

// All sequences, by falling length among neighbours.
std::vector<int64_t> OrderOf(const std::vector<int64_t>& lengths);

// The groups of each tile, in rising order: groups of so many sequences that follow one
// another in the order. The first tile has a longest sequence.
std::vector<std::vector<int64_t>> TilesOf(const StepCall& call,
                                          const std::vector<int64_t>& ordered_lengths,
                                          int64_t group, int64_t bytes,
                                          int64_t threads);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_STEP_TILING_H_
