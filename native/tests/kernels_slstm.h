// The equations of an sLSTM, forward and backward, against the same in double.
#ifndef OSTINATO_TESTS_KERNELS_SLSTM_H_
#define OSTINATO_TESTS_KERNELS_SLSTM_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "tests/kernels_cells.h"

namespace ostinato::testing {

struct SlstmStep {
  double i, f, z, o, slope;  // what is saved
  double c, n, m;            // after the step
  double h;

  SlstmStep(const double (&pre)[4], double c_prev, double n_prev, double m_prev) {
    const double log_f =
        m_prev + std::min(pre[1], 0.0) - std::log1p(std::exp(-std::abs(pre[1])));
    m = n_prev == 0 ? pre[0] : std::max(pre[0], log_f);
    i = std::exp(pre[0] - m);
    f = std::exp(std::min(log_f - m, 0.0));
    z = std::tanh(pre[2]);
    o = Sigmoid(pre[3]);
    slope = Sigmoid(-pre[1]);
    c = f * c_prev + i * z;
    n = f * n_prev + i;
    h = o * c / n;
  }
};

// Gates as large as they get, and states of which some are empty.
template <typename Table>
void CheckSlstm(const Table& table, int64_t unit, int64_t units) {
  using Storage = typename Table::Storage;
  using Operand = typename Table::Operand;
  using Accum = typename Table::Accum;
  const int64_t lanes = table.lanes, end = unit + units, hidden = end + 2;
  const int mode = static_cast<int>(Mode::kSlstm);
  Random random;
  Guarded<Accum> pre(4 * lanes), before(3 * hidden), cells(3 * hidden);
  Guarded<Accum> c(hidden), n(hidden), m(hidden), dh(end), dc(3 * hidden);
  Guarded<Storage> gates(5 * hidden), y(end);
  Guarded<Operand> h(end), dg(4 * hidden);
  random.Fill(pre, 6);
  random.Fill(before, 2);
  random.Fill(dh, 1);
  random.Fill(dc, 1);
  for (int64_t j = 0; j < hidden; ++j) {
    before[hidden + j] = std::abs(before[hidden + j]);
    for (int64_t s = 0; j % 3 == 0 && s < 3; ++s) before[s * hidden + j] = 0;
  }
  for (int64_t j = 0; j < lanes; j += 5) pre[j] = static_cast<Accum>(j % 2 ? 90 : -120);
  for (int64_t j = 1; j < lanes; j += 4)
    pre[lanes + j] = static_cast<Accum>(25 - 30 * j);
  for (int64_t j = 0; j < 3 * hidden; ++j) cells[j] = before[j];
  cpu::CellOptions<Accum> options{};
  options.hidden = options.cell_stride = hidden;
  cpu::ForwardToken<Storage, Operand, Accum> token{};
  token.c = cells.data();
  token.h = h.data();
  token.y = y.data();
  token.gates = gates.data();
  token.cells[0] = c.data();
  token.cells[1] = n.data();
  token.cells[2] = m.data();
  table.kernels.forward[mode](options, pre.data(), 4 * lanes, &token, 1, unit, units);

  cpu::BackwardToken<Storage, Operand, Accum> back{};
  back.gates = gates.data();
  for (int64_t s = 0; s < 3; ++s) back.c_prev[s] = before.data() + s * hidden;
  back.c[0] = c.data();
  back.c[1] = n.data();
  back.c[2] = m.data();
  back.dh = dh.data();
  back.dc = dc.data();
  back.dg = dg.data();
  std::vector<Accum> given(dc.data(), dc.data() + dc.size());
  table.kernels.backward[mode](options, &back, 1, unit, units);

  const auto near = [](double got, double want, const char* what) {
    // What an exponent as large as 150 is rounded by is a factor of the result.
    ExpectNear(got, want, 200 * Tolerance<Accum, Accum>(want), what);
  };
  const auto stored = [](double got, double want, const char* what) {
    ExpectNear(got, want,
               200 * Tolerance<Accum, Accum>(want) + Tolerance<Storage, Accum>(want),
               what);
  };
  for (int64_t j = unit; j < end; ++j) {
    double gate[4];
    for (int g = 0; g < 4; ++g) gate[g] = Value(pre[g * lanes + j - unit]);
    const double c_prev = before[j], n_prev = before[hidden + j];
    const SlstmStep want(gate, c_prev, n_prev, before[2 * hidden + j]);
    const double saved[5] = {want.i, want.f, want.z, want.o, want.slope};
    for (int g = 0; g < 5; ++g) stored(Value(gates[g * hidden + j]), saved[g], "gate");
    near(c[j], want.c, "c");
    near(n[j], want.n, "n");
    near(m[j], want.m, "m");
    for (int64_t s = 0; s < 3; ++s) {
      ExpectExact(cells[s * hidden + j], s == 0 ? c[j] : s == 1 ? n[j] : m[j], "state");
    }
    stored(Value(h[j]), want.h, "h");
    ExpectExact(Value(y[j]), Value(h[j]), "y");

    // From the gates as they were saved.
    double in[5];
    for (int g = 0; g < 5; ++g) in[g] = Value(gates[g * hidden + j]);
    const double ratio = c[j] / n[j], d_ratio = dh[j] * in[3] / n[j];
    const double d_c = given[j] + d_ratio, d_n = given[hidden + j] - d_ratio * ratio;
    const bool first = n_prev == 0, by_input = first || in[0] >= in[1];
    const double di = (d_c * in[2] + d_n) * in[0];
    const double df = first && in[1] == 1 ? 0 : (d_c * c_prev + d_n * n_prev) * in[1];
    const double rest = given[2 * hidden + j] - di - df;
    const double d_log_f = by_input ? df : df + rest;
    const double want_dg[4] = {by_input ? di + rest : di, d_log_f * in[4],
                               d_c * in[0] * (1 - in[2] * in[2]),
                               dh[j] * ratio * in[3] * (1 - in[3])};
    for (int g = 0; g < 4; ++g) {
      ExpectNear(Value(dg[g * hidden + j]), want_dg[g],
                 4 * Tolerance<Operand, Accum>(want_dg[g]), "dg");
    }
    const double want_dc[3] = {d_c * in[1], d_n * in[1], d_log_f};
    for (int64_t s = 0; s < 3; ++s) {
      ExpectNear(dc[s * hidden + j], want_dc[s],
                 4 * Tolerance<Accum, Accum>(want_dc[s]), "dc");
    }
  }
  for (int64_t j = 0; j < 5 * hidden; ++j) {
    const bool inside = j % hidden >= unit && j % hidden < end;
    if (!inside) CHECK_EQ(gates.Untouched(j), true);
    if (!inside && j < 4 * hidden) CHECK_EQ(dg.Untouched(j), true);
    if (!inside && j < 3 * hidden) ExpectExact(cells[j], before[j], "other state");
    if (!inside && j < 3 * hidden) ExpectExact(dc[j], given[j], "other dc");
  }

  Guarded<Accum> u(hidden);
  if (unit == 0) {
    options.hidden = units;  // the gates of all units, `units` apart
    Guarded<Storage> packed(5 * units);
    for (int64_t j = 0; j < 5 * units; ++j) {
      packed[j] = gates[j / units * hidden + j % units];
    }
    back.gates = packed.data();
    table.kernels.output[mode](options, &back, 1, u.data(), hidden);
    for (int64_t j = 0; j < units; ++j) {
      const double want = Value(gates[3 * hidden + j]) * c[j] / n[j];
      near(u[j], want, "output");
    }
    for (int64_t j = units; j < hidden; ++j) CHECK_EQ(u.Untouched(j), true);
  }
}

// log(1 + e^-|f|) over all magnitudes, through the state m of a step in which the
// forget gate decides.
template <typename Table>
void CheckLogarithm(const Table& table) {
  using Storage = typename Table::Storage;
  using Operand = typename Table::Operand;
  using Accum = typename Table::Accum;
  const int64_t lanes = table.lanes;
  Random random;
  Guarded<Accum> pre(4 * lanes), cells(3 * lanes);
  Guarded<Operand> h(lanes);
  cpu::CellOptions<Accum> options{};
  options.hidden = options.cell_stride = lanes;
  cpu::ForwardToken<Storage, Operand, Accum> token{};
  token.c = cells.data();
  token.h = h.data();
  for (int round = 0; round < 4000; ++round) {
    for (int64_t j = 0; j < lanes; ++j) {
      pre[j] = static_cast<Accum>(-1e4);
      const double magnitude = std::exp2(random.Uniform(-20, 6));
      pre[lanes + j] =
          static_cast<Accum>(random.Uniform(-1, 1) < 0 ? -magnitude : magnitude);
      pre[2 * lanes + j] = pre[3 * lanes + j] = 0;
      cells[j] = cells[lanes + j] = 1;
      cells[2 * lanes + j] = 0;
    }
    table.kernels.forward[static_cast<int>(Mode::kSlstm)](
        options, pre.data(), 4 * lanes, &token, 1, 0, lanes);
    for (int64_t j = 0; j < lanes; ++j) {
      const long double f = pre[lanes + j];
      const long double want = (f < 0 ? f : 0) - std::log1p(std::exp(f < 0 ? f : -f));
      ExpectNear(cells[2 * lanes + j], static_cast<double>(want),
                 8 * kHalfUlp<Accum> * std::abs(static_cast<double>(want)) + 1e-37,
                 "log sigmoid");
    }
  }
}

template <typename Table>
void CheckSlstms(const Table& table) {
  const int64_t lanes = table.lanes;
  for (const int64_t units : {int64_t{1}, lanes - 1, lanes}) {
    for (const int64_t unit : {int64_t{0}, 2 * lanes}) {
      if (units > 0) CheckSlstm(table, unit, units);
    }
  }
  CheckLogarithm(table);
}

}  // namespace ostinato::testing

#endif  // OSTINATO_TESTS_KERNELS_SLSTM_H_
