// What the operations of step programs return for an element, in plain code.
#ifndef OSTINATO_TESTS_STEP_OPERATIONS_H_
#define OSTINATO_TESTS_STEP_OPERATIONS_H_

#include <cmath>
#include <cstdlib>
#include <type_traits>

#include "cpu/kernels/step_kernels.h"

namespace ostinato::testing {

using cpu::Operation;

template <typename T>
using Wide = std::conditional_t<sizeof(T) == 4, double, long double>;

// What functions of one element return, and how many units in the last place a kernel
// may be away from it.
template <typename T>
struct Rounded {
  Wide<T> value;
  int ulps;
};

// Operations that are functions of real numbers.
template <typename T>
bool IsRounded(Operation operation, T a, T b, Rounded<T>* result) {
  using O = Operation;
  const Wide<T> x = a, y = b;
  switch (operation) {
#define OSTINATO_UNARY(name)     \
  case O::name:                  \
    *result = {std::name(x), 5}; \
    return true;
    OSTINATO_UNARY(sin)
    OSTINATO_UNARY(cos)
    OSTINATO_UNARY(tan)
    OSTINATO_UNARY(asin)
    OSTINATO_UNARY(acos)
    OSTINATO_UNARY(atan)
    OSTINATO_UNARY(sinh)
    OSTINATO_UNARY(cosh)
    OSTINATO_UNARY(asinh)
    OSTINATO_UNARY(acosh)
    OSTINATO_UNARY(atanh)
    OSTINATO_UNARY(erf)
    OSTINATO_UNARY(erfc)
    OSTINATO_UNARY(cbrt)
#undef OSTINATO_UNARY
    case O::power:
      *result = {std::pow(x, y), 4};
      return true;
    case O::atan2:
      *result = {std::atan2(x, y), 4};
      return true;
    case O::tanh:
      *result = {std::tanh(x), 4};
      return true;
    case O::sigmoid:
      *result = {1 / (1 + std::exp(-x)), 4};
      return true;
    case O::exp:
      *result = {std::exp(x), 4};
      return true;
    case O::expm1:
      *result = {std::expm1(x), 4};
      return true;
    case O::log:
      *result = {std::log(x), 4};
      return true;
    case O::log1p:
      *result = {std::log1p(x), 4};
      return true;
    case O::rsqrt:
      *result = {1 / std::sqrt(x), 2};
      return true;
    default:
      return false;
  }
}

// Operations whose result is rounded once, if at all.
template <typename T>
T Exactly(Operation operation, T a, T b, T c) {
  using O = Operation;
  switch (operation) {
    case O::copy:
      return a;
    case O::negate:
      return -a;
    case O::abs:
      return std::abs(a);
    case O::sqrt:
      return std::sqrt(a);
    case O::floor:
      return std::floor(a);
    case O::round:
      return std::nearbyint(a);
    case O::sign:
      return a > 0 ? T{1} : a < 0 ? T{-1} : a;
    case O::is_finite:
      return std::isfinite(a);
    case O::add:
      return a + b;
    case O::subtract:
      return a - b;
    case O::multiply:
      return a * b;
    case O::divide:
      return a / b;
    case O::max:
      return std::isnan(a) || a > b ? a : b;
    case O::min:
      return std::isnan(a) || a < b ? a : b;
    case O::equal:
      return a == b;
    case O::less:
      return a < b;
    case O::less_equal:
      return a <= b;
    case O::remainder:
      return std::fmod(a, b);
    case O::select:
      return a != 0 ? b : c;
    default:
      std::abort();
  }
}

}  // namespace ostinato::testing

#endif  // OSTINATO_TESTS_STEP_OPERATIONS_H_
