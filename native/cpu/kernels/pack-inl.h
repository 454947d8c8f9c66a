// Panels from matrices, transposes, and products with matrices that are not packed.
#ifndef OSTINATO_CPU_KERNELS_PACK_INL_H_
#define OSTINATO_CPU_KERNELS_PACK_INL_H_

#include <cstdint>

#include "cpu/kernels/product-inl.h"

namespace ostinato::cpu {
namespace {

constexpr int64_t AtMost(int64_t n, int64_t limit) { return n < limit ? n : limit; }

// Kernels::add_rows.
template <typename V, typename Operand>
void AddRows(const Operand* const* a, int64_t first, int64_t step, int64_t count,
             int64_t rows, int64_t vectors, const typename V::Element* start,
             typename V::Element* c, int64_t c_stride) {
  constexpr int64_t kAhead = 8;  // rows far apart are fetched before they are needed
  for (int64_t r = 0; r < rows; ++r, c += c_stride) {
    if (r + kAhead < rows) __builtin_prefetch(a[r + kAhead] + first);
    for (int64_t v = 0; v < 4; ++v) {
      Reg<V> sum = V::Load(start + v * V::kLanes);
      if (v < vectors) sum += Load<V>(a[r] + first + v * step, count - v * step);
      V::Store(c + v * V::kLanes, sum);
    }
  }
}

// Kernels::add_scaled_rows.
template <typename V, typename Storage, typename Operand>
void AddScaledRows(const Operand* const* a, int64_t first, int64_t step, int64_t count,
                   int64_t rows, int64_t vectors, bool gru, const Storage* w,
                   int64_t w_stride, typename V::Element* c, int64_t c_stride) {
  for (int64_t v = 0; v < vectors; ++v) {
    const int64_t units = count - v * step;
    const Reg<V> scale = Load<V>(w + v * w_stride, units);
    auto* to = c + (gru && v == 2 ? 3 : v) * V::kLanes;
    for (int64_t r = 0; r < rows; ++r, to += c_stride) {
      const Reg<V> state = Load<V>(a[r] + first + v * step, units);
      V::Store(to, V::MulAdd(state, scale, V::Load(to)));
    }
  }
}

// The moves of pack_rows and pack_columns: one lane of a vector holds one k of a row,
// converted.
template <typename V, typename Storage, typename Operand>
struct Packer {
  static constexpr int kPairs = 1;
  static Reg<V> LoadSteps(const Storage* p, int64_t elements) {
    return Load<V>(p, elements);
  }
  static void StoreStep(Operand* p, Reg<V> v) { V::Store(p, v); }
  // Loads one k of up to n lanes.
  static Reg<V> LoadLanes(const Storage* const* rows, int64_t, int64_t at, int64_t n) {
    return Load<V>(rows[0] + at, n);
  }
};

// Kernels::pack_rows: square blocks, transposed in registers.
template <typename V, typename Storage, typename Operand>
void PackRows(const Storage* src, int64_t stride, int64_t lanes, int64_t depth,
              Operand* panel, int64_t panel_stride) {
  using P = Packer<V, Storage, Operand>;
  constexpr int64_t kBlock = V::kLanes * P::kPairs;
  for (int64_t k = 0; k < depth; k += kBlock) {
    const int64_t elements = AtMost(depth - k, kBlock);
    Reg<V> block[V::kLanes];
    for (int n = 0; n < V::kLanes; ++n) {
      block[n] = n < lanes ? P::LoadSteps(src + n * stride + k, elements) : Reg<V>{};
    }
    V::Transpose(block);
    const int64_t steps = (elements + P::kPairs - 1) / P::kPairs;
    for (int64_t i = 0; i < steps; ++i) {
      P::StoreStep(panel, block[i]);
      panel += panel_stride;
    }
  }
}

// Kernels::pack_columns.
template <typename V, typename Storage, typename Operand>
void PackColumns(const Storage* const* rows, int64_t offset, int64_t depth,
                 int64_t columns, Operand* panel) {
  using P = Packer<V, Storage, Operand>;
  for (int64_t k = 0; k < depth; k += P::kPairs) {
    for (int64_t n = 0; n < columns; n += V::kLanes) {
      P::StoreStep(panel, P::LoadLanes(rows + k, depth - k, offset + n, columns - n));
      panel += V::kLanes * P::kPairs;
    }
  }
}

// Kernels::transpose.
template <typename V, typename Operand>
void TransposeMatrix(const Operand* src, int64_t stride, int64_t rows, int64_t columns,
                     Operand* dst, int64_t dst_stride) {
  for (int64_t n = 0; n < rows; n += V::kLanes) {
    const int64_t height = AtMost(rows - n, V::kLanes);
    for (int64_t k = 0; k < columns; k += V::kLanes) {
      const int64_t width = AtMost(columns - k, V::kLanes);
      Reg<V> block[V::kLanes];
      for (int i = 0; i < V::kLanes; ++i) {
        block[i] = i < height ? Load<V>(src + (n + i) * stride + k, width) : Reg<V>{};
      }
      V::Transpose(block);
      for (int64_t i = 0; i < width; ++i) {
        Store<V>(dst + (k + i) * dst_stride + n, block[i], height);
      }
    }
  }
}

// How `dot` reads kElements of a row of Storage, or of the vector of Operand, at once.
template <typename V, typename Storage, typename Operand>
struct DotFactor {
  static constexpr int kElements = V::kLanes;
  using Type = Reg<V>;

  template <typename T>
  static Type LoadFirst(const T* p, int64_t n = kElements) {
    return Load<V>(p, n);
  }
  static Reg<V> MulAdd(Type a, Type b, Reg<V> c) { return V::MulAdd(a, b, c); }
};

// Kernels::dot. One vector of sums for every lane of the result, added up at the end.
template <typename V, typename Storage, typename Operand>
void Dot(const Storage* w, int64_t stride, int64_t lanes, int64_t depth,
         const Operand* a, typename V::Element* out) {
  using F = DotFactor<V, Storage, Operand>;
  // Rows read side by side: enough sums to keep the units busy, and no more streams of
  // memory than processors follow.
  constexpr int kRows = V::kLanes < 4 ? V::kLanes : 4;
  const int64_t whole = depth - depth % F::kElements;
  Reg<V> sums[V::kLanes] = {};
  for (int64_t first = 0; first < lanes; first += kRows) {
    const Storage* rows[kRows];
    Reg<V> group[kRows];
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      // Past the last row, that row again: something that may be read.
      rows[i] = w + AtMost(first + i, lanes - 1) * stride;
      group[i] = Reg<V>{};
    }
    for (int64_t k = 0; k < whole; k += F::kElements) {
      const auto factor = F::LoadFirst(a + k);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        group[i] = F::MulAdd(F::LoadFirst(rows[i] + k), factor, group[i]);
      }
    }
    if (whole < depth) {
      const auto factor = F::LoadFirst(a + whole, depth - whole);
#pragma GCC unroll 4
      for (int i = 0; i < kRows; ++i) {
        const auto last = F::LoadFirst(rows[i] + whole, depth - whole);
        group[i] = F::MulAdd(last, factor, group[i]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) sums[first + i] = group[i];
  }
  V::Transpose(sums);
  Reg<V> total = Load<V>(out, lanes);
  for (const Reg<V>& sum : sums) total += sum;
  Store<V>(out, total, lanes);
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_PACK_INL_H_
