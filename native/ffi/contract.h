// All names, orders and numbers that this library and cpu.py have to agree on. They are
// written down once on this side: here, in kModes of network.h and in kIsaNames of
// features.h. cpu.py compares Contract() with its own tables before its first call.
#ifndef OSTINATO_FFI_CONTRACT_H_
#define OSTINATO_FFI_CONTRACT_H_

#include <array>
#include <cstdint>
#include <iterator>
#include <string>

#include "cpu/network/network.h"

namespace ostinato::ffi {

// A named tuple of call.py. A call has its arrays in the order of these fields; each
// field stands for as many arrays as the call's attributes say, or for none.
struct Tuple {
  const char* name;
  std::array<const char*, 8> fields;  // null after the last

  constexpr int64_t size() const {
    int64_t count = 0;
    for (const char* field : fields) count += field != nullptr;
    return count;
  }
};

// ostinato_prepared_bytes takes an index of this.
inline constexpr const char* kDtypes[] = {"float32", "float64", "bfloat16"};

inline constexpr Tuple kOperands{
    "operands",
    {"weights", "x", "states", "seq_lengths", "segment_lengths", "resets",
     "dropout_masks", "prepared"}};
inline constexpr Tuple kOutputs{"outputs", {"y", "states"}};
inline constexpr Tuple kSaved{"saved", {"hidden", "gates", "states"}};
inline constexpr Tuple kResiduals{"residuals",
                                  {"y", "saved.hidden", "saved.gates", "saved.states"}};
inline constexpr Tuple kGradients{"gradients", {"weights", "x", "states"}};

// The static side of a call.
struct CallAttributes {
  cpu::Network network;
  bool time_major, save, recompute;
  int64_t packed_buffers;  // of packed sequences; 0: [B, T, ...] or [T, B, ...]
  int64_t max_length;      // of packed sequences
};

// The attribute `integers` of a call is an array in the order of kIntegers, `reals` in
// that of kReals.
template <typename Value>
struct Attribute {
  const char* name;
  void (*set)(CallAttributes& call, Value value);
};

inline constexpr Attribute<int64_t> kIntegers[] = {
    {"mode", [](auto& c, int64_t v) { c.network.mode = cpu::ModeOf(v); }},
    {"input_size", [](auto& c, int64_t v) { c.network.input_size = v; }},
    {"hidden_size", [](auto& c, int64_t v) { c.network.hidden_size = v; }},
    {"num_layers", [](auto& c, int64_t v) { c.network.num_layers = v; }},
    {"num_directions", [](auto& c, int64_t v) { c.network.num_directions = v; }},
    {"proj_size", [](auto& c, int64_t v) { c.network.proj_size = v; }},
    {"num_heads", [](auto& c, int64_t v) { c.network.num_heads = v; }},
    {"bias_ih", [](auto& c, int64_t v) { c.network.bias_ih = v != 0; }},
    {"bias_hh", [](auto& c, int64_t v) { c.network.bias_hh = v != 0; }},
    {"skip", [](auto& c, int64_t v) { c.network.skip = v != 0; }},
    {"clip_nan", [](auto& c, int64_t v) { c.network.clip_nan = v != 0; }},
    {"batch_invariant", [](auto& c, int64_t v) { c.network.batch_invariant = v != 0; }},
    {"time_major", [](auto& c, int64_t v) { c.time_major = v != 0; }},
    {"packed_buffers", [](auto& c, int64_t v) { c.packed_buffers = v; }},
    {"max_length", [](auto& c, int64_t v) { c.max_length = v; }},
    {"save", [](auto& c, int64_t v) { c.save = v != 0; }},
    {"recompute", [](auto& c, int64_t v) { c.recompute = v != 0; }},
};
inline constexpr Attribute<double> kReals[] = {
    {"cell_clip", [](auto& c, double v) { c.network.cell_clip = v; }},
    {"dropout_scale", [](auto& c, double v) { c.network.dropout_scale = v; }},
};

// The attributes of a call, from values in the order of kIntegers and of kReals.
CallAttributes AttributesOf(const int64_t* integers, const double* reals);

// What ostinato_stream takes, see stream.cc: StreamCall in cpu.py, 8 bytes a field.
struct StreamCall {
  int64_t dtype;  // an index of kDtypes
  // Those of a call, in the order of kIntegers and kReals.
  const int64_t* integers;
  const double* reals;
  int64_t steps, batch;
  const void* weights;   // [num_params]
  const void* prepared;  // packed weights
  int64_t prepared_bytes;
  const void* x;               // [B, T, I]
  const int32_t* seq_lengths;  // [B], or null: all steps of every sequence
  void* y;                     // [B, T, S]
  // The states [L, B, ...], before and after the call: the output, then cell states.
  void *h, *c_0, *c_1, *c_2;

  void* cells(int64_t index) const { return index == 0 ? c_0 : index == 1 ? c_1 : c_2; }
};
inline constexpr const char* kStreamFields[] = {
    "dtype", "integers",    "reals",    "steps",
    "batch", "weights",     "prepared", "prepared_bytes",
    "x",     "seq_lengths", "y",        "h",
    "c_0",   "c_1",         "c_2"};
static_assert(sizeof(StreamCall) == 8 * std::size(kStreamFields));

// Lines of `name: words`, see contract.cc.
const std::string& Contract();

}  // namespace ostinato::ffi

#endif  // OSTINATO_FFI_CONTRACT_H_
