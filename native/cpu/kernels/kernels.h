// The arithmetic of one step, compiled once for every instruction set.
//
// Everything that depends on vector width stands behind the tables of this file. What
// loops over steps, sequences and layers (pass/) is compiled once, for the baseline of
// the platform, and calls through them.
//
// Three types stand for one data type: Storage is what arrays in memory hold, Operand
// what products multiply, Accum what sums and cell states are kept in. They differ for
// bfloat16 alone: Accum is float, and Operand is BFloat16 where the processor
// multiplies pairs of them, else float.
//
// Contract of every function here: no allocation, no exceptions, no alignment asked
// for, nothing read or written beyond what is described. A result does not depend on
// how many rows a call has: except in `dot`, every element is summed in the order of k,
// in one chain; with tiles, in groups of 32 k, which begin where a product begins and
// are added in order: the same groups for every number of rows.
#ifndef OSTINATO_CPU_KERNELS_KERNELS_H_
#define OSTINATO_CPU_KERNELS_KERNELS_H_

#include <cstdint>

#include "cpu/kernels/step_kernels.h"
#include "cpu/runtime/features.h"

namespace ostinato::cpu {

struct BFloat16 {
  uint16_t bits;
};

// The numbers are indices into kModes of network.h.
enum class Mode : int32_t {
  kRnnRelu = 0,
  kRnnTanh = 1,
  kLstm = 2,
  kGru = 3,
  kSlstm = 4
};
inline constexpr int kNumModes = 5;

// The most cell states of a mode, which are all states but the output: an LSTM's c; an
// sLSTM's c, n and m.
inline constexpr int kMostCells = 3;

// How many vectors a panel has, and which vectors of a row of the accumulator they
// feed.
enum class PanelShape : int32_t {
  k1 = 0,             // 1 vector
  k2 = 1,             // 2
  k3 = 2,             // 3
  k4 = 3,             // 4; an LSTM's are i f g o of the same units, an sLSTM's i f z o
  kGruInput = 4,      // 4 in the row; the panel has 3 and feeds r z n
  kGruRecurrent = 5,  // 4 in the row; the panel has 3 and feeds r z h_candidate
};
inline constexpr int kNumPanelShapes = 6;

// A GRU's row of 4 vectors is r z n h_candidate, where h_candidate is what the
// recurrent product and bias add to the candidate n: n = tanh(n + r * h_candidate).

// The options of a network that the equations between the products depend on.
template <typename Accum>
struct CellOptions {
  int64_t hidden;       // H
  int64_t cell_stride;  // between the cell states of a token in ForwardToken::c, ::dc
  bool clips;           // LSTM: c is clipped to [-clip, clip]
  bool clip_nan;        // and a NaN becomes +clip
  Accum clip;
};

// One sequence at one step on the way forward. Pointers are to unit 0; null where
// unused.
template <typename Storage, typename Operand, typename Accum>
struct ForwardToken {
  const Operand* h_prev;  // GRU: h_{t-1}
  // Cell states, cell_stride elements apart: those of step t - 1 before, of t after.
  Accum* c;
  Operand*
      h;  // after: h_t before a projection: of an LSTM o * tanh(c), sLSTM o * c / n
  Storage* y;  // after: the same as an output, exactly the units asked for; or null
  // After: [i f g o][H], [r z n h_candidate][H] or an sLSTM's [i f z o slope][H] of
  // pointwise.py; or null.
  Storage* gates;
  Accum* cells[kMostCells];  // after: each cell state of step t; or null
};

// One sequence at one step on the way back.
template <typename Storage, typename Operand, typename Accum>
struct BackwardToken {
  const Storage* gates;             // as ForwardToken left them
  const Storage* h_prev;            // GRU
  const Storage* h;                 // plain RNN: h_t
  const Accum* c_prev[kMostCells];  // each cell state of step t - 1
  const Accum* c[kMostCells];       // and of t, clipped as it was on the way forward
  Accum* dh;  // in: cotangent of h_t before a projection. GRU, after: dh * z
  Accum*
      dc;  // in: cotangents of the cell states of t, cell_stride apart; after: of t-1
  // After: of pre-activations: [gates][H], of a GRU [r z h_candidate n][H].
  Operand* dg;
};

template <typename Storage, typename Operand, typename Accum>
struct Kernels {
  using TokenForward = ForwardToken<Storage, Operand, Accum>;
  using TokenBackward = BackwardToken<Storage, Operand, Accum>;

  int64_t lanes;  // V, elements of R in one vector
  int64_t pairs;  // elements of a row that a product multiplies at once: 2 or 1

  // A product is fastest with a multiple of `rows_at_once` rows, and from `enough_rows`
  // on it takes longer to multiply than to read a panel that is not in the first-level
  // cache.
  int64_t rows_at_once;
  int64_t enough_rows;
  // Products may read rows that stand at even distances faster than others.
  bool wants_even_rows;
  // A thread that has called a product calls this before it leaves our code; null where
  // there is nothing to do. See tile-product-inl.h.
  void (*release_tiles)();

  // c[r][v] = start[v] + sum over k < depth of a[r][offset + k] * panel[k][v]
  //
  // for r < rows, rows of c being c_stride elements apart. Without `start` (null) the
  // sum continues from what stands in c. kGruInput also sets h_candidate to start[3];
  // kGruRecurrent always continues from c. A panel is [ceil(depth /
  // pairs)][vectors][V][pairs]; where pairs is 2 and depth odd, the second of the last
  // pair counts as zero in `a` whatever stands there, and is not read.
  //
  // `next` is where the panel of the next product stands, or null. Meanwhile as much of
  // it as this panel has is fetched into the second-level cache, or a part of it if
  // rows are few; no address is invalid for that.
  using Product = void (*)(const Operand* const* a, int64_t offset, int64_t rows,
                           int64_t depth, const Operand* panel, const Operand* next,
                           const Accum* start, Accum* c, int64_t c_stride);
  Product product[kNumPanelShapes];

  // c[r][v] = start[v] + a[r][first + v * step ..], of lanes that are among the first
  // `count` elements after `first` of a row, or if step is 0 of every vector; for v <
  // vectors. Other lanes of the 4 vectors of c are those of start.
  void (*add_rows)(const Operand* const* a, int64_t first, int64_t step, int64_t count,
                   int64_t rows, int64_t vectors, const Accum* start, Accum* c,
                   int64_t c_stride);

  // What heads of one unit have for a product: c[r][v] += a[r][first + v * step ..] *
  // w[v * w_stride ..], of as many lanes as add_rows. Of a GRU, vector 2 is added to
  // h_candidate.
  void (*add_scaled_rows)(const Operand* const* a, int64_t first, int64_t step,
                          int64_t count, int64_t rows, int64_t vectors, bool gru,
                          const Storage* w, int64_t w_stride, Accum* c,
                          int64_t c_stride);

  // One vector column of a panel from rows of a matrix: lane n, step k of `panel` is
  // src[n * stride + k] for n < lanes and 0 for n in lanes..V. Steps (pairs) of the
  // panel are panel_stride elements apart; a missing second of a pair becomes 0.
  void (*pack_rows)(const Storage* src, int64_t stride, int64_t lanes, int64_t depth,
                    Operand* panel, int64_t panel_stride);

  // A whole panel from columns of rows: lane n of step k is rows[k][offset + n] for
  // n < columns, 0 up to vectors * V, vectors = ceil(columns / V) <= 4. Where pairs is
  // 2 and depth odd, the second of the last pair becomes 0.
  void (*pack_columns)(const Storage* const* rows, int64_t offset, int64_t depth,
                       int64_t columns, Operand* panel);

  // dst[k * dst_stride + n] = src[n * stride + k] for n < rows, k < columns.
  void (*transpose)(const Operand* src, int64_t stride, int64_t rows, int64_t columns,
                    Operand* dst, int64_t dst_stride);

  // Products with a matrix as it lies in memory, for calls too short to pack it:
  // out[n] += sum over k < depth of w[n * stride + k] * a[k], n < lanes <= V. These
  // sums are in many chains, added up at the end, so that rows stream from memory.
  void (*dot)(const Storage* w, int64_t stride, int64_t lanes, int64_t depth,
              const Operand* a, Accum* out);

  // The equations of a mode, by Mode: units unit .. unit + units - 1 of n tokens. The
  // pre-activations of token r are at pre + r * pre_stride: 4 vectors, gates of the
  // same units <= V; for a plain RNN vectors of successive units <= 4 V.
  using Forward = void (*)(const CellOptions<Accum>& options, const Accum* pre,
                           int64_t pre_stride, const TokenForward* tokens, int64_t n,
                           int64_t unit, int64_t units);
  Forward forward[kNumModes];

  // Cotangents of the pre-activations, for any number of units.
  using Backward = void (*)(const CellOptions<Accum>& options,
                            const TokenBackward* tokens, int64_t n, int64_t unit,
                            int64_t units);
  Backward backward[kNumModes];

  // unprojected[r * stride + j] = h_t before a projection, of units j < H, from what
  // the forward pass saved; null for modes without projections.
  using Output = void (*)(const CellOptions<Accum>& options,
                          const TokenBackward* tokens, int64_t n, Accum* unprojected,
                          int64_t stride);
  Output output[kNumModes];
};

using KernelsF32 = Kernels<float, float, float>;
using KernelsF64 = Kernels<double, double, double>;
using KernelsBf16 = Kernels<BFloat16, float, float>;
using KernelsBf16Pairs = Kernels<BFloat16, BFloat16, float>;

// The tables of one instruction set; `bf16_pairs` is null where it multiplies no pairs,
// `bf16_tiles` where it does so in vectors alone.
struct KernelSet {
  const KernelsF32* f32;
  const KernelsF64* f64;
  const KernelsBf16* bf16;
  const KernelsBf16Pairs* bf16_pairs;
  const KernelsBf16Pairs* bf16_tiles;
  const StepKernels<float>* step_f32;
  const StepKernels<double>* step_f64;
};

// Calls release_tiles when it is destroyed: one lives for as long as a thread works
// with the products of a table.
class TileGuard {
 public:
  template <typename Storage, typename Operand, typename Accum>
  explicit TileGuard(const Kernels<Storage, Operand, Accum>& kernels)
      : release_(kernels.release_tiles) {}
  ~TileGuard() {
    if (release_ != nullptr) release_();
  }
  TileGuard(const TileGuard&) = delete;
  TileGuard& operator=(const TileGuard&) = delete;

 private:
  void (*release_)();
};

// The tables written for `isa`, or for the highest level below it that was compiled
// (a compiler, or a processor that is not x86, may lack some).
// Where pairs of bfloat16 are slow, products of pairs are products of floats.
const KernelSet& KernelsFor(Isa isa, bool pairs_are_slow = PairsAreSlow()) noexcept;

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_KERNELS_H_
