#include "cpu/step/tiling.h"

#include <algorithm>
#include <numeric>

#include "cpu/network/panels.h"
#include "cpu/runtime/team.h"
#include "cpu/step/tile.h"

namespace ostinato::cpu {
namespace {

// Sequences of a tile: what a step writes of kTileBytes is in the second-level cache;
// kFewRows take far longer than making the tile, and kFewElements of a result than
// beginning an instruction.
constexpr int64_t kFewRows = 32, kMostRows = 512, kTileBytes = 1 << 16;
constexpr int64_t kFewElements = 2048;
// Tiles for each thread, so that one that comes late finds some left.
constexpr int64_t kTilesPerThread = 8;
// Sequences that are sorted among each other. In arrays they are neighbours, so that
// few tiles share a cache line where rows are narrow.
constexpr int64_t kBand = 512;
// Sequences of a group, and the elements of a row from which on few are enough.
constexpr int64_t kLeastGroup = 4, kLargestGroup = 32, kWideRow = 8;
// A call with fewer vector operations is not worth waking a thread, and more threads
// than one for each kWorthWaking of them are not.
constexpr int64_t kWorthSharing = 1 << 16, kWorthWaking = 1 << 14;

// Vector operations of all steps.
int64_t Work(const StepCall& call, int64_t lanes) {
  int64_t work = 0;
  for (const StepGradient& g : call.program.gradients) {
    work += g.a.width * CeilDiv(g.b.width, lanes);
  }
  for (const StepInstruction& i : call.program.instructions) {
    int64_t each = CeilDiv(i.width, lanes);
    if (i.operation == kProduct) {
      const StepWeight& weight = call.program.weights[i.weight];
      each = weight.depth * CeilDiv(weight.columns, lanes);
    }
    work += each * RowsTouched(i);
  }
  return work * call.steps * call.batch;
}

// Elements that an instruction makes for a sequence, on average.
int64_t MeanWidth(const StepProgram& program) {
  int64_t elements = 1, count = 1;
  for (const StepInstruction& i : program.instructions) {
    if (!i.rows || i.operation == kProduct) continue;
    elements += i.inner * i.width;
    ++count;
  }
  return CeilDiv(elements, count);
}

// Sequences of a tile at most.
int64_t RowsOf(const StepCall& call, int64_t bytes, int64_t threads) {
  int64_t elements = call.program.row_elements;
  for (const StepBuffer& buffer : call.program.buffers) {
    if (buffer.place != Place::kState || !buffer.rows) continue;
    elements += (buffer.in_place ? 1 : 2) * buffer.width;
  }
  const int64_t fit = kTileBytes / (elements * bytes + 1);
  const int64_t shared = CeilDiv(call.batch, kTilesPerThread * threads);
  const int64_t few =
      std::clamp(kFewElements / MeanWidth(call.program), kFewRows, kMostRows);
  return std::clamp(std::min(fit, shared), few, kMostRows);
}

}  // namespace

int32_t ThreadsFor(const StepCall& call, int64_t lanes, int64_t members) {
  const int64_t work = Work(call, lanes) * members;
  if (work < kWorthSharing) return 1;
  return static_cast<int32_t>(std::min<int64_t>(1 + work / kWorthWaking, NumThreads()));
}

int64_t ChunkOf(const StepCall& call, int64_t bytes) {
  // What lives for a chunk stays in the caches. One sequence has little to read at a
  // step, and may read it from farther away.
  const int64_t most_bytes = int64_t{1} << (call.batch == 1 ? 22 : 20);
  int64_t width = 0;
  for (const StepBuffer& buffer : call.program.buffers) {
    const bool input = buffer.place == Place::kInput;
    bool ours = buffer.place == Place::kChunk;
    if (input || buffer.place == Place::kOutput) {
      const StepArray& array = (input ? call.operands : call.results)[buffer.array];
      ours = call.lengths != nullptr || array.bytes != bytes;
    }
    if (ours) width += buffer.width;
  }
  // Sequences that have a step, on average.
  int64_t rows = call.batch;
  if (call.lengths != nullptr) {
    int64_t tokens = 0;
    for (int64_t b = 0; b < call.batch; ++b) {
      tokens += std::clamp<int64_t>(call.lengths[b], 0, call.steps);
    }
    rows = CeilDiv(tokens, std::max<int64_t>(call.steps, 1));
  }
  rows = std::max<int64_t>(rows, 1);
  int64_t steps = std::max<int64_t>(most_bytes / (width * rows * bytes + 1), 1);
  // Sums of several sequences grow by each step, and are put aside after a chunk.
  if (call.batch > 1) steps = std::min(steps, StepsOfASum(GroupOf(call)));
  // Gradients are quickest to add up for many tokens, a multiple of this.
  const int64_t whole = std::max<int64_t>(256 / rows, 1);
  return std::min(steps > whole ? steps / whole * whole : steps,
                  std::max<int64_t>(call.steps, 1));
}

int64_t GroupOf(const StepCall& call) {
  if (call.batch < 16) return 1;
  int64_t group = kLeastGroup;
  if (MeanWidth(call.program) >= kWideRow) return group;
  while (group < kLargestGroup && 64 * group <= call.batch) group *= 2;
  return group;
}

std::vector<int64_t> OrderOf(const std::vector<int64_t>& lengths) {
  const auto count = static_cast<int64_t>(lengths.size());
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  for (int64_t first = 0; first < count; first += kBand) {
    std::stable_sort(order.begin() + first,
                     order.begin() + std::min(first + kBand, count),
                     [&](int64_t a, int64_t b) { return lengths[a] > lengths[b]; });
  }
  return order;
}

std::vector<std::vector<int64_t>> TilesOf(const StepCall& call,
                                          const std::vector<int64_t>& ordered_lengths,
                                          int64_t group, int64_t bytes,
                                          int64_t threads) {
  static_assert(kBand % kLargestGroup == 0, "each group is in one band");
  const int64_t groups = CeilDiv(call.batch, group);
  const int64_t rows = RowsOf(call, bytes, threads);
  const bool sorted = call.lengths != nullptr;
  const int64_t band = sorted ? kBand / group : std::max<int64_t>(groups, 1);
  const int64_t for_each =
      CeilDiv(threads, std::max<int64_t>(CeilDiv(groups, band), 1));
  std::vector<std::vector<int64_t>> tiles;
  for (int64_t first = 0; first < groups; first += band) {
    const int64_t all = std::min(band, groups - first);
    const int64_t count = std::min(all, std::max(CeilDiv(all * group, rows), for_each));
    const auto begin = tiles.size();
    tiles.resize(begin + count);
    for (int64_t g = 0; g < all; ++g) {
      // Dealt, tiles get as much of long sequences and of short ones each.
      tiles[begin + (sorted ? g % count : g * count / all)].push_back(first + g);
    }
  }
  const auto longest = [&](const std::vector<int64_t>& tile) {
    return ordered_lengths[tile.front() * group];
  };
  std::stable_sort(tiles.begin(), tiles.end(), [&](const auto& a, const auto& b) {
    return longest(a) > longest(b);
  });
  return tiles;
}

}  // namespace ostinato::cpu
