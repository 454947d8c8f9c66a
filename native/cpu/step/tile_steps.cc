// What a tile runs at a step, and its products for a whole chunk of steps.
#include <algorithm>
#include <limits>

#include "cpu/network/panels.h"
#include "cpu/step/tile.h"

namespace ostinato::cpu {
namespace {

constexpr int64_t kMostPanel = 64;  // columns of the widest panel
alignas(64) constexpr double kZeros[kMostPanel] = {};
// Rows of a task of a product of the whole chunk, a multiple of what products take at
// once: they stay in the second-level cache while all panels pass.
constexpr int64_t kTaskRows = 48;
// Multiply-adds of a product that are worth the threads of a team.
constexpr int64_t kWorthSharing = int64_t{1} << 18;

// Parts of a product that a team shares: a thread that comes late finds one left.
int64_t PartsOf(const Team& team) { return int64_t{2} * team.threads(); }

}  // namespace

template <typename T>
void StepTile<T>::RunStep(const Program& program, int64_t active, Team* team) {
  for (const Stretch& stretch : program.stretches) {
    const Bound* const begin = program.instructions.data() + stretch.begin;
    const Bound* const end = program.instructions.data() + stretch.end;
    if (begin->function == nullptr) {
      Multiply(*begin->instruction, active, team);
      continue;
    }
    for (int64_t first = 0; first < active; first += stretch.rows) {
      const int64_t rows = std::min(stretch.rows, active - first);
      for (const Bound* bound = begin; bound != end; ++bound) {
        if (bound->sums) {
          SumGroups(*bound, first, rows);
        } else if (bound->instruction->rows || first == 0) {
          Execute(*bound, first, bound->instruction->rows ? rows : 1);
        }
        FetchSome();
      }
    }
  }
}

template <typename T>
void StepTile<T>::FetchSome() {
  int64_t lines = fetched_together_;
  for (; next_ahead_ < ahead_.size(); ++next_ahead_) {
    Ahead& ahead = ahead_[next_ahead_];
    for (; ahead.at < ahead.end; ahead.at += 64) {
      if (lines-- == 0) return;
      __builtin_prefetch(ahead.at, 0, 2);
    }
  }
}

template <typename T>
void StepTile<T>::Execute(const Bound& bound, int64_t first, int64_t rows) {
  const StepInstruction& instruction = *bound.instruction;
  const int64_t inner = instruction.inner, width = instruction.width;
  const StepView& result = instruction.result;
  StepOperand<T> operands[3];
  const bool one = inner == 1 && !bound.column;
  for (int k = 0; k < bound.count; ++k) {
    const StepView& view = instruction.operands[k];
    operands[k] = {*bound.from[k] + view.offset + first * view.row_stride,
                   one ? view.row_stride : view.inner_stride, view.splat};
  }
  T* out = *bound.out + result.offset + first * result.row_stride;
  if (bound.even) {  // one call for all sequences
    const int64_t stride = one ? result.row_stride : result.inner_stride;
    return bound.function(out, stride, operands, rows * inner, width);
  }
  const bool most =
      static_cast<Operation>(instruction.operation) == Operation::column_max;
  for (int64_t r = 0; r < rows; ++r) {
    if (bound.column) {
      std::fill_n(out, width, most ? -std::numeric_limits<T>::infinity() : T{0});
    }
    bound.function(out, result.inner_stride, operands, inner, width);
    out += result.row_stride;
    for (int k = 0; k < bound.count; ++k) {
      operands[k].data += instruction.operands[k].row_stride;
    }
  }
}

// Adds up rows of sequences, each group by itself; `first` begins a group.
template <typename T>
void StepTile<T>::SumGroups(const Bound& bound, int64_t first, int64_t rows) {
  const StepInstruction& instruction = *bound.instruction;
  const int64_t width = program_.buffers[instruction.result.buffer].width;
  const int64_t end = first + rows;
  for (; first < end; first += loop_.group) {
    StepOperand<T> operands[3];
    for (int k = 0; k < bound.count; ++k) {
      const StepView& view = instruction.operands[k];
      operands[k] = {*bound.from[k] + view.offset + first * view.row_stride,
                     view.row_stride, view.splat};
    }
    T* const out =
        *bound.out + instruction.result.offset + groups_[first / loop_.group] * width;
    bound.function(out, 0, operands, std::min(loop_.group, end - first),
                   instruction.width);
  }
}

template <typename T>
const T* StepTile<T>::StartOf(const StepInstruction& instruction, int64_t first,
                              int64_t width, T* start) const {
  if (instruction.continues) return nullptr;
  const StepView &one = instruction.operands[1], &other = instruction.operands[2];
  if (one.buffer < 0) return reinterpret_cast<const T*>(kZeros);
  if (other.buffer < 0 && width % loop_.kernels.lanes == 0) {
    return live_[one.buffer].at + one.offset + first;
  }
  std::fill_n(start, kMostPanel, T{0});
  for (int k = 1; k < 3; ++k) {
    const StepView& view = instruction.operands[k];
    if (view.buffer < 0) continue;
    const T* const vector = live_[view.buffer].at + view.offset + first;
    for (int64_t i = 0; i < width; ++i) start[i] += vector[i];
  }
  return start;
}

template <typename T>
void StepTile<T>::Multiply(const StepInstruction& instruction, int64_t active,
                           Team* team) {
  const StepView &from = instruction.operands[0], &to = instruction.result;
  const int64_t sequences = instruction.rows ? active : 1;
  const T* const factors = live_[from.buffer].at + from.offset;
  int64_t rows = 0;
  for (int64_t r = 0; r < sequences; ++r) {
    for (int64_t i = 0; i < instruction.inner; ++i) {
      factors_[rows++] = factors + r * from.row_stride + i * from.inner_stride;
    }
  }
  const StepWeight& weight = program_.weights[instruction.weight];
  const auto& kernels = loop_.kernels;
  const Columns columns{weight.columns, kernels.lanes};
  T* const result = live_[to.buffer].at + to.offset;
  const auto multiply = [&](int64_t begin, int64_t end) {
    T start[kMostPanel];
    for (int64_t block = begin; block < end; ++block) {
      const int64_t column = columns.first(block);
      kernels.product[static_cast<int>(columns.shape(block))](
          factors_.data(), 0, rows, weight.depth,
          loop_.panels[instruction.weight] + column * weight.depth,
          StartOf(instruction, column, columns.width(block), start), result + column,
          instruction.inner == 1 ? to.row_stride : to.inner_stride);
    }
  };
  const int64_t count = columns.count();
  if (team == nullptr || rows * weight.depth * weight.columns < kWorthSharing) {
    return multiply(0, count);
  }
  const int64_t parts = std::min(count, PartsOf(*team));
  team->ForEach(
      parts, [&](int64_t i) { multiply(i * count / parts, (i + 1) * count / parts); });
}

template <typename T>
void StepTile<T>::MultiplyChunk(Phase phase, Team* team) {
  for (const StepInstruction& i : program_.instructions) {
    if (i.phase != phase || i.operation != kProduct) continue;
    const StepWeight& weight = program_.weights[i.weight];
    const int64_t tasks = Tasks(i);
    const int64_t count = Columns{weight.columns, loop_.kernels.lanes}.count();
    const int64_t work = Rows(i) * weight.depth * weight.columns;
    if (team == nullptr || work < kWorthSharing) {
      for (int64_t task = 0; task < tasks; ++task) MultiplyRows(i, task, 0, count);
      continue;
    }
    // Few rows leave the columns to share.
    const int64_t parts = std::min(count, CeilDiv(PartsOf(*team), tasks));
    team->ForEach(tasks * parts, [&](int64_t task) {
      const int64_t part = task % parts;
      MultiplyRows(i, task / parts, part * count / parts, (part + 1) * count / parts);
    });
  }
}

// How many rows a product of a whole chunk has.
template <typename T>
int64_t StepTile<T>::Rows(const StepInstruction& instruction) const {
  const auto steps = static_cast<int64_t>(first_row_.size()) - 1;
  return instruction.rows ? first_row_.back() : steps;
}

template <typename T>
int64_t StepTile<T>::Tasks(const StepInstruction& instruction) const {
  return CeilDiv(Rows(instruction), kTaskRows);
}

// Result and factor have one row for each sequence.
template <typename T>
void StepTile<T>::MultiplyRows(const StepInstruction& instruction, int64_t task,
                               int64_t begin, int64_t end_block) const {
  const StepView &from = instruction.operands[0], &to = instruction.result;
  const StepWeight& weight = program_.weights[instruction.weight];
  const auto& kernels = loop_.kernels;
  const auto steps = static_cast<int64_t>(first_row_.size()) - 1;
  const T* factors[kTaskRows];
  T* results[kTaskRows];
  int64_t rows = 0;
  const int64_t first = task * kTaskRows;
  const auto after = std::upper_bound(first_row_.begin(), first_row_.end(), first);
  int64_t step = instruction.rows ? after - first_row_.begin() - 1 : first;
  int64_t r = instruction.rows ? first - first_row_[step] : 0;
  for (; step < steps && rows < kTaskRows; ++step, r = 0) {
    const int64_t end = instruction.rows ? first_row_[step + 1] - first_row_[step] : 1;
    const T* const factor = Start(from.buffer, begin_ + step) + from.offset;
    T* const result = Start(to.buffer, begin_ + step) + to.offset;
    for (; r < end && rows < kTaskRows; ++r, ++rows) {
      factors[rows] = factor + r * from.row_stride;
      results[rows] = result + r * to.row_stride;
    }
  }
  T products[kTaskRows * kMostPanel], start[kMostPanel];
  const Columns columns{weight.columns, kernels.lanes};
  for (int64_t block = begin; block < end_block; ++block) {
    const int64_t column = columns.first(block), width = columns.width(block);
    kernels.product[static_cast<int>(columns.shape(block))](
        factors, 0, rows, weight.depth,
        loop_.panels[instruction.weight] + column * weight.depth,
        StartOf(instruction, column, width, start), products, kMostPanel);
    for (int64_t k = 0; k < rows; ++k) {
      std::copy_n(products + k * kMostPanel, width, results[k] + column);
    }
  }
}

template class StepTile<float>;
template class StepTile<double>;

}  // namespace ostinato::cpu
