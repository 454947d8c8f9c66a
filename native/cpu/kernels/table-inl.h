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
#include "cpu/kernels/tables.h"

namespace ostinato::cpu {
namespace {

// With fewer, a step leaves its inputs to a product over several steps.
constexpr int64_t kEnoughRows = 12;

template <typename V, typename S, typename O>
constexpr Kernels<S, O, typename V::Element> MakeKernels() {
  return {
      V::kLanes,
      Factor<V, O>::kPairs,
      V::kTileRows,
      kEnoughRows,
      false,
      nullptr,
      {Product<V, O, Tile::k1>, Product<V, O, Tile::k2>, Product<V, O, Tile::k3>,
       Product<V, O, Tile::k4>, Product<V, O, Tile::kGruInput>,
       Product<V, O, Tile::kGruRecurrent>},
      PackRows<V, S, O>,
      PackColumns<V, S, O>,
      TransposeMatrix<V, O>,
      Dot<V, S, O>,
      {RnnForward<V, S, O, Mode::kRnnRelu>, RnnForward<V, S, O, Mode::kRnnTanh>,
       LstmForward<V, S, O>, GruForward<V, S, O>},
      {RnnBackward<V, S, O, Mode::kRnnRelu>, RnnBackward<V, S, O, Mode::kRnnTanh>,
       LstmBackward<V, S, O>, GruBackward<V, S, O>},
      LstmOutput<V, S, O>,
  };
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_TABLE_INL_H_
