// Products of rows with a packed panel.
#ifndef OSTINATO_CPU_KERNELS_PRODUCT_INL_H_
#define OSTINATO_CPU_KERNELS_PRODUCT_INL_H_

#include <cstdint>

#include "cpu/kernels/memory-inl.h"
#include "cpu/runtime/caches.h"

namespace ostinato::cpu {
namespace {

// How a product reads operands: kPairs elements of a row at a time against one vector
// of the panel. Specialised where the processor multiplies pairs.
template <typename V, typename Operand>
struct Factor {
  static constexpr int kPairs = 1;
  using Type = Reg<V>;

  static Type Broadcast(const Operand* p) { return V::Set(*p); }
  static Type LoadVector(const Operand* p) { return V::Load(p); }
  static Reg<V> MulAdd(Type a, Type b, Reg<V> c) { return V::MulAdd(a, b, c); }
};

// Loads one vector of the panel for all rows of a tile. Left alone, compilers make the
// load a part of every instruction that uses it, and tiles of 2 and 3 rows then wait
// for loads.
template <typename F, typename Operand>
typename F::Type LoadOnce(const Operand* p) {
  typename F::Type v = F::LoadVector(p);
#if defined(__x86_64__)
  asm("" : "+v"(v));
#endif
  return v;
}

constexpr bool IsGru(PanelShape shape) {
  return shape == PanelShape::kGruInput || shape == PanelShape::kGruRecurrent;
}

constexpr int PanelVectors(PanelShape shape) {
  return IsGru(shape) ? 3 : static_cast<int>(shape) + 1;
}

// Which vector of the accumulator's row the panel's vector v feeds.
constexpr int AccumVector(PanelShape shape, int v) {
  return shape == PanelShape::kGruRecurrent && v == 2 ? 3 : v;
}

// A tile of so many rows multiplies for longer than it loads, and fetches a cache line
// of the next panel in each of its steps.
constexpr int kRowsThatFetch = 4;
constexpr int64_t kCacheLine = 64;

// How many rows a tile has whose panel has so many vectors.
template <typename V>
constexpr int TileRows(int vectors) {
  constexpr int kMost = 6;
  return V::kRegisterSums / vectors < kMost ? V::kRegisterSums / vectors : kMost;
}

// The sums of a tile stay in registers from the first step to the last. A function of
// its own, as compilers spill them where the loop is inlined next to other code.
template <typename V, typename Operand, PanelShape shape, int kRows>
[[gnu::noinline]] void ProductTile(const Operand* const* a, int64_t offset,
                                   int64_t depth, const Operand* panel,
                                   const char* next, const typename V::Element* start,
                                   typename V::Element* c, int64_t c_stride) {
  using F = Factor<V, Operand>;
  constexpr int kVectors = PanelVectors(shape);
  constexpr int kStep = F::kPairs * V::kLanes;

  const bool starts = shape != PanelShape::kGruRecurrent && start != nullptr;
  const typename V::Element* from = starts ? start : c;
  const int64_t from_stride = starts ? 0 : c_stride;
  const Operand* rows[kRows];
  Reg<V> sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    rows[r] = a[r] + offset;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = V::Load(from + AccumVector(shape, v) * V::kLanes);
    }
    from += from_stride;
  }

  const int64_t whole = depth - depth % F::kPairs;
  const int64_t next_step = next != nullptr ? kCacheLine : 0;
  if (next == nullptr) next = reinterpret_cast<const char*>(panel);
  for (int64_t k = 0; k < whole; k += F::kPairs) {
    if constexpr (kRows >= kRowsThatFetch) {
      __builtin_prefetch(next, 0, 2);  // to be read, from the second level
      next += next_step;
    }
    if constexpr (kRows * kVectors + kRows + 1 <= V::kRegisters) {
      typename F::Type factors[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) factors[r] = F::Broadcast(rows[r] + k);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Operand* p = panel + v * kStep;
        const auto vector = kRows > 1 ? LoadOnce<F>(p) : F::LoadVector(p);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          sums[r][v] = F::MulAdd(factors[r], vector, sums[r][v]);
        }
      }
    } else {  // with more rows than vectors, these are what registers can hold
      typename F::Type vectors[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) vectors[v] = LoadOnce<F>(panel + v * kStep);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto factor = F::Broadcast(rows[r] + k);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sums[r][v] = F::MulAdd(factor, vectors[v], sums[r][v]);
        }
      }
    }
    panel += kVectors * kStep;
  }
  if constexpr (F::kPairs == 2) {
    if (whole < depth) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto last = F::BroadcastFirst(rows[r] + whole);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sums[r][v] = F::MulAdd(last, F::LoadVector(panel + v * kStep), sums[r][v]);
        }
      }
    }
  }

#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      V::Store(c + AccumVector(shape, v) * V::kLanes, sums[r][v]);
    }
    if (shape == PanelShape::kGruInput && start != nullptr) {
      V::Store(c + 3 * V::kLanes, V::Load(start + 3 * V::kLanes));
    }
    c += c_stride;
  }
}

// ProductTile with kRows = rows.
template <typename V, typename Operand, PanelShape shape,
          int kRows = TileRows<V>(PanelVectors(shape))>
void ProductRows(const Operand* const* a, int64_t offset, int64_t rows, int64_t depth,
                 const Operand* panel, const char* next,
                 const typename V::Element* start, typename V::Element* c,
                 int64_t c_stride) {
  if (rows == kRows) {
    ProductTile<V, Operand, shape, kRows>(a, offset, depth, panel, next, start, c,
                                          c_stride);
  } else if constexpr (kRows > 1) {
    ProductRows<V, Operand, shape, kRows - 1>(a, offset, rows, depth, panel, next,
                                              start, c, c_stride);
  }
}

// Bytes to fetch meanwhile; products take them away.
struct Fetched {
  const char* at;
  int64_t left;
};

template <typename V, typename Operand, PanelShape shape>
void ProductTiles(const Operand* const* a, int64_t offset, int64_t rows, int64_t depth,
                  const Operand* panel, Fetched& next, const typename V::Element* start,
                  typename V::Element* c, int64_t c_stride) {
  const int64_t each = depth / Factor<V, Operand>::kPairs * kCacheLine;
  constexpr int kRows = TileRows<V>(PanelVectors(shape));
  int64_t tiles = (rows + kRows - 1) / kRows;
  for (; tiles > 0; --tiles) {
    const int64_t now = (rows + tiles - 1) / tiles;
    ProductRows<V, Operand, shape>(a, offset, now, depth, panel,
                                   next.left > 0 ? next.at : nullptr, start, c,
                                   c_stride);
    next.at += each;
    next.left -= each;
    a += now;
    c += now * c_stride;
    rows -= now;
  }
}

// Kernels::product. Rows are dealt out evenly, as a tile of few rows is slow: 4 + 3,
// not 6 + 1. Where some tiles have sums that lie together, all of them multiply one
// piece of a panel before the next: it then comes from the first-level cache for all
// but one.
template <typename V, typename Operand, PanelShape shape>
void Product(const Operand* const* a, int64_t offset, int64_t rows, int64_t depth,
             const Operand* panel, const Operand* next,
             const typename V::Element* start, typename V::Element* c,
             int64_t c_stride) {
  constexpr int kPairs = Factor<V, Operand>::kPairs;
  constexpr int64_t kStep = PanelVectors(shape) * V::kLanes * kPairs;
  constexpr int64_t kStepBytes = kStep * static_cast<int64_t>(sizeof(Operand));
  constexpr int64_t kTilesThatShare = 3, kMostRows = 32;
  const int64_t steps = depth / kPairs;
  Fetched fetched{reinterpret_cast<const char*>(next),
                  next != nullptr ? steps * kStepBytes : 0};
  constexpr int kRows = TileRows<V>(PanelVectors(shape));
  const int64_t tiles = (rows + kRows - 1) / kRows;
  int64_t pieces = 1;
  if (tiles >= kTilesThatShare && rows <= kMostRows && c_stride <= 4 * V::kLanes) {
    const int64_t most = StepsInFirstLevel(Caches(), kStepBytes);
    pieces = steps / most + (steps % most != 0);
  }
  int64_t done = 0;  // steps
  for (int64_t piece = 1; piece < pieces; ++piece) {
    const int64_t now = steps * piece / pieces - done;
    ProductTiles<V, Operand, shape>(a, offset + done * kPairs, rows, now * kPairs,
                                    panel + done * kStep, fetched, start, c, c_stride);
    done += now;
    start = nullptr;
  }
  ProductTiles<V, Operand, shape>(a, offset + done * kPairs, rows,
                                  depth - done * kPairs, panel + done * kStep, fetched,
                                  start, c, c_stride);
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_PRODUCT_INL_H_
