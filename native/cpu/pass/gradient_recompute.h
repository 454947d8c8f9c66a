// Gates that the forward pass did not save, computed once more for a chunk of steps:
// all states before its steps are known, so that it is one product over the chunk.
#ifndef OSTINATO_CPU_PASS_GRADIENT_RECOMPUTE_H_
#define OSTINATO_CPU_PASS_GRADIENT_RECOMPUTE_H_

#include <cstdint>

#include "cpu/pass/gradient_layer.h"

namespace ostinato::cpu {

// The buffers of one direction; they serve every layer. All null where gates were
// saved.
template <typename Storage, typename Operand, typename Accum>
struct RecomputeBuffers {
  Storage* gates;  // a row for each token
  ForwardToken<Storage, Operand, Accum>* tokens;
  const Operand **x, **h;    // inputs and states before each token
  Operand *wide_x, *wide_h;  // those that had to be converted
  Accum *pre, *c;            // pre-activations; cells before, then after
  int64_t cell_stride;       // from one cell state of a token to the next
  Operand* after;            // states after, which nobody reads

  using Context = GradientContext<Storage, Operand, Accum>;
  static RecomputeBuffers Make(const Context& context, Scratch& scratch);
};

template <typename Storage, typename Operand, typename Accum>
class GradientRecompute {
 public:
  using Layer = GradientLayer<Storage, Operand, Accum>;
  using Buffers = RecomputeBuffers<Storage, Operand, Accum>;

  GradientRecompute(const Layer& layer, const Chunk<Storage, Operand, Accum>& chunk,
                    const Buffers& buffers)
      : l_(layer), chunk_(chunk), b_(buffers) {}

  // Where the gates of a token will stand.
  const Storage* gates(int64_t token) const {
    return b_.gates + token * l_.network.saved_blocks() * l_.hidden;
  }
  // Prepares a token that has been gathered.
  void Gather(int64_t token) const;
  // Independent tasks, once all tokens have been gathered.
  int64_t tasks() const;
  void Run(int64_t task) const;

 private:
  const Layer& l_;
  const Chunk<Storage, Operand, Accum>& chunk_;
  const Buffers& b_;
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_PASS_GRADIENT_RECOMPUTE_H_
