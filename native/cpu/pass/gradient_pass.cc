#include "cpu/pass/gradient_pass.h"

namespace ostinato::cpu {

template <typename Storage, typename Operand, typename Accum>
auto GradientBuffers<Storage, Operand, Accum>::Make(const Context& context,
                                                    Scratch& scratch)
    -> GradientBuffers {
  return {Chunk<Storage, Operand, Accum>::Make(context, scratch),
          StepBuffers<Storage, Operand, Accum>::Make(context, scratch),
          ProductBuffers<Storage, Operand, Accum>::Make(context, scratch),
          RecomputeBuffers<Storage, Operand, Accum>::Make(context, scratch)};
}

template <typename Storage, typename Operand, typename Accum>
GradientPass<Storage, Operand, Accum>::GradientPass(const Context& context,
                                                    int64_t pseudo_layer,
                                                    const Buffers& buffers)
    : l_(context, pseudo_layer),
      chunk_(buffers.chunk),
      steps_(l_, chunk_, buffers.steps),
      products_(l_, chunk_, buffers.products),
      recompute_(l_, chunk_, buffers.recompute) {}

template <typename Storage, typename Operand, typename Accum>
int64_t GradientPass<Storage, Operand, Accum>::begin_tasks() const {
  return 1 + steps_.sequence_tasks() + steps_.recurrent_tasks() +
         steps_.projection_tasks() + CeilDiv(l_.gate_rows(), l_.rows_per_task());
}

template <typename Storage, typename Operand, typename Accum>
void GradientPass<Storage, Operand, Accum>::Begin(int64_t task) const {
  if (task == 0) return products_.Begin();
  task -= 1;
  if (task < steps_.sequence_tasks()) return steps_.Begin(task);
  task -= steps_.sequence_tasks();
  if (task < steps_.recurrent_tasks()) return steps_.PackRecurrent(task);
  task -= steps_.recurrent_tasks();
  if (task < steps_.projection_tasks()) return steps_.PackProjection(task);
  products_.PackInput((task - steps_.projection_tasks()) * l_.rows_per_task());
}

template <typename Storage, typename Operand, typename Accum>
void GradientPass<Storage, Operand, Accum>::BeginChunk(int64_t begin, int64_t end) {
  chunk_.begin = begin;
  chunk_.end = end;
  chunk_.count = 0;
  for (int64_t step = begin; step < end; ++step) {
    chunk_.first[step - begin] = chunk_.count;
    chunk_.count += l_.context.sequences.Active(step);
  }
}

template <typename Storage, typename Operand, typename Accum>
int64_t GradientPass<Storage, Operand, Accum>::gather_tasks() const {
  return CeilDiv(chunk_.count, l_.rows_per_task());
}

template <typename Storage, typename Operand, typename Accum>
void GradientPass<Storage, Operand, Accum>::Gather(int64_t task) const {
  const auto [first, last] = l_.RowsOf(task, chunk_.count);
  const int64_t *begin = chunk_.first, *end = begin + (chunk_.end - chunk_.begin);
  const int64_t* of_step = std::upper_bound(begin, end, first) - 1;
  for (int64_t token = first; token < last; ++token) {
    if (of_step + 1 < end && token == of_step[1]) ++of_step;
    GatherToken(token - *of_step, chunk_.begin + (of_step - begin), token);
    if (l_.context.recomputes()) recompute_.Gather(token);
  }
}

template <typename Storage, typename Operand, typename Accum>
void GradientPass<Storage, Operand, Accum>::GatherToken(int64_t i, int64_t step,
                                                        int64_t token) const {
  const BackwardCall<Storage, Accum>& call = l_.context.call;
  const Operands<Storage>& in = call.operands;
  const int64_t sequence = l_.context.sequences.index[i], time = l_.Time(i, step);
  const int64_t outer = in.io.at(sequence, time);
  const int64_t saved = in.reserve.at(sequence, time);
  const Storage*& x = chunk_.x[token];
  x = l_.layer == 0 ? in.x + outer * l_.inputs
                    : call.hidden[l_.layer - 1] + saved * l_.inputs;
  if (l_.drops()) {
    Storage* dropped = chunk_.dropped + token * l_.inputs;
    const uint8_t* mask = in.dropout_masks[l_.layer - 1] + outer * l_.inputs;
    const auto scale = static_cast<Accum>(l_.network.dropout_scale);
    Drop(x, mask, scale, l_.inputs, dropped);
    x = dropped;
  }
  const Storage*& h = chunk_.h[token];
  if (l_.ResetAt(i, step)) {
    h = l_.context.zero_state;
  } else if (step == 0) {
    h = in.h_0 + (l_.pseudo_layer * in.batch + sequence) * l_.outputs;
  } else {
    h = l_.OutputAt(i, step - 1);
  }
  BackwardToken<Storage, Operand, Accum>& to = chunk_.tokens[token];
  to = {};
  to.h_prev = h;
  to.dg = chunk_.dg + token * l_.context.g_stride;
  if (l_.network.saved_blocks() == 0) {
    to.h = l_.OutputAt(i, step);
  } else if (l_.context.recomputes()) {
    to.gates = recompute_.gates(token);
  } else {
    const int64_t size = l_.network.saved_blocks() * l_.hidden;
    to.gates = call.gates[l_.pseudo_layer] + saved * size;
  }
  steps_.Gather(i, step, to);
  products_.Gather(i, step, token);
}

template <typename Storage, typename Operand, typename Accum>
int64_t GradientPass<Storage, Operand, Accum>::finish_tasks() const {
  return products_.kFinishTasks + steps_.sequence_tasks();
}

template <typename Storage, typename Operand, typename Accum>
void GradientPass<Storage, Operand, Accum>::Finish(int64_t task) const {
  if (task < products_.kFinishTasks) return products_.Finish(task);
  steps_.Finish(task - products_.kFinishTasks);
}

template struct GradientBuffers<float, float, float>;
template struct GradientBuffers<double, double, double>;
template struct GradientBuffers<BFloat16, float, float>;
template struct GradientBuffers<BFloat16, BFloat16, float>;
template class GradientPass<float, float, float>;
template class GradientPass<double, double, double>;
template class GradientPass<BFloat16, float, float>;
template class GradientPass<BFloat16, BFloat16, float>;

}  // namespace ostinato::cpu
