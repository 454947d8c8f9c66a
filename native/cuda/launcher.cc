#include "cuda/launcher.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace ostinato::cuda {
namespace {

// What this file uses of the driver's interface, with its numbers and layouts.
using Result = int;
using Library = struct LibraryHandle*;
using Kernel = struct KernelHandle*;
using Function = struct FunctionHandle*;
using Context = struct ContextHandle*;

constexpr unsigned kClusterDimension = 4;       // CU_LAUNCH_ATTRIBUTE_...
constexpr int kMaxDynamicSharedBytes = 8;       // CU_FUNC_ATTRIBUTE_...
constexpr int kNonPortableClusterAllowed = 14;  // CU_FUNC_ATTRIBUTE_...
constexpr int64_t kSharedBytesOfEveryKernel = 48 * 1024;
constexpr int64_t kPortableCluster = 8;

struct Attribute {
  unsigned id;
  unsigned padding;
  unsigned value[16];
};
struct Config {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const Attribute* attributes;
  unsigned count;
};
static_assert(sizeof(Attribute) == 72 && sizeof(Config) == 56);

struct Driver {
  Result (*load)(Library*, const void*, void*, void*, unsigned, void*, void*, unsigned);
  Result (*get_kernel)(Kernel*, Library, const char*);
  Result (*get_function)(Function*, Kernel);
  Result (*set_attribute)(Function, int, int);
  Result (*launch)(const Config*, Function, void**, void**);
  Result (*error_name)(Result, const char**);
  Result (*error_text)(Result, const char**);
};

// Guards the two below.
std::mutex& Mutex() {
  static std::mutex mutex;
  return mutex;
}
std::unique_ptr<Driver>& OpenedDriver() {
  static std::unique_ptr<Driver> driver;
  return driver;
}
// By digest and name. A kernel is never unloaded: other threads may launch it.
std::map<std::string, Kernel, std::less<>>& Kernels() {
  static std::map<std::string, Kernel, std::less<>> kernels;
  return kernels;
}

void Check(const Driver& driver, Result result, const char* call, const Code& code) {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  driver.error_name(result, &name);
  driver.error_text(result, &text);
  throw std::runtime_error(std::string(call) + " of the kernel " +
                           std::string(code.name) + ": " +
                           (name != nullptr ? name : std::to_string(result)) +
                           (text != nullptr ? std::string(", ") + text : ""));
}

const Driver& TheDriver() {
  if (OpenedDriver() == nullptr)
    throw std::runtime_error("the NVIDIA driver is not open in this process");
  return *OpenedDriver();
}

// The kernel for the current context. The caller holds the mutex.
Function FunctionOf(const Driver& driver, const Code& code) {
  const std::string key = std::string(code.digest) + " " + std::string(code.name);
  auto found = Kernels().find(key);
  if (found == Kernels().end()) {
    Library library = nullptr;
    Kernel kernel = nullptr;
    Check(driver,
          driver.load(&library, code.cubin, nullptr, nullptr, 0, nullptr, nullptr, 0),
          "cuLibraryLoadData", code);
    Check(driver, driver.get_kernel(&kernel, library, std::string(code.name).c_str()),
          "cuLibraryGetKernel", code);
    found = Kernels().emplace(key, kernel).first;
  }
  Function function = nullptr;
  Check(driver, driver.get_function(&function, found->second), "cuKernelGetFunction",
        code);
  return function;
}

}  // namespace

std::string OpenDriver(const char* path) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return dlerror();
  auto driver = std::make_unique<Driver>();
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr && missing.empty()) missing = name;
  };
  find(driver->load, "cuLibraryLoadData");
  find(driver->get_kernel, "cuLibraryGetKernel");
  find(driver->get_function, "cuKernelGetFunction");
  find(driver->set_attribute, "cuFuncSetAttribute");
  find(driver->launch, "cuLaunchKernelEx");
  find(driver->error_name, "cuGetErrorName");
  find(driver->error_text, "cuGetErrorString");
  if (!missing.empty()) return std::string(path) + " has no " + missing;
  const std::lock_guard<std::mutex> lock(Mutex());
  Kernels().clear();
  OpenedDriver() = std::move(driver);
  return "";
}

void Prepare(const Code& code, const Grid& grid) {
  const std::lock_guard<std::mutex> lock(Mutex());
  const Driver& driver = TheDriver();
  const Function function = FunctionOf(driver, code);
  if (grid.shared_bytes > kSharedBytesOfEveryKernel) {
    Check(driver,
          driver.set_attribute(function, kMaxDynamicSharedBytes,
                               static_cast<int>(grid.shared_bytes)),
          "cuFuncSetAttribute", code);
  }
  if (grid.cluster > kPortableCluster) {
    Check(driver, driver.set_attribute(function, kNonPortableClusterAllowed, 1),
          "cuFuncSetAttribute", code);
  }
}

void Launch(const Code& code, const Grid& grid, void** parameters, void* stream) {
  Function function = nullptr;
  const Driver* driver = nullptr;
  {
    const std::lock_guard<std::mutex> lock(Mutex());
    driver = &TheDriver();
    function = FunctionOf(*driver, code);
  }
  const Attribute cluster{
      kClusterDimension, 0, {static_cast<unsigned>(grid.cluster), 1, 1}};
  const Config config{{static_cast<unsigned>(grid.blocks), 1, 1},
                      {static_cast<unsigned>(grid.threads), 1, 1},
                      static_cast<unsigned>(grid.shared_bytes),
                      stream,
                      &cluster,
                      grid.cluster > 1 ? 1U : 0U};
  Check(*driver, driver->launch(&config, function, parameters, nullptr),
        "cuLaunchKernelEx", code);
}

}  // namespace ostinato::cuda
