// One direction of one layer on its way forward, over some sequences of the batch.
#ifndef OSTINATO_CPU_PASS_LAYER_PASS_H_
#define OSTINATO_CPU_PASS_LAYER_PASS_H_

#include <algorithm>
#include <cstdint>

#include "cpu/network/panels.h"
#include "cpu/network/sequences.h"
#include "cpu/network/values.h"
#include "cpu/pass/forward.h"
#include "cpu/pass/schedule.h"
#include "cpu/runtime/scratch.h"
#include "cpu/runtime/team.h"

namespace ostinato::cpu {

// State of a pseudo-layer: two copies of h, for a step reads one and writes the other.
// A sequence whose length is n has its final h in copy n % 2.
template <typename Operand, typename Accum>
struct LayerState {
  Operand* h[2];         // [B] rows of h_stride
  Operand* unprojected;  // [B] rows of c_stride: that of which h is a projection
  Accum* c;              // [cells][B] rows of c_stride
};

// The buffers of one thread; nothing in them outlives a chunk of steps.
template <typename Storage, typename Operand, typename Accum>
struct Workspace {
  Accum* pre;         // pre-activations
  Operand* input;     // inputs that had to be converted or moved, a row for each token
  const Operand** x;  // inputs of the tokens of a chunk
  const Operand** h;  // states before a step
  ForwardToken<Storage, Operand, Accum>* tokens;  // of a step
};

// Facts that all passes of a call share.
template <typename Storage, typename Operand, typename Accum>
struct ForwardContext {
  const ForwardCall<Storage, Accum>& call;
  const Kernels<Storage, Operand, Accum>& kernels;
  const NetworkPanels<Storage, Operand, Accum>& panels;
  // Per pseudo-layer.
  const LayerPanels<Operand, Accum>* layers = nullptr;
  LayerState<Operand, Accum>* states = nullptr;
  bool uses_panels = true;  // else w_ih, w_hh, w_hr are read as they lie
  // Whether the panels of w_hh come from farther away than the second-level cache.
  bool far_panels = false;
  // Steps whose input products run together have about this many tokens; where one step
  // has enough for the kernels, they run as part of the step. A larger number would
  // gain nothing where panels are near: so many rows do not wait for one.
  int64_t input_tokens() const { return far_panels ? 192 : 96; }
  // Outputs of every layer but the last, [T, B, D*S].
  Storage* const* hidden = nullptr;
  int64_t h_stride = 0, c_stride = 0, x_stride = 0;
  int64_t cell_stride = 0;            // from one cell state of a sequence to the next
  const Operand* zeros = nullptr;     // the state before a step with a reset
  const Accum* zero_start = nullptr;  // 4 vectors

  const Network& network() const { return call.operands.network; }
};

template <typename Storage, typename Operand, typename Accum>
class LayerPass {
 public:
  using Context = ForwardContext<Storage, Operand, Accum>;

  LayerPass(const Context& context, int64_t pseudo_layer, const Sequences& sequences);

  // Takes the initial states.
  void Begin() const;
  // Runs steps begin .. end - 1, a worker's slice of the units of each; returns the
  // step that comes next, which is end unless the workers are to stop. All workers of a
  // pass call this with the same steps, each with a workspace of its own.
  int64_t Advance(int64_t begin, int64_t end, Slice slice, Worker* worker,
                  const Workspace<Storage, Operand, Accum>& work) const;
  // Writes final states, and zeros past the ends of the sequences.
  void Finish() const;

  static Workspace<Storage, Operand, Accum> MakeWorkspace(const Context& context,
                                                          int64_t rows,
                                                          Scratch& scratch);

 private:
  int64_t Time(int64_t i, int64_t step) const {
    return reverse_ ? sequences_.length[i] - 1 - step : step;
  }
  Storage* Output(int64_t i, int64_t step) const;
  int64_t GatherInputs(int64_t begin, int64_t end,
                       const Workspace<Storage, Operand, Accum>& w) const;
  // Of a block of units; null where weights are not packed, or absent.
  const Operand* InputPanel(int64_t block) const;
  const Operand* RecurrentPanel(int64_t block) const;
  // `next`: the panel of the product after this one, or null.
  void InputProduct(int64_t block, int64_t rows, const Operand* next,
                    const Workspace<Storage, Operand, Accum>& w, Accum* pre) const;
  void RecurrentProduct(int64_t block, int64_t rows, const Operand* next,
                        const Workspace<Storage, Operand, Accum>& w, Accum* pre) const;
  // The equations of a block; `next` as above.
  void Equations(int64_t block, int64_t rows, const Operand* next,
                 const Workspace<Storage, Operand, Accum>& w, const Accum* pre) const;
  void UnpackedInput(int64_t block, int64_t rows,
                     const Workspace<Storage, Operand, Accum>& w, Accum* pre) const;
  void UnpackedRecurrent(int64_t block, int64_t rows,
                         const Workspace<Storage, Operand, Accum>& w, Accum* pre) const;
  // Kernels::dot of rows of w_hh or w_hr with the parts of `a` of their heads.
  void DotHeads(const HeadMatrix<Storage>& matrix, int64_t row, int64_t lanes,
                const Operand* a, Accum* out) const;
  void GatherTokens(int64_t step, int64_t active, Slice slice,
                    const Workspace<Storage, Operand, Accum>& w) const;
  void Project(int64_t step, int64_t active, Slice slice,
               const Workspace<Storage, Operand, Accum>& w) const;
  int64_t Stride() const { return 4 * c_.kernels.lanes; }
  HeadMatrix<Storage> Recurrent() const {
    return {c_.call.operands.weights + offsets_.w_hh, c_.network().gates(),
            c_.panels.heads().units, c_.panels.heads().outputs};
  }

  const Context& c_;
  const int64_t pseudo_layer_, layer_, direction_;
  const bool reverse_;
  const Sequences& sequences_;
  const LayerPanels<Operand, Accum>& weights_;
  const LayerState<Operand, Accum>& state_;
  const WeightOffsets offsets_;
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_LAYER_PASS_H_
