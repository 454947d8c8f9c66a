// What kernels use of a GPU. It stands before the text of a kernel and includes
// nothing, so that NVRTC compiles it without any files. native/tests/cuda_emulator.h
// has the same for a CPU.
#define OSTINATO_KERNEL extern "C" __global__
// A kernel whose blocks have so many threads, one block for each processor.
#define OSTINATO_KERNEL_OF(threads) extern "C" __global__ __launch_bounds__(threads, 1)
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

// ------------------------------------------------------- products of tiles, in warps
//
// All 32 threads of a warp, its lanes, call these together.

using Word = unsigned;  // two BFloat16, the first in the low bits, or one float

OSTINATO_DEVICE float AsFloat(Word x) { return __uint_as_float(x); }
OSTINATO_DEVICE Word AsWord(float x) { return __float_as_uint(x); }
OSTINATO_DEVICE Word Pack(float low, float high) {
  Word pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// The factor that a product takes in the place of a float: 10 bits follow its first.
OSTINATO_DEVICE Word RoundFactor(float x) {
  Word result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(x));
  return result;
}

// 2 to the power of x, the logarithm for 2 of x, and 1 / x, within some roundings.
OSTINATO_DEVICE float Exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
OSTINATO_DEVICE float Log2(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
OSTINATO_DEVICE float Reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The value of `x` in the lane whose number differs in the bits of `mask`.
OSTINATO_DEVICE float OfLane(float x, int mask) {
  return __shfl_xor_sync(~0u, x, mask);
}

OSTINATO_DEVICE unsigned SharedAddress(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Loads four matrices of 8 rows of 4 words from shared memory. `row` of lane 8 m + i is
// row i of matrix m; result m of lane 4 i + j is word j of row i.
OSTINATO_DEVICE void LoadMatrices(const Word* row, Word* result) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
               : "r"(SharedAddress(row))
               : "memory");
}

// sum += a b, where a is [16][8 words] and b, given by columns, [8][8 words]. Lane
// 4 i + j holds, of a, word j of the rows i and i + 8 and word j + 4 of these rows; of
// b, the words j and j + 4 of column i; of sum, the columns 2 j and 2 j + 1 of row i,
// and then of row i + 8.
OSTINATO_DEVICE void MultiplyTiles(float* sum, const Word* a, Word b_0, Word b_1,
                                   BFloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_0), "r"(b_1));
}
OSTINATO_DEVICE void MultiplyTiles(float* sum, const Word* a, Word b_0, Word b_1,
                                   float) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_0), "r"(b_1));
}

// ----------------------------------------------------------- clusters of blocks: sm_90
//
// The blocks of a cluster run at the same time, and store into each other's shared
// memory.

// Until all threads of a cluster are here, and see what was stored before.
OSTINATO_DEVICE void WaitForCluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// The same in two halves: ArriveAtCluster says that this thread is here, and waits for
// nobody; WaitForArrived waits until all threads have said so.
OSTINATO_DEVICE void ArriveAtCluster() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
OSTINATO_DEVICE void WaitForArrived() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Counts the bytes that arrive in the shared memory of a block. It has phases, which
// end when all expected bytes are there: phase 0, 1, 2, ... of parity 0, 1, 0, ...
struct alignas(8) Arrivals {
  unsigned long long state;
};
// By one thread, before WaitForCluster.
OSTINATO_DEVICE void Begin(Arrivals* arrivals) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "fence.mbarrier_init.release.cluster;" ::"r"(SharedAddress(arrivals))
      : "memory");
}
// By one thread, once in each phase.
OSTINATO_DEVICE void Expect(Arrivals* arrivals, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   SharedAddress(arrivals)),
               "r"(bytes)
               : "memory");
}
// Until the phase of this parity, the present one or the one before, has ended.
OSTINATO_DEVICE void WaitFor(Arrivals* arrivals, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(SharedAddress(arrivals)),
      "r"(parity)
      : "memory");
}
// Stores a word into the shared memory of another block, or of this one, where it
// arrives later. `place` and `arrivals` are those of this block.
OSTINATO_DEVICE void Send(Word* place, Word value, Arrivals* arrivals, int block) {
  asm volatile(
      "{\n"
      ".reg .b32 place, arrivals;\n"
      "mapa.shared::cluster.u32 place, %0, %3;\n"
      "mapa.shared::cluster.u32 arrivals, %2, %3;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [place], %1, "
      "[arrivals];\n"
      "}" ::"r"(SharedAddress(place)),
      "r"(value), "r"(SharedAddress(arrivals)), "r"(block)
      : "memory");
}
// The same of two words that lie side by side.
OSTINATO_DEVICE void Send(Word* place, Word first, Word second, Arrivals* arrivals,
                          int block) {
  asm volatile(
      "{\n"
      ".reg .b32 place, arrivals;\n"
      "mapa.shared::cluster.u32 place, %0, %4;\n"
      "mapa.shared::cluster.u32 arrivals, %3, %4;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [place], "
      "{%1, %2}, [arrivals];\n"
      "}" ::"r"(SharedAddress(place)),
      "r"(first), "r"(second), "r"(SharedAddress(arrivals)), "r"(block)
      : "memory");
}
