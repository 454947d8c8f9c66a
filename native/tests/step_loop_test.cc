// Loops over the steps of a program: values against a plain loop, the same bits from
// any number of threads, every element of every result written inside its bounds, and
// arrays that do not fit refused.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cpu/kernels/dispatch.h"
#include "cpu/runtime/team.h"
#include "cpu/step/arrays.h"
#include "cpu/step/loop.h"
#include "tests/check.h"
#include "tests/guarded.h"
#include "tests/kernels_fixture.h"
#include "tests/step_case.h"

namespace {

using namespace ostinato::testing;
using ostinato::cpu::Isa;
using ostinato::cpu::RunSteps;
using ostinato::cpu::StepArray;
using ostinato::cpu::StepCall;

// An array of T, or of bfloat16, that ends where memory ends.
template <typename T>
class AnyArray {
 public:
  AnyArray(int64_t size, bool half)
      : half_(half), whole_(half ? 0 : size), halves_(half ? size : 0) {}

  StepArray array() {
    if (half_) return {halves_.data(), halves_.size(), 2};
    return {whole_.data(), whole_.size(), sizeof(T)};
  }
  int64_t size() const { return half_ ? halves_.size() : whole_.size(); }
  // Sets an element, and returns what it is then.
  double Set(int64_t i, double x) {
    if (!half_) return whole_[i] = static_cast<T>(x);
    halves_[i] = Make<BFloat16>(x);
    return Value(halves_[i]);
  }
  double Get(int64_t i) { return half_ ? Value(halves_[i]) : whole_[i]; }
  std::string bytes() {
    const StepArray a = array();
    return {static_cast<const char*>(a.data),
            static_cast<size_t>(a.elements * a.bytes)};
  }

 private:
  const bool half_;
  Guarded<T> whole_;
  Guarded<BFloat16> halves_;
};

struct Case {
  std::string name;
  Sizes sizes;
  bool reverse;
  std::vector<int32_t> lengths;  // none: every sequence has all steps
};

template <typename T>
struct Arrays {
  using List = std::vector<std::unique_ptr<AnyArray<T>>>;

  const Case& c;
  List operands, results;
  Values values;  // of the operands

  Arrays(const Case& of, bool half, bool half_weights = false) : c(of) {
    const auto wide = [&](int i) {
      return !half_weights && (i == kW || i == kU || i == kV || i == kN);
    };
    // What is added up is never bfloat16.
    const auto sum = [](int i) {
      return i == kSumH || i == kSumSM || i == kSumRows || i == kGradientW ||
             i == kGradientV;
    };
    Random random;
    for (const int64_t size : c.sizes.Operands()) {
      const int i = operands.size();
      operands.push_back(std::make_unique<AnyArray<T>>(size, half && !wide(i)));
      values.emplace_back();
      for (int64_t k = 0; k < size; ++k) {
        values[i].push_back(operands[i]->Set(k, random.Uniform(-0.4, 0.4)));
      }
    }
    for (const int64_t size : c.sizes.Results()) {
      const int i = results.size();
      results.push_back(std::make_unique<AnyArray<T>>(size, half && !sum(i)));
    }
    // Nothing is read where a sequence has no step.
    for (size_t b = 0; b < c.lengths.size(); ++b) {
      for (int64_t t = std::max<int64_t>(c.lengths[b], 0); t < c.sizes.steps; ++t) {
        for (int64_t k = 0; k < kIn; ++k) {
          operands[kX]->Set((t * c.sizes.batch + b) * kIn + k, std::nan(""));
        }
      }
    }
  }

  StepCall Call(const StepProgram& program) {
    StepCall call{program,
                  kConstants,
                  3,
                  {},
                  {},
                  c.sizes.steps,
                  c.sizes.batch,
                  c.reverse,
                  c.lengths.empty() ? nullptr : c.lengths.data()};
    for (const auto& a : operands) call.operands.push_back(a->array());
    for (const auto& a : results) call.results.push_back(a->array());
    return call;
  }

  std::string Run(const StepProgram& program, int32_t threads) {
    ostinato::cpu::SetNumThreads(threads);
    RunSteps<T>(Call(program));
    std::string bytes;
    for (const auto& a : results) bytes += a->bytes();
    return bytes;
  }

  static constexpr double kConstants[] = {-1, kDecay, 1};
};

template <typename T>
void CheckAs(const Case& c, const StepProgram& program, bool half) {
  const bool half_weights = program.weights[0].half;
  Arrays<T> first(c, half, half_weights);
  const std::string bits = first.Run(program, 1);
  const Values want = PlainLoop(first.values, c.sizes, c.lengths, c.reverse);
  for (int i = 0; i < kResults; ++i) {
    double largest = 1, worst = 0;
    for (const double w : want[i]) largest = std::max(largest, std::abs(w));
    for (int64_t k = 0; k < first.results[i]->size(); ++k) {
      const double error = std::abs(first.results[i]->Get(k) - want[i][k]);
      if (!(error <= worst)) worst = error;
    }
    const double tolerance = half_weights                           ? 0x1p-5
                             : first.results[i]->array().bytes == 2 ? 0x1p-8
                             : sizeof(T) == 4                       ? 2e-5
                                                                    : 1e-13;
    if (worst <= tolerance * largest) continue;
    if (++failures > 20) continue;
    std::cerr << c.name
              << (half             ? " bf16"
                  : sizeof(T) == 4 ? " f32"
                                   : " f64")
              << ": result " << i << " has an error of " << worst << "\n";
  }
  for (const int32_t threads : {2, 3}) {
    Arrays<T> again(c, half, half_weights);
    CHECK_EQ(again.Run(program, threads) == bits, true);
  }
}

// Products may round their factors to bfloat16.
StepProgram WithHalfWeights(StepProgram program) {
  for (auto& weight : program.weights) weight.half = true;
  return program;
}

bool threads_only = false;

void Check(const Case& c, const StepProgram& program) {
  CheckAs<float>(c, program, false);
  if (threads_only) return;
  CheckAs<float>(c, WithHalfWeights(program), true);
  CheckAs<double>(c, program, false);
  CheckAs<float>(c, program, true);
}

Case CaseOf(int64_t steps, int64_t batch, bool reverse, int kind) {
  Case c{std::to_string(steps) + " x " + std::to_string(batch) +
             (reverse ? " reverse" : "") + " lengths " + std::to_string(kind),
         {steps, batch},
         reverse,
         {}};
  for (int64_t b = 0; kind > 0 && b < batch; ++b) {
    const int64_t length = kind == 1   ? steps + b % 3         // all steps
                           : kind == 2 ? b * 37 % (steps + 1)  // 0 first
                                       : steps / 2;
    c.lengths.push_back(static_cast<int32_t>(length));
  }
  return c;
}

void CheckValues(const StepProgram& program) {
  const auto check = [&](std::vector<int64_t> steps, std::vector<int64_t> batches) {
    for (const int64_t t : steps) {
      for (const int64_t b : batches) {
        for (int kind = 0; kind < 4; ++kind) {
          Check(CaseOf(t, b, kind % 2 == 1, kind), program);
          Check(CaseOf(t, b, kind % 2 == 0, kind), program);
        }
      }
    }
  };
  check({0, 1, 7}, {1, 2, 5, 33});
  check({100}, {1, 5, 33});
  check({900}, {1});  // so many that a second thread follows the first
  const int best = static_cast<int>(ostinato::cpu::DetectIsa());
  for (int isa = 0; isa < best; ++isa) {
    ostinato::cpu::SetIsaCap(static_cast<Isa>(isa));
    check({7}, {5, 18});
    Check(CaseOf(70, 18, false, 2), program);
  }
  ostinato::cpu::SetIsaCap(static_cast<Isa>(best));
}

// Sequences that lie one after another have the same bits as those side by side.
template <typename T>
void CheckOneAfterAnother(const Case& c, const StepProgram& program, bool half,
                          int64_t capacity) {
  Arrays<T> apart(c, half), joined(c, half);
  apart.Run(program, 1);
  const auto replace = [&](std::unique_ptr<AnyArray<T>>& array) {
    const int64_t width = array->size() / (c.sizes.steps * c.sizes.batch);
    array = std::make_unique<AnyArray<T>>(capacity * width, half);
    return width;
  };
  // Calls what `element` does with the elements of both arrays at the same place.
  const auto each = [&](int64_t width, auto element) {
    int64_t row = 0;
    for (int64_t b = 0; b < c.sizes.batch; ++b) {
      for (int64_t t = 0; t < c.lengths[b]; ++t, ++row) {
        for (int64_t k = 0; k < width; ++k) {
          element((t * c.sizes.batch + b) * width + k, row * width + k);
        }
      }
    }
    return row;
  };
  const int64_t width = replace(joined.operands[kX]);
  for (int64_t i = 0; i < capacity * width; ++i) {
    joined.operands[kX]->Set(i, std::nan(""));
  }
  each(width, [&](int64_t from, int64_t to) {
    joined.operands[kX]->Set(to, apart.operands[kX]->Get(from));
  });
  const std::vector<int> by_step = {kY, kAfterY, kExtremes, kMix, kTurned, kRead};
  std::vector<int64_t> widths;
  for (const int i : by_step) widths.push_back(replace(joined.results[i]));
  StepCall call = joined.Call(program);
  call.capacity = capacity;
  RunSteps<T>(call);
  for (size_t k = 0; k < by_step.size(); ++k) {
    AnyArray<T>&got = *joined.results[by_step[k]], &want = *apart.results[by_step[k]];
    int64_t wrong = 0;
    const int64_t used = each(widths[k], [&](int64_t from, int64_t to) {
      wrong += got.Get(to) != want.Get(from);
    });
    for (int64_t i = used * widths[k]; i < got.size(); ++i) wrong += got.Get(i) != 0;
    CHECK_EQ(wrong, 0);
    joined.results[by_step[k]] = std::make_unique<AnyArray<T>>(0, half);
    apart.results[by_step[k]] = std::make_unique<AnyArray<T>>(0, half);
  }
  for (int i = 0; i < kResults; ++i) {
    CHECK_EQ(joined.results[i]->bytes() == apart.results[i]->bytes(), true);
  }
}

void CheckTokens(const StepProgram& program) {
  for (const int64_t batch : {1, 5, 33}) {
    for (const bool reverse : {false, true}) {
      Case c = CaseOf(7, batch, reverse, 2);
      c.lengths.back() = 7;
      const int64_t used = std::accumulate(c.lengths.begin(), c.lengths.end(), 0);
      CheckOneAfterAnother<float>(c, program, false, used);
      CheckOneAfterAnother<double>(c, program, false, used + 3);
      CheckOneAfterAnother<float>(c, program, true, used + 1);
    }
  }
  // Lengths that do not fit end where the capacity does.
  const Case c{"too long", {7, 3}, false, {7, 7, 7}};
  Arrays<float> arrays(c, false);
  StepCall call = arrays.Call(program);
  call.capacity = 9;
  call.operands[kX].elements = 9 * kIn;
  for (const int i : {kY, kAfterY, kExtremes, kMix, kTurned, kRead}) {
    call.results[i].elements = call.results[i].elements / (7 * 3) * 9;
  }
  RunSteps<float>(call);
  call.lengths = nullptr;
  CHECK_EQ(Refuses([&] { RunSteps<float>(call); }), true);
}

void CheckArrays(const StepProgram& program) {
  const Case c = CaseOf(2, 3, false, 0);
  Arrays<float> arrays(c, false);
  const auto refuses = [&](auto change) {
    StepCall call = arrays.Call(program);
    change(call);
    return Refuses([&] { RunSteps<float>(call); });
  };
  CHECK_EQ(refuses([](StepCall&) {}), false);
  for (int i = 0; i < kOperands; ++i) {
    const bool weight = i == kW || i == kU || i == kV || i == kN;
    CHECK_EQ(refuses([&](StepCall& call) { --call.operands[i].elements; }), true);
    CHECK_EQ(refuses([&](StepCall& call) { ++call.operands[i].elements; }), !weight);
    CHECK_EQ(refuses([&](StepCall& call) { call.operands[i].bytes = 8; }), true);
    CHECK_EQ(refuses([&](StepCall& call) { call.operands.resize(i); }), true);
  }
  for (int i = 0; i < kResults; ++i) {
    CHECK_EQ(refuses([&](StepCall& call) { --call.results[i].elements; }), true);
    CHECK_EQ(refuses([&](StepCall& call) { ++call.results[i].elements; }), true);
    CHECK_EQ(refuses([&](StepCall& call) { call.results[i].bytes = 1; }), true);
    CHECK_EQ(refuses([&](StepCall& call) { call.results.resize(i); }), true);
  }
  CHECK_EQ(refuses([](StepCall& call) { call.num_constants = 1; }), true);
  CHECK_EQ(refuses([](StepCall& call) { ++call.steps; }), true);
  CHECK_EQ(refuses([](StepCall& call) { --call.batch; }), true);
}

}  // namespace

// With an argument, what threads can break, which is the same for every type.
int main(int argc, char**) {
  threads_only = argc > 1;
  const StepProgram program = ProgramBuilder().Build();
  CheckArrays(program);
  CheckValues(program);
  CheckTokens(program);
  return Summary();
}
