// A network on small arrays that end where memory ends, for network_test.cc.
#ifndef OSTINATO_TESTS_NETWORK_CASE_H_
#define OSTINATO_TESTS_NETWORK_CASE_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "cpu/network/placement.h"
#include "cpu/network/values.h"
#include "cpu/pass/backward.h"
#include "cpu/pass/forward.h"
#include "tests/guarded.h"

namespace ostinato::testing {

using cpu::Mode;
using cpu::Network;

struct Case {
  std::string name;
  Network network;
  int64_t steps, batch;
  std::vector<int32_t> lengths;  // empty: all of T
  bool resets = false, drops = false, recompute = false, time_major = false;
  // If packed: how many buffers, the tokens of each sequence, and the unused capacity
  // of each buffer.
  int64_t buffers = 0;
  std::vector<int32_t> capacities = {};
  int64_t unused = 0;

  int64_t length(int64_t sequence) const {
    return lengths.empty() ? steps : lengths[sequence];
  }
  // Tokens before those of a sequence.
  int64_t origin(int64_t sequence) const {
    if (buffers == 0) return time_major ? sequence : sequence * steps;
    int64_t before = unused * (sequence / (batch / buffers));
    for (int64_t b = 0; b < sequence; ++b) before += capacities[b];
    return before;
  }
  int64_t token(int64_t sequence, int64_t time) const {
    return origin(sequence) + time * (buffers == 0 && time_major ? batch : 1);
  }
  int64_t tokens() const {
    return buffers == 0 ? steps * batch
                        : origin(batch - 1) + capacities[batch - 1] + unused;
  }
  // Whether a token of x or y is a step of its sequence.
  bool Valid(int64_t token_of_x) const {
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t t = 0; t < length(b); ++t) {
        if (token(b, t) == token_of_x) return true;
      }
    }
    return false;
  }
};

// The arrays of one call in the types of one data type; what no caller fills is NaN.
template <typename Storage, typename Accum>
class Arrays {
 public:
  explicit Arrays(const Case& c) : c_(c), n_(c.network) {
    const int64_t tokens = c.tokens(), states = n_.pseudo_layers() * c.batch;
    const bool gated = n_.saved_blocks() > 0 && !c.recompute;
    // The order of these is the order in which Fill draws values.
    weights = New<Storage>(cpu::NumParams(n_));
    x = New<Storage>(tokens * n_.input_size);
    h_0 = New<Storage>(states * n_.output_size());
    const int64_t cell = states * n_.hidden_size;  // one of the cell states
    c_0 = New<Storage>(n_.cells() * cell);
    dy = New<Storage>(tokens * n_.width());
    dh_n = New<Storage>(states * n_.output_size());
    dc_n = New<Storage>(n_.cells() * cell);
    y = New<Storage>(tokens * n_.width());
    h_n = New<Storage>(states * n_.output_size());
    c_n = New<Storage>(n_.cells() * cell);
    for (int64_t l = 0; l + 1 < n_.num_layers; ++l) {
      hidden.push_back(New<Storage>(tokens * n_.width())->data());
    }
    for (int64_t p = 0; p < n_.pseudo_layers(); ++p) {
      if (gated) {
        gates.push_back(
            New<Storage>(tokens * n_.saved_blocks() * n_.hidden_size)->data());
      }
      for (int64_t s = 0; s < n_.cells(); ++s) {
        cells.push_back(New<Accum>(tokens * n_.hidden_size)->data());
      }
    }
    dweights = New<Storage>(cpu::NumParams(n_));
    dx = New<Storage>(tokens * n_.input_size);
    dh_0 = New<Storage>(states * n_.output_size());
    dc_0 = New<Storage>(n_.cells() * cell);
    resets = New<uint8_t>(c.resets ? tokens : 0);
    for (int64_t l = 0; l + 1 < n_.num_layers && c.drops; ++l) {
      dropout_masks.push_back(New<uint8_t>(tokens * n_.width())->data());
    }
    lengths = New<int32_t>(c.lengths.size());
    for (size_t i = 0; i < c.lengths.size(); ++i) (*lengths)[i] = c.lengths[i];
    const int32_t* seq_lengths = c.lengths.empty() ? nullptr : lengths->data();
    placement_ = c.buffers > 0
                     ? cpu::Placement::Packed(tokens, c.buffers, c.steps, c.batch,
                                              c.capacities.data(), seq_lengths)
                     : cpu::Placement::Padded(c.steps, c.batch, c.time_major);
    for (int64_t e = 0; e < tokens; ++e) valid_.push_back(c.Valid(e));
  }

  // The same inputs for every data type, up to rounding. Padding stays NaN.
  void Fill() {
    std::mt19937 bits(7);
    const auto fill = [&](auto* array, double scale, int64_t features) {
      std::normal_distribution<double> normal(0, scale);
      for (int64_t i = 0; i < array->size(); ++i) {
        const double value = normal(bits);
        if (features == 0 || Valid(i / features))
          (*array)[i] = cpu::Narrow<Storage>(Accum(value));
      }
    };
    fill(weights, 1.2 / std::sqrt(double(n_.hidden_size)), 0);
    fill(x, 1, n_.input_size);
    fill(h_0, 0.6, 0);
    fill(c_0, 0.6, 0);
    for (int64_t i = 0; n_.mode == Mode::kSlstm && i < CellSize(); ++i) {
      // The state n is not negative; some units begin with an empty state.
      Storage* const n = c_0->data() + CellSize() + i;
      *n = cpu::Narrow<Storage>(Accum(std::abs(double(cpu::Widen(*n)))));
      for (int64_t s = 0; i % 7 == 0 && s < n_.cells(); ++s) {
        (*c_0)[s * CellSize() + i] = Storage{};
      }
    }
    fill(dy, 1, n_.width());
    fill(dh_n, 1, 0);
    fill(dc_n, 1, 0);
    for (int64_t i = 0; i < resets->size(); ++i) (*resets)[i] = bits() % 4 == 0;
    for (uint8_t* mask : dropout_masks) {
      for (int64_t i = 0; i < c_.tokens() * n_.width(); ++i) {
        mask[i] = bits() % 3 != 0;
      }
    }
  }

  cpu::Operands<Storage> operands() {
    cpu::Operands<Storage> in{};
    in.network = n_;
    in.steps = c_.steps;
    in.batch = c_.batch;
    in.tokens = c_.tokens();
    in.weights = weights->data();
    in.x = x->data();
    in.h_0 = h_0->data();
    PutCells(c_0, in.c_0);
    in.seq_lengths = c_.lengths.empty() ? nullptr : lengths->data();
    in.resets = c_.resets ? resets->data() : nullptr;
    in.dropout_masks = dropout_masks.empty() ? nullptr : dropout_masks.data();
    placement_.PutInto(in);
    return in;
  }

  void Forward(cpu::Team& team, bool save) {
    cpu::ForwardCall<Storage, Accum> call{};
    call.operands = operands();
    call.y = y->data();
    call.h_n = h_n->data();
    PutCells(c_n, call.c_n);
    if (save && !hidden.empty()) call.hidden = hidden.data();
    if (save && !gates.empty()) call.gates = gates.data();
    if (save && !cells.empty()) call.cells = cells.data();
    cpu::RunForward<Storage, Accum>(call, team);
  }

  void Backward(cpu::Team& team) {
    const std::vector<const Storage*> hidden_in(hidden.begin(), hidden.end());
    const std::vector<const Storage*> gates_in(gates.begin(), gates.end());
    const std::vector<const Accum*> cells_in(cells.begin(), cells.end());
    cpu::BackwardCall<Storage, Accum> call{};
    call.operands = operands();
    call.y = y->data();
    call.hidden = hidden_in.data();
    call.gates = gates.empty() ? nullptr : gates_in.data();
    call.cells = cells_in.data();
    call.dy = dy->data();
    call.dh_n = dh_n->data();
    call.dweights = dweights->data();
    call.dx = dx->data();
    call.dh_0 = dh_0->data();
    PutCells(dc_n, call.dc_n);
    PutCells(dc_0, call.dc_0);
    cpu::RunBackward<Storage, Accum>(call, team);
  }

  // Elements of one of the cell states, which follow each other in c_0 and the like.
  int64_t CellSize() const { return n_.pseudo_layers() * c_.batch * n_.hidden_size; }

  // The bytes of every result of forward and backward.
  std::string Results() {
    std::string all;
    const auto add = [&](auto* array) {
      for (int64_t i = 0; i < array->size(); ++i) {
        CHECK_EQ(array->Untouched(i), false);
      }
      all.append(reinterpret_cast<const char*>(array->data()),
                 array->size() * sizeof(*array->data()));
    };
    for (auto* array : {y, h_n, c_n, dweights, dx, dh_0, dc_0}) add(array);
    return all;
  }

  bool Valid(int64_t token) const { return valid_[token]; }

  Guarded<Storage>*weights, *x, *h_0, *c_0, *dy, *dh_n, *dc_n;
  Guarded<Storage>*y, *h_n, *c_n, *dweights, *dx, *dh_0, *dc_0;
  std::vector<Storage*> hidden, gates;
  std::vector<Accum*> cells;
  Guarded<uint8_t>* resets;
  Guarded<int32_t>* lengths;
  std::vector<const uint8_t*> masks_in() const {
    return {dropout_masks.begin(), dropout_masks.end()};
  }
  std::vector<uint8_t*> dropout_masks;

 private:
  template <typename Pointer>
  void PutCells(Guarded<Storage>* array, Pointer (&to)[cpu::kMostCells]) const {
    for (int64_t s = 0; s < n_.cells(); ++s) to[s] = array->data() + s * CellSize();
  }

  template <typename T>
  Guarded<T>* New(int64_t count) {
    auto& store = Store(static_cast<T*>(nullptr));
    store.emplace_back(count);
    return &store.back();
  }
  std::deque<Guarded<Storage>>& Store(Storage*) { return values_; }
  std::deque<Guarded<uint8_t>>& Store(uint8_t*) { return flags_; }
  std::deque<Guarded<int32_t>>& Store(int32_t*) { return numbers_; }
  template <typename T>
  std::deque<Guarded<T>>& Store(T*) {
    return wide_;
  }

  const Case& c_;
  const Network& n_;
  std::deque<Guarded<Storage>> values_;
  std::deque<Guarded<Accum>> wide_;
  std::deque<Guarded<uint8_t>> flags_;
  std::deque<Guarded<int32_t>> numbers_;
  cpu::Placement placement_;
  std::vector<bool> valid_;
};

}  // namespace ostinato::testing

#endif  // OSTINATO_TESTS_NETWORK_CASE_H_
