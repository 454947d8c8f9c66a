// The smallest test harness that says where and with which values a check failed.
#ifndef OSTINATO_TESTS_CHECK_H_
#define OSTINATO_TESTS_CHECK_H_

#include <iostream>
#include <stdexcept>

namespace ostinato::testing {

inline int failures = 0;

template <typename Got, typename Want>
void CheckEqual(const Got& got, const Want& want, const char* text, const char* file,
                int line) {
  if (got == want) return;
  ++failures;
  std::cerr << file << ":" << line << ": " << text << " is " << got << ", want " << want
            << "\n";
}

// Whether a call throws std::invalid_argument.
template <typename Call>
bool Refuses(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

// The exit code of main().
inline int Summary() {
  std::cout << (failures == 0 ? "all checks hold" : "some checks failed") << "\n";
  return failures == 0 ? 0 : 1;
}

}  // namespace ostinato::testing

#define CHECK_EQ(got, want) \
  ::ostinato::testing::CheckEqual((got), (want), #got, __FILE__, __LINE__)

#endif  // OSTINATO_TESTS_CHECK_H_
