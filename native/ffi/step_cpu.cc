// The handler that runs a loop over the steps of a program, or those of several
// members.
#include <stdexcept>
#include <string>

#include "cpu/kernels/step_kernels.h"
#include "cpu/step/loop.h"
#include "cpu/step/program.h"
#include "ffi/handler.h"

namespace ostinato::ffi {
namespace {

namespace xffi = ::xla::ffi;

// The array of the first of several members.
cpu::StepArray ArrayOf(const xffi::AnyBuffer& buffer, int64_t members) {
  return {buffer.untyped_data(), static_cast<int64_t>(buffer.element_count()) / members,
          static_cast<int64_t>(xffi::ByteWidth(buffer.element_type()))};
}

// How many members there are, of whose results each has `elements`.
int64_t MembersOf(xffi::RemainingRets results, int64_t elements) {
  int64_t all = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    all += (*results.get<xffi::AnyBuffer>(i).value()).element_count();
  }
  if (all == elements) return 1;
  if (elements <= 0 || all % elements != 0) {
    throw std::invalid_argument("results have " + std::to_string(all) +
                                " elements, want a multiple of " +
                                std::to_string(elements));
  }
  return all / elements;
}

xffi::Error Step(xffi::Span<const int64_t> numbers, xffi::Span<const double> constants,
                 int64_t steps, int64_t batch, int64_t capacity, bool reverse,
                 bool lengths, bool wide, int64_t elements,
                 xffi::RemainingArgs arguments, xffi::RemainingRets results) {
  const cpu::StepProgram program = cpu::DecodeProgram(numbers.begin(), numbers.size());
  cpu::StepCall call{program,
                     constants.begin(),
                     static_cast<int64_t>(constants.size()),
                     {},
                     {},
                     steps,
                     batch,
                     reverse,
                     nullptr,
                     capacity};
  cpu::StepMembers members{MembersOf(results, elements), {}, false};
  if (members.count == 0) return xffi::Error::Success();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto buffer = arguments.get<xffi::AnyBuffer>(i).value();
    const bool own = members.count > 1 && buffer.dimensions().size() > 0 &&
                     buffer.dimensions()[0] == members.count;
    call.operands.push_back(ArrayOf(buffer, own ? members.count : 1));
    members.own_operands.push_back(own);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    const auto buffer = *results.get<xffi::AnyBuffer>(i).value();
    call.results.push_back(ArrayOf(buffer, members.count));
  }
  if (lengths) {  // the last operand
    if (call.operands.empty() || call.operands.back().elements != batch ||
        call.operands.back().bytes != sizeof(int32_t)) {
      throw std::invalid_argument("lengths must be int32 [" + std::to_string(batch) +
                                  "]");
    }
    call.lengths = static_cast<const int32_t*>(call.operands.back().data);
    call.operands.pop_back();
    members.own_lengths = members.own_operands.back();
    members.own_operands.pop_back();
  }
  if (wide) {
    cpu::RunMembers<double>(call, members);
  } else {
    cpu::RunMembers<float>(call, members);
  }
  return xffi::Error::Success();
}

}  // namespace
}  // namespace ostinato::ffi

OSTINATO_FFI_HANDLER(ostinato_step, ostinato::ffi::Step,
                     ostinato::ffi::xffi::Ffi::Bind()
                         .Attr<ostinato::ffi::xffi::Span<const int64_t>>("program")
                         .Attr<ostinato::ffi::xffi::Span<const double>>("constants")
                         .Attr<int64_t>("steps")
                         .Attr<int64_t>("batch")
                         .Attr<int64_t>("capacity")
                         .Attr<bool>("reverse")
                         .Attr<bool>("lengths")
                         .Attr<bool>("wide")
                         .Attr<int64_t>("elements")
                         .RemainingArgs()
                         .RemainingRets());

// The names of the operations in the order of their numbers, apart by spaces.
extern "C" OSTINATO_EXPORT const char* ostinato_step_operations() {
#define OSTINATO_STEP_NAME(name, operands) #name " "
  return OSTINATO_STEP_OPERATIONS(OSTINATO_STEP_NAME);
#undef OSTINATO_STEP_NAME
}
