// The equations of a network step by step, in double precision, for network_test.cc.
#ifndef OSTINATO_TESTS_NETWORK_LOOP_H_
#define OSTINATO_TESTS_NETWORK_LOOP_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/network_case.h"

namespace ostinato::testing {

inline double Sigmoid(double a) { return 1 / (1 + std::exp(-a)); }

// What a call's outputs add up to with its cotangents as weights, step by step and in
// double precision: the gradients of this are what the backward pass returns.
class Loop {
 public:
  explicit Loop(const Case& c, Arrays<double, double>& a)
      : c_(c), n_(c.network), a_(a) {}

  double Loss() {
    double loss = 0;
    std::vector<double> below, above(c_.tokens() * n_.width());
    for (int64_t p = 0; p < n_.pseudo_layers(); ++p) {
      for (int64_t b = 0; b < c_.batch; ++b) loss += RunSequence(p, b, below, above);
      if (p % n_.num_directions + 1 == n_.num_directions) below = above;
    }
    for (int64_t e = 0; e < c_.tokens(); ++e) {
      for (int64_t k = 0; k < n_.width() && a_.Valid(e); ++k) {
        loss += below[e * n_.width() + k] * (*a_.dy)[e * n_.width() + k];
      }
    }
    y = below;
    return loss;
  }

  std::vector<double> y;

 private:
  double RunSequence(int64_t p, int64_t sequence, const std::vector<double>& below,
                     std::vector<double>& above) {
    const int64_t layer = p / n_.num_directions, d = p % n_.num_directions;
    const int64_t H = n_.hidden_size, S = n_.output_size(), I = n_.inputs(layer);
    const int64_t from = p * c_.batch + sequence, length = c_.length(sequence);
    const double* h_0 = a_.h_0->data() + from * S;
    std::vector<double> h(h_0, h_0 + S), c;  // all cell states, one after another
    for (int64_t s = 0; s < n_.cells(); ++s) {
      const double* c_0 = a_.c_0->data() + s * a_.CellSize() + from * H;
      c.insert(c.end(), c_0, c_0 + H);
    }
    for (int64_t s = 0; s < length; ++s) {
      const int64_t e = c_.token(sequence, d == 1 ? length - 1 - s : s);
      if (c_.resets && (*a_.resets)[e]) {
        std::fill(h.begin(), h.end(), 0);
        std::fill(c.begin(), c.end(), 0);
      }
      std::vector<double> x(I);
      for (int64_t k = 0; k < I; ++k) {
        x[k] = layer == 0 ? (*a_.x)[e * I + k] : below[e * I + k];
        if (layer > 0 && c_.drops) {
          x[k] *= a_.dropout_masks[layer - 1][e * I + k] * n_.dropout_scale;
        }
      }
      Step(p, layer, x, h, c);
      for (int64_t k = 0; k < S; ++k) above[e * n_.width() + d * S + k] = h[k];
    }
    double loss = 0;
    for (int64_t k = 0; k < S; ++k) loss += h[k] * (*a_.dh_n)[from * S + k];
    for (int64_t k = 0; k < n_.cells() * H; ++k) {
      loss += c[k] * (*a_.dc_n)[k / H * a_.CellSize() + from * H + k % H];
    }
    return loss;
  }

  void Step(int64_t p, int64_t layer, const std::vector<double>& x,
            std::vector<double>& h, std::vector<double>& c) {
    const cpu::WeightOffsets at = cpu::WeightOffsetsOf(n_, p);
    const int64_t H = n_.hidden_size;
    const double* w = a_.weights->data();
    const auto product = [&](int64_t offset, int64_t row, const double* v,
                             int64_t size) {
      double sum = 0;
      for (int64_t k = 0; k < size; ++k) sum += w[offset + row * size + k] * v[k];
      return sum;
    };
    const auto input = [&](int64_t row) {
      const double bias = at.b_ih >= 0 ? w[at.b_ih + row] : 0;
      return bias + (n_.has_w_ih(layer) ? product(at.w_ih, row, x.data(), x.size())
                                        : x[row % H]);
    };
    // The product of a row of w_hh or w_hr with the part of v that its head has.
    const auto head_product = [&](int64_t offset, int64_t row, int64_t rows,
                                  const std::vector<double>& v) {
      const int64_t size = v.size() / n_.num_heads;
      const int64_t part = row % rows / (rows / n_.num_heads);
      return product(offset, row, v.data() + part * size, size);
    };
    const auto recurrent = [&](int64_t row) {
      return (at.b_hh >= 0 ? w[at.b_hh + row] : 0) + head_product(at.w_hh, row, H, h);
    };
    const auto gate = [&](int64_t g, int64_t u) {
      return input(g * H + u) + recurrent(g * H + u);
    };
    std::vector<double> next(H);
    for (int64_t u = 0; u < H; ++u) {
      if (n_.mode == Mode::kRnnTanh) next[u] = std::tanh(gate(0, u));
      if (n_.mode == Mode::kRnnRelu) next[u] = std::max(0.0, gate(0, u));
      if (n_.mode == Mode::kLstm) {
        c[u] = Sigmoid(gate(1, u)) * c[u] + Sigmoid(gate(0, u)) * std::tanh(gate(2, u));
        if (n_.clips) c[u] = std::clamp(c[u], -n_.cell_clip, n_.cell_clip);
        next[u] = Sigmoid(gate(3, u)) * std::tanh(c[u]);
      }
      if (n_.mode == Mode::kSlstm) {
        double &cell = c[u], &normalizer = c[H + u], &m = c[2 * H + u];
        const double i = gate(0, u), f = gate(1, u);
        const double log_f = m - std::log1p(std::exp(-f));
        m = normalizer == 0 ? i : std::max(i, log_f);
        const double in = std::exp(i - m), kept = std::min(1.0, std::exp(log_f - m));
        cell = kept * cell + in * std::tanh(gate(2, u));
        normalizer = kept * normalizer + in;
        next[u] = Sigmoid(gate(3, u)) * cell / normalizer;
      }
      if (n_.gru()) {
        const double r = Sigmoid(gate(0, u)), z = Sigmoid(gate(1, u));
        const double n = std::tanh(input(2 * H + u) + r * recurrent(2 * H + u));
        next[u] = (1 - z) * n + z * h[u];
      }
    }
    for (int64_t k = 0; k < n_.output_size(); ++k) {
      h[k] = n_.proj_size > 0 ? head_product(at.w_hr, k, n_.proj_size, next) : next[k];
    }
  }

  const Case& c_;
  const Network& n_;
  Arrays<double, double>& a_;
};

}  // namespace ostinato::testing

#endif  // OSTINATO_TESTS_NETWORK_LOOP_H_
