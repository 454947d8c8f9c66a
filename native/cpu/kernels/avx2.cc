#include "cpu/kernels/tables.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#include "cpu/kernels/table-inl.h"
#include "cpu/kernels/vec_avx2.h"

namespace ostinato::cpu {
namespace {

constexpr KernelsF32 kF32 = MakeKernels<VecF32, float, float>();
constexpr KernelsF64 kF64 = MakeKernels<VecF64, double, double>();
constexpr KernelsBf16 kBf16 = MakeKernels<VecF32, BFloat16, float>();
constexpr StepKernels<float> kStepF32 = MakeStepKernels<VecF32>();
constexpr StepKernels<double> kStepF64 = MakeStepKernels<VecF64>();

}  // namespace

const KernelSet kAvx2Set = {&kF32,   &kF64,     &kBf16,   nullptr,
                            nullptr, &kStepF32, &kStepF64};

}  // namespace ostinato::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

const ostinato::cpu::KernelSet ostinato::cpu::kAvx2Set = {};

#endif
