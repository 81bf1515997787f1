// shim.h - stands in for CUDA's headers, so that g++ compiles the unchanged .cu files (g++ -x c++ -std=c++17 -include shim.h).
//
// Every GPU thread is a fiber of one OS thread; blocks run one after the other. A fiber runs until it meets a barrier or a warp
// collective, so a missing barrier shows as bits that depend on the fiber order (configure "fiber_order"). The scheduler is emu.cpp.
// Differences from a GPU: __expf and friends are libm's (a GPU's differ by some ulp), products and sums are never contracted to FMA,
// rsqrtf is 1/sqrtf, subnormals are kept, and mma sums its 16 products in order onto the accumulator, each step rounded to f32.
#ifndef HS_EMU_SHIM_H
#define HS_EMU_SHIM_H
#define HS_EMU 1
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__

// ---- vector types ----
struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
#define HS_VEC2(T, n) struct alignas(2 * sizeof(T)) n##2 { T x, y; }; static inline n##2 make_##n##2(T x, T y) { return {x, y}; }
#define HS_VEC4(T, n) struct alignas(16) n##4 { T x, y, z, w; }; static inline n##4 make_##n##4(T x, T y, T z, T w) { return {x, y, z, w}; }
HS_VEC2(float, float) HS_VEC4(float, float) HS_VEC2(int, int) HS_VEC4(int, int) HS_VEC2(unsigned, uint) HS_VEC4(unsigned, uint) HS_VEC2(double, double)
#undef HS_VEC2
#undef HS_VEC4

// ---- threads ----
struct hs_emu_thread {
  uint3 tid;
  unsigned lane, warp, linear;
  void* payload;       // of the collective it waits in
  void* sp;            // saved stack pointer (or ucontext) while not running
  int stack;           // index of its stack, -1 = not started or finished
  const char* file;    // where it waits
  int line;
  const char* waits;   // what for, 0 = runnable
  int ncopies, ngroups;   // cp.async in flight
};
extern hs_emu_thread* hs_emu_cur;
extern uint3 hs_emu_block;
extern dim3 hs_emu_block_dim, hs_emu_grid_dim;
#define threadIdx (hs_emu_cur->tid)
#define blockIdx hs_emu_block
#define blockDim hs_emu_block_dim
#define gridDim hs_emu_grid_dim
static constexpr int warpSize = 32;

// Reports a fault of the running kernel: the launch ends and returns HS_ERR_DEVICE with kernel, block, thread and this text.
[[noreturn]] void hs_emu_fail(const char* fmt, ...) __attribute__((format(printf, 1, 2)));

// Where a synchronising call stands in the source; a default argument, so it names the caller.
struct hs_emu_at {
  const char* file;
  int line;
};
#define HS_AT hs_emu_at at = {__builtin_FILE(), __builtin_LINE()}

// A warp collective: waits until every lane of mask is here, then the last one calls fn once for all. lanes[i]->payload is lane i's.
typedef void (*hs_emu_resolve)(hs_emu_thread* const* lanes, uint32_t mask);
void hs_emu_collective(const char* what, uint32_t mask, void* payload, hs_emu_resolve fn, hs_emu_at at);
void hs_emu_barrier(int id, int count, bool wait, const char* what, hs_emu_at at);

static inline void __syncthreads(HS_AT) { hs_emu_barrier(0, 0, true, "__syncthreads", at); }
static inline void hs_emu_nothing(hs_emu_thread* const*, uint32_t) {}
static inline void __syncwarp(unsigned mask = 0xffffffffu, HS_AT) { hs_emu_collective("__syncwarp", mask, 0, hs_emu_nothing, at); }

// ---- shuffles and votes ----
struct hs_emu_shfl {
  uint64_t v, out;
  int src;   // lane to read
};
void hs_emu_shfl_resolve(hs_emu_thread* const* lanes, uint32_t mask);
template <class T> static inline T hs_emu_shuffle(const char* what, unsigned mask, T v, int src, hs_emu_at at) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  hs_emu_shfl p = {0, 0, src};
  memcpy(&p.v, &v, sizeof v);
  hs_emu_collective(what, mask, &p, hs_emu_shfl_resolve, at);
  memcpy(&v, &p.out, sizeof v);
  return v;
}
template <class T> static inline T __shfl_sync(unsigned mask, T v, int src, int width = 32, HS_AT) {
  return hs_emu_shuffle("__shfl_sync", mask, v, ((int)hs_emu_cur->lane & ~(width - 1)) | (src & (width - 1)), at);
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, HS_AT) {
  const int l = (int)hs_emu_cur->lane, s = l ^ bits;
  return hs_emu_shuffle("__shfl_xor_sync", mask, v, s < (l & ~(width - 1)) + width ? s : l, at);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, HS_AT) {
  const int l = (int)hs_emu_cur->lane, s = l + (int)delta;
  return hs_emu_shuffle("__shfl_down_sync", mask, v, s < (l & ~(width - 1)) + width ? s : l, at);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, HS_AT) {
  const int l = (int)hs_emu_cur->lane, s = l - (int)delta;
  return hs_emu_shuffle("__shfl_up_sync", mask, v, s >= (l & ~(width - 1)) ? s : l, at);
}
struct hs_emu_vote { uint32_t in, out; };
void hs_emu_ballot_resolve(hs_emu_thread* const* lanes, uint32_t mask);
static inline unsigned __ballot_sync(unsigned mask, int pred, HS_AT) {
  hs_emu_vote p = {pred != 0, 0};
  hs_emu_collective("__ballot_sync", mask, &p, hs_emu_ballot_resolve, at);
  return p.out;
}
static inline int __any_sync(unsigned mask, int pred, HS_AT) { return __ballot_sync(mask, pred, at) != 0; }
static inline int __all_sync(unsigned mask, int pred, HS_AT) { return __ballot_sync(mask, pred, at) == mask; }
#define HS_EMU_REDUCE(name, T, expr) \
  static inline void hs_emu_##name(hs_emu_thread* const* lanes, uint32_t mask) { \
    T r = 0; \
    bool first = true; \
    for (uint32_t m = mask; m; m &= m - 1) { \
      const T v = *(T*)lanes[__builtin_ctz(m)]->payload; \
      r = first ? v : (T)(expr); \
      first = false; \
    } \
    for (uint32_t m = mask; m; m &= m - 1) *(T*)lanes[__builtin_ctz(m)]->payload = r; \
  } \
  static inline T __reduce_##name##_sync(unsigned mask, T v, HS_AT) { \
    hs_emu_collective("__reduce_" #name "_sync", mask, &v, hs_emu_##name, at); \
    return v; \
  }
HS_EMU_REDUCE(add, unsigned, r + v) HS_EMU_REDUCE(max, int, r > v ? r : v) HS_EMU_REDUCE(min, int, r < v ? r : v) HS_EMU_REDUCE(or, unsigned, r | v)
#undef HS_EMU_REDUCE

// ---- shared memory: HS_SHARED(float, tile, [32][33]); HS_DYN_SHARED(float, buf); ----
struct hs_emu_site { uint64_t serial; void* at; };   // one per declaration; the first thread of a block that meets it allocates
void* hs_emu_shared(hs_emu_site* site, size_t bytes);
extern char* hs_emu_dynamic;
#define HS_SHARED(T, name, ...) \
  typedef T name##_type __VA_ARGS__; \
  static hs_emu_site name##_site; \
  name##_type& name = *(name##_type*)hs_emu_shared(&name##_site, sizeof(name##_type))
#define HS_DYN_SHARED(T, name) T* const name = (T*)hs_emu_dynamic

// ---- atomics and fences: one OS thread runs all blocks ----
template <class T> static inline T atomicAdd(T* p, T v) { T o = *p; *p = o + v; return o; }
template <class T> static inline T atomicMax(T* p, T v) { T o = *p; if (v > o) *p = v; return o; }
template <class T> static inline T atomicMin(T* p, T v) { T o = *p; if (v < o) *p = v; return o; }
template <class T> static inline T atomicExch(T* p, T v) { T o = *p; *p = v; return o; }
template <class T> static inline T atomicCAS(T* p, T want, T v) { T o = *p; if (o == want) *p = v; return o; }
template <class T> static inline T atomicOr(T* p, T v) { T o = *p; *p = o | v; return o; }
static inline void __threadfence() {}
static inline void __threadfence_block() {}

// ---- intrinsics ----
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class T> static inline T __ldcs(const T* p) { return *p; }
template <class T> static inline void __stcg(T* p, T v) { *p = v; }
template <class T> static inline void __stcs(T* p, T v) { *p = v; }
#define __expf(x) expf(x)   // glibc declares functions of these names
#define __logf(x) logf(x)
#define __sincosf(x, s, c) sincosf(x, s, c)
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline float __frcp_rn(float x) { return 1 / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline void sincospi(double x, double* s, double* c) { sincos(x * M_PI, s, c); }
static inline float __saturatef(float x) { return x < 0 ? 0 : x > 1 ? 1 : x; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
template <class To, class From> static inline To hs_emu_bits(From x) { To y; static_assert(sizeof(To) == sizeof(From), ""); memcpy(&y, &x, sizeof y); return y; }
static inline unsigned __float_as_uint(float x) { return hs_emu_bits<unsigned>(x); }
static inline int __float_as_int(float x) { return hs_emu_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return hs_emu_bits<float>(x); }
static inline float __int_as_float(int x) { return hs_emu_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return hs_emu_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return hs_emu_bits<double>(x); }
static inline int __float2int_rn(float x) { return (int)lrintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }
#define HS_MINMAX(T) static inline T min(T a, T b) { return b < a ? b : a; } static inline T max(T a, T b) { return a < b ? b : a; }
HS_MINMAX(int) HS_MINMAX(unsigned) HS_MINMAX(long) HS_MINMAX(unsigned long) HS_MINMAX(long long) HS_MINMAX(unsigned long long)
#undef HS_MINMAX
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }

// ---- bf16: round to nearest, ties to even; NaN becomes 0x7fff as on the device ----
struct alignas(2) __nv_bfloat16 { uint16_t x; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
static inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  uint32_t u = __float_as_uint(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {(uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16)};
}
static inline __nv_bfloat16 __float2bfloat16(float f) { return __float2bfloat16_rn(f); }
static inline float __bfloat162float(__nv_bfloat16 b) { return __uint_as_float((uint32_t)b.x << 16); }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
static inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {__bfloat162float(v.x), __bfloat162float(v.y)}; }
static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.x; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) { return {u}; }

// ---- launches ----
// Streams are immediate: a launch has finished when it returns, unless a graph is recorded, which then keeps it.
struct hs_emu_stream { std::vector<std::function<int()>>* recorded; };
typedef hs_emu_stream* cudaStream_t;
// Runs f, which returns 0 or an hs_status, or records it.
template <class F> static inline int hs_emu_issue(cudaStream_t s, F f) {
  if (!s || !s->recorded) return f();
  s->recorded->push_back(f);
  return 0;
}
// Runs thunk(ctx) once per GPU thread. Returns 0, or an hs_status with the text in hs_emu_error.
int hs_emu_launch(const char* kernel, dim3 grid, dim3 block, size_t smem, void (*thunk)(void*), void* ctx);
extern char hs_emu_error[512];
// Options: fiber_order forward|reverse|random:SEED, poison on|off. False: unknown key or bad value.
bool hs_emu_configure(const char* key, const char* value);

// ---- emulated PTX, wrapped by common.cuh ----
void hs_emu_mma(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4], hs_emu_at at);
void hs_emu_ldmatrix(uint32_t* r, int n, bool trans, const void* row, hs_emu_at at);
void hs_emu_cp_async(void* dst, const void* src, int bytes, int valid);
void hs_emu_cp_commit();
void hs_emu_cp_wait(int groups);

// ---- emulated mbarriers, TMA and wgmma (emu/async.cpp), wrapped by hopper.cuh ----
struct alignas(64) hs_emu_map {   // of a matrix of bf16: row y starts at base + y*pitch bytes
  const char* base;
  int64_t rows, cols, pitch;
  int box_rows;
};
unsigned hs_emu_smem(const void* p);   // address in the 256 KB window of shared memory
void hs_emu_mbar_init(uint64_t* bar, unsigned count, hs_emu_at at);
void hs_emu_mbar_arrive(uint64_t* bar, unsigned bytes, hs_emu_at at);
void hs_emu_mbar_wait(uint64_t* bar, unsigned parity, hs_emu_at at);
void hs_emu_fence_proxy();
void hs_emu_tma_load(void* dst, const hs_emu_map* m, int x, int y, uint64_t* bar, hs_emu_at at);
void hs_emu_wgmma(float* d, int n, bool ta, bool tb, uint64_t a, uint64_t b, bool add, hs_emu_at at);
void hs_emu_wgmma_fence();
void hs_emu_wgmma_commit();
void hs_emu_wgmma_wait(int groups, hs_emu_at at);
#endif
