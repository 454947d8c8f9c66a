// Gradients of matrices: products of what all sequences have at all steps of a chunk.
#ifndef OSTINATO_CPU_STEP_GRADIENTS_H_
#define OSTINATO_CPU_STEP_GRADIENTS_H_

#include <cstdint>
#include <memory>
#include <vector>

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
  struct Token {
    const StepTile<T>* tile;
    int64_t n, sequence;
  };

  void AddBlock(const StepGradient& gradient, T* sum, const Token* tokens,
                int64_t count, Team& team);
  int64_t SumStride(const StepGradient& gradient) const;

  const StepLoop<T>& loop_;
  const Tiles& tiles_;
  Scratch scratch_;
  std::vector<T*> sums_;    // by gradient
  T* turned_ = nullptr;     // the factor `a` of a block, a row for each of its elements
  std::vector<T*> panels_;  // one for each task at a time
  std::vector<Token> tokens_;
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_STEP_GRADIENTS_H_
