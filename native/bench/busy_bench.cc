// What sharing a call among threads costs while other programs want the processors:
//
//   c++ -O3 -std=c++17 -pthread -I native native/bench/busy_bench.cc
//       native/cpu/*/*.cc -o busy_bench
//   ./busy_bench [busy threads, default 2] [seconds a row, default 6]
//
// An LSTM of 100 steps runs on one thread and on two, in turns of a twentieth of a
// second, next to threads that do nothing but spin. The ratio is the mean time of two
// over that of one; the kernels promise at most 1.3, however busy the machine.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cpu/network/placement.h"
#include "cpu/pass/forward.h"
#include "cpu/runtime/fp_state.h"

namespace ostinato::cpu {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class Lstm {
 public:
  Lstm(int64_t batch, int64_t units) : batch_(batch) {
    network_.mode = Mode::kLstm;
    network_.input_size = network_.hidden_size = units;
    network_.num_layers = network_.num_directions = 1;
    network_.bias_ih = network_.bias_hh = true;
    weights_.assign(NumParams(network_), 0.01f);
    x_.assign(kSteps * batch * units, 1);
    state_.assign(batch * units, 0);
    y_.resize(x_.size());
    h_n_.resize(state_.size());
    c_n_.resize(state_.size());
    places_ = Placement::Padded(kSteps, batch, true);
  }

  void Run(int32_t threads) {
    ForwardCall<float, float> call{};
    call.operands.network = network_;
    call.operands.steps = kSteps;
    call.operands.batch = batch_;
    call.operands.tokens = kSteps * batch_;
    places_.PutInto(call.operands);
    call.operands.weights = weights_.data();
    call.operands.x = x_.data();
    call.operands.h_0 = call.operands.c_0[0] = state_.data();
    call.y = y_.data();
    call.h_n = h_n_.data();
    call.c_n[0] = c_n_.data();
    Team team(threads);
    RunForward(call, team);
  }

 private:
  static constexpr int64_t kSteps = 100;

  Network network_{};
  const int64_t batch_;
  std::vector<float> weights_, x_, state_, y_, h_n_, c_n_;
  Placement places_;
};

void Measure(int64_t batch, int64_t units, double seconds) {
  Lstm lstm(batch, units);
  double spent[2] = {0, 0}, worst[2] = {0, 0};
  int64_t calls[2] = {0, 0};
  const auto start = Clock::now();
  for (int turn = 0; SecondsSince(start) < seconds; turn = 1 - turn) {
    for (const auto begin = Clock::now(); SecondsSince(begin) < 0.05;) {
      const auto before = Clock::now();
      lstm.Run(turn + 1);
      const double took = SecondsSince(before);
      spent[turn] += took;
      worst[turn] = std::max(worst[turn], took);
      ++calls[turn];
    }
  }
  const double one = 1e3 * spent[0] / calls[0], two = 1e3 * spent[1] / calls[1];
  std::printf("N%-3ld H%-4ld one thread %8.3f ms, two %8.3f ms, ratio %.2f", batch,
              units, one, two, two / one);
  std::printf("; longest %.1f and %.1f ms\n", 1e3 * worst[0], 1e3 * worst[1]);
}

}  // namespace
}  // namespace ostinato::cpu

int main(int argc, char** argv) {
  const int busy = argc > 1 ? std::atoi(argv[1]) : 2;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 6;
  const ostinato::cpu::FlushDenormals flush;
  ostinato::cpu::SetNumThreads(2);
  std::atomic<bool> stop{false};
  std::vector<std::thread> others;
  for (int i = 0; i < busy; ++i) {
    others.emplace_back([&] {
      while (!stop.load(std::memory_order_relaxed)) {
      }
    });
  }
  for (const auto& [batch, units] :
       {std::pair{1, 64}, std::pair{1, 256}, std::pair{4, 128}, std::pair{32, 128}}) {
    ostinato::cpu::Measure(batch, units, seconds);
  }
  stop.store(true);
  for (std::thread& other : others) other.join();
}
