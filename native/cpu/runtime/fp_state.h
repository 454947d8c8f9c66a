// Denormal numbers off for a while.
//
// Include this from files that are compiled for the baseline alone: an inline function
// compiled for a newer instruction set may be the one that the linker keeps.
#ifndef OSTINATO_CPU_RUNTIME_FP_STATE_H_
#define OSTINATO_CPU_RUNTIME_FP_STATE_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ostinato::cpu {

// Results and operands too small for a normal number count as 0 while this lives: one
// denormal in a cell state would slow each step down a hundredfold. Then the calling
// thread has its own setting again.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(Read()) { Write(saved_ | kFlush); }
  ~FlushDenormals() { Write(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  static constexpr Word kFlush = 0x8040;  // FTZ for results, DAZ for operands
  static Word Read() { return _mm_getcsr(); }
  static void Write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kFlush = Word{1} << 24;  // FPCR.FZ
  static Word Read() {
    Word word;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void Write(Word word) { __asm__ volatile("msr fpcr, %0" : : "r"(word)); }
#else
  using Word = uint32_t;
  static constexpr Word kFlush = 0;
  static Word Read() { return 0; }
  static void Write(Word) {}
#endif

  const Word saved_;
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_RUNTIME_FP_STATE_H_
