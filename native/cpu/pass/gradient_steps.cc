#include "cpu/pass/gradient_steps.h"

#include <algorithm>
#include <utility>

namespace ostinato::cpu {

template <typename Storage, typename Operand, typename Accum>
auto StepBuffers<Storage, Operand, Accum>::Make(const Context& context,
                                                Scratch& scratch) -> StepBuffers {
  const Network& n = context.network();
  const int64_t batch = context.call.operands.batch;
  const Heads& heads = context.heads();
  const auto take = [&](int64_t depth, const HeadParts& columns) {
    return TakePanels(context, depth,
                      heads.groups * RoundUp(columns.group, context.kernels.lanes),
                      scratch);
  };
  const int64_t pairs = context.kernels.pairs;
  StepBuffers made;
  made.w_hh = take(n.gates() * RoundUp(heads.units.group, pairs), heads.outputs);
  made.w_hr = take(n.proj_size > 0 ? heads.outputs.group : 0, heads.units);
  made.dh = scratch.TakeZeroed<Accum>(batch * context.h_stride);
  made.d_unprojected =
      scratch.TakeZeroed<Accum>(n.proj_size > 0 ? batch * context.c_stride : 0);
  made.dc = scratch.TakeZeroed<Accum>(n.cells() * context.cell_stride);
  made.c_0 = scratch.Take<Accum>(n.cells() * batch * n.hidden_size);
  return made;
}

template <typename Storage, typename Operand, typename Accum>
GradientSteps<Storage, Operand, Accum>::GradientSteps(
    const Layer& layer, const Chunk<Storage, Operand, Accum>& chunk,
    const Buffers& buffers)
    : l_(layer), chunk_(chunk), b_(buffers) {}

template <typename Storage, typename Operand, typename Accum>
void GradientSteps<Storage, Operand, Accum>::Begin(int64_t task) const {
  const BackwardCall<Storage, Accum>& call = l_.context.call;
  const int64_t batch = call.operands.batch;
  const auto [first, last] = l_.RowsOf(task, batch);
  for (int64_t i = first; i < last; ++i) {
    const int64_t from = l_.pseudo_layer * batch + l_.context.sequences.index[i];
    Convert(call.dh_n + from * l_.outputs, l_.outputs, b_.dh + i * l_.context.h_stride);
    for (int64_t s = 0; s < l_.network.cells(); ++s) {
      Convert(call.dc_n[s] + from * l_.hidden, l_.hidden,
              b_.dc + s * l_.context.cell_stride + i * l_.context.c_stride);
      Convert(call.operands.c_0[s] + from * l_.hidden, l_.hidden,
              b_.c_0 + (s * batch + i) * l_.hidden);
    }
  }
}

template <typename Storage, typename Operand, typename Accum>
void GradientSteps<Storage, Operand, Accum>::Gather(
    int64_t i, int64_t step, BackwardToken<Storage, Operand, Accum>& to) const {
  const auto& c = l_.context;
  to.dh = l_.projects() ? b_.d_unprojected + i * c.c_stride : b_.dh + i * c.h_stride;
  to.dc = b_.dc + i * c.c_stride;
  const Operands<Storage>& in = c.call.operands;
  const int64_t sequence = c.sequences.index[i], cells = l_.network.cells();
  const auto at = [&](int64_t step) {
    return in.reserve.at(sequence, l_.Time(i, step)) * l_.hidden;
  };
  for (int64_t s = 0; s < cells; ++s) {
    const Accum* saved = c.call.cells[l_.pseudo_layer * cells + s];
    to.c[s] = saved + at(step);
    if (l_.ResetAt(i, step)) {
      to.c_prev[s] = c.zeros;
    } else {
      to.c_prev[s] =
          step == 0 ? b_.c_0 + (s * in.batch + i) * l_.hidden : saved + at(step - 1);
    }
  }
}

template <typename Storage, typename Operand, typename Accum>
void GradientSteps<Storage, Operand, Accum>::AddOutputGradient(int64_t i, int64_t step,
                                                               int64_t first,
                                                               int64_t count) const {
  const auto& c = l_.context;
  const Operands<Storage>& in = c.call.operands;
  const int64_t sequence = c.sequences.index[i], time = l_.Time(i, step);
  const int64_t width = l_.network.width(), column = l_.direction * l_.outputs + first;
  const int64_t output = in.io.at(sequence, time) * width + column;
  Accum* dh = b_.dh + i * c.h_stride + first;
  if (c.d_outputs == nullptr) {
    Add(c.call.dy + output, nullptr, Accum{1}, count, dh);
    return;
  }
  const uint8_t* mask =
      in.dropout_masks != nullptr ? in.dropout_masks[l_.layer] + output : nullptr;
  Add(c.d_outputs + in.reserve.at(sequence, time) * width + column, mask,
      static_cast<Accum>(l_.network.dropout_scale), count, dh);
}

template <typename Storage, typename Operand, typename Accum>
int64_t GradientSteps<Storage, Operand, Accum>::Run(int64_t begin, int64_t end,
                                                    int64_t first, int64_t last,
                                                    Slice slice, Worker* worker) const {
  const auto& c = l_.context;
  const Network& n = l_.network;
  const TileGuard guard(c.kernels);
  const Columns outs = Outputs(), units = Units();
  const HeadMatrix<Storage> w_hh = l_.w_hh(), w_hr = l_.w_hr();
  const auto range = [&](Columns columns) {
    const int64_t from = columns.first(slice.begin(columns.count()));
    return std::pair{from,
                     std::min(columns.first(slice.end(columns.count())), columns.size)};
  };
  const auto [out_first, out_last] = range(outs);
  const auto [unit_first, unit_last] = range(units);
  const CellOptions<Accum> options = n.cell_options<Accum>(c.cell_stride);
  const auto equations = c.kernels.backward[static_cast<int>(n.mode)];
  for (int64_t step = end - 1; step >= begin; --step) {
    const int64_t count = std::min(c.sequences.Active(step), last) - first;
    if (count <= 0) continue;
    const int64_t token = chunk_.first[step - chunk_.begin] + first;
    for (int64_t i = first; i < first + count; ++i) {
      AddOutputGradient(i, step, out_first, out_last - out_first);
    }
    if (l_.projects()) {
      for (int64_t k = 0; k < count; ++k) {
        Convert(b_.dh + (first + k) * c.h_stride + out_first, out_last - out_first,
                chunk_.dp + (token + k) * c.h_stride + out_first);
      }
      if (worker != nullptr) worker->Sync();
      for (int64_t q = slice.begin(units.count()); q < slice.end(units.count()); ++q) {
        l_.MultiplyTransposed(w_hr, units, q, chunk_.dp_rows + token, count, b_.w_hr,
                              c.zeros, b_.d_unprojected + first * c.c_stride,
                              c.c_stride);
      }
    }
    equations(options, chunk_.tokens + token, count, unit_first,
              unit_last - unit_first);
    const bool stops = worker != nullptr && !worker->SyncAndContinue();
    for (int64_t q = slice.begin(outs.count()); q < slice.end(outs.count()); ++q) {
      l_.MultiplyTransposed(w_hh, outs, q, chunk_.dg_rows + token, count, b_.w_hh,
                            n.gru() ? nullptr : c.zeros, b_.dh + first * c.h_stride,
                            c.h_stride);
    }
    for (int64_t i = first; i < first + count; ++i) {
      if (!l_.ResetAt(i, step)) continue;
      Zero(b_.dh + i * c.h_stride + out_first, out_last - out_first);
      for (int64_t s = 0; s < n.cells(); ++s) {
        Zero(b_.dc + s * c.cell_stride + i * c.c_stride + unit_first,
             unit_last - unit_first);
      }
    }
    if (stops) return step;
  }
  return begin;
}

template <typename Storage, typename Operand, typename Accum>
void GradientSteps<Storage, Operand, Accum>::Finish(int64_t task) const {
  const BackwardCall<Storage, Accum>& call = l_.context.call;
  const int64_t batch = call.operands.batch;
  const auto [first, last] = l_.RowsOf(task, batch);
  for (int64_t i = first; i < last; ++i) {
    const int64_t to = l_.pseudo_layer * batch + l_.context.sequences.index[i];
    if (call.dh_0 != nullptr) {
      Convert(b_.dh + i * l_.context.h_stride, l_.outputs, call.dh_0 + to * l_.outputs);
    }
    for (int64_t s = 0; s < l_.network.cells(); ++s) {
      if (call.dc_0[s] == nullptr) continue;
      Convert(b_.dc + s * l_.context.cell_stride + i * l_.context.c_stride, l_.hidden,
              call.dc_0[s] + to * l_.hidden);
    }
  }
}

template struct StepBuffers<float, float, float>;
template struct StepBuffers<double, double, double>;
template struct StepBuffers<BFloat16, float, float>;
template struct StepBuffers<BFloat16, BFloat16, float>;
template class GradientSteps<float, float, float>;
template class GradientSteps<double, double, double>;
template class GradientSteps<BFloat16, float, float>;
template class GradientSteps<BFloat16, BFloat16, float>;

}  // namespace ostinato::cpu
