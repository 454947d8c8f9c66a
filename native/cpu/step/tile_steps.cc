// What a tile runs at a step.
#include <algorithm>
#include <limits>

#include "cpu/step/tile.h"

namespace ostinato::cpu {

template <typename T>
void StepTile<T>::RunStretch(const Program& program, const Stretch& stretch,
                             int64_t active, Team* team) {
  const Bound* const begin = program.instructions.data() + stretch.begin;
  const Bound* const end = program.instructions.data() + stretch.end;
  if (begin->function == nullptr) return Multiply(*begin, active, team);
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

template <typename T>
void StepTile<T>::FetchSome() {
  int64_t lines = fetched_together_;
  for (; next_fetch_ < fetches_.size(); ++next_fetch_) {
    Fetch& fetch = fetches_[next_fetch_];
    for (; fetch.at < fetch.end; fetch.at += 64) {
      if (lines-- == 0) return;
      __builtin_prefetch(fetch.at, 0, 2);
    }
  }
}

template <typename T>
void StepTile<T>::Execute(const Bound& bound, int64_t first, int64_t rows) {
  if (bound.row != nullptr) return ExecuteRow(bound, first, rows);
  const StepInstruction& instruction = *bound.instruction;
  const int64_t inner = instruction.inner, width = instruction.width;
  const StepView& result = instruction.result;
  StepOperand<T> operands[3];
  const bool one = inner == 1 && bound.by_rows;
  for (int k = 0; k < bound.count; ++k) {
    const StepView& view = instruction.operands[k];
    operands[k] = {*bound.from[k] + view.offset + first * bound.apart[k],
                   one ? view.row_stride : view.inner_stride, view.splat};
  }
  T* out = *bound.out + result.offset + first * bound.out_apart;
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

template <typename T>
void StepTile<T>::ExecuteRow(const Bound& bound, int64_t first, int64_t rows) {
  const T* from[3];
  for (int k = 0; k < 3; ++k) {
    from[k] = *bound.from[k] + bound.offsets[k] + first * bound.apart[k];
  }
  T* to = *bound.out + bound.instruction->result.offset + first * bound.out_apart;
  int64_t left = rows * bound.elements;
  while (bound.in_pieces && left > kPiece) {
    bound.row(to, from, kPiece);
    FetchSome();
    to += kPiece;
    for (const T*& operand : from) operand += kPiece;
    left -= kPiece;
  }
  bound.row(to, from, left);
}

// Adds up rows of sequences, or adds each to the row that its index names. Each group
// has a sum of its own; `first` begins a group.
template <typename T>
void StepTile<T>::SumGroups(const Bound& bound, int64_t first, int64_t rows) {
  const StepInstruction& instruction = *bound.instruction;
  const int64_t width = program_.buffers[instruction.result.buffer].width;
  const int64_t begin = first, end = first + rows;
  for (; first < end; first += loop_.group) {
    StepOperand<T> operands[3];
    for (int k = 0; k < bound.count; ++k) {
      const StepView& view = instruction.operands[k];
      operands[k] = {*bound.from[k] + view.offset + begin * bound.apart[k] +
                         (first - begin) * view.row_stride,
                     view.row_stride, view.splat};
    }
    T* const out =
        *bound.out + instruction.result.offset + groups_[first / loop_.group] * width;
    const int64_t count = std::min(loop_.group, end - first);
    if (bound.row_sum != nullptr) {
      T sum;
      bound.row_sum(&sum, 0, operands, 1, count);
      *out += sum;
      continue;
    }
    if (!Indexes(static_cast<Operation>(instruction.operation))) {
      bound.function(out, 0, operands, count, instruction.width);
      continue;
    }
    for (int64_t r = 0; r < count; ++r) {
      bound.function(out, instruction.result.inner_stride, operands, instruction.inner,
                     instruction.width);
      for (int k = 0; k < bound.count; ++k) {
        operands[k].data += instruction.operands[k].row_stride;
      }
    }
  }
}

template <typename T>
void StepTile<T>::Multiply(const Bound& bound, int64_t active, Team* team) {
  const StepInstruction& instruction = *bound.instruction;
  const StepView &from = instruction.operands[0], &to = instruction.result;
  const int64_t sequences = instruction.rows ? active : 1;
  const T* const factors = *bound.from[0] + from.offset;
  int64_t rows = 0;
  for (int64_t r = 0; r < sequences; ++r) {
    for (int64_t i = 0; i < instruction.inner; ++i) {
      factors_[rows++] = factors + r * from.row_stride + i * from.inner_stride;
    }
  }
  const StepWeight& weight = program_.weights[instruction.weight];
  const int64_t stride = instruction.inner == 1 ? to.row_stride : to.inner_stride;
  T* const result = *bound.out + to.offset;
  const auto count = static_cast<int64_t>(bound.end_block - bound.first_block);
  const Factors all{factors_.data(), half_factors_.data(), rows, weight.depth};
  if (MultipliesPairs(bound)) NarrowRows(all, halves_, half_factors_.data());
  const auto multiply = [&](int64_t begin, int64_t end) {
    // Back and forth: what the step before has read last is still in the caches.
    const auto at = [&](int64_t b) {
      return blocks_.data() + bound.first_block + (back_ ? count - 1 - b : b);
    };
    for (int64_t b = begin; b < end; ++b) {
      const Block& block = *at(b);
      const T* const next = b + 1 < end ? at(b + 1)->panel : nullptr;
      MultiplyBlock(block, all, next, result + block.column, stride);
    }
  };
  if (team == nullptr || !WorthSharing(bound, rows)) return multiply(0, count);
  const int64_t parts = std::min(count, PartsOf(*team));
  team->ForEach(
      parts, [&](int64_t i) { multiply(i * count / parts, (i + 1) * count / parts); });
}

template <typename T>
bool StepTile<T>::WorthSharing(const Bound& bound, int64_t rows) const {
  constexpr int64_t kMultiplyAdds = int64_t{1} << 18;
  const StepWeight& weight = program_.weights[bound.instruction->weight];
  return rows * weight.depth * weight.columns >= kMultiplyAdds;
}

template <typename T>
void StepTile<T>::NarrowRows(const Factors& from, BFloat16* values,
                             const BFloat16** rows) const {
  for (int64_t r = 0; r < from.count; ++r, values += from.depth) {
    loop_.step_kernels.narrow(from.rows[r], from.depth, values);
    rows[r] = values;
  }
}

template <typename T>
void StepTile<T>::MultiplyBlock(const Block& block, const Factors& factors,
                                const T* next, T* to, int64_t stride) const {
  if constexpr (sizeof(T) == 4) {
    if (block.pairs != nullptr) {
      const auto* const panel = reinterpret_cast<const BFloat16*>(block.panel);
      return block.pairs(factors.halves, 0, factors.count, factors.depth, panel,
                         reinterpret_cast<const BFloat16*>(next), block.start, to,
                         stride);
    }
  }
  block.product(factors.rows, 0, factors.count, factors.depth, block.panel, next,
                block.start, to, stride);
}

template class StepTile<float>;
template class StepTile<double>;

}  // namespace ostinato::cpu
