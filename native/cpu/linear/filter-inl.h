// Recursive filters: y_t = sum over k <= n of b_k x_{t-k} - sum over k >= 1 of
// a_k y_{t-k}, with nothing before the first step.
#ifndef OSTINATO_CPU_LINEAR_FILTER_INL_H_
#define OSTINATO_CPU_LINEAR_FILTER_INL_H_

#include <cstdint>

#include "cpu/kernels/memory-inl.h"
#include "cpu/linear/kernels.h"

namespace ostinato::cpu {
namespace {

// One number in the place of a vector V. It rounds as often as V does: the threads
// decide which channels are alone, and bits must not depend on them.
template <typename V>
struct Scalar {
  using Type = typename V::Element;
  static Type MulAdd(Type a, Type b, Type c) {
    if constexpr (!V::kFused) {
      return a * b + c;
    } else if constexpr (sizeof(Type) == 4) {
      return __builtin_fmaf(a, b, c);
    } else {
      return __builtin_fma(a, b, c);
    }
  }
};

// The steps of one channel, or of a channel in each lane. y_{t-1} comes last into the
// sum, so that a step waits for one multiply-add.
template <typename V, int order>
struct FilterState {
  using R = typename V::Type;

  R b[order + 1], a[order], x[order] = {}, y[order] = {};

  R Step(R in) {
    R sum = b[0] * in;
#pragma GCC unroll 8
    for (int k = order; k > 0; --k) sum = V::MulAdd(b[k], x[k - 1], sum);
#pragma GCC unroll 8
    for (int k = order; k > 0; --k) sum = V::MulAdd(a[k - 1], y[k - 1], sum);
#pragma GCC unroll 8
    for (int k = order - 1; k > 0; --k) {
      x[k] = x[k - 1];
      y[k] = y[k - 1];
    }
    x[0] = in;
    y[0] = sum;
    return sum;
  }
};

template <typename V, int order, typename T = typename V::Element>
void FilterOne(const FilterSegment<T>& f, int64_t channel) {
  FilterState<Scalar<V>, order> state;
  const T* b = f.b + channel * f.b_stride;
  const T* a = f.a + channel * f.a_stride;
  for (int k = 0; k <= order; ++k) state.b[k] = b[k];
  for (int k = 0; k < order; ++k) state.a[k] = -a[k];
  const int64_t first = f.reverse ? f.steps - 1 : 0, step = f.reverse ? -1 : 1;
  const T* x = f.x + channel * f.steps + first;
  T* y = f.y + channel * f.steps + first;
  for (int64_t t = 0; t < f.steps; ++t) {
    *y = state.Step(*x);
    x += step;
    y += step;
  }
}

// Channels in the lanes: blocks of as many steps are transposed.
template <typename V, int order>
void FilterLanes(const FilterSegment<typename V::Element>& f, int64_t channel,
                 int64_t channels) {
  using T = typename V::Element;
  constexpr int64_t kLanes = V::kLanes;
  FilterState<V, order> state;
  const auto gather = [&](const T* p, int64_t stride) {
    T lanes[kLanes] = {};
    for (int64_t i = 0; i < channels; ++i) lanes[i] = p[(channel + i) * stride];
    return V::Load(lanes);
  };
  for (int k = 0; k <= order; ++k) state.b[k] = gather(f.b + k, f.b_stride);
  for (int k = 0; k < order; ++k) state.a[k] = -gather(f.a + k, f.a_stride);
  const T* x = f.x + channel * f.steps;
  T* y = f.y + channel * f.steps;
  for (int64_t done = 0; done < f.steps; done += kLanes) {
    const int64_t left = f.steps - done, count = left < kLanes ? left : kLanes;
    const int64_t t = f.reverse ? left - count : done;
    Reg<V> rows[kLanes] = {};
    for (int64_t i = 0; i < channels; ++i)
      rows[i] = Load<V>(x + i * f.steps + t, count);
    V::Transpose(rows);
    for (int64_t k = 0; k < count; ++k) {
      Reg<V>& row = rows[f.reverse ? count - 1 - k : k];
      row = state.Step(row);
    }
    V::Transpose(rows);
    for (int64_t i = 0; i < channels; ++i)
      Store<V>(y + i * f.steps + t, rows[i], count);
  }
}

template <typename V, int order>
void FilterOfOrder(const FilterSegment<typename V::Element>& f, int64_t channel,
                   int64_t channels) {
  if (channels > 2) return FilterLanes<V, order>(f, channel, channels);
  for (int64_t i = 0; i < channels; ++i) FilterOne<V, order>(f, channel + i);
}

template <typename V>
void Filter(const FilterSegment<typename V::Element>& f, int64_t channel,
            int64_t channels) {
  switch (f.order) {
    case 1:
      return FilterOfOrder<V, 1>(f, channel, channels);
    case 2:
      return FilterOfOrder<V, 2>(f, channel, channels);
    case 3:
      return FilterOfOrder<V, 3>(f, channel, channels);
    case 4:
      return FilterOfOrder<V, 4>(f, channel, channels);
    case 5:
      return FilterOfOrder<V, 5>(f, channel, channels);
    case 6:
      return FilterOfOrder<V, 6>(f, channel, channels);
    case 7:
      return FilterOfOrder<V, 7>(f, channel, channels);
    default:
      return FilterOfOrder<V, 8>(f, channel, channels);
  }
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_LINEAR_FILTER_INL_H_
