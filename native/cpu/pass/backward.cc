#include "cpu/pass/backward.h"

#include <algorithm>
#include <type_traits>

#include "cpu/kernels/dispatch.h"
#include "cpu/network/values.h"
#include "cpu/pass/gradient_pass.h"
#include "cpu/pass/schedule.h"

namespace ostinato::cpu {
namespace {

template <typename S, typename O, typename R>
class Backward {
 public:
  using Pass = GradientPass<S, O, R>;

  Backward(const BackwardCall<S, R>& call, const Kernels<S, O, R>& kernels, Team& team)
      : team_(team),
        call_(call),
        in_(call.operands),
        n_(call.operands.network),
        packing_(kernels, n_),
        rows_(*MakeSlices(in_.seq_lengths, in_.batch, in_.steps, 1, scratch_)),
        work_(WorkOf(n_, in_.entries, in_.batch)),
        plan_(PlanFor(in_.batch, packing_.lanes())),
        context_{call, kernels, SumKernels(kernels), packing_, PackAgain(), rows_} {
    TakeStrides();
    for (int64_t d = 0; d < n_.num_directions; ++d) {
      buffers_[d] = Pass::MakeBuffers(context_, scratch_);
    }
    bounds_ = scratch_.Take<int64_t>(team_.threads() + 1);
  }

  void Run() {
    const int64_t entries = in_.entries;
    AdviseHugePages(call_.dx, entries * n_.input_size * sizeof *call_.dx);
    AdviseHugePages(call_.dweights, NumParams(n_) * sizeof *call_.dweights);
    R* lower[2] = {nullptr, nullptr};  // gradients of the outputs of layers
    for (int64_t layer = n_.num_layers - 1; layer >= 0; --layer) {
      R*& inputs = lower[layer % 2];
      context_.d_outputs = layer + 1 < n_.num_layers ? lower[(layer + 1) % 2] : nullptr;
      if (layer == 0) {
        context_.d_inputs = InputGradients();
      } else {
        if (inputs == nullptr) inputs = scratch_.Take<R>(entries * n_.width());
        context_.d_inputs = inputs;
      }
      RunLayer(layer);
    }
    FinishInputs();
  }

 private:
  // Rows of a chunk: products over that many run at full speed, and what a chunk needs
  // stays in a cache. Not a matter of the machine: it decides in which order is summed.
  static constexpr int64_t kChunkRows = 256;

  void RunLayer(int64_t layer) {
    const int64_t first = layer * n_.num_directions;
    Pass passes[2] = {
        Pass(context_, first, buffers_[0]),
        Pass(context_, first + n_.num_directions - 1, buffers_[n_.num_directions - 1])};
    ForEachOf(passes, &Pass::begin_tasks, &Pass::Begin);
    for (int64_t end = rows_.Steps(); end > 0;) {
      const int64_t begin = ChunkBegin(end);
      for (int64_t d = 0; d < n_.num_directions; ++d) passes[d].BeginChunk(begin, end);
      ForEachOf(passes, &Pass::prepare_tasks, &Pass::Prepare);
      ForEachOf(passes, &Pass::again_tasks, &Pass::ComputeAgain);
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

  // Of steps with so many active rows, whose units are in blocks of so many columns.
  Plan PlanFor(int64_t active, int64_t block) const {
    const Plan plan = PlanOf(work_.OfLayer(active), team_.threads());
    const bool one_block = n_.output_size() <= block;
    return plan == Plan::kUnits && one_block ? Plan::kDirections : plan;
  }

  // Vectors in a block of columns, so that the threads get as many of them each.
  int64_t StepVectors() const {
    if (plan_ != Plan::kUnits) return 4;
    const int64_t vectors = CeilDiv(n_.output_size(), packing_.lanes());
    const int64_t each = CeilDiv(vectors, team_.threads());
    return CeilDiv(each, CeilDiv(each, 4));
  }

  // The tasks of both directions at once.
  void ForEachOf(Pass (&passes)[2], int64_t (Pass::*count)() const,
                 void (Pass::*run)(int64_t) const) {
    const int64_t each = (passes[0].*count)();
    team_.ForEach(each * n_.num_directions,
                  [&](int64_t n) { (passes[n / each].*run)(n % each); });
  }

  int64_t ChunkBegin(int64_t end) const {
    int64_t begin = end - 1, count = rows_.Active(begin);
    while (begin > 0 && count + rows_.Active(begin - 1) <= kChunkRows) {
      --begin;
      count += rows_.Active(begin);
    }
    return begin;
  }

  void RunSteps(Pass (&passes)[2], int64_t begin, int64_t end) {
    const int64_t active = rows_.Active(begin);
    const int64_t block = context_.step_vectors * packing_.lanes();
    switch (PlanFor(active, block)) {
      case Plan::kRows: {
        const int64_t pieces = std::min<int64_t>(team_.threads(), active);
        CutRows(begin, end, active, pieces);
        team_.ForEach(pieces * n_.num_directions, [&](int64_t n) {
          const int64_t piece = n % pieces;
          passes[n / pieces].Steps(begin, end, bounds_[piece], bounds_[piece + 1],
                                   Share{}, nullptr);
        });
        return;
      }
      case Plan::kUnits:
        for (int64_t last = end; last > begin;) {
          const int64_t first = std::max(begin, last - kStepsPerRun);
          int64_t next = last;
          team_.Run([&](Member& member) {
            int64_t reached = last;
            for (const Part part : PartsOf(member, n_.num_directions)) {
              reached = passes[part.direction].Steps(first, last, 0, active, part.share,
                                                     &member);
            }
            if (member.index() == 0) next = reached;
          });
          last = next;
        }
        return;
      default:
        team_.ForEach(n_.num_directions, [&](int64_t d) {
          passes[d].Steps(begin, end, 0, active, Share{}, nullptr);
        });
    }
  }

  // Pieces of the active rows with about the same number of steps in the chunk.
  void CutRows(int64_t begin, int64_t end, int64_t active, int64_t pieces) {
    const auto steps = [&](int64_t i) {
      return std::min(rows_.length[i], end) - begin;
    };
    int64_t all = 0;
    for (int64_t i = 0; i < active; ++i) all += steps(i);
    int64_t piece = 0, before = 0;
    for (int64_t i = 0; i < active; ++i) {
      while (before * pieces >= all * piece) bounds_[piece++] = i;
      before += steps(i);
    }
    while (piece <= pieces) bounds_[piece++] = active;
  }

  // Panels of the forward pass, where gates have to be computed again.
  const void* PackAgain() {
    if (call_.gates != nullptr || n_.saved_blocks() == 0) return nullptr;
    auto* memory = scratch_.Take<char>(packing_.bytes());
    PackAll(packing_, in_.weights, memory, team_);
    return memory;
  }

  void TakeStrides() {
    const int64_t lanes = context_.kernels.lanes;
    // Never a multiple of 4 KB, where all rows would compete for one set of the cache.
    const auto stride = [&](int64_t size) { return RoundUp(size, lanes) + lanes; };
    const int64_t pairs = context_.kernels.pairs;  // of factors as many fill a vector
    const auto factors = [&](int64_t size) {
      return pairs * stride(CeilDiv(size, pairs));
    };
    context_.most_rows = std::max(kChunkRows, in_.batch);
    context_.h_stride = stride(n_.output_size());
    context_.c_stride = stride(n_.hidden_size);
    context_.g_stride = factors(context_.blocks() * n_.hidden_size);
    context_.r_stride = factors(context_.most_rows);
    context_.step_vectors = StepVectors();
    context_.zero_state = scratch_.TakeZeroed<S>(n_.output_size());
    auto* ones = scratch_.Take<O>(context_.most_rows);
    std::fill(ones, ones + context_.most_rows, Narrow<O>(R{1}));
    context_.ones = ones;
    context_.zeros = scratch_.TakeZeroed<R>(std::max(4 * lanes, n_.hidden_size));
  }

  // Where the gradient of x gathers: in the result, if it keeps what sums are kept in.
  R* InputGradients() {
    if (call_.dx == nullptr) return nullptr;
    if constexpr (std::is_same_v<S, R>) {
      return call_.dx;
    } else {
      return scratch_.Take<R>(in_.entries * n_.input_size);
    }
  }

  void FinishInputs() {
    if (call_.dx == nullptr) return;
    const R* from = context_.d_inputs;
    const int64_t size = n_.input_size;
    team_.ForEach(in_.batch, [&](int64_t i) {
      const int64_t row = rows_.row[i], length = rows_.length[i];
      for (int64_t t = 0; t < in_.room[row]; ++t) {
        const int64_t at = in_.io.at(row, t) * size;
        if (t >= length) {
          Zero(call_.dx + at, size);
        } else if constexpr (!std::is_same_v<S, R>) {
          Convert(from + at, size, call_.dx + at);
        }
      }
    });
  }

  Team& team_;
  Scratch scratch_;
  const BackwardCall<S, R>& call_;
  const Operands<S>& in_;
  const Network& n_;
  const PackedNetwork<S, O, R> packing_;
  const Slice& rows_;
  const Work work_;
  const Plan plan_;  // of steps in which every row is active
  BackwardContext<S, O, R> context_;
  typename Pass::Buffers buffers_[2];
  int64_t* bounds_;
};

}  // namespace

template <typename S, typename R>
void RunBackward(const BackwardCall<S, R>& call, Team& team) {
  WithBackwardKernels<S>(
      [&](const auto& kernels) { Backward(call, kernels, team).Run(); });
}

template void RunBackward(const BackwardCall<float, float>&, Team&);
template void RunBackward(const BackwardCall<double, double>&, Team&);
template void RunBackward(const BackwardCall<BFloat16, float>&, Team&);

}  // namespace ostinato::cpu
