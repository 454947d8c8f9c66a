// How vectors of 64 bytes multiply pairs of bfloat16.
#ifndef OSTINATO_CPU_KERNELS_PAIRS_AVX512_H_
#define OSTINATO_CPU_KERNELS_PAIRS_AVX512_H_

#include <cstdint>
#include <cstring>

#include "cpu/kernels/pack-inl.h"
#include "cpu/kernels/vec_avx512.h"

namespace ostinato::cpu {
namespace {

// Sixteen pairs; what lies past the first n elements counts as zero.
__m512i LoadPairs(const BFloat16* p, int64_t n = 32) {
  if (n >= 32) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi16((__mmask32{1} << n) - 1, p);
}

__m512 MulAddPairs(__m512i a, __m512i b, __m512 c) {
  return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a),
                          reinterpret_cast<__m512bh>(b));
}

// One instruction in place of ten. Denormal numbers become 0.
template <>
VecF32::Half Narrow<VecF32>(VecF32::Type v) {
  return reinterpret_cast<VecF32::Half>(_mm512_cvtneps_pbh(v));
}

template <>
struct Factor<VecF32, BFloat16> {
  static constexpr int kPairs = 2;
  using Type = __m512i;

  static Type Broadcast(const BFloat16* p) {
    int32_t pair;
    std::memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  // A pair whose second element is zero.
  static Type BroadcastFirst(const BFloat16* p) { return _mm512_set1_epi32(p->bits); }
  static Type LoadVector(const BFloat16* p) { return _mm512_loadu_si512(p); }
  static __m512 MulAdd(Type a, Type b, __m512 c) { return MulAddPairs(a, b, c); }
};

template <>
struct Packer<VecF32, BFloat16, BFloat16> {
  static constexpr int kPairs = 2;
  static __m512 LoadSteps(const BFloat16* p, int64_t n) {
    return _mm512_castsi512_ps(LoadPairs(p, n));
  }
  static void StoreStep(BFloat16* p, __m512 v) { _mm512_storeu_ps(p, v); }
  // Two rows, lane by lane; the second is missing where `depth` is 1.
  static __m512 LoadLanes(const BFloat16* const* rows, int64_t depth, int64_t at,
                          int64_t n) {
    __m512i pairs = _mm512_cvtepu16_epi32(LoadHalf(rows[0] + at, n));
    if (depth > 1) {
      const __m512i second = _mm512_cvtepu16_epi32(LoadHalf(rows[1] + at, n));
      pairs = _mm512_or_si512(pairs, _mm512_slli_epi32(second, 16));
    }
    return _mm512_castsi512_ps(pairs);
  }

 private:
  static __m256i LoadHalf(const BFloat16* p, int64_t n) {
    if (n >= 16) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p);
  }
};

template <>
struct DotFactor<VecF32, BFloat16, BFloat16> {
  static constexpr int kElements = 32;
  using Type = __m512i;

  static Type LoadFirst(const BFloat16* p, int64_t n = kElements) {
    return LoadPairs(p, n);
  }
  static __m512 MulAdd(Type a, Type b, __m512 c) { return MulAddPairs(a, b, c); }
};

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_PAIRS_AVX512_H_
