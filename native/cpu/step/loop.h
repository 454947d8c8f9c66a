// Loops over the steps of a program.
#ifndef OSTINATO_CPU_STEP_LOOP_H_
#define OSTINATO_CPU_STEP_LOOP_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/step/program.h"

namespace ostinato::cpu {

// An array of float or double, or of bfloat16 where the program computes in float.
struct StepArray {
  void* data;
  int64_t elements;
  int64_t bytes;  // of an element
};

struct StepCall {
  const StepProgram& program;
  const double* constants;
  int64_t num_constants;
  std::vector<StepArray> operands, results;
  int64_t steps, batch;
  bool reverse;            // the last step runs first
  const int32_t* lengths;  // [batch], or null: every sequence has all steps
  // -1; or with lengths: what has a row for every sequence at every step is
  // [capacity, ...], the steps of one sequence after those of another.
  int64_t capacity = -1;
};

// The weights of a program in the order in which products read them, for many calls
// whose operands have the same weights.
template <typename T>
class StepPanels {
 public:
  // Throws std::invalid_argument if the operands of `call` lack a weight.
  explicit StepPanels(const StepCall& call);

  const std::vector<const T*>& panels() const { return panels_; }

 private:
  struct Free {
    void operator()(void* memory) const noexcept;
  };
  std::unique_ptr<void, Free> memory_;
  std::vector<const T*> panels_;
};

extern template class StepPanels<float>;
extern template class StepPanels<double>;

// Runs a loop. A sequence runs the steps before its length, and its states stay as they
// are at the others; outputs of these, and those of unused capacity, are 0. The bits of
// all results are the same for every number of threads. A state may be read and written
// in one place. Weights are packed for this call unless `packed` has them. Throws
// std::invalid_argument if arrays have other sizes than the program wants.
template <typename T>
void RunSteps(const StepCall& call, const StepPanels<T>* packed = nullptr);

extern template void RunSteps<float>(const StepCall& call, const StepPanels<float>*);
extern template void RunSteps<double>(const StepCall& call, const StepPanels<double>*);

// The loops of several members, such as the models of an ensemble. The arrays of a call
// are those of the first member; those of the others follow where they have their own,
// as they have of all results.
struct StepMembers {
  int64_t count;
  std::vector<bool> own_operands;
  bool own_lengths;
};

// Runs the loop of each member, on threads of their own if there are enough members.
// The bits of all results are those of RunSteps for each. Throws as that does.
template <typename T>
void RunMembers(const StepCall& first, const StepMembers& members);

extern template void RunMembers<float>(const StepCall& first, const StepMembers&);
extern template void RunMembers<double>(const StepCall& first, const StepMembers&);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_STEP_LOOP_H_
