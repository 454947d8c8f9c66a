// The kernels of linear recurrences with a factor for each unit, or one for all.
#ifndef OSTINATO_CPU_LINEAR_RECURRENCE_INL_H_
#define OSTINATO_CPU_LINEAR_RECURRENCE_INL_H_

#include <cstdint>

#include "cpu/kernels/memory-inl.h"
#include "cpu/linear/kernels.h"

namespace ostinato::cpu {
namespace {

// A number type: `kParts` neighbours in memory are one number.
template <typename V>
struct RealNumbers {
  static constexpr int kParts = 1;
  using Factor = Reg<V>;

  static Factor FactorOf(Reg<V> v) { return v; }
  template <typename Storage>
  static Factor Shared(const Storage* p) {
    if constexpr (sizeof(Storage) == sizeof(typename V::Element)) {
      return V::Set(*p);
    } else {
      return V::Set(Load<V>(p, 1)[0]);
    }
  }
  // f * h + c
  static Reg<V> MulAdd(Factor f, Reg<V> h, Reg<V> c) { return V::MulAdd(f, h, c); }
  static Reg<V> Mul(Factor f, Reg<V> h) { return f * h; }
};

template <typename V>
struct ComplexNumbers {
  static constexpr int kParts = 2;
  struct Factor {
    Reg<V> re, im;  // im is negative in the lanes of real parts
  };

  static Reg<V> Signs() {
    Reg<V> signs = V::Set(1);
    for (int i = 0; i < V::kLanes; i += 2) signs[i] = -1;
    return signs;
  }
  static Factor FactorOf(Reg<V> v) {
    return {V::EvenTwice(v), V::OddTwice(v) * Signs()};
  }
  static Factor Shared(const typename V::Element* p) {
    return {V::Set(p[0]), V::Set(p[1]) * Signs()};
  }
  static Reg<V> MulAdd(Factor f, Reg<V> h, Reg<V> c) {
    return V::MulAdd(f.im, V::SwapPairs(h), V::MulAdd(f.re, h, c));
  }
  static Reg<V> Mul(Factor f, Reg<V> h) {
    return V::MulAdd(f.im, V::SwapPairs(h), f.re * h);
  }
};

// Some vectors of one step, which are in registers at once: full ones, or one vector of
// which the first `part` lanes count. They are taken from the last to the first where
// `down`, so that memory is read in its order where a run goes backwards: caches fetch
// ahead along a line, and otherwise this takes twice the time. Results go past the
// caches where `stream`.
template <typename V, int vectors, bool down = false, bool stream = false>
struct Block {
  static constexpr int kVectors = vectors;
  static constexpr bool kStreams = stream;

  int64_t part = V::kLanes;

  static constexpr int At(int n) { return down ? vectors - 1 - n : n; }

  template <typename Storage>
  Reg<V> Get(const Storage* p, int i) const {
    if constexpr (vectors > 1) return Load<V>(p + i * V::kLanes);
    return Load<V>(p, part);
  }
  template <typename Storage>
  void Put(Storage* p, int i, Reg<V> v) const {
    if constexpr (vectors > 1) {
      Store<V>(p + i * V::kLanes, v);
    } else {
      Store<V>(p, v, part);
    }
  }
  template <typename Storage>
  void PutResult(Storage* p, int i, Reg<V> v) const {
    if constexpr (stream && sizeof(Storage) == sizeof(typename V::Element)) {
      V::Stream(p + i * V::kLanes, v);
    } else {
      Put(p, i, v);
    }
  }
};

// One unit. Scalars are read into all lanes and written from the first one: a vector of
// which one lane counts is read and written at several times their cost.
template <typename V>
struct Single {
  static constexpr int kVectors = 1;
  static constexpr int64_t part = 1;

  static constexpr int At(int n) { return n; }

  template <typename Storage>
  Reg<V> Get(const Storage* p, int) const {
    return RealNumbers<V>::Shared(p);
  }
  template <typename Storage>
  void Put(Storage* p, int, Reg<V> v) const {
    if constexpr (sizeof(Storage) == sizeof(typename V::Element)) {
      *p = v[0];
    } else {
      Store<V>(p, v, 1);
    }
  }
  template <typename Storage>
  void PutResult(Storage* p, int i, Reg<V> v) const {
    Put(p, i, v);
  }
};

constexpr int kMostVectors = 8;

// Calls body(block, unit) for all vectors of a row, in the order of the run.
template <typename V, bool down, bool stream, typename Body>
void ForBlocks(int64_t units, const Body& body) {
  constexpr int64_t kLanes = V::kLanes, kLarge = kMostVectors * kLanes;
  const int64_t large = units / kLarge;
  const auto larges = [&] {
    for (int64_t n = 0; n < large; ++n)
      body(Block<V, kMostVectors, down, stream>{}, (down ? large - 1 - n : n) * kLarge);
  };
  if (!down) larges();
  int64_t unit = large * kLarge;
  if (units - unit >= 4 * kLanes) {
    body(Block<V, 4>{}, unit);
    unit += 4 * kLanes;
  }
  if (units - unit >= 2 * kLanes) {
    body(Block<V, 2>{}, unit);
    unit += 2 * kLanes;
  }
  for (; units - unit > 1; unit += kLanes)
    body(Block<V, 1>{units - unit < kLanes ? units - unit : kLanes}, unit);
  if (units - unit == 1) body(Single<V>{}, unit);
  if (down) larges();
}

// Moves factors, or a segment, on by one step.
template <typename Storage>
void Advance(Factors<Storage>& factors) {
  factors.a += factors.a_step;
  if (factors.resets != nullptr) factors.resets += factors.reset_step;
}
template <typename Storage, typename Accum>
void Advance(ForwardSegment<Storage, Accum>& segment) {
  segment.b += segment.step;
  segment.h += segment.step;
}
template <typename Storage, typename Accum>
void Advance(BackwardSegment<Storage, Accum>& segment) {
  segment.h_prev += segment.step;
  segment.dh += segment.step;
  segment.db += segment.step;
  segment.da += segment.da_step;
  if (segment.shared != nullptr) segment.shared += segment.parts;
}

// Calls body(factors, segment, block, unit) for parts of a segment that cover it. Rows
// that fit into registers stay there for all steps. Others run step by step, so that
// memory is read in its order, and their state is in a cache.
template <typename V, typename Segment, typename Storage, typename Body>
void ForRows(const Factors<Storage>& factors, const Segment& segment,
             const Body& body) {
  if (segment.units <= kMostVectors * V::kLanes) {
    ForBlocks<V, false, false>(segment.units, [&](auto block, int64_t unit) {
      body(factors, segment, block, unit);
    });
    return;
  }
  Factors<Storage> at = factors;
  Segment part = segment;
  part.steps = 1;
  const auto row = [&](auto block, int64_t unit) { body(at, part, block, unit); };
  for (int64_t t = 0; t < segment.steps; ++t) {
    if (segment.step < 0) {
      if (segment.stream) {
        ForBlocks<V, true, true>(segment.units, row);
      } else {
        ForBlocks<V, true, false>(segment.units, row);
      }
    } else if (segment.stream) {
      ForBlocks<V, false, true>(segment.units, row);
    } else {
      ForBlocks<V, false, false>(segment.units, row);
    }
    Advance(at);
    Advance(part);
  }
  if (segment.stream) V::Fence();
}

// The factors of a vector of a block at one step: `kShared` reads one for all units.
template <typename V, typename N, bool kShared, typename Block, typename Storage>
typename N::Factor FactorAt(Block block, const Storage* a, int i) {
  if constexpr (kShared) return N::Shared(a);
  return N::FactorOf(block.Get(a, i));
}

template <typename V, typename N, bool kAfter, bool kShared, typename Block,
          typename Storage>
void ForwardBlock(Block block, const Factors<Storage>& factors,
                  const ForwardSegment<Storage, typename V::Element>& segment,
                  int64_t unit) {
  constexpr int kVectors = Block::kVectors;
  Reg<V> state[kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) state[i] = block.Get(segment.state + unit, i);
  const Storage* a = factors.a + (kShared ? 0 : unit);
  const Storage* b = segment.b + unit;
  Storage* h = segment.h + unit;
  const uint8_t* resets = factors.resets;
  for (int64_t t = 0; t < segment.steps; ++t) {
    const bool reset = resets != nullptr && *resets != 0;
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) {
      const int i = Block::At(n);
      const Reg<V> in = block.Get(b, i);
      if constexpr (kAfter) {
        const Reg<V> out = in + state[i];
        block.PutResult(h, i, out);
        state[i] =
            reset ? V::Set(0) : N::Mul(FactorAt<V, N, kShared>(block, a, i), out);
      } else {
        state[i] =
            reset ? in : N::MulAdd(FactorAt<V, N, kShared>(block, a, i), state[i], in);
        block.PutResult(h, i, state[i]);
      }
    }
    a += factors.a_step;
    b += segment.step;
    h += segment.step;
    if (resets != nullptr) resets += factors.reset_step;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) block.Put(segment.state + unit, i, state[i]);
}

template <typename V, typename N, bool kAfter, typename Storage>
void LinearForward(const Factors<Storage>& factors,
                   const ForwardSegment<Storage, typename V::Element>& segment) {
  ForRows<V>(factors, segment,
             [](const auto& at, const auto& part, auto block, int64_t unit) {
               if (at.shared) {
                 ForwardBlock<V, N, kAfter, true>(block, at, part, unit);
               } else {
                 ForwardBlock<V, N, kAfter, false>(block, at, part, unit);
               }
             });
}

// Adds the numbers in the first `lanes` lanes of v to *sum. The others may be NaN, for
// an infinite factor multiplies their zeros, too.
template <typename V, typename N>
void AddLanes(Reg<V> v, int64_t lanes, typename V::Element* sum) {
  for (int part = 0; part < N::kParts; ++part) {
    typename V::Element total = 0;
    for (int64_t i = part; i < lanes; i += N::kParts) total += v[i];
    sum[part] += total;
  }
}

// Where the gradient of the factors goes.
enum class Gradient { kEach, kSums, kShared };

template <typename V, typename N, Gradient kGradient, typename Block, typename Storage>
void BackwardBlock(Block block, const Factors<Storage>& factors,
                   const BackwardSegment<Storage, typename V::Element>& segment,
                   int64_t unit) {
  constexpr bool kShared = kGradient == Gradient::kShared;
  constexpr int kVectors = Block::kVectors;
  [[maybe_unused]] const int64_t lanes = kVectors > 1 ? V::kLanes : block.part;
  Reg<V> state[kVectors], sums[kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    state[i] = block.Get(segment.state + unit, i);
    sums[i] =
        kGradient == Gradient::kSums ? block.Get(segment.sums + unit, i) : V::Set(0);
  }
  const Storage* a = factors.a + (kShared ? 0 : unit);
  const Storage* h_prev = segment.h_prev + unit;
  const Storage* dh = segment.dh + unit;
  Storage* db = segment.db + unit;
  Storage* da = kGradient == Gradient::kEach ? segment.da + unit : nullptr;
  const uint8_t* resets = factors.resets;
  for (int64_t t = 0; t < segment.steps; ++t) {
    const bool reset = resets != nullptr && *resets != 0;
    Reg<V> sum = V::Set(0);
#pragma GCC unroll 8
    for (int n = 0; n < kVectors; ++n) {
      const int i = Block::At(n);
      const Reg<V> out = block.Get(dh, i) + state[i];
      block.PutResult(db, i, out);
      const auto factor = N::FactorOf(out);
      const Reg<V> h = reset ? V::Set(0) : block.Get(h_prev, i);
      if constexpr (kGradient == Gradient::kEach) {
        block.PutResult(da, i, reset ? V::Set(0) : N::Mul(factor, h));
      } else if constexpr (kGradient == Gradient::kSums) {
        if (!reset) sums[i] = N::MulAdd(factor, h, sums[i]);
      } else {
        if (!reset) sum = N::MulAdd(factor, h, sum);
      }
      state[i] = reset ? V::Set(0) : N::Mul(FactorAt<V, N, kShared>(block, a, i), out);
    }
    if constexpr (kShared) AddLanes<V, N>(sum, lanes, segment.shared + t * N::kParts);
    a += factors.a_step;
    h_prev += segment.step;
    dh += segment.step;
    db += segment.step;
    if constexpr (kGradient == Gradient::kEach) da += segment.da_step;
    if (resets != nullptr) resets += factors.reset_step;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) {
    block.Put(segment.state + unit, i, state[i]);
    if constexpr (kGradient == Gradient::kSums)
      block.Put(segment.sums + unit, i, sums[i]);
  }
}

template <typename V, typename N, typename Storage>
void LinearBackward(const Factors<Storage>& factors,
                    const BackwardSegment<Storage, typename V::Element>& segment) {
  ForRows<V>(factors, segment,
             [](const auto& at, const auto& part, auto block, int64_t unit) {
               if (at.shared) {
                 BackwardBlock<V, N, Gradient::kShared>(block, at, part, unit);
               } else if (part.sums != nullptr) {
                 BackwardBlock<V, N, Gradient::kSums>(block, at, part, unit);
               } else {
                 BackwardBlock<V, N, Gradient::kEach>(block, at, part, unit);
               }
             });
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_LINEAR_RECURRENCE_INL_H_
