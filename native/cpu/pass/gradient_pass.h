// One direction of one layer on its way back, a chunk of steps at a time.
//
// A chunk's steps run first, one after another, and leave the cotangents of all its
// pre-activations. Everything that sums over tokens (weights, biases) or multiplies
// each of them (inputs) follows as products over the whole chunk.
#ifndef OSTINATO_CPU_PASS_GRADIENT_PASS_H_
#define OSTINATO_CPU_PASS_GRADIENT_PASS_H_

#include <cstdint>

#include "cpu/pass/gradient_layer.h"
#include "cpu/pass/gradient_products.h"
#include "cpu/pass/gradient_recompute.h"
#include "cpu/pass/gradient_steps.h"

namespace ostinato::cpu {

// The buffers of one direction; they serve every layer.
template <typename Storage, typename Operand, typename Accum>
struct GradientBuffers {
  Chunk<Storage, Operand, Accum> chunk;
  StepBuffers<Storage, Operand, Accum> steps;
  ProductBuffers<Storage, Operand, Accum> products;
  RecomputeBuffers<Storage, Operand, Accum> recompute;

  using Context = GradientContext<Storage, Operand, Accum>;
  static GradientBuffers Make(const Context& context, Scratch& scratch);
};

// Work is in tasks: those of one method are independent of each other.
template <typename Storage, typename Operand, typename Accum>
class GradientPass {
 public:
  using Context = GradientContext<Storage, Operand, Accum>;
  using Buffers = GradientBuffers<Storage, Operand, Accum>;

  GradientPass(const Context& context, int64_t pseudo_layer, const Buffers& buffers);
  GradientPass(const GradientPass&) = delete;
  GradientPass& operator=(const GradientPass&) = delete;

  // Panels of weights, and initial values.
  int64_t begin_tasks() const;
  void Begin(int64_t task) const;

  // The chunk of steps begin .. end - 1.
  void BeginChunk(int64_t begin, int64_t end);
  // First its tokens are gathered; then gates are recomputed, where they were not
  // saved; then o * tanh(c), where a projection has a gradient.
  int64_t gather_tasks() const;
  void Gather(int64_t task) const;
  int64_t recompute_tasks() const { return recompute_.tasks(); }
  void Recompute(int64_t task) const { recompute_.Run(task); }
  int64_t unproject_tasks() const { return products_.unproject_tasks(); }
  void Unproject(int64_t task) const { products_.Unproject(task); }
  // See GradientSteps::Run.
  int64_t RunSteps(int64_t begin, int64_t end, int64_t first, int64_t last, Slice slice,
                   Worker* worker) const {
    return steps_.Run(begin, end, first, last, slice, worker);
  }
  // Products over the chunk: all pack tasks before the first product task.
  int64_t pack_tasks() const { return products_.pack_tasks(); }
  void Pack(int64_t task) const { products_.Pack(task); }
  int64_t product_tasks() const { return products_.tasks(); }
  void Product(int64_t task) const { products_.Run(task); }
  void EndChunk() { products_.EndChunk(); }

  // Gradients of initial states, weights and biases.
  int64_t finish_tasks() const;
  void Finish(int64_t task) const;

 private:
  void GatherToken(int64_t i, int64_t step, int64_t token) const;

  const GradientLayer<Storage, Operand, Accum> l_;
  Chunk<Storage, Operand, Accum> chunk_;
  const GradientSteps<Storage, Operand, Accum> steps_;
  GradientProducts<Storage, Operand, Accum> products_;
  const GradientRecompute<Storage, Operand, Accum> recompute_;
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_GRADIENT_PASS_H_
