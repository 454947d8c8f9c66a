// Some sequences of a loop, which one thread runs from the first step to the last.
#ifndef OSTINATO_CPU_STEP_TILE_H_
#define OSTINATO_CPU_STEP_TILE_H_

#include <cstdint>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "cpu/runtime/scratch.h"
#include "cpu/step/loop.h"

namespace ostinato::cpu {

// The weights of a program in the order in which products read them.
template <typename T>
struct StepPanels {
  const Kernels<T, T, T>& kernels;
  std::vector<const T*> panels;  // by weight
};

// What the tiles of a call share. Sums over sequences are kept apart for groups of them
// that do not depend on the tiles, and added up at the end.
template <typename T>
struct StepLoop {
  const StepCall& call;
  const StepKernels<T>& kernels;
  const StepPanels<T>& panels;
  int64_t group;                 // sequences of a group
  std::vector<T*> sums;          // by buffer: [group][width]; null but for sums
  std::vector<int64_t> order;    // of sequences, by falling length
  std::vector<int64_t> lengths;  // in that order
};

template <typename T>
class StepTile {
 public:
  // `groups` are the numbers of its groups in rising order; all but the last of the
  // loop have the same number of sequences. `first` of the tiles writes what all share.
  StepTile(const StepLoop<T>& loop, std::vector<int64_t> groups, bool first,
           Scratch& scratch);

  void Run();

 private:
  // A buffer at the current step.
  struct Live {
    T* at = nullptr;
    T* other = nullptr;      // kState: what kNext writes, and the next step reads
    bool copied = false;     // `at` is a copy of what the array has
    int64_t array_step = 0;  // elements of the array from step to step
  };

  int64_t ActiveAt(int64_t t) const;
  void Locate(int64_t buffer, Scratch& scratch);
  void Enter(int64_t t, int64_t active);
  void Leave(int64_t t, int64_t active);
  void Execute(const StepInstruction& instruction, int64_t active);
  void Multiply(const StepInstruction& instruction, int64_t active);
  void SumGroups(const StepInstruction& instruction, int64_t active);
  void Swap();
  void CopyIn(const StepArray& array, int64_t first, const StepBuffer& buffer,
              int64_t rows, T* to) const;
  void CopyOut(const StepArray& array, int64_t first, const StepBuffer& buffer,
               int64_t begin, int64_t end, const T* from) const;
  bool IsDirect(const StepArray& array) const;
  T* At(const StepView& view) const { return live_[view.buffer].at + view.offset; }

  const StepLoop<T>& loop_;
  const StepProgram& program_;
  const std::vector<int64_t> groups_;
  const bool first_;
  std::vector<int64_t> rows_;     // its sequences
  std::vector<int64_t> lengths_;  // of these
  std::vector<Live> live_;        // by buffer
  std::vector<const T*> factors_;
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_STEP_TILE_H_
