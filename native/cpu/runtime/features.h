// Features of the machine that kernels depend on: instruction set and number of CPUs.
#ifndef OSTINATO_CPU_RUNTIME_FEATURES_H_
#define OSTINATO_CPU_RUNTIME_FEATURES_H_

#include <cstdint>
#include <optional>
#include <string>

namespace ostinato::cpu {

// Every level includes the ones before it.
enum class Isa : int32_t {
  kPortable = 0,
  kAvx2 = 1,        // AVX2 and FMA
  kAvx512 = 2,      // AVX-512 F, DQ, BW and VL
  kAvx512Bf16 = 3,  // and AVX512_BF16
  kAvx512Amx = 4,   // and AMX: TILE and BF16
};
// Their names, by number: CPU_ISAS of _config.py.
inline constexpr const char* kIsaNames[] = {"portable", "avx2", "avx512", "avx512_bf16",
                                            "avx512_amx"};

// The registers that decide the level, and the vendor and model, EBX of leaf 0 and EAX
// of leaf 1; those that a processor lacks stay 0.
struct CpuidWords {
  uint32_t leaf1_ecx = 0;
  uint32_t leaf7_ebx = 0;
  uint32_t leaf7_edx = 0;
  uint32_t leaf7_1_eax = 0;
  // Which registers the operating system saves when it switches threads.
  uint64_t xcr0 = 0;
  uint32_t vendor = 0, signature = 0;
};

// The level that `words` allow. An instruction counts only when the operating system
// also saves the registers that it uses.
Isa ClassifyIsa(const CpuidWords& words) noexcept;

// The level of this machine, at most `most`; kPortable where there is no cpuid
// instruction. The registers of kAvx512Amx are large, and a process must ask Linux for
// them, for good: this does, unless `most` is less.
Isa DetectIsa(Isa most = Isa::kAvx512Amx) noexcept;

// Whether a processor multiplies more floats than pairs of bfloat16 in a time, from its
// vendor and model.
bool ClassifyPairs(const CpuidWords& words) noexcept;
// Whether this one does; of no interest below kAvx512Bf16.
bool PairsAreSlow() noexcept;

// Why DetectIsa is below kAvx512Amx, in words that stay; null if it is not. Asks, too.
const char* WhyNoTiles() noexcept;

// CPUs that a cgroup v2 `cpu.max` line ("200000 100000", "max 100000") grants: whole
// ones, at least 1; nothing where it sets no limit or makes no sense.
//
// Rounded down: a team of threads larger than its quota is stopped for the rest of
// each period, and one stopped thread holds up all the others.
std::optional<int32_t> ParseCpuMax(const std::string& line) noexcept;

// The smallest limit on the way from this process's cgroup to the root of the tree, in
// version 2 (`cpu.max`) or 1 (`cpu.cfs_quota_us` in the folder `cpu`).
// `membership` is the text of /proc/self/cgroup, `mount` is where the tree stands.
std::optional<int32_t> CgroupCpuLimit(const std::string& membership,
                                      const std::string& mount);

// How many CPUs this process may keep busy at once: see ProcessCpus, or the cgroup
// quota where that is less. At least 1.
int32_t UsableCpus();

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_FEATURES_H_
