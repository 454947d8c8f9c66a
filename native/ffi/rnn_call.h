// From XLA's call frame to the calls of forward.h and backward.h: what cpu.py sends.
#ifndef OSTINATO_FFI_RNN_CALL_H_
#define OSTINATO_FFI_RNN_CALL_H_

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/network/network.h"
#include "xla/ffi/api/ffi.h"

namespace ostinato::ffi {

namespace xffi = ::xla::ffi;

// Every buffer of a call in the order of cpu.py. Where the call is an ensemble, a
// buffer with an ensemble axis is one piece per member, and any other is the same for
// all.
class Pieces {
 public:
  void Add(const void* data, int64_t elements, int64_t bytes, int64_t members) {
    items_.push_back({static_cast<const char*>(data), elements / members,
                      members > 1 ? bytes / members : 0, bytes});
  }

  // Every byte of results.
  void Zero() const {
    for (const Item& item : items_) {
      if (item.bytes > 0) std::memset(const_cast<char*>(item.data), 0, item.bytes);
    }
  }

  // Reads the pieces of one member, first to last.
  class Reader {
   public:
    Reader(const Pieces& pieces, int64_t member, const char* what)
        : pieces_(pieces), member_(member), what_(what) {}

    // The next buffer; throws unless it has so many elements.
    template <typename T>
    T* Take(const char* name, int64_t elements) {
      if (next_ >= pieces_.items_.size()) {
        throw std::invalid_argument(std::string("no ") + what_ + " is left for " +
                                    name);
      }
      const Item& item = pieces_.items_[next_++];
      if (item.elements != elements) {
        throw std::invalid_argument(std::string(name) + " has " +
                                    std::to_string(item.elements) + " elements, want " +
                                    std::to_string(elements));
      }
      return reinterpret_cast<T*>(
          const_cast<char*>(item.data + member_ * item.member_bytes));
    }
    int64_t elements_of_next() const {
      return next_ < pieces_.items_.size() ? pieces_.items_[next_].elements : 0;
    }
    void End() const {
      if (next_ != pieces_.items_.size()) {
        throw std::invalid_argument(std::string("too many ") + what_ + "s");
      }
    }

   private:
    const Pieces& pieces_;
    const int64_t member_;
    const char* what_;
    size_t next_ = 0;
  };

 private:
  struct Item {
    const char* data;
    int64_t elements;      // of one member
    int64_t member_bytes;  // from one member to the next
    int64_t bytes;         // of all members
  };
  std::vector<Item> items_;
};

// What the attributes of a call say.
struct CallAttributes {
  cpu::Network network;
  bool time_major, save, recompute;
  int64_t packed_buffers;  // of packed sequences; 0: [B, T, ...] or [T, B, ...]
  int64_t max_length;      // of packed sequences
  bool has_lengths, has_resets, has_keep, has_packed;
  bool wants_weights, wants_x, wants_h_0, wants_c_0;
  std::vector<int64_t> in_ensemble;  // per argument
};

CallAttributes DecodeAttributes(const xffi::Dictionary& attributes);

struct CallBuffers {
  int64_t members;  // of the ensemble; 1 where there is none
  int64_t batch, steps;
  int64_t tokens;  // of x: steps in all
  xffi::DataType dtype;
  Pieces arguments, results;
};

CallBuffers DecodeBuffers(const CallAttributes& call, xffi::RemainingArgs arguments,
                          xffi::RemainingRets results);

}  // namespace ostinato::ffi

#endif  // OSTINATO_FFI_RNN_CALL_H_
