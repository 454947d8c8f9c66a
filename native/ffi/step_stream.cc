// Step programs on buffers of the caller, without XLA: called through ctypes.
//
// A session has the program and the packed weights. Functions return null, or what went
// wrong: text that is valid until the thread's next call.
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "cpu/step/loop.h"
#include "cpu/step/program.h"
#include "ffi/handler.h"

namespace ostinato::ffi {
namespace {

// What session.py fills in, 8 bytes a field.
struct StepStreamCall {
  const int64_t* numbers;  // of the program
  int64_t num_numbers;
  const double* constants;
  int64_t num_constants;
  int64_t wide;  // whether it computes in double
  int64_t steps, batch;
  const int32_t* lengths;  // [batch], or null: all steps of every sequence
  const cpu::StepArray* operands;
  int64_t num_operands;
  const cpu::StepArray* results;
  int64_t num_results;
};
static_assert(sizeof(StepStreamCall) == 12 * 8 && sizeof(cpu::StepArray) == 3 * 8);

class StepSession {
 public:
  // Decodes the program of `call`, and packs the weights among its operands.
  explicit StepSession(const StepStreamCall& call)
      : program_(cpu::DecodeProgram(call.numbers, call.num_numbers)) {
    const cpu::StepCall first = CallOf(call);
    if (call.wide != 0) {
      wide_.emplace(first);
    } else {
      narrow_.emplace(first);
    }
  }

  void Run(const StepStreamCall& call) const {
    if (call.steps == 0) return;
    if (wide_) {
      cpu::RunSteps<double>(CallOf(call), &*wide_);
    } else {
      cpu::RunSteps<float>(CallOf(call), &*narrow_);
    }
  }

 private:
  cpu::StepCall CallOf(const StepStreamCall& call) const {
    return {program_,
            call.constants,
            call.num_constants,
            {call.operands, call.operands + call.num_operands},
            {call.results, call.results + call.num_results},
            call.steps,
            call.batch,
            false,
            call.lengths};
  }

  const cpu::StepProgram program_;
  std::optional<cpu::StepPanels<float>> narrow_;
  std::optional<cpu::StepPanels<double>> wide_;
};

template <typename Call>
const char* MessageOf(const Call& call) noexcept {
  thread_local std::string message;
  try {
    call();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace
}  // namespace ostinato::ffi

extern "C" OSTINATO_EXPORT const char* ostinato_step_open(
    const ostinato::ffi::StepStreamCall* call, void** session) noexcept {
  return ostinato::ffi::MessageOf(
      [&] { *session = new ostinato::ffi::StepSession(*call); });
}

extern "C" OSTINATO_EXPORT const char* ostinato_step_run(
    const void* session, const ostinato::ffi::StepStreamCall* call) noexcept {
  return ostinato::ffi::MessageOf(
      [&] { static_cast<const ostinato::ffi::StepSession*>(session)->Run(*call); });
}

extern "C" OSTINATO_EXPORT void ostinato_step_close(void* session) noexcept {
  delete static_cast<ostinato::ffi::StepSession*>(session);
}
