// Vectors of 64 bytes. See vec_portable.h for what a Vec is.
#ifndef OSTINATO_CPU_KERNELS_VEC_AVX512_H_
#define OSTINATO_CPU_KERNELS_VEC_AVX512_H_

// GCC before 13 warns of its own "undefined" operands (bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif

#include <cstdint>

namespace ostinato::cpu {
namespace {

struct VecF32 {
  using Element = float;
  using Type = __m512;
  typedef uint32_t Bits __attribute__((vector_size(64)));
  typedef uint16_t Half __attribute__((vector_size(32)));

  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;
  // Of a product; they leave room for 8 operands.
  static constexpr int kRegisterSums = 24;

  static Type Set(float x) { return _mm512_set1_ps(x); }
  static Type Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, Type v) { _mm512_storeu_ps(p, v); }
  static void Stream(float* p, Type v) { _mm512_stream_ps(p, v); }
  static void Fence() { _mm_sfence(); }
  static Type LoadPart(const float* p, int64_t n) {
    return _mm512_maskz_loadu_ps(First(n), p);
  }
  static void StorePart(float* p, Type v, int64_t n) {
    _mm512_mask_storeu_ps(p, First(n), v);
  }
  static constexpr bool kFused = true;  // MulAdd rounds once
  static Type MulAdd(Type a, Type b, Type c) { return _mm512_fmadd_ps(a, b, c); }
  static Type Min(Type a, Type b) { return _mm512_min_ps(a, b); }
  static Type Max(Type a, Type b) { return _mm512_max_ps(a, b); }
  static Type Sqrt(Type a) { return _mm512_sqrt_ps(a); }
  static Type Floor(Type a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF); }
  static Type Round(Type a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT);
  }
  static Type EvenTwice(Type v) { return _mm512_moveldup_ps(v); }
  static Type OddTwice(Type v) { return _mm512_movehdup_ps(v); }
  static Type SwapPairs(Type v) { return _mm512_permute_ps(v, 0xb1); }
  static Bits Extend(Half half) {
    return reinterpret_cast<Bits>(
        _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(half)));
  }
  static Half Truncate(Bits bits) {
    return reinterpret_cast<Half>(
        _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(bits)));
  }

  // Exchanges blocks of 1, 2, 4 and 8 lanes, one size after the other.
  static void Transpose(Type (&rows)[kLanes]) {
    Type t[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 4) {
      rows[i] = Low64(t[i], t[i + 2]);
      rows[i + 1] = High64(t[i], t[i + 2]);
      rows[i + 2] = Low64(t[i + 1], t[i + 3]);
      rows[i + 3] = High64(t[i + 1], t[i + 3]);
    }
    // Now every 128-bit quarter is transposed; row i of a group of four holds columns
    // i, i + 4, i + 8 and i + 12.
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      t[i] = EvenQuarters(rows[i], rows[i + 4]);
      t[i + 4] = OddQuarters(rows[i], rows[i + 4]);
      t[i + 8] = EvenQuarters(rows[i + 8], rows[i + 12]);
      t[i + 12] = OddQuarters(rows[i + 8], rows[i + 12]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      rows[i] = EvenQuarters(t[i], t[i + 8]);
      rows[i + 8] = OddQuarters(t[i], t[i + 8]);
    }
  }

 private:
  static __mmask16 First(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
  static Type Low64(Type a, Type b) {
    return _mm512_castpd_ps(
        _mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  static Type High64(Type a, Type b) {
    return _mm512_castpd_ps(
        _mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  static Type EvenQuarters(Type a, Type b) { return _mm512_shuffle_f32x4(a, b, 0x88); }
  static Type OddQuarters(Type a, Type b) { return _mm512_shuffle_f32x4(a, b, 0xdd); }
};

struct VecF64 {
  using Element = double;
  using Type = __m512d;
  typedef uint64_t Bits __attribute__((vector_size(64)));

  static constexpr int kLanes = 8;
  static constexpr int kRegisters = VecF32::kRegisters;
  static constexpr int kRegisterSums = VecF32::kRegisterSums;

  static Type Set(double x) { return _mm512_set1_pd(x); }
  static Type Load(const double* p) { return _mm512_loadu_pd(p); }
  static void Store(double* p, Type v) { _mm512_storeu_pd(p, v); }
  static void Stream(double* p, Type v) { _mm512_stream_pd(p, v); }
  static void Fence() { _mm_sfence(); }
  static Type LoadPart(const double* p, int64_t n) {
    return _mm512_maskz_loadu_pd(First(n), p);
  }
  static void StorePart(double* p, Type v, int64_t n) {
    _mm512_mask_storeu_pd(p, First(n), v);
  }
  static constexpr bool kFused = true;  // MulAdd rounds once
  static Type MulAdd(Type a, Type b, Type c) { return _mm512_fmadd_pd(a, b, c); }
  static Type Min(Type a, Type b) { return _mm512_min_pd(a, b); }
  static Type Max(Type a, Type b) { return _mm512_max_pd(a, b); }
  static Type Sqrt(Type a) { return _mm512_sqrt_pd(a); }
  static Type Floor(Type a) { return _mm512_roundscale_pd(a, _MM_FROUND_TO_NEG_INF); }
  static Type Round(Type a) {
    return _mm512_roundscale_pd(a, _MM_FROUND_TO_NEAREST_INT);
  }
  static Type EvenTwice(Type v) { return _mm512_movedup_pd(v); }
  static Type OddTwice(Type v) { return _mm512_permute_pd(v, 0xff); }
  static Type SwapPairs(Type v) { return _mm512_permute_pd(v, 0x55); }

  static void Transpose(Type (&rows)[kLanes]) {
    Type t[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm512_unpacklo_pd(rows[i], rows[i + 1]);
      t[i + 1] = _mm512_unpackhi_pd(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2; ++i) {
      rows[i] = EvenQuarters(t[i], t[i + 2]);
      rows[i + 2] = OddQuarters(t[i], t[i + 2]);
      rows[i + 4] = EvenQuarters(t[i + 4], t[i + 6]);
      rows[i + 6] = OddQuarters(t[i + 4], t[i + 6]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      t[i] = EvenQuarters(rows[i], rows[i + 4]);
      t[i + 4] = OddQuarters(rows[i], rows[i + 4]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) rows[i] = t[i];
  }

 private:
  static __mmask8 First(int64_t n) { return static_cast<__mmask8>((1u << n) - 1); }
  static Type EvenQuarters(Type a, Type b) { return _mm512_shuffle_f64x2(a, b, 0x88); }
  static Type OddQuarters(Type a, Type b) { return _mm512_shuffle_f64x2(a, b, 0xdd); }
};

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_VEC_AVX512_H_
