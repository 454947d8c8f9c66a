// What is the same at every step of an instruction, worked out once.
#include <algorithm>

#include "cpu/network/network.h"
#include "cpu/network/panels.h"
#include "cpu/step/tile.h"
#include "cpu/step/weights.h"

namespace ostinato::cpu {
namespace {

// Elements of the widest result of a pass over a stretch of instructions: all that they
// write, and much of what they read, stays in the first-level cache.
constexpr int64_t kPass = 1024;
// Elements of the longest shared row that is repeated for each sequence: what reads it
// then runs on all sequences as on one long row, without a beginning for each.
constexpr int64_t kMostRepeated = 64;

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
      const int64_t each = std::max<int64_t>(RowsTouched(i) * i.width, 1);
      const int64_t rows = kPass / each / loop_.group * loop_.group;
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
  const auto operation = static_cast<Operation>(i.operation);
  bound.column = !product && ReducesColumn(operation);
  bound.by_rows = product || ComputesRows(operation);
  bound.even = i.inner == 1 || i.result.row_stride == i.inner * i.result.inner_stride;
  bound.out = &live_[i.result.buffer].at;
  bound.out_apart = i.result.row_stride;
  for (int k = 0; k < 3; ++k) {
    const StepView& view = i.operands[k < bound.count ? k : 0];
    bound.from[k] = &live_[view.buffer].at;
    bound.offsets[k] = view.offset;
    bound.apart[k] = view.row_stride;
    bound.even =
        bound.even && (i.inner == 1 || view.row_stride == i.inner * view.inner_stride);
  }
  bound.even = bound.even && bound.by_rows;
  if (product) {
    BindBlocks(bound);
  } else {
    bound.function = loop_.step_kernels.function[i.operation];
    bound.row_sum = RowSumOf(bound);
    BindRow(bound);
  }
  return bound;
}

// A function for the numbers of a group, faster than one for columns of one element.
template <typename T>
StepFunction<T> StepTile<T>::RowSumOf(const Bound& bound) const {
  const StepInstruction& i = *bound.instruction;
  const auto operation = static_cast<Operation>(i.operation);
  const bool product = operation == Operation::column_sum_product;
  if (!bound.sums || !(product || operation == Operation::column_sum)) return nullptr;
  if (i.width > 1) return nullptr;
  for (int k = 0; k < bound.count; ++k) {
    if (i.operands[k].row_stride != 1) return nullptr;
  }
  const auto sum = product ? Operation::row_sum_product : Operation::row_sum;
  return loop_.step_kernels.function[static_cast<int>(sum)];
}

// Whether an operand is a short row that all sequences share and no step changes.
template <typename T>
bool StepTile<T>::Repeats(const StepInstruction& i, const StepView& view) const {
  if (size() == 1 || !i.rows) return false;
  const StepBuffer& buffer = program_.buffers[view.buffer];
  const bool known =
      buffer.place == Place::kConstant || buffer.place == Place::kInvariant;
  return known && !buffer.rows && !view.splat && view.row_stride == 0 && i.inner == 1 &&
         i.width > 1 && i.width <= kMostRepeated;
}

template <typename T>
T* const* StepTile<T>::Repeated(const StepView& view, int64_t width) {
  for (const Repetition& made : repetitions_) {
    if (made.buffer == view.buffer && made.offset == view.offset &&
        made.width == width) {
      return &made.rows;
    }
  }
  T* const rows = scratch_.Take<T>(size() * width);
  for (int64_t r = 0; r < size(); ++r) {
    std::copy_n(live_[view.buffer].at + view.offset, width, rows + r * width);
  }
  repetitions_.push_back({view.buffer, view.offset, width, rows});
  return &repetitions_.back().rows;
}

template <typename T>
void StepTile<T>::BindRow(Bound& bound) {
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
    whole = whole && (Repeats(i, view) || follows(view, splat ? 0 : i.width));
  }
  if (!whole) return;
  bound.row = loop_.step_kernels.rows[i.operation].by_splats[splats];
  for (int k = 0; k < 3 && bound.row != nullptr; ++k) {
    const StepView& view = i.operands[k < bound.count ? k : 0];
    if (!Repeats(i, view)) continue;
    bound.from[k] = Repeated(view, i.width);
    bound.offsets[k] = 0;
    bound.apart[k] = 0;  // every pass reads the same rows
  }
  const auto operation = static_cast<Operation>(i.operation);
  bound.in_pieces = splats == 0 && IsFunction(operation);
}

// What one stretch writes and reads by itself needs room for the rows of a pass alone.
template <typename T>
void StepTile<T>::PlaceTemporaries(Program& program) {
  constexpr int64_t kNone = -1, kSeveral = -2;
  std::vector<int64_t> user(program_.buffers.size(), kNone);  // by buffer: the stretch
  const auto use = [&](const StepView& view, int64_t stretch) {
    if (view.buffer < 0) return;
    int64_t& by = user[view.buffer];
    by = by == kNone || by == stretch ? stretch : kSeveral;
  };
  const auto use_all = [&](const StepInstruction& i, int64_t stretch) {
    use(i.result, stretch);
    for (const StepView& view : i.operands) use(view, stretch);
  };
  for (const StepInstruction& i : program_.instructions) {
    if (i.phase != Phase::kStep || i.operation == kProduct) use_all(i, kSeveral);
  }
  for (const StepGradient& gradient : program_.gradients) {
    user[gradient.a.buffer] = user[gradient.b.buffer] = kSeveral;
  }
  int64_t most = 0;  // rows of a pass
  for (size_t s = 0; s < program.stretches.size(); ++s) {
    const Stretch& stretch = program.stretches[s];
    for (size_t n = stretch.begin; n < stretch.end; ++n) {
      use_all(*program.instructions[n].instruction, s);
    }
    if (stretch.rows < size()) most = std::max(most, stretch.rows);
  }
  T* const local = scratch_.Take<T>(program_.row_elements * most);
  const auto place = [&](int64_t index, const Stretch& stretch, int64_t& apart) {
    const StepBuffer& buffer = program_.buffers[index];
    if (buffer.place != Place::kLocal || !buffer.rows || user[index] < 0) return;
    live_[index].at = local + buffer.offset * stretch.rows;
    apart = 0;
  };
  for (const Stretch& stretch : program.stretches) {
    if (stretch.rows == size()) continue;
    for (size_t n = stretch.begin; n < stretch.end; ++n) {
      Bound& bound = program.instructions[n];
      place(bound.instruction->result.buffer, stretch, bound.out_apart);
      for (int k = 0; k < bound.count; ++k) {
        place(bound.instruction->operands[k].buffer, stretch, bound.apart[k]);
      }
    }
  }
}

// How often a step of all sequences has time to fetch what the next one needs.
template <typename T>
int64_t StepTile<T>::CountFetchTimes(const Program& program) const {
  int64_t times = 0;
  for (const Stretch& stretch : program.stretches) {
    const int64_t passes = CeilDiv(size(), stretch.rows);
    for (size_t n = stretch.begin; n < stretch.end; ++n) {
      const Bound& bound = program.instructions[n];
      const int64_t elements = std::min(stretch.rows, size()) * bound.elements;
      if (bound.function == nullptr) continue;
      times += passes * (bound.in_pieces ? CeilDiv(elements, kPiece) : 1);
    }
  }
  return std::max<int64_t>(1, times);
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
