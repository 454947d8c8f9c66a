#include "cpu/step/program.h"

#include <stdexcept>

namespace ostinato::cpu {
namespace {

[[noreturn]] void Refuse() {
  throw std::invalid_argument("a number of the step program is out of range");
}

class Reader {
 public:
  Reader(const int64_t* numbers, int64_t count)
      : next_(numbers), end_(numbers + count) {}

  int64_t Next() {
    if (next_ == end_) throw std::invalid_argument("the step program is cut");
    return *next_++;
  }
  int64_t Below(size_t bound) {
    const int64_t n = Next();
    if (n < 0 || n >= static_cast<int64_t>(bound)) Refuse();
    return n;
  }
  bool AtEnd() const { return next_ == end_; }

 private:
  const int64_t *next_, *end_;
};

// Whether an instruction can run for a whole chunk: on one row of every sequence at
// every step, which no later step writes over.
void CheckWholeChunk(const StepProgram& program, const StepInstruction& instruction,
                     int operands) {
  const auto stays = [&](const StepView& view) {
    const Place place = program.buffers[view.buffer].place;
    return place != Place::kState && place != Place::kNext && place != Place::kLocal;
  };
  const StepBuffer& to = program.buffers[instruction.result.buffer];
  const bool sums = to.place == Place::kSum;
  const auto operation = static_cast<Operation>(instruction.operation);
  const bool adds = ReducesColumn(operation) && !Indexes(operation);
  bool whole = instruction.inner == 1 && stays(instruction.result);
  whole = whole && (adds || ComputesRows(operation));
  whole = whole && sums == adds && !(sums && to.rows);
  for (int k = 0; k < operands; ++k) {
    whole = whole && stays(instruction.operands[k]);
  }
  if (!whole) Refuse();
}

// Whether what an instruction or a state after a step names is there.
void CheckReferences(const StepProgram& program) {
  const auto buffers = static_cast<int64_t>(program.buffers.size());
  for (const StepBuffer& buffer : program.buffers) {
    const bool next = buffer.place == Place::kNext;
    if (next && (buffer.array < 0 || buffer.array >= buffers ||
                 program.buffers[buffer.array].place != Place::kState)) {
      Refuse();
    }
    // The sequences of a state need not end together.
    if ((next || buffer.place == Place::kState) && !buffer.rows) Refuse();
  }
  for (const StepInstruction& instruction : program.instructions) {
    const int64_t operation = instruction.operation;
    const int operands = operation == kProduct ? 1 : kStepOperands[operation];
    bool whole = instruction.result.buffer >= 0;
    for (int k = 0; k < operands; ++k) {
      whole = whole && instruction.operands[k].buffer >= 0;
    }
    // A product of a whole chunk has one row for each sequence.
    const bool chunk = operation == kProduct && instruction.phase != Phase::kStep;
    if (!whole || (chunk && (instruction.inner != 1 || instruction.continues))) {
      Refuse();
    }
    for (int k = 1; operation == kProduct && k < 3; ++k) {
      const int64_t start = instruction.operands[k].buffer;
      if (start >= 0 && (program.buffers[start].place != Place::kInvariant ||
                         program.buffers[start].rows || instruction.continues)) {
        Refuse();
      }
    }
    if (operation != kProduct && instruction.phase != Phase::kStep) {
      CheckWholeChunk(program, instruction, operands);
    }
    if (operation == kProduct) continue;
    const auto o = static_cast<Operation>(operation);
    const bool sums = program.buffers[instruction.result.buffer].place == Place::kSum;
    if (Indexes(o) && o != Operation::add_row && sums) Refuse();
    if (o == Operation::transpose && (sums || instruction.operands[0].splat)) Refuse();
  }
}

StepView ReadView(Reader& reader, size_t buffers) {
  // Braces are evaluated in order.
  StepView view{reader.Below(buffers + 1) - 1, reader.Next(), reader.Next(),
                reader.Next(), reader.Next() != 0};
  return view;
}

}  // namespace

StepProgram DecodeProgram(const int64_t* numbers, int64_t count) {
  Reader reader(numbers, count);
  StepProgram program;
  program.buffers.resize(reader.Below(count));
  program.weights.resize(reader.Below(count));
  program.instructions.resize(reader.Below(count));
  program.gradients.resize(reader.Below(count));
  program.row_elements = reader.Next();
  program.shared_elements = reader.Next();
  for (StepBuffer& buffer : program.buffers) {
    buffer = {static_cast<Place>(reader.Below(9)),
              reader.Next(),
              reader.Next() != 0,
              reader.Next(),
              reader.Next(),
              reader.Next(),
              reader.Next() != 0};
  }
  for (StepWeight& weight : program.weights) {
    weight = {reader.Next(), reader.Next(),      reader.Next(),     reader.Next(),
              reader.Next(), reader.Next() != 0, reader.Next() != 0};
  }
  for (StepInstruction& instruction : program.instructions) {
    instruction.operation = reader.Below(kNumOperations + 1) - 1;
    instruction.rows = reader.Next() != 0;
    instruction.inner = reader.Next();
    instruction.width = reader.Next();
    instruction.result = ReadView(reader, program.buffers.size());
    for (StepView& view : instruction.operands) {
      view = ReadView(reader, program.buffers.size());
    }
    instruction.weight = reader.Next();
    instruction.continues = reader.Next() != 0;
    instruction.phase = static_cast<Phase>(reader.Below(3));
    if (instruction.operation == kProduct &&
        (instruction.weight < 0 ||
         instruction.weight >= static_cast<int64_t>(program.weights.size()))) {
      throw std::invalid_argument("a product of the step program has no weight");
    }
  }
  for (StepGradient& gradient : program.gradients) {
    for (auto* factor : {&gradient.a, &gradient.b}) {
      factor->buffer = reader.Below(program.buffers.size());
      factor->offset = reader.Next();
      factor->width = reader.Next();
    }
    gradient.result = reader.Next();
  }
  if (!reader.AtEnd()) throw std::invalid_argument("the step program is too long");
  CheckReferences(program);
  return program;
}

}  // namespace ostinato::cpu
