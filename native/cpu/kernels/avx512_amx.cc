#include "cpu/kernels/tables.h"

// CMake defines OSTINATO_NO_AMX where the assembler does not know the instructions.
#if defined(__x86_64__) && !defined(OSTINATO_NO_AMX)

#if defined(__clang__)
#pragma clang attribute push(                                                          \
    __attribute__((target("avx512bf16,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))), \
    apply_to = function)
#else
#pragma GCC target("avx512bf16,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#endif

#include "cpu/kernels/tile-product-inl.h"
#include "cpu/kernels/tiles_amx.h"

namespace ostinato::cpu {

namespace {

constexpr KernelsBf16Pairs kTiles = MakeTileKernels<AmxTiles>();

}  // namespace

const KernelSet kAvx512AmxSet = {&kAvx512F32,     &kAvx512F64, &kAvx512Bf16,
                                 &kAvx512Widened, &kTiles,     &kAvx512StepF32,
                                 &kAvx512StepF64};

}  // namespace ostinato::cpu

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

const ostinato::cpu::KernelSet ostinato::cpu::kAvx512AmxSet = {};

#endif
