// What the handler of tests tells the fake driver.
#ifndef OSTINATO_TESTS_CUDA_FAKE_DRIVER_H_
#define OSTINATO_TESTS_CUDA_FAKE_DRIVER_H_

#include <vector>

#include "tests/cuda_emulator.h"

// Sets the arrays that the next launch may use.
void SetArrays(const std::vector<emulator::Array>& arrays);

#endif  // OSTINATO_TESTS_CUDA_FAKE_DRIVER_H_
