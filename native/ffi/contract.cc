#include "ffi/contract.h"

#include <limits>

#include "cpu/runtime/features.h"
#include "ffi/handler.h"

namespace ostinato::ffi {
namespace {

std::string Line(const std::string& name, const std::string& words) {
  return name + ": " + words + "\n";
}

std::string Join(const char* const* words, int64_t count) {
  std::string joined;
  for (int64_t i = 0; i < count; ++i)
    joined += (i > 0 ? " " : "") + std::string(words[i]);
  return joined;
}

std::string TupleLine(const Tuple& tuple) {
  return Line(tuple.name, Join(tuple.fields.data(), tuple.size()));
}

template <typename Value, size_t count>
std::string AttributesLine(const char* name, const Attribute<Value> (&table)[count]) {
  std::array<const char*, count> names;
  for (size_t i = 0; i < count; ++i) names[i] = table[i].name;
  return Line(name, Join(names.data(), count));
}

std::string Compose() {
  std::string text = Line("isas", Join(cpu::kIsaNames, std::size(cpu::kIsaNames)));
  text += Line("dtypes", Join(kDtypes, std::size(kDtypes)));
  std::array<const char*, cpu::kNumModes> modes;
  for (int i = 0; i < cpu::kNumModes; ++i) modes[i] = cpu::kModes[i].name;
  text += Line("modes", Join(modes.data(), modes.size()));
  for (const cpu::ModeTraits& mode : cpu::kModes) {
    text +=
        Line(mode.name, std::string("gates ") + mode.gates + ", states " + mode.states +
                            ", saved blocks " + std::to_string(mode.saved_blocks));
  }
  text += AttributesLine("integers", kIntegers) + AttributesLine("reals", kReals);
  for (const Tuple* tuple :
       {&kOperands, &kOutputs, &kSaved, &kResiduals, &kGradients}) {
    text += TupleLine(*tuple);
  }
  text += Line("stream", Join(kStreamFields, std::size(kStreamFields)));
  return text;
}

}  // namespace

CallAttributes AttributesOf(const int64_t* integers, const double* reals) {
  CallAttributes call{};
  for (const auto& attribute : kIntegers) attribute.set(call, *integers++);
  for (const auto& attribute : kReals) attribute.set(call, *reals++);
  cpu::Network& n = call.network;
  n.clips = n.clip_nan || n.cell_clip < std::numeric_limits<double>::infinity();
  return call;
}

const std::string& Contract() {
  static const std::string text = Compose();
  return text;
}

}  // namespace ostinato::ffi

// Read through ctypes.
extern "C" OSTINATO_EXPORT const char* ostinato_contract() {
  return ostinato::ffi::Contract().c_str();
}
