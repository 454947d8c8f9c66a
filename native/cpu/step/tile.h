// Some sequences of a loop, which one thread runs for a chunk of steps.
#ifndef OSTINATO_CPU_STEP_TILE_H_
#define OSTINATO_CPU_STEP_TILE_H_

#include <cstdint>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "cpu/runtime/scratch.h"
#include "cpu/step/loop.h"

namespace ostinato::cpu {

// What the tiles of a call share. Sums over sequences are kept apart for groups of them
// that do not depend on the tiles, and added up at the end.
template <typename T>
struct StepLoop {
  const StepCall& call;
  const Kernels<T, T, T>& kernels;
  const StepKernels<T>& step_kernels;
  std::vector<const T*> panels;  // by weight, in the order in which products read them
  int64_t chunk = 1;             // steps at a time
  int64_t group = 1;             // sequences of a group
  std::vector<T*> sums;          // by buffer: [group][width]; null but for sums
  std::vector<int64_t> order;    // of sequences, by falling length
  std::vector<int64_t> lengths;  // in that order

  // The step that runs as number n.
  int64_t StepAt(int64_t n) const { return call.reverse ? call.steps - 1 - n : n; }
};

template <typename T>
class StepTile {
 public:
  // `groups` are the numbers of its groups in rising order; all but the last of the
  // loop have the same number of sequences. The first tile writes what all share.
  StepTile(const StepLoop<T>& loop, std::vector<int64_t> groups, bool first);

  // Runs steps begin .. end - 1, in the order in which they run; at most a chunk.
  void Run(int64_t begin, int64_t end);
  // Writes the last states, and sums that have a row for every sequence.
  void Finish();

  const std::vector<int64_t>& groups() const { return groups_; }
  // How many of its sequences have a step; these are the first ones.
  int64_t ActiveAt(int64_t n) const;
  // A row of a buffer at step n of the chunk that ran last.
  const T* Row(int64_t buffer, int64_t n, int64_t sequence) const {
    return Start(buffer, n) + sequence * loop_.call.program.buffers[buffer].width;
  }

 private:
  struct Live {
    T* at = nullptr;       // at the current step
    T* other = nullptr;    // kState: what kNext writes, and the next step reads
    T* chunk = nullptr;    // what a chunk of steps has; null for an array as it lies
    char* data = nullptr;  // kInput, kOutput: the array, from our first sequence on
  };

  void Locate(int64_t buffer);
  T* Start(int64_t buffer, int64_t n) const;
  void ReadInputs(int64_t end);
  void WriteOutputs(int64_t end);
  void WriteShared(int64_t buffer, int64_t end);
  void Enter(int64_t n);
  void Swap();
  void Execute(const StepInstruction& instruction, int64_t active);
  void Multiply(const StepInstruction& instruction, int64_t active);
  void MultiplyChunk(const StepInstruction& instruction, int64_t end);
  void RunPhase(Phase phase, int64_t active);
  void RunProducts(const StepInstruction& instruction, int64_t rows, T* result);
  void SumGroups(const StepInstruction& instruction, int64_t active);
  void CopyIn(const StepArray& array, int64_t first, const StepBuffer& buffer,
              int64_t rows, T* to) const;
  void CopyOut(const StepArray& array, int64_t first, const StepBuffer& buffer,
               int64_t begin, int64_t end, const T* from) const;
  T* At(const StepView& view) const { return live_[view.buffer].at + view.offset; }
  int64_t size() const { return rows_.size(); }
  // Elements of a buffer that is ours, for one step.
  int64_t Elements(const StepBuffer& buffer) const {
    return buffer.width * (buffer.rows ? size() : 1);
  }

  const StepLoop<T>& loop_;
  const StepProgram& program_;
  const std::vector<int64_t> groups_;
  const bool first_;
  Scratch scratch_;
  int64_t begin_ = 0;             // of the chunk
  std::vector<int64_t> rows_;     // its sequences
  std::vector<int64_t> lengths_;  // of these
  std::vector<Live> live_;        // by buffer
  std::vector<const T*> factors_;
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_STEP_TILE_H_
