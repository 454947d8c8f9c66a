// Everything of a backward pass that is a sum over the tokens of a chunk (gradients of
// weights and biases) or a product with each of them (gradients of inputs).
#ifndef OSTINATO_CPU_PASS_GRADIENT_PRODUCTS_H_
#define OSTINATO_CPU_PASS_GRADIENT_PRODUCTS_H_

#include <cstdint>

#include "cpu/network/sum_parts.h"
#include "cpu/pass/gradient_layer.h"

namespace ostinato::cpu {

// The buffers of one direction; they serve every layer.
template <typename Storage, typename Operand, typename Accum>
struct ProductBuffers {
  // Panels that multiply cotangents, and the rows of the weights that they hold.
  Operand* w_ih;
  const Storage** w_ih_rows;
  // Where the gradient of each token's input goes, and whether something stands there
  // already.
  Accum** dx;
  bool* adds;
  // Cotangents of the chunk, transposed, with a pointer to each row; x_column_rows has
  // those for the gates of w_ih, in the order of its rows.
  Operand *dg_columns, *dp_columns;
  const Operand **dg_column_rows, **x_column_rows, **dp_column_rows;
  // The other operand of weight gradients: inputs, states before, and for a projection
  // o * tanh(c), which is computed here.
  Operand *x_panels, *h_panels, *unprojected_panels;
  Accum* wide_unprojected;
  Storage* unprojected;
  const Storage** unprojected_rows;
  // Sums over chunks, and the part that is not yet in them; see SumParts.
  Accum *dw_ih, *dw_hh, *dw_hr, *db;
  Accum *part_ih, *part_hh, *part_hr, *part_db;

  using Context = GradientContext<Storage, Operand, Accum>;
  static ProductBuffers Make(const Context& context, Scratch& scratch);
};

template <typename Storage, typename Operand, typename Accum>
class GradientProducts {
 public:
  using Layer = GradientLayer<Storage, Operand, Accum>;
  using Buffers = ProductBuffers<Storage, Operand, Accum>;

  GradientProducts(const Layer& layer, const Chunk<Storage, Operand, Accum>& chunk,
                   const Buffers& buffers);

  // Panels of rows `first` and following of w_ih.
  void PackInput(int64_t first) const;
  void Begin() const;
  // Notes where the input gradient of a token goes.
  void Gather(int64_t i, int64_t step, int64_t token) const;
  // Before the steps of a chunk: o * tanh(c), where a projection has a gradient.
  int64_t unproject_tasks() const;
  void Unproject(int64_t task) const;
  // After the steps of a chunk: all pack tasks, then the tasks.
  int64_t pack_tasks() const;
  void Pack(int64_t task) const;
  int64_t tasks() const;
  void Run(int64_t task) const;
  void EndChunk() {
    parts_.ForEach(chunk_.count, [](int64_t, int64_t) {});
  }
  // Writes gradients of weights and biases, after the last chunk.
  static constexpr int64_t kFinishTasks = 4;
  void Finish(int64_t task) const;

 private:
  // A product for a weight gradient: rows of `a` (columns of cotangents) times panels.
  // The matrix of the gradient is block-diagonal by head; of one head it is one block.
  struct WeightProduct {
    const Operand* const* a;
    HeadMatrix<Storage> matrix;  // without data; `columns` in blocks of 4 vectors
    Columns columns;
    const Operand* panels;
    int64_t offset;  // of the gradient in the flat vector
    Accum *buffer, *part;

    int64_t rows() const { return matrix.blocks * matrix.rows.size; }
    int64_t pieces() const { return CeilDiv(matrix.rows.group, kWeightsPerTask); }
    int64_t tasks() const {
      return rows() > 0 ? matrix.blocks * Groups() * pieces() : 0;
    }
    int64_t Groups() const { return CeilDiv(matrix.rows.size, matrix.rows.group); }
  };
  struct Sum {
    Accum* data;
    int64_t stride;
  };
  static constexpr int64_t kWeightsPerTask = 96;  // rows of a weight gradient

  WeightProduct HiddenProduct() const;
  WeightProduct InputProduct() const;
  WeightProduct ProjectionProduct() const;
  // A gradient adds up in the result itself where whole vectors fit, else in a buffer
  // that has capacity for them.
  Sum SumOf(const WeightProduct& product) const;
  void AddWeightProduct(const WeightProduct& product, int64_t task) const;
  void AddBiases(int64_t task) const;
  int64_t input_tasks() const;
  void InputGradient(int64_t task) const;
  void SkipGradient(int64_t first, int64_t last) const;
  void FinishBiases() const;
  void FinishWeights(const WeightProduct& product) const;

  const Layer& l_;
  const Chunk<Storage, Operand, Accum>& chunk_;
  const Buffers& b_;
  SumParts parts_;  // of the weight gradients, before the chunk
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_GRADIENT_PRODUCTS_H_
