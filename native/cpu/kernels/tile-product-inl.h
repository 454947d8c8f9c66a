// Products of rows with a packed panel by tiles: registers of 16 rows of 64 bytes, and
// one instruction that multiplies two of them and adds to a third.
//
// A panel of pairs, [depth / 2][vectors][16][2], holds tiles as they are wanted: 16
// steps of one vector are 16 rows at a distance of all vectors. What is left of a depth
// after whole tiles goes through vectors, as do depths of less than a tile. So the sum
// of an element depends on its depth, and never on how many rows stand beside it: its
// tiles have as many rows as there are.
//
// `T`, a Tiles, has the instructions: tiles_amx.h, or an emulation in native/tests.
// Registers 0 to 3 are sums, 4 and 5 rows, 6 and 7 parts of a panel.
#ifndef OSTINATO_CPU_KERNELS_TILE_PRODUCT_INL_H_
#define OSTINATO_CPU_KERNELS_TILE_PRODUCT_INL_H_

#include <cstdint>
#include <cstring>

#include "cpu/kernels/pairs_avx512.h"
#include "cpu/kernels/table-inl.h"
#include "cpu/kernels/tile-shape.h"

namespace ostinato::cpu {
namespace {

constexpr int64_t kTileGroup =
    2 * kTileRows;                       // rows that share what is read of a panel
constexpr int64_t kGatheredDepth = 512;  // of rows that have to be copied
// From this depth on, a group of rows and its part of a panel do not fit into the
// first-level cache together; only the rows are kept there then. That is 1.1 to 1.4
// times as fast, and with many rows at half the depth 0.92 times.
constexpr int64_t kDeep = 256;
constexpr int64_t kGroupsThatFetch = 2;  // of rows, and fewer have no time to

// Rows for which the registers of this thread are set up; 0: not at all.
thread_local int64_t tile_rows = 0;

// For a group of so many rows: one row of tiles, or two.
template <typename T>
void SetUpTiles(int64_t rows) {
  if (tile_rows == rows) return;
  const int64_t first = rows < kTileRows ? rows : kTileRows;
  const int64_t second = rows > kTileRows ? rows - kTileRows : rows;
  TileShape shape = {};
  shape.palette = 1;
  for (int t = 0; t < kTileRegisters; ++t) {
    const bool below = t == 2 || t == 3 || t == 5;
    const int64_t of_rows = t >= 6 ? kTileRows : below ? second : first;
    shape.rows[t] = static_cast<uint8_t>(of_rows);
    shape.row_bytes[t] = kTileRowBytes;
  }
  T::Configure(shape);
  tile_rows = rows;
}

// Kernels::release_tiles. Others in this process have tiles of their own, and the
// system has less to save of a thread without any.
template <typename T>
void ReleaseTiles() {
  if (tile_rows == 0) return;
  T::Release();
  tile_rows = 0;
}

// Rows at an even distance of each other; distances are in bytes.
struct EvenRows {
  const BFloat16* first;
  int64_t stride;
};
struct Sums {
  const float* from;
  int64_t from_stride;
  float* to;
  int64_t to_stride;

  Sums At(int64_t vector) const {
    return {from + vector * kTileRows, from_stride, to + vector * kTileRows, to_stride};
  }
  Sums Below() const {
    return {from + kTileRows * from_stride / 4, from_stride,
            to + kTileRows * to_stride / 4, to_stride};
  }
};

// Cache lines that a product asks for in each of its steps, from `at` on.
struct Ahead {
  const char* at = nullptr;
  int64_t lines = 0;

  void Fetch(int64_t step) const {
    const char* line = at + step * lines * kTileRowBytes;
    for (int64_t l = 0; l < lines; ++l) {
      __builtin_prefetch(line + l * kTileRowBytes, 0, 2);  // from the second level
    }
  }
  Ahead After(int64_t steps) const {
    return {at + steps * lines * kTileRowBytes, lines};
  }
};

template <typename T, int t>
void LoadSums(const Sums& sums) {
  T::template Load<t>(sums.from, sums.from_stride);
}
template <typename T, int t>
void StoreSums(const Sums& sums) {
  T::template Store<t>(sums.to, sums.to_stride);
}

template <typename T, int t, bool deep>
void LoadPart(const BFloat16* panel, int64_t panel_stride) {
  if constexpr (deep) {
    T::template LoadOnce<t>(panel, panel_stride);
  } else {
    T::template Load<t>(panel, panel_stride);
  }
}

template <typename T, int v, bool deep>
void MulAddVector(const BFloat16* panel, int64_t panel_stride) {
  constexpr int kPart = 6 + v % 2;
  LoadPart<T, kPart, deep>(panel + v * kTileDepth, panel_stride);
  T::template MulAdd<v, 4, kPart>();
}

// Up to 16 rows times all vectors of a panel.
template <typename T, PanelShape shape, bool deep>
[[gnu::noinline]] void OneRowOfTiles(EvenRows a, int64_t depth, const BFloat16* panel,
                                     const Sums& sums) {
  constexpr int kVectors = PanelVectors(shape);
  constexpr int64_t kStride = kVectors * kTileRowBytes;
  LoadSums<T, 0>(sums.At(AccumVector(shape, 0)));
  if constexpr (kVectors > 1) LoadSums<T, 1>(sums.At(AccumVector(shape, 1)));
  if constexpr (kVectors > 2) LoadSums<T, 2>(sums.At(AccumVector(shape, 2)));
  if constexpr (kVectors > 3) LoadSums<T, 3>(sums.At(AccumVector(shape, 3)));
  for (int64_t k = 0; k < depth; k += kTileDepth) {
    T::template Load<4>(a.first + k, a.stride);
    MulAddVector<T, 0, deep>(panel, kStride);
    if constexpr (kVectors > 1) MulAddVector<T, 1, deep>(panel, kStride);
    if constexpr (kVectors > 2) MulAddVector<T, 2, deep>(panel, kStride);
    if constexpr (kVectors > 3) MulAddVector<T, 3, deep>(panel, kStride);
    panel += kVectors * kTileRows * kTileDepth;
  }
  StoreSums<T, 0>(sums.At(AccumVector(shape, 0)));
  if constexpr (kVectors > 1) StoreSums<T, 1>(sums.At(AccumVector(shape, 1)));
  if constexpr (kVectors > 2) StoreSums<T, 2>(sums.At(AccumVector(shape, 2)));
  if constexpr (kVectors > 3) StoreSums<T, 3>(sums.At(AccumVector(shape, 3)));
}

// 17 to 32 rows times vector v of a panel, and the next one if there are two.
template <typename T, PanelShape shape, int v, bool deep>
[[gnu::noinline]] void TwoRowsOfTiles(EvenRows a, int64_t depth, const BFloat16* panel,
                                      const Sums& sums, const Ahead& ahead) {
  constexpr int kVectors = PanelVectors(shape);
  constexpr int64_t kStride = kVectors * kTileRowBytes;
  constexpr bool kTwo = v + 1 < kVectors;
  constexpr int kNext = kTwo ? v + 1 : v;
  const Sums left = sums.At(AccumVector(shape, v)),
             right = sums.At(AccumVector(shape, kNext));
  const BFloat16* below = a.first + kTileRows * a.stride / 2;
  panel += v * kTileDepth;
  LoadSums<T, 0>(left);
  LoadSums<T, 2>(left.Below());
  if constexpr (kTwo) {
    LoadSums<T, 1>(right);
    LoadSums<T, 3>(right.Below());
  }
  for (int64_t k = 0; k < depth; k += kTileDepth) {
    LoadPart<T, 6, deep>(panel, kStride);
    T::template Load<4>(a.first + k, a.stride);
    T::template MulAdd<0, 4, 6>();
    T::template Load<5>(below + k, a.stride);
    T::template MulAdd<2, 5, 6>();
    ahead.Fetch(k / kTileDepth);
    if constexpr (kTwo) {
      LoadPart<T, 7, deep>(panel + kTileDepth, kStride);
      T::template MulAdd<1, 4, 7>();
      T::template MulAdd<3, 5, 7>();
    }
    panel += kVectors * kTileRows * kTileDepth;
  }
  StoreSums<T, 0>(left);
  StoreSums<T, 2>(left.Below());
  if constexpr (kTwo) {
    StoreSums<T, 1>(right);
    StoreSums<T, 3>(right.Below());
  }
}

// Up to 32 rows, a whole number of tiles deep.
template <typename T, PanelShape shape, bool deep>
void EvenProduct(EvenRows a, int64_t rows, int64_t depth, const BFloat16* panel,
                 const Ahead& ahead, const float* start, float* c, int64_t c_stride) {
  const int64_t stride = c_stride * int64_t{sizeof(float)};
  const bool starts = start != nullptr;
  const Sums sums = {starts ? start : c, starts ? 0 : stride, c, stride};
  if (rows <= kTileRows) return OneRowOfTiles<T, shape, deep>(a, depth, panel, sums);
  TwoRowsOfTiles<T, shape, 0, deep>(a, depth, panel, sums, ahead);
  if constexpr (PanelVectors(shape) > 2) {
    TwoRowsOfTiles<T, shape, 2, deep>(a, depth, panel, sums,
                                      ahead.After(depth / kTileDepth));
  }
}

template <typename T, PanelShape shape>
void EvenProduct(EvenRows a, int64_t rows, int64_t depth, const BFloat16* panel,
                 const Ahead& ahead, const float* start, float* c, int64_t c_stride) {
  const auto product =
      depth < kDeep ? EvenProduct<T, shape, false> : EvenProduct<T, shape, true>;
  product(a, rows, depth, panel, ahead, start, c, c_stride);
}

// The same for rows that stand anywhere.
template <typename T, PanelShape shape>
[[gnu::noinline]] void GatheredProduct(const BFloat16* const* a, int64_t offset,
                                       int64_t rows, int64_t depth,
                                       const BFloat16* panel, const float* start,
                                       float* c, int64_t c_stride) {
  constexpr int64_t kStride = kGatheredDepth + kTileDepth;
  alignas(64) BFloat16 gathered[kTileGroup * kStride];
  for (int64_t k = 0; k < depth; k += kGatheredDepth) {
    const int64_t now = AtMost(depth - k, kGatheredDepth);
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(gathered + r * kStride, a[r] + offset + k, now * sizeof(BFloat16));
    }
    EvenProduct<T, shape>({gathered, kStride * int64_t{sizeof(BFloat16)}}, rows, now,
                          panel + k * PanelVectors(shape) * kTileRows, {},
                          k == 0 ? start : nullptr, c, c_stride);
  }
}

// Whether rows are at even distances; if so, sets `stride`.
bool AreEven(const BFloat16* const* a, int64_t rows, int64_t* stride) {
  const auto at = [&](int64_t r) { return reinterpret_cast<intptr_t>(a[r]); };
  *stride = rows > 1 ? at(1) - at(0) : kTileRowBytes;
  bool even = *stride % 2 == 0;
  for (int64_t r = 2; r < rows; ++r) even &= at(r) - at(r - 1) == *stride;
  return even;
}

// Kernels::product. The next panel is fetched where there are groups of rows enough to
// be at work in the meantime.
template <typename T, PanelShape shape>
void TileProduct(const BFloat16* const* a, int64_t offset, int64_t rows, int64_t depth,
                 const BFloat16* panel, const BFloat16* next, const float* start,
                 float* c, int64_t c_stride) {
  const int64_t whole = depth - depth % kTileDepth;
  if (whole == 0) {
    return Product<VecF32, BFloat16, shape>(a, offset, rows, depth, panel, next, start,
                                            c, c_stride);
  }
  if constexpr (shape == PanelShape::kGruRecurrent) start = nullptr;
  const BFloat16* const* group = a;
  float* to = c;
  int64_t left = rows, groups = (rows + kTileGroup - 1) / kTileGroup;
  constexpr int64_t kPasses = (PanelVectors(shape) + 1) / 2;   // over a group
  constexpr int64_t kLines = PanelVectors(shape) * kTileRows;  // of a step of the panel
  Ahead ahead;
  if (next != nullptr && groups >= kGroupsThatFetch) {
    const int64_t passes = kPasses * groups;
    ahead = {reinterpret_cast<const char*>(next), (kLines + passes - 1) / passes};
  }
  for (; groups > 0; --groups) {
    const int64_t now = (left + groups - 1) / groups;
    SetUpTiles<T>(now);
    int64_t stride;
    if (AreEven(group, now, &stride)) {
      EvenProduct<T, shape>({group[0] + offset, stride}, now, whole, panel, ahead,
                            start, to, c_stride);
      ahead = ahead.After(kPasses * whole / kTileDepth);
    } else {
      GatheredProduct<T, shape>(group, offset, now, whole, panel, start, to, c_stride);
    }
    group += now;
    to += now * c_stride;
    left -= now;
  }
  if (shape == PanelShape::kGruInput && start != nullptr) {
    const auto h_candidate = VecF32::Load(start + 3 * VecF32::kLanes);
    for (int64_t r = 0; r < rows; ++r) {
      VecF32::Store(c + r * c_stride + 3 * VecF32::kLanes, h_candidate);
    }
  }
  if (whole < depth) {
    Product<VecF32, BFloat16, shape>(a, offset + whole, rows, depth - whole,
                                     panel + whole * PanelVectors(shape) * kTileRows,
                                     nullptr, nullptr, c, c_stride);
  }
}

template <typename T>
constexpr KernelsBf16Pairs MakeTileKernels() {
  KernelsBf16Pairs kernels = MakeKernels<VecF32, BFloat16, BFloat16>();
  kernels.rows_at_once = kTileGroup;
  // A tile of a panel takes as long to come from the second-level cache as 16 rows take
  // to be multiplied by it, and from the third three to six times as long.
  kernels.enough_rows = 96;
  kernels.wants_even_rows = true;
  kernels.release_tiles = ReleaseTiles<T>;
  kernels.product[0] = TileProduct<T, PanelShape::k1>;
  kernels.product[1] = TileProduct<T, PanelShape::k2>;
  kernels.product[2] = TileProduct<T, PanelShape::k3>;
  kernels.product[3] = TileProduct<T, PanelShape::k4>;
  kernels.product[4] = TileProduct<T, PanelShape::kGruInput>;
  kernels.product[5] = TileProduct<T, PanelShape::kGruRecurrent>;
  return kernels;
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_TILE_PRODUCT_INL_H_
