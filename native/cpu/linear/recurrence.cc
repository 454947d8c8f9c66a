#include "cpu/linear/recurrence.h"

#include <algorithm>
#include <initializer_list>
#include <stdexcept>

#include "cpu/network/network.h"
#include "cpu/network/values.h"
#include "cpu/runtime/scratch.h"
#include "cpu/runtime/team.h"

namespace ostinato::cpu {
namespace {

// Elements that take about as long as waking another thread.
constexpr int64_t kElementsPerThread = 1 << 15;
// Steps of a segment. Sums over steps are added up segment by segment, for accuracy.
constexpr int64_t kSteps = 256;
// Results of so many bytes are in no cache when they are read.
constexpr int64_t kStreamedBytes = 16 << 20;
constexpr int64_t kLine = 64;
// Elements that take far longer than fetching the number of the next item of work.
constexpr int64_t kElementsPerItem = 1 << 12;
// A piece of a row for one thread has whole lines of a cache.
constexpr int64_t kFewestUnits = 32;

int32_t ThreadsFor(int64_t elements) {
  return static_cast<int32_t>(
      std::min<int64_t>(1 + elements / kElementsPerThread, kMostThreads));
}

// Some units, or groups, of one sequence, which one thread computes.
struct Piece {
  int64_t sequence;
  int64_t first_group, groups;
  int64_t first_unit, units;  // of each group
};

class Pieces {
 public:
  Pieces(const LinearShape& shape, int32_t threads) : shape_(shape) {
    const int64_t wanted =
        shape.batch >= 4 * threads
            ? 1
            : CeilDiv(4 * threads, std::max<int64_t>(1, shape.batch));
    const int64_t whole = shape.shared ? shape.groups : shape.width / kFewestUnits;
    parts_ = threads == 1 ? 1 : std::clamp<int64_t>(whole, 1, wanted);
  }

  int64_t count() const { return shape_.batch * parts_; }
  int64_t most_units() const {
    return shape_.shared ? shape_.width : shape_.width - (parts_ - 1) * Each();
  }

  Piece operator[](int64_t index) const {
    const int64_t sequence = index / parts_, part = index % parts_;
    if (shape_.shared) {
      const int64_t first = shape_.groups * part / parts_;
      return {sequence, first, shape_.groups * (part + 1) / parts_ - first, 0,
              shape_.width};
    }
    const int64_t first = part * Each();
    const int64_t end = part == parts_ - 1 ? shape_.width : first + Each();
    return {sequence, 0, 1, first, end - first};
  }

 private:
  // The units of each part but the last one, which has as many at least.
  int64_t Each() const { return shape_.width / kFewestUnits / parts_ * kFewestUnits; }

  const LinearShape& shape_;
  int64_t parts_;
};

// Runs `body(piece, memory)` for all pieces. `take(scratch, most_units)` takes the
// memory for all pieces of an item of work, which costs more than a short piece. Where
// the steps of a sequence are taken `down`, so are the pieces: caches fetch ahead along
// one way through memory, and short sequences otherwise take twice the time.
template <typename Take, typename Body>
void ForPieces(const LinearShape& shape, bool down, const Take& take,
               const Body& body) {
  const int64_t elements = shape.batch * shape.steps * shape.units();
  Team team(ThreadsFor(elements));
  const Pieces pieces(shape, team.threads());
  const int64_t count = pieces.count();
  const int64_t items = std::clamp<int64_t>(
      elements / kElementsPerItem, std::min<int64_t>(count, 4 * team.threads()),
      std::max<int64_t>(1, count));
  team.ForEach(items, [&](int64_t item) {
    Scratch scratch;
    const auto memory = take(scratch, pieces.most_units());
    const int64_t begin = count * item / items, end = count * (item + 1) / items;
    for (int64_t i = begin; i < end; ++i)
      body(pieces[down ? begin + end - 1 - i : i], memory);
  });
}

int64_t LengthOf(const LinearShape& shape, int64_t sequence) {
  if (shape.lengths == nullptr) return shape.steps;
  return std::clamp<int64_t>(shape.lengths[sequence], 0, shape.steps);
}

// Where the units of one group of one sequence lie.
struct Place {
  Place(const LinearShape& shape, const Piece& piece, int64_t group)
      : shape(shape),
        sequence(piece.sequence),
        units(piece.units),
        length(LengthOf(shape, piece.sequence)),
        unit(group * shape.width + piece.first_unit),
        factor(shape.shared ? group * shape.a_group : unit * (shape.blocks ? 2 : 1)) {}

  int64_t state() const { return sequence * shape.units() + unit; }
  int64_t at(int64_t step) const {
    return sequence * shape.batch_stride + step * shape.step_stride + unit;
  }
  int64_t da_at(int64_t step) const {
    return sequence * shape.da_batch + step * shape.da_step + factor;
  }
  // The position of the k-th step of the run.
  int64_t position(int64_t k) const { return shape.reverse ? length - 1 - k : k; }

  // The factors from one step on, in steps of `direction`.
  template <typename Storage>
  Factors<Storage> factors(const Storage* a, int64_t step, int64_t direction) const {
    Factors<Storage> made{a + sequence * shape.a_batch + step * shape.a_step + factor,
                          direction * shape.a_step, shape.shared, nullptr,
                          direction * shape.reset_step};
    if (shape.resets != nullptr) {
      made.resets =
          shape.resets + sequence * shape.reset_batch + step * shape.reset_step;
    }
    return made;
  }

  const LinearShape& shape;
  int64_t sequence, units, length, unit, factor;
};

template <typename Storage>
int64_t BytesOf(const LinearShape& shape) {
  return shape.batch * shape.steps * shape.units() * int64_t{sizeof(Storage)};
}

// Whether results go past the caches: they are large, and pieces of rows begin at whole
// lines of a cache.
template <typename Storage>
bool Streams(const LinearShape& shape, std::initializer_list<const Storage*> results) {
  const auto whole = [](int64_t count) {
    return count * int64_t{sizeof(Storage)} % kLine == 0;
  };
  return BytesOf<Storage>(shape) >= kStreamedBytes && whole(shape.width) &&
         whole(shape.batch_stride) && whole(shape.step_stride) &&
         std::all_of(results.begin(), results.end(), [](const Storage* data) {
           return reinterpret_cast<uintptr_t>(data) % kLine == 0;
         });
}

template <typename Storage>
void ZeroPadding(const Place& place, Storage* h) {
  for (int64_t t = place.length; t < place.shape.steps; ++t)
    Zero(h + place.at(t), place.units);
}

template <typename Storage, typename Accum>
void ForwardPlace(const Place& place, const LinearKernels<Storage, Accum>& kernels,
                  const LinearForwardArrays<Storage>& arrays, bool stream,
                  Accum* state) {
  const LinearShape& shape = place.shape;
  const auto run =
      shape.blocks
          ? (shape.after ? kernels.blocks_forward_after : kernels.blocks_forward)
          : (shape.after ? kernels.forward_after : kernels.forward);
  const int64_t direction = shape.reverse ? -1 : 1;
  Convert(arrays.h_0 + place.state(), place.units, state);
  for (int64_t k = 0; k < place.length; k += kSteps) {
    const int64_t step = place.position(k);
    run(place.factors(arrays.a, step, direction),
        {std::min(kSteps, place.length - k), place.units, direction * shape.step_stride,
         stream, arrays.b + place.at(step), arrays.h + place.at(step), state});
  }
  Convert(state, place.units, arrays.h_n + place.state());
  ZeroPadding(place, arrays.h);
}

// The memory of one piece on the way back.
template <typename Accum>
struct BackwardMemory {
  Accum* state;   // [units]
  Accum* sums;    // [units], the gradient of factors that all steps share
  Accum* part;    // [units], the same of some steps
  Accum* shared;  // [steps of a block][parts]
};

template <typename Storage, typename Accum>
void BackwardPlace(const Place& place, const LinearKernels<Storage, Accum>& kernels,
                   const LinearBackwardArrays<Storage>& arrays, bool stream,
                   const BackwardMemory<Accum>& memory) {
  const LinearShape& shape = place.shape;
  const int64_t direction = shape.reverse ? 1 : -1;
  const int64_t factors = shape.shared ? shape.parts : place.units;
  Convert(arrays.dh_n + place.state(), place.units, memory.state);
  Zero(memory.sums, factors);
  // Steps [first, k) of the run, the last one first; the first one of all is alone,
  // because the state before it is not in h.
  for (int64_t k = place.length, first; k > 0; k = first) {
    first = k == 1 ? 0 : std::max<int64_t>(1, k - kSteps);
    const int64_t step = place.position(k - 1), steps = k - first;
    const Storage* h_prev = k == 1 ? arrays.h_0 + place.state()
                                   : arrays.h + place.at(place.position(k - 2));
    if (shape.shared) Zero(memory.shared, steps * shape.parts);
    Zero(memory.part, factors);
    kernels.backward(
        place.factors(arrays.a, step, direction),
        {steps, place.units, direction * shape.step_stride, stream, h_prev,
         arrays.dh + place.at(step), arrays.db + place.at(step), memory.state,
         arrays.da + place.da_at(step), direction * shape.da_step,
         shape.a_step == 0 ? memory.part : nullptr, memory.shared, shape.parts});
    for (int64_t i = 0; shape.shared && i < steps; ++i) {
      const Accum* const one = memory.shared + i * shape.parts;
      if (shape.a_step == 0) {
        Add(one, nullptr, Accum{1}, factors, memory.part);
      } else {
        Convert(one, factors, arrays.da + place.da_at(step + direction * i));
      }
    }
    Add(memory.part, nullptr, Accum{1}, factors, memory.sums);
  }
  Convert(memory.state, place.units, arrays.dh_0 + place.state());
  ZeroPadding(place, arrays.db);
  if (shape.a_step == 0) {
    Convert(memory.sums, factors, arrays.da + place.da_at(0));
  } else {
    for (int64_t t = place.length; t < shape.steps; ++t)
      Zero(arrays.da + place.da_at(t), factors);
  }
}

}  // namespace

template <typename Storage, typename Accum>
void RunLinearForward(const LinearShape& shape,
                      const LinearKernels<Storage, Accum>& kernels,
                      const LinearForwardArrays<Storage>& arrays) {
  const bool stream = Streams<Storage>(shape, {arrays.h});
  AdviseHugePages(arrays.h, BytesOf<Storage>(shape));
  ForPieces(
      shape, shape.reverse,
      [](Scratch& scratch, int64_t most_units) {
        return scratch.Take<Accum>(most_units);
      },
      [&](const Piece& piece, Accum* state) {
        for (int64_t g = piece.first_group; g < piece.first_group + piece.groups; ++g)
          ForwardPlace(Place(shape, piece, g), kernels, arrays, stream, state);
      });
}

template <typename Storage, typename Accum>
void RunLinearBackward(const LinearShape& shape,
                       const LinearKernels<Storage, Accum>& kernels,
                       const LinearBackwardArrays<Storage>& arrays) {
  const bool stream = Streams<Storage>(shape, {arrays.db, arrays.da});
  AdviseHugePages(arrays.db, BytesOf<Storage>(shape));
  if (shape.a_step != 0 && !shape.shared)
    AdviseHugePages(arrays.da, BytesOf<Storage>(shape));
  ForPieces(
      shape, !shape.reverse,
      [&](Scratch& scratch, int64_t most_units) {
        const int64_t sums = std::max(most_units, shape.parts);
        return BackwardMemory<Accum>{
            scratch.Take<Accum>(most_units), scratch.Take<Accum>(sums),
            scratch.Take<Accum>(sums), scratch.Take<Accum>(kSteps * shape.parts)};
      },
      [&](const Piece& piece, const BackwardMemory<Accum>& memory) {
        for (int64_t g = piece.first_group; g < piece.first_group + piece.groups; ++g)
          BackwardPlace(Place(shape, piece, g), kernels, arrays, stream, memory);
      });
}

template <typename T>
void RunFilter(const FilterSegment<T>& filter, int64_t channels,
               const FilterKernel<T>& kernel) {
  if (filter.order < 1 || filter.order > kMostOrder)
    throw std::invalid_argument("there is no kernel for a filter of this order");
  Team team(ThreadsFor(channels * filter.steps * filter.order));
  // Channels on several threads rather than in more lanes of one.
  const int64_t each =
      std::clamp<int64_t>(CeilDiv(channels, team.threads()), 1, kernel.lanes);
  team.ForEach(CeilDiv(channels, each), [&](int64_t i) {
    kernel.run(filter, i * each, std::min(each, channels - i * each));
  });
}
template void RunFilter(const FilterSegment<float>&, int64_t,
                        const FilterKernel<float>&);
template void RunFilter(const FilterSegment<double>&, int64_t,
                        const FilterKernel<double>&);

#define OSTINATO_LINEAR(Storage, Accum)                                 \
  template void RunLinearForward(const LinearShape&,                    \
                                 const LinearKernels<Storage, Accum>&,  \
                                 const LinearForwardArrays<Storage>&);  \
  template void RunLinearBackward(const LinearShape&,                   \
                                  const LinearKernels<Storage, Accum>&, \
                                  const LinearBackwardArrays<Storage>&)
OSTINATO_LINEAR(float, float);
OSTINATO_LINEAR(double, double);
OSTINATO_LINEAR(BFloat16, float);

}  // namespace ostinato::cpu
