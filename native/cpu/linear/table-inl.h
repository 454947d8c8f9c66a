// The tables of one instruction set. See kernels/table-inl.h on unnamed namespaces.
#ifndef OSTINATO_CPU_LINEAR_TABLE_INL_H_
#define OSTINATO_CPU_LINEAR_TABLE_INL_H_

#include "cpu/linear/advantages-inl.h"
#include "cpu/linear/blocks-inl.h"
#include "cpu/linear/filter-inl.h"
#include "cpu/linear/recurrence-inl.h"

namespace ostinato::cpu {
namespace {

template <typename V, template <typename> typename Numbers, typename Storage>
constexpr LinearKernels<Storage, typename V::Element> MakeLinearKernels() {
  using N = Numbers<V>;
  return {LinearForward<V, N, false, Storage>, LinearForward<V, N, true, Storage>,
          BlocksForward<V, N::kParts, false, Storage>,
          BlocksForward<V, N::kParts, true, Storage>, LinearBackward<V, N, Storage>};
}

template <typename F32, typename F64>
constexpr LinearKernelSet MakeLinearSet() {
  return {MakeLinearKernels<F32, RealNumbers, float>(),
          MakeLinearKernels<F32, ComplexNumbers, float>(),
          MakeLinearKernels<F64, RealNumbers, double>(),
          MakeLinearKernels<F64, ComplexNumbers, double>(),
          MakeLinearKernels<F32, RealNumbers, BFloat16>(),
          {F32::kLanes, Filter<F32>},
          {F64::kLanes, Filter<F64>},
          EstimateAdvantages<F32>,
          EstimateAdvantages<F64>};
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_LINEAR_TABLE_INL_H_
