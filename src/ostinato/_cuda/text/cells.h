// What the kernels of all modes share, recurrent.h and recurrent_backward.h.
//
// MODE is that of the operator, STORAGE the type of the arrays, UNITS the units of a
// head, rounded up, CLUSTER how many blocks share them, TILES how many times eight
// sequences they run, HELD for how many products of tiles, in each warp, registers
// have the weights, and SHARED the bytes of shared memory.
//
// Each lane of a warp computes four preactivations: lane 4 i + j those of place i of
// sequences 2 j and 2 j + 1, so that a step needs no other lane's results. They are the
// four gates of one unit, or four units of a simple RNN. The gates of a GRU are r, z,
// the candidate's product with the input, which has no recurrent weights, and its
// product with the state.
enum Mode { kLstm, kGru, kSlstm, kTanh, kRelu };
using Storage = STORAGE;
constexpr Mode kMode = MODE;
constexpr bool kSimple = kMode == kTanh || kMode == kRelu;
constexpr int kUnitsOfLane = kSimple ? 4 : 1;
constexpr int kCells = kMode == kSlstm ? 3 : kMode == kLstm ? 1 : 0;  // states but h
constexpr int kStatesOfLane = kCells > 0 ? kCells : 1;                // no empty arrays
// Of the blocks that a step saves; a simple RNN needs its output alone.
constexpr int kSaved = kMode == kSlstm ? 5 : kSimple ? 0 : 4;
constexpr int kSavedOfLane = kSaved > 0 ? kSaved : 1;
constexpr int kCluster = CLUSTER, kTiles = TILES, kHeld = HELD;
constexpr int kSlots = 8 * kTiles;  // sequences of a cluster
constexpr int kUnitsOfBlock = UNITS / CLUSTER;
constexpr int kWarps = kUnitsOfBlock / 8 / kUnitsOfLane;
constexpr int kThreads = kWarps * 32;
constexpr int kUnitsOfWord = 4 / sizeof(Storage);
constexpr int kWords = UNITS / kUnitsOfWord;  // of the states of a sequence
constexpr int kDepth = kWords / 8;
constexpr int kLeft = kDepth - kHeld;  // products whose weights are in shared memory
// With two sums, a product does not wait for the one before it.
constexpr int kSums = kTiles == 1 ? 2 : 1;
static_assert(UNITS % (8 * CLUSTER * kUnitsOfLane) == 0 && kDepth % 2 == 0 &&
              kHeld % 2 == 0);

// `width` are the units of a direction, `units` those of one of its heads. The members
// of an ensemble have weights and sequences of their own, in arrays whose first axis
// they are.
struct Sizes {
  Index steps, batch, width, units, directions;
};

// Of a lane: what its preactivations have before the product with the state, then the
// preactivations, then the gates i, f, g, o or r, z, n, h_candidate.
struct alignas(16) Gates {
  float at[4];
};
struct alignas(16) Fragment {
  Word at[4];
};

constexpr float kLog2E = 1.4426950408889634f;

OSTINATO_DEVICE float Exp(float x) { return Exp2(kLog2E * x); }
OSTINATO_DEVICE float Sigmoid(float x) { return Reciprocal(1.f + Exp(-x)); }
OSTINATO_DEVICE float Tanh(float x) {
  const float far = 1.f - 2.f * Reciprocal(1.f + Exp2(2.f * kLog2E * x));
  const float square = x * x;  // near 0, that would cancel
  const float near = x + x * square * (square * (2.f / 15.f) - 1.f / 3.f);
  return square < 0.01f ? near : far;
}
OSTINATO_DEVICE float LogSigmoid(float x) {
  const float small = Log2(1.f + Exp(x < 0.f ? x : -x)) * (1.f / kLog2E);
  return (x < 0.f ? x : 0.f) - small;
}
OSTINATO_DEVICE Storage Narrowed(float x) {
  Storage narrow;
  Narrow(x, &narrow);
  return narrow;
}
OSTINATO_DEVICE Word AsFactor(Word x) {
  return kUnitsOfWord == 2 ? x : RoundFactor(AsFloat(x));
}

// Waits for all threads that share the states of a sequence.
OSTINATO_DEVICE void WaitForAll() {
  if constexpr (kCluster == 1) {
    WaitForBlock();
  } else {
    WaitForCluster();
  }
}

// A part of the weights, as a product takes it.
OSTINATO_DEVICE Fragment LoadFactors(const Fragment* from) {
  Fragment loaded = Load(from);
  OSTINATO_UNROLL
  for (Word& word : loaded.at) word = AsFactor(word);
  return loaded;
}

// Loads what a lane has of the weights of some tiles, the first products of each into
// registers, and the others into shared memory.
template <int kFirst, int kOthers, int kRows, int kSize>
OSTINATO_DEVICE void LoadWeights(const Fragment* from, Fragment (&held)[kRows][kSize],
                                 Fragment* left) {
  OSTINATO_UNROLL
  for (int tile = 0; tile < kRows; ++tile) {
    OSTINATO_UNROLL
    for (int k = 0; k < kFirst; ++k) {
      held[tile][k] = LoadFactors(from + (tile * (kFirst + kOthers) + k) * 32);
    }
    for (int k = 0; k < kOthers; ++k) {
      Store(left + (tile * kOthers + k) * 32,
            LoadFactors(from + (tile * (kFirst + kOthers) + kFirst + k) * 32));
    }
  }
}

// Where a buffer has a word of a sequence, of so many: matrices of 8 sequences by 4
// words, as LoadMatrices takes them.
template <int kWordsOfSequence>
OSTINATO_DEVICE int WordAt(int slot, int word) {
  return ((slot / 8 * (kWordsOfSequence / 4) + word / 4) * 8 + slot % 8) * 4 + word % 4;
}

// Calls put(slot, index of a word, word) with the factors that a warp has: each lane
// one of row `row` of the sequences 2 j and 2 j + 1 of a tile.
template <typename PutWord>
OSTINATO_DEVICE void ForWords(int tile, int row, const float* x, const PutWord& put) {
  const int lane = static_cast<int>(ThreadOfBlock() % 32);
  const int slot = tile * 8 + lane % 4 * 2;
  if constexpr (kUnitsOfWord == 2) {
    // Of two lanes with neighbouring rows, each takes both rows of one sequence.
    const bool odd = lane / 4 % 2 != 0;
    const float other = OfLane(odd ? x[0] : x[1], 4);
    put(slot + odd, row / 2, odd ? Pack(other, x[1]) : Pack(x[0], other));
  } else {
    put(slot, row, RoundFactor(x[0]));
    put(slot + 1, row, RoundFactor(x[1]));
  }
}

// The same with what lanes have of consecutive values, from `place` on: one, or four.
template <typename PutWord>
OSTINATO_DEVICE void ForWordsOfLane(int tile, int place,
                                    const float (&x)[2][kUnitsOfLane],
                                    const PutWord& put) {
  if constexpr (kUnitsOfLane == 1) {
    const float both[] = {x[0][0], x[1][0]};
    ForWords(tile, place, both, put);
  } else {
    const int slot = tile * 8 + static_cast<int>(ThreadOfBlock() % 4) * 2;
    OSTINATO_UNROLL
    for (int e = 0; e < 2; ++e) {
      OSTINATO_UNROLL
      for (int q = 0; q < kUnitsOfLane; q += kUnitsOfWord) {
        Word word = RoundFactor(x[e][q]);
        if constexpr (kUnitsOfWord == 2) word = Pack(x[e][q], x[e][q + 1]);
        put(slot + e, (place + q) / kUnitsOfWord, word);
      }
    }
  }
}

// The sequence that a cluster runs in a slot.
struct Sequence {
  Index at;    // in arrays [members][steps][batch], of step 0
  int length;  // 0 where there is no sequence
  bool exists, reverse;
};

struct Batch {
  Sizes r;
  const int *lengths, *order;
  const unsigned char* resets;
  Index first;
  int direction, head, member;

  OSTINATO_DEVICE Sequence Find(int slot) const {
    const Index place = first + slot;
    if (place >= r.batch) return {0, 0, false, false};
    const Index own = member * r.batch;
    const Index at = order == nullptr ? place : Load(order + own + place);
    const int steps = static_cast<int>(r.steps);
    const int given = lengths == nullptr ? steps : Load(lengths + own + at);
    const int length = given < 0 ? 0 : given < steps ? given : steps;
    return {own * r.steps + at, length, true, direction == 1};
  }
  // The steps of the longest sequence.
  OSTINATO_DEVICE int Longest() const {
    int longest = 0;
    for (int slot = 0; slot < kSlots; ++slot) {
      const int length = Find(slot).length;
      longest = length > longest ? length : longest;
    }
    return longest;
  }
  // Where these have the k-th step that a sequence runs.
  OSTINATO_DEVICE Index StepAt(const Sequence& s, int k) const {
    return (s.reverse ? s.length - 1 - k : k) * r.batch + s.at;
  }
  // Which column of [width] a unit of our head is.
  OSTINATO_DEVICE Index Column(int unit) const { return head * r.units + unit; }
  // Where arrays [rows][width] have it.
  OSTINATO_DEVICE Index At(Index row, Index column) const {
    return row * r.width + column;
  }
  // Where arrays [members][steps][batch][directions][width] have one of our direction.
  OSTINATO_DEVICE Index AtOutput(Index step, Index column) const {
    return At(step * r.directions + direction, column);
  }
  // Which four preactivations of a step belong to the lane whose first unit this is.
  OSTINATO_DEVICE Index AtInput(Index step, int unit) const {
    if constexpr (kUnitsOfLane == 1) {
      return AtOutput(step, Column(unit));
    } else {  // those of a head are rounded up
      const Index lanes = (r.units + kUnitsOfLane - 1) / kUnitsOfLane;
      const Index row = (step * r.directions + direction) * (r.width / r.units) + head;
      return row * lanes + unit / kUnitsOfLane;
    }
  }
  // Where arrays [members][directions][batch][width] have one of a sequence.
  OSTINATO_DEVICE Index StateRow(const Sequence& s) const {
    const Index row = member * r.directions + direction - member * r.steps;
    return row * r.batch + s.at;
  }
  OSTINATO_DEVICE bool IsReset(const Sequence& s, int k) const {
    return resets != nullptr && k < s.length && Load(resets + StepAt(s, k)) != 0;
  }
  // The state before the first step; arrays have `count` of them, one after another.
  OSTINATO_DEVICE float First(const Storage* states, const Sequence& s, int unit,
                              int which = 0, int count = 1) const {
    if (!s.exists || unit >= r.units || IsReset(s, 0)) return 0.f;
    return Widen(Load(states + At(StateRow(s) * count + which, Column(unit))));
  }
};

// Which recurrent weights the cluster of this block has: of a head of a direction of a
// member. As 64 bits, such numbers would take too many registers.
OSTINATO_DEVICE int Matrix(const Sizes& r) {
  const Index clusters = (r.batch + kSlots - 1) / kSlots;
  return static_cast<int>(Block() / kCluster / clusters);
}

// What that cluster runs.
OSTINATO_DEVICE Batch BatchOf(const Sizes& r, const int* lengths, const int* order,
                              const unsigned char* resets, int matrix) {
  const Index clusters = (r.batch + kSlots - 1) / kSlots;
  const Index first = Block() / kCluster % clusters * kSlots;
  const int heads = static_cast<int>(r.width / r.units);
  const int directions = static_cast<int>(r.directions), of_member = matrix / heads;
  return {r,
          lengths,
          order,
          resets,
          first,
          of_member % directions,
          matrix % heads,
          of_member / directions};
}
