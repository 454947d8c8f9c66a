#include "cpu/network/sequences.h"

#include <algorithm>
#include <numeric>

namespace ostinato::cpu {

int64_t Slice::Active(int64_t step) const {
  if (size == 0 || length[size - 1] > step) return size;  // the usual case
  return std::lower_bound(length, length + size, step,
                          [](int64_t a, int64_t step) { return a > step; }) -
         length;
}

const Slice* MakeSlices(const int32_t* lengths, int64_t batch, int64_t steps,
                        int64_t count, Scratch& scratch) {
  const auto length_of = [&](int32_t row) {
    return lengths == nullptr ? steps : std::clamp<int64_t>(lengths[row], 0, steps);
  };
  auto* order = scratch.Take<int32_t>(batch);
  std::iota(order, order + batch, 0);
  if (lengths != nullptr) {
    std::sort(order, order + batch, [&](int32_t a, int32_t b) {
      const int64_t la = length_of(a), lb = length_of(b);
      return la != lb ? la > lb : a < b;
    });
  }
  auto* slices = scratch.Take<Slice>(count);
  auto* row = scratch.Take<int32_t>(batch);
  auto* length = scratch.Take<int64_t>(batch);
  int64_t place = 0;
  for (int64_t q = 0; q < count; ++q) {
    const int64_t first = place;
    for (int64_t i = q; i < batch; i += count, ++place) {
      row[place] = order[i];
      length[place] = length_of(order[i]);
    }
    slices[q] = {row + first, length + first, place - first, first};
  }
  return slices;
}

}  // namespace ostinato::cpu
