// A driver of a GPU that is none: it records its calls, fails when told to, and runs
// kernels that were compiled with cuda_emulator.h. A "cubin" is then a shared library.
#include "tests/cuda_fake_driver.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace {

std::mutex mutex;  // of all below
std::string calls, failing;
int failure = 0, driver_version = 13000, devices = 1;
int capability[2] = {9, 0};
std::vector<emulator::Array> arrays;
unsigned launches = 0;

int Record(const std::string& name, const std::string& what = "") {
  calls += name + (what.empty() ? "" : " " + what) + "\n";
  return name == failing ? failure : 0;
}

struct Config {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  const unsigned* attributes;  // the id, nothing, then the values
  unsigned count;
};

struct Loaded {
  void (*emulate)(const emulator::Run*);
  std::string name;
};

}  // namespace

void SetArrays(const std::vector<emulator::Array>& given) { arrays = given; }

extern "C" {

// ------------------------------------------------------------------------- for tests

const char* fake_calls() { return calls.c_str(); }
void fake_reset() {
  calls.clear();
  launches = 0;
  failing.clear();
  devices = 1;
  driver_version = 13000;
  capability[0] = 9;
  capability[1] = 0;
}
void fake_fail(const char* name, int result) {
  failing = name;
  failure = result;
}
void fake_gpu(int count, int major, int minor) {
  devices = count;
  capability[0] = major;
  capability[1] = minor;
}

// ------------------------------------------------------------------------- the driver

int cuInit(unsigned) { return Record("cuInit"); }
int cuDriverGetVersion(int* version) {
  *version = driver_version;
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = devices;
  return Record("cuDeviceGetCount");
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int cuDeviceGetName(char* name, int size, int) {
  strncpy(name, "Emulated GPU", size);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const std::map<int, int> values{
      {16, 2}, {75, capability[0] - (device > 0)}, {76, capability[1]}, {97, 232448}};
  *value = values.at(attribute);
  return 0;
}
int cuGetErrorName(int result, const char** name) {
  static const std::map<int, const char*> names{
      {100, "CUDA_ERROR_NO_DEVICE"},
      {200, "CUDA_ERROR_INVALID_IMAGE"},
      {209, "CUDA_ERROR_NO_BINARY_FOR_GPU"},
      {500, "CUDA_ERROR_NOT_FOUND"},
      {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"}};
  const auto found = names.find(result);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end();
}
int cuGetErrorString(int result, const char** text) {
  static std::string last;
  last = "the fake driver's text of error " + std::to_string(result);
  *text = last.c_str();
  return 0;
}

int cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*,
                      void*, unsigned) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (const int result = Record("cuLibraryLoadData")) return result;
  // The size is in the file: an ELF file ends with its section headers.
  const auto* const bytes = static_cast<const char*>(code);
  if (memcmp(bytes,
             "\x7f"
             "ELF",
             4) != 0)
    return 200;
  uint64_t sections;
  uint16_t size, count;
  memcpy(&sections, bytes + 0x28, sizeof sections);
  memcpy(&size, bytes + 0x3a, sizeof size);
  memcpy(&count, bytes + 0x3c, sizeof count);
  const int file = memfd_create("kernel", 0);
  if (write(file, bytes, sections + size * count) < 0) return 200;
  *library =
      dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
  return *library == nullptr ? 200 : 0;
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (const int result = Record("cuLibraryGetKernel", name)) return result;
  const std::string symbol = std::string("emulated_") + name;
  void* const found = dlsym(library, symbol.c_str());
  if (found == nullptr) return 500;
  *kernel = new Loaded{reinterpret_cast<void (*)(const emulator::Run*)>(found), name};
  return 0;
}
int cuKernelGetFunction(void** function, void* kernel) {
  const std::lock_guard<std::mutex> lock(mutex);
  *function = kernel;
  return Record("cuKernelGetFunction");
}
int cuFuncSetAttribute(void*, int attribute, int value) {
  const std::lock_guard<std::mutex> lock(mutex);
  return Record("cuFuncSetAttribute",
                std::to_string(attribute) + " " + std::to_string(value));
}
int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void**) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto* const loaded = static_cast<const Loaded*>(function);
  std::ostringstream what;
  what << loaded->name << " grid " << config->grid[0] << " " << config->grid[1] << " "
       << config->grid[2] << " block " << config->block[0] << " shared "
       << config->shared_bytes << " stream " << config->stream;
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->count; ++i) {
    if (config->attributes[18 * i] == 4) cluster = config->attributes[18 * i + 2];
    what << " attribute " << config->attributes[18 * i];
    for (int j = 2; j < 5; ++j) what << " " << config->attributes[18 * i + j];
  }
  if (const int result = Record("cuLaunchKernelEx", what.str())) return result;
  char error[256] = "";
  const emulator::Run run{parameters,           config->grid[0], config->block[0],
                          config->shared_bytes, cluster,         arrays.data(),
                          arrays.size(),        ++launches,      error};
  loaded->emulate(&run);
  if (error[0] == '\0') return 0;
  Record("error:", error);
  return 700;
}

}  // extern "C"
