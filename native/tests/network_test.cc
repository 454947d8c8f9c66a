// Whole calls, forward and backward: values against a plain loop, gradients against
// differences of that loop, the same bits from any number of threads, and every
// element of every result written, inside its bounds.
#include <algorithm>
#include <atomic>
#include <thread>

#include "cpu/kernels/dispatch.h"
#include "tests/network_case.h"
#include "tests/network_loop.h"
#include "tests/tiles_emulated.h"

namespace {

using namespace ostinato::testing;
using ostinato::cpu::BFloat16;
using ostinato::cpu::Isa;
using ostinato::cpu::Team;
using ostinato::cpu::Widen;

void CheckNear(double got, double want, double tolerance, const std::string& what) {
  if (std::abs(got - want) <= tolerance * (1 + std::abs(want))) return;
  ++failures;
  std::cerr << what << " is " << got << ", want " << want << "\n";
}

// Along a random direction in each input, the gradient is the slope of the loss.
void CheckGradients(const Case& c, Arrays<double, double>& a) {
  std::mt19937 bits(11);
  std::normal_distribution<double> normal(0, 1);
  Loop loop(c, a);
  const auto check = [&](Guarded<double>& input, Guarded<double>& gradient,
                         const char* name) {
    const std::vector<double> start(input.data(), input.data() + input.size());
    std::vector<double> direction(input.size());
    double slope = 0;
    for (int64_t i = 0; i < input.size(); ++i) {
      direction[i] = start[i] == 0 ? 0 : normal(bits);  // an empty state has a jump
      if (!std::isnan(start[i])) slope += direction[i] * gradient[i];
    }
    const auto loss_at = [&](double step) {
      for (int64_t i = 0; i < input.size(); ++i) {
        input[i] = start[i] + step * direction[i];
      }
      return loop.Loss();
    };
    const double step = 1e-6;
    const double want = (loss_at(step) - loss_at(-step)) / (2 * step);
    loss_at(0);
    CheckNear(slope, want, 2e-6 * (1 + input.size()), c.name + ": d" + name);
  };
  check(*a.weights, *a.dweights, "weights");
  check(*a.x, *a.dx, "x");
  check(*a.h_0, *a.dh_0, "h_0");
  check(*a.c_0, *a.dc_0, "c_0");
}

template <typename Storage, typename Accum>
std::string ResultsWith(const Case& c, int32_t threads, Arrays<Storage, Accum>& a) {
  ostinato::cpu::SetNumThreads(threads);
  Team team(threads);
  a.Fill();
  a.Forward(team, false);
  const std::string outputs(reinterpret_cast<const char*>(a.y->data()),
                            a.y->size() * sizeof(Storage));
  a.Forward(team, true);
  CHECK_EQ(outputs == std::string(reinterpret_cast<const char*>(a.y->data()),
                                  a.y->size() * sizeof(Storage)),
           true);
  a.Backward(team);
  for (int64_t e = 0; e < c.tokens(); ++e) {
    if (a.Valid(e)) continue;
    for (int64_t k = 0; k < c.network.width(); ++k) {
      CHECK_EQ(Widen((*a.y)[e * c.network.width() + k]), 0);
    }
  }
  return a.Results();
}

template <typename Storage, typename Accum>
void CheckBits(const Case& c, double tolerance, const std::vector<double>& y,
               const std::vector<double>& dweights) {
  Arrays<Storage, Accum> first(c);
  const std::string want = ResultsWith(c, 1, first);
  for (const int32_t threads : {2, 3}) {
    Arrays<Storage, Accum> a(c);
    CHECK_EQ(ResultsWith(c, threads, a) == want, true);
  }
  const auto near = [&](Guarded<Storage>& got, const std::vector<double>& want,
                        const char* name) {
    double error = 0, largest = 1;
    for (int64_t i = 0; i < got.size(); ++i) {
      error = std::max(error, std::abs(double(Widen(got[i])) - want[i]));
      largest = std::max(largest, std::abs(want[i]));
    }
    CheckNear(error / largest, 0, tolerance, c.name + ": error of " + name);
  };
  near(*first.y, y, "y");
  // 16 bits may round a relu's input to the other side of 0, where its slope jumps, and
  // the gates of an sLSTM to the other side of each other, where that of m jumps.
  const bool jumps = c.network.mode == Mode::kRnnRelu || c.network.mode == Mode::kSlstm;
  if (!jumps || sizeof(Storage) > 2) near(*first.dweights, dweights, "dweights");
}

// bfloat16 in emulated tiles, whatever the processor has.
void CheckTiles(const Case& c, const std::vector<double>& y,
                const std::vector<double>& dweights) {
  if (ostinato::cpu::DetectIsa() < Isa::kAvx512Bf16) return;
  ostinato::cpu::UseTiles(ostinato_emulated_tiles());
  CheckBits<BFloat16, float>(c, 0.1, y, dweights);
  ostinato::cpu::UseTiles(nullptr);
  CHECK_EQ(ostinato_threads_with_tiles(), 0);
}

void Check(const Case& c) {
  Arrays<double, double> a(c);
  ResultsWith(c, 2, a);
  Loop loop(c, a);
  loop.Loss();
  for (int64_t i = 0; i < a.y->size(); ++i) {
    if (a.Valid(i / c.network.width())) {
      CheckNear((*a.y)[i], loop.y[i], 1e-12, c.name + ": y");
    }
  }
  CheckGradients(c, a);
  const std::vector<double> y(a.y->data(), a.y->data() + a.y->size());
  const std::vector<double> dw(a.dweights->data(),
                               a.dweights->data() + a.dweights->size());
  CheckBits<double, double>(c, 1e-12, y, dw);
  CheckBits<float, float>(c, 2e-5, y, dw);
  CheckBits<BFloat16, float>(c, 0.1, y, dw);
  CheckTiles(c, y, dw);
}

Network Of(Mode mode, int64_t inputs, int64_t hidden, int64_t layers = 1,
           int64_t directions = 1) {
  Network n{};
  n.mode = mode;
  n.input_size = inputs;
  n.hidden_size = hidden;
  n.num_layers = layers;
  n.num_directions = directions;
  n.bias_ih = n.bias_hh = true;
  n.dropout_scale = 1.5;
  return n;
}

bool Projects(Mode mode) { return mode == Mode::kLstm || mode == Mode::kSlstm; }

std::vector<Case> Cases() {
  std::vector<Case> cases;
  const std::vector<int32_t> mixed{3, 0, 5, 1, 5};
  for (const Mode mode :
       {Mode::kRnnRelu, Mode::kRnnTanh, Mode::kLstm, Mode::kGru, Mode::kSlstm}) {
    const std::string name = std::to_string(static_cast<int>(mode));
    cases.push_back({name + " ones", Of(mode, 1, 1), 1, 1, {}});
    cases.push_back({name + " no sequences", Of(mode, 2, 3, 2, 2), 4, 0, {}});
    cases.push_back({name + " no steps", Of(mode, 2, 3, 2, 2), 0, 3, {}});
    cases.push_back({name + " stacked", Of(mode, 3, 17, 3), 5, 1, {}});
    cases.push_back({name + " wide", Of(mode, 5, 70, 1), 4, 2, {}});
    Case ragged{name + " ragged", Of(mode, 3, 5, 2, 2), 5, 5, mixed};
    ragged.drops = true;
    cases.push_back(ragged);
    Case packed = ragged;
    packed.name = name + " packed";
    packed.buffers = 1;
    packed.capacities = {3, 2, 5, 4, 5};
    packed.unused = 3;
    cases.push_back(packed);
    packed.name = name + " in buffers";
    packed.network.num_directions = 1;
    packed.resets = packed.recompute = true;
    packed.batch = packed.buffers = 6;
    packed.lengths.clear();
    packed.capacities.assign(6, 5);
    cases.push_back(packed);
    Case resets{name + " resets", Of(mode, 3, 18, 2), 5, 5, mixed};
    resets.resets = resets.time_major = resets.recompute = true;
    resets.network.bias_ih = false;
    cases.push_back(resets);
    Case skip{name + " skip", Of(mode, 19, 19, 1, 2), 3, 20, {}};
    skip.network.skip = skip.recompute = true;
    skip.network.bias_hh = false;
    cases.push_back(skip);
    // Heads in groups, the last one with fewer; heads of whole vectors; others.
    for (const auto& [heads, size] : {std::pair{35, 1}, {9, 3}, {3, 16}, {3, 19}}) {
      Case of{name + " heads " + std::to_string(heads),
              Of(mode, 3, heads * size, 1, 2),
              3,
              5,
              {3, 0, 1, 2, 3}};
      of.network.num_heads = heads;
      of.recompute = heads == 9;
      cases.push_back(of);
      if (Projects(mode) && size > 2) {
        of.name += " projected";
        of.network.proj_size = heads * (size - 1);
        of.resets = true;
        cases.push_back(of);
      }
    }
    Case few{name + " few heads", Of(mode, 3, 68, 2), 4, 2, {}};
    few.network.num_heads = 2;
    cases.push_back(few);
    few.steps = 30;  // each thread has a head
    few.network.num_layers = 1;
    few.network.num_directions = 2;
    few.network.hidden_size = 64;
    cases.push_back(few);
    few.batch = 1;  // as few tokens as are worth no panels
    few.steps = 2;
    cases.push_back(few);
  }
  Case projected{"projected", Of(Mode::kLstm, 3, 21, 2, 2), 5, 5, mixed};
  projected.network.proj_size = 4;
  projected.network.clips = true;
  projected.network.cell_clip = 0.4;
  cases.push_back(projected);
  projected.recompute = true;
  projected.network.num_directions = 1;
  projected.resets = true;
  cases.push_back(projected);
  cases.push_back({"long", Of(Mode::kLstm, 2, 3), 300, 3, {300, 7, 150}});
  cases.push_back({"long", Of(Mode::kGru, 2, 3, 1, 2), 300, 3, {290, 300, 0}});
  return cases;
}

// Large enough for tiles: sequences for one and for two of them, and some left over.
std::vector<Case> TileCases() {
  std::vector<Case> cases;
  std::vector<int32_t> lengths(45);
  for (int i = 0; i < 45; ++i) lengths[i] = i * 7 % 5;
  for (const Mode mode : {Mode::kRnnTanh, Mode::kLstm, Mode::kGru, Mode::kSlstm}) {
    const std::string name = "tiles " + std::to_string(static_cast<int>(mode));
    cases.push_back({name + " even", Of(mode, 64, 32, 1), 3, 21, {}});
    cases.push_back({name + " ragged", Of(mode, 33, 35, 2, 2), 4, 45, lengths});
    cases.push_back({name + " one sequence", Of(mode, 40, 67, 2), 4, 1, {}});
    Case resets{name + " resets", Of(mode, 32, 64, 1, 2), 3, 9, {}};
    resets.resets = resets.recompute = resets.time_major = true;
    cases.push_back(resets);
    resets.network.num_heads = 2;
    resets.name += " of heads";
    cases.push_back(resets);
  }
  Case projected{"tiles projected", Of(Mode::kLstm, 35, 70, 2, 2), 3, 19, {}};
  projected.network.proj_size = 33;
  projected.drops = true;
  cases.push_back(projected);
  return cases;
}

// Tiles are used, and what another library left in their registers does no harm.
void TilesAreSetUpByWhoeverUsesThem() {
  if (ostinato::cpu::DetectIsa() < Isa::kAvx512Bf16) return;
  const Case c{"disturbed", Of(Mode::kGru, 40, 64), 3, 20, {}};
  ostinato::cpu::UseTiles(ostinato_emulated_tiles());
  Arrays<BFloat16, float> first(c), second(c);
  const long before = ostinato_tile_products();
  const std::string want = ResultsWith(c, 1, first);
  CHECK_EQ(ostinato_tile_products() > before, true);
  ostinato_disturb_tiles();
  CHECK_EQ(ostinato_threads_with_tiles(), 1);
  CHECK_EQ(ResultsWith(c, 1, second) == want, true);
  CHECK_EQ(ostinato_threads_with_tiles(), 0);
  ostinato::cpu::UseTiles(nullptr);
}

// Several threads of the process call at once; only one of them has the pool.
void CallsFromManyThreadsAgree() {
  const Case c{"at once", Of(Mode::kGru, 9, 33, 2), 20, 4, {20, 3, 11, 0}};
  Arrays<float, float> first(c);
  const std::string want = ResultsWith(c, 2, first);
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int n = 0; n < 20; ++n) {
        Arrays<float, float> a(c);
        if (ResultsWith(c, 2, a) != want) ++failures;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// Where the system stops threads all the time, workers of a Run stop in its midst and
// one of them does the rest; portions go from one thread to another between any two
// turns.
void ResultsHoldOnABusyMachine() {
  std::vector<int32_t> lengths(29);
  for (int32_t b = 0; b < 29; ++b) lengths[b] = b * 37 % 40;
  const Case few{"busy", Of(Mode::kLstm, 9, 70, 1), 300, 2, {300, 211}};
  const Case many{"busy portions", Of(Mode::kGru, 9, 40, 2, 2), 40, 29, lengths};
  Arrays<float, float> first(few), first_many(many);
  const std::string want = ResultsWith(few, 1, first);
  const std::string want_many = ResultsWith(many, 1, first_many);
  std::atomic<bool> busy{true};
  std::vector<std::thread> others;
  for (unsigned i = 0; i < 2 * std::thread::hardware_concurrency(); ++i) {
    others.emplace_back([&] {
      while (busy.load(std::memory_order_relaxed)) {
      }
    });
  }
  for (int n = 0; n < 6; ++n) {
    Arrays<float, float> a(few);
    CHECK_EQ(ResultsWith(few, 2, a) == want, true);
  }
  for (int n = 0; n < 2; ++n) {
    Arrays<float, float> a(many);
    CHECK_EQ(ResultsWith(many, 2 + n, a) == want_many, true);
  }
  busy.store(false);
  for (std::thread& other : others) other.join();
}

}  // namespace

// With an argument, what threads can break, which is the same in every mode.
int main(int argc, char**) {
  const int best = static_cast<int>(ostinato::cpu::DetectIsa());
  if (best < static_cast<int>(Isa::kAvx512Bf16)) {
    std::cout << "skipped emulated tiles: the rest of them needs AVX512_BF16\n";
  }
  if (const char* reason = ostinato::cpu::WhyNoTiles()) {
    std::cout << "skipped avx512_amx: " << reason << "\n";
  }
  for (const Case& c : Cases()) {
    if (argc == 1 || c.network.mode == Mode::kGru) Check(c);
  }
  // Threads share tiles as they do panels.
  if (argc == 1) {
    for (const Case& c : TileCases()) Check(c);
  }
  TilesAreSetUpByWhoeverUsesThem();
  const Case small{"every level", Of(Mode::kLstm, 7, 37, 1, 2), 6, 5, {6, 2, 0, 5, 6}};
  for (int isa = 0; isa <= best; ++isa) {
    ostinato::cpu::SetIsaCap(static_cast<Isa>(isa));
    Check(small);
  }
  CallsFromManyThreadsAgree();
  ResultsHoldOnABusyMachine();
  return Summary();
}
