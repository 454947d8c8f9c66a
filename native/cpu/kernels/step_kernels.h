// The instructions of a step program, compiled once for every instruction set.
//
// A step program is what a user's step function computes between its products. An
// instruction computes a matrix from up to three matrices: element by element, as sums
// or maxima over its rows or columns, as a transpose, or by one row of it.
#ifndef OSTINATO_CPU_KERNELS_STEP_KERNELS_H_
#define OSTINATO_CPU_KERNELS_STEP_KERNELS_H_

#include <cstdint>

namespace ostinato::cpu {

// Values that are added up one after another, before their sum is put aside: a single
// chain of additions loses digits. Sums of so many rows continue the result's chain.
inline constexpr int64_t kMostAdded = 256;

// X(name, operands); program.py finds the number of an operation by its name.
// clang-format off
#define OSTINATO_STEP_OPERATIONS(X)                                                 \
  X(copy, 1) X(negate, 1) X(abs, 1) X(tanh, 1) X(sigmoid, 1) X(exp, 1) X(expm1, 1)  \
  X(log, 1) X(log1p, 1) X(sqrt, 1) X(rsqrt, 1) X(floor, 1) X(round, 1) X(sign, 1)   \
  X(is_finite, 1) X(sin, 1) X(cos, 1) X(tan, 1) X(asin, 1) X(acos, 1) X(atan, 1)    \
  X(sinh, 1) X(cosh, 1) X(asinh, 1) X(acosh, 1) X(atanh, 1) X(erf, 1) X(erfc, 1)    \
  X(cbrt, 1) X(add, 2) X(subtract, 2) X(multiply, 2) X(divide, 2) X(max, 2)         \
  X(min, 2) X(equal, 2) /* comparisons return 1 or 0 */ X(less, 2) X(less_equal, 2) \
  X(power, 2) X(atan2, 2) X(remainder, 2) /* has the sign of the dividend */        \
  X(multiply_add, 3) /* a b + c */ X(multiply_subtract, 3) /* c - a b */            \
  X(select, 3) /* a != 0 ? b : c */ X(transpose, 1)                                 \
  X(row_sum, 1) X(row_sum_product, 2) X(row_max, 1) /* over the columns */          \
  X(column_sum, 1) X(column_sum_product, 2) X(column_max, 1) /* over the rows */    \
  X(take_row, 2) /* row b of a */ X(set_row, 2) X(add_row, 2) /* a to row b */
// clang-format on

enum class Operation : int32_t {
#define OSTINATO_STEP_NAME(name, operands) name,
  OSTINATO_STEP_OPERATIONS(OSTINATO_STEP_NAME)
#undef OSTINATO_STEP_NAME
};
inline constexpr int kStepOperands[] = {
#define OSTINATO_STEP_NAME(name, operands) operands,
    OSTINATO_STEP_OPERATIONS(OSTINATO_STEP_NAME)
#undef OSTINATO_STEP_NAME
};
inline constexpr int kNumOperations = sizeof(kStepOperands) / sizeof(int);

constexpr bool ReducesRow(Operation operation) {
  return operation >= Operation::row_sum && operation <= Operation::row_max;
}
constexpr bool ReducesColumn(Operation operation) {
  return operation >= Operation::column_sum && operation <= Operation::take_row;
}
// Whether it names one row of a matrix, the result's if it writes there.
constexpr bool Indexes(Operation operation) { return operation >= Operation::take_row; }
// Whether each row of the result is computed from the same rows of the operands alone.
constexpr bool ComputesRows(Operation operation) {
  return operation < Operation::transpose || ReducesRow(operation);
}

// Whether it takes many instructions of a processor for each element.
constexpr bool IsFunction(Operation operation) {
  return (operation >= Operation::tanh && operation <= Operation::log1p) ||
         (operation >= Operation::sin && operation <= Operation::cbrt) ||
         (operation >= Operation::power && operation <= Operation::remainder);
}

// A matrix: row r begins at data + r * row_stride. Where `splat` is set, the elements
// of a row are all its first one.
template <typename T>
struct StepOperand {
  const T* data = nullptr;
  int64_t row_stride = 0;
  bool splat = false;
};

// Element by element: out[r][i] for r < rows, i < width. Of a transpose the operand has
// `width` rows of `rows` elements, and is no splat. Over columns: out[r][0], of
// operands of `width` columns. Over rows: out[0][i], which sums are added to, and which
// a maximum is compared with. With an index, the first element of the second operand:
// take_row writes out[0], of a matrix of `rows`, and the others the row of `out`, which
// has so many; an index of no row leaves `out` as it is. Rows of `out` are out_stride
// elements apart. `out` may be an operand that is read where it is written. No element
// depends on how many rows a call has; sums over rows are taken in their order.
template <typename T>
using StepFunction = void (*)(T* out, int64_t out_stride,
                              const StepOperand<T> (&operands)[3], int64_t rows,
                              int64_t width);

// The same for one row: out[i] for i < width, of rows of operands.
template <typename T>
using StepRow = void (*)(T* out, const T* const (&operands)[3], int64_t width);

// By which operands are splats, bit k for operand k; null where an operation reduces.
template <typename T>
struct StepRows {
  StepRow<T> by_splats[8];
};

struct BFloat16;

template <typename T>
struct StepKernels {
  StepFunction<T> function[kNumOperations];
  StepRows<T> rows[kNumOperations];
  // to[i] = from[i] for i < count, to the nearest; null where T is double.
  void (*narrow)(const T* from, int64_t count, BFloat16* to);
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_STEP_KERNELS_H_
