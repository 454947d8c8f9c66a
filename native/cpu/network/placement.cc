#include "cpu/network/placement.h"

#include <algorithm>

namespace ostinato::cpu {

Placement Placement::Padded(int64_t steps, int64_t batch, bool time_major) {
  Placement made;
  made.origin_.resize(batch);
  made.saved_origin_.resize(batch);
  for (int64_t b = 0; b < batch; ++b) {
    made.origin_[b] = time_major ? b : b * steps;
    made.saved_origin_[b] = b;
  }
  made.capacity_.assign(batch, steps);
  made.io_stride_ = time_major ? batch : 1;
  made.reserve_stride_ = batch;
  return made;
}

Placement Placement::Packed(int64_t tokens, int64_t buffers, int64_t steps,
                            int64_t batch, const int32_t* segment_lengths,
                            const int32_t* seq_lengths) {
  Placement made;
  const int64_t each = batch / buffers, size = tokens / buffers;
  for (int64_t buffer = 0; buffer < buffers; ++buffer) {
    int64_t next = buffer * size;
    const int64_t end = next + size;
    for (int64_t b = buffer * each; b < (buffer + 1) * each; ++b) {
      const int64_t capacity = std::clamp<int64_t>(segment_lengths[b], 0, end - next);
      int64_t length = std::min(capacity, steps);
      if (seq_lengths != nullptr) {
        length = std::clamp<int64_t>(seq_lengths[b], 0, length);
      }
      made.origin_.push_back(next);
      made.capacity_.push_back(capacity);
      made.length_.push_back(static_cast<int32_t>(length));
      next += capacity;
    }
    if (each > 0) made.capacity_.back() += end - next;  // unused capacity
  }
  made.saved_origin_ = made.origin_;
  return made;
}

}  // namespace ostinato::cpu
