// exp, sigmoid, tanh and logarithms of a vector, for float and double alike.
//
// The first three follow from e^x = 2^n (1 + m), n the integer next to x / ln 2 and m =
// e^r - 1 for what remains, |r| <= ln 2 / 2. As m has no rounding error of 1 + m in it,
// tanh keeps its relative accuracy near 0. NaN comes out as NaN.
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

// 2^n, for an integer n that was added to kRound.
template <typename V>
Reg<V> PowerOfTwo(Reg<V> shifted) {
  using C = ExpConstants<typename V::Element>;
  const auto exponent = reinterpret_cast<typename V::Bits>(shifted) + C::kExponentBias;
  return reinterpret_cast<Reg<V>>(exponent << C::kMantissaBits);
}

// Returns e^x for x between kLowest and kHighest.
template <typename V>
Exponential<V> Exp(Reg<V> x) {
  using T = typename V::Element;
  using C = ExpConstants<T>;
  constexpr T kInverseLn2 = static_cast<T>(1.44269504088896340736);
  const Reg<V> shifted = V::MulAdd(x, V::Set(kInverseLn2), V::Set(C::kRound));
  const Reg<V> n = shifted - V::Set(C::kRound);
  Reg<V> r = V::MulAdd(n, V::Set(-C::kLn2High), x);
  r = V::MulAdd(n, V::Set(-C::kLn2Low), r);
  return {PowerOfTwo<V>(shifted), V::MulAdd(ExpSeries<V, 2>(r), r * r, r)};
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

// e^x for any x.
template <typename V>
Reg<V> FullExp(Reg<V> x) {
  using T = typename V::Element;
  using C = ExpConstants<T>;
  // Beyond these, e^x is 0 or infinite.
  constexpr T kLow = sizeof(T) == 4 ? -104 : -746, kHigh = C::kHighest;
  constexpr T kInverseLn2 = static_cast<T>(1.44269504088896340736);
  x = Clamp<V>(x, kLow, kHigh);
  const Reg<V> round = V::Set(C::kRound);
  const Reg<V> n = V::MulAdd(x, V::Set(kInverseLn2), round) - round;
  Reg<V> r = V::MulAdd(n, V::Set(-C::kLn2High), x);
  r = V::MulAdd(n, V::Set(-C::kLn2Low), r);
  // 2^n in two factors, since one of 2^128 would be infinite where e^x is not.
  const Reg<V> half = V::MulAdd(n, V::Set(static_cast<T>(0.5)), round);
  const Reg<V> rest = n - (half - round) + round;
  const Reg<V> fraction = V::MulAdd(ExpSeries<V, 2>(r), r * r, r) + V::Set(1);
  const Reg<V> result = fraction * PowerOfTwo<V>(half) * PowerOfTwo<V>(rest);
  return x == x ? result : x;
}

// e^x - 1 for any x.
template <typename V>
Reg<V> FullExpm1(Reg<V> x) {
  constexpr int kLimit = 40;  // from here on, subtracting 1 changes nothing
  const Exponential<V> e = Exp<V>(Clamp<V>(x, -kLimit, kLimit));
  const Reg<V> near = V::MulAdd(e.scale, e.minus_one, e.scale - V::Set(1));
  return x > V::Set(kLimit) ? FullExp<V>(x) : near;
}

template <typename T>
struct LogConstants;

template <>
struct LogConstants<float> {
  static constexpr int kTerms = 5;  // 0.03^5 / 11 is below 2^-24
  static constexpr float kSmallest = 0x1p-126f;
  static constexpr uint32_t kMantissa = 0x7fffff;
};

template <>
struct LogConstants<double> {
  static constexpr int kTerms = 11;  // 0.03^11 / 23 is below 2^-53
  static constexpr double kSmallest = 0x1p-1022;
  static constexpr uint64_t kMantissa = 0xfffffffffffff;
};

// artanh(sqrt(s)) / sqrt(s) without its first k terms, over s^k:
// sum over i in k..last of s^(i - k) / (2 i + 1).
template <typename V, int k, int last>
Reg<V> ArtanhSeries(Reg<V> s) {
  using T = typename V::Element;
  constexpr T kTerm = static_cast<T>(1.0 / (2 * k + 1));
  const Reg<V> term = V::Set(kTerm);
  if constexpr (k == last) {
    return term;
  } else {
    return V::MulAdd(ArtanhSeries<V, k + 1, last>(s), s, term);
  }
}

// The natural logarithm: x = 2^n m with m between sqrt(1/2) and sqrt(2), and
// log m = 2 artanh s with s = (m - 1) / (m + 1). Denormal numbers count as 0.
template <typename V>
Reg<V> Log(Reg<V> x) {
  using T = typename V::Element;
  using C = ExpConstants<T>;
  using L = LogConstants<T>;
  using Bits = typename V::Bits;
  const Reg<V> zero = V::Set(0), one = V::Set(1);
  const Reg<V> infinity = V::Set(static_cast<T>(__builtin_inff()));
  const Bits bits = reinterpret_cast<Bits>(x);
  // The exponent as a number: the low bits of kRound's mantissa count integers.
  const Bits exponent = bits >> C::kMantissaBits;
  const Bits counted = exponent | reinterpret_cast<Bits>(V::Set(2 * C::kRound / 3));
  Reg<V> n = reinterpret_cast<Reg<V>>(counted) - V::Set(2 * C::kRound / 3) -
             V::Set(static_cast<T>(C::kExponentBias));
  Reg<V> m =
      reinterpret_cast<Reg<V>>((bits & L::kMantissa) | reinterpret_cast<Bits>(one));
  const auto large = m > V::Set(static_cast<T>(1.41421356237309504880));
  n = large ? n + one : n;
  m = large ? m * V::Set(static_cast<T>(0.5)) : m;
  const Reg<V> f = m - one;
  const Reg<V> s = f / (m + one), s2 = s * s;
  // 2 artanh s = 2 s + 2 s^3 (1/3 + ...)
  const Reg<V> tail = (s + s) * s2 * ArtanhSeries<V, 1, L::kTerms>(s2);
  // n * kLn2High is exact, which keeps log accurate where n is 0 or small.
  const Reg<V> low = V::MulAdd(n, V::Set(C::kLn2Low), tail);
  Reg<V> result = V::MulAdd(n, V::Set(C::kLn2High), (s + s) + low);
  result = x == infinity ? infinity : result;
  result = x < V::Set(L::kSmallest) ? -infinity : result;
  return x < zero ? zero / zero : (x == x ? result : x);
}

// log(1 + x), accurate where x is small: the rounding error of 1 + x divides out.
template <typename V>
Reg<V> Log1p(Reg<V> x) {
  using T = typename V::Element;
  const Reg<V> one = V::Set(1);
  const Reg<V> infinity = V::Set(static_cast<T>(__builtin_inff()));
  const Reg<V> u = one + x;
  const Reg<V> far = u == infinity ? infinity : Log<V>(u) * (x / (u - one));
  return u == one ? x : far;
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_MATH_INL_H_
