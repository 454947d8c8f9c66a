#include "cpu/step/call_check.h"

#include <stdexcept>
#include <string>
#include <vector>

namespace ostinato::cpu {
namespace {

void ExpectElements(const char* what, int64_t index, const StepArray& array,
                    int64_t want) {
  if (array.elements == want) return;
  throw std::invalid_argument(std::string(what) + " " + std::to_string(index) +
                              " has " + std::to_string(array.elements) +
                              " elements, want " + std::to_string(want));
}

}  // namespace

void CheckArrays(const StepCall& call, int64_t bytes) {
  const auto expect_bytes = [&](const char* what, int64_t index, const StepArray& array,
                                bool half) {
    if (array.bytes == bytes || (half && bytes == 4 && array.bytes == 2)) return;
    throw std::invalid_argument(std::string(what) + " " + std::to_string(index) +
                                " has elements of " + std::to_string(array.bytes) +
                                " bytes, want " + std::to_string(bytes));
  };
  if (call.capacity >= 0 && call.lengths == nullptr) {
    throw std::invalid_argument("sequences one after another need lengths");
  }
  const auto expect = [&](const char* what, const std::vector<StepArray>& arrays,
                          int64_t index, int64_t elements, bool half = true) {
    if (index < 0 || index >= static_cast<int64_t>(arrays.size())) {
      throw std::invalid_argument("the step program lacks " + std::string(what) + " " +
                                  std::to_string(index));
    }
    ExpectElements(what, index, arrays[index], elements);
    expect_bytes(what, index, arrays[index], half);
  };
  for (const StepBuffer& buffer : call.program.buffers) {
    const int64_t once = buffer.width * (buffer.rows ? call.batch : 1);
    const int64_t all = call.capacity >= 0 && buffer.rows ? buffer.width * call.capacity
                                                          : once * call.steps;
    switch (buffer.place) {
      case Place::kConstant:
        if (buffer.offset < 0 || buffer.offset + buffer.width > call.num_constants) {
          throw std::invalid_argument("the step program lacks constants");
        }
        break;
      case Place::kInvariant:
      case Place::kState:
        expect("operand", call.operands, buffer.array, once);
        break;
      case Place::kInput:
        expect("operand", call.operands, buffer.array, all);
        break;
      case Place::kOutput:
        expect("result", call.results, buffer.array, all);
        break;
      case Place::kNext:
        expect("result", call.results, buffer.offset, once);
        break;
      case Place::kSum:
        expect("result", call.results, buffer.array, once, buffer.rows);
        break;
      case Place::kLocal:
      case Place::kChunk:
        break;
    }
  }
  for (const StepGradient& gradient : call.program.gradients) {
    expect("result", call.results, gradient.result, gradient.a.width * gradient.b.width,
           false);
  }
  for (const StepWeight& weight : call.program.weights) {
    const int64_t rows = weight.transposed ? weight.columns : weight.depth;
    const int64_t width = weight.transposed ? weight.depth : weight.columns;
    const int64_t end =
        rows == 0 ? 0 : weight.offset + (rows - 1) * weight.stride + width;
    if (weight.array < 0 ||
        weight.array >= static_cast<int64_t>(call.operands.size()) ||
        end > call.operands[weight.array].elements) {
      throw std::invalid_argument("a weight of the step program is too small");
    }
    expect_bytes("operand", weight.array, call.operands[weight.array], true);
  }
}

}  // namespace ostinato::cpu
