// Advantages of sequences that lie side by side, step by step, or of some sequences
// whose steps do.
#ifndef OSTINATO_CPU_LINEAR_ADVANTAGES_INL_H_
#define OSTINATO_CPU_LINEAR_ADVANTAGES_INL_H_

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cpu/kernels/memory-inl.h"
#include "cpu/linear/kernels.h"

namespace ostinato::cpu {
namespace {

// `value`, but at least 0 and at most `most`. Functions of the standard library are not
// for kernels: their copies for one instruction set would serve processors without it.
inline int64_t Within(int64_t value, int64_t most) {
  return value < 0 ? 0 : value < most ? value : most;
}

// An integer as wide as an element.
template <typename V>
using Word = std::remove_reference_t<decltype(std::declval<typename V::Bits&>()[0])>;

// The first n lanes where bytes from `at` on are not 0, as a vector of integers.
template <typename V>
auto FlagsAt(const uint8_t* bytes, int64_t at, int64_t n) {
  typedef uint8_t Bytes __attribute__((vector_size(V::kLanes)));
  Bytes given{};
  if (bytes != nullptr) std::memcpy(&given, bytes + at, Within(n, sizeof given));
  return __builtin_convertvector(given, typename V::Bits) != 0;
}

// The factor of a step that nothing passes, not even a NaN. Other factors that are 0
// are like all numbers.
template <typename V>
Reg<V> Wall() {
  return -V::Set(0);
}
template <typename V>
auto IsWall(Reg<V> factor) {
  return reinterpret_cast<typename V::Bits>(factor) ==
         reinterpret_cast<typename V::Bits>(Wall<V>());
}

// Of up to a vector of neighbours: discount * the value that follows, which is 0 where
// an episode ends, and the factor discount * lambda, a wall where one ends or is cut.
template <typename V, bool kMasks>
struct Rates {
  using T = typename V::Element;

  template <typename Count>
  Rates(const Advantages<T>& c, int64_t at, Count n, Reg<V> after) {
    const Reg<V> discount =
        c.one_discount ? V::Set(*c.discounts) : Load<V>(c.discounts + at, n);
    const Reg<V> lambda =
        c.one_lambda ? V::Set(*c.lambdas) : Load<V>(c.lambdas + at, n);
    followed = discount * after;
    factor = discount * lambda;
    if constexpr (kMasks) {
      const auto end = FlagsAt<V>(c.ends, at, n);
      followed = end ? V::Set(0) : followed;
      factor = (end | FlagsAt<V>(c.cuts, at, n)) ? Wall<V>() : factor;
    }
  }
  Reg<V> followed, factor;
};

// One step of up to a vector of sequences from `i` on; returns the advantages.
template <typename V, bool kMasks, typename Count>
Reg<V> EstimateStep(const Advantages<typename V::Element>& c, int64_t step, int64_t i,
                    Count n, const Word<V>* lengths, Reg<V> next_advantage) {
  using Bits = typename V::Bits;
  const Reg<V> zero = V::Set(0);
  const Bits now = Bits{} + static_cast<Word<V>>(step);
  const int64_t at = step * c.batch + i;
  Bits length;
  std::memcpy(&length, lengths, sizeof length);
  const auto inside = now < length, followed = now + 1 < length;
  const Reg<V> last = Load<V>(c.last + i, n);
  const Reg<V> next = step + 1 < c.steps ? Load<V>(c.values + at + c.batch, n) : last;
  const Reg<V> after = followed ? next : last, value = Load<V>(c.values + at, n);
  const Rates<V, kMasks> rates(c, at, n, after);
  const Reg<V> delta = Load<V>(c.rewards + at, n) - value + rates.followed;
  Reg<V> sum = V::MulAdd(rates.factor, next_advantage, delta);
  if constexpr (kMasks) sum = IsWall<V>(rates.factor) ? delta : sum;
  if constexpr (kMasks) sum = FlagsAt<V>(c.cuts, at, n) ? zero : sum;
  const Reg<V> advantage = inside ? sum : zero;
  Store<V>(c.advantages + at, advantage, n);
  Store<V>(c.returns + at, inside ? advantage + value : zero, n);
  return advantage;
}

// A count that the compiler knows.
template <int64_t kCount>
struct Constant {
  constexpr operator int64_t() const { return kCount; }
};

// 0, 1, 2 ...
template <typename V>
typename V::Bits Counted() {
  typename V::Bits counted{};
  for (int i = 0; i < V::kLanes; ++i) counted[i] = i;
  return counted;
}

// The advantage of a step alone, and the factor of the next one, of up to a vector of
// steps of one sequence, of which the first is `step`.
template <typename V, bool kMasks>
struct Deltas {
  using T = typename V::Element;

  template <typename Count>
  Deltas(const Advantages<T>& c, int64_t sequence, int64_t step, Count n,
         Word<V> length) {
    using Bits = typename V::Bits;
    const Reg<V> zero = V::Set(0);
    const int64_t at = sequence * c.steps + step;
    const Bits now = Counted<V>() + static_cast<Word<V>>(step);
    const auto inside = now < length, last = now + 1 == length;
    const int64_t followed = Within(c.steps - step - 1, n);
    Reg<V> after = followed > 0 ? Load<V>(c.values + at + 1, followed) : zero;
    after = last ? V::Set(c.last[sequence]) : after;
    const Rates<V, kMasks> rates(c, at, n, after);
    const Reg<V> alone =
        Load<V>(c.rewards + at, n) - Load<V>(c.values + at, n) + rates.followed;
    delta = inside ? alone : zero;
    factor = inside ? rates.factor : zero;
    if constexpr (kMasks) delta = FlagsAt<V>(c.cuts, at, n) ? zero : delta;
  }
  Reg<V> delta, factor;
};

// Up to a vector of steps of up to a vector of sequences whose steps lie side by side.
// They are turned, so that a vector has one step of all sequences, and turned back.
template <typename V, bool kMasks, typename Count, typename T = typename V::Element>
Reg<V> EstimateSquare(const Advantages<T>& c, int64_t step, Count n, int64_t first,
                      int64_t count, const Word<V>* lengths, Reg<V> sum) {
  const Reg<V> zero = V::Set(0);
  Reg<V> sums[V::kLanes], factors[V::kLanes];
  for (int64_t i = 0; i < V::kLanes; ++i) sums[i] = factors[i] = zero;
  for (int64_t i = 0; i < count; ++i) {
    const Deltas<V, kMasks> made(c, first + i, step, n, lengths[i]);
    sums[i] = made.delta;
    factors[i] = made.factor;
  }
  V::Transpose(sums);
  V::Transpose(factors);
  for (int64_t t = n - 1; t >= 0; --t) {
    sum = V::MulAdd(factors[t], sum, sums[t]);
    if constexpr (kMasks) sum = IsWall<V>(factors[t]) ? sums[t] : sum;
    sums[t] = sum;
  }
  V::Transpose(sums);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = (first + i) * c.steps + step;
    const auto inside =
        Counted<V>() + static_cast<Word<V>>(step) < static_cast<Word<V>>(lengths[i]);
    Store<V>(c.advantages + at, sums[i], n);
    Store<V>(c.returns + at, inside ? sums[i] + Load<V>(c.values + at, n) : zero, n);
  }
  return sum;
}

template <typename V, bool kMasks, typename T = typename V::Element>
void EstimateAll(const Advantages<T>& c, int64_t first, int64_t count) {
  constexpr int64_t kPlaces = kMostSequences, kLanes = V::kLanes;
  static_assert(kPlaces % kLanes == 0);
  Word<V> lengths[kPlaces] = {};
  for (int64_t i = 0; i < count; ++i) {
    lengths[i] = c.lengths == nullptr ? c.steps : Within(c.lengths[first + i], c.steps);
  }
  if (c.time_major && count <= kLanes) {
    Reg<V> next = V::Set(0);
    for (int64_t t = c.steps - 1; t >= 0; --t) {
      next = EstimateStep<V, kMasks>(c, t, first, count, lengths, next);
    }
    return;
  }
  if (c.time_major) {
    const T nothing[kPlaces] = {};
    const T* next = nothing;
    const int64_t whole = count / kLanes * kLanes;
    for (int64_t t = c.steps - 1; t >= 0; --t) {
      const auto estimate = [&](int64_t i, auto n) {
        EstimateStep<V, kMasks>(c, t, first + i, n, lengths + i, Load<V>(next + i, n));
      };
      if (whole < count) estimate(whole, count - whole);
      for (int64_t i = whole - kLanes; i >= 0; i -= kLanes) {
        estimate(i, Constant<kLanes>{});
      }
      next = c.advantages + t * c.batch + first;
    }
    return;
  }
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t some = Within(count - i, kLanes), rest = c.steps % kLanes;
    Reg<V> sum = V::Set(0);
    const auto square = [&](int64_t step, auto n) {
      sum = EstimateSquare<V, kMasks>(c, step, n, first + i, some, lengths + i, sum);
    };
    if (rest > 0) square(c.steps - rest, rest);
    for (int64_t step = c.steps - rest - kLanes; step >= 0; step -= kLanes) {
      square(step, Constant<kLanes>{});
    }
  }
}

template <typename V, typename T = typename V::Element>
void EstimateAdvantages(const Advantages<T>& c, int64_t first, int64_t count) {
  if (c.ends != nullptr || c.cuts != nullptr) {
    EstimateAll<V, true>(c, first, count);
  } else {
    EstimateAll<V, false>(c, first, count);
  }
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_LINEAR_ADVANTAGES_INL_H_
