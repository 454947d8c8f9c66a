// The equations between the products, forward and backward, of every mode.
#ifndef OSTINATO_CPU_KERNELS_CELL_INL_H_
#define OSTINATO_CPU_KERNELS_CELL_INL_H_

#include <cstdint>

#include "cpu/kernels/math-inl.h"

namespace ostinato::cpu {
namespace {

// Writes h_t as state and as output. Both hold the same value: what S can represent.
template <typename V, typename S, typename O>
void StoreState(const ForwardRow<S, O, typename V::Element>& row, int64_t unit,
                int64_t units, Reg<V> h) {
  const auto kept = RoundTo<V, S>(h);
  if (row.h != nullptr) Store<V>(row.h + unit, kept);
  if (row.y != nullptr) Store<V>(row.y + unit, kept, units);
}

template <typename V, typename S>
void StoreGates(S* gates, int64_t hidden, int64_t units, const Reg<V> (&values)[4]) {
  for (const Reg<V>& value : values) {
    Store<V>(gates, value, units);
    gates += hidden;
  }
}

template <typename V>
Reg<V> Clip(const Cell<typename V::Element>& cell, Reg<V> c) {
  const Reg<V> high = V::Set(cell.clip);
  const Reg<V> above = V::Max(-high, c);  // still NaN where c is
  return cell.clip_nan ? V::Min(above, high) : V::Min(high, above);
}

// ---------------------------------------------------------------------- forward

template <typename V, typename S, typename O>
void LstmForward(const Cell<typename V::Element>& cell, const typename V::Element* pre,
                 int64_t pre_stride, const ForwardRow<S, O, typename V::Element>* rows,
                 int64_t n, int64_t unit, int64_t units) {
  for (const auto* row = rows; row != rows + n; ++row, pre += pre_stride) {
    const Reg<V> i = Sigmoid<V>(V::Load(pre));
    const Reg<V> f = Sigmoid<V>(V::Load(pre + V::kLanes));
    const Reg<V> g = Tanh<V>(V::Load(pre + 2 * V::kLanes));
    const Reg<V> o = Sigmoid<V>(V::Load(pre + 3 * V::kLanes));
    Reg<V> c = V::MulAdd(f, V::Load(row->c + unit), i * g);
    if (cell.clips) c = Clip<V>(cell, c);
    V::Store(row->c + unit, c);
    if (row->cells != nullptr) Store<V>(row->cells + unit, c, units);
    if (row->gates != nullptr) {
      StoreGates<V>(row->gates + unit, cell.hidden, units, {i, f, g, o});
    }
    StoreState<V>(*row, unit, units, o * Tanh<V>(c));
  }
}

template <typename V, typename S, typename O>
void GruForward(const Cell<typename V::Element>& cell, const typename V::Element* pre,
                int64_t pre_stride, const ForwardRow<S, O, typename V::Element>* rows,
                int64_t n, int64_t unit, int64_t units) {
  for (const auto* row = rows; row != rows + n; ++row, pre += pre_stride) {
    const Reg<V> r = Sigmoid<V>(V::Load(pre));
    const Reg<V> z = Sigmoid<V>(V::Load(pre + V::kLanes));
    const Reg<V> u = V::Load(pre + 3 * V::kLanes);
    const Reg<V> new_h = Tanh<V>(V::MulAdd(r, u, V::Load(pre + 2 * V::kLanes)));
    const Reg<V> h_prev = Load<V>(row->h_prev + unit, units);
    if (row->gates != nullptr) {
      StoreGates<V>(row->gates + unit, cell.hidden, units, {r, z, new_h, u});
    }
    StoreState<V>(*row, unit, units, V::MulAdd(z, h_prev - new_h, new_h));
  }
}

template <typename V, typename S, typename O, Mode mode>
void RnnForward(const Cell<typename V::Element>&, const typename V::Element* pre,
                int64_t pre_stride, const ForwardRow<S, O, typename V::Element>* rows,
                int64_t n, int64_t unit, int64_t units) {
  for (const auto* row = rows; row != rows + n; ++row, pre += pre_stride) {
    for (int64_t j = 0; j < units; j += V::kLanes) {
      const Reg<V> x = V::Load(pre + j);
      const Reg<V> h = mode == Mode::kRnnRelu ? V::Max(Reg<V>{}, x) : Tanh<V>(x);
      StoreState<V>(*row, unit + j, units - j, h);
    }
  }
}

// --------------------------------------------------------------------- backward

template <typename V>
Reg<V> SigmoidSlope(Reg<V> s) {
  return s * (V::Set(1) - s);
}

template <typename V>
Reg<V> TanhSlope(Reg<V> t) {
  return V::Set(1) - t * t;
}

template <typename V, typename S, typename O>
void LstmBackward(const Cell<typename V::Element>& cell,
                  const BackwardRow<S, O, typename V::Element>* rows, int64_t n,
                  int64_t unit, int64_t units) {
  const int64_t hidden = cell.hidden;
  const Reg<V> clip = V::Set(cell.clip);
  for (const auto* row = rows; row != rows + n; ++row) {
    for (int64_t j = unit; j < unit + units; j += V::kLanes) {
      const int64_t left = unit + units - j;
      const S* gates = row->gates + j;
      const Reg<V> i = Load<V>(gates, left);
      const Reg<V> f = Load<V>(gates + hidden, left);
      const Reg<V> g = Load<V>(gates + 2 * hidden, left);
      const Reg<V> o = Load<V>(gates + 3 * hidden, left);
      const Reg<V> c = Load<V>(row->c + j, left);
      const Reg<V> c_prev = Load<V>(row->c_prev + j, left);
      const Reg<V> dh = Load<V>(row->dh + j, left);
      const Reg<V> tanh_c = Tanh<V>(c);
      const Reg<V> dc =
          V::MulAdd(dh * o, TanhSlope<V>(tanh_c), Load<V>(row->dc + j, left));
      // Last of all, so that no 0 * NaN survives a clip.
      const auto cut = [&](Reg<V> d) {
        const auto inside = (c < clip) & (c > -clip);
        return cell.clips ? (inside ? d : Reg<V>{}) : d;
      };
      O* dg = row->dg + j;
      Store<V>(dg, cut(dc * g * SigmoidSlope<V>(i)), left);
      Store<V>(dg + hidden, cut(dc * c_prev * SigmoidSlope<V>(f)), left);
      Store<V>(dg + 2 * hidden, cut(dc * i * TanhSlope<V>(g)), left);
      Store<V>(dg + 3 * hidden, dh * tanh_c * SigmoidSlope<V>(o), left);
      Store<V>(row->dc + j, cut(dc * f), left);
    }
  }
}

template <typename V, typename S, typename O>
void GruBackward(const Cell<typename V::Element>& cell,
                 const BackwardRow<S, O, typename V::Element>* rows, int64_t n,
                 int64_t unit, int64_t units) {
  const int64_t hidden = cell.hidden;
  const Reg<V> one = V::Set(1);
  for (const auto* row = rows; row != rows + n; ++row) {
    for (int64_t j = unit; j < unit + units; j += V::kLanes) {
      const int64_t left = unit + units - j;
      const S* gates = row->gates + j;
      const Reg<V> r = Load<V>(gates, left);
      const Reg<V> z = Load<V>(gates + hidden, left);
      const Reg<V> new_h = Load<V>(gates + 2 * hidden, left);
      const Reg<V> u = Load<V>(gates + 3 * hidden, left);
      const Reg<V> h_prev = Load<V>(row->h_prev + j, left);
      const Reg<V> dh = Load<V>(row->dh + j, left);
      const Reg<V> dn = dh * (one - z) * TanhSlope<V>(new_h);
      O* dg = row->dg + j;
      Store<V>(dg, dn * u * SigmoidSlope<V>(r), left);
      Store<V>(dg + hidden, dh * (h_prev - new_h) * SigmoidSlope<V>(z), left);
      Store<V>(dg + 2 * hidden, dn * r, left);
      Store<V>(dg + 3 * hidden, dn, left);
      Store<V>(row->dh + j, dh * z, left);
    }
  }
}

template <typename V, typename S, typename O, Mode mode>
void RnnBackward(const Cell<typename V::Element>&,
                 const BackwardRow<S, O, typename V::Element>* rows, int64_t n,
                 int64_t unit, int64_t units) {
  for (const auto* row = rows; row != rows + n; ++row) {
    for (int64_t j = unit; j < unit + units; j += V::kLanes) {
      const int64_t left = unit + units - j;
      const Reg<V> h = Load<V>(row->h + j, left);
      const Reg<V> slope = mode == Mode::kRnnRelu
                               ? (h > Reg<V>{} ? V::Set(1) : Reg<V>{})
                               : TanhSlope<V>(h);
      Store<V>(row->dg + j, Load<V>(row->dh + j, left) * slope, left);
    }
  }
}

template <typename V, typename S, typename O>
void LstmOutput(const Cell<typename V::Element>& cell,
                const BackwardRow<S, O, typename V::Element>* rows, int64_t n,
                typename V::Element* u, int64_t stride) {
  const int64_t hidden = cell.hidden;
  for (const auto* row = rows; row != rows + n; ++row, u += stride) {
    for (int64_t j = 0; j < hidden; j += V::kLanes) {
      const Reg<V> o = Load<V>(row->gates + 3 * hidden + j, hidden - j);
      Store<V>(u + j, o * Tanh<V>(Load<V>(row->c + j, hidden - j)), hidden - j);
    }
  }
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_CELL_INL_H_
