#include "cpu/pass/gradient_recompute.h"

#include <type_traits>

namespace ostinato::cpu {

template <typename Storage, typename Operand, typename Accum>
auto RecomputeBuffers<Storage, Operand, Accum>::Make(const Context& context,
                                                     Scratch& scratch)
    -> RecomputeBuffers {
  RecomputeBuffers made{};
  if (!context.recomputes()) return made;
  const Network& n = context.network();
  const int64_t most = context.most_tokens;
  const int64_t converted = std::is_same_v<Storage, Operand> ? 0 : most;
  made.gates = scratch.Take<Storage>(most * n.saved_blocks() * n.hidden_size);
  made.tokens = scratch.Take<ForwardToken<Storage, Operand, Accum>>(most);
  made.x = scratch.Take<const Operand*>(most);
  made.h = scratch.Take<const Operand*>(most);
  made.wide_x = scratch.Take<Operand>(converted * MostInputs(n));
  made.wide_h = scratch.Take<Operand>(converted * n.output_size());
  made.pre = scratch.Take<Accum>(context.panels.blocks().count() * most * 4 *
                                 context.kernels.lanes);
  made.cell_stride = most * context.c_stride;
  made.c = scratch.Take<Accum>(n.cells() * made.cell_stride);
  made.after = scratch.Take<Operand>(most * context.c_stride);
  return made;
}

template <typename Storage, typename Operand, typename Accum>
void GradientRecompute<Storage, Operand, Accum>::Gather(int64_t token) const {
  const Storage *x = chunk_.x[token], *h = chunk_.h[token];
  if constexpr (std::is_same_v<Storage, Operand>) {
    b_.x[token] = x;
    b_.h[token] = h;
  } else {
    b_.x[token] = b_.wide_x + token * l_.inputs;
    b_.h[token] = b_.wide_h + token * l_.outputs;
    Convert(x, l_.inputs, b_.wide_x + token * l_.inputs);
    Convert(h, l_.outputs, b_.wide_h + token * l_.outputs);
  }
  ForwardToken<Storage, Operand, Accum>& to = b_.tokens[token];
  to = {};
  to.h_prev = b_.h[token];
  to.c = b_.c + token * l_.context.c_stride;
  to.h = b_.after + token * l_.context.c_stride;
  to.gates = b_.gates + token * l_.network.saved_blocks() * l_.hidden;
  for (int64_t s = 0; s < l_.network.cells(); ++s) {
    Convert(chunk_.tokens[token].c_prev[s], l_.hidden, to.c + s * b_.cell_stride);
  }
}

template <typename Storage, typename Operand, typename Accum>
int64_t GradientRecompute<Storage, Operand, Accum>::tasks() const {
  return l_.context.recomputes() ? l_.context.panels.blocks().count() : 0;
}

template <typename Storage, typename Operand, typename Accum>
void GradientRecompute<Storage, Operand, Accum>::Run(int64_t block) const {
  const auto& c = l_.context;
  const TileGuard guard(c.kernels);
  const Network& n = l_.network;
  const auto& panels = c.panels;
  const Blocks& blocks = panels.blocks();
  const LayerPanels<Operand, Accum> layer =
      panels.layer(l_.pseudo_layer, c.recompute_panels);
  const int64_t stride = 4 * l_.lanes(), count = chunk_.count;
  Accum* pre = b_.pre + block * c.most_tokens * stride;
  const Accum* bias = layer.bias + block * stride;
  const Operand* const w_hh = layer.w_hh + block * panels.recurrent_panel();
  if (layer.w_ih != nullptr) {
    c.kernels.product[static_cast<int>(panels.input_shape(block))](
        b_.x, 0, count, l_.inputs, layer.w_ih + block * panels.panel(l_.inputs), w_hh,
        bias, pre, stride);
  } else {
    for (int64_t r = 0; r < count; ++r) {
      Convert(bias, stride, pre + r * stride);
      for (int64_t v = 0; v < l_.network.gates(); ++v) {  // plain RNNs save no gates
        Add(b_.x[r] + blocks.unit(block), nullptr, Accum{1}, blocks.units(block),
            pre + r * stride + v * l_.lanes());
      }
    }
  }
  const HeadParts& outputs = c.heads().outputs;
  const int64_t group = blocks.group(block);
  c.kernels.product[static_cast<int>(panels.recurrent_shape(block))](
      b_.h, outputs.first(group), count, outputs.count(group), w_hh, nullptr, nullptr,
      pre, stride);
  c.kernels.forward[static_cast<int>(n.mode)](n.cell_options<Accum>(b_.cell_stride),
                                              pre, stride, b_.tokens, count,
                                              blocks.unit(block), blocks.units(block));
}

template struct RecomputeBuffers<float, float, float>;
template struct RecomputeBuffers<double, double, double>;
template struct RecomputeBuffers<BFloat16, float, float>;
template struct RecomputeBuffers<BFloat16, BFloat16, float>;
template class GradientRecompute<float, float, float>;
template class GradientRecompute<double, double, double>;
template class GradientRecompute<BFloat16, float, float>;
template class GradientRecompute<BFloat16, BFloat16, float>;

}  // namespace ostinato::cpu
