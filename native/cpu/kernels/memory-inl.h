// Loads and stores of up to one vector, whatever the type in memory.
#ifndef OSTINATO_CPU_KERNELS_MEMORY_INL_H_
#define OSTINATO_CPU_KERNELS_MEMORY_INL_H_

#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"

namespace ostinato::cpu {
namespace {

template <typename V>
using Reg = typename V::Type;

// Sixteen bits for every lane.
template <typename V>
struct Halves {
  typedef uint16_t Type __attribute__((vector_size(2 * V::kLanes)));
};

template <typename V>
Reg<V> Widen(typename Halves<V>::Type halves) {
  using Bits = typename V::Bits;
  return reinterpret_cast<Reg<V>>(__builtin_convertvector(halves, Bits) << 16);
}

// To the nearest, ties to even. A NaN stays one: its quiet bit is among the upper half.
template <typename V>
typename Halves<V>::Type Narrow(Reg<V> v) {
  using Bits = typename V::Bits;
  const Bits bits = reinterpret_cast<Bits>(v);
  const Bits rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Bits kept = v == v ? rounded : bits | 0x400000;
  return __builtin_convertvector(kept >> 16, typename Halves<V>::Type);
}

// The first n lanes of a vector, all of them where n is larger; the others are 0.
template <typename V>
Reg<V> Load(const typename V::Element* p, int64_t n = V::kLanes) {
  return n < V::kLanes ? V::LoadPart(p, n) : V::Load(p);
}

template <typename V>
Reg<V> Load(const BFloat16* p, int64_t n = V::kLanes) {
  typename Halves<V>::Type halves{};
  if (n < V::kLanes) {
    std::memcpy(&halves, p, n * sizeof *p);
  } else {
    std::memcpy(&halves, p, sizeof halves);
  }
  return Widen<V>(halves);
}

template <typename V>
void Store(typename V::Element* p, Reg<V> v, int64_t n = V::kLanes) {
  if (n < V::kLanes) {
    V::StorePart(p, v, n);
  } else {
    V::Store(p, v);
  }
}

template <typename V>
void Store(BFloat16* p, Reg<V> v, int64_t n = V::kLanes) {
  const typename Halves<V>::Type halves = Narrow<V>(v);
  if (n < V::kLanes) {
    std::memcpy(p, &halves, n * sizeof *p);
  } else {
    std::memcpy(p, &halves, sizeof halves);
  }
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_MEMORY_INL_H_
