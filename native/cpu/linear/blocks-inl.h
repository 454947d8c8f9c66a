// The kernels of linear recurrences with a 2x2 block for each pair of units.
#ifndef OSTINATO_CPU_LINEAR_BLOCKS_INL_H_
#define OSTINATO_CPU_LINEAR_BLOCKS_INL_H_

#include <cstdint>

#include "cpu/kernels/memory-inl.h"
#include "cpu/linear/kernels.h"

namespace ostinato::cpu {
namespace {

// One number of kParts real ones.
template <typename T, int kParts>
struct Number {
  T part[kParts];
};

template <typename V, int kParts, typename Storage>
Number<typename V::Element, kParts> Read(const Storage* p) {
  Number<typename V::Element, kParts> number;
  if constexpr (sizeof(Storage) == sizeof(typename V::Element)) {
    for (int i = 0; i < kParts; ++i) number.part[i] = p[i];
  } else {
    Store<V>(number.part, Load<V>(p, kParts), kParts);
  }
  return number;
}

template <typename V, int kParts, typename Storage>
void Write(Storage* p, Number<typename V::Element, kParts> number) {
  if constexpr (sizeof(Storage) == sizeof(typename V::Element)) {
    for (int i = 0; i < kParts; ++i) p[i] = number.part[i];
  } else {
    Store<V>(p, Load<V>(number.part, kParts), kParts);
  }
}

template <typename T, int kParts>
Number<T, kParts> Sum(Number<T, kParts> x, Number<T, kParts> y) {
  for (int i = 0; i < kParts; ++i) x.part[i] += y.part[i];
  return x;
}

// x * y + z
template <typename T, int kParts>
Number<T, kParts> MulAddNumber(Number<T, kParts> x, Number<T, kParts> y,
                               Number<T, kParts> z) {
  if constexpr (kParts == 1) {
    return {{x.part[0] * y.part[0] + z.part[0]}};
  } else {
    return {{x.part[0] * y.part[0] - x.part[1] * y.part[1] + z.part[0],
             x.part[0] * y.part[1] + x.part[1] * y.part[0] + z.part[1]}};
  }
}

template <typename V, int kParts, bool kAfter, typename Storage>
void BlocksForward(const Factors<Storage>& factors,
                   const ForwardSegment<Storage, typename V::Element>& segment) {
  using T = typename V::Element;
  using N = Number<T, kParts>;
  for (int64_t unit = 0; unit < segment.units; unit += 2 * kParts) {
    N h0 = Read<V, kParts>(segment.state + unit);
    N h1 = Read<V, kParts>(segment.state + unit + kParts);
    const Storage* a = factors.a + 2 * unit;
    const Storage* b = segment.b + unit;
    Storage* h = segment.h + unit;
    const uint8_t* resets = factors.resets;
    for (int64_t t = 0; t < segment.steps; ++t) {
      const bool reset = resets != nullptr && *resets != 0;
      N in0 = Read<V, kParts>(b), in1 = Read<V, kParts>(b + kParts);
      if (kAfter) {
        h0 = Sum(h0, in0);
        h1 = Sum(h1, in1);
        Write<V, kParts>(h, h0);
        Write<V, kParts>(h + kParts, h1);
        in0 = in1 = N{};
      }
      if (reset) {
        h0 = in0;
        h1 = in1;
      } else {
        const N a00 = Read<V, kParts>(a), a01 = Read<V, kParts>(a + kParts),
                a10 = Read<V, kParts>(a + 2 * kParts),
                a11 = Read<V, kParts>(a + 3 * kParts);
        const N next = MulAddNumber(a00, h0, MulAddNumber(a01, h1, in0));
        h1 = MulAddNumber(a11, h1, MulAddNumber(a10, h0, in1));
        h0 = next;
      }
      if (!kAfter) {
        Write<V, kParts>(h, h0);
        Write<V, kParts>(h + kParts, h1);
      }
      a += factors.a_step;
      b += segment.step;
      h += segment.step;
      if (resets != nullptr) resets += factors.reset_step;
    }
    Write<V, kParts>(segment.state + unit, h0);
    Write<V, kParts>(segment.state + unit + kParts, h1);
  }
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_LINEAR_BLOCKS_INL_H_
