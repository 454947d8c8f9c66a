// Loads and stores of up to one vector, whatever the type in memory.
#ifndef OSTINATO_CPU_KERNELS_MEMORY_INL_H_
#define OSTINATO_CPU_KERNELS_MEMORY_INL_H_

#include <cstdint>
#include <cstring>

#include "cpu/kernels/kernels.h"

namespace ostinato::cpu {
namespace {

template <typename V>
using Reg = typename V::Type;

template <typename V>
Reg<V> Widen(typename V::Half half) {
  return reinterpret_cast<Reg<V>>(V::Extend(half) << 16);
}

// To the nearest, ties to even. A NaN stays one: its quiet bit is in the upper half.
template <typename V>
typename V::Half Narrow(Reg<V> v) {
  using Bits = typename V::Bits;
  const Bits bits = reinterpret_cast<Bits>(v);
  const Bits rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const Bits kept = v == v ? rounded : bits | 0x400000;
  return V::Truncate(kept >> 16);
}

// `v` in the precision of Storage.
template <typename V, typename Storage>
auto RoundTo(Reg<V> v) {
  if constexpr (sizeof(Storage) < sizeof(typename V::Element)) {
    return Narrow<V>(v);
  } else {
    return v;
  }
}

// The first n lanes of a vector, all of them where n is larger; the others are 0.
template <typename V>
Reg<V> Load(const typename V::Element* p, int64_t n = V::kLanes) {
  return n < V::kLanes ? V::LoadPart(p, n) : V::Load(p);
}

template <typename V>
Reg<V> Load(const BFloat16* p, int64_t n = V::kLanes) {
  typename V::Half half{};
  if (n < V::kLanes) {
    std::memcpy(&half, p, n * sizeof *p);
  } else {
    std::memcpy(&half, p, sizeof half);
  }
  return Widen<V>(half);
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
void Store(typename V::Element* p, typename V::Half half, int64_t n = V::kLanes) {
  Store<V>(p, Widen<V>(half), n);
}

template <typename V>
void Store(BFloat16* p, typename V::Half half, int64_t n = V::kLanes) {
  if (n < V::kLanes) {
    std::memcpy(p, &half, n * sizeof *p);
  } else {
    std::memcpy(p, &half, sizeof half);
  }
}

template <typename V>
void Store(BFloat16* p, Reg<V> v, int64_t n = V::kLanes) {
  Store<V>(p, Narrow<V>(v), n);
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_MEMORY_INL_H_
