// Vectors of 16 bytes in the compilers' own extension: SSE2, NEON or plain code.
//
// Like the other vec_*.h, it describes one vector of float (VecF32) and one of double
// (VecF64); everything in *-inl.h is written on top of them. A `Vec` has no state.
#ifndef OSTINATO_CPU_KERNELS_VEC_PORTABLE_H_
#define OSTINATO_CPU_KERNELS_VEC_PORTABLE_H_

#include <cstdint>
#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ostinato::cpu {
namespace {

template <typename T, typename U>
struct PortableVec {
  using Element = T;
  typedef T Type __attribute__((vector_size(16)));
  // Unsigned integers of the same width, lane by lane.
  typedef U Bits __attribute__((vector_size(16)));
  // Sixteen bits for every lane.
  typedef uint16_t Half __attribute__((vector_size(2 * 16 / sizeof(T))));

  static constexpr int kLanes = 16 / sizeof(T);
  // 32 registers on AArch64, 16 on x86, where a multiply-add without FMA takes one. The
  // sums are those of a product, which needs room for its operands, too.
#if defined(__aarch64__)
  static constexpr int kRegisters = 32;
  static constexpr int kRegisterSums = 24;
#else
  static constexpr int kRegisters = 15;
  static constexpr int kRegisterSums = 8;
#endif

  static Type Set(T x) { return x - Type{}; }

  static Type Load(const T* p) {
    Type v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static void Store(T* p, Type v) { std::memcpy(p, &v, sizeof v); }
  // Stores to a multiple of the size of a vector, past the caches where the processor
  // can; other threads see it only after a fence.
  static void Stream(T* p, Type v) { Store(p, v); }
  static void Fence() {}

  // The first n < kLanes lanes; the others are 0.
  static Type LoadPart(const T* p, int64_t n) {
    Type v{};
    std::memcpy(&v, p, n * sizeof(T));
    return v;
  }
  static void StorePart(T* p, Type v, int64_t n) { std::memcpy(p, &v, n * sizeof(T)); }

#if defined(__aarch64__)
  static constexpr bool kFused = true;  // MulAdd rounds once
#else
  static constexpr bool kFused = false;
#endif
  static Type MulAdd(Type a, Type b, Type c) {
#if defined(__aarch64__)
    if constexpr (sizeof(T) == 4) {
      return vfmaq_f32(c, a, b);
    } else {
      return vfmaq_f64(c, a, b);
    }
#else
    return a * b + c;
#endif
  }

  // A NaN in the second argument comes out, one in the first does not.
  static Type Min(Type a, Type b) { return a < b ? a : b; }
  static Type Max(Type a, Type b) { return a > b ? a : b; }

  static Type Sqrt(Type a) {
    for (int i = 0; i < kLanes; ++i) a[i] = Root(a[i]);
    return a;
  }
  static Type Floor(Type a) {
    const Type nearest = Round(a);
    return nearest > a ? nearest - Set(1) : nearest;
  }
  // To the nearest integer, ties to even: adding 2^(mantissa bits) drops the fraction.
  static Type Round(Type a) {
    const Type sign = a < Set(0) ? Set(-1) : Set(1), size = a * sign;
    const Type whole = Set(sizeof(T) == 4 ? T(0x1p23) : T(0x1p52));
    return size < whole ? (size + whole - whole) * sign : a;
  }
  // For complex numbers, whose parts are neighbours: of each pair of lanes the first
  // one twice, the second one twice, and the two exchanged.
  static Type EvenTwice(Type v) {
    for (int i = 1; i < kLanes; i += 2) v[i] = v[i - 1];
    return v;
  }
  static Type OddTwice(Type v) {
    for (int i = 1; i < kLanes; i += 2) v[i - 1] = v[i];
    return v;
  }
  static Type SwapPairs(Type v) {
    Type swapped = v;
    for (int i = 1; i < kLanes; i += 2) {
      swapped[i - 1] = v[i];
      swapped[i] = v[i - 1];
    }
    return swapped;
  }

  static Bits Extend(Half half) { return __builtin_convertvector(half, Bits); }
  static Half Truncate(Bits bits) { return __builtin_convertvector(bits, Half); }

  static float Root(float x) { return __builtin_sqrtf(x); }
  static double Root(double x) { return __builtin_sqrt(x); }

  // rows[i][j] becomes rows[j][i].
  static void Transpose(Type (&rows)[kLanes]) {
    for (int i = 0; i < kLanes; ++i) {
      for (int j = 0; j < i; ++j) {
        const T lower = rows[i][j];
        rows[i][j] = rows[j][i];
        rows[j][i] = lower;
      }
    }
  }
};

using VecF32 = PortableVec<float, uint32_t>;
using VecF64 = PortableVec<double, uint64_t>;

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_VEC_PORTABLE_H_
