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

// Steps of some sequences at a time: what they need stays in the first-level cache.
constexpr int64_t kMostSteps = 128;

// `value`, but at least 0 and at most `most`. Functions of the standard library are not
// for kernels: their copies for one instruction set would serve processors without it.
inline int64_t Within(int64_t value, int64_t most) {
  return value < 0 ? 0 : value < most ? value : most;
}

// An integer as wide as an element.
template <typename V>
using Word = std::remove_reference_t<decltype(std::declval<typename V::Bits&>()[0])>;

// The first n lanes where bytes are not 0, as a vector of integers.
template <typename V>
auto Flags(const uint8_t* bytes, int64_t n) {
  typedef uint8_t Bytes __attribute__((vector_size(V::kLanes)));
  Bytes given{};
  if (bytes != nullptr) std::memcpy(&given, bytes, Within(n, sizeof given));
  return __builtin_convertvector(given, typename V::Bits) != 0;
}

// The discount and the factor lambda * discount of up to a vector of neighbours.
template <typename V>
struct Rates {
  using T = typename V::Element;

  Rates(const Advantages<T>& c, int64_t at, int64_t n) {
    const Reg<V> given =
        c.one_discount ? V::Set(*c.discounts) : Load<V>(c.discounts + at, n);
    const Reg<V> lambda =
        c.one_lambda ? V::Set(*c.lambdas) : Load<V>(c.lambdas + at, n);
    const auto ends = Flags<V>(c.ends == nullptr ? nullptr : c.ends + at, n);
    discount = ends ? V::Set(0) : given;
    factor = discount * lambda;
  }
  Reg<V> discount, factor;
};

// One step of `count` sequences. Nothing passes where the factor is 0, not even a NaN.
template <typename V>
void EstimateStep(const Advantages<typename V::Element>& c, int64_t step, int64_t first,
                  int64_t count, const Word<V>* lengths,
                  const typename V::Element* next_advantages) {
  using Bits = typename V::Bits;
  const Reg<V> zero = V::Set(0);
  const Bits now = Bits{} + static_cast<Word<V>>(step);
  for (int64_t i = 0; i < count; i += V::kLanes) {
    const int64_t n = count - i, at = step * c.batch + first + i;
    Bits length;
    std::memcpy(&length, lengths + i, sizeof length);
    const auto inside = now < length, followed = now + 1 < length;
    const Reg<V> last = Load<V>(c.last + first + i, n);
    const Reg<V> next = step + 1 < c.steps ? Load<V>(c.values + at + c.batch, n) : last;
    const Reg<V> after = followed ? next : last, value = Load<V>(c.values + at, n);
    const Rates<V> rates(c, at, n);
    const Reg<V> passed = rates.factor * Load<V>(next_advantages + i, n);
    const Reg<V> delta =
        V::MulAdd(rates.discount, after, Load<V>(c.rewards + at, n) - value);
    const Reg<V> sum = delta + (rates.factor == zero ? zero : passed);
    const auto cut = Flags<V>(c.cuts == nullptr ? nullptr : c.cuts + at, n);
    const Reg<V> advantage = cut ? zero : (inside ? sum : zero);
    Store<V>(c.advantages + at, advantage, n);
    Store<V>(c.returns + at, inside ? advantage + value : zero, n);
  }
}

// Puts the advantage of a step alone, and the factor of the next one, of `count` steps
// of one sequence into the places of advantages and returns.
template <typename V>
void PutDeltas(const Advantages<typename V::Element>& c, int64_t at, int64_t count,
               const typename V::Element* after) {
  const Reg<V> zero = V::Set(0);
  for (const int64_t end = at + count; at < end; at += V::kLanes, after += V::kLanes) {
    const int64_t n = end - at;
    const Rates<V> rates(c, at, n);
    const Reg<V> delta =
        V::MulAdd(rates.discount, Load<V>(after, n),
                  Load<V>(c.rewards + at, n) - Load<V>(c.values + at, n));
    const auto cut = Flags<V>(c.cuts == nullptr ? nullptr : c.cuts + at, n);
    Store<V>(c.advantages + at, cut ? zero : delta, n);
    Store<V>(c.returns + at, cut ? zero : rates.factor, n);
  }
}

// Adds up, from the last of some steps to the first, in sequences `stride` apart. A sum
// waits for the one before it, and not for those of other sequences.
template <int sequences, typename T>
void AddUp(T* deltas, const T* factors, int64_t stride, int64_t count, T* carry) {
  T sums[sequences];
  for (int s = 0; s < sequences; ++s) sums[s] = carry[s];
  for (int64_t t = count - 1; t >= 0; --t) {
#pragma GCC unroll 4
    for (int s = 0; s < sequences; ++s) {
      const T factor = factors[s * stride + t], delta = deltas[s * stride + t];
      sums[s] = factor == 0 ? delta : delta + factor * sums[s];
      deltas[s * stride + t] = sums[s];
    }
  }
  for (int s = 0; s < sequences; ++s) carry[s] = sums[s];
}

// Some steps, from `begin` on, of sequences whose steps lie side by side.
template <typename V, typename T = typename V::Element>
void EstimateSteps(const Advantages<T>& c, int64_t begin, int64_t end, int64_t first,
                   int64_t count, const Word<V>* lengths, T* carry) {
  const auto place = [&](int64_t i) { return (first + i) * c.steps + begin; };
  const auto inside = [&](int64_t i) {
    return Within(static_cast<int64_t>(lengths[i]) - begin, end - begin);
  };
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = place(i), steps = inside(i);
    const bool last = steps > 0 && begin + steps == static_cast<int64_t>(lengths[i]);
    PutDeltas<V>(c, at, steps - last, c.values + at + 1);
    if (last) PutDeltas<V>(c, at + steps - 1, 1, c.last + first + i);
    for (int64_t t = at + steps; t < at + end - begin; ++t) {
      c.advantages[t] = c.returns[t] = 0;
    }
  }
  constexpr int kTogether = 4;
  const auto add_up = [&](auto add, int64_t i) {
    add(c.advantages + place(i), c.returns + place(i), c.steps, end - begin, carry + i);
  };
  int64_t i = 0;
  for (; i + kTogether <= count; i += kTogether) add_up(AddUp<kTogether, T>, i);
  for (; i < count; ++i) add_up(AddUp<1, T>, i);
  for (i = 0; i < count; ++i) {
    for (int64_t at = place(i), past = at + inside(i); at < past; at += V::kLanes) {
      const int64_t n = past - at;
      const Reg<V> advantage = Load<V>(c.advantages + at, n);
      Store<V>(c.returns + at, advantage + Load<V>(c.values + at, n), n);
    }
  }
}

template <typename V, typename T = typename V::Element>
void EstimateAdvantages(const Advantages<T>& c, int64_t first, int64_t count) {
  constexpr int64_t kPlaces = kMostSequences;
  static_assert(kPlaces % V::kLanes == 0);
  Word<V> lengths[kPlaces] = {};
  for (int64_t i = 0; i < count; ++i) {
    lengths[i] = c.lengths == nullptr ? c.steps : Within(c.lengths[first + i], c.steps);
  }
  T carry[kPlaces] = {};
  if (c.time_major) {
    const T* next = carry;
    for (int64_t t = c.steps - 1; t >= 0; --t) {
      EstimateStep<V>(c, t, first, count, lengths, next);
      next = c.advantages + t * c.batch + first;
    }
    return;
  }
  for (int64_t end = c.steps; end > 0;) {
    const int64_t begin = end - Within(end, kMostSteps);
    EstimateSteps<V>(c, begin, end, first, count, lengths, carry);
    end = begin;
  }
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_LINEAR_ADVANTAGES_INL_H_
