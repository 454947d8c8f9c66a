#include "cpu/pass/forward.h"

#include <algorithm>
#include <type_traits>

#include "cpu/kernels/dispatch.h"
#include "cpu/pass/layer_pass.h"
#include "cpu/pass/portion_queue.h"
#include "cpu/pass/schedule.h"
#include "cpu/runtime/caches.h"

namespace ostinato::cpu {
namespace {

template <typename Storage, typename Operand, typename Accum>
class Forward {
 public:
  using Pass = LayerPass<Storage, Operand, Accum>;

  Forward(const ForwardCall<Storage, Accum>& call,
          const Kernels<Storage, Operand, Accum>& kernels, Team& team)
      : team_(team),
        network_(call.operands.network),
        cost_(CostModelOf(network_, call.operands.tokens, call.operands.batch,
                          kernels.lanes)),
        schedule_(ScheduleOf(cost_, team)),
        panels_(kernels, network_),
        context_{call, kernels, panels_} {
    AdviseHugePages(call);
    TakeWeights();
    TakeHidden();
    TakeStates();
  }

  void Run() {
    switch (schedule_) {
      case Schedule::kSequences:
        return RunSequences(PortionsFor(cost_, team_.threads()));
      case Schedule::kDirections:
        return RunDirections();
      case Schedule::kWavefront:
        return RunWavefront();
      case Schedule::kHeads:
        return RunHeads();
      case Schedule::kUnits:
        return RunUnits();
    }
  }

 private:
  // Portions of the batch go through all layers by themselves, some steps in a turn: a
  // thread that comes late or is stopped for a while holds up nobody.
  void RunSequences(int64_t count) {
    const Sequences* portions = Split(count);
    const int64_t threads = team_.threads(), layers = network_.pseudo_layers();
    auto* work = scratch_.Take<Workspace<Storage, Operand, Accum>>(threads);
    for (int64_t i = 0; i < threads; ++i) work[i] = WorkspaceFor(portions[0]);
    PortionQueue queue(portions, count, context_.call.operands.batch, layers, scratch_);
    team_.ForEach(threads, [&](int64_t i) {
      Portion* portion = nullptr;
      while ((portion = queue.Next(portion)) != nullptr) MoveOn(*portion, work[i]);
    });
  }

  void MoveOn(Portion& portion, const Workspace<Storage, Operand, Accum>& work) {
    const Sequences& sequences = portion.sequences;
    const Pass pass(context_, portion.pseudo_layer, sequences);
    if (portion.step == 0) pass.Begin();
    const int64_t active = std::max<int64_t>(1, sequences.Active(portion.step));
    const int64_t steps = std::max<int64_t>(1, context_.input_tokens() / active);
    portion.step =
        pass.Advance(portion.step, portion.step + steps, Slice{}, nullptr, work);
    if (portion.step < sequences.steps()) return;
    pass.Finish();
    ++portion.pseudo_layer;
    portion.step = 0;
  }

  // Each direction of a layer has one thread.
  void RunDirections() {
    const Sequences* all = Split(1);
    const Workspace<Storage, Operand, Accum> work[2] = {WorkspaceFor(*all),
                                                        WorkspaceFor(*all)};
    for (int64_t layer = 0; layer < network_.num_layers; ++layer) {
      team_.ForEach(2, [&](int64_t d) {
        const Pass pass(context_, 2 * layer + d, *all);
        pass.Begin();
        pass.Advance(0, all->steps(), Slice{}, nullptr, work[d]);
        pass.Finish();
      });
    }
  }

  // Parts of the heads of each direction go through all steps by themselves.
  void RunHeads() {
    const Sequences* all = Split(1);
    const int64_t directions = network_.num_directions;
    const int64_t parts = HeadPartsFor(cost_, team_.threads());
    auto* work = scratch_.Take<Workspace<Storage, Operand, Accum>>(parts * directions);
    for (int64_t i = 0; i < parts * directions; ++i) work[i] = WorkspaceFor(*all);
    for (int64_t layer = 0; layer < network_.num_layers; ++layer) {
      const int64_t first = layer * directions;
      for (int64_t d = 0; d < directions; ++d) Pass(context_, first + d, *all).Begin();
      team_.ForEach(parts * directions, [&](int64_t n) {
        Pass(context_, first + n / parts, *all)
            .Advance(0, all->steps(), Slice{n % parts, parts}, nullptr, work[n]);
      });
      FinishAll(*all, first, first + directions);
    }
  }

  // Layer l runs some steps while the layer above it runs the steps before them.
  void RunWavefront() {
    const Sequences* all = Split(1);
    const int64_t layers = network_.num_layers;
    auto* work = scratch_.Take<Workspace<Storage, Operand, Accum>>(layers);
    for (int64_t l = 0; l < layers; ++l) {
      work[l] = WorkspaceFor(*all);
      Pass(context_, l, *all).Begin();
    }
    const int64_t blocks = CeilDiv(all->steps(), kStepsPerWave);
    for (int64_t wave = 0; wave < blocks + layers - 1; ++wave) {
      const int64_t first = std::max<int64_t>(0, wave - blocks + 1);
      const int64_t last = std::min(layers - 1, wave);
      team_.ForEach(last - first + 1, [&](int64_t n) {
        const int64_t l = first + n, step = (wave - l) * kStepsPerWave;
        Pass(context_, l, *all)
            .Advance(step, step + kStepsPerWave, Slice{}, nullptr, work[l]);
      });
    }
    FinishAll(*all, 0, layers);
  }

  // Each worker has some of the units of a step, and waits for the others after it.
  void RunUnits() {
    const Sequences* all = Split(1);
    const int64_t directions = network_.num_directions;
    auto* work = scratch_.Take<Workspace<Storage, Operand, Accum>>(team_.threads());
    for (int32_t i = 0; i < team_.threads(); ++i) work[i] = WorkspaceFor(*all);
    for (int64_t layer = 0; layer < network_.num_layers; ++layer) {
      const int64_t first = layer * directions;
      for (int64_t d = 0; d < directions; ++d) Pass(context_, first + d, *all).Begin();
      for (int64_t step = 0; step < all->steps();) {
        int64_t next = step;
        team_.Run([&](Worker& worker) {
          int64_t reached = step;
          for (const Assignment assignment : AssignmentsOf(worker, directions)) {
            reached = Pass(context_, first + assignment.direction, *all)
                          .Advance(step, step + kStepsPerRun, assignment.slice, &worker,
                                   work[worker.index()]);
          }
          if (worker.index() == 0) next = reached;
        });
        step = next;
      }
      FinishAll(*all, first, first + directions);
    }
  }

  void FinishAll(const Sequences& all, int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) Pass(context_, p, all).Finish();
  }

  const Sequences* Split(int64_t count) {
    const Operands<Storage>& in = context_.call.operands;
    return SplitBatch(in.seq_lengths, in.batch, in.steps, count, scratch_);
  }

  Workspace<Storage, Operand, Accum> WorkspaceFor(const Sequences& sequences) {
    return Pass::MakeWorkspace(context_, sequences.size, scratch_);
  }

  static void AdviseHugePages(const ForwardCall<Storage, Accum>& call) {
    const Network& n = call.operands.network;
    const int64_t tokens = call.operands.tokens;
    const auto advise = [&](auto* data, int64_t features) {
      cpu::AdviseHugePages(data, tokens * features * sizeof(*data));
    };
    advise(call.y, n.width());
    for (int64_t l = 0; call.hidden != nullptr && l + 1 < n.num_layers; ++l) {
      advise(call.hidden[l], n.width());
    }
    for (int64_t p = 0; p < n.pseudo_layers(); ++p) {
      if (call.gates != nullptr) {
        advise(call.gates[p], n.saved_blocks() * n.hidden_size);
      }
      for (int64_t s = 0; call.cells != nullptr && s < n.cells(); ++s) {
        advise(call.cells[p * n.cells() + s], n.hidden_size);
      }
    }
  }

  void TakeWeights() {
    const ForwardCall<Storage, Accum>& call = context_.call;
    const Operands<Storage>& in = call.operands;
    const int64_t layers = network_.pseudo_layers();
    auto* found = scratch_.Take<LayerPanels<Operand, Accum>>(layers);
    const void* memory = call.prepared;
    context_.uses_panels = true;
    if (!panels_.Fits(memory, call.prepared_bytes)) {
      auto* fresh = scratch_.Take<char>(panels_.bytes());
      memory = fresh;
      context_.uses_panels = network_.batch_invariant || in.tokens > kUnpackedTokens;
      if (context_.uses_panels) {
        PackAll(panels_, in.weights, fresh, team_);
      } else {
        for (int64_t p = 0; p < layers; ++p) {
          auto* bias = const_cast<Accum*>(panels_.layer(p, fresh).bias);
          for (int64_t j = 0; j < panels_.blocks().count(); ++j) {
            panels_.PackBias(p, j, in.weights, bias + j * 4 * context_.kernels.lanes);
          }
        }
      }
    }
    for (int64_t p = 0; p < layers; ++p) found[p] = panels_.layer(p, memory);
    const int64_t bytes =
        panels_.blocks().count() * panels_.recurrent_panel() * int64_t{sizeof(Operand)};
    context_.far_panels = context_.uses_panels && bytes > Caches().second * 3 / 4;
    context_.layers = found;
  }

  void TakeHidden() {
    const Operands<Storage>& in = context_.call.operands;
    context_.hidden = context_.call.hidden;
    if (context_.hidden != nullptr) return;
    auto* hidden = scratch_.Take<Storage*>(network_.num_layers - 1);
    // The layer that reads one of the two arrays writes the other.
    Storage* two[2] = {nullptr, nullptr};
    const bool alternate = schedule_ != Schedule::kWavefront;
    for (int64_t l = 0; l + 1 < network_.num_layers; ++l) {
      if (l < 2 || !alternate) {
        two[l % 2] = scratch_.Take<Storage>(in.tokens * network_.width());
      }
      hidden[l] = two[l % 2];
    }
    context_.hidden = hidden;
  }

  void TakeStates() {
    const int64_t batch = context_.call.operands.batch;
    const int64_t lanes = context_.kernels.lanes;
    const int64_t pairs = context_.kernels.pairs;
    const int64_t inputs = std::max(network_.input_size, network_.width());
    context_.h_stride = RowStride(network_.output_size(), lanes, pairs);
    context_.x_stride = RowStride(inputs, lanes, pairs);
    context_.c_stride = RowStride(network_.hidden_size, lanes);
    context_.cell_stride = batch * context_.c_stride;
    auto* states = scratch_.Take<LayerState<Operand, Accum>>(network_.pseudo_layers());
    for (int64_t p = 0; p < network_.pseudo_layers(); ++p) {
      LayerState<Operand, Accum>& state = states[p];
      for (Operand*& h : state.h)
        h = scratch_.TakeZeroed<Operand>(batch * context_.h_stride);
      const bool projects = network_.proj_size > 0;
      state.unprojected =
          scratch_.Take<Operand>(projects ? batch * context_.c_stride : 0);
      state.c = scratch_.Take<Accum>(network_.cells() * context_.cell_stride);
    }
    context_.states = states;
    context_.zeros = scratch_.TakeZeroed<Operand>(context_.h_stride);
    context_.zero_start = scratch_.TakeZeroed<Accum>(4 * lanes);
  }

  // With so few tokens, packing would take longer than the products. Products with
  // weights that are not packed are summed in another order.
  static constexpr int64_t kUnpackedTokens = 4;

  Team& team_;
  Scratch scratch_;
  const Network& network_;
  const CostModel cost_;
  const Schedule schedule_;
  NetworkPanels<Storage, Operand, Accum> panels_;
  ForwardContext<Storage, Operand, Accum> context_;
};

}  // namespace

template <typename Storage, typename Accum>
void RunForward(const ForwardCall<Storage, Accum>& call, Team& team) {
  WithKernels<Storage>(
      [&](const auto& kernels) { Forward(call, kernels, team).Run(); });
}

template <typename Storage>
int64_t PreparedBytes(const Network& network) {
  return WithKernels<Storage>(
      [&](const auto& kernels) { return NetworkPanels(kernels, network).bytes(); });
}

template <typename Storage>
bool IsPrepared(const Network& network, const void* memory, int64_t bytes) {
  return WithKernels<Storage>([&](const auto& kernels) {
    return NetworkPanels(kernels, network).Fits(memory, bytes);
  });
}

template <typename Storage>
void PackWeights(const Network& network, const Storage* weights, void* memory,
                 Team& team) {
  WithKernels<Storage>([&](const auto& kernels) {
    const NetworkPanels panels(kernels, network);
    Zero(static_cast<char*>(memory), panels.bytes());  // gaps between tensors
    PackAll(panels, weights, memory, team);
  });
}

template void RunForward(const ForwardCall<float, float>&, Team&);
template void RunForward(const ForwardCall<double, double>&, Team&);
template void RunForward(const ForwardCall<BFloat16, float>&, Team&);
template int64_t PreparedBytes<float>(const Network&);
template int64_t PreparedBytes<double>(const Network&);
template int64_t PreparedBytes<BFloat16>(const Network&);
template bool IsPrepared<float>(const Network&, const void*, int64_t);
template bool IsPrepared<double>(const Network&, const void*, int64_t);
template bool IsPrepared<BFloat16>(const Network&, const void*, int64_t);
template void PackWeights(const Network&, const float*, void*, Team&);
template void PackWeights(const Network&, const double*, void*, Team&);
template void PackWeights(const Network&, const BFloat16*, void*, Team&);

}  // namespace ostinato::cpu
