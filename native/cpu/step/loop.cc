#include "cpu/step/loop.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <utility>

#include "cpu/kernels/dispatch.h"
#include "cpu/network/panels.h"
#include "cpu/network/values.h"
#include "cpu/runtime/scratch.h"
#include "cpu/runtime/team.h"
#include "cpu/step/call_check.h"
#include "cpu/step/follow.h"
#include "cpu/step/gradients.h"
#include "cpu/step/tile.h"
#include "cpu/step/weights.h"

namespace ostinato::cpu {
namespace {

// Sequences of a tile. So many have what a step writes in the second-level cache, and
// take far longer than making the tile.
constexpr int64_t kFewRows = 32, kMostRows = 512, kTileBytes = 1 << 16;
// Tiles for each thread, so that one that comes late finds some left.
constexpr int64_t kTilesPerThread = 8;
// A call with fewer vector operations is not worth waking a thread, and more threads
// than one for each kWorthWaking of them are not.
constexpr int64_t kWorthSharing = 1 << 16, kWorthWaking = 1 << 14;
// Steps of a chunk that are worth a second thread that follows the first.
constexpr int64_t kWorthFollowing = 48;

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

// Sequences of a tile at most.
int64_t RowsOf(const StepCall& call, int64_t threads, int64_t bytes) {
  int64_t elements = call.program.row_elements;
  for (const StepBuffer& buffer : call.program.buffers) {
    if (buffer.place != Place::kState || !buffer.rows) continue;
    elements += (buffer.in_place ? 1 : 2) * buffer.width;
  }
  const int64_t fit = kTileBytes / (elements * bytes + 1);
  const int64_t shared = CeilDiv(call.batch, kTilesPerThread * threads);
  return std::clamp<int64_t>(std::min(fit, shared), kFewRows, kMostRows);
}

int32_t ThreadsFor(int64_t work) {
  if (work < kWorthSharing) return 1;
  return static_cast<int32_t>(std::min<int64_t>(1 + work / kWorthWaking, NumThreads()));
}

// The groups of each tile.
std::vector<std::vector<int64_t>> Tiles(int64_t groups, int64_t count, bool deal) {
  std::vector<std::vector<int64_t>> tiles(count);
  for (int64_t g = 0; g < groups; ++g) {
    // Groups are in the order of falling length: dealt, tiles get as much of each.
    tiles[deal ? g % count : g * count / groups].push_back(g);
  }
  return tiles;
}

// Steps at a time: so many that what lives for a chunk stays in the caches.
int64_t ChunkOf(const StepCall& call, int64_t bytes) {
  // One sequence has little to read at a step, and may read it from farther away.
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
  if (call.batch > 1) steps = std::min(steps, kStepsOfASum);
  // Gradients are quickest to add up for many tokens, a multiple of this.
  const int64_t whole = std::max<int64_t>(256 / rows, 1);
  return std::min(steps > whole ? steps / whole * whole : steps,
                  std::max<int64_t>(call.steps, 1));
}

template <typename T>
T* ResultOf(const StepCall& call, const StepBuffer& sum) {
  return static_cast<T*>(call.results[sum.array].data);
}

template <typename T>
StepLoop<T> LoopOf(const StepCall& call, const StepPanels<T>* packed, Scratch& scratch,
                   Team& team) {
  const KernelSet& set = CurrentKernels();
  StepLoop<T> loop{call, KernelsOf<T>(set), StepKernelsOf<T>(set), set.bf16_pairs};
  if (packed != nullptr) {
    loop.panels = packed->panels();
  } else {
    const auto take = [&](int64_t count) { return scratch.Take<T>(count); };
    loop.panels = PackWeights<T>(call, take, team);
  }
  loop.chunk = ChunkOf(call, sizeof(T));
  loop.group = call.batch >= 16 ? 4 : 1;
  loop.order.resize(call.batch);
  std::iota(loop.order.begin(), loop.order.end(), 0);
  loop.lengths.assign(call.batch, call.steps);
  if (call.lengths != nullptr) {
    std::vector<int64_t> lengths(call.batch);
    int64_t left = call.capacity >= 0 ? call.capacity : call.steps * call.batch;
    for (int64_t b = 0, first = 0; b < call.batch; ++b, first += lengths[b - 1]) {
      lengths[b] = std::clamp<int64_t>(call.lengths[b], 0, std::min(call.steps, left));
      left -= lengths[b];
      if (call.capacity >= 0) loop.offsets.push_back(first);
    }
    const auto length = [&](int64_t row) { return lengths[row]; };
    std::stable_sort(loop.order.begin(), loop.order.end(),
                     [&](int64_t a, int64_t b) { return length(a) > length(b); });
    std::transform(loop.order.begin(), loop.order.end(), loop.lengths.begin(), length);
  }
  const int64_t groups = CeilDiv(call.batch, loop.group);
  for (const StepBuffer& buffer : call.program.buffers) {
    const bool sums = buffer.place == Place::kSum && !buffer.rows;
    const auto take = [&](bool wanted) {
      return wanted ? scratch.TakeZeroed<T>(groups * buffer.width) : nullptr;
    };
    const bool alone = sums && groups == 1;  // in the result itself
    loop.sums.push_back(alone ? ResultOf<T>(call, buffer) : take(sums));
    if (alone) std::fill_n(loop.sums.back(), buffer.width, T{0});
    loop.earlier_sums.push_back(take(sums && call.steps > kStepsOfASum));
  }
  return loop;
}

// The sums of so many groups are added up before the sums of others: a single chain of
// additions loses digits.
constexpr int64_t kGroupsOfAPart = 1024;

template <typename T>
void FinishSums(const StepLoop<T>& loop) {
  const int64_t groups = CeilDiv(loop.call.batch, loop.group);
  for (size_t i = 0; i < loop.sums.size(); ++i) {
    if (loop.sums[i] == nullptr) continue;
    const StepBuffer& buffer = loop.call.program.buffers[i];
    T* const result = ResultOf<T>(loop.call, buffer);
    const auto add = [&](const T* from, T* to) {
      Add(from, nullptr, T{1}, buffer.width, to);
    };
    const auto sum_of = [&](int64_t g) { return loop.sums[i] + g * buffer.width; };
    for (int64_t g = 0; g < groups && loop.earlier_sums[i] != nullptr; ++g) {
      add(loop.earlier_sums[i] + g * buffer.width, sum_of(g));
    }
    if (result == loop.sums[i]) continue;
    std::fill_n(result, buffer.width, T{0});
    for (int64_t g = 0; g < groups; g += kGroupsOfAPart) {
      const int64_t end = std::min(g + kGroupsOfAPart, groups);
      for (int64_t other = g + 1; other < end; ++other) add(sum_of(other), sum_of(g));
      add(sum_of(g), result);
    }
  }
}

StepArray Next(const StepArray& array, int64_t n) {
  return {static_cast<char*>(array.data) + n * array.elements * array.bytes,
          array.elements, array.bytes};
}

StepCall CallOf(const StepCall& first, const StepMembers& members, int64_t n) {
  StepCall call = first;
  for (size_t i = 0; i < call.operands.size(); ++i) {
    if (members.own_operands[i]) call.operands[i] = Next(first.operands[i], n);
  }
  for (StepArray& result : call.results) result = Next(result, n);
  if (members.own_lengths) call.lengths += n * call.batch;
  return call;
}

// Fills the capacity after the last sequence with zeros.
template <typename T>
void ClearUnused(const StepLoop<T>& loop) {
  if (loop.offsets.empty()) return;
  const int64_t used =
      std::accumulate(loop.lengths.begin(), loop.lengths.end(), int64_t{0});
  for (const StepBuffer& buffer : loop.call.program.buffers) {
    if (buffer.place != Place::kOutput || !buffer.rows) continue;
    const StepArray& array = loop.call.results[buffer.array];
    const int64_t row = buffer.width * array.bytes;
    std::memset(static_cast<char*>(array.data) + used * row, 0,
                (loop.call.capacity - used) * row);
  }
}

}  // namespace

template <typename T>
void RunSteps(const StepCall& given, const StepPanels<T>* packed) {
  CheckArrays(given, sizeof(T));
  StepCall call = given;
  if (call.lengths != nullptr && call.capacity < 0 &&
      std::all_of(
          call.lengths, call.lengths + call.batch,
          [&](int32_t length) { return length >= call.steps; })) {
    call.lengths = nullptr;
  }
  for (const StepArray& result : call.results) {
    AdviseHugePages(result.data, result.elements * result.bytes);
  }
  Scratch scratch;
  const int64_t lanes = KernelsOf<T>(CurrentKernels()).lanes;
  Team team(ThreadsFor(Work(call, lanes)));
  const StepLoop<T> loop = LoopOf<T>(call, packed, scratch, team);

  const int64_t groups = CeilDiv(call.batch, loop.group);
  const int64_t wanted = std::max<int64_t>(
      CeilDiv(call.batch, RowsOf(call, team.threads(), sizeof(T))), team.threads());
  std::vector<std::unique_ptr<StepTile<T>>> tiles;
  for (auto& own : Tiles(groups, std::min(groups, wanted), call.lengths != nullptr)) {
    tiles.push_back(std::make_unique<StepTile<T>>(loop, std::move(own), tiles.empty()));
  }
  StepGradients<T> gradients(loop, tiles);
  // Gradients need what all tiles have made of a chunk; else none waits for the others.
  const bool together = !call.program.gradients.empty();
  const bool follows = team.threads() > 1 && tiles.size() == 1 &&
                       std::min(call.steps, loop.chunk) >= kWorthFollowing &&
                       tiles[0]->CanFollow();
  const int64_t stride = together ? loop.chunk : std::max<int64_t>(call.steps, 1);
  for (int64_t begin = 0; begin < call.steps; begin += stride) {
    const int64_t end = std::min(begin + stride, call.steps);
    const auto by_chunk = [&](const auto& run) {
      for (int64_t n = begin; n < end; n += loop.chunk) {
        run(n, std::min(n + loop.chunk, end));
      }
    };
    if (follows) {
      by_chunk([&](int64_t n, int64_t next) {
        RunFollowed(*tiles[0], gradients, n, next, team);
      });
      continue;
    }
    if (tiles.size() == 1) {
      by_chunk([&](int64_t n, int64_t next) { tiles[0]->Run(n, next, &team); });
    } else {
      team.ForEach(tiles.size(), [&](int64_t i) {
        by_chunk([&](int64_t n, int64_t next) { tiles[i]->Run(n, next, nullptr); });
      });
    }
    gradients.Add(begin, end, team);
  }
  for (const auto& tile : tiles) tile->Finish();
  gradients.Finish();
  FinishSums(loop);
  ClearUnused(loop);
}

template <typename T>
void RunMembers(const StepCall& first, const StepMembers& members) {
  const int64_t lanes = KernelsOf<T>(CurrentKernels()).lanes;
  const auto run = [&](int64_t n) { RunSteps<T>(CallOf(first, members, n)); };
  const int32_t threads = ThreadsFor(Work(first, lanes) * members.count);
  if (members.count >= std::max(threads, 2)) {
    // While this team has the helpers, the loops inside of it find none.
    Team(threads).ForEach(members.count, run);
    return;
  }
  for (int64_t n = 0; n < members.count; ++n) run(n);
}

template void RunMembers<float>(const StepCall& first, const StepMembers&);
template void RunMembers<double>(const StepCall& first, const StepMembers&);
template void RunSteps<float>(const StepCall& call, const StepPanels<float>*);
template void RunSteps<double>(const StepCall& call, const StepPanels<double>*);

}  // namespace ostinato::cpu
