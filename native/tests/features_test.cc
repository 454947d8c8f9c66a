#include "cpu/runtime/features.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

#include "cpu/runtime/affinity.h"
#include "tests/check.h"

namespace {

namespace fs = std::filesystem;
using ostinato::cpu::CgroupCpuLimit;
using ostinato::cpu::ClassifyIsa;
using ostinato::cpu::CpuidWords;
using ostinato::cpu::ParseCpuMax;

int Level(const CpuidWords& words) { return static_cast<int>(ClassifyIsa(words)); }

int Limit(const std::optional<int32_t>& cpus) { return cpus ? *cpus : -1; }

// Registers as a server processor with every level reports them under Linux.
constexpr CpuidWords kFull{0x7ef8320b, 0xf1bf97a9, 0xffd94432, 0x00000020, 0x602e7};

void ClassifyTakesTheHighestLevel() {
  CHECK_EQ(Level(kFull), 4);
  CpuidWords words = kFull;
  words.leaf7_edx = 0x10000000;  // AVX512_BF16 and no AMX
  CHECK_EQ(Level(words), 3);
  words.leaf7_1_eax = 0;
  CHECK_EQ(Level(words), 2);
  words.leaf7_ebx = 0x219c97a9;  // a desktop part: AVX2, no AVX-512
  CHECK_EQ(Level(words), 1);
  CHECK_EQ(Level(CpuidWords{}), 0);
}

void ClassifyNeedsEveryBit() {
  for (const int bit : {12, 27, 28}) {  // FMA, OSXSAVE, AVX
    CpuidWords words = kFull;
    words.leaf1_ecx &= ~(uint32_t{1} << bit);
    CHECK_EQ(Level(words), 0);
  }
  for (const int bit : {16, 17, 30, 31}) {  // AVX-512 F, DQ, BW, VL
    CpuidWords words = kFull;
    words.leaf7_ebx &= ~(uint32_t{1} << bit);
    CHECK_EQ(Level(words), 1);
  }
  for (const int bit : {22, 24}) {  // AMX-BF16, AMX-TILE
    CpuidWords words = kFull;
    words.leaf7_edx &= ~(uint32_t{1} << bit);
    CHECK_EQ(Level(words), 3);
  }
  CpuidWords words = kFull;
  words.leaf7_ebx &= ~(uint32_t{1} << 5);  // AVX2
  CHECK_EQ(Level(words), 0);
}

// A processor may have instructions whose registers the operating system loses.
void ClassifyAsksTheOperatingSystem() {
  CpuidWords words = kFull;
  for (const uint64_t xcr0 : {0x2e7, 0x202e7, 0x402e7}) {  // not all of the tiles
    words.xcr0 = xcr0;
    CHECK_EQ(Level(words), 3);
  }
  words.xcr0 = 0x7;  // x87, XMM, YMM
  CHECK_EQ(Level(words), 1);
  words.xcr0 = 0x67;  // half of the ZMM registers missing
  CHECK_EQ(Level(words), 1);
  words.xcr0 = 0x3;
  CHECK_EQ(Level(words), 0);
}

void IntelHasSlowPairs() {
  constexpr uint32_t kIntel = 0x756e6547, kAmd = 0x68747541;  // "Genu", "Auth"
  const auto slow = [](uint32_t vendor, uint32_t signature) {
    CpuidWords words = kFull;
    words.vendor = vendor;
    words.signature = signature;
    return ostinato::cpu::ClassifyPairs(words);
  };
  CHECK_EQ(slow(kIntel, 0x000806f8), true);   // Sapphire Rapids, model 143
  CHECK_EQ(slow(kIntel, 0x000c06f2), true);   // Emerald Rapids, 207
  CHECK_EQ(slow(kIntel, 0x0005065b), false);  // Cooper Lake, 85
  CHECK_EQ(slow(kAmd, 0x00a10f11), false);    // Zen 4
}

void CpuMaxIsRoundedDownToWholeCpus() {
  CHECK_EQ(Limit(ParseCpuMax("200000 100000")), 2);
  CHECK_EQ(Limit(ParseCpuMax("250000 100000")), 2);
  CHECK_EQ(Limit(ParseCpuMax("50000 100000")), 1);
  CHECK_EQ(Limit(ParseCpuMax("max 100000")), -1);
  CHECK_EQ(Limit(ParseCpuMax("")), -1);
  CHECK_EQ(Limit(ParseCpuMax("200000")), -1);
  CHECK_EQ(Limit(ParseCpuMax("200000 0")), -1);
  CHECK_EQ(Limit(ParseCpuMax("-1 100000")), -1);
  CHECK_EQ(Limit(ParseCpuMax("9223372036854775807 1")), 1 << 20);
}

void Write(const fs::path& folder, const std::string& text) {
  fs::create_directories(folder);
  std::ofstream(folder / "cpu.max") << text << "\n";
}

void CgroupLimitIsTheLeastOnTheWayUp(const fs::path& mount) {
  const std::string root = mount.string();
  CHECK_EQ(Limit(CgroupCpuLimit("0::/a/b\n", root)), -1);  // no file at all
  Write(mount / "a" / "b", "800000 100000");
  CHECK_EQ(Limit(CgroupCpuLimit("0::/a/b\n", root)), 8);
  Write(mount / "a", "300000 100000");
  CHECK_EQ(Limit(CgroupCpuLimit("0::/a/b\n", root)), 3);
  CHECK_EQ(Limit(CgroupCpuLimit("0::/\n", root)), -1);
  Write(mount, "500000 100000");
  CHECK_EQ(Limit(CgroupCpuLimit("0::/\n", root)), 5);
  CHECK_EQ(Limit(CgroupCpuLimit("0::/a/b", root)), 3);
  CHECK_EQ(Limit(CgroupCpuLimit("0::/a/gone/\n", root)), 3);
  CHECK_EQ(Limit(CgroupCpuLimit("0::/../x\n", root)), 5);
  CHECK_EQ(Limit(CgroupCpuLimit("3:cpu:/a/b\n0::/a\n", root)), 3);
  CHECK_EQ(Limit(CgroupCpuLimit("3:cpu:/a/b\n", root)), 5);
  CHECK_EQ(Limit(CgroupCpuLimit("", root)), 5);
}

void QuotasOfVersion1Count(const fs::path& root) {
  const auto write = [&](const fs::path& folder, const char* quota) {
    fs::create_directories(root / "cpu" / folder);
    std::ofstream(root / "cpu" / folder / "cpu.cfs_quota_us") << quota << "\n";
    std::ofstream(root / "cpu" / folder / "cpu.cfs_period_us") << "100000\n";
  };
  write("", "-1");
  CHECK_EQ(Limit(CgroupCpuLimit("4:cpu,cpuacct:/a\n", root)), -1);
  write("a/b", "250000");
  const char* const inside = "5:cpuset:/x\n4:cpu,cpuacct:/a/b\n1:name=systemd:/a\n";
  CHECK_EQ(Limit(CgroupCpuLimit(inside, root)), 2);
  CHECK_EQ(Limit(CgroupCpuLimit("4:cpuacct,cpu:/a\n", root)), -1);
  CHECK_EQ(Limit(CgroupCpuLimit("4:cpuset:/a/b\n", root)), -1);
  // A container sees the group of its host, and its own files at the root.
  write("", "100000");
  CHECK_EQ(Limit(CgroupCpuLimit("4:cpu:/docker/0123\n0::/\n", root)), 1);
  std::ofstream(root / "cpu.max") << "300000 100000\n";
  CHECK_EQ(Limit(CgroupCpuLimit("4:cpu:/\n0::/\n", root)), 1);
  CHECK_EQ(Limit(CgroupCpuLimit("0::/\n", root)), 1);
}

void OneThreadDoesNotSpeakForAll() {
#if defined(__linux__)
  const int32_t cpus = ostinato::cpu::ProcessCpus();
  std::thread([cpus] {
    cpu_set_t all, one;
    sched_getaffinity(0, sizeof all, &all);
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof one, &one);
    CHECK_EQ(ostinato::cpu::ProcessCpus(), cpus);
    std::thread([&all] {  // as helpers do
      cpu_set_t own;
      ostinato::cpu::RunWhereProcessMay(pthread_self());
      sched_getaffinity(0, sizeof own, &own);
      CHECK_EQ(CPU_EQUAL(&own, &all) != 0, true);
    })
        .join();
  }).join();
#endif
}

}  // namespace

int main() {
  ClassifyTakesTheHighestLevel();
  ClassifyNeedsEveryBit();
  ClassifyAsksTheOperatingSystem();
  IntelHasSlowPairs();
  CpuMaxIsRoundedDownToWholeCpus();
  std::string name = (fs::temp_directory_path() / "ostinato-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) return 2;
  CgroupLimitIsTheLeastOnTheWayUp(name);
  QuotasOfVersion1Count(fs::path(name) / "v1");
  fs::remove_all(name);
  OneThreadDoesNotSpeakForAll();
  const int level = static_cast<int>(ostinato::cpu::DetectIsa());
  CHECK_EQ(level >= 0 && level <= 4, true);
  const char* const reason = ostinato::cpu::WhyNoTiles();
  CHECK_EQ(reason == nullptr, level == 4);
  if (reason != nullptr) std::cout << "no tiles: " << reason << "\n";
  CHECK_EQ(ostinato::cpu::UsableCpus() >= 1, true);
  return ostinato::testing::Summary();
}
