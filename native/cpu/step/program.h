// Step programs: what a loop runs at each of its steps, row by row.
//
// A program computes new states and outputs of a step from its inputs and states. Its
// values are matrices with a row for every sequence, or values that all rows share. No
// row depends on another, so rows may run in any order, apart or together.
#ifndef OSTINATO_CPU_STEP_PROGRAM_H_
#define OSTINATO_CPU_STEP_PROGRAM_H_

#include <cstdint>
#include <vector>

#include "cpu/kernels/step_kernels.h"

namespace ostinato::cpu {

// Where the values of a buffer are; the numbers are those of `Place` in program.py.
enum class Place : int32_t {
  kConstant = 0,   // numbers of the program
  kInvariant = 1,  // an operand, the same at every step
  kInput = 2,      // an operand [T, ...]
  kOutput = 3,     // a result [T, ...]
  kState = 4,      // a state before the step; its first value is an operand
  kNext = 5,       // the same state after the step; its last value is a result
  kLocal = 6,      // lives within a step
  kSum = 7,        // a result that the steps add to
  kChunk = 8,      // lives for a chunk of steps
};

// When an instruction runs. Products of inputs run for all steps of a chunk before
// these, and what no step reads runs after them.
enum class Phase : int32_t { kAhead = 0, kStep = 1, kAfter = 2 };

struct StepBuffer {
  Place place;
  int64_t array;   // which operand or result; kNext: which buffer is its kState
  bool rows;       // whether there is a row for every sequence, or one for all
  int64_t width;   // elements of a row
  int64_t stride;  // from row to row; the same as `width` but for products' results
  int64_t offset;  // kConstant: the first number; kLocal: see StepProgram
  // kState: the state after the step is written over it. Nothing reads it by then.
  bool in_place = false;
};

// An operand of an instruction on `inner` rows of `width` for every sequence.
struct StepView {
  int64_t buffer;        // -1: absent
  int64_t offset;        // of the first element
  int64_t row_stride;    // from sequence to sequence
  int64_t inner_stride;  // from row to row of a sequence
  bool splat;            // one element for all of a row
};

struct StepInstruction {
  int64_t operation;  // an Operation, or kProduct
  bool rows;          // whether it computes something for every sequence
  int64_t inner, width;
  StepView result;
  StepView operands[3];  // of a product, the others are vectors that it starts from
  int64_t weight;  // of a product; `continues`: it adds to what stands in the result
  bool continues;
  Phase phase;
};
inline constexpr int64_t kProduct = -1;

// Rows that an instruction computes or reads for a sequence.
inline int64_t RowsTouched(const StepInstruction& i) {
  return i.operation != kProduct && Indexes(static_cast<Operation>(i.operation))
             ? 1
             : i.inner;
}

// result[i][j] = sum over steps and sequences of a[i] * b[j]: the gradient of a matrix.
// Both have a row for every sequence, from `offset` on, and so many elements.
struct StepGradient {
  struct Factor {
    int64_t buffer, offset, width;
  };
  Factor a, b;
  int64_t result;  // which one of the loop
};

// A matrix [depth, columns] in an operand, or if transposed [columns, depth].
struct StepWeight {
  int64_t array, offset, depth, columns, stride;
  bool transposed;
  bool half;  // whether products may round their factors to bfloat16
};

struct StepProgram {
  std::vector<StepBuffer> buffers;
  std::vector<StepWeight> weights;
  std::vector<StepInstruction> instructions;
  std::vector<StepGradient> gradients;
  // Local elements for every sequence, and for all together. A local buffer with rows
  // begins at `offset` times the number of sequences.
  int64_t row_elements, shared_elements;
};

// Reads what program.py has written; throws std::invalid_argument if it is cut.
StepProgram DecodeProgram(const int64_t* numbers, int64_t count);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_STEP_PROGRAM_H_
