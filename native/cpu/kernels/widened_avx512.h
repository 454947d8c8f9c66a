// Products of pairs of bfloat16 as products of floats.
//
// Intel's processors since Sapphire Rapids start a product of pairs in every other
// cycle, and two of floats in each: floats multiply twice as much. Pieces of a panel
// and of rows become floats that stay in the first-level cache while they multiply each
// other. Every sum has the bits that it has from pairs, of which the processor adds the
// second product first and then the first, each rounded as if it were alone.
#ifndef OSTINATO_CPU_KERNELS_WIDENED_AVX512_H_
#define OSTINATO_CPU_KERNELS_WIDENED_AVX512_H_

#include <cstdint>

#include "cpu/kernels/pairs_avx512.h"
#include "cpu/kernels/table-inl.h"

namespace ostinato::cpu {
namespace {

constexpr int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr int64_t kWidenedSteps = 32;  // pairs of a piece
constexpr int64_t kWidenedRows = 24;   // a multiple of what a tile has
// With fewer, it takes longer to widen a panel than what floats save.
constexpr int64_t kFewestWidened = 5;

// The second elements of some pairs as floats, and the first ones.
__m512 SecondOf(__m512i pairs) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
}
__m512 FirstOf(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}

// `steps` steps of a panel: of each its second elements, then its first ones.
template <int kVectors>
void WidenPanel(const BFloat16* panel, int64_t steps, float* to) {
  constexpr int64_t kStep = int64_t{kVectors} * VecF32::kLanes;
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const __m512i pairs = LoadPairs(panel + v * 2 * VecF32::kLanes);
      VecF32::Store(to + v * VecF32::kLanes, SecondOf(pairs));
      VecF32::Store(to + kStep + v * VecF32::kLanes, FirstOf(pairs));
    }
    panel += 2 * kStep;
    to += 2 * kStep;
  }
}

// The first `count` elements of a row, in the order of WidenPanel; up to a whole
// vector, others are 0.
void WidenRow(const BFloat16* row, int64_t count, float* to) {
  for (int64_t k = 0; k < count; k += VecF32::kLanes) {
    const __m512 floats = Load<VecF32>(row + k, Least(count - k, VecF32::kLanes));
    VecF32::Store(to + k, VecF32::SwapPairs(floats));
  }
}

// Kernels::product of pairs.
template <PanelShape shape>
void WidenedProduct(const BFloat16* const* a, int64_t offset, int64_t rows,
                    int64_t depth, const BFloat16* panel, const BFloat16* next,
                    const float* start, float* c, int64_t c_stride) {
  if (rows < kFewestWidened || depth == 0) {
    return Product<VecF32, BFloat16, shape>(a, offset, rows, depth, panel, next, start,
                                            c, c_stride);
  }
  constexpr int kVectors = PanelVectors(shape);
  constexpr int64_t kStep = int64_t{kVectors} * VecF32::kLanes;  // of the widened panel
  alignas(64) float wide_panel[2 * kWidenedSteps * kStep];
  alignas(64) float wide_rows[kWidenedRows][2 * kWidenedSteps];
  const float* wide_row[kWidenedRows];
  const int64_t widened = Least(rows, kWidenedRows);
  for (int64_t r = 0; r < widened; ++r) wide_row[r] = wide_rows[r];
  const int64_t steps = (depth + 1) / 2;
  Fetched fetched{reinterpret_cast<const char*>(next),
                  next != nullptr ? steps * kVectors * kCacheLine : 0};
  for (int64_t done = 0; done < steps; done += kWidenedSteps) {
    const int64_t now = Least(kWidenedSteps, steps - done);
    const int64_t count = Least(2 * now, depth - 2 * done);
    WidenPanel<kVectors>(panel + done * 2 * kStep, now, wide_panel);
    for (int64_t first = 0; first < rows; first += kWidenedRows) {
      const int64_t some = Least(kWidenedRows, rows - first);
      for (int64_t r = 0; r < some; ++r) {
        WidenRow(a[first + r] + offset + 2 * done, count, wide_rows[r]);
      }
      ProductTiles<VecF32, float, shape>(wide_row, 0, some, 2 * now, wide_panel,
                                         fetched, done == 0 ? start : nullptr,
                                         c + first * c_stride, c_stride);
    }
  }
}

constexpr KernelsBf16Pairs MakeWidenedKernels() {
  KernelsBf16Pairs made = MakeKernels<VecF32, BFloat16, BFloat16>();
  made.product[0] = WidenedProduct<PanelShape::k1>;
  made.product[1] = WidenedProduct<PanelShape::k2>;
  made.product[2] = WidenedProduct<PanelShape::k3>;
  made.product[3] = WidenedProduct<PanelShape::k4>;
  made.product[4] = WidenedProduct<PanelShape::kGruInput>;
  made.product[5] = WidenedProduct<PanelShape::kGruRecurrent>;
  return made;
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_WIDENED_AVX512_H_
