// Linear recurrences, filters and advantages against plain loops in double: results,
// gradients, the same bits for any number of threads, and nothing touched outside of
// the arrays.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/kernels/dispatch.h"
#include "cpu/linear/advantages.h"
#include "cpu/linear/recurrence.h"
#include "cpu/runtime/team.h"
#include "tests/check.h"
#include "tests/guarded.h"

namespace {

using ostinato::cpu::CurrentLinearKernels;
using ostinato::cpu::Isa;
using ostinato::cpu::LinearShape;
using ostinato::testing::Guarded;

// Numbers between -0.9 and 0.9 that do not repeat soon.
double Draw(int64_t i) { return 0.9 * std::sin(static_cast<double>(i) * 1.7 + 0.3); }

struct Options {
  bool reverse, constant, shared, masks;
};

struct Case {
  Case(int64_t batch, int64_t steps, int64_t groups, int64_t width, Options options)
      : units(groups * width),
        factors(options.shared ? groups : units),
        a(options.constant ? factors : batch * steps * factors),
        b(batch * steps * units),
        h_0(batch * units),
        h(batch * steps * units),
        h_n(batch * units),
        dh(batch * steps * units),
        dh_n(batch * units),
        da(batch * (options.constant ? 1 : steps) * factors),
        db(batch * steps * units),
        dh_0(batch * units),
        lengths(batch),
        resets(batch * steps) {
    int64_t drawn = 0;
    for (auto* array : {&a, &b, &h_0, &dh, &dh_n}) {
      for (int64_t i = 0; i < array->size(); ++i) (*array)[i] = Draw(++drawn);
    }
    for (int64_t s = 0; s < batch; ++s) lengths[s] = (s * 5 + 3) % (steps + 1);
    for (int64_t i = 0; i < batch * steps; ++i) resets[i] = i % 7 == 2;
    shape = {batch,
             steps,
             options.shared ? groups : 1,
             options.shared ? width : units,
             steps * units,
             units,
             options.constant ? 0 : steps * factors,
             options.constant ? 0 : factors,
             1,
             (options.constant ? 1 : steps) * factors,
             options.constant ? 0 : factors,
             1,
             options.shared,
             false,
             options.reverse,
             false,
             options.masks ? lengths.data() : nullptr,
             options.masks ? resets.data() : nullptr,
             steps,
             1};
  }

  void Run() {
    const auto& kernels = CurrentLinearKernels().f32;
    ostinato::cpu::RunLinearForward<float, float>(
        shape, kernels, {a.data(), b.data(), h_0.data(), h.data(), h_n.data()});
    ostinato::cpu::RunLinearBackward<float, float>(
        shape, kernels,
        {a.data(), h.data(), h_0.data(), dh.data(), dh_n.data(), da.data(), db.data(),
         dh_0.data()});
  }

  int64_t Factor(int64_t sequence, int64_t step, int64_t unit) const {
    const int64_t factor = shape.shared ? unit / shape.width : unit;
    return sequence * shape.a_batch + step * shape.a_step + factor;
  }

  // Compares one unit of one sequence with a loop.
  void Check(int64_t sequence, int64_t unit, std::vector<double>& sums) {
    const int64_t length = shape.lengths ? lengths[sequence] : shape.steps;
    std::vector<double> states{h_0[sequence * units + unit]};
    const auto position = [&](int64_t k) { return shape.reverse ? length - 1 - k : k; };
    const auto at = [&](int64_t t) {
      return (sequence * shape.steps + t) * units + unit;
    };
    const auto reset = [&](int64_t t) {
      return shape.resets != nullptr && resets[sequence * shape.steps + t] != 0;
    };
    for (int64_t k = 0; k < length; ++k) {
      const int64_t t = position(k);
      const double before = reset(t) ? 0 : states.back();
      states.push_back(a[Factor(sequence, t, unit)] * before + b[at(t)]);
      Near(h[at(t)], states.back());
    }
    Near(h_n[sequence * units + unit], states.back());
    double c = dh_n[sequence * units + unit];
    for (int64_t k = length - 1; k >= 0; --k) {
      const int64_t t = position(k), factor = Factor(sequence, t, unit);
      const double bar = dh[at(t)] + c;
      Near(db[at(t)], bar);
      const double kept = reset(t) ? 0 : 1;
      const int64_t slot = shape.shared ? unit / shape.width : unit;
      const int64_t row = shape.a_step == 0 ? sequence : sequence * shape.steps + t;
      sums[row * factors + slot] += kept * bar * states[k];
      c = kept * a[factor] * bar;
    }
    Near(dh_0[sequence * units + unit], c);
    for (int64_t t = length; t < shape.steps; ++t) {
      CHECK_EQ(h[at(t)], 0.0f);
      CHECK_EQ(db[at(t)], 0.0f);
    }
  }

  static void Near(double got, double want) {
    const double error = std::fabs(got - want);
    CHECK_EQ(error <= 1e-4 * (1 + std::fabs(want)), true);
  }

  void CheckAll() {
    std::vector<double> sums(da.size());
    for (int64_t s = 0; s < shape.batch; ++s)
      for (int64_t unit = 0; unit < units; ++unit) Check(s, unit, sums);
    for (int64_t i = 0; i < da.size(); ++i) Near(da[i], sums[i]);
  }

  int64_t units, factors;
  Guarded<float> a, b, h_0, h, h_n, dh, dh_n, da, db, dh_0;
  Guarded<int32_t> lengths;
  Guarded<uint8_t> resets;
  LinearShape shape;
};

bool Same(Guarded<float>& x, Guarded<float>& y) {
  return std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
}

void CheckRecurrences() {
  const int64_t sizes[][4] = {{1, 1, 1, 1},  {3, 9, 2, 7},    {1, 40, 1, 150},
                              {2, 5, 3, 33}, {1, 300, 1, 20}, {5, 0, 1, 4},
                              {2, 9, 1, 17}, {600, 64, 1, 1}};
  for (const auto& size : sizes) {
    for (int bits = 0; bits < 16; ++bits) {
      const Options options{(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0,
                            (bits & 8) != 0};
      ostinato::cpu::SetNumThreads(1);
      Case alone(size[0], size[1], size[2], size[3], options);
      alone.Run();
      alone.CheckAll();
      ostinato::cpu::SetNumThreads(3);
      Case together(size[0], size[1], size[2], size[3], options);
      together.Run();
      CHECK_EQ(Same(alone.h, together.h) && Same(alone.da, together.da), true);
      CHECK_EQ(Same(alone.db, together.db), true);
    }
  }
}

// Large enough for threads, and for results that go past the caches.
void CheckLarge() {
  const Options options{true, false, false, false};
  ostinato::cpu::SetNumThreads(1);
  Case alone(2, 2200, 1, 1024, options);
  alone.Run();
  ostinato::cpu::SetNumThreads(4);
  Case together(2, 2200, 1, 1024, options);
  together.Run();
  CHECK_EQ(Same(alone.h, together.h) && Same(alone.da, together.da), true);
  CHECK_EQ(Same(alone.db, together.db), true);
  std::vector<double> sums(alone.da.size());
  for (const int64_t unit : {0, 513, 1023}) alone.Check(1, unit, sums);
}

void CheckFilter(int64_t channels, int64_t steps, int64_t order, bool reverse) {
  Guarded<float> b(channels * (order + 1)), a(order), x(channels * steps),
      y(channels * steps);
  for (int64_t i = 0; i < b.size(); ++i) b[i] = Draw(i);
  for (int64_t i = 0; i < order; ++i) a[i] = Draw(i + 50) / order;
  for (int64_t i = 0; i < x.size(); ++i) x[i] = Draw(i + 99);
  ostinato::cpu::RunFilter<float>(
      {order, steps, reverse, b.data(), a.data(), order + 1, 0, x.data(), y.data()},
      channels, CurrentLinearKernels().filter_f32);
  for (int64_t c = 0; c < channels; ++c) {
    std::vector<double> want(steps);
    const auto at = [&](int64_t k) {
      return c * steps + (reverse ? steps - 1 - k : k);
    };
    for (int64_t k = 0; k < steps; ++k) {
      for (int64_t j = 0; j <= order && j <= k; ++j) {
        want[k] += b[c * (order + 1) + j] * x[at(k - j)];
        if (j > 0) want[k] -= a[j - 1] * want[k - j];
      }
      Case::Near(y[at(k)], want[k]);
    }
  }
}

void CheckFilters() {
  for (const int32_t threads : {1, 3}) {
    ostinato::cpu::SetNumThreads(threads);
    for (int64_t order = 1; order <= 8; ++order) {
      CheckFilter(1, 37, order, false);
      CheckFilter(21, 35, order, true);
    }
    CheckFilter(5, 0, 2, false);
    CheckFilter(70, 3000, 3, false);
  }
}

// Sequences and steps, and which operands there are, by the bits of `options`.
template <typename T>
void CheckAdvantages(int64_t batch, int64_t steps, int options,
                     ostinato::cpu::AdvantagesKernel<T> kernel) {
  const bool time_major = (options & 1) != 0, one_rate = (options & 2) != 0;
  const bool masks = (options & 4) != 0, has_lengths = (options & 8) != 0;
  const int64_t count = batch * steps;
  Guarded<T> r(count), v(count), last(batch), d(one_rate ? 1 : count),
      l(one_rate ? 1 : count), advantages(count), returns(count);
  Guarded<uint8_t> ends(count), cuts(count);
  Guarded<int32_t> lengths(batch);
  int64_t drawn = 0;
  for (auto* array : {&r, &v, &last, &d, &l}) {
    for (int64_t i = 0; i < array->size(); ++i) {
      (*array)[i] = static_cast<T>(Draw(++drawn));
    }
  }
  const auto at = [&](int64_t s, int64_t t) {
    return time_major ? t * batch + s : s * steps + t;
  };
  for (int64_t i = 0; i < count; ++i) {
    ends[i] = i % 5 == 1;
    cuts[i] = i % 11 == 3;
  }
  for (int64_t s = 0; s < batch; ++s) {
    lengths[s] = static_cast<int32_t>(has_lengths ? (s * 5 + 3) % (steps + 1) : steps);
    for (int64_t t = lengths[s]; t < steps; ++t) {
      r[at(s, t)] = v[at(s, t)] = std::numeric_limits<T>::quiet_NaN();
    }
  }
  ostinato::cpu::Advantages<T> call{};
  call.batch = batch;
  call.steps = steps;
  call.time_major = time_major;
  call.rewards = r.data();
  call.values = v.data();
  call.last = last.data();
  call.discounts = d.data();
  call.lambdas = l.data();
  call.one_discount = call.one_lambda = one_rate;
  if (masks) call.ends = ends.data();
  if (masks) call.cuts = cuts.data();
  if (has_lengths) call.lengths = lengths.data();
  call.advantages = advantages.data();
  call.returns = returns.data();
  ostinato::cpu::RunAdvantages(call, kernel);
  for (int64_t s = 0; s < batch; ++s) {
    double carry = 0, after = last[s];
    for (int64_t t = steps - 1; t >= 0; --t) {
      const int64_t i = at(s, t);
      if (t >= lengths[s]) {
        CHECK_EQ(advantages[i], T{0});
        CHECK_EQ(returns[i], T{0});
        continue;
      }
      const double discount = masks && ends[i] != 0 ? 0 : d[one_rate ? 0 : i];
      carry = r[i] + discount * after - v[i] + discount * l[one_rate ? 0 : i] * carry;
      if (masks && cuts[i] != 0) carry = 0;
      after = v[i];
      Case::Near(advantages[i], carry);
      Case::Near(returns[i], carry + after);
    }
  }
}

void CheckAllAdvantages() {
  const int64_t sizes[][2] = {{1, 1},   {3, 0},    {1, 300}, {5, 7},
                              {37, 20}, {19, 129}, {150, 9}, {40, 130}};
  const auto& kernels = CurrentLinearKernels();
  for (const auto& size : sizes) {
    for (int options = 0; options < 16; ++options) {
      CheckAdvantages(size[0], size[1], options, kernels.advantages_f32);
      CheckAdvantages(size[0], size[1], options, kernels.advantages_f64);
    }
  }
}

// Large enough for threads.
void CheckLargeAdvantages() {
  const auto& kernels = CurrentLinearKernels();
  ostinato::cpu::SetNumThreads(3);
  for (const int options : {0, 15}) {
    CheckAdvantages(200, 700, options, kernels.advantages_f32);
    CheckAdvantages(200, 700, options, kernels.advantages_f64);
  }
}

}  // namespace

// With an argument, what threads can break.
int main(int argc, char**) {
  for (const Isa isa : {Isa::kPortable, Isa::kAvx2, Isa::kAvx512}) {
    ostinato::cpu::SetIsaCap(isa);
    if (argc > 1 && isa != Isa::kAvx512) continue;
    CheckRecurrences();
    if (argc > 1) continue;
    CheckFilters();
    CheckAllAdvantages();
  }
  CheckLarge();
  CheckLargeAdvantages();
  return ostinato::testing::Summary();
}
