// Facts that the parts of a backward pass share: those of a call, those of one
// direction of one layer, and the tokens of a chunk of steps.
#ifndef OSTINATO_CPU_PASS_GRADIENT_LAYER_H_
#define OSTINATO_CPU_PASS_GRADIENT_LAYER_H_

#include <algorithm>
#include <cstdint>
#include <utility>

#include "cpu/kernels/kernels.h"
#include "cpu/network/network.h"
#include "cpu/network/panels.h"
#include "cpu/network/sequences.h"
#include "cpu/network/values.h"
#include "cpu/pass/backward.h"
#include "cpu/runtime/scratch.h"

namespace ostinato::cpu {

// Facts that all passes of a call share. Products multiply values of type Operand, and
// cotangents of pre-activations are rounded to it.
template <typename Storage, typename Operand, typename Accum>
struct GradientContext {
  const BackwardCall<Storage, Accum>& call;
  const Kernels<Storage, Operand, Accum>& kernels;
  const Kernels<Operand, Operand, Accum>& sums;          // adds rows of cotangents up
  const NetworkPanels<Storage, Operand, Accum>& panels;  // for recomputed gates
  const void* recompute_panels;  // memory of `panels`; null where gates were saved
  const Sequences& sequences;
  int64_t most_tokens = 0;              // of a chunk
  int64_t h_stride = 0, c_stride = 0;   // between rows of states
  int64_t cell_stride = 0;              // from one cell state of a sequence to the next
  int64_t g_stride = 0;                 // between rows of cotangents, one per token
  int64_t column_stride = 0;            // between rows of transposed cotangents
  int64_t step_vectors = 4;             // of a block of columns that a worker takes
  const Storage* zero_state = nullptr;  // the state before a step with a reset
  const Operand* ones = nullptr;        // one for each token of a chunk
  const Accum* zeros = nullptr;         // 4 vectors, and a row of cells
  // Gradients of the outputs of the layer at hand, [T, B, D*S], null for the last
  // layer; and of its inputs, in the layout of the inputs.
  const Accum* d_outputs = nullptr;
  Accum* d_inputs = nullptr;

  const Network& network() const { return call.operands.network; }
  const Heads& heads() const { return panels.heads(); }
  int64_t blocks() const { return network().traits().cotangent_blocks; }
  bool recomputes() const { return recompute_panels != nullptr; }
};

inline constexpr int64_t kMostLanes = 16;

// Rows of a product in one task: about 48, and a multiple of what products take at
// once.
inline constexpr int64_t kMostRowsPerTask = 64;
inline int64_t RowsPerTask(int64_t rows_at_once) {
  return std::min(kMostRowsPerTask, RoundUp(48, rows_at_once));
}

// One direction of one layer on its way back. The methods are what its steps, products
// and recomputation have in common.
template <typename Storage, typename Operand, typename Accum>
struct GradientLayer {
  using Context = GradientContext<Storage, Operand, Accum>;

  GradientLayer(const Context& context, int64_t pseudo_layer);

  const Context& context;
  const Network& network;
  const int64_t pseudo_layer, layer, direction;
  const bool reverse;
  const WeightOffsets offsets;
  const int64_t inputs, outputs, hidden;  // sizes

  // The time of step `step` of sequence i.
  int64_t Time(int64_t i, int64_t step) const {
    return reverse ? context.sequences.length[i] - 1 - step : step;
  }
  bool ResetAt(int64_t i, int64_t step) const;
  const Storage* OutputAt(int64_t i, int64_t step) const;

  // Kernels::product in pieces of the panel that stay in the second-level cache.
  void Multiply(PanelShape shape, const Operand* const* a, int64_t offset, int64_t rows,
                int64_t depth, const Operand* panel, const Operand* next,
                const Accum* start, Accum* c, int64_t c_stride) const;
  // Matrices as their transposes are multiplied with cotangents: w_hh of one head is a
  // single block, the gates of which follow each other.
  HeadMatrix<Storage> w_hh() const;
  HeadMatrix<Storage> w_hr() const;
  // Elements of panels for each column of such a matrix.
  int64_t TransposedDepth(const HeadMatrix<Storage>& matrix) const {
    return matrix.blocks * PaddedDepth(matrix.rows.group);
  }
  // Its panels, in independent tasks.
  int64_t pack_tasks(const HeadMatrix<Storage>& matrix) const;
  void PackTransposed(const HeadMatrix<Storage>& matrix, Columns columns, int64_t task,
                      Operand* panels) const;
  // c[r][j] = start[j] + cotangents of row r times column j of the matrix, for `rows`
  // rows and block q of the columns; without `start` the sum continues from c. `c` is
  // that of the first of all columns.
  void MultiplyTransposed(const HeadMatrix<Storage>& matrix, Columns columns, int64_t q,
                          const Operand* const* cotangents, int64_t rows,
                          const Operand* panels, const Accum* start, Accum* c,
                          int64_t c_stride) const;
  // Fills some of the `depth` rows, from `first` on, of the panels of all columns.
  void PackPanels(const Storage* const* rows, int64_t depth, int64_t first,
                  Columns columns, Operand* panels) const;

  int64_t lanes() const { return context.kernels.lanes; }
  Columns ColumnsOf(int64_t size) const { return {size, lanes()}; }
  Columns ColumnsOf(const HeadParts& parts) const {
    return {parts.size, lanes(), 4, parts.group};
  }
  // Elements for each column of a panel with so many rows.
  int64_t PaddedDepth(int64_t rows) const {
    return RoundUp(rows, context.kernels.pairs);
  }
  int64_t rows_per_task() const { return RowsPerTask(context.kernels.rows_at_once); }
  // Of `count` rows those of a task, first .. last - 1.
  std::pair<int64_t, int64_t> RowsOf(int64_t task, int64_t count) const {
    const int64_t first = task * rows_per_task();
    return {first, std::min(count, first + rows_per_task())};
  }
  int64_t gate_rows() const { return network.gates() * hidden; }  // of w_ih and w_hh
  bool wants_weights() const { return context.call.dweights != nullptr; }
  bool wants_inputs() const { return layer > 0 || context.call.dx != nullptr; }
  bool projects() const { return network.proj_size > 0; }
  bool drops() const {
    return context.call.operands.dropout_masks != nullptr && layer > 0;
  }
};

// The tokens of some steps, in the order of steps. Steps leave the cotangents of all
// their pre-activations here, and products over the whole chunk read them.
template <typename Storage, typename Operand, typename Accum>
struct Chunk {
  int64_t begin = 0, end = 0, count = 0;  // steps, and number of tokens
  int64_t* first;                         // of each step, its first token
  BackwardToken<Storage, Operand, Accum>* tokens;
  const Storage** x;  // the input of each token, after dropout
  const Storage** h;  // the state before each token
  Storage* dropped;   // where inputs after dropout are kept
  // Cotangents by token: of pre-activations, and of projected outputs. With a pointer
  // to each row.
  Operand *dg, *dp;
  const Operand **dg_rows, **dp_rows;

  using Context = GradientContext<Storage, Operand, Accum>;
  static Chunk Make(const Context& context, Scratch& scratch);
};

// The most inputs that a layer has.
inline int64_t MostInputs(const Network& network) {
  return network.num_layers > 1 ? std::max(network.input_size, network.width())
                                : network.input_size;
}

// Takes memory for panels of `columns` columns and `depth` rows.
template <typename Storage, typename Operand, typename Accum>
Operand* TakePanels(const GradientContext<Storage, Operand, Accum>& context,
                    int64_t depth, int64_t columns, Scratch& scratch) {
  return scratch.Take<Operand>(RoundUp(depth, context.kernels.pairs) *
                               RoundUp(columns, context.kernels.lanes));
}

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_GRADIENT_LAYER_H_
