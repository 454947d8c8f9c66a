// How many rows each tile register has: what LDTILECFG reads.
#ifndef OSTINATO_CPU_KERNELS_TILE_SHAPE_H_
#define OSTINATO_CPU_KERNELS_TILE_SHAPE_H_

#include <cstdint>

namespace ostinato::cpu {
namespace {

constexpr int kTileRegisters = 8;
constexpr int64_t kTileRows = 16;      // of a register at most
constexpr int64_t kTileRowBytes = 64;  // of a register at most
constexpr int64_t kTileDepth = 32;     // elements of bfloat16 in a row

struct alignas(64) TileShape {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileShape) == 64);

// All registers at their largest, as benchmarks want them.
[[maybe_unused]] TileShape FullTileShape() {
  TileShape shape = {};
  shape.palette = 1;
  for (int t = 0; t < kTileRegisters; ++t) {
    shape.rows[t] = kTileRows;
    shape.row_bytes[t] = kTileRowBytes;
  }
  return shape;
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_TILE_SHAPE_H_
