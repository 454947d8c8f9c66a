// Kernels of an NVIDIA GPU, loaded and launched through its driver, which is opened at
// run time: nothing of CUDA is needed to build or to load this library.
#ifndef OSTINATO_CUDA_LAUNCHER_H_
#define OSTINATO_CUDA_LAUNCHER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ostinato::cuda {

struct Grid {
  int64_t blocks, threads;  // threads of a block
  int64_t shared_bytes;     // of a block
  int64_t cluster;          // blocks of a cluster
};

// A kernel of a compiled text. `digest` stands for the bytes of `cubin`.
struct Code {
  const uint8_t* cubin;
  size_t bytes;
  std::string_view digest, name;
};

// Opens the driver, or another one than before, and returns why that is impossible;
// empty if it is open. Another one not while kernels run.
std::string OpenDriver(const char* path);

// Loads a kernel into the current context, once, and opens the driver of the system if
// none is open. Throws std::runtime_error.
void Prepare(const Code& code, const Grid& grid);

// Launches a prepared kernel on a stream, and returns at once. `parameters` points to
// the value of each parameter. Throws std::runtime_error.
void Launch(const Code& code, const Grid& grid, void** parameters, void* stream);

}  // namespace ostinato::cuda

#endif  // OSTINATO_CUDA_LAUNCHER_H_
