// The forward pass of a network: every layer, direction and step of one call.
#ifndef OSTINATO_CPU_PASS_FORWARD_H_
#define OSTINATO_CPU_PASS_FORWARD_H_

#include <cstdint>

#include "cpu/network/network.h"
#include "cpu/runtime/team.h"

namespace ostinato::cpu {

template <typename S, typename R>
struct ForwardCall {
  Operands<S> operands;
  const void* packed;  // weights packed earlier, or null
  int64_t packed_bytes;
  // Every element of the results is written: 0 past a row's end.
  S* y;    // as x, D*S features
  S* h_n;  // as h_0
  S* c_n;  // as c_0; LSTM
  // Of call.py: Saved. Null arrays where the call does not save.
  S* const* hidden;  // L - 1 arrays [T, B, D*S]
  S* const* gates;   // L*D arrays [T, B, 4*H]
  R* const* cells;   // L*D arrays [T, B, H]; LSTM
};

// Throws std::bad_alloc.
template <typename S, typename R>
void RunForward(const ForwardCall<S, R>& call, Team& team);

// Packing ahead of time; `memory` has PackedBytes.
template <typename S>
int64_t PackedBytes(const Network& network);
template <typename S>
void PackWeights(const Network& network, const S* weights, void* memory, Team& team);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_FORWARD_H_
