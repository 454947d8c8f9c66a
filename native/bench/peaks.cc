// Prints what this machine can do at most, as JSON: multiply-adds of float and of
// bfloat16 pairs, sigmoid functions, and reading from each level of the caches.
//
//   c++ -O3 -std=c++17 -march=native -pthread -I native native/bench/peaks.cc
//       native/cpu/runtime/affinity.cc native/cpu/runtime/features.cc -o peaks
//   ./peaks [threads]
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "cpu/runtime/features.h"
#if defined(__AVX512F__)
#include "cpu/kernels/vec_avx512.h"
#elif defined(__AVX2__)
#include "cpu/kernels/vec_avx2.h"
#else
#include "cpu/kernels/vec_portable.h"
#endif
#include "cpu/kernels/math-inl.h"
#if defined(__x86_64__) && !defined(OSTINATO_NO_AMX)
#include "cpu/kernels/tiles_amx.h"
#define OSTINATO_HAS_AMX 1
#endif
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
using Vector = float __attribute__((vector_size(kBytes)));
constexpr int kLanes = kBytes / sizeof(float);

// Enough independent sums to hide the latency of one, few enough for the registers.
constexpr int kSums = 12;
constexpr int kPairSums = 24;  // Zen 5 starts two and has them 6 cycles later
constexpr int kRepeats = 9;

// Of this thread alone: others on the machine do not count.
double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

// Makes the compiler believe that `value` is read here, and may have changed.
template <typename T>
void Touch(T& value) {
  asm volatile("" : "+m"(value) : : "memory");
}

// How often a second `threads` threads, working side by side, get body(thread) done.
double Rate(int threads, const std::function<void(int)>& body) {
  std::vector<double> best(threads, 1e30);
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    std::atomic<int> ready{0};
    std::vector<std::thread> team;
    for (int i = 0; i < threads; ++i) {
      team.emplace_back([&, i] {
        ++ready;
        while (ready < threads) {
        }
        const double begin = CpuSeconds();
        body(i);
        best[i] = std::min(best[i], CpuSeconds() - begin);
      });
    }
    for (std::thread& thread : team) thread.join();
  }
  double rate = 0;
  for (const double seconds : best) rate += 1 / seconds;
  return rate;
}

void MultiplyAdd(int64_t steps) {
  Vector factor = {}, term = {}, sums[kSums] = {};
  factor += 0.999f;
  term += 0.001f;
  Touch(factor);
  Touch(term);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (int s = 0; s < kSums; ++s) sums[s] = sums[s] * factor + term;
  }
  Touch(sums);
}

double FloatPeak(int threads) {
  constexpr int64_t kSteps = 2'000'000;
  const double rate = Rate(threads, [](int) { MultiplyAdd(kSteps); });
  return 2.0 * kSums * kLanes * kSteps * rate;
}

#if defined(__AVX512BF16__)
void MultiplyPairs(int64_t steps) {
  __m512 sums[kPairSums] = {};
  __m512bh factor = {};
  Touch(factor);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 24
    for (int s = 0; s < kPairSums; ++s) {
      sums[s] = _mm512_dpbf16_ps(sums[s], factor, factor);
    }
  }
  Touch(sums);
}

double PairsPeak(int threads) {
  constexpr int64_t kSteps = 2'000'000;
  const double rate = Rate(threads, [](int) { MultiplyPairs(kSteps); });
  return 4.0 * kPairSums * kLanes * kSteps * rate;
}
#else
double PairsPeak(int threads) { return FloatPeak(threads); }
#endif

#if defined(OSTINATO_HAS_AMX)
void MultiplyTiles(int64_t steps) {
  using ostinato::cpu::AmxTiles;
  AmxTiles::Configure(ostinato::cpu::FullTileShape());
  for (int64_t i = 0; i < steps; ++i) {
    AmxTiles::MulAdd<0, 4, 6>();
    AmxTiles::MulAdd<1, 4, 7>();
    AmxTiles::MulAdd<2, 5, 6>();
    AmxTiles::MulAdd<3, 5, 7>();
  }
  AmxTiles::Release();
}

double TilesPeak(int threads) {
  constexpr int64_t kSteps = 1'000'000;
  constexpr double kProducts = 4.0 * 16 * 16 * ostinato::cpu::kTileDepth;
  return 2 * kProducts * kSteps * Rate(threads, [](int) { MultiplyTiles(kSteps); });
}
#else
double TilesPeak(int) { return 0; }
#endif

double Bfloat16Peak(int threads) {
  const bool tiles = ostinato::cpu::DetectIsa() == ostinato::cpu::Isa::kAvx512Amx;
  return tiles ? TilesPeak(threads) : PairsPeak(threads);
}

// Sigmoids of elements that are in the first-level cache, as the kernels compute them.
double SigmoidPeak(int threads) {
  using V = ostinato::cpu::VecF32;
  constexpr int64_t kElements = 1024, kPasses = 4000;
  const double rate = Rate(threads, [](int) {
    float x[kElements], y[kElements];
    for (int64_t i = 0; i < kElements; ++i) x[i] = 0.01f * static_cast<float>(i - 512);
    for (int64_t pass = 0; pass < kPasses; ++pass) {
      for (int64_t i = 0; i < kElements; i += V::kLanes) {
        V::Store(y + i, ostinato::cpu::Sigmoid<V>(V::Load(x + i)));
      }
      Touch(x);
      Touch(y);
    }
  });
  return kElements * kPasses * rate;
}

void Read(const Vector* data, int64_t vectors) {
  Vector sums[8] = {};
  for (int64_t i = 0; i < vectors; i += 8) {
#pragma GCC unroll 8
    for (int s = 0; s < 8; ++s) sums[s] += data[i + s];
  }
  Touch(sums);
}

// Bytes a second when every thread reads its own `bytes` again and again.
double ReadBandwidth(int threads, int64_t bytes) {
  constexpr int64_t kTotal = int64_t{1} << 27;
  const int64_t vectors = bytes / kBytes;
  const int64_t passes = std::max<int64_t>(2, kTotal / bytes);
  std::vector<std::unique_ptr<Vector[]>> data(threads);
  for (auto& own : data) own.reset(new Vector[vectors]());
  const double rate = Rate(threads, [&](int i) {
    for (int64_t pass = 0; pass < passes; ++pass) Read(data[i].get(), vectors);
  });
  return static_cast<double>(bytes) * passes * rate;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : 1;
  std::printf("{\"threads\": %d, \"float32\": %.4g, \"bfloat16\": %.4g, ", threads,
              FloatPeak(threads), Bfloat16Peak(threads));
  std::printf("\"sigmoids\": %.4g, \"read\": [", SigmoidPeak(threads));
  for (int64_t bytes = 1 << 14; bytes <= 1 << 26; bytes *= 2) {
    std::printf("%s[%lld, %.4g]", bytes == 1 << 14 ? "" : ", ",
                static_cast<long long>(bytes), ReadBandwidth(threads, bytes));
  }
  std::printf("]}\n");
  return 0;
}
