// The arithmetic of one step, compiled once for every instruction set.
//
// Everything that depends on vector width stands behind the tables of this file; what
// loops over steps, rows and layers (forward.h, backward.h) is compiled once, for the
// baseline of the platform, and calls through them.
//
// Three types stand for one data type: S is what arrays in memory hold, R what sums
// and cell states are kept in, O what products multiply. They differ for bfloat16
// alone: R is float, and O is BFloat16 where the processor multiplies pairs of them,
// else float.
//
// Contract of every function here: no allocation, no exceptions, no alignment asked
// for, nothing read or written beyond what is described. A result does not depend on
// how many rows a call has: but for `dot`, every element is summed in the order of k,
// in one chain; with tiles, in groups of 32 k, which begin where a product begins and
// are added in order: the same groups for every number of rows.
#ifndef OSTINATO_CPU_KERNELS_KERNELS_H_
#define OSTINATO_CPU_KERNELS_KERNELS_H_

#include <cstdint>

#include "cpu/runtime/features.h"

namespace ostinato::cpu {

struct BFloat16 {
  uint16_t bits;
};

// The numbers are those of _MODES in cpu.py.
enum class Mode : int32_t { kRnnRelu = 0, kRnnTanh = 1, kLstm = 2, kGru = 3 };
inline constexpr int kNumModes = 4;

// Vectors of one row of an accumulator, and which of them a panel feeds.
enum class Tile : int32_t {
  k1 = 0,             // 1 vector
  k2 = 1,             // 2
  k3 = 2,             // 3
  k4 = 3,             // 4; an LSTM's are i f g o of the same units
  kGruInput = 4,      // 4 in the row, r z n u; the panel has 3 and feeds r z n
  kGruRecurrent = 5,  // 4 in the row, r z n u; the panel has 3 and feeds r z u
};
inline constexpr int kNumTiles = 6;

// What the equations between the products need to know of the network.
template <typename R>
struct Cell {
  int64_t hidden;  // H
  bool clips;      // LSTM: c is clipped to [-clip, clip]
  bool clip_nan;   // and a NaN becomes +clip
  R clip;
};

// One row of one step on the way forward. Pointers are to unit 0; null where unused.
template <typename S, typename O, typename R>
struct ForwardRow {
  const O* h_prev;  // GRU: h_{t-1}
  R* c;             // LSTM: c_{t-1} before, c_t after; room for whole vectors
  O* h;             // after: h_t, an LSTM's o * tanh(c); room for whole vectors
  S* y;      // after: the same as an output, exactly the units asked for; or null
  S* gates;  // after: [i f g o][H] or [r z n u][H]; or null
  R* cells;  // after: c_t; or null
};

// One row of one step on the way back.
template <typename S, typename O, typename R>
struct BackwardRow {
  const S* gates;   // LSTM [i f g o][H], GRU [r z n u][H]
  const S* h_prev;  // GRU
  const S* h;       // plain RNN: h_t
  const R* c_prev;  // LSTM
  const R* c;       // LSTM: c_t, clipped as it was on the way forward
  R* dh;            // in: cotangent of h_t (LSTM: of o * tanh(c)). GRU, after: dh * z
  R* dc;            // LSTM, in: cotangent of c_t; after: of c_{t-1}
  O* dg;            // after: of pre-activations: [i f g o][H], [r z u n][H], [h][H]
};

template <typename S, typename O, typename R>
struct Kernels {
  using Row = ForwardRow<S, O, R>;

  int64_t lanes;  // V, elements of R in one vector
  int64_t pairs;  // elements of a row that a product multiplies at once: 2 or 1

  // A product is fastest with a multiple of so many rows, and from `enough_rows` on it
  // takes longer to multiply than to read a panel that is not in the first-level cache.
  int64_t rows_at_once;
  int64_t enough_rows;
  // Products may read rows that stand at even distances faster than others.
  bool wants_even_rows;
  // A thread that has called a product calls this before it leaves our code; null where
  // there is nothing to do. See tile-product-inl.h.
  void (*leave)();

  // c[r][v] = start[v] + sum over k < depth of a[r][offset + k] * panel[k][v]
  //
  // for r < rows, rows of c being c_stride elements apart. Without `start` (null) the
  // sum goes on from what stands in c. kGruInput also sets u to start[3]; kGruRecurrent
  // always goes on from c. A panel is [ceil(depth / pairs)][vectors][V][pairs]; where
  // pairs is 2 and depth odd, the second of the last pair counts as zero in `a`
  // whatever stands there, and is not read.
  using Product = void (*)(const O* const* a, int64_t offset, int64_t rows,
                           int64_t depth, const O* panel, const R* start, R* c,
                           int64_t c_stride);
  Product product[kNumTiles];

  // One vector column of a panel from rows of a matrix: lane n, step k of `panel` is
  // src[n * stride + k] for n < lanes and 0 for n in lanes..V. Steps (pairs) of the
  // panel are panel_stride elements apart; a missing second of a pair becomes 0.
  void (*pack_rows)(const S* src, int64_t stride, int64_t lanes, int64_t depth,
                    O* panel, int64_t panel_stride);

  // A whole panel from columns of rows: lane n of step k is rows[k][offset + n] for
  // n < columns, 0 up to vectors * V, vectors = ceil(columns / V) <= 4. Where pairs is
  // 2 and depth odd, the second of the last pair becomes 0.
  void (*pack_columns)(const S* const* rows, int64_t offset, int64_t depth,
                       int64_t columns, O* panel);

  // dst[k * dst_stride + n] = src[n * stride + k] for n < rows, k < columns.
  void (*transpose)(const O* src, int64_t stride, int64_t rows, int64_t columns, O* dst,
                    int64_t dst_stride);

  // Products with a matrix as it lies in memory, for calls too short to pack it:
  // out[n] += sum over k < depth of w[n * stride + k] * a[k], n < lanes <= V. These
  // sums are in many chains, added up at the end, so that rows stream from memory.
  void (*dot)(const S* w, int64_t stride, int64_t lanes, int64_t depth, const O* a,
              R* out);

  // The equations of a mode, by Mode: units unit .. unit + units - 1 of n rows. Row r
  // of the pre-activations is at pre + r * pre_stride: for LSTM and GRU 4 vectors,
  // gates of the same units <= V; for a plain RNN vectors of successive units <= 4 V.
  using Forward = void (*)(const Cell<R>& cell, const R* pre, int64_t pre_stride,
                           const Row* rows, int64_t n, int64_t unit, int64_t units);
  Forward forward[kNumModes];

  // Cotangents of the pre-activations, for any number of units.
  using Backward = void (*)(const Cell<R>& cell, const BackwardRow<S, O, R>* rows,
                            int64_t n, int64_t unit, int64_t units);
  Backward backward[kNumModes];

  // u[r * stride + j] = o * tanh(c) of units j < H, from what the forward pass saved.
  void (*lstm_output)(const Cell<R>& cell, const BackwardRow<S, O, R>* rows, int64_t n,
                      R* u, int64_t stride);
};

using KernelsF32 = Kernels<float, float, float>;
using KernelsF64 = Kernels<double, double, double>;
using KernelsBf16 = Kernels<BFloat16, float, float>;
using KernelsBf16Pairs = Kernels<BFloat16, BFloat16, float>;

// The tables of one instruction set; `bf16_pairs` is null where it multiplies no pairs,
// `bf16_tiles` where it does so in vectors alone. With tiles, gradients too multiply
// bfloat16.
struct KernelSet {
  const KernelsF32* f32;
  const KernelsF64* f64;
  const KernelsBf16* bf16;
  const KernelsBf16Pairs* bf16_pairs;
  const KernelsBf16Pairs* bf16_tiles;
};

// Leaves when it goes: one for as long as a thread works with the products of a table.
class LeavesProducts {
 public:
  template <typename S, typename O, typename R>
  explicit LeavesProducts(const Kernels<S, O, R>& kernels) : leave_(kernels.leave) {}
  ~LeavesProducts() {
    if (leave_ != nullptr) leave_();
  }
  LeavesProducts(const LeavesProducts&) = delete;
  LeavesProducts& operator=(const LeavesProducts&) = delete;

 private:
  void (*leave_)();
};

// The tables written for `isa`, or for the highest level below it that was compiled
// (a compiler, or a processor that is not x86, may lack some).
const KernelSet& KernelsFor(Isa isa) noexcept;

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_KERNELS_H_
