// The table of one instruction set and data type.
//
// Every vec_*.h and *-inl.h puts what it defines into an unnamed namespace: each file
// that includes them is compiled for another processor, and the linker must never take
// one file's copy of a function for another's. For the same reason they use nothing
// that is inline in a header of somebody else.
#ifndef OSTINATO_CPU_KERNELS_TABLE_INL_H_
#define OSTINATO_CPU_KERNELS_TABLE_INL_H_

#include "cpu/kernels/cell-inl.h"
#include "cpu/kernels/pack-inl.h"
#include "cpu/kernels/product-inl.h"
#include "cpu/kernels/slstm-inl.h"
#include "cpu/kernels/step-inl.h"
#include "cpu/kernels/tables.h"

namespace ostinato::cpu {
namespace {

// With fewer, a step leaves its inputs to a product over several steps.
constexpr int64_t kEnoughRows = 12;

template <typename V, typename Storage, typename Operand>
constexpr Kernels<Storage, Operand, typename V::Element> MakeKernels() {
  return {
      V::kLanes,
      Factor<V, Operand>::kPairs,
      TileRows<V>(PanelVectors(PanelShape::k4)),
      kEnoughRows,
      false,
      nullptr,
      {Product<V, Operand, PanelShape::k1>, Product<V, Operand, PanelShape::k2>,
       Product<V, Operand, PanelShape::k3>, Product<V, Operand, PanelShape::k4>,
       Product<V, Operand, PanelShape::kGruInput>,
       Product<V, Operand, PanelShape::kGruRecurrent>},
      AddRows<V, Operand>,
      AddScaledRows<V, Storage, Operand>,
      PackRows<V, Storage, Operand>,
      PackColumns<V, Storage, Operand>,
      TransposeMatrix<V, Operand>,
      Dot<V, Storage, Operand>,
      {RnnForward<V, Storage, Operand, Mode::kRnnRelu>,
       RnnForward<V, Storage, Operand, Mode::kRnnTanh>,
       LstmForward<V, Storage, Operand>, GruForward<V, Storage, Operand>,
       SlstmForward<V, Storage, Operand>},
      {RnnBackward<V, Storage, Operand, Mode::kRnnRelu>,
       RnnBackward<V, Storage, Operand, Mode::kRnnTanh>,
       LstmBackward<V, Storage, Operand>, GruBackward<V, Storage, Operand>,
       SlstmBackward<V, Storage, Operand>},
      {nullptr, nullptr, LstmOutput<V, Storage, Operand>, nullptr,
       SlstmOutput<V, Storage, Operand>},
  };
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_TABLE_INL_H_
