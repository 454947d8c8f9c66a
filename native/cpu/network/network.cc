#include "cpu/network/network.h"

#include <stdexcept>
#include <string>

namespace ostinato::cpu {

namespace {

constexpr bool InOrder() {
  for (int i = 0; i < kNumModes; ++i) {
    if (static_cast<int>(kModes[i].mode) != i) return false;
  }
  return true;
}
static_assert(InOrder(), "kModes is indexed by Mode");

}  // namespace

Mode ModeOf(int64_t number) {
  if (number < 0 || number >= kNumModes) {
    throw std::invalid_argument("there is no mode " + std::to_string(number));
  }
  return static_cast<Mode>(number);
}

namespace {

struct LayerSizes {
  int64_t w_ih, w_hh, w_hr, b_ih, b_hh;
};

LayerSizes SizesOf(const Network& network, int64_t pseudo_layer) {
  const int64_t layer = pseudo_layer / network.num_directions;
  const int64_t rows = network.gates() * network.hidden_size;
  return {network.has_w_ih(layer) ? rows * network.inputs(layer) : 0,
          rows * network.output_size() / network.num_heads,
          network.proj_size * network.hidden_size / network.num_heads,
          network.bias_ih ? rows : 0, network.bias_hh ? rows : 0};
}

}  // namespace

WeightOffsets WeightOffsetsOf(const Network& network, int64_t pseudo_layer) {
  WeightOffsets found{-1, -1, -1, -1, -1};
  int64_t offset = 0;
  const auto take = [&](int64_t size, bool ours, int64_t& place) {
    if (ours && size > 0) place = offset;
    offset += size;
  };
  for (int64_t p = 0; p < network.pseudo_layers(); ++p) {
    const LayerSizes sizes = SizesOf(network, p);
    const bool ours = p == pseudo_layer;
    take(sizes.w_ih, ours, found.w_ih);
    take(sizes.w_hh, ours, found.w_hh);
    take(sizes.w_hr, ours, found.w_hr);
  }
  for (int64_t p = 0; p < network.pseudo_layers(); ++p) {
    const LayerSizes sizes = SizesOf(network, p);
    const bool ours = p == pseudo_layer;
    take(sizes.b_ih, ours, found.b_ih);
    take(sizes.b_hh, ours, found.b_hh);
  }
  return found;
}

int64_t NumParams(const Network& network) {
  int64_t total = 0;
  for (int64_t p = 0; p < network.pseudo_layers(); ++p) {
    const LayerSizes s = SizesOf(network, p);
    total += s.w_ih + s.w_hh + s.w_hr + s.b_ih + s.b_hh;
  }
  return total;
}

}  // namespace ostinato::cpu
