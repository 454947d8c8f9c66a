// The tile registers of AMX. See tile-product-inl.h for what Tiles are.
#ifndef OSTINATO_CPU_KERNELS_TILES_AMX_H_
#define OSTINATO_CPU_KERNELS_TILES_AMX_H_

#include <cstdint>

#include "cpu/kernels/tile-shape.h"

namespace ostinato::cpu {
namespace {

// In assembly, since intrinsics of GCC do not say that they read memory, and older
// compilers have none.
struct AmxTiles {
  static void Configure(const TileShape& shape) {
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  static void Release() { asm volatile("tilerelease"); }

  template <int t>
  static void Load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
                 :
                 : "r"(p), "r"(stride), "i"(t)
                 : "memory");
  }
  // Load, of what is not read again soon: it takes no room in the first-level cache.
  template <int t>
  static void LoadOnce(const void* p, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2"
                 :
                 : "r"(p), "r"(stride), "i"(t)
                 : "memory");
  }
  template <int t>
  static void Store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
                 :
                 : "r"(p), "r"(stride), "i"(t)
                 : "memory");
  }
  template <int c, int a, int b>
  static void MulAdd() {
    asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" : : "i"(b), "i"(a), "i"(c));
  }
};

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_TILES_AMX_H_
