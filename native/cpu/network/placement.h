// Where the rows of a call stand in its arrays, and how many steps each has.
#ifndef OSTINATO_CPU_NETWORK_PLACEMENT_H_
#define OSTINATO_CPU_NETWORK_PLACEMENT_H_

#include <cstdint>
#include <vector>

#include "cpu/network/network.h"

namespace ostinato::cpu {

class Places {
 public:
  Places() = default;

  // Arrays [B, T, ...], or [T, B, ...] if `time_major`; what is saved is the latter.
  static Places Padded(int64_t steps, int64_t batch, bool time_major);

  // Rows one after another, in `buffers` of equal size, each with entries at its end
  // that no row has. A row's entries are as many as `segment_lengths` says, its steps
  // as many as `seq_lengths` (null: all), but at most `steps`. What does not fit is cut
  // off.
  static Places OneAfterAnother(int64_t entries, int64_t buffers, int64_t steps,
                                int64_t batch, const int32_t* segment_lengths,
                                const int32_t* seq_lengths);

  // Puts them into `in`, which they must outlive.
  template <typename S>
  void PutInto(Operands<S>& in) const {
    in.io = {origin_.data(), io_stride_};
    in.reserve = {saved_origin_.data(), reserve_stride_};
    in.room = room_.data();
    if (!length_.empty()) in.seq_lengths = length_.data();
  }

 private:
  std::vector<int64_t> origin_, saved_origin_, room_;
  std::vector<int32_t> length_;  // only if not as the caller has them
  int64_t io_stride_ = 1, reserve_stride_ = 1;
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_NETWORK_PLACEMENT_H_
