#include "tests/tiles_emulated.h"

#if defined(__x86_64__)

#include <cstdio>
#include <cstdlib>

#if defined(__clang__)
#pragma clang attribute push(                                                          \
    __attribute__((target("avx512bf16,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))), \
    apply_to = function)
#else
#pragma GCC target("avx512bf16,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")
#endif

#include "cpu/kernels/tile-product-inl.h"

namespace ostinato::cpu {
namespace {

// The registers of a thread, and what they were set up for.
struct Registers {
  TileShape shape;  // palette 0: not at all
  unsigned char data[kTileRegisters][kTileRows][kTileRowBytes];
};
thread_local Registers registers;
int threads_with_tiles = 0;
long products = 0;

// What raises an exception in a processor ends the program here.
void Expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "emulated tiles: %s\n", what);
  std::abort();
}

// As Intel's manual words it: chains of even and of odd k, each over the 16 pairs of a
// row, then both and the sum added; every step rounded, denormal numbers being 0.
[[gnu::noinline]] void MultiplyRow(const unsigned char* a,
                                   const unsigned char (*b)[kTileRowBytes],
                                   int64_t pairs, unsigned char* c) {
  typedef float Floats __attribute__((vector_size(kTileRowBytes)));
  typedef uint32_t Bits __attribute__((vector_size(kTileRowBytes)));
  Floats even = {}, odd = {}, sum;
  for (int64_t k = 0; k < pairs; ++k) {
    uint32_t pair;
    std::memcpy(&pair, a + 4 * k, sizeof pair);
    Bits both;
    std::memcpy(&both, b[k], sizeof both);
    const Bits zero = {};
    // Products of two bfloat16 are exact, so that this is a fused multiply-add.
    even += reinterpret_cast<Floats>(zero + (pair << 16)) *
            reinterpret_cast<Floats>(both << 16);
    odd += reinterpret_cast<Floats>(zero + (pair & 0xffff0000)) *
           reinterpret_cast<Floats>(both & 0xffff0000);
  }
  std::memcpy(&sum, c, sizeof sum);
  sum += even + odd;
  std::memcpy(c, &sum, sizeof sum);
}

void ExpectSetUp(int t) {
  Expect(t >= 0 && t < kTileRegisters && registers.shape.palette == 1 &&
             registers.shape.rows[t] > 0,
         "a register was used without being set up");
}

struct EmulatedTiles {
  static void Configure(const TileShape& shape) { ostinato_emulate_set_up(&shape); }
  static void Release() { ostinato_emulate_release(); }
  template <int t>
  static void Load(const void* p, int64_t stride) {
    ostinato_emulate_load(t, p, stride);
  }
  template <int t>
  static void LoadOnce(const void* p, int64_t stride) {
    Load<t>(p, stride);
  }
  template <int t>
  static void Store(void* p, int64_t stride) {
    ostinato_emulate_store(t, p, stride);
  }
  template <int c, int a, int b>
  static void MulAdd() {
    ostinato_emulate_product(c, a, b);
  }
};

constexpr KernelsBf16Pairs kEmulated = MakeTileKernels<EmulatedTiles>();

}  // namespace
}  // namespace ostinato::cpu

using namespace ostinato::cpu;

extern "C" {

void ostinato_emulate_set_up(const void* memory) {
  TileShape shape;
  std::memcpy(&shape, memory, sizeof shape);
  Expect(shape.palette == 1 && shape.start_row == 0, "no such palette");
  for (int t = 0; t < 16; ++t) {
    const bool exists = t < kTileRegisters;
    Expect(exists ? shape.rows[t] <= kTileRows && shape.row_bytes[t] <= kTileRowBytes
                  : shape.rows[t] == 0 && shape.row_bytes[t] == 0,
           "a register is larger than it can be");
  }
  if (registers.shape.palette == 0) {
    __atomic_fetch_add(&threads_with_tiles, 1, __ATOMIC_SEQ_CST);
  }
  registers = {};
  registers.shape = shape;
}

void ostinato_emulate_release() {
  if (registers.shape.palette != 0) {
    __atomic_fetch_sub(&threads_with_tiles, 1, __ATOMIC_SEQ_CST);
  }
  registers = {};
}

void ostinato_emulate_load(int t, const void* p, int64_t stride) {
  ExpectSetUp(t);
  const auto* from = static_cast<const unsigned char*>(p);
  std::memset(registers.data[t], 0, sizeof registers.data[t]);
  for (int64_t r = 0; r < registers.shape.rows[t]; ++r) {
    std::memcpy(registers.data[t][r], from + r * stride, registers.shape.row_bytes[t]);
  }
}

void ostinato_emulate_store(int t, void* p, int64_t stride) {
  ExpectSetUp(t);
  auto* to = static_cast<unsigned char*>(p);
  for (int64_t r = 0; r < registers.shape.rows[t]; ++r) {
    std::memcpy(to + r * stride, registers.data[t][r], registers.shape.row_bytes[t]);
  }
}

void ostinato_emulate_product(int c, int a, int b) {
  const TileShape& s = registers.shape;
  for (const int t : {c, a, b}) ExpectSetUp(t);
  Expect(c != a && c != b && a != b, "one register twice");
  Expect(s.rows[a] == s.rows[c] && s.row_bytes[a] == 4 * s.rows[b] &&
             s.row_bytes[b] == s.row_bytes[c],
         "registers do not fit one another");
  const uint32_t caller = _mm_getcsr();
  _mm_setcsr(caller | 0x8040);
  for (int64_t m = 0; m < s.rows[a]; ++m) {
    MultiplyRow(registers.data[a][m], registers.data[b], s.rows[b],
                registers.data[c][m]);
  }
  _mm_setcsr(caller);
  __atomic_fetch_add(&products, 1, __ATOMIC_RELAXED);
}

const KernelsBf16Pairs* ostinato_emulated_tiles() { return &kEmulated; }
int ostinato_threads_with_tiles() {
  return __atomic_load_n(&threads_with_tiles, __ATOMIC_SEQ_CST);
}
long ostinato_tile_products() { return __atomic_load_n(&products, __ATOMIC_RELAXED); }
void ostinato_disturb_tiles() {
  TileShape shape = {};
  shape.palette = 1;
  shape.rows[3] = 5;
  shape.row_bytes[3] = 8;
  ostinato_emulate_set_up(&shape);
}

}  // extern "C"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

extern "C" const ostinato::cpu::KernelsBf16Pairs* ostinato_emulated_tiles() {
  return nullptr;
}
extern "C" int ostinato_threads_with_tiles() { return 0; }
extern "C" long ostinato_tile_products() { return 0; }
extern "C" void ostinato_disturb_tiles() {}

#endif
