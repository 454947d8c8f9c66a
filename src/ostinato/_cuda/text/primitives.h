// What kernels use of a GPU. It stands before the text of a kernel and includes
// nothing, so that NVRTC compiles it without any files. native/tests/cuda_emulator.h
// has the same for a CPU.
#define OSTINATO_KERNEL extern "C" __global__
#define OSTINATO_DEVICE __device__ __forceinline__
#define OSTINATO_UNROLL _Pragma("unroll")

using Index = long long;

OSTINATO_DEVICE Index ThreadOfBlock() { return threadIdx.x; }
OSTINATO_DEVICE Index Block() { return blockIdx.x; }
OSTINATO_DEVICE Index ThreadsOfBlock() { return blockDim.x; }

// Until all threads of a block are here.
OSTINATO_DEVICE void WaitForBlock() { __syncthreads(); }

extern __shared__ __align__(16) unsigned char shared_memory[];
OSTINATO_DEVICE unsigned char* SharedMemory() { return shared_memory; }

// Every access to an array goes through these two; the emulator checks it there.
template <typename T>
OSTINATO_DEVICE T Load(const T* p) {
  return *p;
}
template <typename T>
OSTINATO_DEVICE void Store(T* p, T value) {
  *p = value;
}

struct BFloat16 {
  unsigned short bits;
};
OSTINATO_DEVICE float Widen(BFloat16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}
OSTINATO_DEVICE float Widen(float x) { return x; }
OSTINATO_DEVICE double Widen(double x) { return x; }
OSTINATO_DEVICE void Narrow(float x, BFloat16* result) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result->bits) : "f"(x));
}
OSTINATO_DEVICE void Narrow(float x, float* result) { *result = x; }
OSTINATO_DEVICE void Narrow(double x, double* result) { *result = x; }
