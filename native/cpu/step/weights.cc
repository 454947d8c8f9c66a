#include "cpu/step/weights.h"

#include <algorithm>
#include <new>
#include <utility>

#include "cpu/kernels/dispatch.h"
#include "cpu/network/panels.h"
#include "cpu/runtime/scratch.h"
#include "cpu/step/call_check.h"

namespace ostinato::cpu {
namespace {

constexpr auto kPanelAlignment = std::align_val_t(4096);

template <typename T>
class WeightPacker {
 public:
  WeightPacker(const StepCall& call, const std::function<T*(int64_t)>& take)
      : call_(call), set_(CurrentKernels()), lanes_(KernelsOf<T>(set_).lanes) {
    for (const StepWeight& weight : call.program.weights) {
      const bool pairs = MultipliesPairs(call, weight, set_.bf16_pairs);
      // Whole vectors, so that each begins at one.
      const int64_t columns = RoundUp(weight.columns, lanes_);
      panels_.push_back(take(columns * PanelRows(weight, pairs)));
      for (int64_t b = 0; b < Columns{weight.columns, lanes_}.count(); ++b) {
        tasks_.push_back({static_cast<int64_t>(panels_.size()) - 1, b});
      }
      elements_ += weight.columns * weight.depth;
    }
  }

  std::vector<const T*> PackAll(Team& team) {
    constexpr int64_t kWorthPackingTogether = 1 << 17;
    const auto pack = [this](int64_t task) {
      Pack(tasks_[task].weight, tasks_[task].block);
    };
    const auto count = static_cast<int64_t>(tasks_.size());
    if (elements_ >= kWorthPackingTogether) {
      team.ForEach(count, pack);
    } else {
      for (int64_t task = 0; task < count; ++task) pack(task);
    }
    return {panels_.begin(), panels_.end()};
  }

 private:
  struct Task {
    int64_t weight, block;
  };

  void Pack(int64_t index, int64_t block) const {
    const StepWeight& weight = call_.program.weights[index];
    const StepArray& array = call_.operands[weight.array];
    T* const panels = panels_[index];
    if constexpr (sizeof(T) == 4) {
      if (MultipliesPairs(call_, weight, set_.bf16_pairs)) {
        auto* const halves = reinterpret_cast<BFloat16*>(panels);
        return PackBlock<BFloat16>(*set_.bf16_pairs, array, weight, block, halves);
      }
      if (array.bytes == 2) {
        return PackBlock<BFloat16>(*set_.bf16, array, weight, block, panels);
      }
    }
    PackBlock<T>(KernelsOf<T>(set_), array, weight, block, panels);
  }

  template <typename Storage, typename Operand, typename Accum>
  void PackBlock(const Kernels<Storage, Operand, Accum>& kernels,
                 const StepArray& array, const StepWeight& weight, int64_t block,
                 Operand* panels) const {
    const Columns blocks{weight.columns, lanes_};
    const int64_t first = blocks.first(block), width = blocks.width(block);
    const int64_t vectors = blocks.vectors(block);
    const int64_t rows = CeilDiv(weight.depth, kernels.pairs) * kernels.pairs;
    Operand* const panel = panels + first * rows;
    const Storage* data = static_cast<const Storage*>(array.data) + weight.offset;
    if (weight.transposed) {
      for (int64_t v = 0; v < vectors; ++v) {
        const int64_t column = v * lanes_;
        kernels.pack_rows(data + (first + column) * weight.stride, weight.stride,
                          std::min(lanes_, width - column), weight.depth,
                          panel + column * kernels.pairs,
                          vectors * lanes_ * kernels.pairs);
      }
    } else {
      std::vector<const Storage*> of(weight.depth);
      for (int64_t k = 0; k < weight.depth; ++k) of[k] = data + k * weight.stride;
      kernels.pack_columns(of.data(), first, weight.depth, width, panel);
    }
  }

  const StepCall& call_;
  const KernelSet& set_;
  const int64_t lanes_;
  std::vector<T*> panels_;
  std::vector<Task> tasks_;
  int64_t elements_ = 0;
};

}  // namespace

template <typename T>
std::vector<const T*> PackWeights(const StepCall& call,
                                  const std::function<T*(int64_t)>& take, Team& team) {
  return WeightPacker<T>(call, take).PackAll(team);
}

template <typename T>
StepPanels<T>::StepPanels(const StepCall& call) {
  CheckArrays(call, sizeof(T));
  const KernelSet& set = CurrentKernels();
  int64_t elements = 0;
  for (const StepWeight& weight : call.program.weights) {
    const bool pairs = MultipliesPairs(call, weight, set.bf16_pairs);
    elements +=
        RoundUp(weight.columns, KernelsOf<T>(set).lanes) * PanelRows(weight, pairs);
  }
  const auto bytes = static_cast<size_t>(elements) * sizeof(T);
  memory_.reset(::operator new(bytes, kPanelAlignment));
  AdviseHugePages(memory_.get(), elements * sizeof(T));
  T* next = static_cast<T*>(memory_.get());
  Team team(NumThreads());
  const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
  panels_ = PackWeights<T>(call, take, team);
}

template <typename T>
void StepPanels<T>::Free::operator()(void* memory) const noexcept {
  ::operator delete(memory, kPanelAlignment);
}

template class StepPanels<float>;
template class StepPanels<double>;
template std::vector<const float*> PackWeights(const StepCall& call,
                                               const std::function<float*(int64_t)>&,
                                               Team&);
template std::vector<const double*> PackWeights(const StepCall& call,
                                                const std::function<double*(int64_t)>&,
                                                Team&);

}  // namespace ostinato::cpu
