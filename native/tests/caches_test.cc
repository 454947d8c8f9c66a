#include "cpu/runtime/caches.h"

#include <limits>

#include "tests/check.h"

namespace {

using ostinato::cpu::Caches;
using ostinato::cpu::CacheSizes;
using ostinato::cpu::PanelDepth;
using ostinato::cpu::SequencesPerPortion;
using ostinato::cpu::StepsInFirstLevel;

constexpr int64_t kKilo = 1 << 10;

void BlocksFollowTheCaches() {
  const CacheSizes zen{32 * kKilo, kKilo * kKilo};
  CHECK_EQ(SequencesPerPortion(zen), 48);
  CHECK_EQ(PanelDepth(zen), 512);
  const CacheSizes xeon{48 * kKilo, 2 * kKilo * kKilo};
  CHECK_EQ(SequencesPerPortion(xeon), 72);
  CHECK_EQ(PanelDepth(xeon), 1024);
  CHECK_EQ(StepsInFirstLevel(xeon, 256), 128);
  CHECK_EQ(StepsInFirstLevel(xeon, 64), 512);
  // Pieces of fewer steps are not worth it.
  CHECK_EQ(StepsInFirstLevel(zen, 256), std::numeric_limits<int64_t>::max());
}

void BlocksHaveBounds() {
  for (const int64_t bytes : {int64_t{1}, 48 * kKilo, int64_t{1} << 40}) {
    const CacheSizes sizes{bytes, bytes};
    CHECK_EQ(SequencesPerPortion(sizes) >= 24 && SequencesPerPortion(sizes) <= 96,
             true);
    CHECK_EQ(PanelDepth(sizes) >= 128 && PanelDepth(sizes) <= 2048, true);
    CHECK_EQ(PanelDepth(sizes) % 32, 0);
  }
}

}  // namespace

int main() {
  BlocksFollowTheCaches();
  BlocksHaveBounds();
  CHECK_EQ(Caches().first > 0 && Caches().second > 0, true);
  return ostinato::testing::Summary();
}
