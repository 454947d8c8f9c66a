#include "cpu/pass/layer_pass.h"

#include <type_traits>

namespace ostinato::cpu {

template <typename Storage, typename Operand, typename Accum>
LayerPass<Storage, Operand, Accum>::LayerPass(const Context& context,
                                              int64_t pseudo_layer,
                                              const Sequences& sequences)
    : c_(context),
      pseudo_layer_(pseudo_layer),
      layer_(pseudo_layer / context.network().num_directions),
      direction_(pseudo_layer % context.network().num_directions),
      reverse_(direction_ == 1),
      sequences_(sequences),
      weights_(context.layers[pseudo_layer]),
      state_(context.states[pseudo_layer]),
      offsets_(WeightOffsetsOf(context.network(), pseudo_layer)) {}

template <typename Storage, typename Operand, typename Accum>
Workspace<Storage, Operand, Accum> LayerPass<Storage, Operand, Accum>::MakeWorkspace(
    const Context& context, int64_t rows, Scratch& scratch) {
  const int64_t chunk = std::max(rows, context.input_tokens());
  const bool moves = !std::is_same_v<Storage, Operand> ||
                     context.call.operands.dropout_masks != nullptr ||
                     context.kernels.wants_even_rows;
  Workspace<Storage, Operand, Accum> made;
  made.pre = scratch.Take<Accum>(context.panels.blocks().count() * chunk * 4 *
                                 context.kernels.lanes);
  made.input = scratch.Take<Operand>(moves ? chunk * context.x_stride : 0);
  made.x = scratch.Take<const Operand*>(chunk);
  made.h = scratch.Take<const Operand*>(rows);
  made.tokens = scratch.Take<ForwardToken<Storage, Operand, Accum>>(rows);
  return made;
}

template <typename Storage, typename Operand, typename Accum>
void LayerPass<Storage, Operand, Accum>::Begin() const {
  const Operands<Storage>& in = c_.call.operands;
  const int64_t out = in.network.output_size(), hidden = in.network.hidden_size;
  for (int64_t i = 0; i < sequences_.size; ++i) {
    const int64_t from = pseudo_layer_ * in.batch + sequences_.index[i];
    const int64_t row = sequences_.first + i;
    Convert(in.h_0 + from * out, out, state_.h[0] + row * c_.h_stride);
    for (int64_t s = 0; s < in.network.cells(); ++s) {
      Convert(in.c_0[s] + from * hidden, hidden,
              state_.c + s * c_.cell_stride + row * c_.c_stride);
    }
  }
}

template <typename Storage, typename Operand, typename Accum>
int64_t LayerPass<Storage, Operand, Accum>::Advance(
    int64_t begin, int64_t end, Slice slice, Worker* worker,
    const Workspace<Storage, Operand, Accum>& w) const {
  const int64_t count = c_.panels.blocks().count();
  const int64_t first = slice.begin(count), last = slice.end(count);
  const TileGuard guard(c_.kernels);
  end = std::min(end, sequences_.steps());
  for (int64_t chunk = begin; chunk < end;) {
    const int64_t most = sequences_.Active(chunk);
    const bool fused = most >= c_.kernels.enough_rows;
    const int64_t steps = fused ? 1 : std::max<int64_t>(1, c_.input_tokens() / most);
    const int64_t chunk_end = std::min(end, chunk + steps);
    const int64_t rows = GatherInputs(chunk, chunk_end, w);
    const int64_t block_size = fused ? 0 : rows * Stride();
    if (!fused) {
      for (int64_t j = first; j < last; ++j) {
        const Operand* next = j + 1 < last ? InputPanel(j + 1) : nullptr;
        InputProduct(j, rows, next, w, w.pre + (j - first) * block_size);
      }
    }
    int64_t done = 0;  // tokens of the chunk
    for (int64_t step = chunk; step < chunk_end; ++step) {
      const int64_t active = sequences_.Active(step);
      GatherTokens(step, active, slice, w);
      for (int64_t n = 0; n < last - first; ++n) {
        // Back and forth: what the last step read last is still in the cache.
        const int64_t way = step % 2 == 0 ? 1 : -1;
        const int64_t j = way > 0 ? first + n : last - 1 - n;
        Accum* pre = w.pre + (j - first) * block_size + done * Stride();
        if (fused) InputProduct(j, active, RecurrentPanel(j), w, pre);
        const Operand* next = nullptr;
        if (n + 1 < last - first) {
          next = fused ? InputPanel(j + way) : RecurrentPanel(j + way);
        }
        RecurrentProduct(j, active, next, w, pre);
        Equations(j, active, next, w, pre);
      }
      if (c_.network().proj_size > 0) {
        if (worker != nullptr) worker->Sync();
        Project(step, active, slice, w);
      }
      if (worker != nullptr && !worker->SyncAndContinue()) return step + 1;
      done += fused ? 0 : active;
    }
    chunk = chunk_end;
  }
  return end;
}

template <typename Storage, typename Operand, typename Accum>
int64_t LayerPass<Storage, Operand, Accum>::GatherInputs(
    int64_t begin, int64_t end, const Workspace<Storage, Operand, Accum>& w) const {
  const Operands<Storage>& in = c_.call.operands;
  const int64_t size = in.network.inputs(layer_);
  const uint8_t* mask = in.dropout_masks != nullptr && layer_ > 0
                            ? in.dropout_masks[layer_ - 1]
                            : nullptr;
  const auto scale = static_cast<Accum>(in.network.dropout_scale);
  int64_t count = 0;
  for (int64_t step = begin; step < end; ++step) {
    const int64_t active = sequences_.Active(step);
    for (int64_t i = 0; i < active; ++i, ++count) {
      const int64_t sequence = sequences_.index[i], time = Time(i, step);
      const int64_t token = in.io.at(sequence, time);
      const Storage* from =
          layer_ == 0 ? in.x + token * size
                      : c_.hidden[layer_ - 1] + in.reserve.at(sequence, time) * size;
      if constexpr (std::is_same_v<Storage, Operand>) {
        if (mask == nullptr && !c_.kernels.wants_even_rows) {
          w.x[count] = from;
          continue;
        }
      }
      Operand* to = w.input + count * c_.x_stride;
      if (mask == nullptr) {
        Convert(from, size, to);
      } else {
        Drop(from, mask + token * size, scale, size, to);
      }
      w.x[count] = to;
    }
  }
  return count;
}

template <typename Storage, typename Operand, typename Accum>
const Operand* LayerPass<Storage, Operand, Accum>::InputPanel(int64_t block) const {
  if (!c_.uses_panels || weights_.w_ih == nullptr) return nullptr;
  return weights_.w_ih + block * c_.panels.panel(c_.network().inputs(layer_));
}

template <typename Storage, typename Operand, typename Accum>
const Operand* LayerPass<Storage, Operand, Accum>::RecurrentPanel(int64_t block) const {
  if (!c_.uses_panels || weights_.w_hh == nullptr) return nullptr;
  return weights_.w_hh + block * c_.panels.recurrent_panel();
}

template <typename Storage, typename Operand, typename Accum>
void LayerPass<Storage, Operand, Accum>::InputProduct(
    int64_t block, int64_t rows, const Operand* next,
    const Workspace<Storage, Operand, Accum>& w, Accum* pre) const {
  const auto& panels = c_.panels;
  const int64_t size = c_.network().inputs(layer_);
  const Accum* bias = weights_.bias + block * Stride();
  if (const Operand* panel = InputPanel(block)) {
    c_.kernels.product[static_cast<int>(panels.input_shape(block))](
        w.x, 0, rows, size, panel, next, bias, pre, Stride());
    return;
  }
  if (offsets_.w_ih >= 0) {
    for (int64_t r = 0; r < rows; ++r) Convert(bias, Stride(), pre + r * Stride());
    return UnpackedInput(block, rows, w, pre);
  }
  const Blocks& blocks = panels.blocks();  // input_mode="skip"
  const int64_t step = c_.network().gates() > 1 ? 0 : c_.kernels.lanes;
  c_.kernels.add_rows(w.x, blocks.unit(block), step, blocks.units(block), rows,
                      blocks.vectors(block), bias, pre, Stride());
}

template <typename Storage, typename Operand, typename Accum>
void LayerPass<Storage, Operand, Accum>::RecurrentProduct(
    int64_t block, int64_t rows, const Operand* next,
    const Workspace<Storage, Operand, Accum>& w, Accum* pre) const {
  const auto& panels = c_.panels;
  const Blocks& blocks = panels.blocks();
  const HeadParts& outputs = panels.heads().outputs;
  if (panels.heads().units.head == 1 && c_.network().num_heads > 1) {
    const bool gated = c_.network().gates() > 1;
    c_.kernels.add_scaled_rows(
        w.h, blocks.unit(block), gated ? 0 : c_.kernels.lanes, blocks.units(block),
        rows, blocks.vectors(block), c_.network().gru(),
        c_.call.operands.weights + offsets_.w_hh + blocks.unit(block),
        gated ? outputs.size : c_.kernels.lanes, pre, Stride());
    return;
  }
  if (!c_.uses_panels) return UnpackedRecurrent(block, rows, w, pre);
  const int64_t group = blocks.group(block);
  c_.kernels.product[static_cast<int>(panels.recurrent_shape(block))](
      w.h, outputs.first(group), rows, outputs.count(group), RecurrentPanel(block),
      next, nullptr, pre, Stride());
}

// Products of a few rows wait for panels that are far away, and equations wait for
// nothing: they ask for some of the next panel in between.
template <typename Storage, typename Operand, typename Accum>
void LayerPass<Storage, Operand, Accum>::Equations(
    int64_t block, int64_t rows, const Operand* next,
    const Workspace<Storage, Operand, Accum>& w, const Accum* pre) const {
  constexpr int64_t kTokens = 2, kLines = 12;  // of each token, what L3 sends meanwhile
  const Blocks& blocks = c_.panels.blocks();
  const auto options = c_.network().template cell_options<Accum>(c_.cell_stride);
  const auto equations = c_.kernels.forward[static_cast<int>(c_.network().mode)];
  const bool waits = c_.far_panels && rows < c_.kernels.enough_rows;
  const int64_t each = waits && next != nullptr ? kTokens : rows;
  const char* line = reinterpret_cast<const char*>(next);
  for (int64_t first = 0; first < rows; first += each) {
    const int64_t now = std::min(each, rows - first);
    const char* const end = line + (each < rows ? now * kLines * 64 : 0);
    for (; line < end; line += 64) __builtin_prefetch(line, 0, 2);
    equations(options, pre + first * Stride(), Stride(), w.tokens + first, now,
              blocks.unit(block), blocks.units(block));
  }
}

template <typename Storage, typename Operand, typename Accum>
void LayerPass<Storage, Operand, Accum>::UnpackedInput(
    int64_t block, int64_t rows, const Workspace<Storage, Operand, Accum>& w,
    Accum* pre) const {
  const Blocks& blocks = c_.panels.blocks();
  const Storage* matrix = c_.call.operands.weights + offsets_.w_ih;
  const int64_t depth = c_.network().inputs(layer_);
  for (int64_t v = 0; v < blocks.vectors(block); ++v) {
    for (int64_t r = 0; r < rows; ++r) {
      c_.kernels.dot(matrix + blocks.row(block, v) * depth, depth,
                     blocks.lanes(block, v), depth, w.x[r],
                     pre + r * Stride() + v * c_.kernels.lanes);
    }
  }
}

template <typename Storage, typename Operand, typename Accum>
void LayerPass<Storage, Operand, Accum>::UnpackedRecurrent(
    int64_t block, int64_t rows, const Workspace<Storage, Operand, Accum>& w,
    Accum* pre) const {
  const Blocks& blocks = c_.panels.blocks();
  const HeadMatrix<Storage> w_hh = Recurrent();
  for (int64_t v = 0; v < blocks.vectors(block); ++v) {
    // The recurrent product of a GRU's candidate is kept apart.
    const int64_t to = c_.network().gru() && v == 2 ? 3 : v;
    for (int64_t r = 0; r < rows; ++r) {
      DotHeads(w_hh, blocks.row(block, v), blocks.lanes(block, v), w.h[r],
               pre + r * Stride() + to * c_.kernels.lanes);
    }
  }
}

template <typename Storage, typename Operand, typename Accum>
void LayerPass<Storage, Operand, Accum>::DotHeads(const HeadMatrix<Storage>& matrix,
                                                  int64_t row, int64_t lanes,
                                                  const Operand* a, Accum* out) const {
  const int64_t depth = matrix.columns.head;
  for (int64_t n = 0; n < lanes;) {
    const int64_t unit = (row + n) % matrix.rows.size, head = unit / matrix.rows.head;
    const int64_t count = std::min(lanes - n, (head + 1) * matrix.rows.head - unit);
    c_.kernels.dot(matrix.data + (row + n) * depth, depth, count, depth,
                   a + head * depth, out + n);
    n += count;
  }
}

template <typename Storage, typename Operand, typename Accum>
Storage* LayerPass<Storage, Operand, Accum>::Output(int64_t i, int64_t step) const {
  const Operands<Storage>& in = c_.call.operands;
  const int64_t sequence = sequences_.index[i], time = Time(i, step);
  const int64_t column = direction_ * in.network.output_size();
  if (layer_ + 1 == in.network.num_layers) {
    return c_.call.y + in.io.at(sequence, time) * in.network.width() + column;
  }
  return c_.hidden[layer_] + in.reserve.at(sequence, time) * in.network.width() +
         column;
}

template <typename Storage, typename Operand, typename Accum>
void LayerPass<Storage, Operand, Accum>::GatherTokens(
    int64_t step, int64_t active, Slice slice,
    const Workspace<Storage, Operand, Accum>& w) const {
  const Operands<Storage>& in = c_.call.operands;
  const Network& network = in.network;
  const Blocks& blocks = c_.panels.blocks();
  const bool projects = network.proj_size > 0;
  const Operand* before = state_.h[step % 2];
  Operand* after = state_.h[(step + 1) % 2];
  for (int64_t i = 0; i < active; ++i) {
    const int64_t sequence = sequences_.index[i], row = sequences_.first + i;
    const int64_t time = Time(i, step);
    const int64_t saved = in.reserve.at(sequence, time);
    const bool reset = in.resets != nullptr && in.resets[in.io.at(sequence, time)] != 0;
    ForwardToken<Storage, Operand, Accum>& to = w.tokens[i];
    w.h[i] = reset ? c_.zeros : before + row * c_.h_stride;
    to.h_prev = w.h[i];
    to.c = state_.c + row * c_.c_stride;
    to.h =
        projects ? state_.unprojected + row * c_.c_stride : after + row * c_.h_stride;
    to.y = projects ? nullptr : Output(i, step);
    to.gates = c_.call.gates != nullptr
                   ? c_.call.gates[pseudo_layer_] +
                         saved * network.saved_blocks() * network.hidden_size
                   : nullptr;
    const int64_t cells = network.cells();
    for (int64_t s = 0; s < cells; ++s) {
      to.cells[s] =
          c_.call.cells != nullptr
              ? c_.call.cells[pseudo_layer_ * cells + s] + saved * network.hidden_size
              : nullptr;
    }
    if (!reset || cells == 0) continue;  // other workers read h, none these cells
    const int64_t first =
        std::min(blocks.unit(slice.begin(blocks.count())), network.hidden_size);
    const int64_t last =
        std::min(blocks.unit(slice.end(blocks.count())), network.hidden_size);
    for (int64_t s = 0; s < cells; ++s) {
      Zero(to.c + s * c_.cell_stride + first, last - first);
    }
  }
}

template <typename Storage, typename Operand, typename Accum>
void LayerPass<Storage, Operand, Accum>::Project(
    int64_t step, int64_t active, Slice slice,
    const Workspace<Storage, Operand, Accum>& w) const {
  const Columns columns = c_.panels.projection();
  const Heads& heads = c_.panels.heads();
  const int64_t lanes = c_.kernels.lanes;
  for (int64_t i = 0; i < active; ++i) {
    w.h[i] = state_.unprojected + (sequences_.first + i) * c_.c_stride;
  }
  const int64_t last = slice.end(columns.count());
  for (int64_t q = slice.begin(columns.count()); q < last; ++q) {
    const int64_t first = columns.first(q);
    if (c_.uses_panels) {
      const int64_t group = columns.group(q);
      c_.kernels.product[static_cast<int>(columns.shape(q))](
          w.h, heads.units.first(group), active, heads.units.count(group),
          weights_.w_hr + columns.place(q) * c_.panels.projection_depth(), nullptr,
          c_.zero_start, w.pre, Stride());
    } else {
      const HeadMatrix<Storage> w_hr{c_.call.operands.weights + offsets_.w_hr, 1,
                                     heads.outputs, heads.units};
      Zero(w.pre, active * Stride());
      for (int64_t v = 0; v < columns.vectors(q); ++v) {
        const int64_t row = v * lanes;
        for (int64_t i = 0; i < active; ++i) {
          DotHeads(w_hr, first + row, std::min(lanes, columns.width(q) - row), w.h[i],
                   w.pre + i * Stride() + row);
        }
      }
    }
    Operand* after = state_.h[(step + 1) % 2];
    for (int64_t i = 0; i < active; ++i) {
      Storage* y = Output(i, step) + first;
      Convert(w.pre + i * Stride(), columns.width(q), y);
      Convert(y, columns.width(q),
              after + (sequences_.first + i) * c_.h_stride + first);
    }
  }
}

template <typename Storage, typename Operand, typename Accum>
void LayerPass<Storage, Operand, Accum>::Finish() const {
  const Operands<Storage>& in = c_.call.operands;
  const Network& network = in.network;
  const int64_t out = network.output_size(), hidden = network.hidden_size;
  for (int64_t i = 0; i < sequences_.size; ++i) {
    const int64_t sequence = sequences_.index[i], length = sequences_.length[i];
    const int64_t to = pseudo_layer_ * in.batch + sequence, row = sequences_.first + i;
    Convert(state_.h[length % 2] + row * c_.h_stride, out, c_.call.h_n + to * out);
    for (int64_t s = 0; s < network.cells(); ++s) {
      Convert(state_.c + s * c_.cell_stride + row * c_.c_stride, hidden,
              c_.call.c_n[s] + to * hidden);
    }
    for (int64_t time = length; time < in.capacity[sequence]; ++time) {
      const int64_t saved = in.reserve.at(sequence, time);
      const int64_t column = direction_ * out;
      if (layer_ + 1 == network.num_layers) {
        Zero(c_.call.y + in.io.at(sequence, time) * network.width() + column, out);
      } else {
        Zero(c_.hidden[layer_] + saved * network.width() + column, out);
      }
      if (c_.call.gates != nullptr) {
        const int64_t size = network.saved_blocks() * hidden;
        Zero(c_.call.gates[pseudo_layer_] + saved * size, size);
      }
      for (int64_t s = 0; c_.call.cells != nullptr && s < network.cells(); ++s) {
        Zero(c_.call.cells[pseudo_layer_ * network.cells() + s] + saved * hidden,
             hidden);
      }
    }
  }
}

template class LayerPass<float, float, float>;
template class LayerPass<double, double, double>;
template class LayerPass<BFloat16, float, float>;
template class LayerPass<BFloat16, BFloat16, float>;

}  // namespace ostinato::cpu
