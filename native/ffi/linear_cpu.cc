// The handlers of linear recurrences; _linear/cpu.py makes their calls.
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/linear/advantages.h"
#include "cpu/linear/recurrence.h"
#include "ffi/handler.h"

namespace ostinato::ffi {
namespace {

namespace xffi = ::xla::ffi;

using cpu::LinearKernels;
using cpu::LinearShape;
using Numbers = xffi::Span<const int64_t>;

// The order of the attribute `numbers`: the sizes of a call in numbers of its dtype,
// complex ones counting as one, as LinearShape has them in real numbers.
enum Number : size_t {
  kBatch,
  kSteps,
  kGroups,
  kWidth,
  kBatchStride,
  kStepStride,
  kABatch,
  kAStep,
  kAGroup,
  kDaBatch,
  kDaStep,
  kResetBatch,
  kResetStep,
  kShared,
  kBlocks,
  kReverse,
  kAfter,
  kHasLengths,
  kHasResets,
  kCount,
};

LinearShape ShapeOf(Numbers n, int64_t parts) {
  if (n.size() != kCount) throw std::invalid_argument("`numbers` has another size");
  return {n[kBatch],
          n[kSteps],
          n[kGroups],
          n[kWidth] * parts,
          n[kBatchStride] * parts,
          n[kStepStride] * parts,
          n[kABatch] * parts,
          n[kAStep] * parts,
          n[kAGroup] * parts,
          n[kDaBatch] * parts,
          n[kDaStep] * parts,
          parts,
          n[kShared] != 0,
          n[kBlocks] != 0,
          n[kReverse] != 0,
          n[kAfter] != 0,
          nullptr,
          nullptr,
          n[kResetBatch],
          n[kResetStep]};
}

int64_t PartsOf(xffi::DataType dtype) {
  return dtype == xffi::DataType::C64 || dtype == xffi::DataType::C128 ? 2 : 1;
}

// The operands of a call: `count` arrays of one dtype, then the masks.
class Call {
 public:
  Call(Numbers numbers, const xffi::RemainingArgs& arguments, size_t count)
      : arguments_(arguments),
        dtype(Get(0).element_type()),
        shape(ShapeOf(numbers, PartsOf(dtype))) {
    const size_t masks = numbers[kHasLengths] + numbers[kHasResets];
    if (arguments.size() != count + masks) {
      throw std::invalid_argument("the call has " + std::to_string(arguments.size()) +
                                  " arguments, want " + std::to_string(count + masks));
    }
    for (size_t i = 1; i < count; ++i) {
      if (Get(i).element_type() != dtype) throw std::invalid_argument("dtypes differ");
    }
    if (numbers[kHasLengths] != 0)
      shape.lengths = static_cast<const int32_t*>(Get(count++).untyped_data());
    if (numbers[kHasResets] != 0)
      shape.resets = static_cast<const uint8_t*>(Get(count).untyped_data());
  }

  template <typename Storage>
  const Storage* data(size_t i) const {
    return static_cast<const Storage*>(Get(i).untyped_data());
  }

 private:
  xffi::AnyBuffer Get(size_t i) const {
    return arguments_.get<xffi::AnyBuffer>(i).value();
  }
  const xffi::RemainingArgs& arguments_;

 public:
  const xffi::DataType dtype;
  LinearShape shape;
};

template <typename Storage>
Storage* DataOf(xffi::Result<xffi::AnyBuffer>& result) {
  return static_cast<Storage*>(result->untyped_data());
}

// Calls body(kernels, Storage{}) with the table of the dtype.
template <typename Body>
void WithKernels(xffi::DataType dtype, const Body& body) {
  const cpu::LinearKernelSet& set = cpu::CurrentLinearKernels();
  switch (dtype) {
    case xffi::DataType::F32:
      return body(set.f32, float{});
    case xffi::DataType::F64:
      return body(set.f64, double{});
    case xffi::DataType::BF16:
      return body(set.bf16, cpu::BFloat16{});
    case xffi::DataType::C64:
      return body(set.c64, float{});
    case xffi::DataType::C128:
      return body(set.c128, double{});
    default:
      throw std::invalid_argument("there are no kernels for this dtype");
  }
}

xffi::Error Forward(Numbers numbers, xffi::RemainingArgs arguments,
                    xffi::Result<xffi::AnyBuffer> h,
                    xffi::Result<xffi::AnyBuffer> h_n) {
  const Call call(numbers, arguments, 3);
  WithKernels(call.dtype, [&](const auto& kernels, auto zero) {
    using T = decltype(zero);
    cpu::RunLinearForward(call.shape, kernels,
                          {call.data<T>(0), call.data<T>(1), call.data<T>(2),
                           DataOf<T>(h), DataOf<T>(h_n)});
  });
  return xffi::Error::Success();
}

xffi::Error Backward(Numbers numbers, xffi::RemainingArgs arguments,
                     xffi::Result<xffi::AnyBuffer> da, xffi::Result<xffi::AnyBuffer> db,
                     xffi::Result<xffi::AnyBuffer> dh_0) {
  const Call call(numbers, arguments, 5);
  WithKernels(call.dtype, [&](const auto& kernels, auto zero) {
    using T = decltype(zero);
    cpu::RunLinearBackward(
        call.shape, kernels,
        {call.data<T>(0), call.data<T>(1), call.data<T>(2), call.data<T>(3),
         call.data<T>(4), DataOf<T>(da), DataOf<T>(db), DataOf<T>(dh_0)});
  });
  return xffi::Error::Success();
}

bool IsDouble(xffi::DataType dtype) {
  if (dtype == xffi::DataType::F64) return true;
  if (dtype == xffi::DataType::F32) return false;
  throw std::invalid_argument("arrays must be float32 or float64");
}

template <typename T>
void RunFilter(bool reverse, const xffi::AnyBuffer& b, const xffi::AnyBuffer& a,
               const xffi::AnyBuffer& x, xffi::AnyBuffer& y,
               const cpu::FilterKernel<T>& kernel) {
  const int64_t channels = x.dimensions()[0], order = a.dimensions()[1];
  if (b.dimensions()[1] != order + 1) throw std::invalid_argument("orders differ");
  const auto stride = [](const xffi::AnyBuffer& each) {
    return each.dimensions()[0] == 1 ? 0 : each.dimensions()[1];
  };
  cpu::RunFilter<T>(
      {order, x.dimensions()[1], reverse, static_cast<const T*>(b.untyped_data()),
       static_cast<const T*>(a.untyped_data()), stride(b), stride(a),
       static_cast<const T*>(x.untyped_data()), static_cast<T*>(y.untyped_data())},
      channels, kernel);
}

xffi::Error Filter(bool reverse, xffi::AnyBuffer b, xffi::AnyBuffer a,
                   xffi::AnyBuffer x, xffi::Result<xffi::AnyBuffer> y) {
  const cpu::LinearKernelSet& set = cpu::CurrentLinearKernels();
  if (IsDouble(x.element_type())) {
    RunFilter<double>(reverse, b, a, x, *y, set.filter_f64);
  } else {
    RunFilter<float>(reverse, b, a, x, *y, set.filter_f32);
  }
  return xffi::Error::Success();
}

template <typename T>
void RunAdvantages(bool time_major, Numbers masks, const xffi::RemainingArgs& arguments,
                   xffi::AnyBuffer& advantages, xffi::AnyBuffer& returns,
                   cpu::AdvantagesKernel<T> kernel) {
  size_t next = 0;
  const auto take = [&] { return arguments.get<xffi::AnyBuffer>(next++).value(); };
  const auto data = [](const xffi::AnyBuffer& array) {
    return static_cast<const T*>(array.untyped_data());
  };
  const xffi::AnyBuffer rewards = take(), values = take(), last = take(),
                        discounts = take(), lambdas = take();
  cpu::Advantages<T> call{};
  call.batch = rewards.dimensions()[time_major ? 1 : 0];
  call.steps = rewards.dimensions()[time_major ? 0 : 1];
  call.time_major = time_major;
  call.rewards = data(rewards);
  call.values = data(values);
  call.last = data(last);
  call.discounts = data(discounts);
  call.lambdas = data(lambdas);
  call.one_discount = discounts.dimensions().size() == 0;
  call.one_lambda = lambdas.dimensions().size() == 0;
  if (masks[0] != 0) call.ends = static_cast<const uint8_t*>(take().untyped_data());
  if (masks[1] != 0) call.cuts = static_cast<const uint8_t*>(take().untyped_data());
  if (masks[2] != 0) call.lengths = static_cast<const int32_t*>(take().untyped_data());
  call.advantages = static_cast<T*>(advantages.untyped_data());
  call.returns = static_cast<T*>(returns.untyped_data());
  cpu::RunAdvantages(call, kernel);
}

xffi::Error RunGae(bool time_major, Numbers masks, xffi::RemainingArgs arguments,
                   xffi::Result<xffi::AnyBuffer> advantages,
                   xffi::Result<xffi::AnyBuffer> returns) {
  const cpu::LinearKernelSet& set = cpu::CurrentLinearKernels();
  if (masks.size() != 3) throw std::invalid_argument("`masks` has another size");
  if (IsDouble(advantages->element_type())) {
    RunAdvantages<double>(time_major, masks, arguments, *advantages, *returns,
                          set.advantages_f64);
  } else {
    RunAdvantages<float>(time_major, masks, arguments, *advantages, *returns,
                         set.advantages_f32);
  }
  return xffi::Error::Success();
}

auto Binding() { return xffi::Ffi::Bind().Attr<Numbers>("numbers").RemainingArgs(); }

}  // namespace
}  // namespace ostinato::ffi

OSTINATO_FFI_HANDLER(ostinato_linear_fwd, ostinato::ffi::Forward,
                     ostinato::ffi::Binding()
                         .Ret<ostinato::ffi::xffi::AnyBuffer>()
                         .Ret<ostinato::ffi::xffi::AnyBuffer>());
OSTINATO_FFI_HANDLER(ostinato_linear_bwd, ostinato::ffi::Backward,
                     ostinato::ffi::Binding()
                         .Ret<ostinato::ffi::xffi::AnyBuffer>()
                         .Ret<ostinato::ffi::xffi::AnyBuffer>()
                         .Ret<ostinato::ffi::xffi::AnyBuffer>());
OSTINATO_FFI_HANDLER(ostinato_filter, ostinato::ffi::Filter,
                     ostinato::ffi::xffi::Ffi::Bind()
                         .Attr<bool>("reverse")
                         .Arg<ostinato::ffi::xffi::AnyBuffer>()
                         .Arg<ostinato::ffi::xffi::AnyBuffer>()
                         .Arg<ostinato::ffi::xffi::AnyBuffer>()
                         .Ret<ostinato::ffi::xffi::AnyBuffer>());
OSTINATO_FFI_HANDLER(ostinato_gae, ostinato::ffi::RunGae,
                     ostinato::ffi::xffi::Ffi::Bind()
                         .Attr<bool>("time_major")
                         .Attr<ostinato::ffi::Numbers>("masks")
                         .RemainingArgs()
                         .Ret<ostinato::ffi::xffi::AnyBuffer>()
                         .Ret<ostinato::ffi::xffi::AnyBuffer>());
