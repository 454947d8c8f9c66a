// A step program that has a buffer of every place, instructions of every phase and
// products of every kind, with a plain loop that does the same.
#ifndef OSTINATO_TESTS_STEP_CASE_H_
#define OSTINATO_TESTS_STEP_CASE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/step/program.h"

namespace ostinato::testing {

using cpu::Operation;
using cpu::Phase;
using cpu::Place;
using cpu::StepBuffer;
using cpu::StepInstruction;
using cpu::StepProgram;
using cpu::StepView;

// Elements of an input, a state, another state, an output, and an input that all
// sequences share; the first state read as a matrix [kInner, kEach], the columns of a
// matrix that each of its rows is multiplied with, and the entries of a memory, of
// kSmall elements each.
constexpr int64_t kIn = 5, kHidden = 19, kSmall = 3, kOut = 7, kGlobal = 4, kInner = 3,
                  kEach = 6, kMixed = 2, kEntries = 2;
constexpr int64_t kFirstIn = 1, kFirst = 2;  // of an input and a state: a gradient's
constexpr double kDecay = 0.5;

// Operands.
enum { kX, kW, kU, kBias, kH0, kS0, kG, kV, kM, kN, kMemory0, kOperands };
// Results.
enum {
  kY,       // h
  kZ,       // tanh(g)^2, of all
  kAfterY,  // -(h V)
  kExtremes,
  kMix,
  kTurned,
  kRead,
  kHLast,
  kSLast,
  kMemoryLast,
  kSumH,
  kSumSM,  // sum of s * m
  kSumRows,
  kSumS,  // of every sequence
  kGradientW,
  kGradientV,
  kResults
};

// V is transposed and stands within a larger matrix.
constexpr int64_t kVOffset = 2, kVStride = kHidden + 1;

struct Sizes {
  int64_t steps, batch;
  std::vector<int64_t> Operands() const {
    const int64_t all = steps * batch;
    return {all * kIn,
            kIn * kHidden,
            kHidden * kHidden,
            kHidden,
            batch * kHidden,
            batch * kSmall,
            steps * kGlobal,
            kVOffset + (kOut - 1) * kVStride + kHidden,
            batch * kSmall,
            kEach * kMixed,
            batch * kEntries * kSmall};
  }
  std::vector<int64_t> Results() const {
    const int64_t all = steps * batch;
    return {all * kHidden,
            steps * kGlobal,
            all * kOut,
            all * (kInner + kEach),
            all * kInner * kMixed,
            all * kInner * kEach,
            all * kSmall,
            batch * kHidden,
            batch * kSmall,
            batch * kEntries * kSmall,
            kHidden,
            kSmall,
            kEntries * kSmall,
            batch * kSmall,
            (kIn - kFirstIn) * (kHidden - kFirst),
            kHidden * kOut};
  }
};

// The step, where h and s are states:
//   h' = tanh(x W + h U + bias)
//   s' = decay s + the sum of h'
// and `memory` is a third one, of whose entries `read` is the one at place = x[0] <
// decay. This one becomes h'[:kSmall], and m is added to the next one, if there is one.
// `sum_rows` has at place + 1, if there is one, the sum of the s' that have it.
// `extremes` are the largest elements of the rows and of the columns of h' as a matrix,
// `turned` its transpose, and `mix` is that matrix N. The gradients are the sums of
// x[kFirstIn:]^T h'[kFirst:] and of h'^T (h' V).
class ProgramBuilder {
 public:
  StepProgram Build() {
    const auto x = Buffer(Place::kInput, kX, true, kIn);
    const auto bias = Buffer(Place::kInvariant, kBias, false, kHidden);
    const auto m = Buffer(Place::kInvariant, kM, true, kSmall);
    const auto g = Buffer(Place::kInput, kG, false, kGlobal);
    const auto decay = Buffer(Place::kConstant, -1, false, 1, 1);
    const auto next_h = Buffer(Place::kNext, 6, true, kHidden, kHLast);
    const auto h = Buffer(Place::kState, kH0, true, kHidden);
    const auto s = Buffer(Place::kState, kS0, true, kSmall);
    const auto next_s = Buffer(Place::kNext, s, true, kSmall, kSLast);
    const auto ahead = Buffer(Place::kChunk, -1, true, Padded(kHidden));
    const auto kept = Buffer(Place::kChunk, -1, true, kHidden);
    const auto after = Buffer(Place::kChunk, -1, true, Padded(kOut));
    const auto sum = Local(true, 1);
    const auto pre = Buffer(Place::kChunk, -1, true, Padded(kHidden));
    const auto mixed = Local(true, kInner * Padded(kMixed));
    const auto shared = Buffer(Place::kChunk, -1, false, kGlobal);
    const auto y = Buffer(Place::kOutput, kY, true, kHidden);
    const auto z = Buffer(Place::kOutput, kZ, false, kGlobal);
    const auto after_y = Buffer(Place::kOutput, kAfterY, true, kOut);
    const auto extremes = Buffer(Place::kOutput, kExtremes, true, kInner + kEach);
    const auto mix = Buffer(Place::kOutput, kMix, true, kInner * kMixed);
    const auto turned = Buffer(Place::kOutput, kTurned, true, kInner * kEach);
    const auto one = Buffer(Place::kConstant, -1, false, 1, 2);
    const auto memory = Buffer(Place::kState, kMemory0, true, kEntries * kSmall);
    program_.buffers.back().in_place = true;
    const auto next_memory =
        Buffer(Place::kNext, memory, true, kEntries * kSmall, kMemoryLast);
    const auto place = Local(true, 1), other = Local(true, 1);
    const auto read = Buffer(Place::kOutput, kRead, true, kSmall);
    const auto sum_h = Buffer(Place::kSum, kSumH, false, kHidden);
    const auto sum_sm = Buffer(Place::kSum, kSumSM, false, kSmall);
    const auto sum_rows = Buffer(Place::kSum, kSumRows, false, kEntries * kSmall);
    const auto sum_s = Buffer(Place::kSum, kSumS, true, kSmall);
    program_.weights = {{kW, 0, kIn, kHidden, kHidden, false, false},
                        {kU, 0, kHidden, kHidden, kHidden, false, false},
                        {kV, kVOffset, kHidden, kOut, kVStride, true, false},
                        {kN, 0, kEach, kMixed, kMixed, false, false}};

    Multiply(Phase::kAhead, 0, false, View(ahead), View(x));
    program_.instructions.back().operands[1] = View(bias);
    program_.instructions.back().operands[2] = View(bias);
    Multiply(Phase::kStep, 1, true, View(pre), View(h));
    Add(Operation::subtract, 1, kHidden, View(pre), {View(ahead), View(bias)});
    program_.instructions.back().phase = Phase::kAhead;
    Add(Operation::tanh, 1, kHidden, View(next_h), {View(pre)});
    Add(Operation::copy, 1, kHidden, View(y), {View(next_h)});
    Add(Operation::copy, 1, kHidden, View(kept), {View(next_h)});
    Add(Operation::row_sum, 1, kHidden, View(sum), {View(next_h)});
    Add(Operation::multiply_add, 1, kSmall, View(next_s),
        {View(s), Splat(View(decay)), Splat(View(sum))});
    Add(Operation::less, 1, 1, View(place), {View(x), View(decay)});
    Add(Operation::add, 1, 1, View(other), {View(place), View(one)});
    Add(Operation::take_row, kEntries, kSmall, View(read),
        {View(memory, 0, kSmall), Splat(View(place))});
    Add(Operation::set_row, kEntries, kSmall, View(next_memory, 0, kSmall),
        {View(next_h), Splat(View(place))});
    Add(Operation::add_row, kEntries, kSmall, View(next_memory, 0, kSmall),
        {View(m), Splat(View(other))});
    Add(Operation::tanh, 1, kGlobal, View(shared), {View(g)});
    program_.instructions.back().phase = Phase::kAhead;
    Add(Operation::multiply, 1, kGlobal, View(z), {View(shared), View(shared)});
    program_.instructions.back().phase = Phase::kAfter;
    Add(Operation::row_max, kInner, kEach, View(extremes, 0, 1),
        {View(next_h, 0, kEach)});
    Add(Operation::column_max, kInner, kEach, View(extremes, kInner),
        {View(next_h, 0, kEach)});
    Multiply(Phase::kStep, 3, false, View(mixed, 0, Padded(kMixed)),
             View(next_h, 0, kEach), kInner);
    Add(Operation::copy, kInner, kMixed, View(mix, 0, kMixed),
        {View(mixed, 0, Padded(kMixed))});
    Add(Operation::transpose, kEach, kInner, View(turned, 0, kInner),
        {View(next_h, 0, kEach)});
    Add(Operation::add, 1, kSmall, View(sum_s), {View(sum_s), View(next_s)});
    Add(Operation::column_sum, 1, kHidden, View(sum_h), {View(kept)});
    program_.instructions.back().phase = Phase::kAfter;
    Add(Operation::column_sum_product, 1, kSmall, View(sum_sm),
        {View(next_s), View(m)});
    Add(Operation::add_row, kEntries, kSmall, View(sum_rows, 0, kSmall),
        {View(next_s), Splat(View(other))});
    Multiply(Phase::kAfter, 2, false, View(after), View(kept));
    Add(Operation::negate, 1, kOut, View(after_y), {View(after)});
    program_.instructions.back().phase = Phase::kAfter;

    program_.gradients = {
        {{x, kFirstIn, kIn - kFirstIn}, {kept, kFirst, kHidden - kFirst}, kGradientW},
        {{kept, 0, kHidden}, {after, 0, kOut}, kGradientV}};
    return program_;
  }

 private:
  static int64_t Padded(int64_t width) { return (width + 15) / 16 * 16; }

  int64_t Buffer(Place place, int64_t array, bool rows, int64_t width,
                 int64_t offset = 0) {
    program_.buffers.push_back({place, array, rows, width, width, offset});
    return program_.buffers.size() - 1;
  }
  int64_t Local(bool rows, int64_t width) {
    int64_t& size = rows ? program_.row_elements : program_.shared_elements;
    size += Padded(width);
    return Buffer(Place::kLocal, -1, rows, width, size - Padded(width));
  }
  StepView View(int64_t buffer, int64_t offset = 0, int64_t inner_stride = 0) {
    const StepBuffer& b = program_.buffers[buffer];
    return {buffer, offset, b.rows ? b.width : 0, inner_stride, false};
  }
  static StepView Splat(StepView view) {
    view.splat = true;
    return view;
  }

  void Add(Operation operation, int64_t inner, int64_t width, StepView result,
           std::vector<StepView> operands) {
    const bool rows = program_.buffers[operands[0].buffer].rows;
    operands.resize(3, {-1, 0, 0, 0, false});
    program_.instructions.push_back({static_cast<int64_t>(operation),
                                     rows,
                                     inner,
                                     width,
                                     result,
                                     {operands[0], operands[1], operands[2]},
                                     0,
                                     false,
                                     Phase::kStep});
  }
  void Multiply(Phase phase, int64_t weight, bool continues, StepView result,
                StepView factor, int64_t inner = 1) {
    Add(Operation::copy, inner, program_.weights[weight].columns, result, {factor});
    StepInstruction& product = program_.instructions.back();
    product.operation = cpu::kProduct;
    product.weight = weight;
    product.continues = continues;
    product.phase = phase;
  }

  StepProgram program_{};
};

// The numbers that DecodeProgram reads, as program.py writes them.
inline std::vector<int64_t> Encode(const StepProgram& p) {
  std::vector<int64_t> numbers;
  const auto put = [&](auto... values) {
    (numbers.push_back(static_cast<int64_t>(values)), ...);
  };
  put(p.buffers.size(), p.weights.size(), p.instructions.size(), p.gradients.size(),
      p.row_elements, p.shared_elements);
  for (const auto& b : p.buffers) {
    put(b.place, b.array, b.rows, b.width, b.stride, b.offset, b.in_place);
  }
  for (const auto& w : p.weights) {
    put(w.array, w.offset, w.depth, w.columns, w.stride, w.transposed, w.half);
  }
  const auto put_view = [&](const StepView& v) {
    put(v.buffer + 1, v.offset, v.row_stride, v.inner_stride, v.splat);
  };
  for (const auto& i : p.instructions) {
    put(i.operation + 1, i.rows, i.inner, i.width);
    put_view(i.result);
    for (const StepView& view : i.operands) put_view(view);
    put(i.weight, i.continues, i.phase);
  }
  for (const auto& g : p.gradients) {
    put(g.a.buffer, g.a.offset, g.a.width, g.b.buffer, g.b.offset, g.b.width, g.result);
  }
  return numbers;
}

using Values = std::vector<std::vector<double>>;

// The same in double; at[...] of results are those of Sizes. Where a sequence has no
// step, results are 0, as are those that all share where none has one.
inline Values PlainLoop(const Values& in, const Sizes& sizes,
                        const std::vector<int32_t>& lengths, bool reverse) {
  const int64_t steps = sizes.steps, batch = sizes.batch;
  Values out;
  for (const int64_t size : sizes.Results()) out.emplace_back(size, 0.0);
  for (int64_t b = 0; b < batch; ++b) {
    double h[kHidden], s[kSmall], memory[kEntries][kSmall];
    std::copy_n(&in[kMemory0][b * kEntries * kSmall], kEntries * kSmall, memory[0]);
    std::copy_n(&in[kH0][b * kHidden], kHidden, h);
    std::copy_n(&in[kS0][b * kSmall], kSmall, s);
    for (int64_t n = 0; n < steps; ++n) {
      const int64_t t = reverse ? steps - 1 - n : n, at = t * batch + b;
      if (!lengths.empty() && t >= lengths[b]) continue;
      const double* const x = &in[kX][at * kIn];
      double next[kHidden], total = 0, product[kOut] = {};
      for (int64_t j = 0; j < kHidden; ++j) {
        double sum = in[kBias][j];
        for (int64_t k = 0; k < kIn; ++k) sum += x[k] * in[kW][k * kHidden + j];
        for (int64_t k = 0; k < kHidden; ++k) sum += h[k] * in[kU][k * kHidden + j];
        next[j] = std::tanh(sum);
        total += next[j];
      }
      for (int64_t j = 0; j < kHidden; ++j) {
        h[j] = out[kY][at * kHidden + j] = next[j];
        out[kSumH][j] += h[j];
        for (int64_t o = 0; o < kOut; ++o) {
          product[o] += h[j] * in[kV][kVOffset + o * kVStride + j];
        }
      }
      for (int64_t j = 0; j < kSmall; ++j) {
        s[j] = kDecay * s[j] + total;
        out[kSumS][b * kSmall + j] += s[j];
        out[kSumSM][j] += s[j] * in[kM][b * kSmall + j];
      }
      const int place = x[0] < kDecay ? 1 : 0;
      for (int64_t j = 0; j < kSmall && place + 1 < kEntries; ++j) {
        out[kSumRows][(place + 1) * kSmall + j] += s[j];
      }
      for (int64_t j = 0; j < kSmall; ++j) {
        out[kRead][at * kSmall + j] = memory[place][j];
        memory[place][j] = h[j];
        if (place == 0) memory[1][j] += in[kM][b * kSmall + j];
      }
      for (int64_t j = 0; j < kGlobal; ++j) {
        const double g = std::tanh(in[kG][t * kGlobal + j]);
        out[kZ][t * kGlobal + j] = g * g;
      }
      double* const extremes = &out[kExtremes][at * (kInner + kEach)];
      std::fill_n(extremes, kInner + kEach, -2.0);
      for (int64_t r = 0; r < kInner; ++r) {
        for (int64_t c = 0; c < kEach; ++c) {
          const double value = h[r * kEach + c];
          extremes[r] = std::max(extremes[r], value);
          extremes[kInner + c] = std::max(extremes[kInner + c], value);
          out[kTurned][(at * kEach + c) * kInner + r] = value;
          for (int64_t k = 0; k < kMixed; ++k) {
            out[kMix][(at * kInner + r) * kMixed + k] += value * in[kN][c * kMixed + k];
          }
        }
      }
      for (int64_t o = 0; o < kOut; ++o) {
        out[kAfterY][at * kOut + o] = -product[o];
        for (int64_t j = 0; j < kHidden; ++j) {
          out[kGradientV][j * kOut + o] += h[j] * product[o];
        }
      }
      for (int64_t i = kFirstIn; i < kIn; ++i) {
        for (int64_t j = kFirst; j < kHidden; ++j) {
          out[kGradientW][(i - kFirstIn) * (kHidden - kFirst) + j - kFirst] +=
              x[i] * h[j];
        }
      }
    }
    std::copy_n(h, kHidden, out[kHLast].begin() + b * kHidden);
    std::copy_n(s, kSmall, out[kSLast].begin() + b * kSmall);
    std::copy_n(memory[0], kEntries * kSmall,
                out[kMemoryLast].begin() + b * kEntries * kSmall);
  }
  return out;
}

}  // namespace ostinato::testing

#endif  // OSTINATO_TESTS_STEP_CASE_H_
