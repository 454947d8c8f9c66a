// Defines the C symbols that XLA calls.
#ifndef OSTINATO_FFI_HANDLER_H_
#define OSTINATO_FFI_HANDLER_H_

#include <exception>
#include <string>

#include "xla/ffi/api/ffi.h"

#define OSTINATO_EXPORT __attribute__((visibility("default")))

// Exports `symbol`, a handler that decodes its call frame by the binding that follows
// and calls `impl`. Whatever is thrown on the way becomes an error naming the symbol.
#define OSTINATO_FFI_HANDLER(symbol, impl, ...)                                \
  extern "C" OSTINATO_EXPORT XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame) { \
    return ::ostinato::ffi::Guarded(frame, #symbol, [&] {                      \
      XLA_FFI_DEFINE_HANDLER(handler, impl, __VA_ARGS__);                      \
      return (*handler)(frame);                                                \
    });                                                                        \
  }                                                                            \
  static_assert(true, "ends the macro with a semicolon")

namespace ostinato::ffi {

inline XLA_FFI_Error* InternalError(const XLA_FFI_Api* api, const char* message) {
  XLA_FFI_Error_Create_Args args;
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.extension_start = nullptr;
  args.message = message;
  args.errc = XLA_FFI_Error_Code_INTERNAL;
  return api->XLA_FFI_Error_Create(&args);
}

// Calls `call`; XLA is compiled without exceptions, so none may reach it.
template <typename Call>
XLA_FFI_Error* Guarded(XLA_FFI_CallFrame* frame, const char* symbol,
                       const Call& call) noexcept {
  try {
    return call();
  } catch (const std::exception& error) {
    const std::string message = std::string(symbol) + ": " + error.what();
    return InternalError(frame->api, message.c_str());
  } catch (...) {
    return InternalError(frame->api, symbol);
  }
}

}  // namespace ostinato::ffi

#endif  // OSTINATO_FFI_HANDLER_H_
