// Every operation of step programs, at every instruction set that this machine has,
// against plain loops over elements.
#ifndef OSTINATO_TESTS_KERNELS_STEPS_H_
#define OSTINATO_TESTS_KERNELS_STEPS_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "cpu/runtime/features.h"
#include "cpu/runtime/fp_state.h"
#include "tests/check.h"
#include "tests/guarded.h"
#include "tests/kernels_fixture.h"
#include "tests/step_operations.h"

namespace ostinato::testing {

using cpu::Indexes;
using cpu::kNumOperations;
using cpu::kStepOperands;
using cpu::Operation;
using cpu::ReducesColumn;
using cpu::ReducesRow;
using cpu::StepKernels;
using cpu::StepOperand;

inline constexpr const char* kOperationNames[] = {
#define OSTINATO_STEP_NAME(name, operands) #name,
    OSTINATO_STEP_OPERATIONS(OSTINATO_STEP_NAME)
#undef OSTINATO_STEP_NAME
};

template <typename T>
bool Same(T a, T b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}

template <typename T>
class OperationChecker {
 public:
  OperationChecker(const StepKernels<T>& kernels, std::string level)
      : kernels_(kernels), level_(std::move(level)) {}

  void CheckAll() {
    for (int index = 0; index < kNumOperations; ++index) {
      operation_ = static_cast<Operation>(index);
      count_ = kStepOperands[index];
      if (Indexes(operation_)) {
        CheckIndexing();
        continue;
      }
      if (operation_ == Operation::transpose) {
        CheckTransposing();
        continue;
      }
      for (const bool specials : {false, true}) {
        FillOperands(specials);
        for (const int64_t width : {1, 3, 16, 17, 67}) {
          for (const int64_t rows : {0, 1, 5}) CheckSize(rows, width);
        }
      }
    }
  }

 private:
  static constexpr int64_t kMost = 5 * 70;
  enum Layout { kWhole, kWithGaps, kShared };
  struct Output {
    T* data;
    int64_t rows, width, stride;
    T& At(int64_t r, int64_t i) const { return data[r * stride + i]; }
  };
  using Operands = StepOperand<T>[3];

  void FillOperands(bool specials) {
    const T infinity = std::numeric_limits<T>::infinity();
    const T nan = std::numeric_limits<T>::quiet_NaN();
    const T smallest = std::numeric_limits<T>::min();
    const T largest = std::numeric_limits<T>::max();
    std::vector<T> some{nan,  infinity, -infinity, 0,    -T{0}, 1,    -1,   T(0.5),
                        2.5f, -2.5f,    -1.5f,     1e-6, -1e-6, -110, 90,   88.5f,
                        41,   -41,      20,        -20,  1e-3,  -88,  -746, 709};
    // Sums and products of these overflow or underflow in some orders alone.
    if (count_ == 1 && !Reduces()) some.insert(some.end(), {largest, smallest});
    const bool exponential = operation_ == Operation::exp;
    const double limit = !exponential ? 4 : sizeof(T) == 4 ? 88 : 708;
    for (int k = 0; k < 3; ++k) {
      random_.Fill(arrays_[k], limit);
      for (int64_t i = k; specials && i < kMost; i += 3 + k) {
        arrays_[k][i] = some[(i / (3 + k) + 7 * k) % some.size()];
      }
    }
  }

  bool Reduces() const { return ReducesRow(operation_) || ReducesColumn(operation_); }

  // Indices of every row, and of none; all else stays as it is.
  void CheckIndexing() {
    FillOperands(false);
    const T nan = std::numeric_limits<T>::quiet_NaN();
    for (const int64_t width : {1, 3, 16, 17, 67}) {
      for (const int64_t rows : {0, 1, 5}) {
        for (const T index : {T{-1}, -T{0}, T{0}, T{2}, T{4}, T{5}, T(1e30), nan}) {
          for (const bool splat : {false, true}) {
            CheckRowOf(rows, width, index, splat);
          }
        }
      }
    }
  }

  void CheckRowOf(int64_t rows, int64_t width, T index, bool splat) {
    const bool takes = operation_ == Operation::take_row;
    const int64_t length = splat ? 1 : width, stride = length + 2;
    const int64_t given_rows = takes ? rows : 1;
    const int64_t needed = given_rows == 0 ? 0 : (given_rows - 1) * stride + length;
    const T* const given = arrays_[0].data() + kMost - needed;
    arrays_[1][kMost - 1] = index;
    const Operands operands = {{given, stride, splat},
                               {arrays_[1].data() + kMost - 1, 0, true}};
    const Output out = OutputOf(result_, takes ? 1 : rows, width, 3);
    for (int64_t r = 0; r < out.rows; ++r) {
      for (int64_t i = 0; i < width; ++i) out.At(r, i) = StartOf(r + i);
    }
    what_ = level_ + " " + kOperationNames[static_cast<int>(operation_)] + " " +
            std::to_string(rows) + " x " + std::to_string(width) + ", index " +
            std::to_string(index);
    Call(out, operands, rows, width);
    CheckUntouched(out);
    for (int64_t r = 0; r < out.rows; ++r) {
      for (int64_t i = 0; i < width; ++i) {
        T want = StartOf(r + i);
        for (int64_t row = 0; row < rows; ++row) {
          if (index != static_cast<T>(row) || (!takes && r != row)) continue;
          const T x = given[(takes ? row * stride : 0) + (splat ? 0 : i)];
          want = operation_ == Operation::add_row ? x + want : x;
        }
        if (!Same(out.At(r, i), want)) Fail(i, "is wrong", out.At(r, i), want);
      }
    }
  }

  // Matrices with gaps between rows, or without; bits stay, those of a NaN, too.
  void CheckTransposing() {
    FillOperands(true);
    for (const int64_t width : {1, 3, 4, 16, 17, 33}) {
      for (const int64_t rows : {0, 1, 5, 8, 10}) {
        for (const int64_t gap : {0, 2}) CheckTranspose(rows, width, gap);
      }
    }
  }

  void CheckTranspose(int64_t rows, int64_t width, int64_t gap) {
    const int64_t stride = rows + gap, needed = (width - 1) * stride + rows;
    if (needed > kMost || rows * (width + gap) > kMost) return;
    const T* const given = arrays_[0].data() + kMost - needed;
    const Output out = OutputOf(result_, rows, width, gap);
    what_ = level_ + " transpose " + std::to_string(rows) + " x " +
            std::to_string(width) + ", gap " + std::to_string(gap);
    Call(out, {{given, stride, false}}, rows, width);
    CheckUntouched(out);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < width; ++i) {
        const T want = given[i * stride + r];
        if (std::memcmp(&out.At(r, i), &want, sizeof want) != 0) {
          Fail(i, "is wrong", out.At(r, i), want);
        }
      }
    }
  }

  void CheckSize(int64_t rows, int64_t width) {
    for (int splats = 0; splats < 1 << count_; ++splats) {
      for (const Layout layout : {kWhole, kWithGaps, kShared}) {
        Operands operands;
        for (int k = 0; k < count_; ++k) {
          const bool splat = splats >> k & 1;
          const int64_t length = splat ? 1 : width;
          const int64_t stride = layout == kWithGaps                      ? length + 3
                                 : (layout == kShared && k == 0) || splat ? 0
                                                                          : length;
          const int64_t needed = rows == 0 ? 0 : (rows - 1) * stride + length;
          operands[k] = {arrays_[k].data() + kMost - needed, stride, splat};
        }
        what_ = level_ + " " + kOperationNames[static_cast<int>(operation_)] + " " +
                std::to_string(rows) + " x " + std::to_string(width) + ", splats " +
                std::to_string(splats) + ", layout " + std::to_string(layout);
        CheckCase(operands, rows, width, layout == kWithGaps ? 3 : 0);
      }
    }
  }

  void CheckCase(const Operands& operands, int64_t rows, int64_t width, int64_t gap) {
    const int64_t out_rows = ReducesColumn(operation_) ? 1 : rows;
    const int64_t out_width = ReducesRow(operation_) ? 1 : width;
    const Output out = OutputOf(result_, out_rows, out_width, gap);
    Start(out);
    Call(out, operands, rows, width);
    CheckUntouched(out);
    for (int64_t r = 0; r < out_rows; ++r) {
      for (int64_t i = 0; i < out_width; ++i) {
        CheckElement(out.At(r, i), operands, rows, width, r, i);
      }
    }
    CheckRowByRow(out, operands, rows, width);
    if (!Reduces()) {
      for (int k = 0; k < count_; ++k) CheckInPlace(out, operands, k);
    }
  }

  Output OutputOf(Guarded<T>& array, int64_t rows, int64_t width, int64_t gap) {
    const int64_t stride = width + gap;
    const int64_t needed = rows == 0 ? 0 : (rows - 1) * stride + width;
    std::memset(static_cast<void*>(array.data()), 0xff, kMost * sizeof(T));
    return {array.data() + kMost - needed, rows, width, stride};
  }

  // What columns are added to or compared with.
  T StartOf(int64_t i) const { return T(0.25) * static_cast<T>(i % 7 - 3); }
  void Start(const Output& out) const {
    if (!ReducesColumn(operation_)) return;
    for (int64_t i = 0; i < out.width; ++i) out.At(0, i) = StartOf(i);
  }

  void Call(const Output& out, const Operands& operands, int64_t rows, int64_t width) {
    kernels_.function[static_cast<int>(operation_)](out.data, out.stride, operands,
                                                    rows, width);
  }

  void CheckUntouched(const Output& out) {
    const int64_t start = out.data - result_.data();
    for (int64_t i = 0; i < kMost; ++i) {
      const int64_t at = i - start;
      const bool inside = at >= 0 && at % out.stride < out.width;
      if (!inside && !result_.Untouched(i)) Fail(i, "was written", 0, 0);
    }
  }

  static T At(const StepOperand<T>& operand, int64_t r, int64_t i) {
    return operand.data[r * operand.row_stride + (operand.splat ? 0 : i)];
  }

  void CheckElement(T got, const Operands& operands, int64_t rows, int64_t width,
                    int64_t r, int64_t i) {
    using O = Operation;
    const auto at = [&](int k, int64_t row, int64_t column) {
      return k < count_ ? At(operands[k], row, column) : T{0};
    };
    if (operation_ == O::row_max || operation_ == O::column_max) {
      const bool row = operation_ == O::row_max;
      T most = row ? at(0, r, 0) : StartOf(i);
      for (int64_t n = 0; n < (row ? width : rows); ++n) {
        most = Exactly(O::max, row ? at(0, r, n) : at(0, n, i), most, T{0});
      }
      if (!Same(got, most)) Fail(i, "is wrong", got, most);
    } else if (Reduces()) {
      const bool row = ReducesRow(operation_);
      Wide<T> sum = row ? T{0} : StartOf(i), size = std::abs(sum);
      for (int64_t n = 0; n < (row ? width : rows); ++n) {
        const int64_t from = row ? r : n, column = row ? n : i;
        Wide<T> x = at(0, from, column);
        if (count_ == 2) x *= at(1, from, column);
        sum += x;
        size += std::abs(x);
      }
      const int64_t terms = (row ? width : rows) + 1;
      ExpectWithin(got, sum, size * terms * std::numeric_limits<T>::epsilon(), i);
    } else if (operation_ == O::multiply_add || operation_ == O::multiply_subtract) {
      const Wide<T> sign = operation_ == O::multiply_add ? 1 : -1;
      const Wide<T> product = sign * at(0, r, i) * at(1, r, i), c = at(2, r, i);
      const Wide<T> size = std::abs(product) + std::abs(c);
      ExpectWithin(got, product + c, size * std::numeric_limits<T>::epsilon(), i);
    } else if (Rounded<T> want;
               IsRounded(operation_, at(0, r, i), at(1, r, i), &want)) {
      const Wide<T> ulp = want.value == 0 || !std::isfinite(want.value)
                              ? 0
                              : std::ldexp(Wide<T>(std::numeric_limits<T>::epsilon()),
                                           std::ilogb(want.value));
      ExpectWithin(got, want.value, want.ulps * ulp, i);
    } else {
      const T exact = Exactly(operation_, at(0, r, i), at(1, r, i), at(2, r, i));
      // Which of two zeros is the larger one, and the sign of one that was rounded, are
      // nobody's business.
      const bool any_zero = operation_ == O::max || operation_ == O::min ||
                            operation_ == O::floor || operation_ == O::round;
      const bool sign = std::isnan(exact) || (any_zero && exact == 0) ||
                        std::signbit(got) == std::signbit(exact);
      if (!Same(got, exact) || !sign) Fail(i, "is wrong", got, exact);
    }
  }

  // Results too small for a normal number may be 0.
  void ExpectWithin(T got, Wide<T> want, Wide<T> tolerance, int64_t i) {
    if (Same(got, static_cast<T>(want))) return;
    const Wide<T> error = std::abs(static_cast<Wide<T>>(got) - want);
    const bool finite = std::isfinite(got) && std::isfinite(static_cast<T>(want));
    if (finite && error <= std::max<Wide<T>>(tolerance, std::numeric_limits<T>::min()))
      return;
    Fail(i, "is inaccurate", got, static_cast<double>(want));
  }

  // Rows in calls of their own: the same bits.
  void CheckRowByRow(const Output& out, const Operands& operands, int64_t rows,
                     int64_t width) {
    const Output other = OutputOf(again_, out.rows, out.width, out.stride - out.width);
    Start(other);
    for (int64_t r = 0; r < rows; ++r) {
      Operands row;
      for (int k = 0; k < count_; ++k) {
        row[k] = operands[k];
        row[k].data += r * row[k].row_stride;
      }
      const int64_t to = ReducesColumn(operation_) ? 0 : r;
      Call({other.data + to * other.stride, 1, other.width, other.stride}, row, 1,
           width);
    }
    ExpectSameBits("depends on the number of rows");
  }

  // Operand k read where the result is written.
  void CheckInPlace(const Output& out, const Operands& operands, int k) {
    if (operands[k].splat) return;
    const Output other = OutputOf(again_, out.rows, out.width, out.stride - out.width);
    for (int64_t r = 0; r < out.rows; ++r) {
      std::copy_n(operands[k].data + r * operands[k].row_stride, out.width,
                  &other.At(r, 0));
    }
    Operands in_place;
    std::copy_n(operands, 3, in_place);
    in_place[k] = {other.data, other.stride, false};
    Call(other, in_place, out.rows, out.width);
    ExpectSameBits("differs in place");
  }

  void ExpectSameBits(const char* what) {
    for (int64_t i = 0; i < kMost; ++i) {
      // Which of two NaNs comes out of an addition is up to the compiler.
      const T got = again_[i], want = result_[i];
      const bool same = std::memcmp(&got, &want, sizeof(T)) == 0;
      if (!same && !(std::isnan(got) && std::isnan(want))) Fail(i, what, got, want);
    }
  }

  void Fail(int64_t i, const char* what, double got, double want) {
    if (++failures > 20) return;
    std::cerr << what_ << ": element " << i << " " << what << ": " << got << ", want "
              << want << "\n";
  }

  const StepKernels<T>& kernels_;
  const std::string level_;
  Random random_;
  std::array<Guarded<T>, 3> arrays_{Guarded<T>(kMost), Guarded<T>(kMost),
                                    Guarded<T>(kMost)};
  Guarded<T> result_{kMost}, again_{kMost};
  Operation operation_{};
  int count_ = 0;
  std::string what_;
};

// Of every number of elements, which end where memory ends.
inline void CheckNarrowing(const StepKernels<float>& kernels) {
  Random random;
  for (int64_t count = 0; count < 120; ++count) {
    Guarded<float> from(count);
    Guarded<BFloat16> to(count);
    random.FillWithSpecials(from, 100);
    kernels.narrow(from.data(), count, to.data());
    for (int64_t i = 0; i < count; ++i) {
      CHECK_EQ(Same(Value(to[i]), Value(Make<BFloat16>(from[i]))), true);
    }
  }
}

inline void CheckStepOperations() {
  const cpu::FlushDenormals flush;  // as loops have it
  const StepKernels<float>* seen = nullptr;
  for (int level = 0; level <= static_cast<int>(cpu::DetectIsa()); ++level) {
    const auto& set = cpu::KernelsFor(static_cast<cpu::Isa>(level));
    if (set.step_f32 == seen) continue;  // the tables of the level below
    seen = set.step_f32;
    const std::string name = "level " + std::to_string(level);
    OperationChecker<float>(*set.step_f32, name + " f32").CheckAll();
    OperationChecker<double>(*set.step_f64, name + " f64").CheckAll();
    CheckNarrowing(*set.step_f32);
  }
}

}  // namespace ostinato::testing

#endif  // OSTINATO_TESTS_KERNELS_STEPS_H_
