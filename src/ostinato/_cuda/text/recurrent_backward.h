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
//
// HELD is how many fragments of weights a lane has in registers. BUFFERS is 2, or 1
// where a block of a cluster has no shared memory for two buffers of parts: then the
// blocks wait until all have read those of a step, before they send those of the next
// one. They multiply in the meantime.
constexpr int kGroups = kUnitsOfBlock / 8;
constexpr int kGateWords = 4 / kUnitsOfLane * kUnitsOfBlock / kUnitsOfWord;
// A block that is alone, with a warp for each group of 8 units, has more warps than
// tiles of 16 units: two warps share a tile, and each multiplies half of the gates.
constexpr int kHalves = kCluster == 1 && kUnitsOfLane == 1 ? 2 : 1;
constexpr int kParts = kCluster * kHalves;  // that are added
constexpr int kBuffers = BUFFERS;
static_assert(kBuffers == 2 || kCluster > 1);
constexpr int kUnitTiles = UNITS / 16 * kHalves / kWarps;  // of a warp
constexpr int kGateDepth = kGateWords / 8 / kHalves;
// A lane multiplies two fragments of a tile at a time: the first pair of each tile,
// then the second ones, and so on. The first of these pairs are in registers.
constexpr int kPairs = kUnitTiles * kGateDepth / 2;
constexpr int kHeldPairs = kHeld / 2, kLeftPairs = kPairs - kHeldPairs;
static_assert(kGateDepth % 2 == 0 && kUnitTiles * kWarps == UNITS / 16 * kHalves);
static_assert(kHeld % 2 == 0 && kLeftPairs >= 0);
// Of the states beside h, those whose values a step reads: the last one of an sLSTM
// is not.
constexpr int kRead = kMode == kSlstm ? 2 : kCells;
constexpr int kReadOfLane = kRead > 0 ? kRead : 1;
constexpr int kBefore = kMode == kGru ? 1 : kRead;  // of the values before the step
constexpr int kBeforeOfLane = kBefore > 0 ? kBefore : 1;

struct alignas(8) Pair {
  float at[2];
};

struct Shared {
  Word gates[2][kSlots * kGateWords];
  Pair parts[kBuffers][kParts][kGroups][kTiles][32];
  Arrivals arrivals[2];
  Fragment left[kLeftPairs > 0 ? kWarps * kLeftPairs * 2 * 32 : 1];
};
static_assert(sizeof(Shared) == SHARED);

// What a step reads of a lane and a sequence. The gates of a simple RNN are its
// outputs.
struct Saved {
  float gates[kSimple ? 4 : kSaved], cells[kReadOfLane], before[kBeforeOfLane];
  float dy[kUnitsOfLane];
};

// From cotangents after a step to those of preactivations, of the other states before
// the step, and to the part of that of h which does not pass through a product.
OSTINATO_DEVICE void Retreat(const Saved& s, const float (&dh)[kUnitsOfLane],
                             float (&dcells)[kStatesOfLane], float* direct, float* d) {
  const float* const g = s.gates;
  *direct = 0.f;
  if constexpr (kSimple) {
    OSTINATO_UNROLL
    for (int q = 0; q < 4; ++q) {
      const float slope = kMode == kTanh ? 1.f - g[q] * g[q] : g[q] > 0.f ? 1.f : 0.f;
      d[q] = (dh[q] + s.dy[q]) * slope;
    }
  } else if constexpr (kMode == kGru) {
    const float whole = dh[0] + s.dy[0];
    const float candidate = whole * (1.f - g[1]) * (1.f - g[2] * g[2]);
    d[0] = candidate * g[3] * g[0] * (1.f - g[0]);
    d[1] = whole * (s.before[0] - g[2]) * g[1] * (1.f - g[1]);
    d[2] = candidate;
    d[3] = candidate * g[0];
    *direct = whole * g[1];
  } else if constexpr (kMode == kSlstm) {
    const float whole = dh[0] + s.dy[0];
    const float n = s.cells[1], scale = n == 0.f ? 1.f : Reciprocal(n);
    const float ratio = s.cells[0] * scale, dratio = whole * g[3] * scale;
    const float dc = dcells[0] + dratio, dn = dcells[1] - dratio * ratio;
    const bool first = s.before[1] == 0.f;
    const float di = (dc * g[2] + dn) * g[0];
    float df = (dc * s.before[0] + dn * s.before[1]) * g[1];
    if (first && g[1] == 1.f) df = 0.f;
    const float dm = dcells[2] - di - df;
    const bool follows_input = first || g[0] >= g[1];
    dcells[2] = follows_input ? df : df + dm;
    d[0] = follows_input ? di + dm : di;
    d[1] = dcells[2] * g[4];
    d[2] = dc * g[0] * (1.f - g[2] * g[2]);
    d[3] = whole * ratio * g[3] * (1.f - g[3]);
    dcells[0] = dc * g[1];
    dcells[1] = dn * g[1];
  } else {
    const float last = dh[0] + s.dy[0];
    const float u = Tanh(s.cells[0]), whole = dcells[0] + last * g[3] * (1.f - u * u);
    d[0] = whole * g[2] * g[0] * (1.f - g[0]);
    d[1] = whole * s.before[0] * g[1] * (1.f - g[1]);
    d[2] = whole * g[0] * (1.f - g[2] * g[2]);
    d[3] = last * u * g[3] * (1.f - g[3]);
    dcells[0] = whole * g[1];
  }
}

// Arrays, of each member: of each direction gates [steps][batch][kSaved][width], of a
// simple RNN its outputs; dgates, with four; cells [steps][batch][kRead][width]; and
// `before`, these before each step, of a GRU h. dy [steps][batch][directions][width],
// states [directions][batch][width], those beside h [directions][batch][kCells][width].
// `order` is that of recurrent_run. Null: lengths, order, resets; of the second
// direction what is not there; what has no size.
using Before = BEFORE;
OSTINATO_KERNEL_OF(kThreads)
void recurrent_backward(const Storage* first_gates, const Storage* second_gates,
                        const float* first_cells, const float* second_cells,
                        const Before* first_before, const Before* second_before,
                        const Fragment* weights, const Storage* dy, const Storage* dh_n,
                        const Storage* dcells_n, const int* lengths, const int* order,
                        const unsigned char* resets, Storage* first_dgates,
                        Storage* second_dgates, Storage* dh_0, Storage* dcells_0,
                        const Sizes r) {
  const int matrix = Matrix(r);
  const Batch all = BatchOf(r, lengths, order, resets, matrix);
  const bool first_direction = all.direction == 0;
  const Storage* const gates = first_direction ? first_gates : second_gates;
  const float* const cells = first_direction ? first_cells : second_cells;
  const Before* const before = first_direction ? first_before : second_before;
  Storage* const dgates = first_direction ? first_dgates : second_dgates;
  Shared* const shared = reinterpret_cast<Shared*>(SharedMemory());
  const int thread = static_cast<int>(ThreadOfBlock());
  const int lane = thread % 32, warp = thread / 32;
  const int rank = static_cast<int>(Block() % kCluster);

  Fragment held[kHeldPairs > 0 ? kHeldPairs : 1][2];
  Fragment* const left = shared->left + warp * kLeftPairs * 2 * 32 + lane;
  const Fragment* const own =
      weights +
      ((matrix * kCluster + rank) * kWarps + warp) * kUnitTiles * kGateDepth * 32 +
      lane;
  const auto weights_of = [&](int pair, int i) {
    const int tile = pair % kUnitTiles, gate = pair / kUnitTiles * 2 + i;
    return LoadFactors(own + (tile * kGateDepth + gate) * 32);
  };
  OSTINATO_UNROLL
  for (int pair = 0; pair < kHeldPairs; ++pair) {
    OSTINATO_UNROLL
    for (int i = 0; i < 2; ++i) held[pair][i] = weights_of(pair, i);
  }
  // Not unrolled, some texts run out of registers.
  OSTINATO_UNROLL
  for (int pair = 0; pair < kLeftPairs; ++pair) {
    for (int i = 0; i < 2; ++i)
      Store(left + (pair * 2 + i) * 32, weights_of(kHeldPairs + pair, i));
  }
  constexpr int kBytes = kCluster * kGroups * kTiles * 32 * sizeof(Pair);
  if (kCluster > 1 && thread == 0) {
    for (Arrivals& each : shared->arrivals) {
      Begin(&each);
      Expect(&each, kBytes);
    }
  }

  const int lane_of_block = warp * 8 + lane / 4;
  const int unit = rank * kUnitsOfBlock + lane_of_block * kUnitsOfLane;
  const bool is_unit = unit < r.units;
  const Index column = all.Column(unit);
  // Where arrays [...][count][width] have one of a lane's values.
  const auto at = [&](Index row, int which, int count) {
    return kUnitsOfLane == 1 ? all.At(row * count + which, column)
                             : all.At(row, column + which);
  };
  Sequence sequences[kTiles][2];
  float dh[kTiles][2][kUnitsOfLane], dcells[kTiles][2][kStatesOfLane];
  float direct[kTiles][2];
  OSTINATO_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    OSTINATO_UNROLL
    for (int e = 0; e < 2; ++e) {
      const Sequence s = all.Find(tile * 8 + lane % 4 * 2 + e);
      sequences[tile][e] = s;
      const Index row = all.StateRow(s);
      OSTINATO_UNROLL
      for (int q = 0; q < kUnitsOfLane; ++q)
        dh[tile][e][q] =
            s.exists && unit + q < r.units ? Widen(Load(dh_n + at(row, q, 1))) : 0.f;
      OSTINATO_UNROLL
      for (int i = 0; i < kCells; ++i)
        dcells[tile][e][i] =
            s.exists && is_unit ? Widen(Load(dcells_n + at(row, i, kCells))) : 0.f;
      direct[tile][e] = 0.f;
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
        const Index step = all.StepAt(s, k);
        OSTINATO_UNROLL
        for (int q = 0; q < kUnitsOfLane; ++q) {
          if (unit + q < r.units)
            to.dy[q] = Widen(Load(dy + all.AtOutput(step, column + q)));
        }
        constexpr int kGatesOfLane = kSimple ? 4 : kSaved;
        OSTINATO_UNROLL
        for (int i = 0; i < kGatesOfLane; ++i) {
          if (kUnitsOfLane == 1 || unit + i < r.units)
            to.gates[i] = Widen(Load(gates + at(step, i, kGatesOfLane)));
        }
        OSTINATO_UNROLL
        for (int i = 0; i < kRead; ++i) to.cells[i] = Load(cells + at(step, i, kRead));
        OSTINATO_UNROLL
        for (int i = 0; i < kBefore; ++i)
          to.before[i] = Widen(Load(before + at(step, i, kBefore)));
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
      Pair sums[kUnitsOfLane] = {};
      for (int part = 0; part < kParts; ++part) {
        OSTINATO_UNROLL
        for (int q = 0; q < kUnitsOfLane; ++q) {
          const int group = warp * kUnitsOfLane + q;
          const Pair one =
              Load(&shared->parts[buffer % kBuffers][part][group][tile][lane]);
          sums[q].at[0] += one.at[0];
          sums[q].at[1] += one.at[1];
        }
      }
      OSTINATO_UNROLL
      for (int e = 0; e < 2; ++e) {
        if (k + 1 >= sequences[tile][e].length) continue;
        OSTINATO_UNROLL
        for (int q = 0; q < kUnitsOfLane; ++q)
          dh[tile][e][q] = cut[tile][e] ? 0.f : sums[q].at[e] + direct[tile][e];
        if (!cut[tile][e]) continue;
        for (float& each : dcells[tile][e]) each = 0.f;
      }
    }
    if constexpr (kBuffers == 1) {
      if (k >= 0) ArriveAtCluster();
    }
  };
  bool cut[kTiles][2] = {};
  if (longest > 0) load_saved(longest - 1);
  for (int k = longest - 1; k >= 0; --k) {
    const int n = longest - 1 - k, buffer = n % 2;
    if (n > 0) receive(k, n - 1, cut);
    OSTINATO_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      float d[4 / kUnitsOfLane][2][kUnitsOfLane] = {};
      OSTINATO_UNROLL
      for (int e = 0; e < 2; ++e) {
        const Sequence& s = sequences[tile][e];
        cut[tile][e] = reset[tile][e];
        if (k >= s.length) continue;
        float found[4];
        Retreat(saved[tile][e], dh[tile][e], dcells[tile][e], &direct[tile][e], found);
        const Index step = all.StepAt(s, k);
        OSTINATO_UNROLL
        for (int gate = 0; gate < 4; ++gate) {
          const Storage out = Narrowed(found[gate]);
          d[gate / kUnitsOfLane][e][gate % kUnitsOfLane] = Widen(out);
          if (unit + gate % kUnitsOfLane < r.units)
            Store(dgates + at(step, gate, 4), out);
        }
      }
      OSTINATO_UNROLL
      for (int gate = 0; gate < 4 / kUnitsOfLane; ++gate) {
        // A group of 8 units has its gates side by side; those of simple RNNs are one.
        const int place = kUnitsOfLane == 1 ? (warp * 4 + gate) * 8 + lane / 4
                                            : lane_of_block * kUnitsOfLane;
        ForWordsOfLane(tile, place, d[gate], [&](int slot, int word, Word value) {
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
    const auto multiply = [&](int row, int unit_tile, const Fragment(&a)[2]) {
      OSTINATO_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        Word b[4];
        LoadMatrices(rows + (tile * (kGateWords / 4) + row * 4) * 32, b);
        OSTINATO_UNROLL
        for (int i = 0; i < 2; ++i)
          MultiplyTiles(sums[unit_tile][tile], a[i].at, b[i * 2], b[i * 2 + 1],
                        Storage());
      }
    };
    // `own` has the left pairs of the row.
    const auto multiply_left = [&](int row, int unit_tile, const Fragment* own) {
      const Fragment* const a = own + unit_tile * 2 * 32;
      multiply(row, unit_tile, {Load(a), Load(a + 32)});
    };
    OSTINATO_UNROLL
    for (int pair = 0; pair < kHeldPairs; ++pair)
      multiply(pair / kUnitTiles, pair % kUnitTiles, held[pair]);
    constexpr int kRowsBegun = (kHeldPairs + kUnitTiles - 1) / kUnitTiles;
    OSTINATO_UNROLL
    for (int pair = kHeldPairs; pair < kRowsBegun * kUnitTiles; ++pair)
      multiply_left(pair / kUnitTiles, pair % kUnitTiles,
                    left + (pair / kUnitTiles * kUnitTiles - kHeldPairs) * 2 * 32);
    for (int row = kRowsBegun; row < kGateDepth / 2; ++row) {
      const Fragment* const own = left + (row * kUnitTiles - kHeldPairs) * 2 * 32;
      OSTINATO_UNROLL
      for (int tile = 0; tile < kUnitTiles; ++tile) multiply_left(row, tile, own);
    }
    if constexpr (kBuffers == 1) {
      if (n > 0) WaitForArrived();
    }
    OSTINATO_UNROLL
    for (int i = 0; i < kUnitTiles * 2; ++i) {
      const int group = (warp / kHalves * kUnitTiles + i / 2) * 2 + i % 2;
      OSTINATO_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        const float* const sum = sums[i / 2][tile] + i % 2 * 2;
        Pair* const place = &shared->parts[buffer % kBuffers][rank * kHalves + half]
                                          [group % kGroups][tile][lane];
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
      const Index row = all.StateRow(s);
      OSTINATO_UNROLL
      for (int q = 0; q < kUnitsOfLane; ++q) {
        if (unit + q < r.units) Store(dh_0 + at(row, q, 1), Narrowed(dh[tile][e][q]));
      }
      OSTINATO_UNROLL
      for (int i = 0; i < kCells; ++i)
        Store(dcells_0 + at(row, i, kCells), Narrowed(dcells[tile][e][i]));
      for (Index t = s.length; t < r.steps; ++t) {  // padding
        for (int i = 0; i < 4; ++i) {
          if (unit + i % kUnitsOfLane < r.units)
            Store(dgates + at(t * r.batch + s.at, i, 4), Narrowed(0.f));
        }
      }
    }
  }
  if constexpr (kCluster > 1) WaitForCluster();
}
