// What the handler of tests tells the fake driver.
#ifndef OSTINATO_TESTS_CUDA_FAKE_DRIVER_H_
#define OSTINATO_TESTS_CUDA_FAKE_DRIVER_H_

#include <cstddef>
#include <vector>

namespace emulator_arrays {

struct Array {
  const char* begin;
  size_t bytes;
};

// The arrays that the next launch may use.
void Set(const std::vector<Array>& arrays);

}  // namespace emulator_arrays

#endif  // OSTINATO_TESTS_CUDA_FAKE_DRIVER_H_
