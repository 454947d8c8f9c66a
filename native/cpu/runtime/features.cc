#include "cpu/runtime/features.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "cpu/runtime/affinity.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#endif

namespace ostinato::cpu {
namespace {

constexpr uint32_t Bit(int n) { return uint32_t{1} << n; }

template <typename T>
constexpr bool HasAll(T word, T bits) {
  return (word & bits) == bits;
}

// Leaf 1, ECX.
constexpr uint32_t kBitFma = Bit(12), kBitOsxsave = Bit(27), kBitAvx = Bit(28);
// Leaf 7, EBX.
constexpr uint32_t kBitAvx2 = Bit(5), kBitAvx512f = Bit(16), kBitAvx512dq = Bit(17),
                   kBitAvx512bw = Bit(30), kBitAvx512vl = Bit(31);
// Leaf 7, EDX.
constexpr uint32_t kBitAmxBf16 = Bit(22), kBitAmxTile = Bit(24);
// Leaf 7, subleaf 1, EAX.
constexpr uint32_t kBitAvx512Bf16 = Bit(5);
// XCR0: XMM and YMM; then the mask registers and both halves of ZMM; then the shape and
// the data of tiles.
constexpr uint64_t kSavesYmm = 0x06, kSavesZmm = kSavesYmm | 0xe0,
                   kSavesTiles = 0x60000;

#if defined(__x86_64__)
CpuidWords ReadCpuid() noexcept {
  CpuidWords words;
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(0, &eax, &words.vendor, &ecx, &edx)) return words;
  if (!__get_cpuid(1, &words.signature, &ebx, &ecx, &edx)) return words;
  words.leaf1_ecx = ecx;
  if (HasAll(ecx, kBitOsxsave)) {  // without it, xgetbv is an illegal instruction
    uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    words.xcr0 = (uint64_t{high} << 32) | low;
  }
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return words;
  words.leaf7_ebx = ebx;
  words.leaf7_edx = edx;
  const uint32_t last_subleaf = eax;
  if (last_subleaf >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) {
    words.leaf7_1_eax = eax;
  }
  return words;
}
#endif

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);  // stays empty where the file cannot be read
  return line;
}

}  // namespace

Isa ClassifyIsa(const CpuidWords& words) noexcept {
  if (!HasAll(words.leaf1_ecx, kBitOsxsave | kBitAvx | kBitFma) ||
      !HasAll(words.leaf7_ebx, kBitAvx2) || !HasAll(words.xcr0, kSavesYmm)) {
    return Isa::kPortable;
  }
  if (!HasAll(words.leaf7_ebx,
              kBitAvx512f | kBitAvx512dq | kBitAvx512bw | kBitAvx512vl) ||
      !HasAll(words.xcr0, kSavesZmm)) {
    return Isa::kAvx2;
  }
  if (!HasAll(words.leaf7_1_eax, kBitAvx512Bf16)) return Isa::kAvx512;
  const bool tiles = HasAll(words.leaf7_edx, kBitAmxTile | kBitAmxBf16) &&
                     HasAll(words.xcr0, kSavesTiles);
  return tiles ? Isa::kAvx512Amx : Isa::kAvx512Bf16;
}

bool ClassifyPairs(const CpuidWords& words) noexcept {
  constexpr uint32_t kGenuineIntel = 0x756e6547;  // "Genu"
  constexpr uint32_t kCooperLake = 0x55;          // has two units for pairs
  const uint32_t model = (words.signature >> 4 & 0xf) | (words.signature >> 12 & 0xf0);
  return words.vendor == kGenuineIntel && model != kCooperLake;
}

namespace {

// Null, or why Linux does not let this process use the registers of tiles.
[[maybe_unused]] const char* AskForTiles() noexcept {
#if defined(__linux__) && defined(__x86_64__)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM, since Linux 5.16
  constexpr int kTileData = 18;               // the component of XCR0
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return nullptr;
  if (errno == ENOSPC) {
    return "Linux refuses AMX tiles: the signal stack of a thread is too small for "
           "them";
  }
  return "Linux refuses AMX tiles; it has had them since version 5.16";
#else
  return "this system has no way to ask for AMX tiles";
#endif
}

// What the processor has, whether Linux has been asked for tiles or not.
struct Detected {
  Isa isa = Isa::kPortable;
  bool pairs_are_slow = false;
  const char* why_no_tiles = "the processor is not x86";
};

Detected Detect() noexcept {
  Detected found;
#if defined(__x86_64__)
  const CpuidWords words = ReadCpuid();
  found.isa = ClassifyIsa(words);
  found.pairs_are_slow = ClassifyPairs(words);
  if (found.isa == Isa::kAvx512Amx) {
    found.why_no_tiles = nullptr;
#if defined(OSTINATO_NO_AMX)
    found.isa = Isa::kAvx512Bf16;
    found.why_no_tiles = "the compiler that built this library does not know AMX";
#endif
  } else if (HasAll(words.leaf7_edx, kBitAmxTile | kBitAmxBf16)) {
    found.why_no_tiles = "the system does not save AMX tiles, or hides AVX512_BF16";
  } else {
    found.why_no_tiles = "the processor has no AMX-BF16";
  }
#endif
  return found;
}

const Detected& DetectOnce() noexcept {
  static const Detected detected = Detect();
  return detected;
}

}  // namespace

Isa DetectIsa(Isa most) noexcept {
  const Isa isa = std::min(DetectOnce().isa, most);
  if (isa < Isa::kAvx512Amx || WhyNoTiles() == nullptr) return isa;
  return Isa::kAvx512Bf16;
}

bool PairsAreSlow() noexcept { return DetectOnce().pairs_are_slow; }

const char* WhyNoTiles() noexcept {
  if (DetectOnce().isa < Isa::kAvx512Amx) return DetectOnce().why_no_tiles;
  // Asked once: a process that has the permission keeps it, and so do its children.
  static const char* const refused = AskForTiles();
  return refused;
}

std::optional<int32_t> ParseCpuMax(const std::string& line) noexcept {
  const char* text = line.c_str();
  char* end = nullptr;
  const long long quota = std::strtoll(text, &end, 10);
  if (end == text || quota <= 0) return std::nullopt;  // "max" or no number
  text = end;
  const long long period = std::strtoll(text, &end, 10);
  if (end == text || period <= 0) return std::nullopt;
  constexpr long long kMost = 1 << 20;
  return static_cast<int32_t>(std::clamp(quota / period, 1LL, kMost));
}

namespace {

// The least limit of a group and those above it; `line` returns that of one.
template <typename Line>
std::optional<int32_t> LeastUpwards(std::string group, const Line& line) {
  // A cgroup outside this namespace shows as "/..": only the mount itself is ours.
  if (group.find("..") != std::string::npos) group.clear();
  while (!group.empty() && group.back() == '/') group.pop_back();
  std::optional<int32_t> least;
  while (true) {
    const auto limit = ParseCpuMax(line(group));
    if (limit) least = least ? std::min(*least, *limit) : *limit;
    if (group.empty()) return least;
    group.erase(group.rfind('/'));  // up to the parent
  }
}

}  // namespace

std::optional<int32_t> CgroupCpuLimit(const std::string& membership,
                                      const std::string& mount) {
  std::istringstream lines(membership);
  std::string line, v1, v2;
  while (std::getline(lines, line)) {  // number:controllers:group
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1);
    if (controllers == ",") v2 = line.substr(second + 1);
    if ((controllers + ",").find(",cpu,") != std::string::npos) {
      v1 = line.substr(second + 1);
    }
  }
  const auto max = LeastUpwards(v2, [&](const std::string& group) {
    return FirstLine(mount + group + "/cpu.max");
  });
  const auto quota = LeastUpwards(v1, [&](const std::string& group) {
    const std::string folder = mount + "/cpu" + group;
    return FirstLine(folder + "/cpu.cfs_quota_us") + " " +
           FirstLine(folder + "/cpu.cfs_period_us");
  });
  return max && quota ? std::min(max, quota) : max ? max : quota;
}

int32_t UsableCpus() {
  int32_t cpus = ProcessCpus();
#if defined(__linux__)
  std::ifstream file("/proc/self/cgroup");
  std::ostringstream membership;
  membership << file.rdbuf();
  if (const auto limit = CgroupCpuLimit(membership.str(), "/sys/fs/cgroup")) {
    cpus = std::min(cpus, *limit);
  }
#endif
  return std::max(cpus, int32_t{1});
}

}  // namespace ostinato::cpu
