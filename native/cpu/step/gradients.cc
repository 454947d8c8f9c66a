#include "cpu/step/gradients.h"

#include <algorithm>

#include "cpu/network/panels.h"
#include "cpu/runtime/fp_state.h"

namespace ostinato::cpu {
namespace {

// Tokens that are added up at once: a panel of so many rows stays in the first-level
// cache or in the second.
constexpr int64_t kBlock = 256;
// Elements of the factor `a` that one task turns, and that one task multiplies.
constexpr int64_t kTurned = 64, kRows = 192;

}  // namespace

template <typename T>
StepGradients<T>::StepGradients(const StepLoop<T>& loop, const Tiles& tiles)
    : loop_(loop), tiles_(tiles) {
  int64_t most = 0, tasks = 0;
  for (const StepGradient& g : loop.call.program.gradients) {
    sums_.push_back(scratch_.TakeZeroed<T>(g.a.width * SumStride(g)));
    most = std::max(most, g.a.width);
    tasks = std::max(tasks, Columns{g.b.width, loop.kernels.lanes}.count());
  }
  turned_ = scratch_.Take<T>(most * kBlock);
  for (int64_t i = 0; i < tasks; ++i) {
    panels_.push_back(scratch_.Take<T>(kBlock * 4 * loop.kernels.lanes));
  }
}

template <typename T>
int64_t StepGradients<T>::SumStride(const StepGradient& gradient) const {
  return RoundUp(gradient.b.width, loop_.kernels.lanes);  // products write vectors
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
  tokens_.clear();
  for (int64_t n = begin; n < end; ++n) {
    for (const Place& place : groups) {
      const int64_t active =
          std::min(place.tile->ActiveAt(n), place.first + loop_.group);
      for (int64_t r = place.first; r < active; ++r)
        tokens_.push_back({place.tile, n, r});
    }
  }
  const auto count = static_cast<int64_t>(tokens_.size());
  const auto& gradients = loop_.call.program.gradients;
  for (size_t g = 0; g < gradients.size(); ++g) {
    for (int64_t first = 0; first < count; first += kBlock) {
      AddBlock(gradients[g], sums_[g], tokens_.data() + first,
               std::min(kBlock, count - first), team);
    }
  }
}

template <typename T>
void StepGradients<T>::AddBlock(const StepGradient& gradient, T* sum,
                                const Token* tokens, int64_t count, Team& team) {
  const auto& kernels = loop_.kernels;
  const StepGradient::Factor &a = gradient.a, &b = gradient.b;
  const auto each = [&](int64_t tasks, const auto& task) {
    if (count * a.width * b.width >= int64_t{1} << 18) {
      team.ForEach(tasks, task);
    } else {
      for (int64_t i = 0; i < tasks; ++i) task(i);
    }
  };

  each(CeilDiv(a.width, kTurned), [&](int64_t i) {
    const int64_t first = i * kTurned, width = std::min(kTurned, a.width - first);
    alignas(64) T gathered[kBlock * kTurned];
    for (int64_t k = 0; k < count; ++k) {
      const Token& token = tokens[k];
      std::copy_n(token.tile->Row(a.buffer, token.n, token.sequence) + a.offset + first,
                  width, gathered + k * kTurned);
    }
    kernels.transpose(gathered, kTurned, count, width, turned_ + first * kBlock,
                      kBlock);
  });

  const Columns columns{b.width, kernels.lanes};
  each(columns.count(), [&](int64_t block) {
    const FlushDenormals flush;
    const T* rows[kBlock];
    for (int64_t k = 0; k < count; ++k) {
      const Token& token = tokens[k];
      rows[k] = token.tile->Row(b.buffer, token.n, token.sequence) + b.offset;
    }
    T* const panel = panels_[block];
    kernels.pack_columns(rows, columns.first(block), count, columns.width(block),
                         panel);
    const T* factors[kRows];
    for (int64_t first = 0; first < a.width; first += kRows) {
      const int64_t size = std::min(kRows, a.width - first);
      for (int64_t i = 0; i < size; ++i) factors[i] = turned_ + (first + i) * kBlock;
      kernels.product[static_cast<int>(columns.shape(block))](
          factors, 0, size, count, panel, nullptr,
          sum + first * SumStride(gradient) + columns.first(block),
          SumStride(gradient));
    }
  });
}

template <typename T>
void StepGradients<T>::Finish() {
  const auto& gradients = loop_.call.program.gradients;
  for (size_t g = 0; g < gradients.size(); ++g) {
    const StepGradient& gradient = gradients[g];
    auto* const result = static_cast<T*>(loop_.call.results[gradient.result].data);
    for (int64_t i = 0; i < gradient.a.width; ++i) {
      std::copy_n(sums_[g] + i * SumStride(gradient), gradient.b.width,
                  result + i * gradient.b.width);
    }
  }
}

template class StepGradients<float>;
template class StepGradients<double>;

}  // namespace ostinato::cpu
