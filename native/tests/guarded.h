// Arrays that end where memory ends: reading or writing past the end stops the program,
// and writing before the start is noticed when the array goes.
#ifndef OSTINATO_TESTS_GUARDED_H_
#define OSTINATO_TESTS_GUARDED_H_

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tests/check.h"

namespace ostinato::testing {

template <typename T>
class Guarded {
 public:
  // Every byte is kUntouched, which makes a NaN of each floating-point type.
  explicit Guarded(int64_t count) : count_(count) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    inside_ = (bytes + page) / page * page;
    void* pages = mmap(nullptr, inside_ + page, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) std::abort();
    start_ = static_cast<unsigned char*>(pages);
    mprotect(start_ + inside_, page, PROT_NONE);
    std::memset(start_, kUntouched, inside_);
    data_ = reinterpret_cast<T*>(start_ + inside_ - bytes);
  }
  ~Guarded() {
    const auto* first = reinterpret_cast<unsigned char*>(data_);
    const auto untouched = [](unsigned char byte) { return byte == kUntouched; };
    CHECK_EQ(std::all_of(static_cast<const unsigned char*>(start_), first, untouched),
             true);
    munmap(start_, inside_ + sysconf(_SC_PAGESIZE));
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  T* data() { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  int64_t size() const { return count_; }

  bool Untouched(int64_t i) const {
    unsigned char bytes[sizeof(T)];
    std::memset(bytes, kUntouched, sizeof(T));
    return std::memcmp(data_ + i, bytes, sizeof(T)) == 0;
  }

 private:
  static constexpr unsigned char kUntouched = 0xff;

  unsigned char* start_;
  int64_t inside_;  // bytes from start_ to where memory ends
  T* data_;
  int64_t count_;
};

}  // namespace ostinato::testing

#endif  // OSTINATO_TESTS_GUARDED_H_
