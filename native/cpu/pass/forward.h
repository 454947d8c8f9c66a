// The forward pass of a network: every layer, direction and step of one call.
#ifndef OSTINATO_CPU_PASS_FORWARD_H_
#define OSTINATO_CPU_PASS_FORWARD_H_

#include <cstdint>

#include "cpu/network/network.h"
#include "cpu/runtime/team.h"

namespace ostinato::cpu {

template <typename Storage, typename Accum>
struct ForwardCall {
  Operands<Storage> operands;
  const void* prepared;  // memory that PackWeights filled, or null
  int64_t prepared_bytes;
  // Every element of the results is written: 0 past a sequence's end.
  Storage* y;                // as x, D*S features
  Storage* h_n;              // as h_0
  Storage* c_n[kMostCells];  // as c_0
  // The fields of Saved in call.py; null where the call does not save.
  Storage* const* hidden;  // L - 1 arrays [T, B, D*S]
  Storage* const* gates;   // L*D arrays [T, B, blocks*H]
  Accum* const* cells;     // for each of L*D, each cell state [T, B, H]
};

// Throws std::bad_alloc.
template <typename Storage, typename Accum>
void RunForward(const ForwardCall<Storage, Accum>& call, Team& team);

// Packs weights ahead of time, into `memory` of PreparedBytes.
template <typename Storage>
int64_t PreparedBytes(const Network& network);
// Whether `memory` was packed for this network by the kernels of this machine.
template <typename Storage>
bool IsPrepared(const Network& network, const void* memory, int64_t bytes);
template <typename Storage>
void PackWeights(const Network& network, const Storage* weights, void* memory,
                 Team& team);

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_FORWARD_H_
