#include "cpu/pass/gradient_layer.h"

#include "cpu/runtime/caches.h"

namespace ostinato::cpu {

template <typename Storage, typename Operand, typename Accum>
GradientLayer<Storage, Operand, Accum>::GradientLayer(const Context& context,
                                                      int64_t pseudo_layer)
    : context(context),
      network(context.network()),
      pseudo_layer(pseudo_layer),
      layer(pseudo_layer / network.num_directions),
      direction(pseudo_layer % network.num_directions),
      reverse(direction == 1),
      offsets(WeightOffsetsOf(network, pseudo_layer)),
      inputs(network.inputs(layer)),
      outputs(network.output_size()),
      hidden(network.hidden_size) {}

template <typename Storage, typename Operand, typename Accum>
bool GradientLayer<Storage, Operand, Accum>::ResetAt(int64_t i, int64_t step) const {
  const Operands<Storage>& in = context.call.operands;
  return in.resets != nullptr &&
         in.resets[in.io.at(context.sequences.index[i], Time(i, step))] != 0;
}

template <typename Storage, typename Operand, typename Accum>
const Storage* GradientLayer<Storage, Operand, Accum>::OutputAt(int64_t i,
                                                                int64_t step) const {
  const BackwardCall<Storage, Accum>& call = context.call;
  const Operands<Storage>& in = call.operands;
  const int64_t sequence = context.sequences.index[i], time = Time(i, step);
  const int64_t column = direction * outputs;
  if (layer + 1 == network.num_layers) {
    return call.y + in.io.at(sequence, time) * network.width() + column;
  }
  return call.hidden[layer] + in.reserve.at(sequence, time) * network.width() + column;
}

template <typename Storage, typename Operand, typename Accum>
void GradientLayer<Storage, Operand, Accum>::Multiply(
    PanelShape shape, const Operand* const* a, int64_t offset, int64_t rows,
    int64_t depth, const Operand* panel, const Operand* next, const Accum* start,
    Accum* c, int64_t c_stride) const {
  const auto product = context.kernels.product[static_cast<int>(shape)];
  const int64_t step = (static_cast<int64_t>(shape) + 1) * lanes();
  const int64_t piece = PanelDepth(Caches());
  for (int64_t k = 0; k < depth; k += piece) {
    const int64_t count = std::min(piece, depth - k);
    product(a, offset + k, rows, count, panel + k * step,
            k + count < depth ? panel + (k + count) * step : next,
            k == 0 ? start : nullptr, c, c_stride);
  }
}

template <typename Storage, typename Operand, typename Accum>
HeadMatrix<Storage> GradientLayer<Storage, Operand, Accum>::w_hh() const {
  const Storage* data = context.call.operands.weights + offsets.w_hh;
  const Heads& heads = context.heads();
  if (network.num_heads > 1) {
    return {data, network.gates(), heads.units, heads.outputs};
  }
  const int64_t rows = gate_rows();
  return {data, 1, {rows, rows, rows}, heads.outputs};
}

template <typename Storage, typename Operand, typename Accum>
HeadMatrix<Storage> GradientLayer<Storage, Operand, Accum>::w_hr() const {
  return {context.call.operands.weights + offsets.w_hr, 1, context.heads().outputs,
          context.heads().units};
}

template <typename Storage, typename Operand, typename Accum>
int64_t GradientLayer<Storage, Operand, Accum>::pack_tasks(
    const HeadMatrix<Storage>& matrix) const {
  return matrix.blocks * context.heads().groups *
         CeilDiv(matrix.rows.group, rows_per_task());
}

template <typename Storage, typename Operand, typename Accum>
void GradientLayer<Storage, Operand, Accum>::PackTransposed(
    const HeadMatrix<Storage>& matrix, Columns columns, int64_t task,
    Operand* panels) const {
  const int64_t pieces = CeilDiv(matrix.rows.group, rows_per_task());
  const int64_t first = task % pieces * rows_per_task();
  const int64_t group = task / pieces % context.heads().groups;
  const int64_t block = task / pieces / context.heads().groups;
  const int64_t count = std::min(matrix.rows.count(group) - first, rows_per_task());
  if (count <= 0) return;
  const int64_t row = block * matrix.rows.size + matrix.rows.first(group) + first;
  const int64_t depth = block * PaddedDepth(matrix.rows.group) + first;
  const int64_t end = std::min(columns.count(), (group + 1) * columns.per_group());
  for (int64_t q = group * columns.per_group(); q < end; ++q) {
    PackHeadColumns(context.kernels, matrix, row, count, columns.first(q),
                    columns.width(q),
                    panels + columns.place(q) * TransposedDepth(matrix) +
                        depth * columns.vectors(q) * lanes());
  }
}

template <typename Storage, typename Operand, typename Accum>
void GradientLayer<Storage, Operand, Accum>::MultiplyTransposed(
    const HeadMatrix<Storage>& matrix, Columns columns, int64_t q,
    const Operand* const* cotangents, int64_t rows, const Operand* panels,
    const Accum* start, Accum* c, int64_t c_stride) const {
  const int64_t group = columns.group(q), width = columns.width(q);
  const int64_t vectors = columns.vectors(q) * lanes();
  const Operand* panel = panels + columns.place(q) * TransposedDepth(matrix);
  c += columns.first(q);
  const auto multiply = [&](int64_t first, int64_t count, Accum* to, int64_t stride) {
    const int64_t size = PaddedDepth(matrix.rows.group) * vectors;
    for (int64_t block = 0; block < matrix.blocks; ++block) {
      const Operand* const at = panel + block * size;
      const bool last = block + 1 == matrix.blocks && q + 1 == columns.count();
      Multiply(columns.shape(q), cotangents + first,
               block * matrix.rows.size + matrix.rows.first(group), count,
               matrix.rows.count(group), at, last ? nullptr : at + size,
               block == 0 ? start : nullptr, to, stride);
    }
  };
  // Whole vectors are written; past the last column there is capacity for them.
  if (width == vectors || columns.first(q) + width == columns.size) {
    return multiply(0, rows, c, c_stride);
  }
  Accum part[kMostRowsPerTask * 4 * kMostLanes];
  for (int64_t first = 0; first < rows; first += kMostRowsPerTask) {
    const int64_t count = std::min(rows - first, kMostRowsPerTask);
    for (int64_t r = 0; r < count; ++r) {
      Convert(c + (first + r) * c_stride, width, part + r * vectors);
    }
    multiply(first, count, part, vectors);
    for (int64_t r = 0; r < count; ++r) {
      Convert(part + r * vectors, width, c + (first + r) * c_stride);
    }
  }
}

template <typename Storage, typename Operand, typename Accum>
void GradientLayer<Storage, Operand, Accum>::PackPanels(const Storage* const* rows,
                                                        int64_t depth, int64_t first,
                                                        Columns columns,
                                                        Operand* panels) const {
  const int64_t count = std::min(depth - first, rows_per_task());
  for (int64_t q = 0; q < columns.count(); ++q) {
    Operand* panel = panels + columns.place(q) * PaddedDepth(depth);
    context.kernels.pack_columns(rows + first, columns.first(q), count,
                                 columns.width(q),
                                 panel + first * columns.vectors(q) * lanes());
  }
}

template <typename Storage, typename Operand, typename Accum>
auto Chunk<Storage, Operand, Accum>::Make(const Context& context, Scratch& scratch)
    -> Chunk {
  const Network& n = context.network();
  const int64_t most = context.most_tokens;
  const int64_t projected = n.proj_size > 0 ? most : 0;
  const bool drops = context.call.operands.dropout_masks != nullptr;
  Chunk made;
  made.first = scratch.Take<int64_t>(most);
  made.tokens = scratch.Take<BackwardToken<Storage, Operand, Accum>>(most);
  made.x = scratch.Take<const Storage*>(most);
  made.h = scratch.Take<const Storage*>(most);
  made.dropped = scratch.Take<Storage>(drops ? most * MostInputs(n) : 0);
  made.dg = scratch.Take<Operand>(most * context.g_stride);
  made.dp = scratch.Take<Operand>(projected * context.h_stride);
  made.dg_rows = scratch.Take<const Operand*>(most);
  made.dp_rows = scratch.Take<const Operand*>(projected);
  for (int64_t r = 0; r < most; ++r) made.dg_rows[r] = made.dg + r * context.g_stride;
  for (int64_t r = 0; r < projected; ++r) {
    made.dp_rows[r] = made.dp + r * context.h_stride;
  }
  return made;
}

template struct GradientLayer<float, float, float>;
template struct GradientLayer<double, double, double>;
template struct GradientLayer<BFloat16, float, float>;
template struct GradientLayer<BFloat16, BFloat16, float>;
template struct Chunk<float, float, float>;
template struct Chunk<double, double, double>;
template struct Chunk<BFloat16, float, float>;
template struct Chunk<BFloat16, BFloat16, float>;

}  // namespace ostinato::cpu
