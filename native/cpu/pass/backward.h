// The backward pass of a network: gradients of one call from what its forward pass
// saved.
#ifndef OSTINATO_CPU_PASS_BACKWARD_H_
#define OSTINATO_CPU_PASS_BACKWARD_H_

#include <cstdint>

#include "cpu/network/network.h"
#include "cpu/runtime/team.h"

namespace ostinato::cpu {

template <typename S, typename R>
struct BackwardCall {
  Operands<S> operands;
  const S* y;
  const S* const* hidden;  // as ForwardCall
  const S* const* gates;   // null for a plain RNN, and to compute them again
  const R* const* cells;   // LSTM
  const S* dy;             // cotangents
  const S* dh_n;
  const S* dc_n;  // LSTM
  // Results, every element of which is written; null where not asked for.
  S* dweights;
  S* dx;
  S* dh_0;
  S* dc_0;
};

// Throws std::bad_alloc.
template <typename S, typename R>
void RunBackward(const BackwardCall<S, R>& call, Team& team);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_BACKWARD_H_
