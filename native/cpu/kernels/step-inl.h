// The instructions of a step program on vectors.
#ifndef OSTINATO_CPU_KERNELS_STEP_INL_H_
#define OSTINATO_CPU_KERNELS_STEP_INL_H_

#include <cstdint>

#include "cpu/kernels/math-inl.h"
#include "cpu/kernels/pack-inl.h"
#include "cpu/kernels/step-library-inl.h"
#include "cpu/kernels/step_kernels.h"

namespace ostinato::cpu {
namespace {

// Each operation is a function of three vectors, of which it may ignore some.
template <typename V, Operation kOperation>
Reg<V> Compute(Reg<V> a, [[maybe_unused]] Reg<V> b, [[maybe_unused]] Reg<V> c) {
  using O = Operation;
  const Reg<V> zero = V::Set(0), one = V::Set(1);
  if constexpr (kOperation == O::negate) return -a;
  if constexpr (kOperation == O::abs) return V::Max(a, zero - a);  // 0 of -0
  if constexpr (kOperation == O::tanh) return Tanh<V>(a);
  if constexpr (kOperation == O::sigmoid) return Sigmoid<V>(a);
  if constexpr (kOperation == O::exp) return FullExp<V>(a);
  if constexpr (kOperation == O::expm1) return FullExpm1<V>(a);
  if constexpr (kOperation == O::log) return Log<V>(a);
  if constexpr (kOperation == O::log1p) return Log1p<V>(a);
  if constexpr (kOperation == O::sqrt) return V::Sqrt(a);
  if constexpr (kOperation == O::rsqrt) return one / V::Sqrt(a);
  if constexpr (kOperation == O::floor) return V::Floor(a);
  if constexpr (kOperation == O::round) return V::Round(a);
  if constexpr (kOperation == O::sign) return a > zero ? one : (a < zero ? -one : a);
  if constexpr (kOperation == O::is_finite) return a - a == zero ? one : zero;
  if constexpr (kOperation == O::add) return a + b;
  if constexpr (kOperation == O::subtract) return a - b;
  if constexpr (kOperation == O::multiply) return a * b;
  if constexpr (kOperation == O::divide) return a / b;
  // A NaN on either side comes out.
  if constexpr (kOperation == O::max) return a != a ? a : V::Max(a, b);
  if constexpr (kOperation == O::min) return a != a ? a : V::Min(a, b);
  if constexpr (kOperation == O::equal) return a == b ? one : zero;
  if constexpr (kOperation == O::less) return a < b ? one : zero;
  if constexpr (kOperation == O::less_equal) return a <= b ? one : zero;
  if constexpr (kOperation == O::multiply_add) return V::MulAdd(a, b, c);
  if constexpr (kOperation == O::multiply_subtract) return V::MulAdd(-a, b, c);
  if constexpr (kOperation == O::select) return a != zero ? b : c;
  return FromLibrary<V, kOperation>(a, b);
}

// The vectors of one operand along a row.
template <typename V, bool kSplat>
class Along {
 public:
  using T = typename V::Element;

  explicit Along(const T* row) : row_(row), first_(kSplat ? V::Set(*row) : V::Set(0)) {}

  Reg<V> At(int64_t i) const {
    if constexpr (kSplat) return first_;
    return V::Load(row_ + i);
  }
  Reg<V> At(int64_t i, int64_t n) const {
    if constexpr (kSplat) return first_;
    return V::LoadPart(row_ + i, n);
  }

 private:
  const T* row_;
  Reg<V> first_;
};

// Operands that an operation does not have are the first one once more.
template <typename V, Operation kOperation, int kSplats>
void Row(typename V::Element* out, const typename V::Element* const (&operands)[3],
         int64_t width) {
  constexpr int kOperands = kStepOperands[static_cast<int>(kOperation)];
  constexpr int kB = kOperands > 1 ? 1 : 0, kC = kOperands > 2 ? 2 : 0;
  const Along<V, (kSplats & 1) != 0> a(operands[0]);
  const Along<V, (kSplats >> kB & 1) != 0> b(operands[kB]);
  const Along<V, (kSplats >> kC & 1) != 0> c(operands[kC]);
  int64_t i = 0;
  for (; i + V::kLanes <= width; i += V::kLanes) {
    V::Store(out + i, Compute<V, kOperation>(a.At(i), b.At(i), c.At(i)));
  }
  if (const int64_t n = width - i; n > 0) {
    const Reg<V> last = Compute<V, kOperation>(a.At(i, n), b.At(i, n), c.At(i, n));
    V::StorePart(out + i, last, n);
  }
}

template <typename V, Operation kOperation, int kSplats>
constexpr StepRow<typename V::Element> RowOf() {
  constexpr int kOperands = kStepOperands[static_cast<int>(kOperation)];
  if constexpr (kOperation >= Operation::transpose)
    return nullptr;
  else
    return Row<V, kOperation, kSplats & ((1 << kOperands) - 1)>;
}

template <typename V, Operation kOperation>
inline constexpr StepRows<typename V::Element> kRowsOf = {
    {RowOf<V, kOperation, 0>(), RowOf<V, kOperation, 1>(), RowOf<V, kOperation, 2>(),
     RowOf<V, kOperation, 3>(), RowOf<V, kOperation, 4>(), RowOf<V, kOperation, 5>(),
     RowOf<V, kOperation, 6>(), RowOf<V, kOperation, 7>()}};

template <typename V, Operation kOperation>
void Elementwise(typename V::Element* out, int64_t out_stride,
                 const StepOperand<typename V::Element> (&operands)[3], int64_t rows,
                 int64_t width) {
  constexpr int kOperands = kStepOperands[static_cast<int>(kOperation)];
  bool whole = out_stride == width && rows > 0;
  int splats = 0;
  for (int k = 0; k < kOperands; ++k) {
    const bool splat = operands[k].splat;
    splats |= splat << k;
    whole = whole && operands[k].row_stride == (splat ? 0 : width);
  }
  if (whole) {  // one long row
    width *= rows;
    rows = 1;
  }
  const auto row = kRowsOf<V, kOperation>.by_splats[splats];
  const typename V::Element* from[3] = {operands[0].data, operands[1].data,
                                        operands[2].data};
  for (int64_t r = 0; r < rows; ++r, out += out_stride) {
    row(out, from, width);
    for (int k = 0; k < kOperands; ++k) from[k] += operands[k].row_stride;
  }
}

// Element i of a row.
template <typename T>
T ElementOf(const StepOperand<T>& operand, int64_t r, int64_t i) {
  return operand.data[r * operand.row_stride + (operand.splat ? 0 : i)];
}

template <typename V>
Reg<V> VectorOf(const StepOperand<typename V::Element>& operand, int64_t r, int64_t i) {
  const auto* row = operand.data + r * operand.row_stride;
  return operand.splat ? V::Set(*row) : V::Load(row + i);
}

template <typename V>
Reg<V> VectorOf(const StepOperand<typename V::Element>& operand, int64_t r, int64_t i,
                int64_t n) {
  const auto* row = operand.data + r * operand.row_stride;
  return operand.splat ? V::Set(*row) : V::LoadPart(row + i, n);
}

template <typename V, bool kProduct>
void RowSum(typename V::Element* out, int64_t out_stride,
            const StepOperand<typename V::Element> (&operands)[3], int64_t rows,
            int64_t width) {
  using T = typename V::Element;
  constexpr int64_t kChains = 4, kStep = kChains * V::kLanes;
  const StepOperand<T>& a = operands[0];
  const StepOperand<T>& b = operands[kProduct ? 1 : 0];
  if (width < V::kLanes) {
    for (int64_t r = 0; r < rows; ++r, out += out_stride) {
      T total = 0;
      for (int64_t i = 0; i < width; ++i) {
        total += ElementOf(a, r, i) * (kProduct ? ElementOf(b, r, i) : T{1});
      }
      *out = total;
    }
    return;
  }
  for (int64_t r = 0; r < rows; ++r, out += out_stride) {
    Reg<V> sums[kChains] = {V::Set(0), V::Set(0), V::Set(0), V::Set(0)};
    Reg<V> earlier = V::Set(0);
    const auto add = [&](Reg<V>& sum, int64_t i) {
      const Reg<V> x = VectorOf<V>(a, r, i);
      sum = kProduct ? V::MulAdd(x, VectorOf<V>(b, r, i), sum) : sum + x;
    };
    const auto sum = [&] { return (sums[0] + sums[1]) + (sums[2] + sums[3]); };
    int64_t i = 0;
    for (int64_t left = kMostAdded; i + kStep <= width; i += kStep, --left) {
      if (left == 0) {
        earlier += sum();
        for (Reg<V>& one : sums) one = V::Set(0);
        left = kMostAdded;
      }
#pragma GCC unroll 4
      for (int k = 0; k < kChains; ++k) add(sums[k], i + k * V::kLanes);
    }
    for (; i + V::kLanes <= width; i += V::kLanes) add(sums[0], i);
    T lanes[V::kLanes], total = 0;
    V::Store(lanes, earlier + sum());
    for (const T lane : lanes) total += lane;
    for (; i < width; ++i) {
      total += ElementOf(a, r, i) * (kProduct ? ElementOf(b, r, i) : T{1});
    }
    *out = total;
  }
}

template <typename V>
void Transpose(typename V::Element* out, int64_t out_stride,
               const StepOperand<typename V::Element> (&operands)[3], int64_t rows,
               int64_t width) {
  const auto& a = operands[0];
  TransposeMatrix<V>(a.data, a.row_stride, width, rows, out, out_stride);
}

enum class OverRows { kSum, kSumProduct, kMax };

template <typename V, OverRows kOver>
Reg<V> Combine(Reg<V> result, Reg<V> a, Reg<V> b) {
  if constexpr (kOver == OverRows::kSum) return result + a;
  if constexpr (kOver == OverRows::kSumProduct) return V::MulAdd(a, b, result);
  return Compute<V, Operation::max>(a, result, result);
}

template <typename V>
void RowMax(typename V::Element* out, int64_t out_stride,
            const StepOperand<typename V::Element> (&operands)[3], int64_t rows,
            int64_t width) {
  using T = typename V::Element;
  constexpr auto kLarger = Combine<V, OverRows::kMax>;
  const StepOperand<T>& a = operands[0];
  for (int64_t r = 0; r < rows; ++r, out += out_stride) {
    // Repeated, an element does not change a maximum.
    Reg<V> most = V::Set(ElementOf(a, r, 0)), x = most;
    int64_t i = 0;
    for (; i + V::kLanes <= width; i += V::kLanes) {
      x = VectorOf<V>(a, r, i);
      most = kLarger(most, x, x);
    }
    for (; i < width; ++i) {
      x = V::Set(ElementOf(a, r, i));
      most = kLarger(most, x, x);
    }
    T lanes[V::kLanes];
    V::Store(lanes, most);
    if (width >= V::kLanes) {  // else all lanes are the same
      for (const T lane : lanes) {
        x = V::Set(lane);
        most = kLarger(most, x, x);
      }
      V::Store(lanes, most);
    }
    *out = lanes[0];
  }
}

// Combines `rows` rows with a vector of the result or several; combine(sums, r) does so
// with row r.
template <typename V, OverRows kOver, int kChains, typename F>
void CombineRows(Reg<V> (&sums)[kChains], int64_t rows, const F& combine) {
  Reg<V> earlier[kChains];
  bool any = false;
  for (int64_t begin = 0; begin < rows; begin += kMostAdded) {
    if (kOver != OverRows::kMax && begin > 0) {
      for (int k = 0; k < kChains; ++k) {
        earlier[k] = any ? earlier[k] + sums[k] : sums[k];
        sums[k] = V::Set(0);
      }
      any = true;
    }
    const int64_t end = rows - begin < kMostAdded ? rows : begin + kMostAdded;
    for (int64_t r = begin; r < end; ++r) combine(sums, r);
  }
  for (int k = 0; k < kChains && any; ++k) sums[k] += earlier[k];
}

template <typename V, OverRows kOver>
void Columns(typename V::Element* out, int64_t,
             const StepOperand<typename V::Element> (&operands)[3], int64_t rows,
             int64_t width) {
  constexpr int64_t kChains = 4, kStep = kChains * V::kLanes;
  const auto& a = operands[0];
  const auto& b = operands[kOver == OverRows::kSumProduct ? 1 : 0];
  int64_t i = 0;
  for (; i + kStep <= width; i += kStep) {
    Reg<V> sums[kChains];
#pragma GCC unroll 4
    for (int k = 0; k < kChains; ++k) sums[k] = V::Load(out + i + k * V::kLanes);
    CombineRows<V, kOver>(sums, rows, [&](Reg<V>(&to)[kChains], int64_t r) {
#pragma GCC unroll 4
      for (int k = 0; k < kChains; ++k) {
        const int64_t at = i + k * V::kLanes;
        to[k] = Combine<V, kOver>(to[k], VectorOf<V>(a, r, at), VectorOf<V>(b, r, at));
      }
    });
#pragma GCC unroll 4
    for (int k = 0; k < kChains; ++k) V::Store(out + i + k * V::kLanes, sums[k]);
  }
  for (; i < width; i += V::kLanes) {
    const int64_t n = width - i < V::kLanes ? width - i : V::kLanes;
    Reg<V> sum[1] = {Load<V>(out + i, n)};
    CombineRows<V, kOver>(sum, rows, [&](Reg<V>(&to)[1], int64_t r) {
      if (n == V::kLanes) {
        to[0] = Combine<V, kOver>(to[0], VectorOf<V>(a, r, i), VectorOf<V>(b, r, i));
      } else {
        to[0] =
            Combine<V, kOver>(to[0], VectorOf<V>(a, r, i, n), VectorOf<V>(b, r, i, n));
      }
    });
    Store<V>(out + i, sum[0], n);
  }
}

// Reads or writes the row that an index names.
template <typename V, Operation kOperation>
void AtRow(typename V::Element* out, int64_t out_stride,
           const StepOperand<typename V::Element> (&operands)[3], int64_t rows,
           int64_t width) {
  using T = typename V::Element;
  const T index = *operands[1].data;
  if (!(index >= T{0} && index < static_cast<T>(rows))) return;  // nor if it is NaN
  const auto row = static_cast<int64_t>(index);
  const StepOperand<T>& a = operands[0];
  const int splat = a.splat ? 1 : 0;
  if constexpr (kOperation == Operation::take_row) {
    const T* const from[3] = {a.data + row * a.row_stride};
    kRowsOf<V, Operation::copy>.by_splats[splat](out, from, width);
  } else {
    out += row * out_stride;
    const T* const from[3] = {a.data, out};
    constexpr auto kWrite =
        kOperation == Operation::set_row ? Operation::copy : Operation::add;
    kRowsOf<V, kWrite>.by_splats[splat](out, from, width);
  }
}

template <typename V, Operation kOperation>
constexpr StepFunction<typename V::Element> FunctionOf() {
  using O = Operation;
  if constexpr (kOperation == O::transpose)
    return Transpose<V>;
  else if constexpr (kOperation == O::row_sum)
    return RowSum<V, false>;
  else if constexpr (kOperation == O::row_sum_product)
    return RowSum<V, true>;
  else if constexpr (kOperation == O::row_max)
    return RowMax<V>;
  else if constexpr (kOperation == O::column_sum)
    return Columns<V, OverRows::kSum>;
  else if constexpr (kOperation == O::column_sum_product)
    return Columns<V, OverRows::kSumProduct>;
  else if constexpr (kOperation == O::column_max)
    return Columns<V, OverRows::kMax>;
  else if constexpr (Indexes(kOperation))
    return AtRow<V, kOperation>;
  else
    return Elementwise<V, kOperation>;
}

// StepKernels::narrow.
template <typename V>
void NarrowAll(const typename V::Element* from, int64_t count, BFloat16* to) {
  for (int64_t i = 0; i < count; i += V::kLanes) {
    Store<V>(to + i, Load<V>(from + i, count - i), count - i);
  }
}

template <typename V>
constexpr auto NarrowOf() -> void (*)(const typename V::Element*, int64_t, BFloat16*) {
  if constexpr (sizeof(typename V::Element) == 4) {
    return NarrowAll<V>;
  } else {
    return nullptr;
  }
}

template <typename V>
constexpr StepKernels<typename V::Element> MakeStepKernels() {
#define OSTINATO_STEP_FUNCTION(name, operands) FunctionOf<V, Operation::name>(),
#define OSTINATO_STEP_ROWS(name, operands) kRowsOf<V, Operation::name>,
  return {{OSTINATO_STEP_OPERATIONS(OSTINATO_STEP_FUNCTION)},
          {OSTINATO_STEP_OPERATIONS(OSTINATO_STEP_ROWS)},
          NarrowOf<V>()};
#undef OSTINATO_STEP_FUNCTION
#undef OSTINATO_STEP_ROWS
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_STEP_INL_H_
