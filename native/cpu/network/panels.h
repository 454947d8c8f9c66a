// Weights in the order in which products read them: panels of units, all gates of a
// few units side by side, so that one product yields what the equations need together.
#ifndef OSTINATO_CPU_NETWORK_PANELS_H_
#define OSTINATO_CPU_NETWORK_PANELS_H_

#include <algorithm>
#include <cstdint>

#include "cpu/kernels/kernels.h"
#include "cpu/network/heads.h"
#include "cpu/network/network.h"
#include "cpu/runtime/team.h"

namespace ostinato::cpu {

// The units of a pseudo-layer in blocks whose accumulator is one row of 4 vectors:
// V units with all gates, or for a plain RNN 4 V units. The last block of a group of
// heads may have fewer.
class Blocks {
 public:
  Blocks(const Network& network, int64_t lanes)
      : gates_(network.gates()),
        lanes_(lanes),
        heads_(network, lanes),
        per_group_(CeilDiv(heads_.units.group, full())) {}

  const Heads& heads() const { return heads_; }
  int64_t full() const { return gates_ > 1 ? lanes_ : 4 * lanes_; }
  int64_t count() const {
    const int64_t last = heads_.groups - 1;
    return last * per_group_ + CeilDiv(heads_.units.count(last), full());
  }
  int64_t group(int64_t block) const { return block / per_group_; }
  int64_t unit(int64_t block) const {
    return heads_.units.first(group(block)) + block % per_group_ * full();
  }
  int64_t units(int64_t block) const {
    const int64_t g = group(block), end = heads_.units.first(g) + heads_.units.count(g);
    return std::min(full(), end - unit(block));
  }

  // How many vectors of weights a block has: one for each gate.
  int64_t vectors(int64_t block) const {
    return gates_ > 1 ? gates_ : CeilDiv(units(block), lanes_);
  }
  // Row of w_ih or w_hh in lane 0 of vector `v` of a panel, and how many rows follow.
  int64_t row(int64_t block, int64_t v) const {
    return unit(block) + v * (gates_ > 1 ? heads_.units.size : lanes_);
  }
  int64_t lanes(int64_t block, int64_t v) const {
    return gates_ > 1 ? units(block) : std::min(lanes_, units(block) - v * lanes_);
  }

 private:
  int64_t gates_, lanes_;
  Heads heads_;
  int64_t per_group_;
};

// The columns of everything but gates, in blocks of `vectors_each` vectors, at most 4.
// The last block of a group of heads may be narrower.
struct Columns {
  int64_t size, lanes;
  int64_t vectors_each = 4;
  int64_t group_size = size;  // columns of a group, but for the last one

  int64_t each() const { return vectors_each * lanes; }
  int64_t per_group() const { return CeilDiv(group_size, each()); }
  int64_t groups() const { return size > 0 ? CeilDiv(size, group_size) : 0; }
  int64_t group(int64_t block) const { return block / per_group(); }
  int64_t count() const {
    if (size == 0) return 0;
    const int64_t last = groups() - 1;
    return last * per_group() + CeilDiv(size - last * group_size, each());
  }
  int64_t first(int64_t block) const {
    if (size == 0) return 0;
    return group(block) * group_size + block % per_group() * each();
  }
  int64_t width(int64_t block) const {
    const int64_t end = std::min(size, (group(block) + 1) * group_size);
    return std::min(each(), end - first(block));
  }
  int64_t vectors(int64_t block) const { return CeilDiv(width(block), lanes); }
  // Where a block stands in panels, in columns: whole vectors come before it.
  int64_t place(int64_t block) const {
    return group(block) * RoundUp(group_size, lanes) + block % per_group() * each();
  }
  int64_t places() const { return groups() * RoundUp(group_size, lanes); }
  PanelShape shape(int64_t block) const {
    return static_cast<PanelShape>(vectors(block) - 1);
  }
};

template <typename Operand, typename Accum>
struct LayerPanels {
  const Operand* w_ih;  // [block][I][vectors][V]; null without a product
  const Operand* w_hh;  // [block][S of a group][vectors][V]
  // [column block of P][H of a group][vectors][V]; null without a projection
  const Operand* w_hr;
  const Accum* bias;  // [block][4][V]: what pre-activations start from
};

template <typename Storage, typename Operand, typename Accum>
class NetworkPanels {
 public:
  NetworkPanels(const Kernels<Storage, Operand, Accum>& kernels,
                const Network& network);

  const Blocks& blocks() const { return blocks_; }
  const Heads& heads() const { return blocks_.heads(); }
  int64_t lanes() const { return kernels_.lanes; }
  Columns projection() const {
    return {network_.proj_size, kernels_.lanes, 4,
            network_.proj_size > 0 ? heads().outputs.group : 0};
  }
  PanelShape input_shape(int64_t block) const;
  PanelShape recurrent_shape(int64_t block) const;
  // Elements of the panels of one block for `depth` inputs.
  int64_t panel(int64_t depth) const;
  // Panels of one block of w_hh, and for one column of w_hr.
  int64_t recurrent_panel() const { return panel(heads().outputs.group); }
  int64_t projection_depth() const {
    return RoundUp(heads().units.group, kernels_.pairs);
  }

  // Size of the memory that holds all panels, with a header that names what they are.
  int64_t bytes() const { return bytes_; }
  // Whether `memory` was filled by a NetworkPanels like this one.
  bool Fits(const void* memory, int64_t bytes) const;
  // Fills `memory` in independent tasks, all of which must run.
  int64_t tasks() const;
  void Pack(int64_t task, const Storage* weights, void* memory) const;

  LayerPanels<Operand, Accum> layer(int64_t pseudo_layer, const void* memory) const;
  // Packs biases alone, for calls that read weights as they lie.
  void PackBias(int64_t pseudo_layer, int64_t block, const Storage* weights,
                Accum* bias) const;

 private:
  struct Offsets {  // bytes from the start
    int64_t w_ih, w_hh, w_hr, bias, end;
  };
  Offsets OffsetsOf(int64_t pseudo_layer) const;
  int64_t tasks_per_layer() const { return blocks_.count() + projection().count(); }
  void PackRows(const Storage* matrix, int64_t depth, int64_t block,
                Operand* panel) const;

  const Kernels<Storage, Operand, Accum>& kernels_;
  const Network network_;
  const Blocks blocks_;
  int64_t bytes_;
};

// Runs all tasks, on the team where there is enough to do.
template <typename Storage, typename Operand, typename Accum>
void PackAll(const NetworkPanels<Storage, Operand, Accum>& panels,
             const Storage* weights, void* memory, Team& team) {
  constexpr int64_t kWorthSharing = int64_t{512} << 10;  // bytes
  const auto pack = [&](int64_t task) { panels.Pack(task, weights, memory); };
  if (panels.bytes() >= kWorthSharing) {
    team.ForEach(panels.tasks(), pack);
  } else {
    for (int64_t task = 0; task < panels.tasks(); ++task) pack(task);
  }
}

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_NETWORK_PANELS_H_
