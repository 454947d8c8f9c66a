#include "cpu/linear/kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(                                               \
    __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#endif

#include "cpu/kernels/vec_avx512.h"
#include "cpu/linear/table-inl.h"

namespace ostinato::cpu {
namespace {

constexpr LinearKernelSet kSet = MakeLinearSet<VecF32, VecF64>();

}  // namespace

const LinearKernelSet* const kAvx512Linear = &kSet;

}  // namespace ostinato::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

const ostinato::cpu::LinearKernelSet* const ostinato::cpu::kAvx512Linear = nullptr;

#endif
