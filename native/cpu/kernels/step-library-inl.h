// Instructions of a step program that the C library computes.
#ifndef OSTINATO_CPU_KERNELS_STEP_LIBRARY_INL_H_
#define OSTINATO_CPU_KERNELS_STEP_LIBRARY_INL_H_

#include "cpu/kernels/memory-inl.h"
#include "cpu/kernels/step_kernels.h"

namespace ostinato::cpu {
namespace {

// Calls a function of the C library for each lane. Builtins, since the functions of
// <cmath> are inline, and the linker keeps any one of the copies of several levels.
template <typename V, typename Function>
Reg<V> EachLane(Function function, Reg<V> a, Reg<V> b) {
  using T = typename V::Element;
  T x[V::kLanes], y[V::kLanes];
  V::Store(x, a);
  V::Store(y, b);
  for (int i = 0; i < V::kLanes; ++i) x[i] = function(x[i], y[i]);
  return V::Load(x);
}

// Operations that the C library has.
template <typename V, Operation kOperation>
Reg<V> FromLibrary(Reg<V> a, Reg<V> b) {
#define OSTINATO_UNARY(name)                                           \
  if constexpr (kOperation == Operation::name)                         \
    return EachLane<V>(                                                \
        [](auto x, auto) {                                             \
          if constexpr (sizeof(x) == 4) return __builtin_##name##f(x); \
          return static_cast<decltype(x)>(__builtin_##name(x));        \
        },                                                             \
        a, b);
#define OSTINATO_BINARY(name, function)                                       \
  if constexpr (kOperation == Operation::name)                                \
    return EachLane<V>(                                                       \
        [](auto x, auto y) {                                                  \
          if constexpr (sizeof(x) == 4) return __builtin_##function##f(x, y); \
          return static_cast<decltype(x)>(__builtin_##function(x, y));        \
        },                                                                    \
        a, b);
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
  OSTINATO_BINARY(power, pow)
  OSTINATO_BINARY(atan2, atan2)
  OSTINATO_BINARY(remainder, fmod)
#undef OSTINATO_UNARY
#undef OSTINATO_BINARY
  return a;  // a copy
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_STEP_LIBRARY_INL_H_
