#include "cpu/pass/gradient_products.h"

#include <type_traits>

namespace ostinato::cpu {
namespace {

constexpr int64_t kBiasesPerTask = 512;  // elements

}  // namespace

template <typename Storage, typename Operand, typename Accum>
auto ProductBuffers<Storage, Operand, Accum>::Make(const Context& context,
                                                   Scratch& scratch) -> ProductBuffers {
  const Network& n = context.network();
  const int64_t most = context.most_tokens, hidden = n.hidden_size;
  const int64_t projected = n.proj_size > 0 ? most : 0;
  const int64_t inputs = MostInputs(n), gate_rows = n.gates() * hidden;
  const int64_t columns = context.blocks() * hidden;
  const auto wide = [&](int64_t size) { return RoundUp(size, context.kernels.lanes); };
  ProductBuffers made;
  made.w_ih = TakePanels(context, gate_rows, inputs, scratch);
  made.w_ih_rows = scratch.Take<const Storage*>(gate_rows);
  made.dx = scratch.Take<Accum*>(most);
  made.adds = scratch.Take<bool>(most);
  made.dg_columns = scratch.Take<Operand>(columns * context.column_stride);
  made.dp_columns = scratch.Take<Operand>(n.proj_size * context.column_stride);
  made.dg_column_rows = scratch.Take<const Operand*>(columns);
  made.x_column_rows = scratch.Take<const Operand*>(gate_rows);
  made.dp_column_rows = scratch.Take<const Operand*>(n.proj_size);
  made.x_panels = TakePanels(context, most, inputs, scratch);
  const Heads& heads = context.heads();
  const int64_t outputs = heads.groups * wide(heads.outputs.group);
  made.h_panels = TakePanels(context, most, outputs, scratch);
  made.unprojected_panels =
      TakePanels(context, projected, heads.groups * wide(heads.units.group), scratch);
  made.wide_unprojected = scratch.Take<Accum>(projected * context.c_stride);
  made.unprojected = scratch.Take<Storage>(projected * hidden);
  made.unprojected_rows = scratch.Take<const Storage*>(projected);
  made.dw_ih = scratch.Take<Accum>(gate_rows * wide(inputs));
  made.dw_hh = scratch.Take<Accum>(gate_rows * wide(heads.outputs.group));
  made.dw_hr = scratch.Take<Accum>(n.proj_size * wide(heads.units.group));
  made.db = scratch.Take<Accum>(columns);
  const bool parts = context.call.operands.tokens > SumParts::kTokens;
  const auto part = [&](int64_t size) { return scratch.Take<Accum>(parts ? size : 0); };
  made.part_ih = part(gate_rows * wide(inputs));
  made.part_hh = part(gate_rows * wide(heads.outputs.group));
  made.part_hr = part(n.proj_size * wide(heads.units.group));
  made.part_db = part(columns);
  for (int64_t m = 0; m < columns; ++m) {
    made.dg_column_rows[m] = made.dg_columns + m * context.column_stride;
  }
  for (int64_t m = 0; m < gate_rows; ++m) {
    const int64_t block = n.traits().x_blocks[m / hidden];
    made.x_column_rows[m] = made.dg_column_rows[block * hidden + m % hidden];
  }
  for (int64_t m = 0; m < n.proj_size; ++m) {
    made.dp_column_rows[m] = made.dp_columns + m * context.column_stride;
  }
  for (int64_t r = 0; r < projected; ++r) {
    made.unprojected_rows[r] = made.unprojected + r * hidden;
  }
  return made;
}

template <typename Storage, typename Operand, typename Accum>
GradientProducts<Storage, Operand, Accum>::GradientProducts(
    const Layer& layer, const Chunk<Storage, Operand, Accum>& chunk,
    const Buffers& buffers)
    : l_(layer), chunk_(chunk), b_(buffers) {
  if (l_.offsets.w_ih < 0) return;
  const Storage* w_ih = l_.context.call.operands.weights + l_.offsets.w_ih;
  for (int64_t m = 0; m < l_.gate_rows(); ++m) b_.w_ih_rows[m] = w_ih + m * l_.inputs;
}

// -------------------------------------------------------------- before the steps

template <typename Storage, typename Operand, typename Accum>
void GradientProducts<Storage, Operand, Accum>::PackInput(int64_t first) const {
  if (l_.offsets.w_ih < 0 || !l_.wants_inputs()) return;
  l_.PackPanels(b_.w_ih_rows, l_.gate_rows(), first, l_.ColumnsOf(l_.inputs), b_.w_ih);
}

template <typename Storage, typename Operand, typename Accum>
void GradientProducts<Storage, Operand, Accum>::Begin() const {
  Zero(b_.db, l_.context.blocks() * l_.hidden);
}

template <typename Storage, typename Operand, typename Accum>
void GradientProducts<Storage, Operand, Accum>::Gather(int64_t i, int64_t step,
                                                       int64_t token) const {
  if (!l_.wants_inputs()) return;
  const auto& c = l_.context;
  const Operands<Storage>& in = c.call.operands;
  const int64_t sequence = c.sequences.index[i], time = l_.Time(i, step);
  const TokenMap& map = l_.layer == 0 ? in.io : in.reserve;
  b_.dx[token] = c.d_inputs + map.at(sequence, time) * l_.inputs;
  // The other direction's step at the same time: it has been there before in a later
  // chunk, or in this one if it is the first of the two.
  const int64_t other = c.sequences.length[i] - 1 - step;
  const int64_t done = l_.reverse ? chunk_.begin : chunk_.end;
  b_.adds[token] = l_.network.num_directions == 2 && other >= done;
}

template <typename Storage, typename Operand, typename Accum>
int64_t GradientProducts<Storage, Operand, Accum>::unproject_tasks() const {
  const bool wanted = l_.projects() && l_.wants_weights();
  return wanted ? CeilDiv(chunk_.count, l_.rows_per_task()) : 0;
}

template <typename Storage, typename Operand, typename Accum>
void GradientProducts<Storage, Operand, Accum>::Unproject(int64_t task) const {
  const auto& c = l_.context;
  const auto [first, last] = l_.RowsOf(task, chunk_.count);
  const Network& n = l_.network;
  c.kernels.output[static_cast<int>(n.mode)](
      n.cell_options<Accum>(c.cell_stride), chunk_.tokens + first, last - first,
      b_.wide_unprojected + first * c.c_stride, c.c_stride);
  for (int64_t r = first; r < last; ++r) {
    Convert(b_.wide_unprojected + r * c.c_stride, l_.hidden,
            b_.unprojected + r * l_.hidden);
  }
}

// --------------------------------------------------------------- after the steps

template <typename Storage, typename Operand, typename Accum>
int64_t GradientProducts<Storage, Operand, Accum>::pack_tasks() const {
  return l_.wants_weights() ? CeilDiv(chunk_.count, l_.rows_per_task()) : 0;
}

template <typename Storage, typename Operand, typename Accum>
void GradientProducts<Storage, Operand, Accum>::Pack(int64_t task) const {
  const auto& c = l_.context;
  const int64_t first = task * l_.rows_per_task();
  const int64_t rows = std::min(chunk_.count - first, l_.rows_per_task());
  c.kernels.transpose(chunk_.dg + first * c.g_stride, c.g_stride, rows,
                      c.blocks() * l_.hidden, b_.dg_columns + first, c.column_stride);
  l_.PackPanels(chunk_.h, chunk_.count, first, l_.ColumnsOf(c.heads().outputs),
                b_.h_panels);
  if (l_.offsets.w_ih >= 0) {
    l_.PackPanels(chunk_.x, chunk_.count, first, l_.ColumnsOf(l_.inputs), b_.x_panels);
  }
  if (l_.projects()) {
    c.kernels.transpose(chunk_.dp + first * c.h_stride, c.h_stride, rows,
                        l_.network.proj_size, b_.dp_columns + first, c.column_stride);
    l_.PackPanels(b_.unprojected_rows, chunk_.count, first,
                  l_.ColumnsOf(c.heads().units), b_.unprojected_panels);
  }
}

template <typename Storage, typename Operand, typename Accum>
auto GradientProducts<Storage, Operand, Accum>::HiddenProduct() const -> WeightProduct {
  const HeadMatrix<Storage> w_hh = l_.w_hh();
  return {b_.dg_column_rows,
          w_hh,
          l_.ColumnsOf(w_hh.columns),
          b_.h_panels,
          l_.offsets.w_hh,
          b_.dw_hh,
          b_.part_hh};
}

template <typename Storage, typename Operand, typename Accum>
auto GradientProducts<Storage, Operand, Accum>::InputProduct() const -> WeightProduct {
  const int64_t rows = l_.offsets.w_ih >= 0 ? l_.gate_rows() : 0;
  const HeadParts columns{l_.inputs, l_.inputs, l_.inputs};
  return {b_.x_column_rows,
          {nullptr, 1, {rows, rows, rows}, columns},
          l_.ColumnsOf(columns),
          b_.x_panels,
          l_.offsets.w_ih,
          b_.dw_ih,
          b_.part_ih};
}

template <typename Storage, typename Operand, typename Accum>
auto GradientProducts<Storage, Operand, Accum>::ProjectionProduct() const
    -> WeightProduct {
  HeadMatrix<Storage> w_hr = l_.w_hr();
  if (!l_.projects()) w_hr.blocks = 0;
  return {b_.dp_column_rows,
          w_hr,
          l_.ColumnsOf(w_hr.columns),
          b_.unprojected_panels,
          l_.offsets.w_hr,
          b_.dw_hr,
          b_.part_hr};
}

template <typename Storage, typename Operand, typename Accum>
int64_t GradientProducts<Storage, Operand, Accum>::input_tasks() const {
  return l_.wants_inputs() ? CeilDiv(chunk_.count, l_.rows_per_task()) : 0;
}

template <typename Storage, typename Operand, typename Accum>
int64_t GradientProducts<Storage, Operand, Accum>::tasks() const {
  int64_t tasks = input_tasks();
  if (l_.wants_weights()) {
    for (const auto& product : {HiddenProduct(), InputProduct(), ProjectionProduct()}) {
      tasks += product.tasks();
    }
    tasks += CeilDiv(l_.context.blocks() * l_.hidden, kBiasesPerTask);
  }
  return tasks;
}

template <typename Storage, typename Operand, typename Accum>
void GradientProducts<Storage, Operand, Accum>::Run(int64_t task) const {
  const TileGuard guard(l_.context.kernels);
  // The largest first, so that the threads end at about the same time.
  if (task < input_tasks()) return InputGradient(task);
  task -= input_tasks();
  for (const auto& product : {HiddenProduct(), InputProduct(), ProjectionProduct()}) {
    if (task < product.tasks()) return AddWeightProduct(product, task);
    task -= product.tasks();
  }
  AddBiases(task);
}

template <typename Storage, typename Operand, typename Accum>
auto GradientProducts<Storage, Operand, Accum>::SumOf(
    const WeightProduct& product) const -> Sum {
  const HeadParts& columns = product.matrix.columns;
  if constexpr (std::is_same_v<Storage, Accum>) {
    if (columns.head == columns.group && columns.head % l_.lanes() == 0) {
      return {l_.context.call.dweights + product.offset, columns.head};
    }
  }
  return {product.buffer, RoundUp(columns.group, l_.lanes())};
}

template <typename Storage, typename Operand, typename Accum>
void GradientProducts<Storage, Operand, Accum>::AddWeightProduct(
    const WeightProduct& product, int64_t task) const {
  const Sum sum = SumOf(product);
  const HeadParts& all = product.matrix.rows;
  const int64_t piece = task % product.pieces() * kWeightsPerTask;
  const int64_t group = task / product.pieces() % product.Groups();
  const int64_t block = task / product.pieces() / product.Groups();
  const int64_t first = block * all.size + all.first(group) + piece;
  const int64_t rows = std::min(all.count(group) - piece, kWeightsPerTask);
  if (rows <= 0) return;
  const Columns& columns = product.columns;
  const int64_t end = std::min(columns.count(), (group + 1) * columns.per_group());
  const int64_t at = first * sum.stride;
  SumParts parts = parts_;
  parts.ForEach(chunk_.count, [&](int64_t token, int64_t count) {
    Accum* const to = (parts.first ? sum.data : product.part) + at;
    for (int64_t q = group * columns.per_group(); q < end; ++q) {
      l_.Multiply(columns.shape(q), product.a + first, token, rows, count,
                  product.panels + columns.place(q) * l_.PaddedDepth(chunk_.count) +
                      token * columns.vectors(q) * l_.lanes(),
                  nullptr,  // all of them stay in the second-level cache
                  parts.begins() ? l_.context.zeros : nullptr,
                  to + columns.first(q) - product.matrix.columns.first(group),
                  sum.stride);
    }
    if (parts.ends(count)) {
      Add(to, nullptr, Accum{1}, rows * sum.stride, sum.data + at);
    }
  });
}

// The sum over the tokens of a chunk is a product with ones.
template <typename Storage, typename Operand, typename Accum>
void GradientProducts<Storage, Operand, Accum>::AddBiases(int64_t task) const {
  const auto& c = l_.context;
  const int64_t first = task * kBiasesPerTask;
  const int64_t last = std::min(c.blocks() * l_.hidden, first + kBiasesPerTask);
  SumParts parts = parts_;
  parts.ForEach(chunk_.count, [&](int64_t token, int64_t count) {
    Accum* const to = parts.first ? b_.db : b_.part_db;
    if (!parts.first && parts.begins()) Zero(to + first, last - first);
    for (int64_t m = first; m < last; m += l_.lanes()) {
      c.sums.dot(b_.dg_column_rows[m] + token, c.column_stride,
                 std::min(l_.lanes(), last - m), count, c.ones, to + m);
    }
    if (parts.ends(count)) {
      Add(to + first, nullptr, Accum{1}, last - first, b_.db + first);
    }
  });
}

template <typename Storage, typename Operand, typename Accum>
void GradientProducts<Storage, Operand, Accum>::InputGradient(int64_t task) const {
  const int64_t first = task * l_.rows_per_task();
  const int64_t rows = std::min(chunk_.count - first, l_.rows_per_task());
  if (l_.offsets.w_ih < 0) return SkipGradient(first, first + rows);
  Accum products[kMostRowsPerTask * 4 * kMostLanes];
  const int64_t stride = 4 * l_.lanes(), depth = l_.gate_rows();
  const int64_t gates = l_.network.gates(), *blocks = l_.network.traits().x_blocks;
  const Columns columns = l_.ColumnsOf(l_.inputs);
  for (int64_t q = 0; q < columns.count(); ++q) {
    const Operand* panel = b_.w_ih + columns.first(q) * l_.PaddedDepth(depth);
    for (int64_t gate = 0; gate < gates;) {  // as many gates at once as stand in a row
      int64_t end = gate + 1;
      while (end < gates && blocks[end] == blocks[end - 1] + 1) ++end;
      const int64_t step = l_.hidden * columns.vectors(q) * l_.lanes();
      const bool last = end == gates && q + 1 == columns.count();
      l_.Multiply(columns.shape(q), chunk_.dg_rows + first, blocks[gate] * l_.hidden,
                  rows, (end - gate) * l_.hidden, panel + gate * step,
                  last ? nullptr : panel + end * step,
                  gate == 0 ? l_.context.zeros : nullptr, products, stride);
      gate = end;
    }
    for (int64_t r = 0; r < rows; ++r) {
      Accum* to = b_.dx[first + r] + columns.first(q);
      if (b_.adds[first + r]) {
        Add(products + r * stride, nullptr, Accum{1}, columns.width(q), to);
      } else {
        Convert(products + r * stride, columns.width(q), to);
      }
    }
  }
}

template <typename Storage, typename Operand, typename Accum>
void GradientProducts<Storage, Operand, Accum>::SkipGradient(int64_t first,
                                                             int64_t last) const {
  for (int64_t r = first; r < last; ++r) {
    if (!b_.adds[r]) Zero(b_.dx[r], l_.inputs);
    for (int64_t gate = 0; gate < l_.network.gates(); ++gate) {
      const int64_t from = l_.network.traits().x_blocks[gate] * l_.hidden;
      Add(chunk_.dg_rows[r] + from, nullptr, Accum{1}, l_.hidden, b_.dx[r]);
    }
  }
}

// --------------------------------------------------------- after the last chunk

template <typename Storage, typename Operand, typename Accum>
void GradientProducts<Storage, Operand, Accum>::Finish(int64_t task) const {
  if (!l_.wants_weights()) return;
  if (task == 0) return FinishBiases();
  if (task == 1) return FinishWeights(HiddenProduct());
  if (task == 2) return FinishWeights(InputProduct());
  FinishWeights(ProjectionProduct());
}

template <typename Storage, typename Operand, typename Accum>
void GradientProducts<Storage, Operand, Accum>::FinishBiases() const {
  Storage* to = l_.context.call.dweights;
  const WeightOffsets& at = l_.offsets;
  if (parts_.pending()) {
    Add(b_.part_db, nullptr, Accum{1}, l_.context.blocks() * l_.hidden, b_.db);
  }
  if (at.b_hh >= 0) Convert(b_.db, l_.gate_rows(), to + at.b_hh);
  if (at.b_ih < 0) return;
  for (int64_t gate = 0; gate < l_.network.gates(); ++gate) {
    const int64_t from = l_.network.traits().x_blocks[gate] * l_.hidden;
    Convert(b_.db + from, l_.hidden, to + at.b_ih + gate * l_.hidden);
  }
}

template <typename Storage, typename Operand, typename Accum>
void GradientProducts<Storage, Operand, Accum>::FinishWeights(
    const WeightProduct& product) const {
  if (product.rows() == 0) return;
  const Sum sum = SumOf(product);
  if (parts_.empty()) Zero(sum.data, product.rows() * sum.stride);
  if (parts_.pending()) {
    Add(product.part, nullptr, Accum{1}, product.rows() * sum.stride, sum.data);
  }
  if (sum.data != product.buffer) return;
  const HeadParts &rows = product.matrix.rows, &columns = product.matrix.columns;
  for (int64_t m = 0; m < product.rows(); ++m) {
    const int64_t head = m % rows.size / rows.head;
    const int64_t own =
        head * columns.head % columns.group;  // the first is in the group
    Convert(sum.data + m * sum.stride + own, columns.head,
            l_.context.call.dweights + product.offset + m * columns.head);
  }
}

template struct ProductBuffers<float, float, float>;
template struct ProductBuffers<double, double, double>;
template struct ProductBuffers<BFloat16, float, float>;
template struct ProductBuffers<BFloat16, BFloat16, float>;
template class GradientProducts<float, float, float>;
template class GradientProducts<double, double, double>;
template class GradientProducts<BFloat16, float, float>;
template class GradientProducts<BFloat16, BFloat16, float>;

}  // namespace ostinato::cpu
