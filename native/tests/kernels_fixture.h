// What the tests of the kernels share: values of every type, and one table under test.
#ifndef OSTINATO_TESTS_KERNELS_FIXTURE_H_
#define OSTINATO_TESTS_KERNELS_FIXTURE_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "tests/check.h"
#include "tests/guarded.h"
#include "tests/tiles_emulated.h"

namespace ostinato::testing {

using cpu::BFloat16;

// The nearest bfloat16, ties to even, by way of decimal places rather than bits.
inline double RoundToBFloat16(double x) {
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent;
  const double mantissa = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, 8)), exponent - 8);
}

inline double Value(double x) { return x; }
inline double Value(BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <typename T>
T Make(double x) {
  return static_cast<T>(x);
}
template <>
inline BFloat16 Make<BFloat16>(double x) {
  const auto value = static_cast<float>(RoundToBFloat16(x));
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return {static_cast<uint16_t>(bits >> 16)};
}

// Half the distance between neighbours of T around 1.
template <typename T>
constexpr double kHalfUlp = std::numeric_limits<T>::epsilon() / 2.0;
template <>
inline constexpr double kHalfUlp<BFloat16> = 0x1p-8;

class Random {
 public:
  double Uniform(double low, double high) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return low + (high - low) * static_cast<double>(state_ >> 11) * 0x1p-53;
  }

  template <typename T>
  void Fill(Guarded<T>& array, double limit) {
    for (int64_t i = 0; i < array.size(); ++i) {
      array[i] = Make<T>(Uniform(-limit, limit));
    }
  }

  // Now and then something special among values up to `limit`.
  template <typename T>
  void FillWithSpecials(Guarded<T>& array, double limit) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    // The NaN that rounding by integer addition would overflow, and two ties between
    // neighbours in bfloat16.
    const double special[] = {std::nan("0xfffffffffffff"),
                              kInfinity,
                              -kInfinity,
                              1 + 0x1p-8,
                              1 + 0x3p-8,
                              0,
                              200,
                              -200,
                              1e-6};
    Fill(array, limit);
    for (int64_t i = 3; i < array.size(); i += 11) {
      array[i] = Make<T>(special[i / 11 % 9]);
    }
  }

 private:
  uint64_t state_ = 1;
};

// Rows in arrays of their own, or in one at `even` distances.
template <typename T>
struct Rows {
  std::vector<std::unique_ptr<Guarded<T>>> arrays;
  std::vector<T*> rows;
  std::vector<const T*> pointers;

  Rows(int64_t count, int64_t length, bool even = false) {
    const int64_t distance = length + 3;
    if (even && count > 0) {
      arrays.push_back(std::make_unique<Guarded<T>>((count - 1) * distance + length));
    }
    for (int64_t r = 0; r < count; ++r) {
      if (even) {
        rows.push_back(arrays[0]->data() + r * distance);
      } else {
        arrays.push_back(std::make_unique<Guarded<T>>(length));
        rows.push_back(arrays.back()->data());
      }
    }
    if (!even) {  // arrays may happen to lie side by side
      for (int64_t r = 0; r + 2 < count; r += 3) std::swap(rows[r], rows[r + 2]);
    }
    pointers.assign(rows.begin(), rows.end());
  }
  double At(int64_t row, int64_t i) const { return Value(pointers[row][i]); }
};

inline std::string table_name;  // the table under test, for messages

// NaN is near NaN alone; infinities are near themselves.
inline void ExpectNear(double got, double want, double tolerance, const char* what) {
  const bool same = got == want || (std::isnan(got) && std::isnan(want));
  if (same || std::abs(got - want) <= tolerance) return;
  if (++failures > 20) return;
  std::cerr << table_name << ": " << what << " is " << got << ", want " << want
            << " +- " << tolerance << "\n";
}

inline void ExpectExact(double got, double want, const char* what) {
  ExpectNear(got, want, 0, what);
}

template <typename StorageT, typename OperandT, typename AccumT>
struct Table {
  using Storage = StorageT;
  using Operand = OperandT;
  using Accum = AccumT;

  explicit Table(const cpu::Kernels<Storage, Operand, Accum>& k)
      : kernels(k), lanes(k.lanes), pairs(k.pairs) {}

  const cpu::Kernels<Storage, Operand, Accum>& kernels;
  const int64_t lanes;
  const int64_t pairs;
};

// check(Table) for every table that this machine can run, once each.
template <typename Check>
void ForEachTable(const Check& check) {
  const char* const levels[] = {"portable", "avx2", "avx512", "avx512_bf16",
                                "avx512_amx"};
  const auto check_tiles = [&](const cpu::KernelsBf16Pairs& tiles, const char* name) {
    table_name = name;
    check(Table(tiles));
    tiles.release_tiles();
  };
  if (const char* reason = cpu::WhyNoTiles()) {
    std::cout << "skipped avx512_amx: " << reason << "\n";
  }
  if (cpu::DetectIsa() >= cpu::Isa::kAvx512Bf16) {
    check_tiles(*ostinato_emulated_tiles(), "emulated tiles");
  } else {
    std::cout << "skipped emulated tiles: the rest of them needs AVX512_BF16\n";
  }
  for (int level = 0; level <= static_cast<int>(cpu::DetectIsa()); ++level) {
    const cpu::KernelSet& set = cpu::KernelsFor(static_cast<cpu::Isa>(level));
    if (set.bf16_tiles != nullptr) {
      check_tiles(*set.bf16_tiles, levels[level]);
      continue;
    }
    if (set.bf16_pairs != nullptr) {  // the other tables are those of the level below
      for (const bool slow : {false, true}) {
        table_name = std::string(levels[level]) + (slow ? " widened" : " pairs");
        check(Table(*cpu::KernelsFor(static_cast<cpu::Isa>(level), slow).bf16_pairs));
      }
      continue;
    }
    table_name = std::string(levels[level]) + " f32";
    check(Table(*set.f32));
    table_name = std::string(levels[level]) + " f64";
    check(Table(*set.f64));
    table_name = std::string(levels[level]) + " bf16";
    check(Table(*set.bf16));
  }
}

}  // namespace ostinato::testing

#endif  // OSTINATO_TESTS_KERNELS_FIXTURE_H_
