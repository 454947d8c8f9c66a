// The steps of a backward pass, one after another: from the cotangents of states after
// a step to those before it, by way of the cotangents of its pre-activations.
#ifndef OSTINATO_CPU_PASS_GRADIENT_STEPS_H_
#define OSTINATO_CPU_PASS_GRADIENT_STEPS_H_

#include <cstdint>

#include "cpu/pass/gradient_layer.h"
#include "cpu/pass/schedule.h"
#include "cpu/runtime/barrier.h"

namespace ostinato::cpu {

// The buffers of one direction; they serve every layer.
template <typename Storage, typename Operand, typename Accum>
struct StepBuffers {
  Operand *w_hh, *w_hr;  // panels that multiply cotangents
  // Cotangents of states, a row for each of B sequences. With a projection, dh is that
  // of the projected output and d_unprojected that of what was projected.
  Accum *dh, *d_unprojected;
  Accum* dc;   // [cells], cell_stride apart
  Accum* c_0;  // initial cells, [cells, B, H]

  using Context = GradientContext<Storage, Operand, Accum>;
  static StepBuffers Make(const Context& context, Scratch& scratch);
};

template <typename Storage, typename Operand, typename Accum>
class GradientSteps {
 public:
  using Layer = GradientLayer<Storage, Operand, Accum>;
  using Buffers = StepBuffers<Storage, Operand, Accum>;

  GradientSteps(const Layer& layer, const Chunk<Storage, Operand, Accum>& chunk,
                const Buffers& buffers);

  // Panels of w_hh and w_hr, in independent tasks.
  int64_t recurrent_tasks() const { return l_.pack_tasks(l_.w_hh()); }
  void PackRecurrent(int64_t task) const {
    l_.PackTransposed(l_.w_hh(), Outputs(), task, b_.w_hh);
  }
  int64_t projection_tasks() const {
    return l_.projects() ? l_.pack_tasks(l_.w_hr()) : 0;
  }
  void PackProjection(int64_t task) const {
    l_.PackTransposed(l_.w_hr(), Units(), task, b_.w_hr);
  }
  // Takes the cotangents of final states, in independent tasks.
  int64_t sequence_tasks() const {
    return CeilDiv(l_.context.call.operands.batch, l_.rows_per_task());
  }
  void Begin(int64_t task) const;
  // Fills the fields of a token that are cotangents of states and cells before it.
  void Gather(int64_t i, int64_t step,
              BackwardToken<Storage, Operand, Accum>& to) const;
  // Runs steps of the chunk, end - 1 to begin: for sequences first .. last - 1, and of
  // those the units of a worker's slice. Returns the step that it came to, which is
  // begin unless the workers are to stop.
  int64_t Run(int64_t begin, int64_t end, int64_t first, int64_t last, Slice slice,
              Worker* worker) const;
  // Writes gradients of initial states, in as many tasks.
  void Finish(int64_t task) const;

 private:
  void AddOutputGradient(int64_t i, int64_t step, int64_t first, int64_t count) const;
  // The columns of products in a step, in the blocks that workers share.
  Columns Outputs() const { return StepColumns(l_.context.heads().outputs); }
  Columns Units() const { return StepColumns(l_.context.heads().units); }
  Columns StepColumns(const HeadParts& parts) const {
    return {parts.size, l_.lanes(), l_.context.step_vectors, parts.group};
  }

  const Layer& l_;
  const Chunk<Storage, Operand, Accum>& chunk_;
  const Buffers& b_;
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_GRADIENT_STEPS_H_
