#include "cpu/step/tile.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "cpu/network/panels.h"
#include "cpu/runtime/fp_state.h"
#include "cpu/step/arrays.h"

namespace ostinato::cpu {
namespace {

constexpr int64_t kMostPanel = 64;  // columns of the widest panel
alignas(64) constexpr double kZeros[kMostPanel] = {};

}  // namespace

template <typename T>
StepTile<T>::StepTile(const StepLoop<T>& loop, std::vector<int64_t> groups, bool first)
    : loop_(loop),
      program_(loop.call.program),
      groups_(std::move(groups)),
      first_(first),
      live_(program_.buffers.size()) {
  for (const int64_t group : groups_) {
    const int64_t begin = group * loop.group;
    const int64_t end = std::min(begin + loop.group, loop.call.batch);
    for (int64_t slot = begin; slot < end; ++slot) {
      rows_.push_back(loop.order[slot]);
      lengths_.push_back(loop.lengths[slot]);
    }
  }
  T* const local = scratch_.Take<T>(program_.row_elements * size());
  T* const shared = scratch_.Take<T>(program_.shared_elements);
  for (size_t i = 0; i < live_.size(); ++i) {
    const StepBuffer& buffer = program_.buffers[i];
    if (buffer.place == Place::kLocal) {
      live_[i].at =
          buffer.rows ? local + buffer.offset * size() : shared + buffer.offset;
    } else {
      Locate(i);
    }
  }
  for (size_t i = 0; i < live_.size(); ++i) {
    const StepBuffer& buffer = program_.buffers[i];
    if (buffer.place == Place::kNext) live_[i].at = live_[buffer.array].other;
  }
  int64_t most = loop.chunk;
  for (const StepInstruction& i : program_.instructions) most = std::max(most, i.inner);
  factors_.resize(most * size());
}

template <typename T>
void StepTile<T>::Locate(int64_t index) {
  const StepCall& call = loop_.call;
  const StepBuffer& buffer = program_.buffers[index];
  Live& live = live_[index];
  const int64_t count = Elements(buffer);
  const bool in_order = call.lengths == nullptr || !buffer.rows;
  switch (buffer.place) {
    case Place::kConstant:
      live.at = scratch_.Take<T>(count);
      for (int64_t i = 0; i < count; ++i) {
        live.at[i] = static_cast<T>(call.constants[buffer.offset + i]);
      }
      return;
    case Place::kInvariant: {
      const StepArray& array = call.operands[buffer.array];
      if (array.bytes == sizeof(T) && in_order) {
        live.at =
            static_cast<T*>(array.data) + (buffer.rows ? rows_[0] * buffer.width : 0);
      } else {
        live.at = scratch_.Take<T>(count);
        CopyIn(array, 0, buffer, size(), live.at);
      }
      return;
    }
    case Place::kInput:
    case Place::kOutput: {
      const bool input = buffer.place == Place::kInput;
      const StepArray& array = (input ? call.operands : call.results)[buffer.array];
      // What all sequences share has one writer.
      const bool ours = input || buffer.rows || first_;
      if (array.bytes == sizeof(T) && in_order && ours) {
        const int64_t first = buffer.rows ? rows_[0] * buffer.width : 0;
        live.data = static_cast<char*>(array.data) + first * array.bytes;
      } else {
        live.chunk = scratch_.Take<T>(count * loop_.chunk);
      }
      return;
    }
    case Place::kChunk:
      live.chunk = scratch_.Take<T>(count * loop_.chunk);
      return;
    case Place::kState:
      // Both, since a sequence may begin after the others.
      live.at = scratch_.Take<T>(count);
      live.other = scratch_.Take<T>(count);
      CopyIn(call.operands[buffer.array], 0, buffer, size(), live.at);
      std::copy_n(live.at, count, live.other);
      return;
    case Place::kSum:
      live.at = buffer.rows ? scratch_.TakeZeroed<T>(count) : loop_.sums[index];
      return;
    case Place::kNext:
    case Place::kLocal:
      return;
  }
}

template <typename T>
void StepTile<T>::CopyIn(const StepArray& array, int64_t first,
                         const StepBuffer& buffer, int64_t rows, T* to) const {
  if (!buffer.rows) return ReadElements(array, first, buffer.width, to);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = first + rows_[r] * buffer.width;
    ReadElements(array, at, buffer.width, to + r * buffer.width);
  }
}

template <typename T>
void StepTile<T>::CopyOut(const StepArray& array, int64_t first,
                          const StepBuffer& buffer, int64_t begin, int64_t end,
                          const T* from) const {
  for (int64_t r = begin; r < end; ++r) {
    const int64_t at = first + rows_[r] * buffer.width;
    WriteElements(array, at, buffer.width, from + r * buffer.width);
  }
}

template <typename T>
int64_t StepTile<T>::ActiveAt(int64_t n) const {
  const int64_t t = loop_.StepAt(n);
  const auto ended = std::partition_point(lengths_.begin(), lengths_.end(),
                                          [t](int64_t length) { return length > t; });
  return ended - lengths_.begin();
}

// Where a buffer begins at step n.
template <typename T>
T* StepTile<T>::Start(int64_t index, int64_t n) const {
  const StepBuffer& buffer = program_.buffers[index];
  const Live& live = live_[index];
  if (live.chunk != nullptr) return live.chunk + (n - begin_) * Elements(buffer);
  if (live.data == nullptr) return live.at;
  const int64_t step = buffer.width * (buffer.rows ? loop_.call.batch : 1);
  return reinterpret_cast<T*>(live.data) + loop_.StepAt(n) * step;
}

template <typename T>
void StepTile<T>::Run(int64_t begin, int64_t end) {
  const FlushDenormals flush;
  begin_ = begin;
  ReadInputs(end);
  for (const StepInstruction& i : program_.instructions) {
    if (i.phase == Phase::kAhead) MultiplyChunk(i, end);
  }
  for (int64_t n = begin; n < end; ++n) {
    if (const int64_t active = ActiveAt(n); active > 0) {
      Enter(n);
      RunPhase(Phase::kStep, active);
    }
    Swap();
  }
  bool after = false;
  for (const StepInstruction& i : program_.instructions) {
    if (i.phase != Phase::kAfter) continue;
    after = true;
    if (i.operation == kProduct) MultiplyChunk(i, end);
  }
  for (int64_t n = begin; after && n < end; ++n) {
    if (const int64_t active = ActiveAt(n); active > 0) {
      Enter(n);
      RunPhase(Phase::kAfter, active);
    }
  }
  WriteOutputs(end);
}

template <typename T>
void StepTile<T>::RunPhase(Phase phase, int64_t active) {
  for (const StepInstruction& i : program_.instructions) {
    if (i.phase != phase) continue;
    if (i.operation != kProduct) {
      Execute(i, active);
    } else if (phase == Phase::kStep) {
      Multiply(i, active);
    }
  }
}

template <typename T>
void StepTile<T>::ReadInputs(int64_t end) {
  for (size_t i = 0; i < live_.size(); ++i) {
    const StepBuffer& buffer = program_.buffers[i];
    if (buffer.place != Place::kInput || live_[i].chunk == nullptr) continue;
    const StepArray& array = loop_.call.operands[buffer.array];
    const int64_t step = buffer.width * (buffer.rows ? loop_.call.batch : 1);
    for (int64_t n = begin_; n < end; ++n) {
      CopyIn(array, loop_.StepAt(n) * step, buffer, ActiveAt(n), Start(i, n));
    }
  }
}

template <typename T>
void StepTile<T>::WriteOutputs(int64_t end) {
  for (size_t i = 0; i < live_.size(); ++i) {
    const StepBuffer& buffer = program_.buffers[i];
    if (buffer.place != Place::kOutput) continue;
    if (!buffer.rows && first_) WriteShared(i, end);
    if (!buffer.rows || live_[i].chunk == nullptr) continue;
    const StepArray& array = loop_.call.results[buffer.array];
    const int64_t step = buffer.width * loop_.call.batch;
    for (int64_t n = begin_; n < end; ++n) {
      const int64_t first = loop_.StepAt(n) * step;
      const int64_t active = ActiveAt(n);
      CopyOut(array, first, buffer, 0, active, Start(i, n));
      for (int64_t r = active; r < size(); ++r) {
        const int64_t at = first + rows_[r] * buffer.width;
        std::memset(static_cast<char*>(array.data) + at * array.bytes, 0,
                    buffer.width * array.bytes);
      }
    }
  }
}

// What all sequences share is 0 at steps that none of them has. The first tile has a
// longest one.
template <typename T>
void StepTile<T>::WriteShared(int64_t index, int64_t end) {
  const StepBuffer& buffer = program_.buffers[index];
  for (int64_t n = begin_; n < end; ++n) {
    T* const row = Start(index, n);
    if (ActiveAt(n) == 0) std::fill_n(row, buffer.width, T{0});
    if (live_[index].chunk == nullptr) continue;
    WriteElements(loop_.call.results[buffer.array], loop_.StepAt(n) * buffer.width,
                  buffer.width, row);
  }
}

template <typename T>
void StepTile<T>::Enter(int64_t n) {
  for (size_t i = 0; i < live_.size(); ++i) {
    if (live_[i].chunk != nullptr || live_[i].data != nullptr)
      live_[i].at = Start(i, n);
  }
}

template <typename T>
void StepTile<T>::Swap() {
  for (size_t i = 0; i < live_.size(); ++i) {
    const StepBuffer& buffer = program_.buffers[i];
    if (buffer.place != Place::kNext) continue;
    Live& state = live_[buffer.array];
    std::swap(state.at, state.other);
    live_[i].at = state.other;
  }
}

template <typename T>
void StepTile<T>::Finish() {
  const StepCall& call = loop_.call;
  for (size_t i = 0; i < live_.size(); ++i) {
    const StepBuffer& buffer = program_.buffers[i];
    if (buffer.place == Place::kNext) {
      // Steps that a sequence does not have leave its last state in the one place or in
      // the other.
      const Live& state = live_[buffer.array];
      for (int64_t r = 0; r < size(); ++r) {
        const int64_t since = call.reverse ? 0 : call.steps - lengths_[r];
        const T* const from = since % 2 == 0 ? state.at : state.other;
        CopyOut(call.results[buffer.offset], 0, buffer, r, r + 1, from);
      }
    } else if (buffer.place == Place::kSum && buffer.rows) {
      CopyOut(call.results[buffer.array], 0, buffer, 0, size(), live_[i].at);
    }
  }
}

template <typename T>
void StepTile<T>::Execute(const StepInstruction& instruction, int64_t active) {
  const auto operation = static_cast<Operation>(instruction.operation);
  const StepBuffer& to = program_.buffers[instruction.result.buffer];
  if (to.place == Place::kSum && !to.rows) return SumGroups(instruction, active);
  const int count = kStepOperands[instruction.operation];
  const int64_t sequences = instruction.rows ? active : 1;
  const int64_t inner = instruction.inner, width = instruction.width;
  const StepView& result = instruction.result;
  StepOperand<T> operands[3];
  T* out = At(result);

  // One call for all sequences, where rows of all are at equal distances.
  bool even = !ReducesColumn(operation) &&
              (inner == 1 || result.row_stride == inner * result.inner_stride);
  for (int k = 0; k < count; ++k) {
    const StepView& view = instruction.operands[k];
    even = even && (inner == 1 || view.row_stride == inner * view.inner_stride);
    operands[k] = {At(view), inner == 1 ? view.row_stride : view.inner_stride,
                   view.splat};
  }
  const StepFunction<T> function = loop_.step_kernels.function[instruction.operation];
  if (even) {
    const int64_t stride = inner == 1 ? result.row_stride : result.inner_stride;
    function(out, stride, operands, sequences * inner, width);
    return;
  }
  for (int k = 0; k < count; ++k) {
    operands[k].row_stride = instruction.operands[k].inner_stride;
  }
  for (int64_t r = 0; r < sequences; ++r) {
    if (ReducesColumn(operation)) {
      const T start = operation == Operation::column_max
                          ? -std::numeric_limits<T>::infinity()
                          : T{0};
      std::fill_n(out, width, start);
    }
    function(out, result.inner_stride, operands, inner, width);
    out += result.row_stride;
    for (int k = 0; k < count; ++k) {
      operands[k].data += instruction.operands[k].row_stride;
    }
  }
}

// Adds up rows of sequences, each group by itself.
template <typename T>
void StepTile<T>::SumGroups(const StepInstruction& instruction, int64_t active) {
  const int count = kStepOperands[instruction.operation];
  const StepBuffer& to = program_.buffers[instruction.result.buffer];
  const StepFunction<T> function = loop_.step_kernels.function[instruction.operation];
  for (int64_t g = 0, first = 0; first < active; ++g, first += loop_.group) {
    StepOperand<T> operands[3];
    for (int k = 0; k < count; ++k) {
      const StepView& view = instruction.operands[k];
      operands[k] = {At(view) + first * view.row_stride, view.row_stride, view.splat};
    }
    T* const out = At(instruction.result) + groups_[g] * to.width;
    function(out, 0, operands, std::min(loop_.group, active - first),
             instruction.width);
  }
}

template <typename T>
void StepTile<T>::Multiply(const StepInstruction& instruction, int64_t active) {
  const StepView& from = instruction.operands[0];
  const int64_t sequences = instruction.rows ? active : 1;
  const T* const factors = At(from);
  int64_t k = 0;
  for (int64_t r = 0; r < sequences; ++r) {
    for (int64_t i = 0; i < instruction.inner; ++i) {
      factors_[k++] = factors + r * from.row_stride + i * from.inner_stride;
    }
  }
  RunProducts(instruction, k, At(instruction.result));
}

// The same for all steps of a chunk; result and factor have one row for each sequence.
template <typename T>
void StepTile<T>::MultiplyChunk(const StepInstruction& instruction, int64_t end) {
  const StepView& from = instruction.operands[0];
  const StepView& result = instruction.result;
  int64_t first = begin_, k = 0;
  for (int64_t n = begin_; n < end; ++n) {
    const int64_t active = instruction.rows ? ActiveAt(n) : 1;
    const T* const factors = Start(from.buffer, n) + from.offset;
    for (int64_t r = 0; r < active; ++r) factors_[k++] = factors + r * from.row_stride;
    // Rows of several steps follow one another if each step has all of them.
    const bool whole = active == (instruction.rows ? size() : 1);
    if (whole && n + 1 < end) continue;
    if (k > 0) RunProducts(instruction, k, Start(result.buffer, first) + result.offset);
    first = n + 1;
    k = 0;
  }
}

template <typename T>
void StepTile<T>::RunProducts(const StepInstruction& instruction, int64_t rows,
                              T* result) {
  const StepWeight& weight = program_.weights[instruction.weight];
  const auto& kernels = loop_.kernels;
  const int64_t stride = instruction.inner == 1 ? instruction.result.row_stride
                                                : instruction.result.inner_stride;
  const Columns columns{weight.columns, kernels.lanes};
  const T* panel = loop_.panels[instruction.weight];
  const T* const start =
      instruction.continues ? nullptr : reinterpret_cast<const T*>(kZeros);
  for (int64_t block = 0; block < columns.count(); ++block) {
    kernels.product[static_cast<int>(columns.shape(block))](
        factors_.data(), 0, rows, weight.depth, panel, start,
        result + columns.first(block), stride);
    panel += columns.vectors(block) * kernels.lanes * weight.depth;
  }
}

template class StepTile<float>;
template class StepTile<double>;

}  // namespace ostinato::cpu
