#include "cpu/pass/forward.h"

#include <algorithm>
#include <type_traits>

#include "cpu/kernels/dispatch.h"
#include "cpu/pass/layer_pass.h"
#include "cpu/pass/portion_queue.h"
#include "cpu/pass/schedule.h"

namespace ostinato::cpu {
namespace {

template <typename S, typename O, typename R>
class Forward {
 public:
  using Pass = LayerPass<S, O, R>;

  Forward(const ForwardCall<S, R>& call, const Kernels<S, O, R>& kernels, Team& team)
      : team_(team),
        network_(call.operands.network),
        work_(WorkOf(network_, call.operands.entries, call.operands.batch)),
        plan_(PlanOf(work_, team.threads())),
        packing_(kernels, network_),
        context_{call, kernels, packing_} {
    AdviseHugePages(call);
    TakeWeights();
    TakeHidden();
    TakeStates();
  }

  void Run() {
    switch (plan_) {
      case Plan::kRows:
        return RunRows(SlicesFor(work_, team_.threads()));
      case Plan::kDirections:
        return RunDirections();
      case Plan::kWavefront:
        return RunWavefront();
      case Plan::kUnits:
        return RunUnits();
    }
  }

 private:
  // Rows go through all layers by themselves, a chunk of steps in a turn: a thread that
  // comes late or is stopped for a while holds up nobody.
  void RunRows(int64_t count) {
    const Slice* slices = AllSlices(count);
    const int64_t threads = team_.threads(), passes = network_.pseudo_layers();
    auto* work = scratch_.Take<Workspace<S, O, R>>(threads);
    for (int64_t i = 0; i < threads; ++i) work[i] = WorkspaceFor(slices[0]);
    RowQueue queue(slices, count, context_.call.operands.batch, passes, scratch_);
    team_.ForEach(threads, [&](int64_t i) {
      Portion* portion = nullptr;
      while ((portion = queue.Next(portion)) != nullptr) MoveOn(*portion, work[i]);
    });
  }

  void MoveOn(Portion& portion, const Workspace<S, O, R>& work) {
    const Slice& rows = portion.rows;
    const Pass pass(context_, portion.pass, rows);
    if (portion.step == 0) pass.Begin();
    const int64_t active = std::max<int64_t>(1, rows.Active(portion.step));
    const int64_t steps =
        std::max<int64_t>(1, ForwardContext<S, O, R>::kInputRows / active);
    portion.step =
        pass.Advance(portion.step, portion.step + steps, Share{}, nullptr, work);
    if (portion.step < rows.Steps()) return;
    pass.Finish(0, rows.size);
    ++portion.pass;
    portion.step = 0;
  }

  // One thread for each direction of a layer.
  void RunDirections() {
    const Slice* all = AllSlices(1);
    const Workspace<S, O, R> work[2] = {WorkspaceFor(*all), WorkspaceFor(*all)};
    for (int64_t layer = 0; layer < network_.num_layers; ++layer) {
      team_.ForEach(2, [&](int64_t d) {
        const Pass pass(context_, 2 * layer + d, *all);
        pass.Begin();
        pass.Advance(0, all->Steps(), Share{}, nullptr, work[d]);
        pass.Finish(0, all->size);
      });
    }
  }

  // Layer l runs some steps while the layer above it runs the steps before them.
  void RunWavefront() {
    const Slice* all = AllSlices(1);
    const int64_t layers = network_.num_layers;
    auto* work = scratch_.Take<Workspace<S, O, R>>(layers);
    for (int64_t l = 0; l < layers; ++l) {
      work[l] = WorkspaceFor(*all);
      Pass(context_, l, *all).Begin();
    }
    const int64_t blocks = CeilDiv(all->Steps(), kStepsPerWave);
    for (int64_t wave = 0; wave < blocks + layers - 1; ++wave) {
      const int64_t first = std::max<int64_t>(0, wave - blocks + 1);
      const int64_t last = std::min(layers - 1, wave);
      team_.ForEach(last - first + 1, [&](int64_t n) {
        const int64_t l = first + n, step = (wave - l) * kStepsPerWave;
        Pass(context_, l, *all)
            .Advance(step, step + kStepsPerWave, Share{}, nullptr, work[l]);
      });
    }
    FinishAll(*all, 0, layers);
  }

  // Threads share the units of a step, and wait for one another after each.
  void RunUnits() {
    const Slice* all = AllSlices(1);
    const int64_t directions = network_.num_directions;
    auto* work = scratch_.Take<Workspace<S, O, R>>(team_.threads());
    for (int32_t i = 0; i < team_.threads(); ++i) work[i] = WorkspaceFor(*all);
    for (int64_t layer = 0; layer < network_.num_layers; ++layer) {
      const int64_t first = layer * directions;
      for (int64_t d = 0; d < directions; ++d) Pass(context_, first + d, *all).Begin();
      for (int64_t step = 0; step < all->Steps();) {
        int64_t next = step;
        team_.Run([&](Member& member) {
          int64_t reached = step;
          for (const Part part : PartsOf(member, directions)) {
            reached = Pass(context_, first + part.direction, *all)
                          .Advance(step, step + kStepsPerRun, part.share, &member,
                                   work[member.index()]);
          }
          if (member.index() == 0) next = reached;
        });
        step = next;
      }
      FinishAll(*all, first, first + directions);
    }
  }

  void FinishAll(const Slice& all, int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) Pass(context_, p, all).Finish(0, all.size);
  }

  const Slice* AllSlices(int64_t count) {
    const Operands<S>& in = context_.call.operands;
    return MakeSlices(in.seq_lengths, in.batch, in.steps, count, scratch_);
  }

  Workspace<S, O, R> WorkspaceFor(const Slice& slice) {
    return Pass::MakeWorkspace(context_, slice.size, scratch_);
  }

  static void AdviseHugePages(const ForwardCall<S, R>& call) {
    const Network& n = call.operands.network;
    const int64_t entries = call.operands.entries;
    const auto advise = [&](auto* data, int64_t features) {
      cpu::AdviseHugePages(data, entries * features * sizeof(*data));
    };
    advise(call.y, n.width());
    for (int64_t l = 0; call.hidden != nullptr && l + 1 < n.num_layers; ++l) {
      advise(call.hidden[l], n.width());
    }
    for (int64_t p = 0; p < n.pseudo_layers(); ++p) {
      if (call.gates != nullptr) {
        advise(call.gates[p], n.saved_blocks() * n.hidden_size);
      }
      if (call.cells != nullptr) advise(call.cells[p], n.hidden_size);
    }
  }

  void TakeWeights() {
    const ForwardCall<S, R>& call = context_.call;
    const Operands<S>& in = call.operands;
    const int64_t layers = network_.pseudo_layers();
    auto* found = scratch_.Take<PackedLayer<O, R>>(layers);
    const void* memory = call.packed;
    context_.packed = true;
    if (!packing_.Fits(memory, call.packed_bytes)) {
      auto* fresh = scratch_.Take<char>(packing_.bytes());
      memory = fresh;
      context_.packed = network_.batch_invariant || in.entries > kUnpackedRows;
      if (context_.packed) {
        PackAll(packing_, in.weights, fresh, team_);
      } else {
        for (int64_t p = 0; p < layers; ++p) {
          auto* bias = const_cast<R*>(packing_.layer(p, fresh).bias);
          for (int64_t j = 0; j < packing_.blocks().count(); ++j) {
            packing_.PackBias(p, j, in.weights, bias + j * 4 * context_.kernels.lanes);
          }
        }
      }
    }
    for (int64_t p = 0; p < layers; ++p) found[p] = packing_.layer(p, memory);
    context_.layers = found;
  }

  void TakeHidden() {
    const Operands<S>& in = context_.call.operands;
    context_.hidden = context_.call.hidden;
    if (context_.hidden != nullptr) return;
    auto* hidden = scratch_.Take<S*>(network_.num_layers - 1);
    // The layer that reads one of two arrays has written the other.
    S* two[2] = {nullptr, nullptr};
    const bool alternate = plan_ != Plan::kWavefront;
    for (int64_t l = 0; l + 1 < network_.num_layers; ++l) {
      if (l < 2 || !alternate) {
        two[l % 2] = scratch_.Take<S>(in.entries * network_.width());
      }
      hidden[l] = two[l % 2];
    }
    context_.hidden = hidden;
  }

  void TakeStates() {
    const int64_t batch = context_.call.operands.batch;
    const int64_t lanes = context_.kernels.lanes;
    // Whole vectors, and never a multiple of 4 KB, where all rows would compete for
    // one set of the cache.
    const auto stride = [&](int64_t size) { return RoundUp(size, lanes) + lanes; };
    const int64_t pairs = context_.kernels.pairs;  // of factors as many fill a vector
    const auto factors = [&](int64_t size) {
      return pairs * stride(CeilDiv(size, pairs));
    };
    context_.h_stride = factors(network_.output_size());
    context_.x_stride = factors(std::max(network_.input_size, network_.width()));
    context_.c_stride = stride(network_.hidden_size);
    auto* states = scratch_.Take<LayerState<O, R>>(network_.pseudo_layers());
    for (int64_t p = 0; p < network_.pseudo_layers(); ++p) {
      LayerState<O, R>& state = states[p];
      for (O*& h : state.h) h = scratch_.TakeZeroed<O>(batch * context_.h_stride);
      const bool projects = network_.proj_size > 0;
      state.u = scratch_.Take<O>(projects ? batch * context_.c_stride : 0);
      state.c = scratch_.Take<R>(network_.lstm() ? batch * context_.c_stride : 0);
    }
    context_.states = states;
    context_.zeros = scratch_.TakeZeroed<O>(context_.h_stride);
    context_.zero_start = scratch_.TakeZeroed<R>(4 * lanes);
  }

  // With so few rows in all, packing would take longer than the products. What is not
  // packed is summed in another order.
  static constexpr int64_t kUnpackedRows = 4;

  Team& team_;
  Scratch scratch_;
  const Network& network_;
  const Work work_;
  const Plan plan_;
  PackedNetwork<S, O, R> packing_;
  ForwardContext<S, O, R> context_;
};

}  // namespace

template <typename S, typename R>
void RunForward(const ForwardCall<S, R>& call, Team& team) {
  WithForwardKernels<S>(
      [&](const auto& kernels) { Forward(call, kernels, team).Run(); });
}

template <typename S>
int64_t PackedBytes(const Network& network) {
  return WithForwardKernels<S>(
      [&](const auto& kernels) { return PackedNetwork(kernels, network).bytes(); });
}

template <typename S>
void PackWeights(const Network& network, const S* weights, void* memory, Team& team) {
  WithForwardKernels<S>([&](const auto& kernels) {
    const PackedNetwork packing(kernels, network);
    Zero(static_cast<char*>(memory), packing.bytes());  // gaps between tensors
    PackAll(packing, weights, memory, team);
  });
}

template void RunForward(const ForwardCall<float, float>&, Team&);
template void RunForward(const ForwardCall<double, double>&, Team&);
template void RunForward(const ForwardCall<BFloat16, float>&, Team&);
template int64_t PackedBytes<float>(const Network&);
template int64_t PackedBytes<double>(const Network&);
template int64_t PackedBytes<BFloat16>(const Network&);
template void PackWeights(const Network&, const float*, void*, Team&);
template void PackWeights(const Network&, const double*, void*, Team&);
template void PackWeights(const Network&, const BFloat16*, void*, Team&);

}  // namespace ostinato::cpu
