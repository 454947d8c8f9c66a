#include "cpu/kernels/vec_portable.h"
#include "cpu/linear/table-inl.h"

namespace ostinato::cpu {
namespace {

constexpr LinearKernelSet kSet = MakeLinearSet<VecF32, VecF64>();

}  // namespace

const LinearKernelSet* const kPortableLinear = &kSet;

}  // namespace ostinato::cpu
