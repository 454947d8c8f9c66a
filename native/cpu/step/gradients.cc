#include "cpu/step/gradients.h"

#include <algorithm>

#include "cpu/network/values.h"
#include "cpu/runtime/fp_state.h"

namespace ostinato::cpu {
namespace {

// Elements of the wider factor for all tokens that are added up at once; so many fit
// the second-level cache, or the third.
constexpr int64_t kBlockElements = int64_t{1} << 18;
constexpr int64_t kLeastBlock = 256;
// Elements of a factor that one task turns, for so many tokens at a time.
constexpr int64_t kTurned = 64, kTurnedTokens = 128;
// Rows of a gradient that one task adds to, a multiple of what products take at once.
constexpr int64_t kRows = 48;
// Multiply-adds that are worth the threads of a team.
constexpr int64_t kWorthSharing = int64_t{1} << 18;
alignas(64) constexpr double kZeros[64] = {};  // one for each column of a panel

template <typename T>
void AddRows(const T* from, int64_t rows, int64_t width, int64_t stride, T* to) {
  for (int64_t r = 0; r < rows; ++r) {
    cpu::Add(from + r * stride, nullptr, T{1}, width, to + r * stride);
  }
}

}  // namespace

template <typename T>
StepGradients<T>::StepGradients(const StepLoop<T>& loop, const Tiles& tiles)
    : loop_(loop), tiles_(tiles) {
  const auto& gradients = loop.call.program.gradients;
  if (gradients.empty()) return;
  int64_t widest = 1;
  for (const StepGradient& g : gradients) {
    widest = std::max({widest, g.a.width, g.b.width});
  }
  block_ =
      std::max(kLeastBlock, kBlockElements / widest / kTurnedTokens * kTurnedTokens);
  block_ = std::min(block_, RoundUp(loop.chunk * loop.call.batch, kTurnedTokens));
  const int64_t lanes = loop.kernels.lanes;
  for (const StepGradient& g : gradients) {
    const bool whole = g.b.width % lanes == 0;
    const int64_t stride = RoundUp(g.b.width, lanes);  // products write vectors
    T* const data = whole ? static_cast<T*>(loop.call.results[g.result].data)
                          : scratch_.Take<T>(g.a.width * stride);
    const bool parts = loop.call.batch * loop.call.steps > SumParts::kTokens;
    T* const part = scratch_.Take<T>(parts ? g.a.width * stride : 0);
    sums_.push_back({&g, SideOf(g.a, true), SideOf(g.b, false), data, part, stride});
  }
  for (size_t i = 0; i < sums_.size(); ++i) {
    const StepGradient& g = *sums_[i].gradient;
    for (int64_t q = 0; q < ColumnsOf(g.b.width).count(); ++q) {
      for (int64_t row = 0; row < g.a.width; row += kRows) {
        products_.push_back({i, q, row});
      }
    }
  }
}

template <typename T>
size_t StepGradients<T>::SideOf(const StepGradient::Factor& factor, bool turned) {
  for (size_t i = 0; i < sides_.size(); ++i) {
    const StepGradient::Factor& f = sides_[i].factor;
    if (sides_[i].turned == turned && f.buffer == factor.buffer &&
        f.offset == factor.offset && f.width == factor.width) {
      return i;
    }
  }
  const int64_t width =
      turned ? factor.width : RoundUp(factor.width, loop_.kernels.lanes);
  sides_.push_back({factor, turned, scratch_.Take<T>(width * block_)});
  const int64_t pieces =
      turned ? CeilDiv(factor.width, kTurned) : ColumnsOf(factor.width).count();
  for (int64_t i = 0; i < pieces; ++i) fills_.push_back({sides_.size() - 1, i, 0});
  return sides_.size() - 1;
}

template <typename T>
void StepGradients<T>::Add(int64_t begin, int64_t end, Team& team) {
  if (sums_.empty()) return;
  // The order of groups, and of sequences in them, does not depend on the tiles.
  struct Place {
    const StepTile<T>* tile;
    int64_t first;
  };
  std::vector<Place> groups;
  for (const auto& tile : tiles_) {
    for (size_t i = 0; i < tile->groups().size(); ++i) {
      const int64_t group = tile->groups()[i];
      if (group >= static_cast<int64_t>(groups.size())) groups.resize(group + 1);
      groups[group] = {tile.get(), static_cast<int64_t>(i) * loop_.group};
    }
  }
  int64_t work = 0;
  for (const Sum& sum : sums_) work += sum.gradient->a.width * sum.gradient->b.width;
  const auto run = [&] {
    if (count_ == 0) return;
    const auto each = [&](std::vector<Task>& tasks,
                          void (StepGradients::*task)(const Task&)) {
      const auto all = static_cast<int64_t>(tasks.size());
      const auto one = [&](int64_t i) {
        const FlushDenormals flush;
        (this->*task)(tasks[i]);
      };
      if (work * count_ >= kWorthSharing) {
        team.ForEach(all, one);
      } else {
        for (int64_t i = 0; i < all; ++i) one(i);
      }
    };
    each(fills_, &StepGradients::Fill);
    each(products_, &StepGradients::Multiply);
    parts_.ForEachExactly(count_, [](int64_t, int64_t) {});
    tokens_.clear();
    count_ = 0;
  };
  for (int64_t n = begin; n < end; ++n) {
    for (const Place& place : groups) {
      const int64_t active =
          std::min(place.tile->ActiveAt(n), place.first + loop_.group);
      for (int64_t r = place.first; r < active;) {
        const int64_t now = std::min(active - r, block_ - count_);
        tokens_.push_back({r, place.tile, n, now});
        r += now;
        count_ += now;
        if (count_ == block_) run();
      }
    }
  }
  run();
}

template <typename T>
void StepGradients<T>::Fill(const Task& task) {
  const Side& side = sides_[task.index];
  const StepGradient::Factor& factor = side.factor;
  const auto& kernels = loop_.kernels;
  const int64_t stride = loop_.call.program.buffers[factor.buffer].width;
  const auto rows_of = [&](const Run& run) {
    return run.tile->Rows(factor.buffer, run.n) + run.buffer_row * stride +
           factor.offset;
  };
  if (!side.turned) {
    std::vector<const T*> rows;
    rows.reserve(count_);
    for (const Run& run : tokens_) {
      const T* row = rows_of(run);
      for (int64_t k = 0; k < run.count; ++k, row += stride) rows.push_back(row);
    }
    const Columns columns = ColumnsOf(factor.width);
    kernels.pack_columns(rows.data(), columns.first(task.first), count_,
                         columns.width(task.first),
                         side.values + columns.first(task.first) * count_);
    return;
  }
  const int64_t first = task.first * kTurned;
  const int64_t width = std::min(kTurned, factor.width - first);
  alignas(64) T gathered[kTurnedTokens * kTurned];
  int64_t done = 0, waiting = 0;  // tokens
  T* const to = side.values + first * block_;
  const auto turn = [&] {
    kernels.transpose(gathered, kTurned, waiting, width, to + done, block_);
    done += waiting;
    waiting = 0;
  };
  for (const Run& run : tokens_) {
    const T* row = rows_of(run) + first;
    for (int64_t k = 0; k < run.count; ++k, row += stride) {
      std::copy_n(row, width, gathered + waiting * kTurned);
      if (++waiting == kTurnedTokens) turn();
    }
  }
  if (waiting > 0) turn();
}

template <typename T>
void StepGradients<T>::Multiply(const Task& task) {
  const Sum& sum = sums_[task.index];
  const auto& kernels = loop_.kernels;
  const Columns columns = ColumnsOf(sum.gradient->b.width);
  const int64_t rows = std::min(kRows, sum.gradient->a.width - task.row);
  const T* factors[kRows];
  for (int64_t i = 0; i < rows; ++i) {
    factors[i] = sides_[sum.a].values + (task.row + i) * block_;
  }
  const int64_t column = columns.first(task.first);
  const int64_t width = columns.vectors(task.first) * kernels.lanes;
  const int64_t at = task.row * sum.stride + column;
  SumParts parts = parts_;
  parts.ForEachExactly(count_, [&](int64_t token, int64_t count) {
    T* const to = (parts.first ? sum.data : sum.part) + at;
    kernels.product[static_cast<int>(columns.shape(task.first))](
        factors, token, rows, count,
        sides_[sum.b].values + column * count_ + token * width, nullptr,
        parts.begins() ? reinterpret_cast<const T*>(kZeros) : nullptr, to, sum.stride);
    if (parts.ends(count)) AddRows(to, rows, width, sum.stride, sum.data + at);
  });
}

template <typename T>
void StepGradients<T>::Finish() {
  for (const Sum& sum : sums_) {
    const StepGradient& g = *sum.gradient;
    auto* const result = static_cast<T*>(loop_.call.results[g.result].data);
    if (parts_.pending()) {
      cpu::Add(sum.part, nullptr, T{1}, g.a.width * sum.stride, sum.data);
    }
    if (parts_.empty()) {
      std::fill_n(result, g.a.width * g.b.width, T{0});
    } else if (sum.data != result) {
      for (int64_t i = 0; i < g.a.width; ++i) {
        std::copy_n(sum.data + i * sum.stride, g.b.width, result + i * g.b.width);
      }
    }
  }
}

template class StepGradients<float>;
template class StepGradients<double>;

}  // namespace ostinato::cpu
