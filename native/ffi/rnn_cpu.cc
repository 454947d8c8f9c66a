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

// What the operands of one member point to.
struct OperandStorage {
  cpu::Placement placement;
  std::vector<const uint8_t*> dropout_masks;
};

// The operands of one member. `storage` outlives the result.
template <typename Storage>
cpu::Operands<Storage> TakeOperands(const CallAttributes& call,
                                    const CallBuffers& buffers, OperandStorage& storage,
                                    TupleReader& operands) {
  const cpu::Network& n = call.network;
  const int64_t tokens = buffers.tokens;
  const int64_t states = n.pseudo_layers() * buffers.batch;
  cpu::Operands<Storage> in{};
  in.network = n;
  in.steps = buffers.steps;
  in.batch = buffers.batch;
  in.tokens = tokens;
  in.weights = operands.Take<Storage>("weights", cpu::NumParams(n));
  in.x = operands.Take<Storage>("x", tokens * n.input_size);
  in.h_0 = operands.Take<Storage>("states", states * n.output_size());
  for (int64_t s = 0; s < n.cells(); ++s) {
    in.c_0[s] = operands.Take<Storage>("states", states * n.hidden_size);
  }
  if (operands.Has("seq_lengths")) {
    in.seq_lengths = operands.Take<int32_t>("seq_lengths", buffers.batch);
  }
  if (call.packed_buffers > 0) {
    const auto* segment_lengths =
        operands.Take<int32_t>("segment_lengths", buffers.batch);
    storage.placement =
        cpu::Placement::Packed(tokens, call.packed_buffers, in.steps, in.batch,
                               segment_lengths, in.seq_lengths);
  } else {
    storage.placement = cpu::Placement::Padded(in.steps, in.batch, call.time_major);
  }
  storage.placement.PutInto(in);
  if (operands.Has("resets")) in.resets = operands.Take<uint8_t>("resets", tokens);
  if (operands.Has("dropout_masks")) {
    for (int64_t l = 0; l + 1 < n.num_layers; ++l) {
      storage.dropout_masks.push_back(
          operands.Take<uint8_t>("dropout_masks", tokens * n.width()));
    }
    in.dropout_masks = storage.dropout_masks.data();
  }
  return in;
}

struct SavedCounts {
  int64_t hidden, gates, cells;
};

SavedCounts CountsOf(const CallAttributes& call) {
  const cpu::Network& n = call.network;
  const bool gates = n.saved_blocks() > 0 && !call.recompute;
  return {n.num_layers - 1, gates ? n.pseudo_layers() : 0,
          n.cells() * n.pseudo_layers()};
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
    Cursor arguments{buffers.arguments, buffers.argument_counts, member};
    Cursor results{buffers.results, buffers.result_counts, member};
    TupleReader operands(kOperands, arguments);
    TupleReader outputs(kOutputs, results);
    OperandStorage storage;
    std::vector<Storage*> hidden, gates;
    std::vector<Accum*> cells;
    cpu::ForwardCall<Storage, Accum> to{};
    to.operands = TakeOperands<Storage>(call, buffers, storage, operands);
    if (operands.Has("prepared")) {
      to.prepared_bytes = operands.Next("prepared").elements;
      to.prepared = operands.Take<uint8_t>("prepared", to.prepared_bytes);
    }
    operands.End();
    to.y = outputs.Take<Storage>("y", tokens * n.width());
    to.h_n = outputs.Take<Storage>("states", states * n.output_size());
    for (int64_t s = 0; s < n.cells(); ++s) {
      to.c_n[s] = outputs.Take<Storage>("states", states * n.hidden_size);
    }
    outputs.End();
    if (call.save) {
      TupleReader saved(kSaved, results);
      const SavedCounts counts = CountsOf(call);
      const int64_t units = tokens * n.hidden_size;
      to.hidden = saved.TakeEach("hidden", counts.hidden, tokens * n.width(), hidden);
      to.gates = saved.TakeEach("gates", counts.gates, n.saved_blocks() * units, gates);
      to.cells = saved.TakeEach("states", counts.cells, units, cells);
      saved.End();
    }
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
    Cursor arguments{buffers.arguments, buffers.argument_counts, member};
    Cursor results{buffers.results, buffers.result_counts, member};
    TupleReader operands(kOperands, arguments);
    TupleReader residuals(kResiduals, arguments);
    TupleReader cotangents(kOutputs, arguments);
    TupleReader gradients(kGradients, results);
    OperandStorage storage;
    std::vector<const Storage*> hidden, gates;
    std::vector<const Accum*> cells;
    const SavedCounts counts = CountsOf(call);
    const int64_t units = tokens * n.hidden_size;
    cpu::BackwardCall<Storage, Accum> to{};
    to.operands = TakeOperands<Storage>(call, buffers, storage, operands);
    operands.End();
    to.y = residuals.Take<Storage>("y", tokens * n.width());
    to.hidden =
        residuals.TakeEach("saved.hidden", counts.hidden, tokens * n.width(), hidden);
    to.gates = residuals.TakeEach("saved.gates", counts.gates, n.saved_blocks() * units,
                                  gates);
    to.cells = residuals.TakeEach("saved.states", counts.cells, units, cells);
    residuals.End();
    to.dy = cotangents.Take<Storage>("y", tokens * n.width());
    to.dh_n = cotangents.Take<Storage>("states", states * n.output_size());
    for (int64_t s = 0; s < n.cells(); ++s) {
      to.dc_n[s] = cotangents.Take<Storage>("states", states * n.hidden_size);
    }
    cotangents.End();
    if (gradients.Has("weights")) {
      to.dweights = gradients.Take<Storage>("weights", cpu::NumParams(n));
    }
    if (gradients.Has("x")) to.dx = gradients.Take<Storage>("x", tokens * n.input_size);
    if (buffers.WantsState(0)) {
      to.dh_0 = gradients.Take<Storage>("states", states * n.output_size());
    }
    for (int64_t s = 0; s < n.cells(); ++s) {
      if (!buffers.WantsState(1 + s)) continue;
      to.dc_0[s] = gradients.Take<Storage>("states", states * n.hidden_size);
    }
    gradients.End();
    cpu::RunBackward(to, team);
  });
}

template <typename Storage>
void Prepare(const CallAttributes& call, const CallBuffers& buffers) {
  const cpu::Network& n = call.network;
  for (int64_t member = 0; member < buffers.members; ++member) {
    Cursor arguments{buffers.arguments, buffers.argument_counts, member};
    TupleReader operands(kOperands, arguments);
    const Arrays::Array& result = buffers.results[0];
    if (result.elements != cpu::PreparedBytes<Storage>(n)) {
      throw std::invalid_argument("the result has another size than prepared weights");
    }
    cpu::Team team(cpu::NumThreads());
    cpu::PackWeights(n, operands.Take<Storage>("weights", cpu::NumParams(n)),
                     result.data + member * result.member_bytes, team);
  }
}

using Operation = void (*)(const CallAttributes& call, const CallBuffers& buffers);

template <Operation kFloat, Operation kDouble, Operation kBFloat16>
xffi::Error Dispatch(const xffi::Dictionary& attributes, xffi::RemainingArgs arguments,
                     xffi::RemainingRets results) {
  const CallAttributes call = DecodeAttributes(attributes);
  const CallBuffers buffers = DecodeBuffers(call, attributes, arguments, results);
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
constexpr auto RnnPack = Dispatch<Prepare<float>, Prepare<double>, Prepare<BFloat16>>;

cpu::Network NetworkOf(const int64_t* integers) {
  CallAttributes call{};
  for (const auto& attribute : kIntegers) attribute.set(call, *integers++);
  return call.network;
}

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

extern "C" OSTINATO_EXPORT void ostinato_configure(int32_t isa,
                                                   int32_t threads) noexcept try {
  ostinato::cpu::SetIsaCap(static_cast<ostinato::cpu::Isa>(isa));
  ostinato::cpu::SetNumThreads(threads > 0 ? threads : ostinato::cpu::UsableCpus());
} catch (const std::exception&) {  // without memory to read the quota: one thread
  ostinato::cpu::SetNumThreads(1);
}

// Why kernels for avx512_amx cannot run here; null if they can.
extern "C" OSTINATO_EXPORT const char* ostinato_why_no_tiles() {
  return ostinato::cpu::WhyNoTiles();
}

// For our tests: see dispatch.h.
extern "C" OSTINATO_EXPORT void ostinato_use_tiles(const void* kernels) {
  ostinato::cpu::UseTiles(static_cast<const ostinato::cpu::KernelsBf16Pairs*>(kernels));
}

// Bytes of prepared weights; `integers` are those of a call, `dtype` is an index of
// kDtypes. -1 where the integers make no sense.
extern "C" OSTINATO_EXPORT int64_t
ostinato_prepared_bytes(int32_t dtype, const int64_t* integers) noexcept try {
  const ostinato::cpu::Network network = ostinato::ffi::NetworkOf(integers);
  switch (dtype) {
    case 0:
      return ostinato::cpu::PreparedBytes<float>(network);
    case 1:
      return ostinato::cpu::PreparedBytes<double>(network);
    default:
      return ostinato::cpu::PreparedBytes<ostinato::cpu::BFloat16>(network);
  }
} catch (...) {
  return -1;
}

// Whether so many bytes are prepared weights as this machine reads them.
extern "C" OSTINATO_EXPORT bool ostinato_is_prepared(int32_t dtype,
                                                     const int64_t* integers,
                                                     const void* memory,
                                                     int64_t bytes) noexcept try {
  const ostinato::cpu::Network network = ostinato::ffi::NetworkOf(integers);
  switch (dtype) {
    case 0:
      return ostinato::cpu::IsPrepared<float>(network, memory, bytes);
    case 1:
      return ostinato::cpu::IsPrepared<double>(network, memory, bytes);
    default:
      return ostinato::cpu::IsPrepared<ostinato::cpu::BFloat16>(network, memory, bytes);
  }
} catch (...) {
  return false;
}
