#include "cpu/kernels/tables.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(                                               \
    __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#endif

#include "cpu/kernels/table-inl.h"
#include "cpu/kernels/vec_avx512.h"

namespace ostinato::cpu {

constexpr KernelsF32 kAvx512F32 = MakeKernels<VecF32, float, float>();
constexpr KernelsF64 kAvx512F64 = MakeKernels<VecF64, double, double>();
constexpr KernelsBf16 kAvx512Bf16 = MakeKernels<VecF32, BFloat16, float>();
constexpr StepKernels<float> kAvx512StepF32 = MakeStepKernels<VecF32>();
constexpr StepKernels<double> kAvx512StepF64 = MakeStepKernels<VecF64>();

const KernelSet kAvx512Set = {&kAvx512F32, &kAvx512F64,     &kAvx512Bf16,   nullptr,
                              nullptr,     &kAvx512StepF32, &kAvx512StepF64};

}  // namespace ostinato::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

const ostinato::cpu::KernelSet ostinato::cpu::kAvx512Set = {};

#endif
