// The table of tile products over tile registers in plain C++, for processors without.
#ifndef OSTINATO_TESTS_TILES_EMULATED_H_
#define OSTINATO_TESTS_TILES_EMULATED_H_

#include <cstdint>

#include "cpu/kernels/kernels.h"

#define OSTINATO_TESTS_EXPORT __attribute__((visibility("default")))

// C names, since Python loads them, too. The emulation needs AVX512_BF16 for all but
// tiles; the table is null where this was compiled for another processor.
extern "C" OSTINATO_TESTS_EXPORT const ostinato::cpu::KernelsBf16Pairs*
ostinato_emulated_tiles();

// How many threads have registers set up; they are none when every call has returned.
extern "C" OSTINATO_TESTS_EXPORT int ostinato_threads_with_tiles();

// Products of two registers so far, of all threads.
extern "C" OSTINATO_TESTS_EXPORT long ostinato_tile_products();

// Sets up the registers of this thread as another library may have left them.
extern "C" OSTINATO_TESTS_EXPORT void ostinato_disturb_tiles();

// What the instructions do: LDTILECFG, TILERELEASE, TILELOADD, TILESTORED and, c += a
// b, TDPBF16PS. The program ends where a processor would raise an exception.
extern "C" {
void ostinato_emulate_set_up(const void* shape);
void ostinato_emulate_release();
void ostinato_emulate_load(int t, const void* p, int64_t stride);
void ostinato_emulate_store(int t, void* p, int64_t stride);
void ostinato_emulate_product(int c, int a, int b);
}

#endif  // OSTINATO_TESTS_TILES_EMULATED_H_
