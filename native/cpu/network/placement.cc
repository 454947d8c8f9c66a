#include "cpu/network/placement.h"

#include <algorithm>

namespace ostinato::cpu {

Places Places::Padded(int64_t steps, int64_t batch, bool time_major) {
  Places made;
  made.origin_.resize(batch);
  made.saved_origin_.resize(batch);
  for (int64_t b = 0; b < batch; ++b) {
    made.origin_[b] = time_major ? b : b * steps;
    made.saved_origin_[b] = b;
  }
  made.room_.assign(batch, steps);
  made.io_stride_ = time_major ? batch : 1;
  made.reserve_stride_ = batch;
  return made;
}

Places Places::OneAfterAnother(int64_t entries, int64_t buffers, int64_t steps,
                               int64_t batch, const int32_t* segment_lengths,
                               const int32_t* seq_lengths) {
  Places made;
  const int64_t each = batch / buffers, size = entries / buffers;
  for (int64_t buffer = 0; buffer < buffers; ++buffer) {
    int64_t next = buffer * size;
    const int64_t end = next + size;
    for (int64_t b = buffer * each; b < (buffer + 1) * each; ++b) {
      const int64_t room = std::clamp<int64_t>(segment_lengths[b], 0, end - next);
      int64_t length = std::min(room, steps);
      if (seq_lengths != nullptr) {
        length = std::clamp<int64_t>(seq_lengths[b], 0, length);
      }
      made.origin_.push_back(next);
      made.room_.push_back(room);
      made.length_.push_back(static_cast<int32_t>(length));
      next += room;
    }
    if (each > 0) made.room_.back() += end - next;  // and what no row has
  }
  made.saved_origin_ = made.origin_;
  return made;
}

}  // namespace ostinato::cpu
