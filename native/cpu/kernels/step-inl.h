// The instructions of a step program on vectors.
#ifndef OSTINATO_CPU_KERNELS_STEP_INL_H_
#define OSTINATO_CPU_KERNELS_STEP_INL_H_

#include <cstdint>
#include <limits>

#include "cpu/kernels/math-inl.h"
#include "cpu/kernels/step_kernels.h"

namespace ostinato::cpu {
namespace {

// Each operation is a function of three vectors, of which it may ignore some.
template <typename V, Operation kOperation>
Reg<V> Compute(Reg<V> a, Reg<V> b, Reg<V> c) {
  const Reg<V> zero = V::Set(0), one = V::Set(1);
  switch (kOperation) {
    case Operation::kCopy:
      return a;
    case Operation::kNegate:
      return -a;
    case Operation::kAbs:
      return V::Max(a, -a);
    case Operation::kTanh:
      return Tanh<V>(a);
    case Operation::kSigmoid:
      return Sigmoid<V>(a);
    case Operation::kExp:
      return FullExp<V>(a);
    case Operation::kLog:
      return Log<V>(a);
    case Operation::kLog1p:
      return Log1p<V>(a);
    case Operation::kSqrt:
      return V::Sqrt(a);
    case Operation::kRsqrt:
      return one / V::Sqrt(a);
    case Operation::kFloor:
      return V::Floor(a);
    case Operation::kRound:
      return V::Round(a);
    case Operation::kSign:
      return a > zero ? one : (a < zero ? -one : a);
    case Operation::kIsFinite:
      return a - a == zero ? one : zero;
    case Operation::kAdd:
      return a + b;
    case Operation::kSubtract:
      return a - b;
    case Operation::kMultiply:
      return a * b;
    case Operation::kDivide:
      return a / b;
    case Operation::kMax:  // a NaN on either side comes out
      return a != a ? a : V::Max(a, b);
    case Operation::kMin:
      return a != a ? a : V::Min(a, b);
    case Operation::kEqual:
      return a == b ? one : zero;
    case Operation::kLess:
      return a < b ? one : zero;
    case Operation::kLessEqual:
      return a <= b ? one : zero;
    case Operation::kMultiplyAdd:
      return V::MulAdd(a, b, c);
    case Operation::kMultiplySubtract:
      return V::MulAdd(-a, b, c);
    case Operation::kSelect:
      return a != zero ? b : c;
    default:
      return a;
  }
}

constexpr int NumOperands(Operation operation) {
  if (operation >= Operation::kRowSum) {
    return operation == Operation::kRowSumProduct ? 2 : 1;
  }
  if (operation >= Operation::kMultiplyAdd) return 3;
  return operation >= Operation::kAdd ? 2 : 1;
}

// The vectors of one operand along a row.
template <typename V>
struct Along {
  using T = typename V::Element;
  const T* row;
  Reg<V> first;
  bool splat;

  Reg<V> At(int64_t i) const { return splat ? first : V::Load(row + i); }
  Reg<V> At(int64_t i, int64_t n) const {
    return splat ? first : V::LoadPart(row + i, n);
  }
};

template <typename V>
Along<V> AlongRow(const StepOperand<typename V::Element>& operand, int64_t r) {
  const auto* row = operand.data + r * operand.row_stride;
  return {row, operand.splat ? V::Set(*row) : V::Set(0), operand.splat};
}

template <typename V, Operation kOperation>
void Elementwise(typename V::Element* out, int64_t out_stride,
                 const StepOperand<typename V::Element> (&operands)[3], int64_t rows,
                 int64_t width) {
  constexpr int kOperands = NumOperands(kOperation);
  bool whole = out_stride == width;
  for (int k = 0; k < kOperands; ++k) {
    whole = whole && !operands[k].splat && operands[k].row_stride == width;
  }
  if (whole) {  // one long row
    width *= rows;
    rows = 1;
  }
  for (int64_t r = 0; r < rows; ++r, out += out_stride) {
    const Along<V> a = AlongRow<V>(operands[0], r);
    const Along<V> b = kOperands > 1 ? AlongRow<V>(operands[1], r) : a;
    const Along<V> c = kOperands > 2 ? AlongRow<V>(operands[2], r) : a;
    int64_t i = 0;
    for (; i + V::kLanes <= width; i += V::kLanes) {
      V::Store(out + i, Compute<V, kOperation>(a.At(i), b.At(i), c.At(i)));
    }
    if (const int64_t n = width - i; n > 0) {
      V::StorePart(out + i, Compute<V, kOperation>(a.At(i, n), b.At(i, n), c.At(i, n)), n);
    }
  }
}

// The sum of the lanes, in their order.
template <typename V>
typename V::Element SumLanes(Reg<V> v) {
  typename V::Element lanes[V::kLanes], sum = 0;
  V::Store(lanes, v);
  for (const auto x : lanes) sum += x;
  return sum;
}

template <typename V, bool kProduct>
void RowSum(typename V::Element* out, int64_t out_stride,
            const StepOperand<typename V::Element> (&operands)[3], int64_t rows,
            int64_t width) {
  for (int64_t r = 0; r < rows; ++r, out += out_stride) {
    const Along<V> a = AlongRow<V>(operands[0], r);
    const Along<V> b = kProduct ? AlongRow<V>(operands[1], r) : a;
    Reg<V> sum = V::Set(0);
    const auto add = [&](Reg<V> x, Reg<V> y) {
      sum = kProduct ? V::MulAdd(x, y, sum) : sum + x;
    };
    int64_t i = 0;
    for (; i + V::kLanes <= width; i += V::kLanes) add(a.At(i), b.At(i));
    // A splat operand has its value in the lanes past the end, too.
    const int64_t n = width - i;
    auto total = SumLanes<V>(sum);
    for (int64_t k = 0; k < n; ++k) {
      const auto x = operands[0].splat ? a.row[0] : a.row[i + k];
      const auto y = !kProduct ? 1 : operands[1].splat ? b.row[0] : b.row[i + k];
      total += x * y;
    }
    *out = total;
  }
}

template <typename V>
void RowMax(typename V::Element* out, int64_t out_stride,
            const StepOperand<typename V::Element> (&operands)[3], int64_t rows,
            int64_t width) {
  using T = typename V::Element;
  for (int64_t r = 0; r < rows; ++r, out += out_stride) {
    const Along<V> a = AlongRow<V>(operands[0], r);
    T most = -std::numeric_limits<T>::infinity();
    for (int64_t i = 0; i < width; ++i) {
      const T x = a.splat ? a.row[0] : a.row[i];
      most = x > most || x != x ? x : most;
      if (x != x) break;  // a NaN stays
    }
    *out = most;
  }
}

template <typename V, int... kElementwise>
constexpr StepKernels<typename V::Element> MakeStepKernels(
    std::integer_sequence<int, kElementwise...>) {
  return {{Elementwise<V, static_cast<Operation>(kElementwise)>..., RowSum<V, false>,
           RowSum<V, true>, RowMax<V>}};
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_STEP_INL_H_
