// The equations of every mode but the sLSTM, forward and backward, against the same in
// double.
#ifndef OSTINATO_TESTS_KERNELS_CELLS_H_
#define OSTINATO_TESTS_KERNELS_CELLS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tests/kernels_fixture.h"

namespace ostinato::testing {

using cpu::Mode;

inline double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// Of a value of about `want` that was kept as T after a few operations in Accum.
template <typename T, typename Accum>
double Tolerance(double want) {
  const double rounded = std::is_same_v<T, Accum> ? 0 : kHalfUlp<T> * std::abs(want);
  return rounded + 16 * kHalfUlp<Accum> * std::max(1.0, std::abs(want));
}

struct Clipping {
  bool clips;
  bool clip_nan;
};

constexpr double kClip = 0.75;

inline double Clip(Clipping clipping, double c) {
  if (!clipping.clips) return c;
  if (std::isnan(c)) return clipping.clip_nan ? kClip : c;
  return std::min(kClip, std::max(-kClip, c));
}

template <typename Accum>
cpu::CellOptions<Accum> MakeOptions(int64_t hidden, Clipping clipping) {
  return {hidden, hidden, clipping.clips, clipping.clip_nan, static_cast<Accum>(kClip)};
}

// ---------------------------------------------------------------------- forward

// The arrays of one token, with the state before the step in them.
template <typename Table>
struct ForwardArrays {
  using Storage = typename Table::Storage;
  using Operand = typename Table::Operand;
  using Accum = typename Table::Accum;
  Guarded<Operand> h_prev, h;
  Guarded<Accum> c_prev, c, cells;
  Guarded<Storage> y, gates;

  ForwardArrays(int64_t hidden, int64_t end, Random& random)
      : h_prev(end),
        h(end),
        c_prev(end),
        c(end),
        cells(hidden),
        y(end),
        gates(4 * hidden) {
    random.FillWithSpecials(h_prev, 1);
    for (int64_t i = 0; i < end; ++i) {
      c_prev[i] = static_cast<Accum>(random.Uniform(-2, 2));
      c[i] = c_prev[i];
    }
  }
};

// `saves` as in training: gates, cells and y are wanted. Else h alone.
template <typename Table>
void CheckForward(const Table& table, Mode mode, int64_t n, int64_t unit, int64_t units,
                  Clipping clipping, bool saves) {
  using Storage = typename Table::Storage;
  using Operand = typename Table::Operand;
  using Accum = typename Table::Accum;
  const bool lstm = mode == Mode::kLstm;
  const bool gru = mode == Mode::kGru;
  const int64_t lanes = table.lanes;
  const int64_t end = unit + units;
  const int64_t hidden = end + 2;
  const int64_t whole = unit + (units + lanes - 1) / lanes * lanes;
  const int64_t width = lstm || gru ? 4 * lanes : whole - unit;
  Random random;
  Guarded<Accum> pre(std::max<int64_t>(0, n * (width + 1) - 1));
  random.FillWithSpecials(pre, 6);
  std::vector<std::unique_ptr<ForwardArrays<Table>>> arrays;
  std::vector<cpu::ForwardToken<Storage, Operand, Accum>> tokens;
  for (int64_t r = 0; r < n; ++r) {
    arrays.push_back(std::make_unique<ForwardArrays<Table>>(hidden, end, random));
    auto& a = *arrays.back();
    tokens.push_back({gru ? a.h_prev.data() : nullptr,
                      lstm ? a.c.data() : nullptr,
                      a.h.data(),
                      saves ? a.y.data() : nullptr,
                      saves && (lstm || gru) ? a.gates.data() : nullptr,
                      {saves && lstm ? a.cells.data() : nullptr}});
  }
  table.kernels.forward[static_cast<int>(mode)](MakeOptions<Accum>(hidden, clipping),
                                                pre.data(), width + 1, tokens.data(), n,
                                                unit, units);

  for (int64_t r = 0; r < n; ++r) {
    auto& a = *arrays[r];
    for (int64_t j = 0; j < units; ++j) {
      const auto at = [&](int64_t v) {
        return Value(pre[r * (width + 1) + v * lanes + j]);
      };
      double gates[4] = {};
      double want_h;
      if (lstm) {
        const double want[4] = {Sigmoid(at(0)), Sigmoid(at(1)), std::tanh(at(2)),
                                Sigmoid(at(3))};
        std::copy_n(want, 4, gates);
        const double c =
            Clip(clipping, gates[1] * a.c_prev[unit + j] + gates[0] * gates[2]);
        ExpectNear(a.c[unit + j], c, Tolerance<Accum, Accum>(c), "c");
        if (saves) ExpectExact(a.cells[unit + j], a.c[unit + j], "saved c");
        want_h = gates[3] * std::tanh(c);
      } else if (gru) {
        const double reset = Sigmoid(at(0));
        const double want[4] = {reset, Sigmoid(at(1)), std::tanh(at(2) + reset * at(3)),
                                at(3)};
        std::copy_n(want, 4, gates);
        want_h = gates[2] + gates[1] * (Value(a.h_prev[unit + j]) - gates[2]);
      } else if (mode == Mode::kRnnRelu) {
        want_h = at(0) < 0 ? 0 : at(0);
        if (!std::is_same_v<Storage, Accum>) want_h = RoundToBFloat16(want_h);
      } else {
        want_h = std::tanh(at(0));
      }
      const bool exact = mode == Mode::kRnnRelu;
      ExpectNear(Value(a.h[unit + j]), want_h,
                 exact ? 0 : Tolerance<Storage, Accum>(want_h), "h");
      if (saves) {
        ExpectExact(Value(a.y[unit + j]), Value(a.h[unit + j]), "y");
      } else if (!std::is_same_v<Storage, Accum>) {
        ExpectExact(RoundToBFloat16(Value(a.h[unit + j])), Value(a.h[unit + j]), "h");
      }
      for (int64_t g = 0; saves && (lstm || gru) && g < 4; ++g) {
        ExpectNear(Value(a.gates[g * hidden + unit + j]), gates[g],
                   Tolerance<Storage, Accum>(gates[g]), "gate");
      }
    }
    for (int64_t j = 0; j < 4 * hidden; ++j) {
      const bool inside = j % hidden >= unit && j % hidden < end;
      const bool written = saves && inside && (lstm || gru);
      if (!written) CHECK_EQ(a.gates.Untouched(j), true);
      if (j < hidden && !(saves && inside && lstm))
        CHECK_EQ(a.cells.Untouched(j), true);
      if (j < end && !(saves && inside)) CHECK_EQ(a.y.Untouched(j), true);
    }
  }
}

// --------------------------------------------------------------------- backward

template <typename Table>
struct BackwardArrays {
  using Storage = typename Table::Storage;
  using Operand = typename Table::Operand;
  using Accum = typename Table::Accum;
  Guarded<Storage> gates, h_prev, h;
  Guarded<Accum> c_prev, c, dh, dc;
  Guarded<Operand> dg;
  Guarded<Accum> dh_before, dc_before;

  BackwardArrays(int64_t hidden, int64_t end, Random& random)
      : gates(4 * hidden),
        h_prev(end),
        h(end),
        c_prev(end),
        c(end),
        dh(end),
        dc(end),
        dg(4 * hidden),
        dh_before(end),
        dc_before(end) {
    random.Fill(gates, 1);
    random.FillWithSpecials(h_prev, 1);
    random.FillWithSpecials(h, 1);
    random.FillWithSpecials(c_prev, 1);
    random.FillWithSpecials(c, 1);
    random.Fill(dh, 1);
    random.Fill(dc, 1);
    for (int64_t i = 0; i < end; ++i) {
      if (i % 5 == 0) c[i] = static_cast<Accum>(i % 2 == 0 ? kClip : -kClip);
      dh_before[i] = dh[i];
      dc_before[i] = dc[i];
    }
  }
};

template <typename Table>
void CheckBackward(const Table& table, Mode mode, int64_t n, int64_t unit,
                   int64_t units, bool clips) {
  using Storage = typename Table::Storage;
  using Operand = typename Table::Operand;
  using Accum = typename Table::Accum;
  const int64_t end = unit + units;
  const int64_t hidden = end + 2;
  Random random;
  std::vector<std::unique_ptr<BackwardArrays<Table>>> arrays;
  std::vector<cpu::BackwardToken<Storage, Operand, Accum>> tokens;
  for (int64_t r = 0; r < n; ++r) {
    arrays.push_back(std::make_unique<BackwardArrays<Table>>(hidden, end, random));
    auto& a = *arrays.back();
    tokens.push_back({a.gates.data(),
                      a.h_prev.data(),
                      a.h.data(),
                      {a.c_prev.data()},
                      {a.c.data()},
                      a.dh.data(),
                      a.dc.data(),
                      a.dg.data()});
  }
  table.kernels.backward[static_cast<int>(mode)](
      MakeOptions<Accum>(hidden, {clips, false}), tokens.data(), n, unit, units);

  const auto near = [](double got, double want, const char* what) {
    ExpectNear(got, want, Tolerance<Accum, Accum>(want), what);
  };
  const int blocks = mode == Mode::kLstm || mode == Mode::kGru ? 4 : 1;
  for (int64_t r = 0; r < n; ++r) {
    auto& a = *arrays[r];
    for (int64_t j = unit; j < end; ++j) {
      const auto gate = [&](int g) { return Value(a.gates[g * hidden + j]); };
      const double dh = a.dh_before[j];
      const double h = Value(a.h[j]);
      double want[4] = {};
      if (mode == Mode::kLstm) {
        const double i = gate(0), f = gate(1), g = gate(2), o = gate(3);
        const double t = std::tanh(static_cast<double>(a.c[j]));
        const double dc = a.dc_before[j] + dh * o * (1 - t * t);
        const bool inside = !clips || std::abs(a.c[j]) < kClip;
        want[0] = inside ? dc * g * i * (1 - i) : 0;
        want[1] = inside ? dc * a.c_prev[j] * f * (1 - f) : 0;
        want[2] = inside ? dc * i * (1 - g * g) : 0;
        want[3] = dh * t * o * (1 - o);
        near(a.dc[j], inside ? dc * f : 0, "dc");
        near(a.dh[j], dh, "dh");
      } else if (mode == Mode::kGru) {
        const double reset = gate(0), z = gate(1), new_h = gate(2), u = gate(3);
        const double dn = dh * (1 - z) * (1 - new_h * new_h);
        want[0] = dn * u * reset * (1 - reset);
        want[1] = dh * (Value(a.h_prev[j]) - new_h) * z * (1 - z);
        want[2] = dn * reset;
        want[3] = dn;
        near(a.dh[j], dh * z, "dh");
      } else {
        want[0] = dh * (mode == Mode::kRnnTanh ? 1 - h * h : h > 0 ? 1 : 0);
      }
      for (int g = 0; g < blocks; ++g) {
        ExpectNear(Value(a.dg[g * hidden + j]), want[g],
                   Tolerance<Operand, Accum>(want[g]), "dg");
      }
    }
    for (int64_t j = 0; j < a.dg.size(); ++j) {
      const bool inside = j % hidden >= unit && j % hidden < end;
      if (j >= blocks * hidden || !inside) CHECK_EQ(a.dg.Untouched(j), true);
    }
    for (int64_t j = 0; j < unit; ++j) {
      ExpectExact(a.dh[j], a.dh_before[j], "dh of other units");
      ExpectExact(a.dc[j], a.dc_before[j], "dc of other units");
    }
  }
}

template <typename Table>
void CheckLstmOutput(const Table& table, int64_t n, int64_t hidden) {
  using Storage = typename Table::Storage;
  using Operand = typename Table::Operand;
  using Accum = typename Table::Accum;
  const int64_t stride = hidden + 1;
  Random random;
  std::vector<std::unique_ptr<BackwardArrays<Table>>> arrays;
  std::vector<cpu::BackwardToken<Storage, Operand, Accum>> tokens;
  for (int64_t r = 0; r < n; ++r) {
    arrays.push_back(std::make_unique<BackwardArrays<Table>>(hidden, hidden, random));
    tokens.push_back({});
    tokens.back().gates = arrays.back()->gates.data();
    tokens.back().c[0] = arrays.back()->c.data();
  }
  Guarded<Accum> u(std::max<int64_t>(0, n * stride - 1));
  table.kernels.output[static_cast<int>(Mode::kLstm)](
      MakeOptions<Accum>(hidden, {}), tokens.data(), n, u.data(), stride);
  for (int64_t i = 0; i < u.size(); ++i) {
    const int64_t j = i % stride;
    if (j == hidden) {
      CHECK_EQ(u.Untouched(i), true);
      continue;
    }
    auto& a = *arrays[i / stride];
    const double want = Value(a.gates[3 * hidden + j]) * std::tanh(Value(a.c[j]));
    ExpectNear(u[i], want, Tolerance<Accum, Accum>(want), "lstm_output");
  }
}

// --------------------------------------------------------------------- accuracy

// The activations over all magnitudes, through c = 0 of an LSTM, whose gates i and g
// are saved, in types that save them unrounded.
template <typename Table>
void CheckAccuracy(const Table& table) {
  using Storage = typename Table::Storage;
  using Operand = typename Table::Operand;
  using Accum = typename Table::Accum;
  if constexpr (std::is_same_v<Storage, Accum>) {
    const int64_t lanes = table.lanes;
    const auto forward = table.kernels.forward[static_cast<int>(Mode::kLstm)];
    const double unit_in_last_place = 2 * kHalfUlp<Accum>;
    Random random;
    Guarded<Accum> pre(4 * lanes), c(lanes);
    Guarded<Operand> h(lanes);
    Guarded<Storage> gates(4 * lanes);
    for (int round = 0; round < 8000; ++round) {
      random.Fill(c, 1);
      for (int64_t i = 0; i < 4 * lanes; ++i) {
        const double magnitude = std::exp2(random.Uniform(-30, 8));
        pre[i] = static_cast<Accum>(random.Uniform(-1, 1) < 0 ? -magnitude : magnitude);
      }
      const cpu::ForwardToken<Storage, Operand, Accum> token = {
          nullptr, c.data(), h.data(), nullptr, gates.data(), {}};
      forward(MakeOptions<Accum>(lanes, {}), pre.data(), 4 * lanes, &token, 1, 0,
              lanes);
      for (int64_t j = 0; j < lanes; ++j) {
        const long double x = pre[j], t = pre[2 * lanes + j];
        ExpectNear(gates[j], static_cast<double>(1 / (1 + std::exp(-x))),
                   2 * unit_in_last_place, "sigmoid");
        const auto want = static_cast<double>(std::tanh(t));
        ExpectNear(gates[2 * lanes + j], want, 4 * unit_in_last_place * std::abs(want),
                   "tanh");
      }
    }
  }
}

template <typename Table>
void CheckCells(const Table& table) {
  const int64_t lanes = table.lanes;
  constexpr Mode kModes[] = {Mode::kRnnRelu, Mode::kRnnTanh, Mode::kLstm, Mode::kGru};
  constexpr Clipping kClippings[] = {{false, false}, {true, false}, {true, true}};
  const int64_t sizes[] = {1,         lanes - 1,     lanes,    lanes + 1,
                           2 * lanes, 4 * lanes - 3, 4 * lanes};
  for (const Mode mode : kModes) {
    const bool one_vector = mode == Mode::kLstm || mode == Mode::kGru;
    for (const int64_t units : sizes) {
      for (const int64_t n : {0, 1, 3}) {
        for (const int64_t unit : {int64_t{0}, 2 * lanes}) {
          for (const bool saves : {false, true}) {
            if (one_vector && units > lanes) break;
            for (const Clipping clipping : kClippings) {
              CheckForward(table, mode, n, unit, units, clipping, saves);
            }
          }
          CheckBackward(table, mode, n, unit, units, false);
          CheckBackward(table, mode, n, unit, units, true);
        }
        CheckLstmOutput(table, n, units);
      }
    }
  }
}

}  // namespace ostinato::testing

#endif  // OSTINATO_TESTS_KERNELS_CELLS_H_
