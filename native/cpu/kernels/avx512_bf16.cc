#include "cpu/kernels/tables.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(                                                          \
    __attribute__((target("avx512bf16,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))), \
    apply_to = function)
#else
#pragma GCC target("avx512bf16,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#endif

#include "cpu/kernels/table-inl.h"
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

constexpr KernelsBf16Pairs kPairs = MakeKernels<VecF32, BFloat16, BFloat16>();

}  // namespace

const KernelSet kAvx512Bf16Set = {&kAvx512F32, &kAvx512F64, &kAvx512Bf16, &kPairs};

}  // namespace ostinato::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

const ostinato::cpu::KernelSet ostinato::cpu::kAvx512Bf16Set = {};

#endif
