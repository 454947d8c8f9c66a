// The network that a call runs: RNNSpec in C++, and where its arrays hold what.
#ifndef OSTINATO_CPU_NETWORK_NETWORK_H_
#define OSTINATO_CPU_NETWORK_NETWORK_H_

#include <cstdint>

#include "cpu/kernels/kernels.h"

namespace ostinato::cpu {

// Sizes: L layers, D directions, H units, S = proj_size or H, G gates. A pseudo-layer
// is one direction of one layer: fwd0, rev0, fwd1, ...
struct Network {
  Mode mode;
  int64_t input_size;
  int64_t hidden_size;
  int64_t num_layers;
  int64_t num_directions;
  int64_t proj_size;  // 0: no projection
  bool bias_ih, bias_hh;
  bool skip;  // layer 0 adds x to every gate instead of a product
  bool clips, clip_nan;
  double cell_clip;
  double dropout_scale;
  bool batch_invariant;  // a sequence has the same bits in every batch

  int64_t gates() const;         // G, row blocks of w_ih and w_hh
  int64_t saved_blocks() const;  // of [T, B, blocks * H]: 4, or 0 for a plain RNN
  int64_t output_size() const { return proj_size > 0 ? proj_size : hidden_size; }
  int64_t width() const { return num_directions * output_size(); }
  int64_t pseudo_layers() const { return num_layers * num_directions; }
  int64_t inputs(int64_t layer) const { return layer == 0 ? input_size : width(); }
  bool has_w_ih(int64_t layer) const { return layer > 0 || !skip; }
  bool lstm() const { return mode == Mode::kLstm; }
  bool gru() const { return mode == Mode::kGru; }

  template <typename R>
  Cell<R> cell() const {
    return {hidden_size, clips, clip_nan, static_cast<R>(cell_clip)};
  }
};

// Where the flat weight vector holds a pseudo-layer's tensors; -1 for what it lacks.
// layout.py says the order.
struct LayerOffsets {
  int64_t w_ih, w_hh, w_hr, b_ih, b_hh;
};

LayerOffsets OffsetsOf(const Network& network, int64_t pseudo_layer);
int64_t NumParams(const Network& network);

// Step t of row b is entry `origin[b] + t * stride` of an array [entries, features]:
// time first, batch first and rows one after another are all of this form.
struct Layout {
  const int64_t* origin;
  int64_t stride;

  int64_t at(int64_t row, int64_t step) const { return origin[row] + step * stride; }
};

// What forward and backward read alike.
template <typename S>
struct Operands {
  Network network;
  int64_t steps, batch;  // T, B
  int64_t entries;       // of x, y and what is saved: T * B, or of rows their number
  Layout io;             // of x, y, resets, keep and their cotangents
  Layout reserve;        // of hidden, gates, cells
  // Per row, how many entries are its own: T, or of rows one after another those up to
  // the next. Past its length they are written as zeros.
  const int64_t* room;
  const S* weights;
  const S* x;
  const S* h_0;                // [L*D, B, S]
  const S* c_0;                // [L*D, B, H]; LSTM
  const int32_t* seq_lengths;  // [B], clamped to 0..T here; null: all T
  const uint8_t* resets;       // null: none
  const uint8_t* const* keep;  // of L - 1 layers; null: no dropout
};

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_NETWORK_NETWORK_H_
