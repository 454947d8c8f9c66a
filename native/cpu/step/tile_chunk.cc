// What a tile runs for many steps of a chunk at once.
#include <algorithm>

#include "cpu/network/panels.h"
#include "cpu/step/tile.h"

namespace ostinato::cpu {
namespace {

constexpr int64_t kMostPanel = 64;  // columns of the widest panel
// Rows of a task of a product, a multiple of what products take at once: they stay in
// the second-level cache while all panels pass.
constexpr int64_t kTaskRows = 48;
// Steps of a task of other instructions, and elements that are worth the threads.
constexpr int64_t kTaskSteps = 16, kWorthSharingElements = int64_t{1} << 15;

}  // namespace

template <typename T>
void StepTile<T>::RunChunk(const Program& program, Range steps, Team* team) {
  for (const Stretch& stretch : program.stretches) {
    const Bound& first = program.instructions[stretch.begin];
    if (first.function == nullptr) {
      MultiplyChunk(first, steps, team);
      continue;
    }
    if (size() == 1) {
      ExecuteChunk(program, stretch, steps, team);
      continue;
    }
    for (int64_t n = steps.begin; n < steps.end; ++n) {
      if (const int64_t active = ActiveInChunk(n); active > 0) {
        Enter(n);
        RunStretch(program, stretch, active, team);
      }
    }
  }
}

// For one sequence, whose steps follow one another.
template <typename T>
void StepTile<T>::ExecuteChunk(const Program& program, const Stretch& stretch,
                               Range steps, Team* team) const {
  int64_t begin = steps.begin, end = steps.end;  // no bindings: a lambda captures them
  int64_t width = 0;
  while (begin < end && ActiveInChunk(begin) == 0) ++begin;
  while (begin < end && ActiveInChunk(end - 1) == 0) --end;
  std::vector<const Bound*> each, sums;
  for (size_t i = stretch.begin; i < stretch.end; ++i) {
    const Bound& bound = program.instructions[i];
    (bound.sums ? sums : each).push_back(&bound);
    width += bound.instruction->width;
  }
  const auto for_each = [&](int64_t tasks, const auto& run) {
    if (team != nullptr && width * (end - begin) >= kWorthSharingElements) {
      team->ForEach(tasks, run);
    } else {
      for (int64_t task = 0; task < tasks; ++task) run(task);
    }
  };
  const int64_t tasks = each.empty() ? 0 : CeilDiv(end - begin, kTaskSteps);
  for_each(tasks, [&](int64_t task) {
    const int64_t n = begin + task * kTaskSteps;
    for (const Bound* bound : each) {
      ExecuteSteps(*bound, n, std::min(kTaskSteps, end - n));
    }
  });
  // Nothing in the program reads sums; each adds up the steps in their order, one after
  // another: how many are at hand may depend on the threads.
  for_each(begin < end ? static_cast<int64_t>(sums.size()) : 0, [&](int64_t i) {
    for (int64_t n = begin; n < end; n += kMostAdded) {
      ExecuteSteps(*sums[i], n, std::min(kMostAdded, end - n));
    }
  });
}

template <typename T>
void StepTile<T>::ExecuteSteps(const Bound& bound, int64_t n, int64_t steps) const {
  const StepInstruction& instruction = *bound.instruction;
  const auto apart = [&](int64_t buffer) {
    return steps > 1 ? Start(buffer, n + 1) - Start(buffer, n) : 0;
  };
  StepOperand<T> operands[3];
  for (int k = 0; k < bound.count; ++k) {
    const StepView& view = instruction.operands[k];
    operands[k] = {Start(view.buffer, n) + view.offset, apart(view.buffer), view.splat};
  }
  const StepView& result = instruction.result;
  T* out = Start(result.buffer, n) + result.offset;
  if (bound.sums) out += groups_[0] * program_.buffers[result.buffer].width;
  bound.function(out, apart(result.buffer), operands, steps, instruction.width);
}

template <typename T>
void StepTile<T>::MultiplyChunk(const Bound& bound, Range steps, Team* team) const {
  const StepInstruction& instruction = *bound.instruction;
  const int64_t rows = instruction.rows
                           ? RowsBefore(steps.end) - RowsBefore(steps.begin)
                           : steps.end - steps.begin;
  const int64_t tasks = CeilDiv(rows, kTaskRows);
  const auto count = static_cast<int64_t>(bound.end_block - bound.first_block);
  if (team == nullptr || !WorthSharing(bound, rows)) {
    for (int64_t task = 0; task < tasks; ++task) {
      MultiplyRows(bound, steps, task, bound.first_block, bound.end_block);
    }
    return;
  }
  // Few rows leave the columns to share.
  const int64_t parts = std::min(count, CeilDiv(PartsOf(*team), tasks));
  team->ForEach(tasks * parts, [&](int64_t task) {
    const int64_t part = task % parts;
    MultiplyRows(bound, steps, task / parts, bound.first_block + part * count / parts,
                 bound.first_block + (part + 1) * count / parts);
  });
}

// Result and factor have one row for each sequence.
template <typename T>
void StepTile<T>::MultiplyRows(const Bound& bound, Range steps, int64_t task,
                               size_t first, size_t last) const {
  const StepInstruction& instruction = *bound.instruction;
  const StepView &from = instruction.operands[0], &to = instruction.result;
  const StepWeight& weight = program_.weights[instruction.weight];
  const T* factors[kTaskRows];
  T* results[kTaskRows];
  int64_t rows = 0, n = steps.begin + task * kTaskRows, r = 0;
  if (instruction.rows) {
    const int64_t row = RowsBefore(steps.begin) + task * kTaskRows;
    const auto after = std::upper_bound(first_row_.begin(), first_row_.end(), row);
    n = begin_ + (after - first_row_.begin()) - 1;
    r = row - RowsBefore(n);
  }
  for (; n < steps.end && rows < kTaskRows; ++n, r = 0) {
    const int64_t end = instruction.rows ? ActiveInChunk(n) : 1;
    const T* const factor = Start(from.buffer, n) + from.offset;
    T* const result = Start(to.buffer, n) + to.offset;
    for (; r < end && rows < kTaskRows; ++r, ++rows) {
      factors[rows] = factor + r * from.row_stride;
      results[rows] = result + r * to.row_stride;
    }
  }
  const int64_t apart = rows > 1 ? results[1] - results[0] : 0;
  bool in_place = weight.columns % loop_.kernels.lanes == 0;
  for (int64_t k = 1; k < rows; ++k) {
    in_place = in_place && results[k] - results[k - 1] == apart;
  }
  Scratch scratch;
  const BFloat16* halves[kTaskRows];
  const Factors all{factors, halves, rows, weight.depth};
  if (MultipliesPairs(bound)) {
    NarrowRows(all, scratch.Take<BFloat16>(rows * weight.depth), halves);
  }
  T products[kTaskRows * kMostPanel];
  for (size_t b = first; b < last; ++b) {
    const Block& block = blocks_[b];
    const T* const next = b + 1 < last ? blocks_[b + 1].panel : nullptr;
    if (in_place) {  // at even distances, and products write no more than there is
      MultiplyBlock(block, all, next, results[0] + block.column, apart);
      continue;
    }
    MultiplyBlock(block, all, next, products, kMostPanel);
    for (int64_t k = 0; k < rows; ++k) {
      std::copy_n(products + k * kMostPanel, block.width, results[k] + block.column);
    }
  }
}

template class StepTile<float>;
template class StepTile<double>;

}  // namespace ostinato::cpu
