// One direction of one layer on its way forward over the rows of a slice.
#ifndef OSTINATO_CPU_PASS_LAYER_PASS_H_
#define OSTINATO_CPU_PASS_LAYER_PASS_H_

#include <algorithm>
#include <cstdint>

#include "cpu/network/panels.h"
#include "cpu/network/sequences.h"
#include "cpu/network/values.h"
#include "cpu/pass/forward.h"
#include "cpu/runtime/scratch.h"
#include "cpu/runtime/team.h"

namespace ostinato::cpu {

// A part of `size` like parts of something.
struct Share {
  int64_t index = 0, size = 1;

  int64_t begin(int64_t count) const { return count * index / size; }
  int64_t end(int64_t count) const { return count * (index + 1) / size; }
};

// State of a pseudo-layer: two copies of h, for a step reads one and writes the other.
// A row whose length is n has its final h in copy n % 2.
template <typename O, typename R>
struct LayerState {
  O* h[2];  // [B] rows of h_stride
  O* u;     // [B] rows of c_stride: o * tanh(c), of which h is a projection
  R* c;     // [B] rows of c_stride
};

// What one thread works with; nothing in it outlives a step or a chunk of steps.
template <typename S, typename O, typename R>
struct Workspace {
  R* pre;                     // pre-activations
  O* input;                   // inputs that had to be converted or moved, by rows
  const O** x;                // input rows of a chunk
  const O** h;                // state rows of a step
  ForwardRow<S, O, R>* rows;  // of a step
};

// What all passes of a call share.
template <typename S, typename O, typename R>
struct ForwardContext {
  // Steps whose input products run together have about this many rows; where one step
  // has enough for the kernels, they run as part of the step. A larger number would
  // gain nothing, whatever the caches: so many rows wait for no panel.
  static constexpr int64_t kInputRows = 96;

  const ForwardCall<S, R>& call;
  const Kernels<S, O, R>& kernels;
  const PackedNetwork<S, O, R>& packing;
  // Per pseudo-layer.
  const PackedLayer<O, R>* layers = nullptr;
  LayerState<O, R>* states = nullptr;
  bool packed = true;  // else w_ih, w_hh, w_hr are read as they lie
  // Outputs of every layer but the last, [T, B, D*S].
  S* const* hidden = nullptr;
  int64_t h_stride = 0, c_stride = 0, x_stride = 0;
  const O* zeros = nullptr;       // a state row after a reset
  const R* zero_start = nullptr;  // 4 vectors

  const Network& network() const { return call.operands.network; }
};

template <typename S, typename O, typename R>
class LayerPass {
 public:
  using Context = ForwardContext<S, O, R>;

  LayerPass(const Context& context, int64_t pseudo_layer, const Slice& slice);

  // Takes the initial states.
  void Begin() const;
  // Runs steps begin .. end - 1, this member's share of the units of each; returns the
  // step that comes next, which is end unless members are to part. Members that share
  // a pass call this alike, each with a workspace of its own.
  int64_t Advance(int64_t begin, int64_t end, Share share, Member* member,
                  const Workspace<S, O, R>& work) const;
  // Writes final states, and zeros past the ends of rows begin .. end - 1.
  void Finish(int64_t begin, int64_t end) const;

  static Workspace<S, O, R> MakeWorkspace(const Context& context, int64_t rows,
                                          Scratch& scratch);

 private:
  int64_t Time(int64_t i, int64_t step) const {
    return reverse_ ? slice_.length[i] - 1 - step : step;
  }
  S* Output(int64_t i, int64_t step) const;
  int64_t GatherInputs(int64_t begin, int64_t end, const Workspace<S, O, R>& w) const;
  void InputProduct(int64_t block, int64_t rows, const Workspace<S, O, R>& w,
                    R* pre) const;
  void RecurrentProduct(int64_t block, int64_t rows, const Workspace<S, O, R>& w,
                        R* pre) const;
  void Unpacked(int64_t block, const S* matrix, int64_t depth, bool recurrent,
                const O* const* a, int64_t rows, R* pre) const;
  void GatherRows(int64_t step, int64_t active, Share share,
                  const Workspace<S, O, R>& w) const;
  void Project(int64_t step, int64_t active, Share share,
               const Workspace<S, O, R>& w) const;
  int64_t Stride() const { return 4 * c_.kernels.lanes; }

  const Context& c_;
  const int64_t pseudo_layer_, layer_, direction_;
  const bool reverse_;
  const Slice& slice_;
  const PackedLayer<O, R>& weights_;
  const LayerState<O, R>& state_;
  const LayerOffsets offsets_;
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_LAYER_PASS_H_
