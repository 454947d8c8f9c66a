// The target of launches on a CPU: the code of the library's own handlers, without a
// stream. Results are NaN before a kernel runs, and it may touch no other arrays.
#include <cstring>
#include <mutex>

#include "ffi/cuda_launch.h"
#include "tests/cuda_fake_driver.h"

namespace ostinato::ffi {
namespace {

xffi::Error LaunchOnHost(xffi::RemainingArgs operands, xffi::RemainingRets results,
                         xffi::Span<const uint8_t> cubin, std::string_view digest,
                         std::string_view name, Int64s grid, Int64s parameters,
                         Int64s numbers) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const CudaAttributes call{cubin, digest, name, grid, parameters, numbers};
  const auto arrays = ArraysOf(operands, results);
  for (size_t i = operands.size(); i < arrays.size(); ++i)
    memset(arrays[i].untyped_data(), 0xff, arrays[i].size_bytes());
  std::vector<emulator::Array> allowed;
  for (const xffi::AnyBuffer& each : arrays)
    allowed.push_back(
        {static_cast<const char*>(each.untyped_data()), each.size_bytes()});
  SetArrays(allowed);
  cuda::Prepare(call.code(), call.cuda_grid());
  LaunchOn(nullptr, arrays, call);
  return xffi::Error::Success();
}

}  // namespace
}  // namespace ostinato::ffi

extern "C" OSTINATO_EXPORT const char* fake_open(const char* path) {
  static std::string reason;
  reason = ostinato::cuda::OpenDriver(path);
  return reason.empty() ? nullptr : reason.c_str();
}

OSTINATO_FFI_HANDLER(fake_launch, ostinato::ffi::LaunchOnHost,
                     ostinato::ffi::BindCudaAttributes(ostinato::ffi::xffi::Ffi::Bind()
                                                           .RemainingArgs()
                                                           .RemainingRets()));
