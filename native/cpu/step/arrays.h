// Rows of arrays in memory, in the type that a program computes in.
#ifndef OSTINATO_CPU_STEP_ARRAYS_H_
#define OSTINATO_CPU_STEP_ARRAYS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/step/loop.h"

namespace ostinato::cpu {

inline float FromBFloat16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

inline uint16_t ToBFloat16(float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return static_cast<uint16_t>((bits | 0x400000) >> 16);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Elements at .. at + count - 1 of an array.
template <typename T>
void ReadElements(const StepArray& array, int64_t at, int64_t count, T* to) {
  if (array.bytes == sizeof(T)) {
    std::copy_n(static_cast<const T*>(array.data) + at, count, to);
  } else {
    const auto* from = static_cast<const uint16_t*>(array.data) + at;
    std::transform(from, from + count, to, FromBFloat16);
  }
}

template <typename T>
void WriteElements(const StepArray& array, int64_t at, int64_t count, const T* from) {
  if (array.bytes == sizeof(T)) {
    std::copy_n(from, count, static_cast<T*>(array.data) + at);
  } else {
    std::transform(from, from + count, static_cast<uint16_t*>(array.data) + at,
                   [](T x) { return ToBFloat16(static_cast<float>(x)); });
  }
}

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_STEP_ARRAYS_H_
