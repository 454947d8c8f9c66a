#include "cpu/linear/kernels.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#include "cpu/kernels/vec_avx2.h"
#include "cpu/linear/table-inl.h"

namespace ostinato::cpu {
namespace {

constexpr LinearKernelSet kSet = MakeLinearSet<VecF32, VecF64>();

}  // namespace

const LinearKernelSet* const kAvx2Linear = &kSet;

}  // namespace ostinato::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

const ostinato::cpu::LinearKernelSet* const ostinato::cpu::kAvx2Linear = nullptr;

#endif
