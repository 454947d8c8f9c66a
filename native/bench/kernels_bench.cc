// How close the products come to what one core can do, as JSON on stdout:
//
//   c++ -O3 -std=c++17 -I native native/bench/kernels_bench.cc
//       native/cpu/runtime/affinity.cc native/cpu/runtime/caches.cc
//       native/cpu/runtime/features.cc native/cpu/kernels/*.cc -o kernels_bench
//
// "peak" is the rate of independent multiply-adds in registers, the best of any
// instruction set of the machine (null where it is not x86). Every row of "products"
// has its rate and that as a share of the peak, in GFLOP/s of thread time; "cache" says
// where the panels come from. A compiler that spills the sums of a tile shows up here.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cpu/kernels/kernels.h"
#include "cpu/runtime/features.h"
#if defined(__x86_64__) && !defined(OSTINATO_NO_AMX)
#include "cpu/kernels/tiles_amx.h"
#endif

namespace ostinato::cpu {
namespace {

double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The best of several repetitions, each long enough for the clock.
template <typename Work>
double GigaflopsOf(double flops, const Work& work) {
  double best = 0;
  int64_t times = 1;
  for (int repeat = 0; repeat < 25;) {
    const double start = ThreadSeconds();
    for (int64_t i = 0; i < times; ++i) work();
    const double seconds = ThreadSeconds() - start;
    if (seconds < 1e-3) {
      times *= 2;
      continue;
    }
    best = std::max(best, flops * static_cast<double>(times) / seconds * 1e-9);
    ++repeat;
  }
  return best;
}

// Zeros that start a cache line, as the library's arrays do: a vector that lies in two
// lines is read at half the speed where it comes from the second-level cache.
template <typename T>
class Aligned {
 public:
  explicit Aligned(int64_t size) : storage_(size * sizeof(T) + kLine) {}

  T* data() {
    void* start = storage_.data();
    size_t space = storage_.size();
    return static_cast<T*>(std::align(kLine, space - kLine, start, space));
  }

 private:
  static constexpr size_t kLine = 64;
  std::vector<char> storage_;
};

struct Peak {
  double f32 = 0;
  double f64 = 0;
  double bf16 = 0;
  double tiles = 0;
};

#if defined(__x86_64__)

constexpr int kChains = 12;  // enough to hide the latency of any processor's units
constexpr int64_t kPeakSteps = 1000;

// kChains * kPeakSteps times `instruction`, in chains that do not wait for one another.
#define OSTINATO_PEAK_LOOP(name, features, vector_bytes, instruction)          \
  __attribute__((target(features))) void name() {                              \
    typedef float Vector __attribute__((vector_size(vector_bytes)));           \
    Vector sums[kChains] = {};                                                 \
    const Vector factor = {};                                                  \
    for (int64_t i = 0; i < kPeakSteps; ++i) {                                 \
      _Pragma("GCC unroll 12") for (int j = 0; j < kChains; ++j) {             \
        asm volatile(instruction " %1, %1, %0" : "+v"(sums[j]) : "v"(factor)); \
      }                                                                        \
    }                                                                          \
  }

OSTINATO_PEAK_LOOP(F32Avx2, "avx2,fma", 32, "vfmadd231ps")
OSTINATO_PEAK_LOOP(F64Avx2, "avx2,fma", 32, "vfmadd231pd")
OSTINATO_PEAK_LOOP(F32Avx512, "avx512f", 64, "vfmadd231ps")
OSTINATO_PEAK_LOOP(F64Avx512, "avx512f", 64, "vfmadd231pd")
OSTINATO_PEAK_LOOP(Bf16Avx512, "avx512f", 64, "vdpbf16ps")

#if !defined(OSTINATO_NO_AMX)
// As above, in the four chains that the other registers leave room for.
void Bf16Tiles() {
  AmxTiles::Configure(FullTileShape());
  for (int64_t i = 0; i < kPeakSteps; ++i) {
    AmxTiles::MulAdd<0, 4, 6>();
    AmxTiles::MulAdd<1, 4, 7>();
    AmxTiles::MulAdd<2, 5, 6>();
    AmxTiles::MulAdd<3, 5, 7>();
  }
  AmxTiles::Release();
}

double PeakOfTiles() {
  return GigaflopsOf(2.0 * 4 * kPeakSteps * kTileRows * kTileRows * kTileDepth,
                     Bf16Tiles);
}
#else
double PeakOfTiles() { return 0; }
#endif

Peak MeasurePeak(Isa isa) {
  // Two operations for every element multiplied.
  const auto rate = [](void (*loop)(), int elements) {
    return GigaflopsOf(2.0 * elements * kChains * kPeakSteps, loop);
  };
  Peak peak;
  if (isa >= Isa::kAvx2) {
    peak.f32 = rate(F32Avx2, 8);
    peak.f64 = rate(F64Avx2, 4);
  }
  if (isa >= Isa::kAvx512) {
    peak.f32 = std::max(peak.f32, rate(F32Avx512, 16));
    peak.f64 = std::max(peak.f64, rate(F64Avx512, 8));
  }
  if (isa >= Isa::kAvx512Bf16) peak.bf16 = rate(Bf16Avx512, 32);
  if (isa >= Isa::kAvx512Amx) peak.tiles = PeakOfTiles();
  return peak;
}

#else

Peak MeasurePeak(Isa) { return {}; }

#endif

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4g", value);
  return value > 0 ? text : "null";
}

// Prints the rates of one table; `separator` goes before every row but the first.
template <typename Storage, typename Operand, typename Accum>
void BenchProducts(const char* isa, const char* dtype,
                   const Kernels<Storage, Operand, Accum>& kernels, double peak,
                   std::string* separator) {
  const int64_t most_rows = std::max<int64_t>(6, kernels.rows_at_once);
  struct Cache {
    const char* name;
    int64_t panel_bytes;
    int64_t all_bytes;  // of the panels that take turns
  };
  constexpr Cache kCaches[] = {{"L1", 16 << 10, 16 << 10}, {"L2", 64 << 10, 512 << 10}};
  struct Shape {
    const char* name;
    PanelShape tile;
    int vectors;
  };
  constexpr Shape kShapes[] = {{"k4", PanelShape::k4, 4},
                               {"gru_recurrent", PanelShape::kGruRecurrent, 3}};
  for (const Cache& cache : kCaches) {
    for (const Shape& shape : kShapes) {
      const int64_t step = shape.vectors * kernels.lanes;  // sums per element of a row
      const int64_t depth =
          cache.panel_bytes / (step * static_cast<int64_t>(sizeof(Operand)));
      const int64_t panels = cache.all_bytes / cache.panel_bytes;
      Aligned<Operand> panel(panels * step * depth);
      const std::vector<Operand> row(depth);
      Aligned<Accum> sums(most_rows * 4 * kernels.lanes);
      const std::vector<const Operand*> rows(most_rows, row.data());
      for (int64_t n = 1; n <= most_rows; n += most_rows > 6 && n > 1 ? n : 1) {
        int64_t turn = 0;
        const double flops = 2.0 * static_cast<double>(n * step * depth);
        const double rate = GigaflopsOf(flops, [&] {
          kernels.product[static_cast<int>(shape.tile)](
              rows.data(), 0, n, depth, panel.data() + turn * step * depth, nullptr,
              nullptr, sums.data(), 4 * kernels.lanes);
          turn = turn + 1 < panels ? turn + 1 : 0;
        });
        std::printf(
            "%s{\"isa\": \"%s\", \"dtype\": \"%s\", \"tile\": \"%s\", "
            "\"cache\": \"%s\", \"rows\": %d, \"depth\": %d, \"gflops\": %s, "
            "\"share\": %s}",
            separator->c_str(), isa, dtype, shape.name, cache.name, static_cast<int>(n),
            static_cast<int>(depth), Number(rate).c_str(),
            Number(peak > 0 ? rate / peak : 0).c_str());
        *separator = ",\n";
      }
    }
  }
}

void BenchAll() {
  const Isa best = DetectIsa();
  const Peak peak = MeasurePeak(best);
  std::printf(
      "{\"peak\": {\"f32\": %s, \"f64\": %s, \"bf16\": %s, \"tiles\": %s},\n"
      "\"products\": [\n",
      Number(peak.f32).c_str(), Number(peak.f64).c_str(), Number(peak.bf16).c_str(),
      Number(peak.tiles).c_str());
  const char* const names[] = {"portable", "avx2", "avx512", "avx512_bf16",
                               "avx512_amx"};
  std::string separator;
  for (int level = 0; level <= static_cast<int>(best); ++level) {
    const KernelSet& set = KernelsFor(static_cast<Isa>(level));
    if (set.bf16_tiles != nullptr) {
      BenchProducts(names[level], "bf16", *set.bf16_tiles, peak.tiles, &separator);
      set.bf16_tiles->release_tiles();
    } else if (set.bf16_pairs != nullptr) {
      BenchProducts(names[level], "bf16", *set.bf16_pairs, peak.bf16, &separator);
    } else {  // the other tables of kAvx512Bf16 are those of kAvx512
      BenchProducts(names[level], "f32", *set.f32, peak.f32, &separator);
      BenchProducts(names[level], "f64", *set.f64, peak.f64, &separator);
    }
  }
  std::printf("\n]}\n");
}

}  // namespace
}  // namespace ostinato::cpu

int main() { ostinato::cpu::BenchAll(); }
