// Unpacks a call of a GPU's kernel, as _cuda/launch.py makes it.
#ifndef OSTINATO_FFI_CUDA_LAUNCH_H_
#define OSTINATO_FFI_CUDA_LAUNCH_H_

#include <stdexcept>
#include <string_view>
#include <vector>

#include "cuda/launcher.h"
#include "ffi/handler.h"

namespace ostinato::ffi {

namespace xffi = ::xla::ffi;

using Int64s = xffi::Span<const int64_t>;

// The attributes of a call.
struct CudaAttributes {
  xffi::Span<const uint8_t> cubin;
  std::string_view digest, name;
  Int64s grid;        // the fields of Grid
  Int64s parameters;  // an index of operands and then results, or -1 for null
  Int64s numbers;     // the last parameter, a struct of 64-bit integers

  cuda::Code code() const { return {cubin.begin(), cubin.size(), digest, name}; }
  cuda::Grid cuda_grid() const {
    if (grid.size() != 4) throw std::invalid_argument("`grid` has another size");
    return {grid[0], grid[1], grid[2], grid[3]};
  }
};

template <typename Binding>
auto BindCudaAttributes(Binding binding) {
  return std::move(binding)
      .template Attr<xffi::Span<const uint8_t>>("cubin")
      .template Attr<std::string_view>("digest")
      .template Attr<std::string_view>("name")
      .template Attr<Int64s>("grid")
      .template Attr<Int64s>("parameters")
      .template Attr<Int64s>("numbers");
}

// The arrays of a call, operands and then results.
inline std::vector<xffi::AnyBuffer> ArraysOf(xffi::RemainingArgs operands,
                                             xffi::RemainingRets results) {
  std::vector<xffi::AnyBuffer> arrays;
  for (size_t i = 0; i < operands.size(); ++i)
    arrays.push_back(operands.get<xffi::AnyBuffer>(i).value());
  for (size_t i = 0; i < results.size(); ++i)
    arrays.push_back(*results.get<xffi::AnyBuffer>(i).value());
  return arrays;
}

inline void LaunchOn(void* stream, const std::vector<xffi::AnyBuffer>& arrays,
                     const CudaAttributes& call) {
  std::vector<void*> pointers;
  for (const int64_t index : call.parameters) {
    if (index >= static_cast<int64_t>(arrays.size()))
      throw std::invalid_argument("`parameters` names an array that is not there");
    pointers.push_back(index < 0 ? nullptr : arrays[index].untyped_data());
  }
  std::vector<void*> parameters;
  for (void*& pointer : pointers) parameters.push_back(&pointer);
  parameters.push_back(const_cast<int64_t*>(call.numbers.begin()));
  cuda::Launch(call.code(), call.cuda_grid(), parameters.data(), stream);
}

}  // namespace ostinato::ffi

#endif  // OSTINATO_FFI_CUDA_LAUNCH_H_
