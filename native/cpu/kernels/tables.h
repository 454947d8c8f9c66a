// The tables that the files of the instruction sets define, one file each.
#ifndef OSTINATO_CPU_KERNELS_TABLES_H_
#define OSTINATO_CPU_KERNELS_TABLES_H_

#include "cpu/kernels/kernels.h"

namespace ostinato::cpu {

// All pointers of a set are null where its file was compiled for a processor that
// cannot have the instructions, or by a compiler that does not know them.
extern const KernelSet kPortableSet;
extern const KernelSet kAvx2Set;
extern const KernelSet kAvx512Set;
extern const KernelSet kAvx512Bf16Set;
extern const KernelSet kAvx512WidenedSet;  // for processors with slow pairs
extern const KernelSet kAvx512AmxSet;

// Sets hold the tables of the level below, and what multiplies bfloat16 otherwise.
extern const KernelsF32 kAvx512F32;
extern const KernelsF64 kAvx512F64;
extern const KernelsBf16 kAvx512Bf16;
extern const KernelsBf16Pairs kAvx512Pairs;
extern const KernelsBf16Pairs kAvx512Widened;  // the same bits
extern const StepKernels<float> kAvx512StepF32;
extern const StepKernels<double> kAvx512StepF64;

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_TABLES_H_
