// All steps of both directions of a layer, with the recurrent weights in registers and
// shared memory.
//
// A cluster runs some sequences of one head of one direction from their first step to
// their last.
// The states after a step go into the shared memory of all blocks of the cluster. It
// has two buffers for them: a block writes the second one only after it has got all
// states that were computed from what is there, so that nobody waits but for data.
struct Shared {
  Word states[2][kSlots * kWords];
  Arrivals arrivals[2];
  Fragment left[kLeft > 0 ? kWarps * 2 * kLeft * 32 : 1];
};
static_assert(sizeof(Shared) == SHARED);

// From preactivations to the states of a lane after the step, and to what is saved.
OSTINATO_DEVICE void Advance(Gates* gates, float (&h)[kUnitsOfLane],
                             float (&cells)[kStatesOfLane],
                             float (&saved)[kSavedOfLane]) {
  float* const g = gates->at;
  if constexpr (kSimple) {
    OSTINATO_UNROLL
    for (int q = 0; q < 4; ++q)
      h[q] = kMode == kTanh ? Tanh(g[q]) : g[q] < 0.f ? 0.f : g[q];
  } else if constexpr (kMode == kSlstm) {
    float &c = cells[0], &n = cells[1], &m = cells[2];
    const float log_f = LogSigmoid(g[1]) + m, before = n;
    m = before == 0.f || g[0] >= log_f ? g[0] : log_f;
    const float rest = log_f - m;
    saved[0] = Exp(g[0] - m);
    saved[1] = Exp(rest > 0.f ? 0.f : rest);
    saved[2] = Tanh(g[2]);
    saved[3] = Sigmoid(g[3]);
    saved[4] = Sigmoid(-g[1]);
    c = saved[1] * c + saved[0] * saved[2];
    n = saved[1] * n + saved[0];
    h[0] = saved[3] * c * Reciprocal(n);
  } else {
    g[0] = Sigmoid(g[0]);
    g[1] = Sigmoid(g[1]);
    if constexpr (kMode == kGru) {
      g[2] = Tanh(g[2] + g[0] * g[3]);
      h[0] = g[2] + g[1] * (h[0] - g[2]);
    } else {
      float& c = cells[0];
      g[2] = Tanh(g[2]);
      g[3] = Sigmoid(g[3]);
      c = g[1] * c + g[0] * g[2];
      h[0] = g[3] * Tanh(c);
    }
    OSTINATO_UNROLL
    for (int gate = 0; gate < 4; ++gate) saved[gate] = g[gate];
  }
}

// Writes a word of the states for the next step, into all blocks of the cluster.
OSTINATO_DEVICE void Put(Shared* shared, int buffer, int at, Word word) {
  Word* const place = shared->states[buffer] + at;
  if constexpr (kCluster == 1) {
    Store(place, word);
  } else {
    const int own = static_cast<int>(Block() % kCluster);
    OSTINATO_UNROLL
    for (int i = 0; i < kCluster; ++i)
      Send(place, word, shared->arrivals + buffer, (own + i) % kCluster);
  }
}

// Arrays, of each member: y [steps][batch][directions][width]; gx, four of a lane, for
// all lanes of all heads in the place of width; resets [steps][batch]; and for each
// direction gates [steps][batch][kSaved][width] and cells
// [steps][batch][kCells][width]. States are [directions][batch][width], those beside h
// [directions][batch][kCells][width]. `order` has the sequences in the order in which
// clusters take them. Null: lengths, order, resets; what is not saved; what has no
// size.
OSTINATO_KERNEL_OF(kThreads)
void recurrent_run(const Gates* gx, const Fragment* weights, const Storage* h_0,
                   const Storage* cells_0, const int* lengths, const int* order,
                   const unsigned char* resets, Storage* y, Storage* h_n,
                   Storage* cells_n, Storage* first_gates, Storage* second_gates,
                   float* first_cells, float* second_cells, const Sizes r) {
  Shared* const shared = reinterpret_cast<Shared*>(SharedMemory());
  const int thread = static_cast<int>(ThreadOfBlock());
  const int lane = thread % 32, warp = thread / 32;
  const int rank = static_cast<int>(Block() % kCluster);
  const int matrix = Matrix(r);
  const Batch all = BatchOf(r, lengths, order, resets, matrix);
  Storage* const gates = all.direction == 0 ? first_gates : second_gates;
  float* const cells = all.direction == 0 ? first_cells : second_cells;

  Fragment held[2][kHeld > 0 ? kHeld : 1];
  Fragment* const left = shared->left + warp * 2 * kLeft * 32 + lane;
  const Fragment* const own =
      weights + ((matrix * kCluster + rank) * kWarps + warp) * 2 * kDepth * 32 + lane;
  LoadWeights<kHeld, kLeft>(own, held, left);
  for (int i = thread; i < kSlots * kWords; i += kThreads) {
    const Sequence s = all.Find(i / kWords);
    const int unit = i % kWords * kUnitsOfWord;
    const float first = all.First(h_0, s, unit);
    Word word = RoundFactor(first);
    if constexpr (kUnitsOfWord == 2) word = Pack(first, all.First(h_0, s, unit + 1));
    Store(shared->states[0] + WordAt<kWords>(i / kWords, i % kWords), word);
  }
  if (kCluster > 1 && thread == 0) {
    for (Arrivals& each : shared->arrivals) {
      Begin(&each);
      Expect(&each, sizeof shared->states[0]);
    }
  }

  // What this lane computes.
  const int unit = rank * kUnitsOfBlock + (warp * 8 + lane / 4) * kUnitsOfLane;
  const bool is_unit = unit < r.units;
  const Index column = all.Column(unit);
  Sequence sequences[kTiles][2];
  float h[kTiles][2][kUnitsOfLane], c[kTiles][2][kStatesOfLane];
  OSTINATO_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    OSTINATO_UNROLL
    for (int e = 0; e < 2; ++e) {
      const Sequence s = all.Find(tile * 8 + lane % 4 * 2 + e);
      sequences[tile][e] = s;
      OSTINATO_UNROLL
      for (int q = 0; q < kUnitsOfLane; ++q)
        h[tile][e][q] = all.First(h_0, s, unit + q);
      OSTINATO_UNROLL
      for (int i = 0; i < kCells; ++i)
        c[tile][e][i] = all.First(cells_0, s, unit, i, kCells);
    }
  }
  const int longest = all.Longest();
  WaitForAll();

  Gates inputs[kTiles][2];
  bool reset[kTiles][2];  // before the step of `inputs`
  const auto load_inputs = [&](int k) {
    OSTINATO_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      OSTINATO_UNROLL
      for (int e = 0; e < 2; ++e) {
        const Sequence& s = sequences[tile][e];
        inputs[tile][e] = {};
        if (k < s.length && is_unit)
          inputs[tile][e] = Load(gx + all.AtInput(all.StepAt(s, k), unit));
        reset[tile][e] = all.IsReset(s, k);
      }
    }
  };
  if (longest > 0) load_inputs(0);
  for (int k = 0; k < longest; ++k) {
    const int buffer = k % 2;
    float sums[kSums][2][kTiles][4];
    OSTINATO_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      OSTINATO_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int part = i / 4, gate = part * 2 + i % 4 / 2;
        sums[0][part][tile][i % 4] = inputs[tile][i % 2].at[gate];
        if constexpr (kSums == 2) sums[1][part][tile][i % 4] = 0.f;
      }
    }
    if (k + 1 < longest) load_inputs(k + 1);
    if (kCluster > 1 && k > 0) {
      WaitFor(shared->arrivals + buffer, (k - 1) / 2 % 2);
      if (thread == 0) Expect(shared->arrivals + buffer, sizeof shared->states[0]);
    }
    const Word* const rows = shared->states[buffer] + lane * 4;
    const auto multiply = [&](int first, const Fragment(&a)[2][2]) {
      OSTINATO_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        Word b[4];
        LoadMatrices(rows + (tile * (kWords / 4) + first * 2) * 32, b);
        OSTINATO_UNROLL
        for (int i = 0; i < 4; ++i) {
          const int part = i % 2, next = i / 2;
          MultiplyTiles(sums[next % kSums][part][tile], a[part][next].at, b[next * 2],
                        b[next * 2 + 1], Storage());
        }
      }
    };
    OSTINATO_UNROLL
    for (int i = 0; i < kHeld; i += 2)
      multiply(i, {{held[0][i], held[0][i + 1]}, {held[1][i], held[1][i + 1]}});
    for (int i = 0; i < kLeft; i += 2) {
      const Fragment* const a = left + i * 32;
      const Fragment* const other = a + kLeft * 32;
      multiply(kHeld + i, {{Load(a), Load(a + 32)}, {Load(other), Load(other + 32)}});
    }
    OSTINATO_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      OSTINATO_UNROLL
      for (int e = 0; e < 2; ++e) {
        const Sequence& s = sequences[tile][e];
        if (k < s.length) {
          Gates g;
          OSTINATO_UNROLL
          for (int gate = 0; gate < 4; ++gate) {
            const int at = gate % 2 * 2 + e;
            g.at[gate] = sums[0][gate / 2][tile][at];
            if constexpr (kSums == 2) g.at[gate] += sums[1][gate / 2][tile][at];
          }
          float saved[kSavedOfLane];
          Advance(&g, h[tile][e], c[tile][e], saved);
          const Index step = all.StepAt(s, k);
          OSTINATO_UNROLL
          for (int q = 0; q < kUnitsOfLane; ++q) {
            const Storage out = Narrowed(h[tile][e][q]);
            h[tile][e][q] = 0.f;  // of units that there are not, even if a state is inf
            if (unit + q >= r.units) continue;
            h[tile][e][q] = Widen(out);
            Store(y + all.AtOutput(step, column + q), out);
          }
          if (is_unit) {
            OSTINATO_UNROLL
            for (int i = 0; i < kCells && cells != nullptr; ++i)
              Store(cells + all.At(step * kCells + i, column), c[tile][e][i]);
            OSTINATO_UNROLL
            for (int i = 0; i < kSaved && gates != nullptr; ++i)
              Store(gates + all.At(step * kSaved + i, column), Narrowed(saved[i]));
          }
          if (k + 1 < longest && reset[tile][e]) {
            for (float& each : h[tile][e]) each = 0.f;
            for (float& each : c[tile][e]) each = 0.f;
          }
        }
      }
      if (k + 1 < longest) {
        ForWordsOfLane(tile, unit, h[tile], [&](int slot, int word, Word value) {
          Put(shared, 1 - buffer, WordAt<kWords>(slot, word), value);
        });
      }
    }
    if constexpr (kCluster == 1) WaitForBlock();
  }

  OSTINATO_UNROLL
  for (int tile = 0; tile < kTiles; ++tile) {
    OSTINATO_UNROLL
    for (int e = 0; e < 2; ++e) {
      const Sequence& s = sequences[tile][e];
      if (!s.exists || !is_unit) continue;
      const Index row = all.StateRow(s);
      OSTINATO_UNROLL
      for (int q = 0; q < kUnitsOfLane; ++q) {
        if (unit + q < r.units)
          Store(h_n + all.At(row, column + q), Narrowed(h[tile][e][q]));
      }
      OSTINATO_UNROLL
      for (int i = 0; i < kCells; ++i)
        Store(cells_n + all.At(row * kCells + i, column), Narrowed(c[tile][e][i]));
      for (Index t = s.length; t < r.steps; ++t) {  // padding
        const Index step = t * r.batch + s.at;
        for (int q = 0; q < kUnitsOfLane && unit + q < r.units; ++q)
          Store(y + all.AtOutput(step, column + q), Narrowed(0.f));
        for (int i = 0; i < kCells && cells != nullptr; ++i)
          Store(cells + all.At(step * kCells + i, column), 0.f);
        for (int i = 0; i < kSaved && gates != nullptr; ++i)
          Store(gates + all.At(step * kSaved + i, column), Narrowed(0.f));
      }
    }
  }
  if constexpr (kCluster > 1) WaitForCluster();
}
