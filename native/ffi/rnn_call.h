// From XLA's call frame to what forward.h and backward.h take.
#ifndef OSTINATO_FFI_RNN_CALL_H_
#define OSTINATO_FFI_RNN_CALL_H_

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "ffi/contract.h"
#include "xla/ffi/api/ffi.h"

namespace ostinato::ffi {

namespace xffi = ::xla::ffi;

// The arguments or the results of a call, in its order. Where the call is an ensemble,
// an array with an ensemble axis has a part for each member, and any other is the same
// for all.
class Arrays {
 public:
  struct Array {
    char* data;
    int64_t elements;           // of one member
    int64_t member_bytes;       // from one member to the next
    int64_t bytes;              // of all members
    const int64_t* dimensions;  // of one member
    xffi::DataType dtype;
  };

  void Add(const xffi::AnyBuffer& buffer, int64_t members, bool member_axis);
  int64_t size() const { return static_cast<int64_t>(arrays_.size()); }
  const Array& operator[](int64_t i) const { return arrays_[i]; }
  // Every byte of all of them.
  void Zero() const;

 private:
  std::vector<Array> arrays_;
};

struct CallBuffers {
  int64_t members;  // of the ensemble; 1 where there is none
  xffi::DataType dtype;
  int64_t batch, steps;  // 0 where the call has weights alone
  int64_t tokens;        // of x
  Arrays arguments, results;
  // How many arrays each field of each tuple stands for, in the order of the call.
  xffi::Span<const int64_t> argument_counts, result_counts;
  // Which gradients the call asks for: weights, x, then each state.
  xffi::Span<const int64_t> wrt;

  bool WantsState(size_t state) const {
    return 2 + state < wrt.size() && wrt[2 + state] != 0;
  }
};

CallAttributes DecodeAttributes(const xffi::Dictionary& attributes);

CallBuffers DecodeBuffers(const CallAttributes& call,
                          const xffi::Dictionary& attributes,
                          xffi::RemainingArgs arguments, xffi::RemainingRets results);

// The arguments or the results of one member, one tuple after another.
struct Cursor {
  const Arrays& arrays;
  xffi::Span<const int64_t> counts;
  int64_t member;
  int64_t next_array = 0, next_count = 0;
};

// One tuple of a call: its arrays, by the names of their fields. Throws
// std::invalid_argument where the call has something else.
class TupleReader {
 public:
  // Takes the next tuple of the cursor.
  TupleReader(const Tuple& tuple, Cursor& cursor);

  bool Has(const char* field) const { return fields_[Find(field)].left > 0; }

  // The next array of a field, which has so many elements.
  template <typename T>
  T* Take(const char* field, int64_t elements) {
    return reinterpret_cast<T*>(TakeBytes(field, elements));
  }
  // The next array of a field, which is not taken.
  const Arrays::Array& Next(const char* field) const;

  // `count` arrays of the same size; null for none. `found` holds them.
  template <typename T>
  T* const* TakeEach(const char* field, int64_t count, int64_t elements,
                     std::vector<T*>& found) {
    for (int64_t i = 0; i < count; ++i) found.push_back(Take<T>(field, elements));
    return count > 0 ? found.data() : nullptr;
  }

  // Throws if there are arrays that have not been taken.
  void End() const;

 private:
  struct Field {
    int64_t next, left;  // arrays of the call
  };

  int64_t Find(const char* field) const;
  char* TakeBytes(const char* field, int64_t elements);
  std::string NameOf(const char* field) const;

  const Tuple& tuple_;
  const Arrays& arrays_;
  const int64_t member_;
  std::array<Field, std::tuple_size_v<decltype(Tuple::fields)>> fields_;
};

}  // namespace ostinato::ffi

#endif  // OSTINATO_FFI_RNN_CALL_H_
