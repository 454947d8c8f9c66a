#include "cpu/kernels/table-inl.h"
#include "cpu/kernels/vec_portable.h"

namespace ostinato::cpu {
namespace {

constexpr KernelsF32 kF32 = MakeKernels<VecF32, float, float>();
constexpr KernelsF64 kF64 = MakeKernels<VecF64, double, double>();
constexpr KernelsBf16 kBf16 = MakeKernels<VecF32, BFloat16, float>();

}  // namespace

const KernelSet kPortableSet = {&kF32, &kF64, &kBf16, nullptr, nullptr};

}  // namespace ostinato::cpu
