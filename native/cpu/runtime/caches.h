// How large the caches of one CPU are, and the sizes of blocks that follow from them.
//
// Blocks of these sizes decide how often something is read again, never the order in
// which anything is summed: results have the same bits on machines with other caches.
// kChunkTokens of backward.cc does decide an order, and is the same everywhere.
#ifndef OSTINATO_CPU_RUNTIME_CACHES_H_
#define OSTINATO_CPU_RUNTIME_CACHES_H_

#include <cstdint>

namespace ostinato::cpu {

// Bytes of the first level for data, and of the second level.
struct CacheSizes {
  int64_t first, second;
};

// Those of this machine, read once; of a common one where the system does not tell.
const CacheSizes& Caches() noexcept;

// Sequences of one portion, whose accumulators, 4 vectors each, stay in the first level
// next to what they are multiplied from: 48 for 32 KB.
int64_t SequencesPerPortion(const CacheSizes& caches) noexcept;

// How deep a piece of a panel of 4 vectors is that stays in the second level while many
// rows pass by: 512 for 1 MB. A multiple of 32, as tiles need it to keep their order.
int64_t PanelDepth(const CacheSizes& caches) noexcept;

// How many steps of a panel, of so many bytes each, stay in the first level while rows
// pass by, a few at a time: 128 of 256 bytes for 48 KB. The largest number of all where
// they are so few that reading sums again takes longer than the second level.
int64_t StepsInFirstLevel(const CacheSizes& caches, int64_t step_bytes) noexcept;

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_CACHES_H_
