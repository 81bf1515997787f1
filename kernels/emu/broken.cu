// broken.cu - kernels that are wrong on purpose, for libhs_emu_test.so: emu_fault_test.go requires that each is caught.
// They run as ops HS_NUM_OPS + which with hs_vec_args: src[n] -> dst[n], f32, one block of 64 threads.
#include "../cuda/common.cuh"

static const int threads = 64;

// The lower half waits at one barrier, the upper half at another.
static __global__ void two_barriers(int64_t, const float* src, float* dst) {
  HS_SHARED(float, buf, [threads]);
  buf[threadIdx.x] = src[threadIdx.x];
  if (threadIdx.x < 32) __syncthreads();
  else __syncthreads();
  dst[threadIdx.x] = buf[threads - 1 - threadIdx.x];
}

// Threads past n leave before the barrier.
static __global__ void early_return(int64_t n, const float* src, float* dst) {
  if (threadIdx.x >= n) return;
  __syncthreads();
  dst[threadIdx.x] = src[threadIdx.x];
}

// One warp waits for a named barrier that the other never reaches.
static __global__ void lonely_barrier(int64_t, const float* src, float* dst) {
  if (threadIdx.x < 32) bar_sync(1, threads);
  dst[threadIdx.x] = src[threadIdx.x];
}

// A shuffle over the full warp in a branch that half of it takes.
static __global__ void half_shuffle(int64_t, const float* src, float* dst) {
  float v = src[threadIdx.x];
  if (threadIdx.x & 1) v = __shfl_xor_sync(HS_FULL, v, 2);
  else v += __shfl_xor_sync(HS_FULL, v, 4);
  dst[threadIdx.x] = v;
}

// Writes one element past the end.
static __global__ void out_of_bounds(int64_t n, const float* src, float* dst) {
  for (int64_t i = threadIdx.x; i <= n; i += threads) dst[i] = i < n ? src[i] : 0.0f;
}

// Writes far past the end of a shared array.
static __global__ void shared_overrun(int64_t, const float* src, float* dst) {
  HS_SHARED(float, buf, [threads]);
  buf[threadIdx.x + 1] = src[threadIdx.x];
  __syncthreads();
  dst[threadIdx.x] = buf[threadIdx.x];
}

// Forgets the last element.
static __global__ void unwritten(int64_t n, const float* src, float* dst) {
  for (int64_t i = threadIdx.x; i < n - 1; i += threads) dst[i] = src[i];
}

// Reads what another thread wrote to shared memory with no barrier between.
static __global__ void missing_barrier(int64_t, const float* src, float* dst) {
  HS_SHARED(float, buf, [threads]);
  buf[threadIdx.x] = src[threadIdx.x];
  dst[threadIdx.x] = buf[(threadIdx.x + 1) % threads];
}

// Sums in the order in which threads arrive.
static __global__ void racing_sum(int64_t, const float* src, float* dst) {
  if (threadIdx.x == 0) dst[0] = 0;
  __syncthreads();
  atomicAdd(dst, src[threadIdx.x]);
  if (threadIdx.x) dst[threadIdx.x] = 0;
}

// Reads a tile before its copy has arrived.
static __global__ void missing_wait(int64_t, const float* src, float* dst) {
  HS_SHARED(float, buf, [threads]);
  if (threadIdx.x < threads / 4) cp_async16(buf + 4 * threadIdx.x, src + 4 * threadIdx.x);
  cp_async_commit();
  __syncthreads();
  dst[threadIdx.x] = buf[threadIdx.x];
}

// Recurses until the stack ends.
static __device__ int deep(volatile int* p, int n) {
  volatile int pad[256];
  pad[n & 255] = *p;
  return n == 0 ? pad[0] : deep(p, n - 1) + pad[1];
}
static __global__ void stack_overflow(int64_t, const float* src, float* dst) {
  volatile int x = 1;
  dst[threadIdx.x] = src[threadIdx.x] + (float)deep(&x, 1 << 20);
}

// Right: the control for all of the above.
static __global__ void correct(int64_t, const float* src, float* dst) {
  HS_SHARED(float, buf, [threads]);
  if (threadIdx.x < threads / 4) cp_async16(buf + 4 * threadIdx.x, src + 4 * threadIdx.x);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  dst[threadIdx.x] = buf[threads - 1 - threadIdx.x];
}

extern "C" hs_status hs_selftest(cudaStream_t s, int32_t which, const void* args) {
  static void (*const kernels[])(int64_t, const float*, float*) = {correct,       two_barriers, early_return,    lonely_barrier, half_shuffle, out_of_bounds,
                                                                   shared_overrun, unwritten,    missing_barrier, racing_sum,     missing_wait, stack_overflow};
  static const char* const names[] = {"correct",        "two_barriers", "early_return",    "lonely_barrier", "half_shuffle", "out_of_bounds",
                                      "shared_overrun", "unwritten",    "missing_barrier", "racing_sum",     "missing_wait", "stack_overflow"};
  HS_NEED(which >= 0 && which < (int)(sizeof kernels / sizeof *kernels), "self-test %d", (int)which);
  const hs_vec_args* a = (const hs_vec_args*)args;
  return hs_launch(names[which], s, kernels[which], dim3(1), dim3(threads), 0, a->n, (const float*)a->src, (float*)a->dst);
}
