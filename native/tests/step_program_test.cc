// Programs of steps as numbers: what is encoded is decoded, and numbers that are no
// program are refused.
#include <cstdint>
#include <vector>

#include "cpu/step/program.h"
#include "tests/check.h"
#include "tests/step_case.h"

namespace {

using namespace ostinato::testing;
using ostinato::cpu::DecodeProgram;

void CheckDecoding(const StepProgram& program) {
  const std::vector<int64_t> numbers = Encode(program);
  const auto refuses = [](std::vector<int64_t> n) {
    return Refuses([&] { DecodeProgram(n.data(), n.size()); });
  };
  CHECK_EQ(refuses(numbers), false);
  for (size_t count = 0; count < numbers.size(); ++count) {
    CHECK_EQ(refuses({numbers.begin(), numbers.begin() + count}), true);
  }
  std::vector<int64_t> longer = numbers;
  longer.push_back(0);
  CHECK_EQ(refuses(longer), true);
  for (const int64_t count : {int64_t{-1}, int64_t{1} << 60}) {
    for (int i = 0; i < 4; ++i) {
      std::vector<int64_t> other = numbers;
      other[i] = count;
      CHECK_EQ(refuses(other), true);
    }
  }
  const auto refuses_change = [&](auto change) {
    StepProgram other = program;
    change(other);
    return refuses(Encode(other));
  };
  const auto buffers = static_cast<int64_t>(program.buffers.size());
  for (const int64_t bad : {int64_t{-2}, buffers}) {
    CHECK_EQ(refuses_change([&](auto& p) { p.instructions[2].result.buffer = bad; }),
             true);
    CHECK_EQ(
        refuses_change([&](auto& p) { p.instructions[2].operands[1].buffer = bad; }),
        true);
    CHECK_EQ(refuses_change([&](auto& p) { p.gradients[0].b.buffer = bad; }), true);
    CHECK_EQ(refuses_change([&](auto& p) { p.instructions[0].weight = bad; }), true);
    CHECK_EQ(refuses_change([&](auto& p) { p.buffers[5].array = bad; }), true);
  }
  // What an operation reads or writes is absent.
  CHECK_EQ(refuses_change([](auto& p) { p.instructions[2].result.buffer = -1; }), true);
  CHECK_EQ(refuses_change([](auto& p) { p.instructions[2].operands[1].buffer = -1; }),
           true);
  CHECK_EQ(refuses_change([](auto& p) { p.instructions[0].operands[0].buffer = -1; }),
           true);
  CHECK_EQ(refuses_change([](auto& p) { p.instructions[2].operation = -2; }), true);
  // Products that start from what differs between sequences, or that start and go on;
  // products of a chunk that go on, or that have several rows for each sequence.
  CHECK_EQ(refuses_change([](auto& p) { p.instructions[0].operands[1].buffer = 0; }),
           true);
  CHECK_EQ(refuses_change([](auto& p) { p.instructions[0].operands[1].buffer = 2; }),
           true);
  CHECK_EQ(refuses_change([](auto& p) {
             p.instructions[1].operands[1] = p.instructions[0].operands[1];
           }),
           true);
  CHECK_EQ(refuses_change([](auto& p) { p.instructions[0].continues = true; }), true);
  CHECK_EQ(refuses_change([](auto& p) { p.instructions[0].inner = 2; }), true);
  // What runs for a chunk, and has several rows, or reads or writes a state.
  CHECK_EQ(refuses_change([](auto& p) { p.instructions[2].inner = 2; }), true);
  CHECK_EQ(refuses_change([](auto& p) { p.instructions[3].phase = Phase::kAfter; }),
           true);
  CHECK_EQ(refuses_change([](auto& p) {
             p.instructions[2].operands[0] = p.instructions[1].operands[0];
           }),
           true);
  for (const Operation o : {Operation::take_row, Operation::set_row, Operation::add_row,
                            Operation::transpose}) {
    CHECK_EQ(refuses_change([&](auto& p) {
               p.instructions[2].operation = static_cast<int64_t>(o);
             }),
             true);
  }
  CHECK_EQ(refuses_change([](auto& p) {
             p.instructions[2].operation = ostinato::cpu::kNumOperations;
           }),
           true);
  CHECK_EQ(
      refuses_change([](auto& p) { p.instructions[2].phase = static_cast<Phase>(3); }),
      true);
  // A transpose of one element for all of a row, or to a sum over sequences.
  for (auto& i : program.instructions) {
    if (i.operation != static_cast<int64_t>(Operation::transpose)) continue;
    const auto at = &i - program.instructions.data();
    CHECK_EQ(
        refuses_change([&](auto& p) { p.instructions[at].operands[0].splat = true; }),
        true);
    CHECK_EQ(refuses_change([&](auto& p) {
               for (auto& b : p.buffers) {
                 if (b.place == Place::kSum)
                   p.instructions[at].result.buffer = &b - p.buffers.data();
               }
             }),
             true);
    CHECK_EQ(refuses_change([&](auto& p) { p.instructions[at].phase = Phase::kAfter; }),
             true);
  }
  // A row that is written to a sum over sequences.
  CHECK_EQ(refuses_change([](auto& p) {
             for (auto& b : p.buffers) {
               if (b.place == Place::kSum)
                 p.instructions[11].result.buffer = &b - p.buffers.data();
             }
           }),
           true);
  CHECK_EQ(refuses_change([](auto& p) { p.buffers[0].place = static_cast<Place>(9); }),
           true);
  CHECK_EQ(refuses_change([](auto& p) { p.buffers[5].array = 0; }), true);  // no state
  CHECK_EQ(refuses_change([](auto& p) { p.buffers[6].rows = false; }), true);
}

}  // namespace

int main() {
  const StepProgram built = ProgramBuilder().Build();
  const std::vector<int64_t> numbers = Encode(built);
  CHECK_EQ(Encode(DecodeProgram(numbers.data(), numbers.size())) == numbers, true);
  CheckDecoding(built);
  return Summary();
}
