#include "ffi/rnn_call.h"

#include <algorithm>
#include <limits>

namespace ostinato::ffi {
namespace {

template <typename T>
T Get(const xffi::Dictionary& attributes, const char* name) {
  auto value = attributes.get<T>(name);
  if (!value.has_value()) throw std::invalid_argument(value.error().message());
  return *value;
}

constexpr bool HasBit(int64_t word, int bit) { return (word >> bit & 1) != 0; }

}  // namespace

CallAttributes DecodeAttributes(const xffi::Dictionary& attributes) {
  const auto integer = [&](const char* name) { return Get<int64_t>(attributes, name); };
  CallAttributes call{};
  cpu::Network& n = call.network;
  n.mode = static_cast<cpu::Mode>(integer("mode"));
  n.input_size = integer("input_size");
  n.hidden_size = integer("hidden_size");
  n.num_layers = integer("num_layers");
  n.num_directions = integer("num_directions");
  n.proj_size = integer("proj_size");
  const int64_t bias = integer("bias");
  n.bias_ih = HasBit(bias, 0);
  n.bias_hh = HasBit(bias, 1);
  n.skip = integer("skip") != 0;
  n.cell_clip = Get<double>(attributes, "cell_clip");
  n.clip_nan = integer("clip_nan") != 0;
  n.batch_invariant = integer("batch_invariant") != 0;
  n.clips = n.clip_nan || n.cell_clip < std::numeric_limits<double>::infinity();
  n.dropout_scale = Get<double>(attributes, "dropout_scale");
  call.time_major = integer("time_major") != 0;
  call.packed_buffers = integer("packed_buffers");
  call.max_length = integer("max_length");
  call.save = integer("save") != 0;
  call.recompute = integer("recompute") != 0;
  const int64_t operands = integer("operands");
  call.has_lengths = HasBit(operands, 0);
  call.has_resets = HasBit(operands, 1);
  call.has_keep = HasBit(operands, 2);
  call.has_packed = HasBit(operands, 3);
  const int64_t wrt = integer("wrt");
  call.wants_weights = HasBit(wrt, 0);
  call.wants_x = HasBit(wrt, 1);
  call.wants_h_0 = HasBit(wrt, 2);
  call.wants_c_0 = HasBit(wrt, 3);
  const auto in_ensemble = Get<xffi::Span<const int64_t>>(attributes, "ensemble");
  call.in_ensemble.assign(in_ensemble.begin(), in_ensemble.end());
  return call;
}

CallBuffers DecodeBuffers(const CallAttributes& call, xffi::RemainingArgs arguments,
                          xffi::RemainingRets results) {
  if (arguments.size() != call.in_ensemble.size()) {
    throw std::invalid_argument("`ensemble` must have an entry per argument");
  }
  CallBuffers found{};
  found.members = 1;
  bool any = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const xffi::AnyBuffer buffer = arguments.get<xffi::AnyBuffer>(i).value();
    const auto dimensions = buffer.dimensions();
    const bool in_ensemble = call.in_ensemble[i] != 0;
    if (in_ensemble) {
      found.members = dimensions[0];
      any = true;
    }
    if (i == 0) found.dtype = buffer.element_type();
    if (i == 1 && call.packed_buffers == 0) {  // x
      found.steps = dimensions[in_ensemble + (call.time_major ? 0 : 1)];
      found.batch = dimensions[in_ensemble + (call.time_major ? 1 : 0)];
      found.tokens = found.steps * found.batch;
    }
    if (i == 1 && call.packed_buffers > 0) {
      found.steps = call.max_length;
      found.tokens = dimensions[in_ensemble];
    }
    if (i == 2 && call.packed_buffers > 0)
      found.batch = dimensions[in_ensemble + 1];  // h_0
    found.arguments.Add(buffer.untyped_data(), buffer.element_count(),
                        buffer.size_bytes(),
                        in_ensemble ? std::max<int64_t>(1, dimensions[0]) : 1);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    auto buffer = results.get<xffi::AnyBuffer>(i).value();
    found.results.Add(buffer->untyped_data(), buffer->element_count(),
                      buffer->size_bytes(),
                      any ? std::max<int64_t>(1, found.members) : 1);
  }
  if (call.packed_buffers > 0 &&
      (found.batch % call.packed_buffers != 0 ||
       found.tokens % call.packed_buffers != 0 || found.steps < 0)) {
    throw std::invalid_argument(
        "`packed_buffers` must divide the rows and the tokens of x");
  }
  return found;
}

}  // namespace ostinato::ffi
