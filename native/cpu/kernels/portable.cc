#include "cpu/kernels/table-inl.h"
#include "cpu/kernels/vec_portable.h"

namespace ostinato::cpu {
namespace {

constexpr KernelsF32 kF32 = MakeKernels<VecF32, float, float>();
constexpr KernelsF64 kF64 = MakeKernels<VecF64, double, double>();
constexpr KernelsBf16 kBf16 = MakeKernels<VecF32, BFloat16, float>();
constexpr StepKernels<float> kStepF32 = MakeStepKernels<VecF32>();
constexpr StepKernels<double> kStepF64 = MakeStepKernels<VecF64>();

}  // namespace

const KernelSet kPortableSet = {&kF32,   &kF64,     &kBf16,   nullptr,
                                nullptr, &kStepF32, &kStepF64};

}  // namespace ostinato::cpu
