#include "cpu/kernels/tables.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(                                                          \
    __attribute__((target("avx512bf16,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))), \
    apply_to = function)
#else
#pragma GCC target("avx512bf16,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#endif

#include "cpu/kernels/pairs_avx512.h"
#include "cpu/kernels/table-inl.h"
#include "cpu/kernels/widened_avx512.h"

namespace ostinato::cpu {

constexpr KernelsBf16Pairs kAvx512Pairs = MakeKernels<VecF32, BFloat16, BFloat16>();
constexpr KernelsBf16Pairs kAvx512Widened = MakeWidenedKernels();

const KernelSet kAvx512Bf16Set = {&kAvx512F32,    &kAvx512F64, &kAvx512Bf16,
                                  &kAvx512Pairs,  nullptr,     &kAvx512StepF32,
                                  &kAvx512StepF64};
const KernelSet kAvx512WidenedSet = {&kAvx512F32,     &kAvx512F64, &kAvx512Bf16,
                                     &kAvx512Widened, nullptr,     &kAvx512StepF32,
                                     &kAvx512StepF64};

}  // namespace ostinato::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

const ostinato::cpu::KernelSet ostinato::cpu::kAvx512Bf16Set = {};
const ostinato::cpu::KernelSet ostinato::cpu::kAvx512WidenedSet = {};

#endif
