// The handler that runs a loop over the steps of a program.
#include <stdexcept>
#include <string>

#include "cpu/kernels/step_kernels.h"
#include "cpu/step/loop.h"
#include "cpu/step/program.h"
#include "ffi/handler.h"

namespace ostinato::ffi {
namespace {

namespace xffi = ::xla::ffi;

cpu::StepArray ArrayOf(const xffi::AnyBuffer& buffer) {
  return {buffer.untyped_data(), static_cast<int64_t>(buffer.element_count()),
          static_cast<int64_t>(xffi::ByteWidth(buffer.element_type()))};
}

xffi::Error Step(xffi::Span<const int64_t> numbers, xffi::Span<const double> constants,
                 int64_t steps, int64_t batch, int64_t capacity, bool reverse,
                 bool lengths, bool wide, xffi::RemainingArgs arguments,
                 xffi::RemainingRets results) {
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
  for (size_t i = 0; i < arguments.size(); ++i) {
    call.operands.push_back(ArrayOf(arguments.get<xffi::AnyBuffer>(i).value()));
  }
  for (size_t i = 0; i < results.size(); ++i) {
    call.results.push_back(ArrayOf(*results.get<xffi::AnyBuffer>(i).value()));
  }
  if (lengths) {  // the last operand
    if (call.operands.empty() || call.operands.back().elements != batch ||
        call.operands.back().bytes != sizeof(int32_t)) {
      throw std::invalid_argument("lengths must be int32 [" + std::to_string(batch) +
                                  "]");
    }
    call.lengths = static_cast<const int32_t*>(call.operands.back().data);
    call.operands.pop_back();
  }
  if (wide) {
    cpu::RunSteps<double>(call);
  } else {
    cpu::RunSteps<float>(call);
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
                         .RemainingArgs()
                         .RemainingRets());

// The names of the operations in the order of their numbers, apart by spaces.
extern "C" OSTINATO_EXPORT const char* ostinato_step_operations() {
#define OSTINATO_STEP_NAME(name, operands) #name " "
  return OSTINATO_STEP_OPERATIONS(OSTINATO_STEP_NAME);
#undef OSTINATO_STEP_NAME
}
