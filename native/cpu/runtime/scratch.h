// Memory for the length of one call, kept for the next one up to a bound.
#ifndef OSTINATO_CPU_RUNTIME_SCRATCH_H_
#define OSTINATO_CPU_RUNTIME_SCRATCH_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <new>
#include <type_traits>

namespace ostinato::cpu {

class Scratch {
 public:
  // The most that is kept when no call runs, for the whole process.
  static constexpr int64_t kMostKept = int64_t{256} << 20;

  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Returns memory for `count` values, at a multiple of 64 bytes, uninitialised; valid
  // until the Scratch is destroyed. Successive pieces of 2 KB and more do not start at
  // the same offset of a 4 KB page. Throws std::bad_alloc. Never null, not even for 0.
  template <typename T>
  T* Take(int64_t count) {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= 64);
    constexpr int64_t kMostBytes = std::numeric_limits<int64_t>::max() / 2;
    if (count < 0 || count > kMostBytes / int64_t{sizeof(T)}) throw std::bad_alloc();
    return static_cast<T*>(TakeBytes(count * int64_t{sizeof(T)}));
  }

  template <typename T>
  T* TakeZeroed(int64_t count) {
    T* const data = Take<T>(count);
    std::fill_n(data, count, T{});
    return data;
  }

 private:
  struct Block;  // starts with this, the rest of it is handed out
  class Cache;

  void* TakeBytes(int64_t bytes);
  int64_t NextStart(int64_t bytes) const;

  Block* block_ = nullptr;  // the newest; its `next` are full
  int64_t used_ = 0;        // bytes of it
  int64_t full_ = 0;        // bytes used of the others
  int64_t skew_ = 0;        // offset in a page where the next piece starts
};

// Asks for huge pages under a large array, where that pays; leaves its values alone.
// Null means that there is no array.
void AdviseHugePages(void* data, int64_t bytes) noexcept;

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_SCRATCH_H_
