// Gradients of matrices: products of what all sequences have at all steps of a chunk.
#ifndef OSTINATO_CPU_STEP_GRADIENTS_H_
#define OSTINATO_CPU_STEP_GRADIENTS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/network/panels.h"
#include "cpu/network/sum_parts.h"
#include "cpu/runtime/scratch.h"
#include "cpu/runtime/team.h"
#include "cpu/step/tile.h"

namespace ostinato::cpu {

template <typename T>
class StepGradients {
 public:
  using Tiles = std::vector<std::unique_ptr<StepTile<T>>>;

  StepGradients(const StepLoop<T>& loop, const Tiles& tiles);

  // Adds what the chunk of steps begin .. end - 1 contributes, sequence after sequence
  // of the first step, then of the next one.
  void Add(int64_t begin, int64_t end, Team& team);
  // Writes the results.
  void Finish();

 private:
  // Some rows of the tokens that are added up at once, at an even distance.
  struct Run {
    int64_t buffer_row;  // of the first, in the rows of its tile at its step
    const StepTile<T>* tile;
    int64_t n, count;
  };
  // A factor of one or several gradients, for the tokens that are added up at once.
  struct Side {
    StepGradient::Factor factor;
    bool turned;  // a row for each of its elements; else panels of its columns
    T* values;
  };
  struct Sum {
    const StepGradient* gradient;
    size_t a, b;  // sides
    T* data;      // the result itself where its rows are whole vectors
    T* part;      // what is not yet in it; see SumParts
    int64_t stride;
  };
  struct Task {
    size_t index;  // of a side or of a sum
    int64_t first, row;
  };

  size_t SideOf(const StepGradient::Factor& factor, bool turned);
  void Fill(const Task& task);
  void Multiply(const Task& task);
  Columns ColumnsOf(int64_t size) const { return {size, loop_.kernels.lanes}; }

  const StepLoop<T>& loop_;
  const Tiles& tiles_;
  Scratch scratch_;
  int64_t block_ = 0;  // tokens that are added up at once, at most
  std::vector<Side> sides_;
  std::vector<Sum> sums_;
  std::vector<Task> fills_, products_;
  std::vector<Run> tokens_;
  int64_t count_ = 0;  // of the tokens
  SumParts parts_;     // before these
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_STEP_GRADIENTS_H_
