// The equations between the products, forward and backward; slstm-inl.h has those of an
// sLSTM.
#ifndef OSTINATO_CPU_KERNELS_CELL_INL_H_
#define OSTINATO_CPU_KERNELS_CELL_INL_H_

#include <cstdint>

#include "cpu/kernels/math-inl.h"

namespace ostinato::cpu {
namespace {

// Writes h_t as state and as output. Both hold the same value: what Storage can
// represent.
template <typename V, typename Storage, typename Operand>
void StoreState(const ForwardToken<Storage, Operand, typename V::Element>& token,
                int64_t unit, int64_t units, Reg<V> h) {
  const auto kept = RoundTo<V, Storage>(h);
  if (token.h != nullptr) Store<V>(token.h + unit, kept, units);
  if (token.y != nullptr) Store<V>(token.y + unit, kept, units);
}

template <typename V, typename Storage, int kBlocks>
void StoreGates(Storage* gates, int64_t hidden, int64_t units,
                const Reg<V> (&values)[kBlocks]) {
  for (const Reg<V>& value : values) {
    Store<V>(gates, value, units);
    gates += hidden;
  }
}

template <typename V>
Reg<V> Clip(const CellOptions<typename V::Element>& options, Reg<V> c) {
  const Reg<V> high = V::Set(options.clip);
  const Reg<V> above = V::Max(-high, c);  // still NaN where c is
  return options.clip_nan ? V::Min(above, high) : V::Min(high, above);
}

// ---------------------------------------------------------------------- forward

template <typename V, typename Storage, typename Operand>
void LstmForward(const CellOptions<typename V::Element>& options,
                 const typename V::Element* pre, int64_t pre_stride,
                 const ForwardToken<Storage, Operand, typename V::Element>* tokens,
                 int64_t n, int64_t unit, int64_t units) {
  for (const auto* token = tokens; token != tokens + n; ++token, pre += pre_stride) {
    const Reg<V> i = Sigmoid<V>(V::Load(pre));
    const Reg<V> f = Sigmoid<V>(V::Load(pre + V::kLanes));
    const Reg<V> g = Tanh<V>(V::Load(pre + 2 * V::kLanes));
    const Reg<V> o = Sigmoid<V>(V::Load(pre + 3 * V::kLanes));
    Reg<V> c = V::MulAdd(f, Load<V>(token->c + unit, units), i * g);
    if (options.clips) c = Clip<V>(options, c);
    Store<V>(token->c + unit, c, units);
    if (token->cells[0] != nullptr) Store<V>(token->cells[0] + unit, c, units);
    if (token->gates != nullptr) {
      StoreGates<V>(token->gates + unit, options.hidden, units, {i, f, g, o});
    }
    StoreState<V>(*token, unit, units, o * Tanh<V>(c));
  }
}

template <typename V, typename Storage, typename Operand>
void GruForward(const CellOptions<typename V::Element>& options,
                const typename V::Element* pre, int64_t pre_stride,
                const ForwardToken<Storage, Operand, typename V::Element>* tokens,
                int64_t n, int64_t unit, int64_t units) {
  for (const auto* token = tokens; token != tokens + n; ++token, pre += pre_stride) {
    const Reg<V> r = Sigmoid<V>(V::Load(pre));
    const Reg<V> z = Sigmoid<V>(V::Load(pre + V::kLanes));
    const Reg<V> h_candidate = V::Load(pre + 3 * V::kLanes);
    const Reg<V> new_h =
        Tanh<V>(V::MulAdd(r, h_candidate, V::Load(pre + 2 * V::kLanes)));
    const Reg<V> h_prev = Load<V>(token->h_prev + unit, units);
    if (token->gates != nullptr) {
      StoreGates<V>(token->gates + unit, options.hidden, units,
                    {r, z, new_h, h_candidate});
    }
    StoreState<V>(*token, unit, units, V::MulAdd(z, h_prev - new_h, new_h));
  }
}

template <typename V, typename Storage, typename Operand, Mode mode>
void RnnForward(const CellOptions<typename V::Element>&, const typename V::Element* pre,
                int64_t pre_stride,
                const ForwardToken<Storage, Operand, typename V::Element>* tokens,
                int64_t n, int64_t unit, int64_t units) {
  for (const auto* token = tokens; token != tokens + n; ++token, pre += pre_stride) {
    for (int64_t j = 0; j < units; j += V::kLanes) {
      const Reg<V> x = V::Load(pre + j);
      const Reg<V> h = mode == Mode::kRnnRelu ? V::Max(Reg<V>{}, x) : Tanh<V>(x);
      StoreState<V>(*token, unit + j, units - j, h);
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

template <typename V, typename Storage, typename Operand>
void LstmBackward(const CellOptions<typename V::Element>& options,
                  const BackwardToken<Storage, Operand, typename V::Element>* tokens,
                  int64_t n, int64_t unit, int64_t units) {
  const int64_t hidden = options.hidden;
  const Reg<V> clip = V::Set(options.clip);
  for (const auto* token = tokens; token != tokens + n; ++token) {
    for (int64_t j = unit; j < unit + units; j += V::kLanes) {
      const int64_t left = unit + units - j;
      const Storage* gates = token->gates + j;
      const Reg<V> i = Load<V>(gates, left);
      const Reg<V> f = Load<V>(gates + hidden, left);
      const Reg<V> g = Load<V>(gates + 2 * hidden, left);
      const Reg<V> o = Load<V>(gates + 3 * hidden, left);
      const Reg<V> c = Load<V>(token->c[0] + j, left);
      const Reg<V> c_prev = Load<V>(token->c_prev[0] + j, left);
      const Reg<V> dh = Load<V>(token->dh + j, left);
      const Reg<V> tanh_c = Tanh<V>(c);
      const Reg<V> dc =
          V::MulAdd(dh * o, TanhSlope<V>(tanh_c), Load<V>(token->dc + j, left));
      // Last of all, so that no 0 * NaN survives a clip.
      const auto cut = [&](Reg<V> d) {
        const auto inside = (c < clip) & (c > -clip);
        return options.clips ? (inside ? d : Reg<V>{}) : d;
      };
      Operand* dg = token->dg + j;
      Store<V>(dg, cut(dc * g * SigmoidSlope<V>(i)), left);
      Store<V>(dg + hidden, cut(dc * c_prev * SigmoidSlope<V>(f)), left);
      Store<V>(dg + 2 * hidden, cut(dc * i * TanhSlope<V>(g)), left);
      Store<V>(dg + 3 * hidden, dh * tanh_c * SigmoidSlope<V>(o), left);
      Store<V>(token->dc + j, cut(dc * f), left);
    }
  }
}

template <typename V, typename Storage, typename Operand>
void GruBackward(const CellOptions<typename V::Element>& options,
                 const BackwardToken<Storage, Operand, typename V::Element>* tokens,
                 int64_t n, int64_t unit, int64_t units) {
  const int64_t hidden = options.hidden;
  const Reg<V> one = V::Set(1);
  for (const auto* token = tokens; token != tokens + n; ++token) {
    for (int64_t j = unit; j < unit + units; j += V::kLanes) {
      const int64_t left = unit + units - j;
      const Storage* gates = token->gates + j;
      const Reg<V> r = Load<V>(gates, left);
      const Reg<V> z = Load<V>(gates + hidden, left);
      const Reg<V> new_h = Load<V>(gates + 2 * hidden, left);
      const Reg<V> h_candidate = Load<V>(gates + 3 * hidden, left);
      const Reg<V> h_prev = Load<V>(token->h_prev + j, left);
      const Reg<V> dh = Load<V>(token->dh + j, left);
      const Reg<V> dn = dh * (one - z) * TanhSlope<V>(new_h);
      Operand* dg = token->dg + j;
      Store<V>(dg, dn * h_candidate * SigmoidSlope<V>(r), left);
      Store<V>(dg + hidden, dh * (h_prev - new_h) * SigmoidSlope<V>(z), left);
      Store<V>(dg + 2 * hidden, dn * r, left);
      Store<V>(dg + 3 * hidden, dn, left);
      Store<V>(token->dh + j, dh * z, left);
    }
  }
}

template <typename V, typename Storage, typename Operand, Mode mode>
void RnnBackward(const CellOptions<typename V::Element>&,
                 const BackwardToken<Storage, Operand, typename V::Element>* tokens,
                 int64_t n, int64_t unit, int64_t units) {
  for (const auto* token = tokens; token != tokens + n; ++token) {
    for (int64_t j = unit; j < unit + units; j += V::kLanes) {
      const int64_t left = unit + units - j;
      const Reg<V> h = Load<V>(token->h + j, left);
      const Reg<V> slope = mode == Mode::kRnnRelu
                               ? (h > Reg<V>{} ? V::Set(1) : Reg<V>{})
                               : TanhSlope<V>(h);
      Store<V>(token->dg + j, Load<V>(token->dh + j, left) * slope, left);
    }
  }
}

template <typename V, typename Storage, typename Operand>
void LstmOutput(const CellOptions<typename V::Element>& options,
                const BackwardToken<Storage, Operand, typename V::Element>* tokens,
                int64_t n, typename V::Element* unprojected, int64_t stride) {
  const int64_t hidden = options.hidden;
  for (const auto* token = tokens; token != tokens + n;
       ++token, unprojected += stride) {
    for (int64_t j = 0; j < hidden; j += V::kLanes) {
      const Reg<V> o = Load<V>(token->gates + 3 * hidden + j, hidden - j);
      Store<V>(unprojected + j, o * Tanh<V>(Load<V>(token->c[0] + j, hidden - j)),
               hidden - j);
    }
  }
}

}  // namespace
}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_KERNELS_CELL_INL_H_
