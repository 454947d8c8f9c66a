// Vectors of 32 bytes. See vec_portable.h for what a Vec is.
#ifndef OSTINATO_CPU_KERNELS_VEC_AVX2_H_
#define OSTINATO_CPU_KERNELS_VEC_AVX2_H_

#include <immintrin.h>

#include <cstdint>

namespace ostinato::cpu {
namespace {

struct VecF32 {
  using Element = float;
  using Type = __m256;
  typedef uint32_t Bits __attribute__((vector_size(32)));
  typedef uint16_t Half __attribute__((vector_size(16)));

  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 16;
  // Of a product; with 3 factors and one vector of the panel, they fill the registers.
  static constexpr int kRegisterSums = 12;

  static Type Set(float x) { return _mm256_set1_ps(x); }
  static Type Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, Type v) { _mm256_storeu_ps(p, v); }
  static void Stream(float* p, Type v) { _mm256_stream_ps(p, v); }
  static void Fence() { _mm_sfence(); }
  static Type LoadPart(const float* p, int64_t n) {
    return _mm256_maskload_ps(p, First(n));
  }
  static void StorePart(float* p, Type v, int64_t n) {
    _mm256_maskstore_ps(p, First(n), v);
  }
  static constexpr bool kFused = true;  // MulAdd rounds once
  static Type MulAdd(Type a, Type b, Type c) { return _mm256_fmadd_ps(a, b, c); }
  static Type Min(Type a, Type b) { return _mm256_min_ps(a, b); }
  static Type Max(Type a, Type b) { return _mm256_max_ps(a, b); }
  static Type Sqrt(Type a) { return _mm256_sqrt_ps(a); }
  static Type Floor(Type a) { return _mm256_floor_ps(a); }
  static Type Round(Type a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT); }
  static Type EvenTwice(Type v) { return _mm256_moveldup_ps(v); }
  static Type OddTwice(Type v) { return _mm256_movehdup_ps(v); }
  static Type SwapPairs(Type v) { return _mm256_permute_ps(v, 0xb1); }
  static Bits Extend(Half half) {
    return reinterpret_cast<Bits>(
        _mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(half)));
  }
  // Takes integers below 2^16.
  static Half Truncate(Bits bits) {
    const auto wide = reinterpret_cast<__m256i>(bits);
    const __m256i halves = _mm256_packus_epi32(wide, wide);
    return reinterpret_cast<Half>(
        _mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08)));
  }

  static void Transpose(Type (&rows)[kLanes]) {
    Type t[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4) {
      rows[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      rows[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
      rows[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      rows[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    // Now every half is transposed; row i of a group of four holds columns i and i + 4.
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x20);
      t[i + 4] = _mm256_permute2f128_ps(rows[i], rows[i + 4], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) rows[i] = t[i];
  }

 private:
  static __m256i First(int64_t n) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(n)), lanes);
  }
};

struct VecF64 {
  using Element = double;
  using Type = __m256d;
  typedef uint64_t Bits __attribute__((vector_size(32)));

  static constexpr int kLanes = 4;
  static constexpr int kRegisters = VecF32::kRegisters;
  static constexpr int kRegisterSums = VecF32::kRegisterSums;

  static Type Set(double x) { return _mm256_set1_pd(x); }
  static Type Load(const double* p) { return _mm256_loadu_pd(p); }
  static void Store(double* p, Type v) { _mm256_storeu_pd(p, v); }
  static void Stream(double* p, Type v) { _mm256_stream_pd(p, v); }
  static void Fence() { _mm_sfence(); }
  static Type LoadPart(const double* p, int64_t n) {
    return _mm256_maskload_pd(p, First(n));
  }
  static void StorePart(double* p, Type v, int64_t n) {
    _mm256_maskstore_pd(p, First(n), v);
  }
  static constexpr bool kFused = true;  // MulAdd rounds once
  static Type MulAdd(Type a, Type b, Type c) { return _mm256_fmadd_pd(a, b, c); }
  static Type Min(Type a, Type b) { return _mm256_min_pd(a, b); }
  static Type Max(Type a, Type b) { return _mm256_max_pd(a, b); }
  static Type Sqrt(Type a) { return _mm256_sqrt_pd(a); }
  static Type Floor(Type a) { return _mm256_floor_pd(a); }
  static Type Round(Type a) { return _mm256_round_pd(a, _MM_FROUND_TO_NEAREST_INT); }
  static Type EvenTwice(Type v) { return _mm256_movedup_pd(v); }
  static Type OddTwice(Type v) { return _mm256_permute_pd(v, 0xf); }
  static Type SwapPairs(Type v) { return _mm256_permute_pd(v, 0x5); }

  static void Transpose(Type (&rows)[kLanes]) {
    const Type even_low = _mm256_unpacklo_pd(rows[0], rows[1]);
    const Type odd_low = _mm256_unpackhi_pd(rows[0], rows[1]);
    const Type even_high = _mm256_unpacklo_pd(rows[2], rows[3]);
    const Type odd_high = _mm256_unpackhi_pd(rows[2], rows[3]);
    rows[0] = _mm256_permute2f128_pd(even_low, even_high, 0x20);
    rows[1] = _mm256_permute2f128_pd(odd_low, odd_high, 0x20);
    rows[2] = _mm256_permute2f128_pd(even_low, even_high, 0x31);
    rows[3] = _mm256_permute2f128_pd(odd_low, odd_high, 0x31);
  }

 private:
  static __m256i First(int64_t n) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
  }
};

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_VEC_AVX2_H_
