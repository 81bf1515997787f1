// broken.cu - kernels that are wrong on purpose, for libhs_emu_test.so: emu_fault_test.go requires that each is caught.
// They run as ops HS_NUM_OPS + which with hs_vec_args: src[n] -> dst[n], f32, one block of 64 threads.
#include "../cuda/hopper.cuh"

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

// ---- mbarriers, TMA, wgmma: src as a matrix of bf16, two lines of 64; one warpgroup ----

static const int hopper_threads = 128;

struct tma_box {
  unsigned char tile[1024];
  uint64_t bar;
};
// Element i of a box of floats, as TMA has swizzled it.
static __device__ float& box_at(tma_box* b, int i) { return *(float*)(b->tile + ((4 * i) ^ (i >> 5 & 7) << 4)); }
static __device__ tma_box* start_box(const hs_tma& m, unsigned bytes, bool fence = true) {
  HS_DYN_SHARED(unsigned char, raw);
  tma_box* b = (tma_box*)(raw + (-hs_smem(raw) & 1023));
  if (threadIdx.x == 0) {
    mbar_init(&b->bar, 1);
    if (fence) fence_proxy_async();
    mbar_arrive_expect(&b->bar, bytes);
    tma_load(b->tile, &m, 0, 0, &b->bar);
  }
  __syncthreads();
  return b;
}
static __global__ void tma_correct(const __grid_constant__ hs_tma m, const float*, float* dst) {
  tma_box* b = start_box(m, 256);
  mbar_wait(&b->bar, 0);
  if (threadIdx.x < threads) dst[threadIdx.x] = box_at(b, threadIdx.x);
}
// Reads the box before it waits.
static __global__ void tma_late_wait(const __grid_constant__ hs_tma m, const float*, float* dst) {
  tma_box* b = start_box(m, 256);
  if (threadIdx.x < threads) dst[threadIdx.x] = box_at(b, threadIdx.x);
  mbar_wait(&b->bar, 0);
}
// Waits for the phase before.
static __global__ void tma_wrong_parity(const __grid_constant__ hs_tma m, const float*, float* dst) {
  tma_box* b = start_box(m, 256);
  mbar_wait(&b->bar, 1);
  if (threadIdx.x < threads) dst[threadIdx.x] = box_at(b, threadIdx.x);
}
static __global__ void tma_many_bytes(const __grid_constant__ hs_tma m, const float*, float*) { mbar_wait(&start_box(m, 512)->bar, 0); }
static __global__ void tma_few_bytes(const __grid_constant__ hs_tma m, const float*, float*) { mbar_wait(&start_box(m, 128)->bar, 0); }
static __global__ void tma_no_fence(const __grid_constant__ hs_tma m, const float*, float*) { mbar_wait(&start_box(m, 256, false)->bar, 0); }

// dst[i] = register 0 of A B^T of thread i, row r of A and column r of B being src[r % 64 + k]: a Hankel matrix.
static __device__ unsigned char* hankel(const float* src) {
  HS_DYN_SHARED(unsigned char, raw);
  unsigned char* t = raw + (-hs_smem(raw) & 1023);
  for (int i = threadIdx.x; i < 64 * 16; i += hopper_threads) *(bf16*)(t + ((i / 16 * 128 + i % 16 * 2) ^ (i / 16 & 7) << 4)) = from_f<bf16>(src[(i / 16 + i % 16) % threads]);
  fence_proxy_async();
  __syncthreads();
  return t;
}
static __global__ void wgmma_correct(const __grid_constant__ hs_tma, const float* src, float* dst) {
  const uint64_t t = wgmma_desc(hankel(src), 0, 1024);
  float d[32];
  wgmma_fence();
  wgmma<64, false, false>(d, t, t, false);
  wgmma_commit();
  wgmma_wait<0>();
  if (threadIdx.x < threads) dst[threadIdx.x] = d[0];
}
static __global__ void wgmma_late_wait(const __grid_constant__ hs_tma, const float* src, float* dst) {
  const uint64_t t = wgmma_desc(hankel(src), 0, 1024);
  float d[32];
  wgmma_fence();
  wgmma<64, false, false>(d, t, t, false);
  wgmma_commit();
  if (threadIdx.x < threads) dst[threadIdx.x] = d[0];
  wgmma_wait<0>();
}
static __global__ void wgmma_no_wait(const __grid_constant__ hs_tma, const float* src, float*) {
  const uint64_t t = wgmma_desc(hankel(src), 0, 1024);
  float d[32];
  wgmma_fence();
  wgmma<64, false, false>(d, t, t, false);
  wgmma_commit();
}
// The stride points past the block's shared memory.
static __global__ void wgmma_wild_descriptor(const __grid_constant__ hs_tma, const float* src, float*) {
  const uint64_t t = wgmma_desc(hankel(src), 0, 16384);
  float d[32];
  wgmma_fence();
  wgmma<64, false, false>(d, t, t, false);
  wgmma_commit();
  wgmma_wait<0>();
}

extern "C" hs_status hs_selftest(cudaStream_t s, int32_t which, const void* args) {
  static void (*const kernels[])(int64_t, const float*, float*) = {correct,       two_barriers, early_return,    lonely_barrier, half_shuffle, out_of_bounds,
                                                                   shared_overrun, unwritten,    missing_barrier, racing_sum,     missing_wait, stack_overflow};
  static const char* const names[] = {"correct",        "two_barriers", "early_return",    "lonely_barrier", "half_shuffle", "out_of_bounds",
                                      "shared_overrun", "unwritten",    "missing_barrier", "racing_sum",     "missing_wait", "stack_overflow"};
  static void (*const hopper[])(hs_tma, const float*, float*) = {tma_correct,  tma_late_wait, tma_wrong_parity, tma_many_bytes, tma_few_bytes,
                                                                 tma_no_fence, wgmma_correct, wgmma_late_wait,  wgmma_no_wait,  wgmma_wild_descriptor};
  static const char* const hopper_names[] = {"tma_correct",  "tma_late_wait", "tma_wrong_parity", "tma_many_bytes", "tma_few_bytes",
                                             "tma_no_fence", "wgmma_correct", "wgmma_late_wait",  "wgmma_no_wait",  "wgmma_wild_descriptor"};
  const int plain = (int)(sizeof kernels / sizeof *kernels), all = plain + (int)(sizeof hopper / sizeof *hopper);
  HS_NEED(which >= 0 && which < all, "self-test %d", (int)which);
  const hs_vec_args* a = (const hs_vec_args*)args;
  if (which >= plain) {
    hs_tma m;
    HS_TRY(hs_tma_matrix(&m, a->src, 2, 64, 64, 2));
    return hs_launch(hopper_names[which - plain], s, hopper[which - plain], dim3(1), dim3(hopper_threads), 10240, m, (const float*)a->src, (float*)a->dst);
  }
  return hs_launch(names[which], s, kernels[which], dim3(1), dim3(threads), 0, a->n, (const float*)a->src, (float*)a->dst);
}
