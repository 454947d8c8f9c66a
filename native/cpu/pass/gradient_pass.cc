#include "cpu/pass/gradient_pass.h"

#include <type_traits>

#include "cpu/network/values.h"
#include "cpu/runtime/caches.h"

namespace ostinato::cpu {
namespace {

constexpr int64_t kWeightsPerTask = 96;  // rows of a weight gradient
constexpr int64_t kBiasesPerTask = 512;  // elements
constexpr int64_t kMostLanes = 16;

}  // namespace

template <typename S, typename O, typename R>
auto GradientPass<S, O, R>::MakeBuffers(const Context& c, Scratch& scratch) -> Buffers {
  const Network& n = c.network();
  const int64_t batch = c.call.operands.batch, chunk = c.most_rows;
  const int64_t hidden = n.hidden_size, out = n.output_size(), proj = n.proj_size;
  const int64_t inputs =
      n.num_layers > 1 ? std::max(n.input_size, n.width()) : n.input_size;
  const int64_t lanes = c.kernels.lanes, gate_rows = n.gates() * hidden;
  const auto wide = [&](int64_t size) { return RoundUp(size, lanes); };
  const auto reals = [&](int64_t count) { return scratch.Take<R>(count); };
  const auto factors = [&](int64_t count) { return scratch.Take<O>(count); };
  const auto panels = [&](int64_t depth, int64_t columns) {
    return factors(RoundUp(depth, c.kernels.pairs) * wide(columns));
  };
  Buffers b{};
  b.w_hh = panels(gate_rows, out);
  b.w_ih = panels(gate_rows, inputs);
  b.w_hr = panels(proj, hidden);
  b.w_hh_rows = scratch.Take<const S*>(gate_rows);
  b.w_ih_rows = scratch.Take<const S*>(gate_rows);
  b.w_hr_rows = scratch.Take<const S*>(proj);
  b.dh = scratch.TakeZeroed<R>(batch * c.h_stride);
  b.du = scratch.TakeZeroed<R>(proj > 0 ? batch * c.c_stride : 0);
  b.dc = scratch.TakeZeroed<R>(batch * c.c_stride);
  b.c_0 = reals(n.lstm() ? batch * hidden : 0);
  b.dg = factors(chunk * c.g_stride);
  b.dg_columns = factors(c.blocks() * hidden * c.r_stride);
  b.dp = factors(proj > 0 ? chunk * c.h_stride : 0);
  b.dp_columns = factors(proj * c.r_stride);
  b.dg_rows = scratch.Take<const O*>(chunk);
  b.dg_column_rows = scratch.Take<const O*>(c.blocks() * hidden);
  b.dp_rows = scratch.Take<const O*>(proj > 0 ? chunk : 0);
  b.dp_column_rows = scratch.Take<const O*>(proj);
  b.rows = scratch.Take<BackwardRow<S, O, R>>(chunk);
  b.place = scratch.Take<int64_t>(chunk);
  b.first = scratch.Take<int64_t>(chunk);
  b.dx = scratch.Take<R*>(chunk);
  b.adds = scratch.Take<bool>(chunk);
  b.x = scratch.Take<const S*>(chunk);
  b.h = scratch.Take<const S*>(chunk);
  b.u = scratch.Take<const S*>(proj > 0 ? chunk : 0);
  b.dropped = scratch.Take<S>(c.call.operands.keep != nullptr ? chunk * inputs : 0);
  b.unprojected = scratch.Take<S>(proj > 0 ? chunk * hidden : 0);
  b.output = reals(proj > 0 ? chunk * c.c_stride : 0);
  b.panel_x = panels(chunk, inputs);
  b.panel_h = panels(chunk, out);
  b.panel_u = panels(proj > 0 ? chunk : 0, hidden);
  if (c.again()) {
    b.gates = scratch.Take<S>(chunk * n.saved_blocks() * hidden);
    b.again = scratch.Take<ForwardRow<S, O, R>>(chunk);
    b.pre = reals(c.packing.blocks().count() * chunk * 4 * lanes);
    b.c_again = reals(chunk * c.c_stride);
    b.h_again = factors(chunk * c.c_stride);
    b.again_x = scratch.Take<const O*>(chunk);
    b.again_h = scratch.Take<const O*>(chunk);
    const bool widens = !std::is_same_v<S, O>;
    b.wide_x = factors(widens ? chunk * inputs : 0);
    b.wide_h = factors(widens ? chunk * out : 0);
  }
  b.dw_ih = reals(gate_rows * wide(inputs));
  b.dw_hh = reals(gate_rows * wide(out));
  b.dw_hr = reals(proj * wide(hidden));
  b.db = reals(c.blocks() * hidden);
  for (int64_t r = 0; r < chunk; ++r) b.dg_rows[r] = b.dg + r * c.g_stride;
  for (int64_t m = 0; m < c.blocks() * hidden; ++m) {
    b.dg_column_rows[m] = b.dg_columns + m * c.r_stride;
  }
  if (proj > 0) {
    for (int64_t r = 0; r < chunk; ++r) {
      b.dp_rows[r] = b.dp + r * c.h_stride;
      b.u[r] = b.unprojected + r * hidden;
    }
    for (int64_t m = 0; m < proj; ++m) {
      b.dp_column_rows[m] = b.dp_columns + m * c.r_stride;
    }
  }
  return b;
}

template <typename S, typename O, typename R>
GradientPass<S, O, R>::GradientPass(const Context& context, int64_t pseudo_layer,
                                    const Buffers& buffers)
    : c_(context),
      n_(context.network()),
      pseudo_layer_(pseudo_layer),
      layer_(pseudo_layer / n_.num_directions),
      direction_(pseudo_layer % n_.num_directions),
      reverse_(direction_ == 1),
      offsets_(OffsetsOf(n_, pseudo_layer)),
      b_(buffers),
      inputs_(n_.inputs(layer_)),
      out_(n_.output_size()),
      hidden_(n_.hidden_size) {
  const S* weights = c_.call.operands.weights;
  for (int64_t m = 0; m < rows_of_weights(); ++m) {
    b_.w_hh_rows[m] = weights + offsets_.w_hh + m * out_;
    if (offsets_.w_ih >= 0) b_.w_ih_rows[m] = weights + offsets_.w_ih + m * inputs_;
  }
  for (int64_t m = 0; m < n_.proj_size; ++m) {
    b_.w_hr_rows[m] = weights + offsets_.w_hr + m * hidden_;
  }
}

// ------------------------------------------------------------------------- beginning

template <typename S, typename O, typename R>
int64_t GradientPass<S, O, R>::begin_tasks() const {
  return 1 + CeilDiv(rows_of_weights(), rows_per_task()) +
         CeilDiv(n_.proj_size, rows_per_task());
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::PackPanels(const S* const* rows, int64_t depth,
                                       int64_t first, Columns columns,
                                       O* panels) const {
  const int64_t count = std::min(depth - first, rows_per_task());
  for (int64_t q = 0; q < columns.count(); ++q) {
    O* panel = panels + columns.first(q) * PaddedDepth(depth);
    c_.kernels.pack_columns(rows + first, columns.first(q), count, columns.width(q),
                            panel + first * columns.vectors(q) * lanes());
  }
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::Begin(int64_t task) const {
  if (task == 0) return BeginStates();
  task -= 1;
  const int64_t row_tasks = CeilDiv(rows_of_weights(), rows_per_task());
  if (task >= row_tasks) {
    PackPanels(b_.w_hr_rows, n_.proj_size, (task - row_tasks) * rows_per_task(),
               StepColumnsOf(hidden_), b_.w_hr);
    return;
  }
  const int64_t first = task * rows_per_task();
  PackPanels(b_.w_hh_rows, rows_of_weights(), first, StepColumnsOf(out_), b_.w_hh);
  if (offsets_.w_ih >= 0 && wants_inputs()) {
    PackPanels(b_.w_ih_rows, rows_of_weights(), first, ColumnsOf(inputs_), b_.w_ih);
  }
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::BeginStates() const {
  const BackwardCall<S, R>& call = c_.call;
  const int64_t batch = call.operands.batch;
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t from = pseudo_layer_ * batch + c_.rows.row[i];
    Convert(call.dh_n + from * out_, out_, b_.dh + i * c_.h_stride);
    if (!n_.lstm()) continue;
    Convert(call.dc_n + from * hidden_, hidden_, b_.dc + i * c_.c_stride);
    Convert(call.operands.c_0 + from * hidden_, hidden_, b_.c_0 + i * hidden_);
  }
  Zero(b_.db, c_.blocks() * hidden_);
}

// --------------------------------------------------------------------------- a chunk

template <typename S, typename O, typename R>
bool GradientPass<S, O, R>::ResetAt(int64_t i, int64_t step) const {
  const Operands<S>& in = c_.call.operands;
  return in.resets != nullptr &&
         in.resets[in.io.at(c_.rows.row[i], Time(i, step))] != 0;
}

template <typename S, typename O, typename R>
const S* GradientPass<S, O, R>::OutputAt(int64_t i, int64_t step) const {
  const Operands<S>& in = c_.call.operands;
  const int64_t row = c_.rows.row[i], time = Time(i, step);
  const int64_t column = direction_ * out_;
  if (layer_ + 1 == n_.num_layers) {
    return c_.call.y + in.io.at(row, time) * n_.width() + column;
  }
  return c_.call.hidden[layer_] + in.reserve.at(row, time) * n_.width() + column;
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::BeginChunk(int64_t begin, int64_t end) {
  begin_ = begin;
  count_ = 0;
  end_ = end;
  for (int64_t step = begin; step < end; ++step) {
    b_.first[step - begin] = count_;
    count_ += c_.rows.Active(step);
  }
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::GatherRow(int64_t i, int64_t step, int64_t r) const {
  const BackwardCall<S, R>& call = c_.call;
  const Operands<S>& in = call.operands;
  const int64_t row = c_.rows.row[i], time = Time(i, step);
  const int64_t place = in.io.at(row, time), saved = in.reserve.at(row, time);
  const bool reset = ResetAt(i, step);
  b_.place[r] = place;
  b_.x[r] =
      layer_ == 0 ? in.x + place * inputs_ : call.hidden[layer_ - 1] + saved * inputs_;
  if (wants_inputs()) {
    b_.dx[r] = c_.d_inputs + (layer_ == 0 ? place : saved) * inputs_;
    // The other direction's step at the same time: it has been there before in a later
    // chunk, or in this one if it is the first of the two.
    const int64_t other = c_.rows.length[i] - 1 - step;
    b_.adds[r] = n_.num_directions == 2 && other >= (reverse_ ? begin_ : end_);
  }
  if (reset) {
    b_.h[r] = c_.zero_state;
  } else if (step == 0) {
    b_.h[r] = in.h_0 + (pseudo_layer_ * in.batch + row) * out_;
  } else {
    b_.h[r] = OutputAt(i, step - 1);
  }
  BackwardRow<S, O, R>& to = b_.rows[r];
  to = {};
  to.h_prev = b_.h[r];
  to.dg = b_.dg + r * c_.g_stride;
  to.dh = projects() ? b_.du + i * c_.c_stride : b_.dh + i * c_.h_stride;
  if (n_.saved_blocks() == 0) {
    to.h = OutputAt(i, step);
  } else {
    const int64_t size = n_.saved_blocks() * hidden_;
    to.gates =
        c_.again() ? b_.gates + r * size : call.gates[pseudo_layer_] + saved * size;
  }
  if (n_.lstm()) {
    const R* cells = call.cells[pseudo_layer_];
    to.dc = b_.dc + i * c_.c_stride;
    to.c = cells + saved * hidden_;
    if (reset) {
      to.c_prev = c_.zeros;
    } else if (step == 0) {
      to.c_prev = b_.c_0 + i * hidden_;
    } else {
      to.c_prev = cells + in.reserve.at(row, Time(i, step - 1)) * hidden_;
    }
  }
}

template <typename S, typename O, typename R>
int64_t GradientPass<S, O, R>::prepare_tasks() const {
  return CeilDiv(count_, rows_per_task());
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::Prepare(int64_t task) const {
  const auto scale = static_cast<R>(n_.dropout_scale);
  const int64_t first = task * rows_per_task();
  const int64_t last = std::min(count_, first + rows_per_task());
  const int64_t *begin = b_.first, *end = begin + (end_ - begin_);
  const int64_t* of_step = std::upper_bound(begin, end, first) - 1;
  for (int64_t r = first; r < last; ++r) {
    if (of_step + 1 < end && r == of_step[1]) ++of_step;
    GatherRow(r - *of_step, begin_ + (of_step - begin), r);
    if (drops()) {
      S* to = b_.dropped + r * inputs_;
      const uint8_t* keep = c_.call.operands.keep[layer_ - 1];
      Drop(b_.x[r], keep + b_.place[r] * inputs_, scale, inputs_, to);
      b_.x[r] = to;
    }
    if (!c_.again()) continue;
    if constexpr (std::is_same_v<S, O>) {
      b_.again_x[r] = b_.x[r];
      b_.again_h[r] = b_.h[r];
    } else {
      Convert(b_.x[r], inputs_, b_.wide_x + r * inputs_);
      Convert(b_.h[r], out_, b_.wide_h + r * out_);
      b_.again_x[r] = b_.wide_x + r * inputs_;
      b_.again_h[r] = b_.wide_h + r * out_;
    }
    ForwardRow<S, O, R>& to = b_.again[r];
    to = {};
    to.h_prev = b_.again_h[r];
    to.c = b_.c_again + r * c_.c_stride;
    to.h = b_.h_again + r * c_.c_stride;
    to.gates = b_.gates + r * n_.saved_blocks() * hidden_;
    if (n_.lstm()) Convert(b_.rows[r].c_prev, hidden_, to.c);
  }
}

template <typename S, typename O, typename R>
int64_t GradientPass<S, O, R>::again_tasks() const {
  return c_.again() ? c_.packing.blocks().count() : 0;
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::ComputeAgain(int64_t block) const {
  const LeavesProducts leaves(c_.kernels);
  const auto& packing = c_.packing;
  const Blocks& blocks = packing.blocks();
  const PackedLayer<O, R> layer = packing.layer(pseudo_layer_, c_.packed);
  const int64_t stride = 4 * lanes();
  R* pre = b_.pre + block * c_.most_rows * stride;
  const R* bias = layer.bias + block * stride;
  const auto product = [&](Tile tile, const O* const* rows, int64_t depth,
                           const O* panels, const R* start) {
    c_.kernels.product[static_cast<int>(tile)](rows, 0, count_, depth,
                                               panels + block * packing.panel(depth),
                                               start, pre, stride);
  };
  if (layer.w_ih != nullptr) {
    product(packing.input_tile(block), b_.again_x, inputs_, layer.w_ih, bias);
  } else {
    for (int64_t r = 0; r < count_; ++r) {
      Convert(bias, stride, pre + r * stride);
      for (int64_t v = 0; v < n_.gates(); ++v) {  // only gated networks come here
        Add(b_.again_x[r] + blocks.unit(block), nullptr, R{1}, blocks.units(block),
            pre + r * stride + v * lanes());
      }
    }
  }
  product(packing.recurrent_tile(block), b_.again_h, out_, layer.w_hh, nullptr);
  c_.kernels.forward[static_cast<int>(n_.mode)](n_.cell<R>(), pre, stride, b_.again,
                                                count_, blocks.unit(block),
                                                blocks.units(block));
}

template <typename S, typename O, typename R>
int64_t GradientPass<S, O, R>::unproject_tasks() const {
  return projects() && wants_weights() ? CeilDiv(count_, rows_per_task()) : 0;
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::Unproject(int64_t task) const {
  const int64_t first = task * rows_per_task();
  const int64_t last = std::min(count_, first + rows_per_task());
  c_.kernels.lstm_output(n_.cell<R>(), b_.rows + first, last - first,
                         b_.output + first * c_.c_stride, c_.c_stride);
  for (int64_t r = first; r < last; ++r) {
    Convert(b_.output + r * c_.c_stride, hidden_, b_.unprojected + r * hidden_);
  }
}

// ------------------------------------------------------------------------- its steps

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::AddOutputGradient(int64_t i, int64_t step, int64_t first,
                                              int64_t count) const {
  const Operands<S>& in = c_.call.operands;
  const int64_t row = c_.rows.row[i], time = Time(i, step);
  const int64_t column = direction_ * out_ + first;
  const int64_t place = in.io.at(row, time) * n_.width() + column;
  R* dh = b_.dh + i * c_.h_stride + first;
  if (c_.d_outputs == nullptr) {
    Add(c_.call.dy + place, nullptr, R{1}, count, dh);
    return;
  }
  const uint8_t* keep = in.keep != nullptr ? in.keep[layer_] + place : nullptr;
  Add(c_.d_outputs + in.reserve.at(row, time) * n_.width() + column, keep,
      static_cast<R>(n_.dropout_scale), count, dh);
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::Multiply(Tile tile, const O* const* a, int64_t offset,
                                     int64_t rows, int64_t depth, const O* panel,
                                     const R* start, R* c, int64_t c_stride) const {
  const auto product = c_.kernels.product[static_cast<int>(tile)];
  const int64_t step = (static_cast<int64_t>(tile) + 1) * lanes();
  const int64_t piece = PanelDepth(Caches());
  for (int64_t k = 0; k < depth; k += piece) {
    product(a, offset + k, rows, std::min(piece, depth - k), panel + k * step,
            k == 0 ? start : nullptr, c, c_stride);
  }
}

template <typename S, typename O, typename R>
int64_t GradientPass<S, O, R>::Steps(int64_t begin, int64_t end, int64_t first_row,
                                     int64_t last_row, Share share,
                                     Member* member) const {
  const LeavesProducts leaves(c_.kernels);
  const Columns outs = StepColumnsOf(out_), units = StepColumnsOf(hidden_);
  const auto range = [&](Columns columns) {
    const int64_t first = columns.first(share.begin(columns.count()));
    return std::pair{first,
                     std::min(columns.first(share.end(columns.count())), columns.size)};
  };
  const auto [out_first, out_last] = range(outs);
  const auto [unit_first, unit_last] = range(units);
  const Cell<R> cell = n_.cell<R>();
  const auto equations = c_.kernels.backward[static_cast<int>(n_.mode)];
  for (int64_t step = end - 1; step >= begin; --step) {
    const int64_t n = std::min(c_.rows.Active(step), last_row) - first_row;
    if (n <= 0) continue;
    const int64_t row = b_.first[step - begin_] + first_row;  // of the chunk
    for (int64_t i = first_row; i < first_row + n; ++i) {
      AddOutputGradient(i, step, out_first, out_last - out_first);
    }
    if (projects()) {
      for (int64_t k = 0; k < n; ++k) {
        Convert(b_.dh + (first_row + k) * c_.h_stride + out_first, out_last - out_first,
                b_.dp + (row + k) * c_.h_stride + out_first);
      }
      if (member != nullptr) member->Sync();
      for (int64_t q = share.begin(units.count()); q < share.end(units.count()); ++q) {
        Multiply(units.tile(q), b_.dp_rows + row, 0, n, n_.proj_size,
                 b_.w_hr + units.first(q) * PaddedDepth(n_.proj_size), c_.zeros,
                 b_.du + first_row * c_.c_stride + units.first(q), c_.c_stride);
      }
    }
    equations(cell, b_.rows + row, n, unit_first, unit_last - unit_first);
    const bool parts = member != nullptr && !member->SyncAndGoOn();
    for (int64_t q = share.begin(outs.count()); q < share.end(outs.count()); ++q) {
      Multiply(outs.tile(q), b_.dg_rows + row, 0, n, rows_of_weights(),
               b_.w_hh + outs.first(q) * PaddedDepth(rows_of_weights()),
               n_.gru() ? nullptr : c_.zeros,
               b_.dh + first_row * c_.h_stride + outs.first(q), c_.h_stride);
    }
    for (int64_t i = first_row; i < first_row + n; ++i) {
      if (!ResetAt(i, step)) continue;
      Zero(b_.dh + i * c_.h_stride + out_first, out_last - out_first);
      Zero(b_.dc + i * c_.c_stride + unit_first, unit_last - unit_first);
    }
    if (parts) return step;
  }
  return begin;
}

// ------------------------------------------------------------ products over the chunk

template <typename S, typename O, typename R>
int64_t GradientPass<S, O, R>::pack_tasks() const {
  return wants_weights() ? CeilDiv(count_, rows_per_task()) : 0;
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::Pack(int64_t task) const {
  const int64_t first = task * rows_per_task();
  const int64_t rows = std::min(count_ - first, rows_per_task());
  c_.kernels.transpose(b_.dg + first * c_.g_stride, c_.g_stride, rows,
                       c_.blocks() * hidden_, b_.dg_columns + first, c_.r_stride);
  PackPanels(b_.h, count_, first, ColumnsOf(out_), b_.panel_h);
  if (offsets_.w_ih >= 0) {
    PackPanels(b_.x, count_, first, ColumnsOf(inputs_), b_.panel_x);
  }
  if (projects()) {
    c_.kernels.transpose(b_.dp + first * c_.h_stride, c_.h_stride, rows, n_.proj_size,
                         b_.dp_columns + first, c_.r_stride);
    PackPanels(b_.u, count_, first, ColumnsOf(hidden_), b_.panel_u);
  }
}

template <typename S, typename O, typename R>
auto GradientPass<S, O, R>::HiddenProduct() const -> WeightProduct {
  return {b_.dg_column_rows, rows_of_weights(), ColumnsOf(out_),
          b_.panel_h,        offsets_.w_hh,     b_.dw_hh};
}

template <typename S, typename O, typename R>
auto GradientPass<S, O, R>::InputProduct() const -> WeightProduct {
  const int64_t rows = offsets_.w_ih >= 0 ? rows_of_weights() : 0;
  return {b_.dg_column_rows, rows,          ColumnsOf(inputs_),
          b_.panel_x,        offsets_.w_ih, b_.dw_ih};
}

template <typename S, typename O, typename R>
auto GradientPass<S, O, R>::ProjectionProduct() const -> WeightProduct {
  return {b_.dp_column_rows, n_.proj_size,  ColumnsOf(hidden_),
          b_.panel_u,        offsets_.w_hr, b_.dw_hr};
}

template <typename S, typename O, typename R>
int64_t GradientPass<S, O, R>::input_tasks() const {
  return wants_inputs() ? CeilDiv(count_, rows_per_task()) : 0;
}

template <typename S, typename O, typename R>
int64_t GradientPass<S, O, R>::product_tasks() const {
  int64_t tasks = input_tasks();
  if (wants_weights()) {
    for (const auto& product : {HiddenProduct(), InputProduct(), ProjectionProduct()}) {
      tasks += CeilDiv(product.rows, kWeightsPerTask);
    }
    tasks += CeilDiv(c_.blocks() * hidden_, kBiasesPerTask);
  }
  return tasks;
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::Product(int64_t task) const {
  const LeavesProducts leaves(c_.kernels);
  // The largest first, so that the threads end at about the same time.
  if (task < input_tasks()) return InputGradient(task);
  task -= input_tasks();
  for (const auto& product : {HiddenProduct(), InputProduct(), ProjectionProduct()}) {
    const int64_t tasks = CeilDiv(product.rows, kWeightsPerTask);
    if (task < tasks) return AddWeightProduct(product, task * kWeightsPerTask);
    task -= tasks;
  }
  AddBiases(task);
}

template <typename S, typename O, typename R>
auto GradientPass<S, O, R>::TargetOf(const WeightProduct& product) const -> Target {
  const int64_t columns = product.columns.size;
  if constexpr (std::is_same_v<S, R>) {
    if (columns % lanes() == 0) return {c_.call.dweights + product.offset, columns};
  }
  return {product.buffer, RoundUp(columns, lanes())};
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::AddWeightProduct(const WeightProduct& product,
                                             int64_t first) const {
  const Target target = TargetOf(product);
  const int64_t last = std::min(product.rows, first + kWeightsPerTask);
  // The candidate of a GRU has two columns of cotangents: u for w_hh, n for w_ih.
  const bool shifts = n_.gru() && product.buffer == b_.dw_ih;
  const auto add = [&](int64_t begin, int64_t end, int64_t shift) {
    if (begin >= end) return;
    for (int64_t q = 0; q < product.columns.count(); ++q) {
      const int64_t column = product.columns.first(q);
      Multiply(product.columns.tile(q), product.a + begin + shift, 0, end - begin,
               count_, product.panels + column * PaddedDepth(count_),
               summed_ ? nullptr : c_.zeros,
               target.data + begin * target.stride + column, target.stride);
    }
  };
  const int64_t kept = shifts ? std::clamp(2 * hidden_, first, last) : last;
  add(first, kept, 0);
  add(kept, last, hidden_);
}

// The sum over the rows of a chunk is a product with ones.
template <typename S, typename O, typename R>
void GradientPass<S, O, R>::AddBiases(int64_t task) const {
  const int64_t first = task * kBiasesPerTask;
  const int64_t last = std::min(c_.blocks() * hidden_, first + kBiasesPerTask);
  for (int64_t m = first; m < last; m += lanes()) {
    c_.sums.dot(b_.dg_column_rows[m], c_.r_stride, std::min(lanes(), last - m), count_,
                c_.ones, b_.db + m);
  }
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::InputGradient(int64_t task) const {
  const int64_t first = task * rows_per_task();
  const int64_t rows = std::min(count_ - first, rows_per_task());
  if (offsets_.w_ih < 0) return SkipGradient(first, first + rows);
  R products[kMostRowsPerTask * 4 * kMostLanes];
  const int64_t stride = 4 * lanes(), depth = rows_of_weights();
  const Columns columns = ColumnsOf(inputs_);
  for (int64_t q = 0; q < columns.count(); ++q) {
    const O* panel = b_.w_ih + columns.first(q) * PaddedDepth(depth);
    const O* const* dg = b_.dg_rows + first;
    const int64_t kept = n_.gru() ? 2 * hidden_ : depth;
    Multiply(columns.tile(q), dg, 0, rows, kept, panel, c_.zeros, products, stride);
    if (n_.gru()) {
      Multiply(columns.tile(q), dg, 3 * hidden_, rows, hidden_,
               panel + kept * columns.vectors(q) * lanes(), nullptr, products, stride);
    }
    for (int64_t r = 0; r < rows; ++r) {
      R* to = b_.dx[first + r] + columns.first(q);
      if (b_.adds[first + r]) {
        Add(products + r * stride, nullptr, R{1}, columns.width(q), to);
      } else {
        Convert(products + r * stride, columns.width(q), to);
      }
    }
  }
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::SkipGradient(int64_t first, int64_t last) const {
  for (int64_t r = first; r < last; ++r) {
    if (!b_.adds[r]) Zero(b_.dx[r], inputs_);
    for (int64_t block = 0; block < n_.gates(); ++block) {
      const int64_t from = n_.gru() && block == 2 ? 3 : block;
      Add(b_.dg_rows[r] + from * hidden_, nullptr, R{1}, hidden_, b_.dx[r]);
    }
  }
}

// ---------------------------------------------------------------------------- the end

template <typename S, typename O, typename R>
int64_t GradientPass<S, O, R>::finish_tasks() const {
  return 5;
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::Finish(int64_t task) const {
  if (task == 0) return FinishStates();
  if (!wants_weights()) return;
  if (task == 1) return FinishBiases();
  if (task == 2) return FinishWeights(HiddenProduct());
  if (task == 3) return FinishWeights(InputProduct());
  FinishWeights(ProjectionProduct());
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::FinishStates() const {
  const int64_t batch = c_.call.operands.batch;
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t to = pseudo_layer_ * batch + c_.rows.row[i];
    if (c_.call.dh_0 != nullptr) {
      Convert(b_.dh + i * c_.h_stride, out_, c_.call.dh_0 + to * out_);
    }
    if (c_.call.dc_0 != nullptr) {
      Convert(b_.dc + i * c_.c_stride, hidden_, c_.call.dc_0 + to * hidden_);
    }
  }
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::FinishBiases() const {
  S* to = c_.call.dweights;
  if (offsets_.b_hh >= 0) Convert(b_.db, rows_of_weights(), to + offsets_.b_hh);
  if (offsets_.b_ih < 0) return;
  const int64_t kept = n_.gru() ? 2 * hidden_ : rows_of_weights();
  Convert(b_.db, kept, to + offsets_.b_ih);
  if (n_.gru()) Convert(b_.db + 3 * hidden_, hidden_, to + offsets_.b_ih + kept);
}

template <typename S, typename O, typename R>
void GradientPass<S, O, R>::FinishWeights(const WeightProduct& product) const {
  if (product.rows == 0) return;
  const int64_t columns = product.columns.size;
  const Target target = TargetOf(product);
  if (!summed_) Zero(target.data, product.rows * target.stride);
  if (target.data != product.buffer) return;
  for (int64_t m = 0; m < product.rows; ++m) {
    Convert(target.data + m * target.stride, columns,
            c_.call.dweights + product.offset + m * columns);
  }
}

template class GradientPass<float, float, float>;
template class GradientPass<double, double, double>;
template class GradientPass<BFloat16, float, float>;
template class GradientPass<BFloat16, BFloat16, float>;

}  // namespace ostinato::cpu
