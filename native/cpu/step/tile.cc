#include "cpu/step/tile.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "cpu/network/panels.h"

namespace ostinato::cpu {
namespace {

constexpr int64_t kMostPanel = 64;  // columns of the widest panel
alignas(64) constexpr double kZeros[kMostPanel] = {};

float FromBFloat16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

uint16_t ToBFloat16(float x) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return static_cast<uint16_t>((bits | 0x400000) >> 16);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
void Read(const StepArray& array, int64_t at, int64_t count, T* to) {
  if (array.bytes == sizeof(T)) {
    std::copy_n(static_cast<const T*>(array.data) + at, count, to);
  } else {
    const auto* from = static_cast<const uint16_t*>(array.data) + at;
    std::transform(from, from + count, to, FromBFloat16);
  }
}

template <typename T>
void Write(const StepArray& array, int64_t at, int64_t count, const T* from) {
  if (array.bytes == sizeof(T)) {
    std::copy_n(from, count, static_cast<T*>(array.data) + at);
  } else {
    std::transform(from, from + count, static_cast<uint16_t*>(array.data) + at,
                   [](T x) { return ToBFloat16(static_cast<float>(x)); });
  }
}

}  // namespace

template <typename T>
StepTile<T>::StepTile(const StepLoop<T>& loop, std::vector<int64_t> groups, bool first,
                      Scratch& scratch)
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
  const auto rows = static_cast<int64_t>(rows_.size());
  T* const local = scratch.Take<T>(program_.row_elements * rows);
  T* const shared = scratch.Take<T>(program_.shared_elements);
  for (size_t i = 0; i < live_.size(); ++i) {
    const StepBuffer& buffer = program_.buffers[i];
    if (buffer.place == Place::kLocal) {
      live_[i].at = buffer.rows ? local + buffer.offset * rows : shared + buffer.offset;
    } else {
      Locate(i, scratch);
    }
  }
  int64_t most = 1;
  for (const StepInstruction& i : program_.instructions) most = std::max(most, i.inner);
  factors_.resize(most * rows);
}

template <typename T>
bool StepTile<T>::IsDirect(const StepArray& array) const {
  return array.bytes == sizeof(T) && loop_.call.lengths == nullptr;
}

template <typename T>
void StepTile<T>::Locate(int64_t index, Scratch& scratch) {
  const StepCall& call = loop_.call;
  const StepBuffer& buffer = program_.buffers[index];
  Live& live = live_[index];
  const auto rows = static_cast<int64_t>(rows_.size());
  const int64_t count = buffer.width * (buffer.rows ? rows : 1);
  live.array_step = buffer.width * (buffer.rows ? call.batch : 1);
  switch (buffer.place) {
    case Place::kConstant:
      live.at = scratch.Take<T>(count);
      for (int64_t i = 0; i < count; ++i) {
        live.at[i] = static_cast<T>(call.constants[buffer.offset + i]);
      }
      return;
    case Place::kInvariant: {
      const StepArray& array = call.operands[buffer.array];
      if (array.bytes == sizeof(T) && (!buffer.rows || call.lengths == nullptr)) {
        live.at =
            static_cast<T*>(array.data) + (buffer.rows ? rows_[0] * buffer.width : 0);
      } else {
        live.at = scratch.Take<T>(count);
        CopyIn(array, 0, buffer, rows, live.at);
      }
      return;
    }
    case Place::kInput:
      live.copied = buffer.rows ? !IsDirect(call.operands[buffer.array])
                                : call.operands[buffer.array].bytes != sizeof(T);
      if (live.copied) live.at = scratch.Take<T>(count);
      return;
    case Place::kOutput:
      live.copied = buffer.rows
                        ? !IsDirect(call.results[buffer.array])
                        : !first_ || call.results[buffer.array].bytes != sizeof(T);
      if (live.copied) live.at = scratch.Take<T>(count);
      return;
    case Place::kState: {
      // Both, since a sequence may begin after the others.
      live.at = scratch.Take<T>(count);
      live.other = scratch.Take<T>(count);
      CopyIn(call.operands[buffer.array], 0, buffer, rows, live.at);
      std::copy_n(live.at, count, live.other);
      return;
    }
    case Place::kNext:
      return;  // set at every step
    case Place::kSum:
      live.at = buffer.rows ? scratch.TakeZeroed<T>(count) : loop_.sums[index];
      return;
    case Place::kLocal:
      return;
  }
}

template <typename T>
void StepTile<T>::CopyIn(const StepArray& array, int64_t first,
                         const StepBuffer& buffer, int64_t rows, T* to) const {
  if (!buffer.rows) return Read(array, first, buffer.width, to);
  for (int64_t r = 0; r < rows; ++r) {
    Read(array, first + rows_[r] * buffer.width, buffer.width, to + r * buffer.width);
  }
}

template <typename T>
void StepTile<T>::CopyOut(const StepArray& array, int64_t first,
                          const StepBuffer& buffer, int64_t begin, int64_t end,
                          const T* from) const {
  for (int64_t r = begin; r < end; ++r) {
    Write(array, first + rows_[r] * buffer.width, buffer.width,
          from + r * buffer.width);
  }
}

// The sequences that have step t are the first ones.
template <typename T>
int64_t StepTile<T>::ActiveAt(int64_t t) const {
  const auto ended = std::partition_point(lengths_.begin(), lengths_.end(),
                                          [t](int64_t length) { return length > t; });
  return ended - lengths_.begin();
}

template <typename T>
void StepTile<T>::Run() {
  const StepCall& call = loop_.call;
  for (size_t i = 0; i < live_.size(); ++i) {
    const StepBuffer& buffer = program_.buffers[i];
    if (buffer.place == Place::kNext) live_[i].at = live_[buffer.array].other;
  }
  for (int64_t n = 0; n < call.steps; ++n) {
    const int64_t t = call.reverse ? call.steps - 1 - n : n;
    const int64_t active = ActiveAt(t);
    Enter(t, active);
    if (active > 0) {
      for (const StepInstruction& i : program_.instructions) Execute(i, active);
    }
    Leave(t, active);
    Swap();
  }
  for (size_t i = 0; i < live_.size(); ++i) {
    const StepBuffer& buffer = program_.buffers[i];
    if (buffer.place == Place::kNext) {
      // A sequence that has ended has its last state where an odd number of steps, or
      // an even one, leaves it.
      const Live& state = live_[buffer.array];
      for (size_t r = 0; r < rows_.size(); ++r) {
        const int64_t since = call.reverse ? 0 : call.steps - lengths_[r];
        const T* const from = since % 2 == 0 ? state.at : state.other;
        CopyOut(call.results[buffer.offset], 0, buffer, r, r + 1, from);
      }
    } else if (buffer.place == Place::kSum && buffer.rows) {
      CopyOut(call.results[buffer.array], 0, buffer, 0, rows_.size(), live_[i].at);
    }
  }
}

template <typename T>
void StepTile<T>::Enter(int64_t t, int64_t active) {
  for (size_t i = 0; i < live_.size(); ++i) {
    const StepBuffer& buffer = program_.buffers[i];
    if (buffer.place != Place::kInput && buffer.place != Place::kOutput) continue;
    Live& live = live_[i];
    const bool input = buffer.place == Place::kInput;
    const StepArray& array =
        input ? loop_.call.operands[buffer.array] : loop_.call.results[buffer.array];
    const int64_t first = t * live.array_step;
    if (!live.copied) {
      live.at = static_cast<T*>(array.data) + first +
                (buffer.rows ? rows_[0] * buffer.width : 0);
    } else if (input) {
      CopyIn(array, first, buffer, active, live.at);
    }
  }
}

template <typename T>
void StepTile<T>::Leave(int64_t t, int64_t active) {
  const auto rows = static_cast<int64_t>(rows_.size());
  for (size_t i = 0; i < live_.size(); ++i) {
    const StepBuffer& buffer = program_.buffers[i];
    const Live& live = live_[i];
    if (buffer.place != Place::kOutput || !live.copied) continue;
    const StepArray& array = loop_.call.results[buffer.array];
    const int64_t first = t * live.array_step;
    if (!buffer.rows) {
      if (first_) Write(array, first, buffer.width, live.at);
      continue;
    }
    CopyOut(array, first, buffer, 0, active, live.at);
    for (int64_t r = active; r < rows; ++r) {
      const int64_t row = first + rows_[r] * buffer.width;
      std::memset(static_cast<char*>(array.data) + row * array.bytes, 0,
                  buffer.width * array.bytes);
    }
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
void StepTile<T>::Execute(const StepInstruction& instruction, int64_t active) {
  if (instruction.operation == kProduct) return Multiply(instruction, active);
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
  const StepFunction<T> function = loop_.kernels.function[instruction.operation];
  if (even) {
    const int64_t stride = inner == 1 ? result.row_stride : result.inner_stride;
    function(out, stride, operands, sequences * inner, width);
    return;
  }
  for (int k = 0; k < count; ++k)
    operands[k].row_stride = instruction.operands[k].inner_stride;
  for (int64_t r = 0; r < sequences; ++r) {
    if (ReducesColumn(operation) && !instruction.continues) {
      const T start = operation == Operation::column_max
                          ? -std::numeric_limits<T>::infinity()
                          : T{0};
      std::fill_n(out, width, start);
    }
    function(out, result.inner_stride, operands, inner, width);
    out += result.row_stride;
    for (int k = 0; k < count; ++k)
      operands[k].data += instruction.operands[k].row_stride;
  }
}

// Adds up rows of sequences, each group by itself.
template <typename T>
void StepTile<T>::SumGroups(const StepInstruction& instruction, int64_t active) {
  const int count = kStepOperands[instruction.operation];
  const StepBuffer& to = program_.buffers[instruction.result.buffer];
  const StepFunction<T> function = loop_.kernels.function[instruction.operation];
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
  const StepWeight& weight = program_.weights[instruction.weight];
  const auto& kernels = loop_.panels.kernels;
  const StepView& from = instruction.operands[0];
  const int64_t rows = (instruction.rows ? active : 1) * instruction.inner;
  const T* const factors = At(from);
  for (int64_t r = 0, k = 0; k < rows; ++r) {
    for (int64_t i = 0; i < instruction.inner; ++i) {
      factors_[k++] = factors + r * from.row_stride + i * from.inner_stride;
    }
  }
  const StepView& result = instruction.result;
  const int64_t stride =
      instruction.inner == 1 ? result.row_stride : result.inner_stride;
  const Columns columns{weight.columns, kernels.lanes};
  const T* panel = loop_.panels.panels[instruction.weight];
  const T* const start =
      instruction.continues ? nullptr : reinterpret_cast<const T*>(kZeros);
  for (int64_t block = 0; block < columns.count(); ++block) {
    kernels.product[static_cast<int>(columns.shape(block))](
        factors_.data(), 0, rows, weight.depth, panel, start,
        At(result) + columns.first(block), stride);
    panel += columns.vectors(block) * kernels.lanes * weight.depth;
  }
}

template class StepTile<float>;
template class StepTile<double>;

}  // namespace ostinato::cpu
