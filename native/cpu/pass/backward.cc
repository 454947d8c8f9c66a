#include "cpu/pass/backward.h"

#include <algorithm>
#include <type_traits>

#include "cpu/kernels/dispatch.h"
#include "cpu/network/values.h"
#include "cpu/pass/gradient_pass.h"
#include "cpu/pass/schedule.h"

namespace ostinato::cpu {
namespace {

template <typename Storage, typename Operand, typename Accum>
class Backward {
 public:
  using Pass = GradientPass<Storage, Operand, Accum>;

  Backward(const BackwardCall<Storage, Accum>& call,
           const Kernels<Storage, Operand, Accum>& kernels, Team& team)
      : team_(team),
        call_(call),
        in_(call.operands),
        n_(call.operands.network),
        panels_(kernels, n_),
        sequences_(*SplitBatch(in_.seq_lengths, in_.batch, in_.steps, 1, scratch_)),
        cost_(CostModelOf(n_, in_.tokens, in_.batch, kernels.lanes)),
        schedule_(ScheduleFor(in_.batch, panels_.lanes())),
        context_{call,      kernels, SumKernels(kernels), panels_, PackForRecompute(),
                 sequences_} {
    TakeStrides();
    for (int64_t d = 0; d < n_.num_directions; ++d) {
      buffers_[d] = Pass::Buffers::Make(context_, scratch_);
    }
    bounds_ = scratch_.Take<int64_t>(team_.threads() + 1);
  }

  void Run() {
    const int64_t tokens = in_.tokens;
    AdviseHugePages(call_.dx, tokens * n_.input_size * sizeof *call_.dx);
    AdviseHugePages(call_.dweights, NumParams(n_) * sizeof *call_.dweights);
    Accum* lower[2] = {nullptr, nullptr};  // gradients of the outputs of layers
    for (int64_t layer = n_.num_layers - 1; layer >= 0; --layer) {
      Accum*& inputs = lower[layer % 2];
      context_.d_outputs = layer + 1 < n_.num_layers ? lower[(layer + 1) % 2] : nullptr;
      if (layer == 0) {
        context_.d_inputs = InputGradients();
      } else {
        if (inputs == nullptr) inputs = scratch_.Take<Accum>(tokens * n_.width());
        context_.d_inputs = inputs;
      }
      RunLayer(layer);
    }
    FinishInputs();
  }

 private:
  // Tokens of a chunk: products over that many run at full speed, and what a chunk
  // needs stays in a cache. The same on every machine, for it decides the order of
  // sums.
  static constexpr int64_t kChunkTokens = 256;

  void RunLayer(int64_t layer) {
    const int64_t first = layer * n_.num_directions;
    Pass passes[2] = {
        Pass(context_, first, buffers_[0]),
        Pass(context_, first + n_.num_directions - 1, buffers_[n_.num_directions - 1])};
    ForEachOf(passes, &Pass::begin_tasks, &Pass::Begin);
    for (int64_t end = sequences_.steps(); end > 0;) {
      const int64_t begin = ChunkBegin(end);
      for (int64_t d = 0; d < n_.num_directions; ++d) passes[d].BeginChunk(begin, end);
      ForEachOf(passes, &Pass::gather_tasks, &Pass::Gather);
      ForEachOf(passes, &Pass::recompute_tasks, &Pass::Recompute);
      ForEachOf(passes, &Pass::unproject_tasks, &Pass::Unproject);
      RunSteps(passes, begin, end);
      ForEachOf(passes, &Pass::pack_tasks, &Pass::Pack);
      for (int64_t d = 0; d < n_.num_directions; ++d) {  // both add to one gradient
        Pass& pass = passes[d];
        team_.ForEach(pass.product_tasks(), [&](int64_t task) { pass.Product(task); });
        pass.EndChunk();
      }
      end = begin;
    }
    ForEachOf(passes, &Pass::finish_tasks, &Pass::Finish);
  }

  // The schedule of steps in which `active` sequences are active, and whose units are
  // in blocks of `block` columns.
  Schedule ScheduleFor(int64_t active, int64_t block) const {
    const Schedule schedule = ScheduleOf(cost_.OfLayer(active), team_);
    const bool one_block = n_.output_size() <= block;
    return schedule == Schedule::kUnits && one_block ? Schedule::kDirections : schedule;
  }

  // How many vectors a block of columns has, so that all threads get as many of them.
  int64_t StepVectors() const {
    if (schedule_ != Schedule::kUnits) return 4;
    const int64_t vectors = CeilDiv(n_.output_size(), panels_.lanes());
    const int64_t each = CeilDiv(vectors, team_.threads());
    return CeilDiv(each, CeilDiv(each, 4));
  }

  // Runs the tasks of both directions at once.
  void ForEachOf(Pass (&passes)[2], int64_t (Pass::*count)() const,
                 void (Pass::*run)(int64_t) const) {
    const int64_t each = (passes[0].*count)();
    team_.ForEach(each * n_.num_directions,
                  [&](int64_t n) { (passes[n / each].*run)(n % each); });
  }

  int64_t ChunkBegin(int64_t end) const {
    int64_t begin = end - 1, count = sequences_.Active(begin);
    while (begin > 0 && count + sequences_.Active(begin - 1) <= kChunkTokens) {
      --begin;
      count += sequences_.Active(begin);
    }
    return begin;
  }

  void RunSteps(Pass (&passes)[2], int64_t begin, int64_t end) {
    const int64_t active = sequences_.Active(begin);
    const int64_t block = context_.step_vectors * panels_.lanes();
    switch (ScheduleFor(active, block)) {
      case Schedule::kSequences: {
        const int64_t portions = std::min<int64_t>(team_.threads(), active);
        SplitActive(begin, end, active, portions);
        team_.ForEach(portions * n_.num_directions, [&](int64_t n) {
          const int64_t portion = n % portions;
          passes[n / portions].RunSteps(begin, end, bounds_[portion],
                                        bounds_[portion + 1], Slice{}, nullptr);
        });
        return;
      }
      case Schedule::kHeads: {
        const int64_t parts = HeadPartsFor(cost_, team_.threads());
        team_.ForEach(parts * n_.num_directions, [&](int64_t n) {
          passes[n / parts].RunSteps(begin, end, 0, active, Slice{n % parts, parts},
                                     nullptr);
        });
        return;
      }
      case Schedule::kUnits:
        for (int64_t last = end; last > begin;) {
          const int64_t first = std::max(begin, last - kStepsPerRun);
          int64_t next = last;
          team_.Run([&](Worker& worker) {
            int64_t reached = last;
            for (const Assignment assignment :
                 AssignmentsOf(worker, n_.num_directions)) {
              reached = passes[assignment.direction].RunSteps(
                  first, last, 0, active, assignment.slice, &worker);
            }
            if (worker.index() == 0) next = reached;
          });
          last = next;
        }
        return;
      default:
        team_.ForEach(n_.num_directions, [&](int64_t d) {
          passes[d].RunSteps(begin, end, 0, active, Slice{}, nullptr);
        });
    }
  }

  // Splits the active sequences into portions with about the same number of tokens in
  // the chunk.
  void SplitActive(int64_t begin, int64_t end, int64_t active, int64_t portions) {
    const auto steps = [&](int64_t i) {
      return std::min(sequences_.length[i], end) - begin;
    };
    int64_t all = 0;
    for (int64_t i = 0; i < active; ++i) all += steps(i);
    int64_t portion = 0, before = 0;
    for (int64_t i = 0; i < active; ++i) {
      while (before * portions >= all * portion) bounds_[portion++] = i;
      before += steps(i);
    }
    while (portion <= portions) bounds_[portion++] = active;
  }

  // Panels of the forward pass, where gates have to be recomputed.
  const void* PackForRecompute() {
    if (call_.gates != nullptr || n_.saved_blocks() == 0) return nullptr;
    auto* memory = scratch_.Take<char>(panels_.bytes());
    PackAll(panels_, in_.weights, memory, team_);
    return memory;
  }

  void TakeStrides() {
    const int64_t lanes = context_.kernels.lanes;
    const int64_t pairs = context_.kernels.pairs;
    context_.most_tokens = std::max(kChunkTokens, in_.batch);
    context_.h_stride = RowStride(n_.output_size(), lanes);
    context_.c_stride = RowStride(n_.hidden_size, lanes);
    context_.cell_stride = in_.batch * context_.c_stride;
    context_.g_stride = RowStride(context_.blocks() * n_.hidden_size, lanes, pairs);
    context_.column_stride = RowStride(context_.most_tokens, lanes, pairs);
    context_.step_vectors = StepVectors();
    context_.zero_state = scratch_.TakeZeroed<Storage>(n_.output_size());
    auto* ones = scratch_.Take<Operand>(context_.most_tokens);
    std::fill(ones, ones + context_.most_tokens, Narrow<Operand>(Accum{1}));
    context_.ones = ones;
    context_.zeros = scratch_.TakeZeroed<Accum>(std::max(4 * lanes, n_.hidden_size));
  }

  // Where the gradient of x adds up: in the result, if that has the type of sums.
  Accum* InputGradients() {
    if (call_.dx == nullptr) return nullptr;
    if constexpr (std::is_same_v<Storage, Accum>) {
      return call_.dx;
    } else {
      return scratch_.Take<Accum>(in_.tokens * n_.input_size);
    }
  }

  void FinishInputs() {
    if (call_.dx == nullptr) return;
    const int64_t rows = RowsPerTask(context_.kernels.rows_at_once);
    team_.ForEach(CeilDiv(in_.batch, rows), [&](int64_t task) {
      const int64_t end = std::min(in_.batch, (task + 1) * rows);
      for (int64_t i = task * rows; i < end; ++i) FinishInput(i);
    });
  }

  // Rounds the gradient of one sequence, and clears its padding.
  void FinishInput(int64_t i) {
    constexpr bool rounds = !std::is_same_v<Storage, Accum>;
    const int64_t sequence = sequences_.index[i], length = sequences_.length[i];
    const int64_t size = n_.input_size;
    for (int64_t t = rounds ? 0 : length; t < in_.capacity[sequence]; ++t) {
      const int64_t at = in_.io.at(sequence, t) * size;
      if (t >= length) {
        Zero(call_.dx + at, size);
      } else if constexpr (rounds) {
        Convert(context_.d_inputs + at, size, call_.dx + at);
      }
    }
  }

  Team& team_;
  Scratch scratch_;
  const BackwardCall<Storage, Accum>& call_;
  const Operands<Storage>& in_;
  const Network& n_;
  const NetworkPanels<Storage, Operand, Accum> panels_;
  const Sequences& sequences_;
  const CostModel cost_;
  const Schedule schedule_;  // of steps in which every sequence is active
  GradientContext<Storage, Operand, Accum> context_;
  typename Pass::Buffers buffers_[2];
  int64_t* bounds_;
};

}  // namespace

template <typename Storage, typename Accum>
void RunBackward(const BackwardCall<Storage, Accum>& call, Team& team) {
  WithKernels<Storage>(
      [&](const auto& kernels) { Backward(call, kernels, team).Run(); });
}

template void RunBackward(const BackwardCall<float, float>&, Team&);
template void RunBackward(const BackwardCall<double, double>&, Team&);
template void RunBackward(const BackwardCall<BFloat16, float>&, Team&);

}  // namespace ostinato::cpu
