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
#include "cpu/step/tiling.h"
#include "cpu/step/weights.h"

namespace ostinato::cpu {
namespace {

// Steps of a chunk that are worth a second thread that follows the first.
constexpr int64_t kWorthFollowing = 48;

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
  loop.group = GroupOf(call);
  std::vector<int64_t> lengths(call.batch, call.steps);
  if (call.lengths != nullptr) {
    int64_t left = call.capacity >= 0 ? call.capacity : call.steps * call.batch;
    for (int64_t b = 0, first = 0; b < call.batch; ++b, first += lengths[b - 1]) {
      lengths[b] = std::clamp<int64_t>(call.lengths[b], 0, std::min(call.steps, left));
      left -= lengths[b];
      if (call.capacity >= 0) loop.offsets.push_back(first);
    }
  }
  loop.order = OrderOf(lengths);
  for (const int64_t row : loop.order) loop.lengths.push_back(lengths[row]);
  const int64_t groups = CeilDiv(call.batch, loop.group);
  for (const StepBuffer& buffer : call.program.buffers) {
    const bool sums = buffer.place == Place::kSum && !buffer.rows;
    const auto take = [&](bool wanted) {
      return wanted ? scratch.TakeZeroed<T>(groups * buffer.width) : nullptr;
    };
    const bool alone = sums && groups == 1;  // in the result itself
    loop.sums.push_back(alone ? ResultOf<T>(call, buffer) : take(sums));
    if (alone) std::fill_n(loop.sums.back(), buffer.width, T{0});
    loop.earlier_sums.push_back(take(sums && call.steps > StepsOfASum(loop.group)));
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
  Team team(ThreadsFor(call, lanes));
  const StepLoop<T> loop = LoopOf<T>(call, packed, scratch, team);

  std::vector<std::unique_ptr<StepTile<T>>> tiles;
  for (auto& own : TilesOf(call, loop.lengths, loop.group, sizeof(T), team.threads())) {
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
  const int32_t threads = ThreadsFor(first, lanes, members.count);
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
