#include "cpu/step/tile.h"

#include <algorithm>
#include <utility>

#include "cpu/network/network.h"
#include "cpu/network/panels.h"
#include "cpu/network/values.h"
#include "cpu/runtime/fp_state.h"
#include "cpu/step/arrays.h"
#include "cpu/step/weights.h"

namespace ostinato::cpu {

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
      const int64_t row = loop.order[slot];
      rows_.push_back(row);
      first_rows_.push_back(loop.offsets.empty() ? row : loop.offsets[row]);
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
  for (size_t i = 0; i < live_.size(); ++i) {
    const StepBuffer& buffer = program_.buffers[i];
    if (live_[i].chunk != nullptr) {
      moving_.push_back({i, Elements(buffer)});
    } else if (live_[i].data != nullptr) {
      const int64_t step = buffer.width * (buffer.rows ? loop.call.batch : 1);
      moving_.push_back({i, loop.call.reverse ? -step : step});
    }
    if (buffer.place == Place::kNext) next_.push_back(i);
  }
  int64_t most = 1, deepest = 1;
  for (const StepInstruction& i : program_.instructions) most = std::max(most, i.inner);
  for (const StepWeight& weight : program_.weights) {
    if (cpu::MultipliesPairs(loop.call, weight, loop.pairs)) {
      deepest = std::max(deepest, weight.depth);
    }
  }
  factors_.resize(most * size());
  half_factors_.resize(factors_.size());
  halves_ = scratch_.Take<BFloat16>(deepest * half_factors_.size());
  first_row_.reserve(loop.chunk + 1);
  ahead_ = Bind(Phase::kAhead);
  steps_ = Bind(Phase::kStep);
  PlaceTemporaries(steps_);
  fetch_times_ = CountFetchTimes(steps_);
  after_ = Bind(Phase::kAfter);
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
        ReadRows(array, RowsAt(buffer, 0, 0, size()), live.at);
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
      live.at = live.other = scratch_.Take<T>(count);
      ReadRows(call.operands[buffer.array], RowsAt(buffer, 0, 0, size()), live.at);
      if (buffer.in_place) return;
      live.other = scratch_.Take<T>(count);
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
ArrayRows StepTile<T>::RowsAt(const StepBuffer& buffer, int64_t n, int64_t begin,
                              int64_t end) const {
  static constexpr int64_t kShared = 0;
  const bool steps = buffer.place == Place::kInput || buffer.place == Place::kOutput;
  const int64_t t = steps ? loop_.StepAt(n) : 0;
  if (!buffer.rows) return {&kShared, t, 1, buffer.width};
  const int64_t* const at = (steps ? first_rows_ : rows_).data() + begin;
  return {at, t * (loop_.offsets.empty() ? loop_.call.batch : 1), end - begin,
          buffer.width};
}

template <typename T>
int64_t StepTile<T>::ActiveAt(int64_t n) const {
  if (loop_.call.lengths == nullptr) return size();
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
void StepTile<T>::Run(int64_t begin, int64_t end, Team* team) {
  Begin(begin, end, team);
  RunSteps(begin, end, team);
  RunAfter(begin, end, team);
  End(end);
}

template <typename T>
void StepTile<T>::Begin(int64_t begin, int64_t end, Team* team) {
  const FlushDenormals flush;
  ReadInputs(begin, end);
  RunChunk(ahead_, {begin, end}, team);
}

template <typename T>
void StepTile<T>::RunSteps(int64_t begin, int64_t end, Team* team) {
  const FlushDenormals flush;
  Enter(begin);
  for (int64_t n = begin; n < end; ++n) {
    if (n > begin) Advance();
    const int64_t active = ActiveInChunk(n);
    if (active > 0) LookAhead(n, active);
    for (size_t i = 0; active > 0 && i < steps_.stretches.size(); ++i) {
      RunStretch(steps_, steps_.stretches[i], active, team);
    }
    Swap();
  }
}

template <typename T>
void StepTile<T>::RunAfter(int64_t begin, int64_t end, Team* team) {
  const FlushDenormals flush;
  RunChunk(after_, {begin, end}, team);
}

template <typename T>
bool StepTile<T>::CanFollow() const {
  // Several sequences enter each step for what comes after it, too.
  if (size() != 1) return false;
  const auto shared = [this](const Bound& bound) {
    return bound.function == nullptr && WorthSharing(bound, bound.instruction->inner);
  };
  const auto& steps = steps_.instructions;
  return std::none_of(steps.begin(), steps.end(), shared) &&
         !(after_.instructions.empty() && program_.gradients.empty());
}

// Reads inputs of the chunk.
template <typename T>
void StepTile<T>::ReadInputs(int64_t begin, int64_t end) {
  begin_ = begin;
  first_row_.assign(1, 0);
  for (int64_t n = begin; n < end; ++n) {
    first_row_.push_back(first_row_.back() + ActiveAt(n));
  }
  for (const auto& [i, apart] : moving_) {
    const StepBuffer& buffer = program_.buffers[i];
    if (buffer.place != Place::kInput || live_[i].chunk == nullptr) continue;
    const StepArray& array = loop_.call.operands[buffer.array];
    for (int64_t n = begin; n < end; ++n) {
      ReadRows(array, RowsAt(buffer, n, 0, ActiveInChunk(n)), Start(i, n));
    }
  }
}

template <typename T>
void StepTile<T>::PutSumsAside() {
  for (size_t i = 0; i < loop_.sums.size(); ++i) {
    if (loop_.earlier_sums[i] == nullptr) continue;
    const int64_t width = program_.buffers[i].width;
    for (const int64_t group : groups_) {
      T* const sum = loop_.sums[i] + group * width;
      T* const earlier = loop_.earlier_sums[i] + group * width;
      Add(sum, nullptr, T{1}, width, earlier);
      Zero(sum, width);
    }
  }
}

// Writes outputs of the chunk.
template <typename T>
void StepTile<T>::End(int64_t end) {
  summed_ += end - begin_;
  if (summed_ >= StepsOfASum(loop_.group)) {
    PutSumsAside();
    summed_ = 0;
  }
  for (const auto& [i, apart] : moving_) {
    const StepBuffer& buffer = program_.buffers[i];
    if (buffer.place != Place::kOutput) continue;
    if (!buffer.rows && first_) WriteShared(i, end);
    if (!buffer.rows || live_[i].chunk == nullptr) continue;
    const StepArray& array = loop_.call.results[buffer.array];
    for (int64_t n = begin_; n < end; ++n) {
      const int64_t active = ActiveAt(n);
      WriteRows(array, RowsAt(buffer, n, 0, active), Start(i, n));
      if (!loop_.offsets.empty()) continue;
      ClearRows<T>(array, RowsAt(buffer, n, active, size()));
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
    WriteRows(loop_.call.results[buffer.array], RowsAt(buffer, n, 0, 1), row);
  }
}

template <typename T>
void StepTile<T>::Enter(int64_t n) {
  for (const Moving& m : moving_) live_[m.buffer].at = Start(m.buffer, n);
}

template <typename T>
void StepTile<T>::Advance() {
  for (const Moving& m : moving_) live_[m.buffer].at += m.apart;
}

// Finds what the next step has in arrays as they lie, of so many sequences.
template <typename T>
void StepTile<T>::LookAhead(int64_t n, int64_t active) {
  fetches_.clear();
  next_fetch_ = 0;
  // Of one sequence, processors find the next step by themselves.
  if (size() == 1 || n + 1 >= loop_.call.steps) return;
  int64_t lines = 0;
  for (const auto& [i, apart] : moving_) {
    if (live_[i].data == nullptr || !program_.buffers[i].rows) continue;
    const auto* const at = reinterpret_cast<const char*>(Start(i, n + 1));
    const int64_t bytes = active * program_.buffers[i].width * int64_t{sizeof(T)};
    fetches_.push_back({at, at + bytes});
    lines += CeilDiv(bytes, 64);
  }
  fetched_together_ = CeilDiv(lines * size(), fetch_times_ * active);
}

template <typename T>
void StepTile<T>::Swap() {
  for (const size_t i : next_) {
    Live& state = live_[program_.buffers[i].array];
    std::swap(state.at, state.other);
    live_[i].at = state.other;
  }
  back_ = !back_;
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
        WriteRows(call.results[buffer.offset], RowsAt(buffer, 0, r, r + 1),
                  from + r * buffer.width);
      }
    } else if (buffer.place == Place::kSum && buffer.rows) {
      WriteRows(call.results[buffer.array], RowsAt(buffer, 0, 0, size()), live_[i].at);
    }
  }
}

template class StepTile<float>;
template class StepTile<double>;

}  // namespace ostinato::cpu
