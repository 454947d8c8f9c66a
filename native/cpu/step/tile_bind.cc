// What is the same at every step of an instruction, worked out once.
#include <algorithm>

#include "cpu/network/network.h"
#include "cpu/network/panels.h"
#include "cpu/step/tile.h"
#include "cpu/step/weights.h"

namespace ostinato::cpu {
namespace {

// Elements of the widest result of a stretch of instructions: with what they read, they
// stay in the first-level cache.
constexpr int64_t kStretch = 4096;

}  // namespace

template <typename T>
auto StepTile<T>::Bind(Phase phase) -> Program {
  Program made;
  for (const StepInstruction& i : program_.instructions) {
    if (i.phase != phase) continue;
    auto& stretches = made.stretches;
    const size_t n = made.instructions.size();
    const bool product = i.operation == kProduct;
    if (product || n == 0 || made.instructions.back().function == nullptr) {
      stretches.push_back({n, n, size()});
    }
    Stretch& stretch = stretches.back();
    stretch.end = n + 1;
    if (i.rows) {
      // Groups of sequences stay together.
      const int64_t each = std::max<int64_t>(i.inner * i.width, 1);
      const int64_t rows = kStretch / each / loop_.group * loop_.group;
      stretch.rows = std::min(stretch.rows, std::max(rows, loop_.group));
    }
    made.instructions.push_back(BindOne(i));
  }
  return made;
}

template <typename T>
auto StepTile<T>::BindOne(const StepInstruction& i) -> Bound {
  const bool product = i.operation == kProduct;
  const StepBuffer& to = program_.buffers[i.result.buffer];
  Bound bound{};
  bound.instruction = &i;
  bound.count = product ? 1 : kStepOperands[i.operation];
  bound.sums = to.place == Place::kSum && !to.rows;
  bound.column = !product && ReducesColumn(static_cast<Operation>(i.operation));
  bound.even = i.inner == 1 || i.result.row_stride == i.inner * i.result.inner_stride;
  bound.out = &live_[i.result.buffer].at;
  for (int k = 0; k < 3; ++k) {
    const StepView& view = i.operands[k < bound.count ? k : 0];
    bound.from[k] = &live_[view.buffer].at;
    bound.offsets[k] = view.offset;
    bound.even =
        bound.even && (i.inner == 1 || view.row_stride == i.inner * view.inner_stride);
  }
  bound.even = bound.even && !bound.column;
  if (product) {
    BindBlocks(bound);
  } else {
    bound.function = loop_.step_kernels.function[i.operation];
    BindRow(bound);
  }
  return bound;
}

template <typename T>
void StepTile<T>::BindRow(Bound& bound) const {
  const StepInstruction& i = *bound.instruction;
  const bool one = size() == 1 || !i.rows;
  bound.elements = i.inner * i.width;
  const auto follows = [&](const StepView& view, int64_t width) {
    return (i.inner == 1 || view.inner_stride == width) &&
           (one || view.row_stride == i.inner * width);
  };
  bool whole = !bound.sums && follows(i.result, i.width);
  int splats = 0;
  for (int k = 0; k < 3; ++k) {
    const StepView& view = i.operands[k < bound.count ? k : 0];
    const bool splat = view.splat || (i.width == 1 && view.row_stride == 0);
    if (k < bound.count) splats |= splat << k;
    whole = whole && follows(view, splat ? 0 : i.width);
    bound.apart[k] = splat ? 0 : bound.elements;
  }
  if (whole) bound.row = loop_.step_kernels.rows[i.operation].by_splats[splats];
}

template <typename T>
void StepTile<T>::BindBlocks(Bound& bound) {
  const StepInstruction& i = *bound.instruction;
  const StepWeight& weight = program_.weights[i.weight];
  const auto& kernels = loop_.kernels;
  const Columns columns{weight.columns, kernels.lanes};
  const bool pairs = cpu::MultipliesPairs(loop_.call, weight, loop_.pairs);
  bound.first_block = blocks_.size();
  for (int64_t b = 0; b < columns.count(); ++b) {
    const int64_t column = columns.first(b), width = columns.width(b);
    const auto shape = static_cast<int>(columns.shape(b));
    Block block{kernels.product[shape],
                pairs ? loop_.pairs->product[shape] : nullptr,
                column,
                width,
                loop_.panels[i.weight] + column * PanelRows(weight, pairs),
                nullptr};
    if (!i.continues) {
      T* const start = scratch_.TakeZeroed<T>(RoundUp(width, kernels.lanes));
      for (int k = 1; k < 3; ++k) {
        const StepView& view = i.operands[k];
        if (view.buffer < 0) continue;
        const T* const vector = live_[view.buffer].at + view.offset + column;
        for (int64_t c = 0; c < width; ++c) start[c] += vector[c];
      }
      block.start = start;
    }
    blocks_.push_back(block);
  }
  bound.end_block = blocks_.size();
}

template class StepTile<float>;
template class StepTile<double>;

}  // namespace ostinato::cpu
