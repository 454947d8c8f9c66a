// The backward pass of what recurrent.h runs: from the cotangents of outputs and final
// states to those of preactivations and initial states.
//
// A cluster runs some sequences of one head of one direction from their last step to
// their first.
// Each block has the rows of the weights that belong to its units' gates. A warp
// computes the cotangents of the gates of eight units, as in the forward pass, and the
// block multiplies those of all its units with its weights: that is its part of the
// cotangents of the states before the step, which it sends to the blocks that own their
// units. These add the parts of all blocks.
constexpr int kGroups = kUnitsOfBlock / 8;
constexpr int kGateWords = 4 * kUnitsOfBlock / kUnitsOfWord;
// A block alone has more warps than tiles of 16 units: two warps share a tile, and each
// multiplies half of the gates.
constexpr int kHalves = kCluster == 1 ? 2 : 1;
constexpr int kParts = kCluster * kHalves;                    // that are added
constexpr int kUnitTiles = kCluster == 1 ? 1 : kCluster / 2;  // of a warp
constexpr int kGateDepth = kGateWords / 8 / kHalves;
constexpr int kHeldGates =  // products of each tile
    kHeld / kUnitTiles < kGateDepth ? kHeld / kUnitTiles : kGateDepth;
static_assert(kGateDepth % 2 == 0 && kHeldGates % 2 == 0 &&
              (kCluster == 1 || kCluster % 2 == 0));
constexpr int kLeftGates = kGateDepth - kHeldGates;

struct alignas(8) Pair {
  float at[2];
};

struct Shared {
  Word gates[2][kSlots * kGateWords];
  Pair parts[2][kParts][kGroups][kTiles][32];
  Arrivals arrivals[2];
  Fragment left[kLeftGates > 0 ? kWarps * kUnitTiles * kLeftGates * 32 : 1];
};
static_assert(sizeof(Shared) == SHARED);

// What a step reads of a unit and a sequence.
struct Saved {
  float gates[4], cell, before, dy;
};

// From cotangents after a step to those of preactivations, of c before the step, and to
// the part of that of h which does not pass through a product.
OSTINATO_DEVICE void Retreat(const Saved& s, float dh, float* dc, float* direct,
                             float* d) {
  const float* const g = s.gates;
  if constexpr (kGru) {
    const float candidate = dh * (1.f - g[1]) * (1.f - g[2] * g[2]);
    d[0] = candidate * g[3] * g[0] * (1.f - g[0]);
    d[1] = dh * (s.before - g[2]) * g[1] * (1.f - g[1]);
    d[2] = candidate;
    d[3] = candidate * g[0];
    *direct = dh * g[1];
  } else {
    const float u = Tanh(s.cell), whole = *dc + dh * g[3] * (1.f - u * u);
    d[0] = whole * g[2] * g[0] * (1.f - g[0]);
    d[1] = whole * s.before * g[1] * (1.f - g[1]);
    d[2] = whole * g[0] * (1.f - g[2] * g[2]);
    d[3] = dh * u * g[3] * (1.f - g[3]);
    *dc = whole * g[1];
    *direct = 0.f;
  }
}

// Arrays: of each direction gates and dgates [steps][batch][4][width], cells and
// `before`, which is c before each step, in a GRU h, [steps][batch][width]; dy
// [steps][batch][directions][width], states [directions][batch][width].
// `order` is that of recurrent_run. Null: lengths, order, resets; of the second
// direction what is not there; in a GRU cells and all of c.
using Before = BEFORE;
OSTINATO_KERNEL_OF(kThreads)
void recurrent_backward(const Storage* gates_0, const Storage* gates_1,
                        const float* cells_0, const float* cells_1,
                        const Before* before_0, const Before* before_1,
                        const Fragment* weights, const Storage* dy, const Storage* dh_n,
                        const Storage* dc_n, const int* lengths, const int* order,
                        const unsigned char* resets, Storage* dgates_0,
                        Storage* dgates_1, Storage* dh_0, Storage* dc_0,
                        const Sizes r) {
  // As 64 bits, numbers of heads would take too many registers.
  const int matrix = static_cast<int>(Matrix(r));
  const Batch all = BatchOf(r, lengths, order, resets, matrix);
  const bool first_direction = all.direction == 0;
  const Storage* const gates = first_direction ? gates_0 : gates_1;
  const float* const cells = first_direction ? cells_0 : cells_1;
  const Before* const before = first_direction ? before_0 : before_1;
  Storage* const dgates = first_direction ? dgates_0 : dgates_1;
  Shared* const shared = reinterpret_cast<Shared*>(SharedMemory());
  const int thread = static_cast<int>(ThreadOfBlock());
  const int lane = thread % 32, warp = thread / 32;
  const int rank = static_cast<int>(Block() % kCluster);

  Fragment held[kUnitTiles][kHeldGates > 0 ? kHeldGates : 1];
  Fragment* const left = shared->left + warp * kUnitTiles * kLeftGates * 32 + lane;
  const Fragment* const own =
      weights +
      ((matrix * kCluster + rank) * kWarps + warp) * kUnitTiles * kGateDepth * 32 +
      lane;
  LoadWeights<kHeldGates, kLeftGates>(own, held, left);
  constexpr int kBytes = kCluster * kGroups * kTiles * 32 * sizeof(Pair);
  if (kCluster > 1 && thread == 0) {
    for (Arrivals& each : shared->arrivals) {
      Begin(&each);
      Expect(&each, kBytes);
    }
  }

  const int unit = rank * kUnitsOfBlock + warp * 8 + lane / 4;
  const bool is_unit = unit < r.units;
  const Index column = all.Column(unit);
  Sequence sequences[kTiles][2];
  float dh[kTiles][2], dc[kTiles][2], direct[kTiles][2];
  OSTINATO_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    OSTINATO_UNROLL
    for (int e = 0; e < 2; ++e) {
      const Sequence s = all.Find(tile * 8 + lane % 4 * 2 + e);
      sequences[tile][e] = s;
      const Index state = all.AtState(s, column);
      dh[tile][e] = s.exists && is_unit ? Widen(Load(dh_n + state)) : 0.f;
      dc[tile][e] = direct[tile][e] = 0.f;
      if (!kGru && s.exists && is_unit) dc[tile][e] = Widen(Load(dc_n + state));
    }
  }
  const int longest = all.Longest();
  WaitForAll();

  Saved saved[kTiles][2];
  bool reset[kTiles][2];  // before the step of `saved`
  const auto load_saved = [&](int k) {
    OSTINATO_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      OSTINATO_UNROLL
      for (int e = 0; e < 2; ++e) {
        const Sequence& s = sequences[tile][e];
        Saved& to = saved[tile][e];
        to = {};
        reset[tile][e] = all.IsReset(s, k);
        if (k >= s.length || !is_unit) continue;
        const Index step = all.StepAt(s, k), at = all.At(step, column);
        OSTINATO_UNROLL
        for (int gate = 0; gate < 4; ++gate)
          to.gates[gate] = Widen(Load(gates + all.At(step * 4 + gate, column)));
        if constexpr (!kGru) to.cell = Load(cells + at);
        to.before = Widen(Load(before + at));
        to.dy = Widen(Load(dy + all.AtOutput(step, column)));
      }
    }
  };
  // Takes the cotangents of the states before step k + 1, the n-th one that ran.
  const auto receive = [&](int k, int n, const bool (&cut)[kTiles][2]) {
    const int buffer = n % 2;
    if constexpr (kCluster > 1) {
      WaitFor(shared->arrivals + buffer, n / 2 % 2);
      if (thread == 0) Expect(shared->arrivals + buffer, kBytes);
    }
    OSTINATO_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      Pair sum = {};
      for (int part = 0; part < kParts; ++part) {
        const Pair one = Load(&shared->parts[buffer][part][warp][tile][lane]);
        sum.at[0] += one.at[0];
        sum.at[1] += one.at[1];
      }
      OSTINATO_UNROLL
      for (int e = 0; e < 2; ++e) {
        if (k + 1 >= sequences[tile][e].length) continue;
        dh[tile][e] = cut[tile][e] ? 0.f : sum.at[e] + direct[tile][e];
        if (cut[tile][e]) dc[tile][e] = 0.f;
      }
    }
  };
  bool cut[kTiles][2] = {};
  if (longest > 0) load_saved(longest - 1);
  for (int k = longest - 1; k >= 0; --k) {
    const int n = longest - 1 - k, buffer = n % 2;
    if (n > 0) receive(k, n - 1, cut);
    OSTINATO_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      float d[4][2] = {};
      OSTINATO_UNROLL
      for (int e = 0; e < 2; ++e) {
        const Sequence& s = sequences[tile][e];
        cut[tile][e] = reset[tile][e];
        if (k >= s.length) continue;
        float found[4];
        Retreat(saved[tile][e], dh[tile][e] + saved[tile][e].dy, &dc[tile][e],
                &direct[tile][e], found);
        const Index step = all.StepAt(s, k);
        OSTINATO_UNROLL
        for (int gate = 0; gate < 4; ++gate) {
          const Storage out = Narrowed(found[gate]);
          d[gate][e] = Widen(out);
          if (is_unit) Store(dgates + all.At(step * 4 + gate, column), out);
        }
      }
      OSTINATO_UNROLL
      for (int gate = 0; gate < 4; ++gate) {
        const int place = (warp * 4 + gate) * 8 + lane / 4;
        ForWords(tile, place, d[gate], [&](int slot, int word, Word value) {
          Store(shared->gates[buffer] + WordAt<kGateWords>(slot, word), value);
        });
      }
    }
    if (k > 0) load_saved(k - 1);
    WaitForBlock();
    const int half = kHalves == 2 ? warp % 2 : 0;
    const Word* const rows =
        shared->gates[buffer] + half * kGateDepth * 2 * 32 + lane * 4;
    float sums[kUnitTiles][kTiles][4] = {};
    const auto multiply = [&](int first, int unit_tile, const Fragment(&a)[2]) {
      OSTINATO_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        Word b[4];
        LoadMatrices(rows + (tile * (kGateWords / 4) + first * 2) * 32, b);
        OSTINATO_UNROLL
        for (int i = 0; i < 2; ++i)
          MultiplyTiles(sums[unit_tile][tile], a[i].at, b[i * 2], b[i * 2 + 1],
                        Storage());
      }
    };
    OSTINATO_UNROLL
    for (int i = 0; i < kHeldGates; i += 2) {
      OSTINATO_UNROLL
      for (int tile = 0; tile < kUnitTiles; ++tile)
        multiply(i, tile, {held[tile][i], held[tile][i + 1]});
    }
    for (int i = 0; i < kLeftGates; i += 2) {
      OSTINATO_UNROLL
      for (int tile = 0; tile < kUnitTiles; ++tile) {
        const Fragment* const a = left + (tile * kLeftGates + i) * 32;
        multiply(kHeldGates + i, tile, {Load(a), Load(a + 32)});
      }
    }
    OSTINATO_UNROLL
    for (int i = 0; i < kUnitTiles * 2; ++i) {
      const int group = (warp / kHalves * kUnitTiles + i / 2) * 2 + i % 2;
      OSTINATO_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        const float* const sum = sums[i / 2][tile] + i % 2 * 2;
        Pair* const place =
            &shared->parts[buffer][rank * kHalves + half][group % kGroups][tile][lane];
        if constexpr (kCluster == 1) {
          Store(place, Pair{{sum[0], sum[1]}});
        } else {
          Send(reinterpret_cast<Word*>(place), AsWord(sum[0]), AsWord(sum[1]),
               shared->arrivals + buffer, group / kGroups);
        }
      }
    }
    if constexpr (kCluster == 1) WaitForBlock();
  }
  if (longest > 0) receive(-1, longest - 1, cut);

  OSTINATO_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    OSTINATO_UNROLL
    for (int e = 0; e < 2; ++e) {
      const Sequence& s = sequences[tile][e];
      if (!s.exists || !is_unit) continue;
      const Index state = all.AtState(s, column);
      Store(dh_0 + state, Narrowed(dh[tile][e]));
      if constexpr (!kGru) Store(dc_0 + state, Narrowed(dc[tile][e]));
      for (Index t = s.length; t < r.steps; ++t)  // padding
        for (int gate = 0; gate < 4; ++gate)
          Store(dgates + all.At((t * r.batch + s.at) * 4 + gate, column),
                Narrowed(0.f));
    }
  }
  if constexpr (kCluster > 1) WaitForCluster();
}
