// The backward pass of a network: gradients of one call from what its forward pass
// saved.
#ifndef OSTINATO_CPU_PASS_BACKWARD_H_
#define OSTINATO_CPU_PASS_BACKWARD_H_

#include <cstdint>

#include "cpu/network/network.h"
#include "cpu/runtime/team.h"

namespace ostinato::cpu {

template <typename Storage, typename Accum>
struct BackwardCall {
  Operands<Storage> operands;
  const Storage* y;
  const Storage* const* hidden;  // as ForwardCall
  const Storage* const* gates;   // null for a plain RNN, and to recompute them
  const Accum* const* cells;
  // Cotangents of results.
  const Storage* dy;
  const Storage* dh_n;
  const Storage* dc_n[kMostCells];
  // Gradients, every element of which is written; null where not asked for.
  Storage* dweights;
  Storage* dx;
  Storage* dh_0;
  Storage* dc_0[kMostCells];
};

// Throws std::bad_alloc.
template <typename Storage, typename Accum>
void RunBackward(const BackwardCall<Storage, Accum>& call, Team& team);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_BACKWARD_H_
