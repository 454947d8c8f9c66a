// The network that a call runs (RNNSpec in C++), its operands, and where its arrays
// hold what.
#ifndef OSTINATO_CPU_NETWORK_NETWORK_H_
#define OSTINATO_CPU_NETWORK_NETWORK_H_

#include <cstdint>

#include "cpu/kernels/kernels.h"

namespace ostinato::cpu {

// One mode, in the words of modes.py.
struct ModeTraits {
  Mode mode;
  const char* name;
  const char* gates;   // row blocks of w_ih and w_hh, first to last
  const char* states;  // what a step hands to the next one, its output first
  int64_t num_gates;
  int64_t num_cells;     // states but the output
  int64_t saved_blocks;  // blocks of H that are saved of a step
  // Blocks of H in the cotangents of a token's pre-activations. Those for the gates of
  // w_hh come first; x_blocks says which are those for the gates of w_ih.
  int64_t cotangent_blocks;
  int64_t x_blocks[4];
};

inline constexpr ModeTraits kModes[kNumModes] = {
    {Mode::kRnnRelu, "rnn_relu", "h", "h", 1, 0, 0, 1, {0}},
    {Mode::kRnnTanh, "rnn_tanh", "h", "h", 1, 0, 0, 1, {0}},
    {Mode::kLstm, "lstm", "i f g o", "h c", 4, 1, 4, 4, {0, 1, 2, 3}},
    {Mode::kGru, "gru", "r z n", "h", 3, 0, 4, 4, {0, 1, 3}},
    {Mode::kSlstm, "slstm", "i f z o", "h c n m", 4, 3, 5, 4, {0, 1, 2, 3}},
};

// The mode with a number that came from outside. Throws std::invalid_argument.
Mode ModeOf(int64_t number);

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
  bool batch_invariant;   // a sequence has the same bits in every batch
  int64_t num_heads = 1;  // divides hidden_size and proj_size

  const ModeTraits& traits() const { return kModes[static_cast<int>(mode)]; }
  int64_t gates() const { return traits().num_gates; }            // G
  int64_t cells() const { return traits().num_cells; }            // 1 for an LSTM
  int64_t saved_blocks() const { return traits().saved_blocks; }  // [T, B, blocks * H]
  int64_t output_size() const { return proj_size > 0 ? proj_size : hidden_size; }
  int64_t width() const { return num_directions * output_size(); }
  int64_t pseudo_layers() const { return num_layers * num_directions; }
  int64_t inputs(int64_t layer) const { return layer == 0 ? input_size : width(); }
  bool has_w_ih(int64_t layer) const { return layer > 0 || !skip; }
  bool gru() const { return mode == Mode::kGru; }

  template <typename Accum>
  CellOptions<Accum> cell_options(int64_t cell_stride) const {
    return {hidden_size, cell_stride, clips, clip_nan, static_cast<Accum>(cell_clip)};
  }
};

// Where the flat weight vector holds a pseudo-layer's tensors; -1 for those it lacks.
// layout.py says the order.
struct WeightOffsets {
  int64_t w_ih, w_hh, w_hr, b_ih, b_hh;
};

WeightOffsets WeightOffsetsOf(const Network& network, int64_t pseudo_layer);
int64_t NumParams(const Network& network);

// Step t of sequence b is token `origin[b] + t * stride` of an array [tokens,
// features]: so are arrays stored whose time comes first, whose batch comes first, and
// packed ones.
struct TokenMap {
  const int64_t* origin;
  int64_t stride;

  int64_t at(int64_t sequence, int64_t step) const {
    return origin[sequence] + step * stride;
  }
};

// The operands of a call, which forward and backward both read.
template <typename Storage>
struct Operands {
  Network network;
  int64_t steps, batch;  // T, B
  int64_t tokens;        // of x, y and what is saved: T * B, or as many as are packed
  TokenMap io;           // of x, y, resets, dropout masks and cotangents
  TokenMap reserve;      // of hidden, gates, cells
  // How many tokens each sequence has for itself: T, or if packed those up to the next
  // sequence. Past its length they are written as zeros.
  const int64_t* capacity;
  const Storage* weights;
  const Storage* x;
  const Storage* h_0;              // [L*D, B, S]
  const Storage* c_0[kMostCells];  // each cell state [L*D, B, H]; null past the last
  const int32_t* seq_lengths;      // [B], clamped to 0..T here; null: all T
  const uint8_t* resets;           // null: no resets
  const uint8_t* const* dropout_masks;  // of L - 1 layers; null: no dropout
};

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

// Elements from one row of `size` to the next, in arrays with a row for each sequence
// or token. Whole vectors are written, and the last one may begin anywhere; long rows
// are never a multiple of 4 KB apart, where all of them would compete for one set of
// the cache. `pairs` elements share a lane of a vector.
inline int64_t RowStride(int64_t size, int64_t lanes, int64_t pairs = 1) {
  const int64_t columns = RoundUp(CeilDiv(size, pairs), lanes);
  return pairs * (columns + (columns > 4 * lanes ? 5 : 1) * lanes);
}

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_NETWORK_NETWORK_H_
