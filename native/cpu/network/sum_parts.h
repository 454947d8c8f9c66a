// How a sum over tokens is divided: a long chain of additions loses digits, so that
// after some thousand tokens a part of its own begins, which is added to the sum as a
// whole. The first part is in the sum itself.
#ifndef OSTINATO_CPU_NETWORK_SUM_PARTS_H_
#define OSTINATO_CPU_NETWORK_SUM_PARTS_H_

#include <algorithm>
#include <cstdint>

namespace ostinato::cpu {

// The same on every machine and for any number of threads: it decides the order of
// sums. A copy goes through the tokens of a chunk for one task.
struct SumParts {
  static constexpr int64_t kTokens = 4096;
  bool first = true;
  int64_t tokens = 0;  // of the part at hand

  // Whether no token has gone into the sum.
  bool empty() const { return first && tokens == 0; }
  // Whether a new part begins here.
  bool begins() const { return tokens == 0; }
  // Whether a part is complete with so many more tokens, and is to be added.
  bool ends(int64_t more) const { return !first && tokens + more >= kTokens; }
  // Whether the last part is yet to be added.
  bool pending() const { return !first && tokens > 0; }

  // Calls add(token, count) for pieces of `count` tokens, each of which goes into one
  // part. A part ends with the piece with which it has kTokens; pieces begin at
  // multiples of that.
  template <typename F>
  void ForEach(int64_t count, const F& add) {
    for (int64_t done = 0; done < count; done += kTokens) {
      const int64_t now = std::min(count - done, kTokens);
      add(done, now);
      Take(now);
    }
  }
  // The same where each part has exactly kTokens, whatever counts the tokens come in,
  // and pieces begin anywhere.
  template <typename F>
  void ForEachExactly(int64_t count, const F& add) {
    for (int64_t done = 0; done < count;) {
      const int64_t now = std::min(count - done, kTokens - tokens);
      add(done, now);
      Take(now);
      done += now;
    }
  }
  void Take(int64_t count) {
    tokens += count;
    if (tokens < kTokens) return;
    first = false;
    tokens = 0;
  }
};

}  // namespace ostinato::cpu

#endif  // OSTINATO_CPU_NETWORK_SUM_PARTS_H_
