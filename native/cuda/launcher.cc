#include "cuda/launcher.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <optional>
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

constexpr const char* kDriver = "libcuda.so.1";

struct State {
  std::mutex mutex;  // guards the others
  std::string path;
  std::optional<Driver> driver;
  // By digest and name. A kernel is never unloaded: other threads may launch it.
  std::map<std::string, Kernel, std::less<>> kernels;
};
State& TheState() {
  static State* const state = new State;  // threads may outlive the end of main
  return *state;
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

// Returns why it is impossible; empty if the driver is open. The caller has the mutex.
std::string Open(State& state, const char* path) {
  if (state.driver && state.path == path) return "";
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return dlerror();
  Driver driver{};
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr && missing.empty()) missing = name;
  };
  find(driver.load, "cuLibraryLoadData");
  find(driver.get_kernel, "cuLibraryGetKernel");
  find(driver.get_function, "cuKernelGetFunction");
  find(driver.set_attribute, "cuFuncSetAttribute");
  find(driver.launch, "cuLaunchKernelEx");
  find(driver.error_name, "cuGetErrorName");
  find(driver.error_text, "cuGetErrorString");
  if (!missing.empty()) return std::string(path) + " has no " + missing;
  state.kernels.clear();
  state.path = path;
  state.driver = driver;
  return "";
}

// A kernel for the current context, loaded there if it is not yet.
struct Loaded {
  Driver driver;
  Function function;
};
Loaded Load(const Code& code, const Grid& grid) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (!state.driver) {  // a program that was exported, in a process that only runs it
    if (const std::string reason = Open(state, kDriver); !reason.empty())
      throw std::runtime_error("the NVIDIA driver cannot be opened: " + reason);
  }
  const Driver& driver = *state.driver;
  const std::string key = std::string(code.digest) + " " + std::string(code.name);
  auto found = state.kernels.find(key);
  if (found == state.kernels.end()) {
    Library library = nullptr;
    Kernel kernel = nullptr;
    Check(driver,
          driver.load(&library, code.cubin, nullptr, nullptr, 0, nullptr, nullptr, 0),
          "cuLibraryLoadData", code);
    Check(driver, driver.get_kernel(&kernel, library, std::string(code.name).c_str()),
          "cuLibraryGetKernel", code);
    found = state.kernels.emplace(key, kernel).first;
  }
  Function function = nullptr;
  Check(driver, driver.get_function(&function, found->second), "cuKernelGetFunction",
        code);
  // Before each launch: the function may be of a new context, at an address that one of
  // a lost context had.
  const auto set = [&](int attribute, int64_t value) {
    Check(driver, driver.set_attribute(function, attribute, static_cast<int>(value)),
          "cuFuncSetAttribute", code);
  };
  if (grid.shared_bytes > kSharedBytesOfEveryKernel)
    set(kMaxDynamicSharedBytes, grid.shared_bytes);
  if (grid.cluster > kPortableCluster) set(kNonPortableClusterAllowed, 1);
  return {driver, function};
}

}  // namespace

std::string OpenDriver(const char* path) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  return Open(state, path);
}

void Prepare(const Code& code, const Grid& grid) { Load(code, grid); }

void Launch(const Code& code, const Grid& grid, void** parameters, void* stream) {
  const auto [driver, function] = Load(code, grid);
  const Attribute cluster{
      kClusterDimension, 0, {static_cast<unsigned>(grid.cluster), 1, 1}};
  const Config config{{static_cast<unsigned>(grid.blocks), 1, 1},
                      {static_cast<unsigned>(grid.threads), 1, 1},
                      static_cast<unsigned>(grid.shared_bytes),
                      stream,
                      &cluster,
                      grid.cluster > 1 ? 1U : 0U};
  Check(driver, driver.launch(&config, function, parameters, nullptr),
        "cuLaunchKernelEx", code);
}

}  // namespace ostinato::cuda
