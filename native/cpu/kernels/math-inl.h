// exp, sigmoid and tanh of a vector, for float and double alike.
//
// All follow from e^x = 2^n (1 + m), n the integer next to x / ln 2 and m = e^r - 1 for
// what remains, |r| <= ln 2 / 2. As m has no rounding error of 1 + m in it, tanh keeps
// its relative accuracy near 0. NaN comes out as NaN.
#ifndef OSTINATO_CPU_KERNELS_MATH_INL_H_
#define OSTINATO_CPU_KERNELS_MATH_INL_H_

#include <cstdint>

#include "cpu/kernels/memory-inl.h"

namespace ostinato::cpu {
namespace {

template <typename T>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  static constexpr int kDegree = 7;  // r^8 / 8! is below 2^-24 r
  // Added and subtracted, it rounds to an integer, left in the lowest bits of the sum.
  static constexpr float kRound = 0x1.8p23f;
  // High part short enough for n * kLn2High to be exact.
  static constexpr float kLn2High = 0x1.63p-1f;
  static constexpr float kLn2Low = -0x1.bd0106p-13f;
  static constexpr int kMantissaBits = 23;
  static constexpr uint32_t kExponentBias = 127;
  // Below 2^n is 0, above infinity.
  static constexpr float kLowest = -88.0f;
  static constexpr float kHighest = 89.0f;
};

template <>
struct ExpConstants<double> {
  static constexpr int kDegree = 13;  // r^14 / 14! is below 2^-53 r
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kLn2High = 0x1.62e42feep-1;
  static constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr int kMantissaBits = 52;
  static constexpr uint64_t kExponentBias = 1023;
  static constexpr double kLowest = -709.0;
  static constexpr double kHighest = 710.0;
};

constexpr double Factorial(int n) { return n < 2 ? 1.0 : n * Factorial(n - 1); }

// e^x = scale * (1 + minus_one).
template <typename V>
struct Exponential {
  Reg<V> scale;
  Reg<V> minus_one;
};

// sum over i in k..degree of r^(i - k) / i!
template <typename V, int k>
Reg<V> ExpSeries(Reg<V> r) {
  using T = typename V::Element;
  // A constant by declaration: clang would call Factorial at run time.
  constexpr T kTerm = static_cast<T>(1.0 / Factorial(k));
  const Reg<V> term = V::Set(kTerm);
  if constexpr (k == ExpConstants<T>::kDegree) {
    return term;
  } else {
    return V::MulAdd(ExpSeries<V, k + 1>(r), r, term);
  }
}

// A NaN stays one.
template <typename V>
Reg<V> Clamp(Reg<V> x, typename V::Element low, typename V::Element high) {
  return V::Min(V::Set(high), V::Max(V::Set(low), x));
}

// Returns e^x for x between kLowest and kHighest.
template <typename V>
Exponential<V> Exp(Reg<V> x) {
  using T = typename V::Element;
  using C = ExpConstants<T>;
  using Bits = typename V::Bits;
  constexpr T kInverseLn2 = static_cast<T>(1.44269504088896340736);
  const Reg<V> shifted = V::MulAdd(x, V::Set(kInverseLn2), V::Set(C::kRound));
  const Reg<V> n = shifted - V::Set(C::kRound);
  Reg<V> r = V::MulAdd(n, V::Set(-C::kLn2High), x);
  r = V::MulAdd(n, V::Set(-C::kLn2Low), r);
  const Bits exponent = reinterpret_cast<Bits>(shifted) + C::kExponentBias;
  return {reinterpret_cast<Reg<V>>(exponent << C::kMantissaBits),
          V::MulAdd(ExpSeries<V, 2>(r), r * r, r)};
}

template <typename V>
Reg<V> Sigmoid(Reg<V> x) {
  using C = ExpConstants<typename V::Element>;
  const Reg<V> one = V::Set(1);
  const Exponential<V> e = Exp<V>(Clamp<V>(-x, C::kLowest, C::kHighest));
  return one / V::MulAdd(e.scale, one + e.minus_one, one);
}

template <typename V>
Reg<V> Tanh(Reg<V> x) {
  // Far past where tanh is 1 in either type, and short of overflow.
  constexpr int kLimit = 40;
  const Reg<V> one = V::Set(1);
  const Exponential<V> e = Exp<V>(Clamp<V>(x + x, -kLimit, kLimit));
  const Reg<V> minus_one = V::MulAdd(e.scale, e.minus_one, e.scale - one);
  return minus_one / (minus_one + V::Set(2));
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_MATH_INL_H_
