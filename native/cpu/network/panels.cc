#include "cpu/network/panels.h"

#include <cstring>

#include "cpu/network/values.h"

namespace ostinato::cpu {
namespace {

constexpr int64_t kAlign = 64;

// What must agree for weights packed earlier to be of use.
struct Header {
  char magic[8];
  int64_t element, lanes, pairs;
  int64_t mode, input_size, hidden_size, num_layers, num_directions, proj_size;
  int64_t bias_ih, bias_hh, skip, num_heads;
};

template <typename Storage, typename Operand, typename Accum>
Header HeaderOf(const Kernels<Storage, Operand, Accum>& kernels, const Network& n) {
  return {{'o', 's', 't', 'i', 'n', 'a', 't', 'o'},
          sizeof(Storage),
          kernels.lanes,
          kernels.pairs,
          static_cast<int64_t>(n.mode),
          n.input_size,
          n.hidden_size,
          n.num_layers,
          n.num_directions,
          n.proj_size,
          n.bias_ih,
          n.bias_hh,
          n.skip,
          n.num_heads};
}

constexpr int64_t kHeaderBytes = (sizeof(Header) + kAlign - 1) / kAlign * kAlign;

}  // namespace

template <typename Storage, typename Operand, typename Accum>
NetworkPanels<Storage, Operand, Accum>::NetworkPanels(
    const Kernels<Storage, Operand, Accum>& kernels, const Network& network)
    : kernels_(kernels), network_(network), blocks_(network, kernels.lanes) {
  bytes_ = OffsetsOf(network_.pseudo_layers() - 1).end;
}

template <typename Storage, typename Operand, typename Accum>
PanelShape NetworkPanels<Storage, Operand, Accum>::input_shape(int64_t block) const {
  return network_.gru() ? PanelShape::kGruInput
                        : static_cast<PanelShape>(blocks_.vectors(block) - 1);
}

template <typename Storage, typename Operand, typename Accum>
PanelShape NetworkPanels<Storage, Operand, Accum>::recurrent_shape(
    int64_t block) const {
  return network_.gru() ? PanelShape::kGruRecurrent
                        : static_cast<PanelShape>(blocks_.vectors(block) - 1);
}

template <typename Storage, typename Operand, typename Accum>
int64_t NetworkPanels<Storage, Operand, Accum>::panel(int64_t depth) const {
  // Only the last block may be narrower, and then it wastes a little memory.
  return RoundUp(depth, kernels_.pairs) * (network_.gru() ? 3 : 4) * kernels_.lanes;
}

template <typename Storage, typename Operand, typename Accum>
auto NetworkPanels<Storage, Operand, Accum>::OffsetsOf(int64_t pseudo_layer) const
    -> Offsets {
  int64_t at = kHeaderBytes;
  const auto take = [&](int64_t elements, int64_t size) {
    const int64_t here = at;
    at = RoundUp(at + elements * size, kAlign);
    return here;
  };
  const int64_t n = blocks_.count(), lanes = kernels_.lanes;
  Offsets offsets{};
  for (int64_t p = 0; p <= pseudo_layer; ++p) {
    const int64_t layer = p / network_.num_directions;
    const int64_t inputs = network_.has_w_ih(layer) ? network_.inputs(layer) : 0;
    offsets.w_ih = take(n * panel(inputs), sizeof(Operand));
    offsets.w_hh = take(n * recurrent_panel(), sizeof(Operand));
    offsets.w_hr =
        take(projection().count() * 4 * lanes * projection_depth(), sizeof(Operand));
    offsets.bias = take(n * 4 * lanes, sizeof(Accum));
  }
  offsets.end = at;
  return offsets;
}

template <typename Storage, typename Operand, typename Accum>
bool NetworkPanels<Storage, Operand, Accum>::Fits(const void* memory,
                                                  int64_t bytes) const {
  const Header want = HeaderOf(kernels_, network_);
  return memory != nullptr && bytes == bytes_ &&
         std::memcmp(memory, &want, sizeof want) == 0;
}

template <typename Storage, typename Operand, typename Accum>
int64_t NetworkPanels<Storage, Operand, Accum>::tasks() const {
  return network_.pseudo_layers() * tasks_per_layer();
}

template <typename Storage, typename Operand, typename Accum>
void NetworkPanels<Storage, Operand, Accum>::PackRows(const Storage* matrix,
                                                      int64_t depth, int64_t block,
                                                      Operand* panel) const {
  const int64_t step = blocks_.vectors(block) * kernels_.lanes * kernels_.pairs;
  for (int64_t v = 0; v < blocks_.vectors(block); ++v) {
    kernels_.pack_rows(matrix + blocks_.row(block, v) * depth, depth,
                       blocks_.lanes(block, v), depth,
                       panel + v * kernels_.lanes * kernels_.pairs, step);
  }
}

template <typename Storage, typename Operand, typename Accum>
void NetworkPanels<Storage, Operand, Accum>::PackBias(int64_t pseudo_layer,
                                                      int64_t block,
                                                      const Storage* weights,
                                                      Accum* bias) const {
  const WeightOffsets at = WeightOffsetsOf(network_, pseudo_layer);
  const int64_t lanes = kernels_.lanes, hidden = network_.hidden_size;
  Zero(bias, 4 * lanes);
  const auto add = [&](int64_t offset, int64_t row, int64_t count, Accum* to) {
    if (offset >= 0) Add(weights + offset + row, nullptr, Accum{1}, count, to);
  };
  for (int64_t v = 0; v < blocks_.vectors(block); ++v) {
    const int64_t row = blocks_.row(block, v), count = blocks_.lanes(block, v);
    const bool candidate = network_.gru() && v == 2;  // r scales its recurrent bias
    add(at.b_ih, row, count, bias + v * lanes);
    if (!candidate) add(at.b_hh, row, count, bias + v * lanes);
  }
  if (network_.gru()) {
    add(at.b_hh, 2 * hidden + blocks_.unit(block), blocks_.units(block),
        bias + 3 * lanes);
  }
}

template <typename Storage, typename Operand, typename Accum>
void NetworkPanels<Storage, Operand, Accum>::Pack(int64_t task, const Storage* weights,
                                                  void* memory) const {
  if (task == 0) {
    const Header header = HeaderOf(kernels_, network_);
    std::memcpy(memory, &header, sizeof header);
  }
  const int64_t p = task / tasks_per_layer(), block = task % tasks_per_layer();
  const int64_t layer = p / network_.num_directions;
  const WeightOffsets at = WeightOffsetsOf(network_, p);
  const Offsets to = OffsetsOf(p);
  auto* base = static_cast<char*>(memory);
  if (block >= blocks_.count()) {
    const Columns columns = projection();
    const int64_t q = block - blocks_.count();
    const HeadMatrix<Storage> w_hr{weights + at.w_hr, 1, heads().outputs,
                                   heads().units};
    auto* panel = reinterpret_cast<Operand*>(base + to.w_hr) +
                  columns.place(q) * projection_depth();
    const int64_t step = columns.vectors(q) * kernels_.lanes * kernels_.pairs;
    for (int64_t v = 0; v < columns.vectors(q); ++v) {
      const int64_t row = v * kernels_.lanes;
      PackHeadRows(kernels_, w_hr, columns.first(q) + row,
                   std::min(kernels_.lanes, columns.width(q) - row),
                   panel + row * kernels_.pairs, step);
    }
    return;
  }
  if (network_.has_w_ih(layer)) {
    const int64_t depth = network_.inputs(layer);
    PackRows(weights + at.w_ih, depth, block,
             reinterpret_cast<Operand*>(base + to.w_ih) + block * this->panel(depth));
  }
  const HeadMatrix<Storage> w_hh{weights + at.w_hh, network_.gates(), heads().units,
                                 heads().outputs};
  auto* panel = reinterpret_cast<Operand*>(base + to.w_hh) + block * recurrent_panel();
  const int64_t vector = kernels_.lanes * kernels_.pairs;
  for (int64_t v = 0; v < blocks_.vectors(block); ++v) {
    PackHeadRows(kernels_, w_hh, blocks_.row(block, v), blocks_.lanes(block, v),
                 panel + v * vector, blocks_.vectors(block) * vector);
  }
  PackBias(p, block, weights,
           reinterpret_cast<Accum*>(base + to.bias) + block * 4 * kernels_.lanes);
}

template <typename Storage, typename Operand, typename Accum>
LayerPanels<Operand, Accum> NetworkPanels<Storage, Operand, Accum>::layer(
    int64_t pseudo_layer, const void* memory) const {
  const Offsets at = OffsetsOf(pseudo_layer);
  const auto* base = static_cast<const char*>(memory);
  const bool product = network_.has_w_ih(pseudo_layer / network_.num_directions);
  return {product ? reinterpret_cast<const Operand*>(base + at.w_ih) : nullptr,
          reinterpret_cast<const Operand*>(base + at.w_hh),
          network_.proj_size > 0 ? reinterpret_cast<const Operand*>(base + at.w_hr)
                                 : nullptr,
          reinterpret_cast<const Accum*>(base + at.bias)};
}

template class NetworkPanels<float, float, float>;
template class NetworkPanels<double, double, double>;
template class NetworkPanels<BFloat16, float, float>;
template class NetworkPanels<BFloat16, BFloat16, float>;

}  // namespace ostinato::cpu
