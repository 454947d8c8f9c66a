// Plain loops over the values of one token, where types differ or a mask applies.
#ifndef OSTINATO_CPU_NETWORK_VALUES_H_
#define OSTINATO_CPU_NETWORK_VALUES_H_

#include <cstdint>
#include <cstring>

#include "cpu/kernels/kernels.h"

namespace ostinato::cpu {

inline float Widen(BFloat16 a) {
  const uint32_t bits = uint32_t{a.bits} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
inline float Widen(float a) { return a; }
inline double Widen(double a) { return a; }

// Rounds to nearest even; a NaN stays one.
template <typename Storage>
Storage Narrow(float a) {
  if constexpr (sizeof(Storage) == sizeof(float)) {
    return a;
  } else {
    uint32_t bits;
    std::memcpy(&bits, &a, sizeof bits);
    const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    return Storage{static_cast<uint16_t>((nan ? bits | 0x400000 : rounded) >> 16)};
  }
}
template <typename Storage>
Storage Narrow(double a) {
  return a;
}

// dst = src, rounded or widened.
template <typename From, typename To>
void Convert(const From* src, int64_t n, To* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = Narrow<To>(Widen(src[i]));
}
template <typename T>
void Convert(const T* src, int64_t n, T* dst) {
  if (n > 0) std::memcpy(dst, src, n * sizeof(T));
}

// dst = src * scale where the mask is set, else 0.
template <typename From, typename To, typename Accum>
void Drop(const From* src, const uint8_t* mask, Accum scale, int64_t n, To* dst) {
  for (int64_t i = 0; i < n; ++i) {
    dst[i] =
        Narrow<To>(mask[i] != 0 ? static_cast<Accum>(Widen(src[i]) * scale) : Accum{0});
  }
}

// dst += src. With a mask: src * scale where it is set, and nothing elsewhere.
template <typename From, typename Accum>
void Add(const From* src, const uint8_t* mask, Accum scale, int64_t n, Accum* dst) {
  if (mask == nullptr) {
    for (int64_t i = 0; i < n; ++i) dst[i] += Widen(src[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) {
      dst[i] += mask[i] != 0 ? static_cast<Accum>(Widen(src[i]) * scale) : Accum{0};
    }
  }
}

template <typename T>
void Zero(T* dst, int64_t n) {
  if (n > 0) std::memset(static_cast<void*>(dst), 0, n * sizeof(T));
}

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_NETWORK_VALUES_H_
