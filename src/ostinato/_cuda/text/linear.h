// Linear recurrences, h_t = a_t h_{t-1} + b_t, and their transposes, where the factor
// acts after the step: s_t = b_t + c_{t-1}, c_t = a_t s_t.
//
// STORAGE is the type of the arrays, ACCUM that of states, BLOCKS 1 for factors that
// are 2x2 matrices. A thread runs some steps of one unit of one sequence, or of one
// pair of units. Where sequences and units are too few for the GPU, each sequence is
// cut into chunks of steps: linear_summary finds what a chunk does to the state before
// it, a recurrence over these summaries, by this same text, finds the states between
// chunks, and then linear_run runs all chunks at once.

// A complex number, of which both parts are read at once.
template <typename T>
struct alignas(2 * sizeof(T)) Complex {
  T real, imaginary;
  Complex() = default;
  OSTINATO_DEVICE Complex(T r, T i = 0) : real(r), imaginary(i) {}
};
template <typename T>
OSTINATO_DEVICE Complex<T> operator+(Complex<T> x, Complex<T> y) {
  return {x.real + y.real, x.imaginary + y.imaginary};
}
template <typename T>
OSTINATO_DEVICE void operator+=(Complex<T>& x, Complex<T> y) {
  x = x + y;
}
template <typename T>
OSTINATO_DEVICE Complex<T> operator*(Complex<T> x, Complex<T> y) {
  return {x.real * y.real - x.imaginary * y.imaginary,
          x.real * y.imaginary + x.imaginary * y.real};
}
template <typename T>
OSTINATO_DEVICE Complex<T> Widen(Complex<T> x) {
  return x;
}
template <typename T>
OSTINATO_DEVICE void Narrow(Complex<T> x, Complex<T>* result) {
  *result = x;
}

using Storage = STORAGE;
using Accum = ACCUM;
constexpr int kParts = BLOCKS ? 2 : 1;
constexpr int kFactors = kParts * kParts;
// Steps whose loads are under way at once, which hides the latency of memory: as many
// as registers hold.
constexpr int kStepBytes = sizeof(Accum) * (kFactors + kParts);
constexpr int kAhead = kStepBytes <= 8 ? 8 : kStepBytes <= 48 ? 4 : 2;

// The first numbers are those of `_linear/call.py`, in their order.
struct Recurrence {
  Index batch, steps;
  Index groups, width;              // units of a step: [groups][width]
  Index batch_stride, step_stride;  // of b and h
  Index a_batch, a_step, a_group;   // of a; 0 along what all share
  Index da_batch, da_step;
  Index reset_batch, reset_step;
  Index shared;  // a group has one factor
  Index blocks, reverse, after;
  Index has_lengths, has_resets;
  Index chunk, chunks;  // steps of a chunk; chunks that this launch runs
};

// The part of a call that one thread runs.
struct Part {
  Index sequence, unit, chunk;
  Index length;       // of the sequence
  Index first, last;  // steps, counted in the order of the run
  Index at;           // of the unit at step 0 in b and h
  Index factor;       // of the unit at step 0 in a
};

OSTINATO_DEVICE Index UnitsOf(const Recurrence& r) { return r.groups * r.width; }

// Returns false where there is nothing to run for this thread.
OSTINATO_DEVICE bool FindPart(const Recurrence& r, const int* lengths, Part* part) {
  const Index each = UnitsOf(r) / kParts, columns = r.batch * each;
  const Index index = Block() * ThreadsOfBlock() + ThreadOfBlock();
  if (index >= columns * r.chunks) return false;
  const Index column = index % columns;
  part->chunk = index / columns;
  part->sequence = column / each;
  part->unit = column % each * kParts;
  Index length = r.steps;
  if (lengths != nullptr) {
    const Index given = Load(lengths + part->sequence);
    length = given < 0 ? 0 : given < r.steps ? given : r.steps;
  }
  part->length = length;
  const Index first = part->chunk * r.chunk, last = first + r.chunk;
  part->first = first < length ? first : length;
  part->last = last < length ? last : length;
  part->at = part->sequence * r.batch_stride + part->unit;
  part->factor = part->sequence * r.a_batch +
                 (r.shared ? part->unit / r.width * r.a_group : part->unit * kParts);
  return true;
}

OSTINATO_DEVICE Index StepAt(const Recurrence& r, const Part& part, Index k) {
  return r.reverse ? part.length - 1 - k : k;
}

// What one step reads.
struct Step {
  Accum a[kFactors], b[kParts];
  bool reset;
};

OSTINATO_DEVICE void LoadStep(const Recurrence& r, const Part& part, const Storage* a,
                              const Storage* b, const unsigned char* resets, Index k,
                              Step* step) {
  const Index t = StepAt(r, part, k);
  const Storage* const factors = a + part.factor + t * r.a_step;
  const Storage* const inputs = b + part.at + t * r.step_stride;
  OSTINATO_UNROLL
  for (int i = 0; i < kFactors; ++i) step->a[i] = Widen(Load(factors + i));
  OSTINATO_UNROLL
  for (int i = 0; i < kParts; ++i) step->b[i] = Widen(Load(inputs + i));
  step->reset = resets != nullptr &&
                Load(resets + part.sequence * r.reset_batch + t * r.reset_step) != 0;
}

// Calls body(k, step) for each step of the part, in the order of the run.
template <typename Body>
OSTINATO_DEVICE void ForSteps(const Recurrence& r, const Part& part, const Storage* a,
                              const Storage* b, const unsigned char* resets,
                              const Body& body) {
  for (Index k = part.first; k < part.last; k += kAhead) {
    Step steps[kAhead];
    OSTINATO_UNROLL
    for (int i = 0; i < kAhead; ++i)
      if (k + i < part.last) LoadStep(r, part, a, b, resets, k + i, &steps[i]);
    OSTINATO_UNROLL
    for (int i = 0; i < kAhead; ++i)
      if (k + i < part.last) body(k + i, steps[i]);
  }
}

// result = a x
OSTINATO_DEVICE void Multiply(const Accum* a, const Accum* x, Accum* result) {
  OSTINATO_UNROLL
  for (int i = 0; i < kParts; ++i) {
    Accum sum = a[i * kParts] * x[0];
    for (int j = 1; j < kParts; ++j) sum += a[i * kParts + j] * x[j];
    result[i] = sum;
  }
}

// Moves the state over one step; `out` is the result of the step.
OSTINATO_DEVICE void Advance(const Recurrence& r, const Step& step, Accum* state,
                             Accum* out) {
  Accum in[kParts], moved[kParts];
  OSTINATO_UNROLL
  for (int i = 0; i < kParts; ++i) in[i] = r.after ? state[i] + step.b[i] : state[i];
  Multiply(step.a, in, moved);
  OSTINATO_UNROLL
  for (int i = 0; i < kParts; ++i) {
    if (step.reset) moved[i] = 0;
    state[i] = r.after ? moved[i] : moved[i] + step.b[i];
    out[i] = r.after ? in[i] : state[i];
  }
}

OSTINATO_DEVICE void StoreNarrow(Storage* p, Accum value) {
  Storage narrow;
  Narrow(value, &narrow);
  Store(p, narrow);
}

// `before` has the states between chunks, [chunks - 1][batch][units]; null for one
// chunk.
OSTINATO_KERNEL void linear_run(const Storage* a, const Storage* b, const Storage* h_0,
                                const int* lengths, const unsigned char* resets,
                                const Accum* before, Storage* h, Storage* h_n,
                                const Recurrence r) {
  Part part;
  if (!FindPart(r, lengths, &part)) return;
  const Index unit = part.sequence * UnitsOf(r) + part.unit;
  const Index states = r.batch * UnitsOf(r);
  Accum state[kParts];
  OSTINATO_UNROLL
  for (int i = 0; i < kParts; ++i) {
    state[i] = part.chunk == 0 ? Widen(Load(h_0 + unit + i))
                               : Load(before + (part.chunk - 1) * states + unit + i);
  }
  ForSteps(r, part, a, b, resets, [&](Index k, const Step& step) {
    Accum out[kParts];
    Advance(r, step, state, out);
    Storage* const place = h + part.at + StepAt(r, part, k) * r.step_stride;
    for (int i = 0; i < kParts; ++i) StoreNarrow(place + i, out[i]);
  });
  const Index end = (part.chunk + 1) * r.chunk;
  const Index first = part.chunk * r.chunk;
  for (Index t = first < part.length ? part.length : first; t < end && t < r.steps; ++t)
    for (int i = 0; i < kParts; ++i)
      StoreNarrow(h + part.at + t * r.step_stride + i, Accum(0));
  if (part.chunk != r.chunks - 1) return;
  for (int i = 0; i < kParts; ++i) StoreNarrow(h_n + unit + i, state[i]);
}

// A chunk takes the state x to `product` x + `sum`, or to `sum` whatever x is where
// `resets_inside`. [chunks][batch][units]; a product of blocks has two rows for each
// pair of units. `resets_inside`, [chunks][batch], is null where `resets` is.
OSTINATO_KERNEL void linear_summary(const Storage* a, const Storage* b,
                                    const int* lengths, const unsigned char* resets,
                                    Accum* product, Accum* sum,
                                    unsigned char* resets_inside, const Recurrence r) {
  Part part;
  if (!FindPart(r, lengths, &part)) return;
  Accum total[kFactors], state[kParts];
  bool reset = false;
  OSTINATO_UNROLL
  for (int i = 0; i < kFactors; ++i) total[i] = i % (kParts + 1) == 0 ? 1 : 0;
  OSTINATO_UNROLL
  for (int i = 0; i < kParts; ++i) state[i] = 0;
  ForSteps(r, part, a, b, resets, [&](Index, const Step& step) {
    Accum out[kParts];
    Advance(r, step, state, out);
    reset = reset || step.reset;
    OSTINATO_UNROLL
    for (int column = 0; column < kParts; ++column) {
      Accum from[kParts], to[kParts];
      for (int i = 0; i < kParts; ++i) from[i] = total[i * kParts + column];
      Multiply(step.a, from, to);
      for (int i = 0; i < kParts; ++i) total[i * kParts + column] = to[i];
    }
  });
  const Index unit = (part.chunk * r.batch + part.sequence) * UnitsOf(r) + part.unit;
  for (int i = 0; i < kParts; ++i) Store(sum + unit + i, state[i]);
  for (int i = 0; i < kFactors; ++i) Store(product + unit * kParts + i, total[i]);
  if (resets_inside != nullptr && part.unit == 0) {
    Store(resets_inside + part.chunk * r.batch + part.sequence,
          static_cast<unsigned char>(reset));
  }
}
