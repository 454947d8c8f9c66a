// The handlers that launch kernels on a GPU; _cuda/launch.py makes their calls.
#include "ffi/cuda_launch.h"

namespace ostinato::ffi {
namespace {

using Stream = xffi::PlatformStream<void*>;

// Before the first launch, and before XLA records one: loading may wait for the GPU.
xffi::Error Prepare(xffi::RemainingArgs, xffi::RemainingRets,
                    xffi::Span<const uint8_t> cubin, std::string_view digest,
                    std::string_view name, Int64s grid, Int64s parameters,
                    Int64s numbers) {
  const CudaAttributes call{cubin, digest, name, grid, parameters, numbers};
  cuda::Prepare(call.code(), call.cuda_grid());
  return xffi::Error::Success();
}

xffi::Error Launch(void* stream, xffi::RemainingArgs operands,
                   xffi::RemainingRets results, xffi::Span<const uint8_t> cubin,
                   std::string_view digest, std::string_view name, Int64s grid,
                   Int64s parameters, Int64s numbers) {
  LaunchOn(stream, ArraysOf(operands, results),
           {cubin, digest, name, grid, parameters, numbers});
  return xffi::Error::Success();
}

}  // namespace
}  // namespace ostinato::ffi

// Opens the driver; returns null, or why it cannot be used, until the next call of the
// same thread.
extern "C" OSTINATO_EXPORT const char* ostinato_cuda_open(const char* path) noexcept
    try {
  thread_local std::string reason;
  reason = ostinato::cuda::OpenDriver(path);
  return reason.empty() ? nullptr : reason.c_str();
} catch (const std::exception&) {
  return "out of memory";
}

OSTINATO_FFI_HANDLER(ostinato_cuda_prepare, ostinato::ffi::Prepare,
                     ostinato::ffi::BindCudaAttributes(
                         ostinato::ffi::xffi::Ffi::Bind<
                             ostinato::ffi::xffi::ExecutionStage::kInitialize>()
                             .RemainingArgs()
                             .RemainingRets()));
OSTINATO_FFI_HANDLER(ostinato_cuda_launch, ostinato::ffi::Launch,
                     ostinato::ffi::BindCudaAttributes(ostinato::ffi::xffi::Ffi::Bind()
                                                           .Ctx<ostinato::ffi::Stream>()
                                                           .RemainingArgs()
                                                           .RemainingRets()),
                     {ostinato::ffi::xffi::Traits::kCmdBufferCompatible});
