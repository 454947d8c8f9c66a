// One direction of one layer on its way back, a chunk of steps at a time.
//
// A chunk's steps run first, one after another, and leave the cotangents of all its
// pre-activations, [rows of the chunk, 4 H]. Everything that sums over rows (weights,
// biases) or multiplies each of them (inputs) follows as products over the whole chunk.
#ifndef OSTINATO_CPU_PASS_GRADIENT_PASS_H_
#define OSTINATO_CPU_PASS_GRADIENT_PASS_H_

#include <algorithm>
#include <cstdint>

#include "cpu/network/panels.h"
#include "cpu/network/sequences.h"
#include "cpu/pass/backward.h"
#include "cpu/pass/layer_pass.h"
#include "cpu/runtime/scratch.h"

namespace ostinato::cpu {

// What all passes of a call share. O is what products multiply, and so what cotangents
// of pre-activations are rounded to.
template <typename S, typename O, typename R>
struct BackwardContext {
  const BackwardCall<S, R>& call;
  const Kernels<S, O, R>& kernels;
  const Kernels<O, O, R>& sums;           // of rows of cotangents
  const PackedNetwork<S, O, R>& packing;  // for gates that are computed again
  const void* packed;                     // its panels, or null
  const Slice& rows;
  int64_t most_rows = 0;               // of a chunk
  int64_t h_stride = 0, c_stride = 0;  // of rows of states
  int64_t g_stride = 0;                // of rows of cotangents of pre-activations
  int64_t step_vectors = 4;       // of a block of columns that members share in a step
  int64_t r_stride = 0;           // of the same by columns
  const S* zero_state = nullptr;  // what a step after a reset starts from
  const O* ones = nullptr;        // for a row of a chunk each
  const R* zeros = nullptr;       // 4 vectors, and a row of cells
  // Of the layer at hand: gradients of its outputs, [T, B, D*S], null for the last
  // layer; and of its inputs, laid out as they are.
  const R* d_outputs = nullptr;
  R* d_inputs = nullptr;

  const Network& network() const { return call.operands.network; }
  // A row of cotangents holds this many blocks of H: one more than weights for a GRU.
  int64_t blocks() const { return network().gru() ? 4 : network().gates(); }
  bool again() const { return packed != nullptr; }
};

// Rows of a chunk in one task: about 48, and a multiple of what products take at once.
inline constexpr int64_t kMostRowsPerTask = 64;
inline int64_t RowsPerTask(int64_t rows_at_once) {
  return std::min(kMostRowsPerTask, RoundUp(48, rows_at_once));
}

template <typename S, typename O, typename R>
class GradientPass {
 public:
  using Context = BackwardContext<S, O, R>;

  // Buffers of one direction, which serve it in every layer.
  struct Buffers {
    // Panels that multiply cotangents, and the rows of the weights that they hold.
    O *w_hh, *w_ih, *w_hr;
    const S **w_hh_rows, **w_ih_rows, **w_hr_rows;
    // Of states, [B] rows. With a projection dh is the cotangent of what it yields and
    // du that of o * tanh(c).
    R *dh, *du, *dc, *c_0;
    // Of a chunk. Cotangents by rows and by columns, of gates and projected outputs:
    O *dg, *dg_columns, *dp, *dp_columns;
    const O **dg_rows, **dg_column_rows, **dp_rows, **dp_column_rows;
    // what stands at each of its rows, and where each of its steps begins,
    BackwardRow<S, O, R>* rows;
    int64_t *place, *first;
    // where gradients of inputs go, and whether something stands there already,
    R** dx;
    bool* adds;
    // the factors of weight gradients, and their panels,
    const S **x, **h, **u;
    S *dropped, *unprojected;
    R* output;
    O *panel_x, *panel_h, *panel_u;
    // and gates that are computed again.
    S* gates;
    ForwardRow<S, O, R>* again;
    R *pre, *c_again;
    O *h_again, *wide_x, *wide_h;
    const O **again_x, **again_h;
    // Sums over chunks.
    R *dw_ih, *dw_hh, *dw_hr, *db;
  };
  static Buffers MakeBuffers(const Context& context, Scratch& scratch);

  GradientPass(const Context& context, int64_t pseudo_layer, const Buffers& buffers);

  // Panels, in independent tasks; then initial values.
  int64_t begin_tasks() const;
  void Begin(int64_t task) const;

  // The chunk of steps begin .. end - 1.
  void BeginChunk(int64_t begin, int64_t end);
  // What its rows are, inputs after dropout; then gates, where they were not saved;
  // then o * tanh(c), where a projection has a gradient.
  int64_t prepare_tasks() const;
  void Prepare(int64_t task) const;
  int64_t again_tasks() const;
  void ComputeAgain(int64_t task) const;
  int64_t unproject_tasks() const;
  void Unproject(int64_t task) const;
  // Some steps of the chunk, last to first: of batch rows first_row .. last_row - 1,
  // and of those a member's share of the units. Returns the step that it came to, which
  // is begin unless members are to part.
  int64_t Steps(int64_t begin, int64_t end, int64_t first_row, int64_t last_row,
                Share share, Member* member) const;
  // Products over the chunk: all pack tasks before the first product task.
  int64_t pack_tasks() const;
  void Pack(int64_t task) const;
  int64_t product_tasks() const;
  void Product(int64_t task) const;
  void EndChunk() { summed_ = true; }

  // Gradients of initial states, weights and biases.
  int64_t finish_tasks() const;
  void Finish(int64_t task) const;

 private:
  // A product for a weight gradient: rows of `a` (columns of cotangents) times panels.
  struct WeightProduct {
    const O* const* a;
    int64_t rows;
    Columns columns;
    const O* panels;
    int64_t offset;  // of the gradient in the flat vector
    R* buffer;
  };
  struct Target {
    R* data;
    int64_t stride;
  };

  int64_t Time(int64_t i, int64_t step) const {
    return reverse_ ? c_.rows.length[i] - 1 - step : step;
  }
  bool ResetAt(int64_t i, int64_t step) const;
  const S* OutputAt(int64_t i, int64_t step) const;
  void GatherRow(int64_t i, int64_t step, int64_t r) const;
  int64_t input_tasks() const;
  void AddOutputGradient(int64_t i, int64_t step, int64_t first, int64_t count) const;
  void Multiply(Tile tile, const O* const* a, int64_t offset, int64_t rows,
                int64_t depth, const O* panel, const R* start, R* c,
                int64_t c_stride) const;
  void BeginStates() const;
  // Some of `depth` rows, from `first` on, of the panels of all their columns.
  void PackPanels(const S* const* rows, int64_t depth, int64_t first, Columns columns,
                  O* panels) const;
  void AddWeightProduct(const WeightProduct& product, int64_t first) const;
  void AddBiases(int64_t task) const;
  void InputGradient(int64_t task) const;
  void SkipGradient(int64_t first, int64_t last) const;
  WeightProduct HiddenProduct() const;
  WeightProduct InputProduct() const;
  WeightProduct ProjectionProduct() const;
  // A gradient stands in the result itself where whole vectors fit, else in a buffer
  // with room for them.
  Target TargetOf(const WeightProduct& product) const;
  void FinishWeights(const WeightProduct& product) const;
  void FinishBiases() const;
  void FinishStates() const;

  int64_t lanes() const { return c_.kernels.lanes; }
  Columns ColumnsOf(int64_t size) const { return {size, lanes()}; }
  Columns StepColumnsOf(int64_t size) const { return {size, lanes(), c_.step_vectors}; }
  // Elements for each column of a panel with so many rows.
  int64_t PaddedDepth(int64_t rows) const { return RoundUp(rows, c_.kernels.pairs); }
  // Rows of a chunk in one task.
  int64_t rows_per_task() const { return RowsPerTask(c_.kernels.rows_at_once); }
  int64_t rows_of_weights() const { return n_.gates() * hidden_; }
  bool wants_weights() const { return c_.call.dweights != nullptr; }
  bool wants_inputs() const { return layer_ > 0 || c_.call.dx != nullptr; }
  bool projects() const { return n_.proj_size > 0; }
  bool drops() const { return c_.call.operands.keep != nullptr && layer_ > 0; }

  const Context& c_;
  const Network& n_;
  const int64_t pseudo_layer_, layer_, direction_;
  const bool reverse_;
  const LayerOffsets offsets_;
  const Buffers& b_;
  const int64_t inputs_, out_, hidden_;
  int64_t begin_ = 0, end_ = 0, count_ = 0;  // steps and number of rows of the chunk
  bool summed_ = false;  // a chunk has gone into the weight gradients
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_GRADIENT_PASS_H_
