#include <vector>

#include "cpu/kernels/dispatch.h"
#include "cpu/network/placement.h"
#include "cpu/pass/backward.h"
#include "cpu/pass/forward.h"
#include "cpu/pass/schedule.h"
#include "cpu/runtime/fp_state.h"
#include "cpu/runtime/team.h"
#include "ffi/handler.h"
#include "ffi/rnn_call.h"

namespace ostinato::ffi {
namespace {

using cpu::BFloat16;
using Reader = Pieces::Reader;

// What the operands of one member point to.
struct Kept {
  cpu::Placement placement;
  std::vector<const uint8_t*> dropout_masks;
};

// The arguments of one member that forward and backward have in common. `kept`
// outlives the result.
template <typename Storage>
cpu::Operands<Storage> TakeOperands(const CallAttributes& call,
                                    const CallBuffers& buffers, Kept& kept,
                                    Reader& arguments) {
  const cpu::Network& n = call.network;
  const int64_t tokens = buffers.tokens;
  const int64_t states = n.pseudo_layers() * buffers.batch;
  cpu::Operands<Storage> in{};
  in.network = n;
  in.steps = buffers.steps;
  in.batch = buffers.batch;
  in.tokens = tokens;
  in.weights = arguments.Take<Storage>("weights", cpu::NumParams(n));
  in.x = arguments.Take<Storage>("x", tokens * n.input_size);
  in.h_0 = arguments.Take<Storage>("h_0", states * n.output_size());
  if (n.lstm()) in.c_0 = arguments.Take<Storage>("c_0", states * n.hidden_size);
  if (call.has_lengths) {
    in.seq_lengths = arguments.Take<int32_t>("seq_lengths", buffers.batch);
  }
  if (call.packed_buffers > 0) {
    const auto* segment_lengths =
        arguments.Take<int32_t>("segment_lengths", buffers.batch);
    kept.placement = cpu::Placement::Packed(tokens, call.packed_buffers, in.steps,
                                         in.batch, segment_lengths, in.seq_lengths);
  } else {
    kept.placement = cpu::Placement::Padded(in.steps, in.batch, call.time_major);
  }
  kept.placement.PutInto(in);
  if (call.has_resets) in.resets = arguments.Take<uint8_t>("resets", tokens);
  if (call.has_keep) {
    for (int64_t l = 0; l + 1 < n.num_layers; ++l) {
      kept.dropout_masks.push_back(
          arguments.Take<uint8_t>("dropout_masks", tokens * n.width()));
    }
    in.dropout_masks = kept.dropout_masks.data();
  }
  return in;
}

// `count` buffers of the same size in a row; null for none.
template <typename T>
T* const* TakeEach(Reader& reader, const char* name, int64_t count, int64_t elements,
                   std::vector<T*>& found) {
  for (int64_t i = 0; i < count; ++i) found.push_back(reader.Take<T>(name, elements));
  return count > 0 ? found.data() : nullptr;
}

struct SavedCounts {
  int64_t hidden, gates, cells;
};

SavedCounts CountsOf(const CallAttributes& call) {
  const cpu::Network& n = call.network;
  const bool gates = n.saved_blocks() > 0 && !call.recompute;
  return {n.num_layers - 1, gates ? n.pseudo_layers() : 0,
          n.lstm() ? n.pseudo_layers() : 0};
}

// body(member, team) for every member, each on threads of its own where there are
// enough.
template <typename Body>
void ForEachMember(const CallAttributes& call, const CallBuffers& buffers,
                   const Body& body) {
  const cpu::FlushDenormals flush;
  cpu::CostModel cost = cpu::CostModelOf(call.network, buffers.tokens, buffers.batch);
  cost.all *= buffers.members;
  cpu::Team team(cpu::ThreadsFor(cost));
  if (buffers.members >= 2 && buffers.members >= team.threads()) {
    team.ForEach(buffers.members, [&](int64_t member) {
      cpu::Team alone(1);
      body(member, alone);
    });
    return;
  }
  for (int64_t member = 0; member < buffers.members; ++member) body(member, team);
}

template <typename Storage, typename Accum>
void Forward(const CallAttributes& call, const CallBuffers& buffers) {
  if (buffers.batch == 0) return buffers.results.Zero();
  const cpu::Network& n = call.network;
  const int64_t tokens = buffers.tokens;
  const int64_t states = n.pseudo_layers() * buffers.batch;
  ForEachMember(call, buffers, [&](int64_t member, cpu::Team& team) {
    Reader arguments(buffers.arguments, member, "argument");
    Reader results(buffers.results, member, "result");
    Kept kept;
    std::vector<Storage*> hidden, gates;
    std::vector<Accum*> cells;
    cpu::ForwardCall<Storage, Accum> to{};
    to.operands = TakeOperands<Storage>(call, buffers, kept, arguments);
    if (call.has_packed) {
      to.prepared_bytes = arguments.elements_of_next();
      to.prepared = arguments.Take<uint8_t>("packed", to.prepared_bytes);
    }
    arguments.End();
    to.y = results.Take<Storage>("y", tokens * n.width());
    to.h_n = results.Take<Storage>("h_n", states * n.output_size());
    if (n.lstm()) to.c_n = results.Take<Storage>("c_n", states * n.hidden_size);
    if (call.save) {
      const SavedCounts counts = CountsOf(call);
      const int64_t hidden_size = tokens * n.hidden_size;
      to.hidden =
          TakeEach(results, "hidden", counts.hidden, tokens * n.width(), hidden);
      to.gates = TakeEach(results, "gates", counts.gates,
                          n.saved_blocks() * hidden_size, gates);
      to.cells = TakeEach(results, "cells", counts.cells, hidden_size, cells);
    }
    results.End();
    cpu::RunForward(to, team);
  });
}

template <typename Storage, typename Accum>
void Backward(const CallAttributes& call, const CallBuffers& buffers) {
  if (buffers.batch == 0) return buffers.results.Zero();
  const cpu::Network& n = call.network;
  const int64_t tokens = buffers.tokens;
  const int64_t states = n.pseudo_layers() * buffers.batch;
  ForEachMember(call, buffers, [&](int64_t member, cpu::Team& team) {
    Reader arguments(buffers.arguments, member, "argument");
    Reader results(buffers.results, member, "result");
    Kept kept;
    std::vector<const Storage*> hidden, gates;
    std::vector<const Accum*> cells;
    const SavedCounts counts = CountsOf(call);
    const int64_t hidden_size = tokens * n.hidden_size;
    cpu::BackwardCall<Storage, Accum> to{};
    to.operands = TakeOperands<Storage>(call, buffers, kept, arguments);
    to.y = arguments.Take<Storage>("y", tokens * n.width());
    to.hidden =
        TakeEach(arguments, "hidden", counts.hidden, tokens * n.width(), hidden);
    to.gates = TakeEach(arguments, "gates", counts.gates,
                        n.saved_blocks() * hidden_size, gates);
    to.cells = TakeEach(arguments, "cells", counts.cells, hidden_size, cells);
    to.dy = arguments.Take<Storage>("dy", tokens * n.width());
    to.dh_n = arguments.Take<Storage>("dh_n", states * n.output_size());
    if (n.lstm()) to.dc_n = arguments.Take<Storage>("dc_n", states * n.hidden_size);
    arguments.End();
    if (call.wants_weights) {
      to.dweights = results.Take<Storage>("dweights", cpu::NumParams(n));
    }
    if (call.wants_x) to.dx = results.Take<Storage>("dx", tokens * n.input_size);
    if (call.wants_h_0)
      to.dh_0 = results.Take<Storage>("dh_0", states * n.output_size());
    if (call.wants_c_0) to.dc_0 = results.Take<Storage>("dc_0", states * n.hidden_size);
    results.End();
    cpu::RunBackward(to, team);
  });
}

template <typename Storage>
void Pack(const CallAttributes& call, const CallBuffers& buffers) {
  for (int64_t member = 0; member < buffers.members; ++member) {
    Reader arguments(buffers.arguments, member, "argument");
    Reader results(buffers.results, member, "result");
    cpu::Team team(cpu::NumThreads());
    cpu::PackWeights(
        call.network, arguments.Take<Storage>("weights", cpu::NumParams(call.network)),
        results.Take<uint8_t>("packed", cpu::PreparedBytes<Storage>(call.network)),
        team);
  }
}

using Operation = void (*)(const CallAttributes& call, const CallBuffers& buffers);

template <Operation kFloat, Operation kDouble, Operation kBFloat16>
xffi::Error Dispatch(const xffi::Dictionary& attributes, xffi::RemainingArgs arguments,
                     xffi::RemainingRets results) {
  const CallAttributes call = DecodeAttributes(attributes);
  const CallBuffers buffers = DecodeBuffers(call, arguments, results);
  switch (buffers.dtype) {
    case xffi::DataType::F32:
      kFloat(call, buffers);
      break;
    case xffi::DataType::F64:
      kDouble(call, buffers);
      break;
    case xffi::DataType::BF16:
      kBFloat16(call, buffers);
      break;
    default:
      throw std::invalid_argument("weights must be float32, float64 or bfloat16");
  }
  return xffi::Error::Success();
}

constexpr auto RnnForward =
    Dispatch<Forward<float, float>, Forward<double, double>, Forward<BFloat16, float>>;
constexpr auto RnnBackward = Dispatch<Backward<float, float>, Backward<double, double>,
                                      Backward<BFloat16, float>>;
constexpr auto RnnPack = Dispatch<Pack<float>, Pack<double>, Pack<BFloat16>>;

auto Binding() { return xffi::Ffi::Bind().Attrs().RemainingArgs().RemainingRets(); }

}  // namespace
}  // namespace ostinato::ffi

OSTINATO_FFI_HANDLER(ostinato_rnn_fwd, ostinato::ffi::RnnForward,
                     ostinato::ffi::Binding());
OSTINATO_FFI_HANDLER(ostinato_rnn_bwd, ostinato::ffi::RnnBackward,
                     ostinato::ffi::Binding());
OSTINATO_FFI_HANDLER(ostinato_rnn_pack, ostinato::ffi::RnnPack,
                     ostinato::ffi::Binding());

// Called through ctypes: settings, and what has to be known before a call.

extern "C" OSTINATO_EXPORT void ostinato_configure(int32_t isa, int32_t threads) {
  ostinato::cpu::SetIsaCap(static_cast<ostinato::cpu::Isa>(isa));
  ostinato::cpu::SetNumThreads(threads > 0 ? threads : ostinato::cpu::UsableCpus());
}

// Why kernels for avx512_amx cannot run here; null if they can.
extern "C" OSTINATO_EXPORT const char* ostinato_why_no_tiles() {
  return ostinato::cpu::WhyNoTiles();
}

// For our tests: see settings.h.
extern "C" OSTINATO_EXPORT void ostinato_use_tiles(const void* kernels) {
  ostinato::cpu::UseTiles(static_cast<const ostinato::cpu::KernelsBf16Pairs*>(kernels));
}

extern "C" OSTINATO_EXPORT int64_t
ostinato_packed_bytes(int32_t dtype, int64_t mode, int64_t input_size,
                      int64_t hidden_size, int64_t num_layers, int64_t num_directions,
                      int64_t proj_size, int64_t bias, int64_t skip) {
  ostinato::cpu::Network n{};
  n.mode = static_cast<ostinato::cpu::Mode>(mode);
  n.input_size = input_size;
  n.hidden_size = hidden_size;
  n.num_layers = num_layers;
  n.num_directions = num_directions;
  n.proj_size = proj_size;
  n.bias_ih = (bias & 1) != 0;
  n.bias_hh = (bias & 2) != 0;
  n.skip = skip != 0;
  switch (dtype) {
    case 0:
      return ostinato::cpu::PreparedBytes<float>(n);
    case 1:
      return ostinato::cpu::PreparedBytes<double>(n);
    default:
      return ostinato::cpu::PreparedBytes<ostinato::cpu::BFloat16>(n);
  }
}
