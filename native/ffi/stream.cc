// Steps of streams on buffers of the caller, without XLA: called through ctypes.
#include <exception>
#include <stdexcept>
#include <string>

#include "cpu/network/placement.h"
#include "cpu/pass/forward.h"
#include "cpu/pass/schedule.h"
#include "cpu/runtime/fp_state.h"
#include "cpu/runtime/team.h"
#include "ffi/contract.h"
#include "ffi/handler.h"

namespace ostinato::ffi {
namespace {

template <typename Storage, typename Accum>
void RunStream(const StreamCall& call) {
  cpu::ForwardCall<Storage, Accum> to{};
  to.operands.network = AttributesOf(call.integers, call.reals).network;
  to.operands.steps = call.steps;
  to.operands.batch = call.batch;
  to.operands.tokens = call.steps * call.batch;
  to.operands.weights = static_cast<const Storage*>(call.weights);
  to.operands.x = static_cast<const Storage*>(call.x);
  to.operands.h_0 = static_cast<const Storage*>(call.h);
  to.operands.seq_lengths = call.seq_lengths;
  const auto placement = cpu::Placement::Padded(call.steps, call.batch, false);
  placement.PutInto(to.operands);
  to.prepared = call.prepared;
  to.prepared_bytes = call.prepared_bytes;
  to.y = static_cast<Storage*>(call.y);
  // A layer takes the initial states of its sequences before it writes the final ones,
  // so both may be in one place.
  to.h_n = static_cast<Storage*>(call.h);
  for (int64_t s = 0; s < to.operands.network.cells(); ++s) {
    to.operands.c_0[s] = static_cast<const Storage*>(call.cells(s));
    to.c_n[s] = static_cast<Storage*>(call.cells(s));
  }
  const cpu::FlushDenormals flush;
  cpu::Team team(cpu::ThreadsFor(
      cpu::CostModelOf(to.operands.network, to.operands.tokens, call.batch)));
  cpu::RunForward(to, team);
}

void Run(const StreamCall& call) {
  if (call.steps == 0 || call.batch == 0) return;
  switch (call.dtype) {
    case 0:
      return RunStream<float, float>(call);
    case 1:
      return RunStream<double, double>(call);
    case 2:
      return RunStream<cpu::BFloat16, float>(call);
    default:
      throw std::invalid_argument("there are no kernels for dtype " +
                                  std::to_string(call.dtype));
  }
}

}  // namespace
}  // namespace ostinato::ffi

// Returns null, or what went wrong: text that is valid until the thread's next call.
extern "C" OSTINATO_EXPORT const char* ostinato_stream(
    const ostinato::ffi::StreamCall* call) noexcept {
  thread_local std::string message;
  try {
    ostinato::ffi::Run(*call);
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}
