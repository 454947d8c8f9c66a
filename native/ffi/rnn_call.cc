#include "ffi/rnn_call.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ostinato::ffi {
namespace {

template <typename T>
T Get(const xffi::Dictionary& attributes, const char* name) {
  auto value = attributes.get<T>(name);
  if (!value.has_value()) throw std::invalid_argument(value.error().message());
  return *value;
}

void ExpectSize(const char* what, int64_t got, int64_t want) {
  if (got == want) return;
  throw std::invalid_argument(std::string(what) + " has " + std::to_string(got) +
                              " entries, want " + std::to_string(want));
}

template <typename Value, size_t count>
const Value* ValuesOf(const xffi::Dictionary& attributes, const char* name,
                      const Attribute<Value> (&)[count]) {
  const auto values = Get<xffi::Span<const Value>>(attributes, name);
  ExpectSize(name, values.size(), count);
  return values.begin();
}

void ExpectCounts(const char* what, const Arrays& arrays,
                  xffi::Span<const int64_t> counts) {
  int64_t sum = 0;
  for (const int64_t count : counts) sum += count;
  if (arrays.size() == sum) return;
  throw std::invalid_argument("the call has " + std::to_string(arrays.size()) + " " +
                              what + ", want " + std::to_string(sum));
}

// Takes the sizes of a call from the dimensions of its arrays.
void SetSizes(const CallAttributes& call, CallBuffers& buffers) {
  Cursor cursor{buffers.arguments, buffers.argument_counts, 0};
  const TupleReader operands(kOperands, cursor);
  buffers.dtype = operands.Next("weights").dtype;
  if (!operands.Has("x")) return;
  const int64_t* x = operands.Next("x").dimensions;
  if (call.packed_buffers == 0) {
    buffers.steps = x[call.time_major ? 0 : 1];
    buffers.batch = x[call.time_major ? 1 : 0];
    buffers.tokens = buffers.steps * buffers.batch;
    return;
  }
  buffers.steps = call.max_length;
  buffers.tokens = x[0];
  buffers.batch = operands.Next("states").dimensions[1];
  if (buffers.batch % call.packed_buffers != 0 ||
      buffers.tokens % call.packed_buffers != 0 || buffers.steps < 0) {
    throw std::invalid_argument(
        "`packed_buffers` must divide the sequences and the tokens of x");
  }
}

}  // namespace

void Arrays::Add(const xffi::AnyBuffer& buffer, int64_t members, bool member_axis) {
  const auto elements = static_cast<int64_t>(buffer.element_count());
  const auto bytes = static_cast<int64_t>(buffer.size_bytes());
  const int64_t parts = member_axis ? std::max<int64_t>(1, members) : 1;
  arrays_.push_back({static_cast<char*>(buffer.untyped_data()), elements / parts,
                     parts > 1 ? bytes / parts : 0, bytes,
                     buffer.dimensions().begin() + (member_axis ? 1 : 0),
                     buffer.element_type()});
}

void Arrays::Zero() const {
  for (const Array& array : arrays_) {
    if (array.bytes > 0) std::memset(array.data, 0, array.bytes);
  }
}

CallAttributes DecodeAttributes(const xffi::Dictionary& attributes) {
  return AttributesOf(ValuesOf(attributes, "integers", kIntegers),
                      ValuesOf(attributes, "reals", kReals));
}

CallBuffers DecodeBuffers(const CallAttributes& call,
                          const xffi::Dictionary& attributes,
                          xffi::RemainingArgs arguments, xffi::RemainingRets results) {
  using Numbers = xffi::Span<const int64_t>;
  const auto in_ensemble = Get<Numbers>(attributes, "ensemble");
  ExpectSize("ensemble", in_ensemble.size(), arguments.size());
  CallBuffers found{};
  found.argument_counts = Get<Numbers>(attributes, "arguments");
  found.result_counts = Get<Numbers>(attributes, "results");
  found.wrt = Get<Numbers>(attributes, "wrt");
  found.members = 1;
  bool any = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const xffi::AnyBuffer buffer = arguments.get<xffi::AnyBuffer>(i).value();
    if (in_ensemble[i] != 0) {
      found.members = buffer.dimensions()[0];
      any = true;
    }
    found.arguments.Add(buffer, found.members, in_ensemble[i] != 0);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    found.results.Add(*results.get<xffi::AnyBuffer>(i).value(), found.members, any);
  }
  ExpectCounts("arguments", found.arguments, found.argument_counts);
  ExpectCounts("results", found.results, found.result_counts);
  SetSizes(call, found);
  return found;
}

TupleReader::TupleReader(const Tuple& tuple, Cursor& cursor)
    : tuple_(tuple), arrays_(cursor.arrays), member_(cursor.member) {
  for (int64_t i = 0; i < tuple.size(); ++i) {
    if (cursor.next_count >= static_cast<int64_t>(cursor.counts.size())) {
      throw std::invalid_argument(std::string("no counts are left for ") + tuple.name);
    }
    const int64_t count = cursor.counts[cursor.next_count++];
    fields_[i] = {cursor.next_array, count};
    cursor.next_array += count;
  }
}

std::string TupleReader::NameOf(const char* field) const {
  return std::string(tuple_.name) + "." + field;
}

int64_t TupleReader::Find(const char* field) const {
  for (int64_t i = 0; i < tuple_.size(); ++i) {
    if (std::strcmp(tuple_.fields[i], field) == 0) return i;
  }
  throw std::logic_error(NameOf(field) + " is no field");
}

const Arrays::Array& TupleReader::Next(const char* field) const {
  const Field& at = fields_[Find(field)];
  if (at.left <= 0) throw std::invalid_argument(NameOf(field) + " is missing");
  return arrays_[at.next];
}

char* TupleReader::TakeBytes(const char* field, int64_t elements) {
  const Arrays::Array& array = Next(field);
  if (array.elements != elements) {
    throw std::invalid_argument(NameOf(field) + " has " +
                                std::to_string(array.elements) + " elements, want " +
                                std::to_string(elements));
  }
  Field& at = fields_[Find(field)];
  ++at.next;
  --at.left;
  return array.data + member_ * array.member_bytes;
}

void TupleReader::End() const {
  for (int64_t i = 0; i < tuple_.size(); ++i) {
    if (fields_[i].left == 0) continue;
    throw std::invalid_argument(NameOf(tuple_.fields[i]) + " has too many arrays");
  }
}

}  // namespace ostinato::ffi
