#include "cpu/network/sequences.h"

#include <algorithm>
#include <numeric>

namespace ostinato::cpu {

int64_t Sequences::Active(int64_t step) const {
  if (size == 0 || length[size - 1] > step) return size;  // the usual case
  return std::lower_bound(length, length + size, step,
                          [](int64_t a, int64_t step) { return a > step; }) -
         length;
}

const Sequences* SplitBatch(const int32_t* lengths, int64_t batch, int64_t steps,
                            int64_t count, Scratch& scratch) {
  const auto length_of = [&](int32_t sequence) {
    return lengths == nullptr ? steps
                              : std::clamp<int64_t>(lengths[sequence], 0, steps);
  };
  auto* order = scratch.Take<int32_t>(batch);
  std::iota(order, order + batch, 0);
  if (lengths != nullptr) {
    std::sort(order, order + batch, [&](int32_t a, int32_t b) {
      const int64_t la = length_of(a), lb = length_of(b);
      return la != lb ? la > lb : a < b;
    });
  }
  auto* portions = scratch.Take<Sequences>(count);
  auto* index = scratch.Take<int32_t>(batch);
  auto* length = scratch.Take<int64_t>(batch);
  int64_t next = 0;
  for (int64_t q = 0; q < count; ++q) {
    const int64_t first = next;
    for (int64_t i = q; i < batch; i += count, ++next) {
      index[next] = order[i];
      length[next] = length_of(order[i]);
    }
    portions[q] = {index + first, length + first, next - first, first};
  }
  return portions;
}

}  // namespace ostinato::cpu
