#include "cpu/pass/layer_pass.h"

#include <type_traits>

namespace ostinato::cpu {

template <typename S, typename O, typename R>
LayerPass<S, O, R>::LayerPass(const Context& context, int64_t pseudo_layer,
                              const Slice& slice)
    : c_(context),
      pseudo_layer_(pseudo_layer),
      layer_(pseudo_layer / context.network().num_directions),
      direction_(pseudo_layer % context.network().num_directions),
      reverse_(direction_ == 1),
      slice_(slice),
      weights_(context.layers[pseudo_layer]),
      state_(context.states[pseudo_layer]),
      offsets_(OffsetsOf(context.network(), pseudo_layer)) {}

template <typename S, typename O, typename R>
Workspace<S, O, R> LayerPass<S, O, R>::MakeWorkspace(const Context& context,
                                                     int64_t rows, Scratch& scratch) {
  const int64_t chunk = std::max(rows, Context::kInputRows);
  const bool moves = !std::is_same_v<S, O> || context.call.operands.keep != nullptr ||
                     context.kernels.wants_even_rows;
  Workspace<S, O, R> made;
  made.pre = scratch.Take<R>(context.packing.blocks().count() * chunk * 4 *
                             context.kernels.lanes);
  made.input = scratch.Take<O>(moves ? chunk * context.x_stride : 0);
  made.x = scratch.Take<const O*>(chunk);
  made.h = scratch.Take<const O*>(rows);
  made.rows = scratch.Take<ForwardRow<S, O, R>>(rows);
  return made;
}

template <typename S, typename O, typename R>
void LayerPass<S, O, R>::Begin() const {
  const Operands<S>& in = c_.call.operands;
  const int64_t out = in.network.output_size(), hidden = in.network.hidden_size;
  for (int64_t i = 0; i < slice_.size; ++i) {
    const int64_t from = pseudo_layer_ * in.batch + slice_.row[i];
    const int64_t place = slice_.first + i;
    Convert(in.h_0 + from * out, out, state_.h[0] + place * c_.h_stride);
    if (in.network.lstm()) {
      Convert(in.c_0 + from * hidden, hidden, state_.c + place * c_.c_stride);
    }
  }
}

template <typename S, typename O, typename R>
int64_t LayerPass<S, O, R>::Advance(int64_t begin, int64_t end, Share share,
                                    Member* member, const Workspace<S, O, R>& w) const {
  const Network& network = c_.network();
  const Blocks& blocks = c_.packing.blocks();
  const int64_t first = share.begin(blocks.count()), last = share.end(blocks.count());
  const Cell<R> cell = network.cell<R>();
  const auto equations = c_.kernels.forward[static_cast<int>(network.mode)];
  const LeavesProducts leaves(c_.kernels);
  end = std::min(end, slice_.Steps());
  for (int64_t chunk = begin; chunk < end;) {
    const int64_t most = slice_.Active(chunk);
    const bool fused = most >= c_.kernels.enough_rows;
    const int64_t steps = fused ? 1 : std::max<int64_t>(1, Context::kInputRows / most);
    const int64_t chunk_end = std::min(end, chunk + steps);
    const int64_t rows = GatherInputs(chunk, chunk_end, w);
    const int64_t block_size = fused ? 0 : rows * Stride();
    if (!fused) {
      for (int64_t j = first; j < last; ++j) {
        InputProduct(j, rows, w, w.pre + (j - first) * block_size);
      }
    }
    int64_t done = 0;  // rows of the chunk
    for (int64_t step = chunk; step < chunk_end; ++step) {
      const int64_t active = slice_.Active(step);
      GatherRows(step, active, share, w);
      for (int64_t n = 0; n < last - first; ++n) {
        // To and fro: what the last step read last is still in the cache.
        const int64_t j = step % 2 == 0 ? first + n : last - 1 - n;
        R* pre = w.pre + (j - first) * block_size + done * Stride();
        if (fused) InputProduct(j, active, w, pre);
        RecurrentProduct(j, active, w, pre);
        equations(cell, pre, Stride(), w.rows, active, blocks.unit(j), blocks.units(j));
      }
      if (network.proj_size > 0) {
        if (member != nullptr) member->Sync();
        Project(step, active, share, w);
      }
      if (member != nullptr && !member->SyncAndGoOn()) return step + 1;
      done += fused ? 0 : active;
    }
    chunk = chunk_end;
  }
  return end;
}

template <typename S, typename O, typename R>
int64_t LayerPass<S, O, R>::GatherInputs(int64_t begin, int64_t end,
                                         const Workspace<S, O, R>& w) const {
  const Operands<S>& in = c_.call.operands;
  const int64_t size = in.network.inputs(layer_);
  const uint8_t* keep =
      in.keep != nullptr && layer_ > 0 ? in.keep[layer_ - 1] : nullptr;
  const auto scale = static_cast<R>(in.network.dropout_scale);
  int64_t count = 0;
  for (int64_t step = begin; step < end; ++step) {
    const int64_t active = slice_.Active(step);
    for (int64_t i = 0; i < active; ++i, ++count) {
      const int64_t row = slice_.row[i], time = Time(i, step);
      const int64_t place = in.io.at(row, time);
      const S* from = layer_ == 0
                          ? in.x + place * size
                          : c_.hidden[layer_ - 1] + in.reserve.at(row, time) * size;
      if constexpr (std::is_same_v<S, O>) {
        if (keep == nullptr && !c_.kernels.wants_even_rows) {
          w.x[count] = from;
          continue;
        }
      }
      O* to = w.input + count * c_.x_stride;
      if (keep == nullptr) {
        Convert(from, size, to);
      } else {
        Drop(from, keep + place * size, scale, size, to);
      }
      w.x[count] = to;
    }
  }
  return count;
}

template <typename S, typename O, typename R>
void LayerPass<S, O, R>::InputProduct(int64_t block, int64_t rows,
                                      const Workspace<S, O, R>& w, R* pre) const {
  const auto& packing = c_.packing;
  const int64_t size = c_.network().inputs(layer_);
  const R* bias = weights_.bias + block * Stride();
  if (c_.packed && weights_.w_ih != nullptr) {
    c_.kernels.product[static_cast<int>(packing.input_tile(block))](
        w.x, 0, rows, size, weights_.w_ih + block * packing.panel(size), bias, pre,
        Stride());
    return;
  }
  for (int64_t r = 0; r < rows; ++r) Convert(bias, Stride(), pre + r * Stride());
  if (offsets_.w_ih >= 0) {
    Unpacked(block, c_.call.operands.weights + offsets_.w_ih, size, false, w.x, rows,
             pre);
    return;
  }
  const Blocks& blocks = packing.blocks();
  const int64_t lanes = c_.kernels.lanes, hidden = c_.network().hidden_size;
  for (int64_t r = 0; r < rows; ++r) {  // input_mode="skip"
    for (int64_t v = 0; v < 4; ++v) {
      const int64_t row = blocks.row(block, v), count = blocks.lanes(block, v);
      if (row >= c_.network().gates() * hidden) break;
      Add(w.x[r] + row % hidden, nullptr, R{1}, count, pre + r * Stride() + v * lanes);
    }
  }
}

template <typename S, typename O, typename R>
void LayerPass<S, O, R>::RecurrentProduct(int64_t block, int64_t rows,
                                          const Workspace<S, O, R>& w, R* pre) const {
  const auto& packing = c_.packing;
  const int64_t size = c_.network().output_size();
  if (!c_.packed) {
    Unpacked(block, c_.call.operands.weights + offsets_.w_hh, size, true, w.h, rows,
             pre);
    return;
  }
  c_.kernels.product[static_cast<int>(packing.recurrent_tile(block))](
      w.h, 0, rows, size, weights_.w_hh + block * packing.panel(size), nullptr, pre,
      Stride());
}

template <typename S, typename O, typename R>
void LayerPass<S, O, R>::Unpacked(int64_t block, const S* matrix, int64_t depth,
                                  bool recurrent, const O* const* a, int64_t rows,
                                  R* pre) const {
  const Blocks& blocks = c_.packing.blocks();
  const int64_t lanes = c_.kernels.lanes;
  const int64_t end = c_.network().gates() * c_.network().hidden_size;
  for (int64_t v = 0; v < 4; ++v) {
    const int64_t row = blocks.row(block, v);
    if (row >= end) break;
    // The candidate's recurrent product of a GRU is kept apart.
    const int64_t to = recurrent && c_.network().gru() && v == 2 ? 3 : v;
    for (int64_t r = 0; r < rows; ++r) {
      c_.kernels.dot(matrix + row * depth, depth, blocks.lanes(block, v), depth, a[r],
                     pre + r * Stride() + to * lanes);
    }
  }
}

template <typename S, typename O, typename R>
S* LayerPass<S, O, R>::Output(int64_t i, int64_t step) const {
  const Operands<S>& in = c_.call.operands;
  const int64_t row = slice_.row[i], time = Time(i, step);
  const int64_t column = direction_ * in.network.output_size();
  if (layer_ + 1 == in.network.num_layers) {
    return c_.call.y + in.io.at(row, time) * in.network.width() + column;
  }
  return c_.hidden[layer_] + in.reserve.at(row, time) * in.network.width() + column;
}

template <typename S, typename O, typename R>
void LayerPass<S, O, R>::GatherRows(int64_t step, int64_t active, Share share,
                                    const Workspace<S, O, R>& w) const {
  const Operands<S>& in = c_.call.operands;
  const Network& network = in.network;
  const Blocks& blocks = c_.packing.blocks();
  const bool projects = network.proj_size > 0;
  const O* before = state_.h[step % 2];
  O* after = state_.h[(step + 1) % 2];
  for (int64_t i = 0; i < active; ++i) {
    const int64_t row = slice_.row[i], place = slice_.first + i;
    const int64_t time = Time(i, step);
    const int64_t saved = in.reserve.at(row, time);
    const bool reset = in.resets != nullptr && in.resets[in.io.at(row, time)] != 0;
    ForwardRow<S, O, R>& to = w.rows[i];
    w.h[i] = reset ? c_.zeros : before + place * c_.h_stride;
    to.h_prev = w.h[i];
    to.c = state_.c + place * c_.c_stride;
    to.h = projects ? state_.u + place * c_.c_stride : after + place * c_.h_stride;
    to.y = projects ? nullptr : Output(i, step);
    to.gates = c_.call.gates != nullptr
                   ? c_.call.gates[pseudo_layer_] +
                         saved * network.saved_blocks() * network.hidden_size
                   : nullptr;
    to.cells = c_.call.cells != nullptr
                   ? c_.call.cells[pseudo_layer_] + saved * network.hidden_size
                   : nullptr;
    if (reset && network.lstm()) {  // others read h, nobody else these cells
      const int64_t first =
          std::min(blocks.unit(share.begin(blocks.count())), network.hidden_size);
      const int64_t last =
          std::min(blocks.unit(share.end(blocks.count())), network.hidden_size);
      Zero(to.c + first, last - first);
    }
  }
}

template <typename S, typename O, typename R>
void LayerPass<S, O, R>::Project(int64_t step, int64_t active, Share share,
                                 const Workspace<S, O, R>& w) const {
  const Columns columns = c_.packing.projection();
  const int64_t lanes = c_.kernels.lanes, hidden = c_.network().hidden_size;
  for (int64_t i = 0; i < active; ++i) {
    w.h[i] = state_.u + (slice_.first + i) * c_.c_stride;
  }
  const int64_t last = share.end(columns.count());
  for (int64_t q = share.begin(columns.count()); q < last; ++q) {
    const int64_t first = columns.first(q);
    if (c_.packed) {
      const int64_t depth = RoundUp(hidden, c_.kernels.pairs);
      c_.kernels.product[static_cast<int>(columns.tile(q))](
          w.h, 0, active, hidden, weights_.w_hr + first * depth, c_.zero_start, w.pre,
          Stride());
    } else {
      const S* matrix = c_.call.operands.weights + offsets_.w_hr;
      Zero(w.pre, active * Stride());
      for (int64_t v = 0; v < columns.vectors(q); ++v) {
        const int64_t row = first + v * lanes;
        for (int64_t i = 0; i < active; ++i) {
          c_.kernels.dot(matrix + row * hidden, hidden,
                         std::min(lanes, columns.size - row), hidden, w.h[i],
                         w.pre + i * Stride() + v * lanes);
        }
      }
    }
    O* after = state_.h[(step + 1) % 2];
    for (int64_t i = 0; i < active; ++i) {
      S* y = Output(i, step) + first;
      Convert(w.pre + i * Stride(), columns.width(q), y);
      Convert(y, columns.width(q), after + (slice_.first + i) * c_.h_stride + first);
    }
  }
}

template <typename S, typename O, typename R>
void LayerPass<S, O, R>::Finish(int64_t begin, int64_t end) const {
  const Operands<S>& in = c_.call.operands;
  const Network& network = in.network;
  const int64_t out = network.output_size(), hidden = network.hidden_size;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = slice_.row[i], length = slice_.length[i];
    const int64_t to = pseudo_layer_ * in.batch + row, place = slice_.first + i;
    Convert(state_.h[length % 2] + place * c_.h_stride, out, c_.call.h_n + to * out);
    if (network.lstm()) {
      Convert(state_.c + place * c_.c_stride, hidden, c_.call.c_n + to * hidden);
    }
    for (int64_t time = length; time < in.room[row]; ++time) {
      const int64_t saved = in.reserve.at(row, time);
      const int64_t column = direction_ * out;
      if (layer_ + 1 == network.num_layers) {
        Zero(c_.call.y + in.io.at(row, time) * network.width() + column, out);
      } else {
        Zero(c_.hidden[layer_] + saved * network.width() + column, out);
      }
      if (c_.call.gates != nullptr) {
        const int64_t size = network.saved_blocks() * hidden;
        Zero(c_.call.gates[pseudo_layer_] + saved * size, size);
      }
      if (c_.call.cells != nullptr) {
        Zero(c_.call.cells[pseudo_layer_] + saved * hidden, hidden);
      }
    }
  }
}

template class LayerPass<float, float, float>;
template class LayerPass<double, double, double>;
template class LayerPass<BFloat16, float, float>;
template class LayerPass<BFloat16, BFloat16, float>;

}  // namespace ostinato::cpu
