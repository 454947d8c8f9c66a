#include <stdexcept>
#include <string>

#include "ffi/handler.h"
#include "tests/check.h"

namespace {

std::string last_message;
XLA_FFI_Error_Code last_code;

XLA_FFI_Error* RecordError(XLA_FFI_Error_Create_Args* args) {
  static int error;
  last_message = args->message;
  last_code = args->errc;
  return reinterpret_cast<XLA_FFI_Error*>(&error);
}

}  // namespace

int main() {
  XLA_FFI_Api api{};
  api.XLA_FFI_Error_Create = RecordError;
  XLA_FFI_CallFrame frame{};
  frame.api = &api;
  using ostinato::ffi::Guarded;

  const auto fine = []() -> XLA_FFI_Error* { return nullptr; };
  CHECK_EQ(Guarded(&frame, "op", fine) == nullptr, true);
  CHECK_EQ(last_message, "");

  const auto throws = []() -> XLA_FFI_Error* { throw std::runtime_error("boom"); };
  CHECK_EQ(Guarded(&frame, "op", throws) != nullptr, true);
  CHECK_EQ(last_message, "op: boom");
  CHECK_EQ(last_code, XLA_FFI_Error_Code_INTERNAL);

  const auto throws_int = []() -> XLA_FFI_Error* { throw 3; };
  CHECK_EQ(Guarded(&frame, "op", throws_int) != nullptr, true);
  CHECK_EQ(last_message, "op");
  return ostinato::testing::Summary();
}
