#include "cpu/runtime/caches.h"

#include <unistd.h>

#include <algorithm>
#include <limits>

namespace ostinato::cpu {
namespace {

constexpr int64_t kRowBytes = 4 * 64;  // of accumulators or of a step of a panel

CacheSizes ReadCaches() noexcept {
  CacheSizes sizes{32 << 10, 1 << 20};
#if defined(_SC_LEVEL1_DCACHE_SIZE) && defined(_SC_LEVEL2_CACHE_SIZE)
  // 0 or -1 where unknown, as in some virtual machines.
  if (const int64_t bytes = sysconf(_SC_LEVEL1_DCACHE_SIZE); bytes > 0) {
    sizes.first = bytes;
  }
  if (const int64_t bytes = sysconf(_SC_LEVEL2_CACHE_SIZE); bytes > 0) {
    sizes.second = bytes;
  }
#endif
  return sizes;
}

}  // namespace

const CacheSizes& Caches() noexcept {
  static const CacheSizes sizes = ReadCaches();
  return sizes;
}

int64_t SequencesPerPortion(const CacheSizes& caches) noexcept {
  return std::clamp<int64_t>(caches.first * 3 / 8 / kRowBytes, 24, 96);
}

int64_t PanelDepth(const CacheSizes& caches) noexcept {
  const int64_t depth = caches.second / 8 / kRowBytes;
  return std::clamp<int64_t>(depth - depth % 32, 128, 2048);
}

int64_t StepsInFirstLevel(const CacheSizes& caches, int64_t step_bytes) noexcept {
  constexpr int64_t kLeast = 128;
  const int64_t steps = caches.first * 2 / 3 / step_bytes;
  return steps < kLeast ? std::numeric_limits<int64_t>::max() : steps;
}

}  // namespace ostinato::cpu
