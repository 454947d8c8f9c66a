// The instructions of a step program, compiled once for every instruction set.
//
// A step program is what runs between the products of a user's step function. Each
// instruction computes a matrix of some rows from up to three operands, or one number a
// row. Everything is float or double; the loop around converts 16-bit values.
#ifndef OSTINATO_CPU_KERNELS_STEP_KERNELS_H_
#define OSTINATO_CPU_KERNELS_STEP_KERNELS_H_

#include <cstdint>

#include "cpu/runtime/features.h"

namespace ostinato::cpu {

// The numbers are those of `_OPERATIONS` in _step/program.py.
enum class Operation : int32_t {
  // One operand.
  kCopy = 0,
  kNegate,
  kAbs,
  kTanh,
  kSigmoid,
  kExp,
  kLog,
  kLog1p,
  kSqrt,
  kRsqrt,
  kFloor,
  kRound,
  kSign,
  kIsFinite,
  // Two operands.
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kMax,
  kMin,
  kEqual,      // comparisons return 1 or 0
  kLess,
  kLessEqual,
  // Three operands.
  kMultiplyAdd,       // a * b + c
  kMultiplySubtract,  // c - a * b
  kSelect,            // a != 0 ? b : c
  // Over the elements of a row; the result is one number a row.
  kRowSum,         // of a
  kRowSumProduct,  // of a * b
  kRowMax,         // of a
};
inline constexpr int kNumOperations = static_cast<int>(Operation::kRowMax) + 1;

// An operand of `rows` rows: row r begins at data + r * row_stride. Where `splat` is
// set, every element of a row is its first one.
template <typename T>
struct StepOperand {
  const T* data = nullptr;
  int64_t row_stride = 0;
  bool splat = false;
};

// out[r][i] for r < rows, i < width; of a row operation, out[r][0], `width` being that of
// the operands. Rows of `out` are out_stride elements apart. `out` may be an operand that
// is read at the same place.
template <typename T>
using StepFunction = void (*)(T* out, int64_t out_stride,
                              const StepOperand<T> (&operands)[3], int64_t rows,
                              int64_t width);

template <typename T>
struct StepKernels {
  StepFunction<T> function[kNumOperations];
};

struct StepKernelSet {
  const StepKernels<float>* f32;
  const StepKernels<double>* f64;
};

// The tables for `isa`, or for the highest level below it that was compiled.
const StepKernelSet& StepKernelsFor(Isa isa) noexcept;

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_STEP_KERNELS_H_
