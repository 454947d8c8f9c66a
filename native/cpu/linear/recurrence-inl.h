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

// Vectors of one step that are in registers at once. With one vector, it may be a part
// of one: the first `part` lanes.
template <typename V, int count>
struct Block {
  int64_t part;

  template <typename Storage>
  Reg<V> Get(const Storage* p, int i) const {
    if constexpr (count > 1) return Load<V>(p + i * V::kLanes);
    return Load<V>(p, part);
  }
  template <typename Storage>
  void Put(Storage* p, int i, Reg<V> v) const {
    if constexpr (count > 1) {
      Store<V>(p + i * V::kLanes, v);
    } else {
      Store<V>(p, v, part);
    }
  }
};

// Calls body(block, unit) for blocks of 8, 4 and 2 vectors, and for single ones.
template <typename V, typename Body>
void ForBlocks(int64_t units, const Body& body) {
  constexpr int64_t V1 = V::kLanes;
  int64_t unit = 0;
  for (; units - unit >= 8 * V1; unit += 8 * V1) body(Block<V, 8>{V1}, unit);
  if (units - unit >= 4 * V1) {
    body(Block<V, 4>{V1}, unit);
    unit += 4 * V1;
  }
  if (units - unit >= 2 * V1) {
    body(Block<V, 2>{V1}, unit);
    unit += 2 * V1;
  }
  for (; unit < units; unit += V1) {
    body(Block<V, 1>{units - unit < V1 ? units - unit : V1}, unit);
  }
}

template <int count, typename V>
constexpr int CountOf(Block<V, count>) {
  return count;
}

// The factors of the vectors of a block at one step: `kShared` reads one for all.
template <typename V, typename N, bool kShared, int count, typename Storage>
typename N::Factor FactorAt(Block<V, count> block, const Storage* a, int i) {
  if constexpr (kShared) return N::Shared(a);
  return N::FactorOf(block.Get(a, i));
}

template <typename V, typename N, bool kAfter, bool kShared, int count,
          typename Storage>
void ForwardBlock(Block<V, count> block, const Factors<Storage>& factors,
                  const ForwardSegment<Storage, typename V::Element>& segment,
                  int64_t unit) {
  Reg<V> state[count];
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) state[i] = block.Get(segment.state + unit, i);
  const Storage* a = factors.a + (kShared ? 0 : unit);
  const Storage* b = segment.b + unit;
  Storage* h = segment.h + unit;
  const uint8_t* resets = factors.resets;
  for (int64_t t = 0; t < segment.steps; ++t) {
    const bool reset = resets != nullptr && *resets != 0;
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      const Reg<V> in = block.Get(b, i);
      if constexpr (kAfter) {
        const Reg<V> out = in + state[i];
        block.Put(h, i, out);
        state[i] =
            reset ? V::Set(0) : N::Mul(FactorAt<V, N, kShared>(block, a, i), out);
      } else {
        state[i] =
            reset ? in : N::MulAdd(FactorAt<V, N, kShared>(block, a, i), state[i], in);
        block.Put(h, i, state[i]);
      }
    }
    a += factors.a_step;
    b += segment.step;
    h += segment.step;
    if (resets != nullptr) resets += factors.reset_step;
  }
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) block.Put(segment.state + unit, i, state[i]);
}

template <typename V, typename N, bool kAfter, typename Storage>
void LinearForward(const Factors<Storage>& factors,
                   const ForwardSegment<Storage, typename V::Element>& segment) {
  ForBlocks<V>(segment.units, [&](auto block, int64_t unit) {
    if (factors.shared) {
      ForwardBlock<V, N, kAfter, true>(block, factors, segment, unit);
    } else {
      ForwardBlock<V, N, kAfter, false>(block, factors, segment, unit);
    }
  });
}

// Adds the numbers in the lanes of v to *sum.
template <typename V, typename N>
void AddLanes(Reg<V> v, typename V::Element* sum) {
  for (int part = 0; part < N::kParts; ++part) {
    typename V::Element total = 0;
    for (int i = part; i < V::kLanes; i += N::kParts) total += v[i];
    sum[part] += total;
  }
}

// Where the gradient of the factors goes.
enum class Gradient { kEach, kSums, kShared };

template <typename V, typename N, Gradient kGradient, int count, typename Storage>
void BackwardBlock(Block<V, count> block, const Factors<Storage>& factors,
                   const BackwardSegment<Storage, typename V::Element>& segment,
                   int64_t unit) {
  constexpr bool kShared = kGradient == Gradient::kShared;
  Reg<V> state[count], sums[count];
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) {
    state[i] = block.Get(segment.state + unit, i);
    sums[i] = V::Set(0);
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
    for (int i = 0; i < count; ++i) {
      const Reg<V> out = block.Get(dh, i) + state[i];
      block.Put(db, i, out);
      const auto factor = N::FactorOf(out);
      const Reg<V> h = reset ? V::Set(0) : block.Get(h_prev, i);
      if constexpr (kGradient == Gradient::kEach) {
        block.Put(da, i, reset ? V::Set(0) : N::Mul(factor, h));
      } else if constexpr (kGradient == Gradient::kSums) {
        if (!reset) sums[i] = N::MulAdd(factor, h, sums[i]);
      } else {
        if (!reset) sum = N::MulAdd(factor, h, sum);
      }
      state[i] = reset ? V::Set(0) : N::Mul(FactorAt<V, N, kShared>(block, a, i), out);
    }
    if constexpr (kShared) AddLanes<V, N>(sum, segment.shared + t * N::kParts);
    a += factors.a_step;
    h_prev += segment.step;
    dh += segment.step;
    db += segment.step;
    if constexpr (kGradient == Gradient::kEach) da += segment.da_step;
    if (resets != nullptr) resets += factors.reset_step;
  }
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) {
    block.Put(segment.state + unit, i, state[i]);
    if constexpr (kGradient == Gradient::kSums) {
      block.Put(segment.sums + unit, i, block.Get(segment.sums + unit, i) + sums[i]);
    }
  }
}

template <typename V, typename N, typename Storage>
void LinearBackward(const Factors<Storage>& factors,
                    const BackwardSegment<Storage, typename V::Element>& segment) {
  ForBlocks<V>(segment.units, [&](auto block, int64_t unit) {
    if (factors.shared) {
      BackwardBlock<V, N, Gradient::kShared>(block, factors, segment, unit);
    } else if (segment.sums != nullptr) {
      BackwardBlock<V, N, Gradient::kSums>(block, factors, segment, unit);
    } else {
      BackwardBlock<V, N, Gradient::kEach>(block, factors, segment, unit);
    }
  });
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_LINEAR_RECURRENCE_INL_H_
