// The equations of an sLSTM between the products, forward and backward. pointwise.py
// has the same ones for XLA.
#ifndef OSTINATO_CPU_KERNELS_SLSTM_INL_H_
#define OSTINATO_CPU_KERNELS_SLSTM_INL_H_

#include <cstdint>

#include "cpu/kernels/cell-inl.h"

namespace ostinato::cpu {
namespace {

// e^-|x|.
template <typename V>
Reg<V> ExpMinusAbs(Reg<V> x) {
  using C = ExpConstants<typename V::Element>;
  const Reg<V> minus_abs = -V::Max(-x, x);
  const Exponential<V> e = Exp<V>(V::Max(V::Set(C::kLowest), minus_abs));
  return V::MulAdd(e.scale, e.minus_one, e.scale);
}

// log(1 + t) for t in 0..1: 2 artanh(s) = 2 (s + s^3 / 3 + ...) of s = t / (2 + t),
// which is at most 1/3.
template <typename V>
Reg<V> LogOnePlus(Reg<V> t) {
  // What the series leaves out is below half a unit in the last place.
  constexpr int kLast = sizeof(typename V::Element) == 4 ? 7 : 16;
  const Reg<V> s = t / (t + V::Set(2));
  return V::Set(2) * V::MulAdd(ArtanhSeries<V, 1, kLast>(s * s), s * s * s, s);
}

template <typename V, typename Storage, typename Operand>
void SlstmForward(const CellOptions<typename V::Element>& options,
                  const typename V::Element* pre, int64_t pre_stride,
                  const ForwardToken<Storage, Operand, typename V::Element>* tokens,
                  int64_t n, int64_t unit, int64_t units) {
  const Reg<V> one = V::Set(1), zero{};
  for (const auto* token = tokens; token != tokens + n; ++token, pre += pre_stride) {
    auto* const cells = token->c + unit;
    const int64_t stride = options.cell_stride;
    const Reg<V> i_pre = V::Load(pre);
    const Reg<V> f_pre = V::Load(pre + V::kLanes);
    const Reg<V> z = Tanh<V>(V::Load(pre + 2 * V::kLanes));
    const Reg<V> o = Sigmoid<V>(V::Load(pre + 3 * V::kLanes));
    const Reg<V> n_prev = Load<V>(cells + stride, units);
    const Reg<V> t = ExpMinusAbs<V>(f_pre);
    const Reg<V> log_f =
        V::Min(zero, f_pre) - LogOnePlus<V>(t) + Load<V>(cells + 2 * stride, units);
    // Of the two gates that m scales, one is 1, and the other one at most 1. Of a state
    // that is still empty, m takes the scale of the input, whatever the larger one.
    const Reg<V> lead = log_f - i_pre;
    const Reg<V> e = ExpMinusAbs<V>(lead);
    const auto by_input = (n_prev == zero) | (lead <= zero);
    const Reg<V> i = by_input ? one : e;
    const Reg<V> f = lead >= zero ? one : e;
    const Reg<V> m = by_input ? i_pre : log_f;
    const Reg<V> c = V::MulAdd(f, Load<V>(cells, units), i * z);
    const Reg<V> normalizer = V::MulAdd(f, n_prev, i);
    const Reg<V> after[kMostCells] = {c, normalizer, m};
    for (int s = 0; s < kMostCells; ++s) {
      Store<V>(cells + s * stride, after[s], units);
      if (token->cells[s] != nullptr) Store<V>(token->cells[s] + unit, after[s], units);
    }
    if (token->gates != nullptr) {
      const Reg<V> slope = (f_pre >= zero ? t : one) / (one + t);
      StoreGates<V, Storage, 5>(token->gates + unit, options.hidden, units,
                                {i, f, z, o, slope});
    }
    StoreState<V>(*token, unit, units, o * c / normalizer);
  }
}

template <typename V, typename Storage, typename Operand>
void SlstmBackward(const CellOptions<typename V::Element>& options,
                   const BackwardToken<Storage, Operand, typename V::Element>* tokens,
                   int64_t n, int64_t unit, int64_t units) {
  const int64_t hidden = options.hidden, stride = options.cell_stride;
  const Reg<V> one = V::Set(1), zero{};
  for (const auto* token = tokens; token != tokens + n; ++token) {
    for (int64_t j = unit; j < unit + units; j += V::kLanes) {
      const int64_t left = unit + units - j;
      const Storage* gates = token->gates + j;
      const Reg<V> i = Load<V>(gates, left);
      const Reg<V> f = Load<V>(gates + hidden, left);
      const Reg<V> z = Load<V>(gates + 2 * hidden, left);
      const Reg<V> o = Load<V>(gates + 3 * hidden, left);
      const Reg<V> slope = Load<V>(gates + 4 * hidden, left);
      const Reg<V> c_prev = Load<V>(token->c_prev[0] + j, left);
      const Reg<V> n_prev = Load<V>(token->c_prev[1] + j, left);
      const Reg<V> scale = one / Load<V>(token->c[1] + j, left);
      const Reg<V> ratio = Load<V>(token->c[0] + j, left) * scale;
      auto* const d_cells = token->dc + j;
      const Reg<V> dh = Load<V>(token->dh + j, left);
      const Reg<V> d_ratio = dh * o * scale;
      const Reg<V> dc = Load<V>(d_cells, left) + d_ratio;
      const Reg<V> dn = Load<V>(d_cells + stride, left) - d_ratio * ratio;
      const auto first = n_prev == zero;
      const Reg<V> di = V::MulAdd(dc, z, dn) * i;
      const Reg<V> passed = V::MulAdd(dc, c_prev, dn * n_prev) * f;
      const Reg<V> df = (first & (f == one)) ? zero : passed;
      const Reg<V> dm = Load<V>(d_cells + 2 * stride, left) - di - df;
      const auto by_input = first | (i >= f);
      const Reg<V> d_log_f = by_input ? df : df + dm;
      Operand* dg = token->dg + j;
      Store<V>(dg, by_input ? di + dm : di, left);
      Store<V>(dg + hidden, d_log_f * slope, left);
      Store<V>(dg + 2 * hidden, dc * i * TanhSlope<V>(z), left);
      Store<V>(dg + 3 * hidden, dh * ratio * SigmoidSlope<V>(o), left);
      Store<V>(d_cells, dc * f, left);
      Store<V>(d_cells + stride, dn * f, left);
      Store<V>(d_cells + 2 * stride, d_log_f, left);
    }
  }
}

template <typename V, typename Storage, typename Operand>
void SlstmOutput(const CellOptions<typename V::Element>& options,
                 const BackwardToken<Storage, Operand, typename V::Element>* tokens,
                 int64_t n, typename V::Element* unprojected, int64_t stride) {
  const int64_t hidden = options.hidden;
  for (const auto* token = tokens; token != tokens + n;
       ++token, unprojected += stride) {
    for (int64_t j = 0; j < hidden; j += V::kLanes) {
      const int64_t left = hidden - j;
      const Reg<V> o = Load<V>(token->gates + 3 * hidden + j, left);
      const Reg<V> c = Load<V>(token->c[0] + j, left);
      Store<V>(unprojected + j, o * c / Load<V>(token->c[1] + j, left), left);
    }
  }
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_SLSTM_INL_H_
