// Where the sequences of a call stand in its arrays, and how many steps each has.
#ifndef OSTINATO_CPU_NETWORK_PLACEMENT_H_
#define OSTINATO_CPU_NETWORK_PLACEMENT_H_

#include <cstdint>
#include <vector>

#include "cpu/network/network.h"

namespace ostinato::cpu {

class Placement {
 public:
  Placement() = default;

  // Arrays [B, T, ...], or [T, B, ...] if `time_major`. What is saved is [T, B, ...].
  static Placement Padded(int64_t steps, int64_t batch, bool time_major);

  // Packed sequences, one after another, in `buffers` of equal size, each with unused
  // capacity at its end. A sequence has as many tokens as `segment_lengths` says, and
  // as many steps as `seq_lengths` (null: all of them), but at most `steps`. What does
  // not fit is cut off.
  static Placement Packed(int64_t tokens, int64_t buffers, int64_t steps, int64_t batch,
                          const int32_t* segment_lengths, const int32_t* seq_lengths);

  // Fills the fields of `in` that say where sequences stand. Must outlive `in`.
  template <typename Storage>
  void PutInto(Operands<Storage>& in) const {
    in.io = {origin_.data(), io_stride_};
    in.reserve = {saved_origin_.data(), reserve_stride_};
    in.capacity = capacity_.data();
    if (!length_.empty()) in.seq_lengths = length_.data();
  }

 private:
  std::vector<int64_t> origin_, saved_origin_, capacity_;
  std::vector<int32_t> length_;  // empty where the caller's lengths hold
  int64_t io_stride_ = 1, reserve_stride_ = 1;
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_NETWORK_PLACEMENT_H_
