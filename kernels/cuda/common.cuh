// common.cuh - what every .cu file here includes: errors, launches, storage types, reductions, PTX wrappers, Philox.
// Written for nvcc and, with emu/shim.h in place of CUDA's headers, for g++. README.md has the rules.
#ifndef HS_COMMON_CUH
#define HS_COMMON_CUH
#ifndef HS_EMU
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cstdint>
#include <cstring>
#endif
extern "C" {
#include "../abi.h"
}

typedef __nv_bfloat16 bf16;

#define HS_MIN(a, b) ((a) < (b) ? (a) : (b))
#define HS_MAX(a, b) ((a) > (b) ? (a) : (b))
#define HS_CEIL(a, b) (((a) + (b) - 1) / (b))
#define HS_FULL 0xffffffffu

// ---- ops: each is a pair of C functions; one that no file defines answers HS_ERR_UNSUPPORTED (api.cu) ----
// hs_op_NAME checks shapes and pointers on the host (never the contents of device arrays) and launches. hs_ws_NAME gives the bytes of ws.
#define HS_OP(op, args) \
  extern "C" __attribute__((weak)) hs_status hs_op_##op(cudaStream_t, const hs_##args##_args*); \
  extern "C" __attribute__((weak)) int64_t hs_ws_##op(const hs_##args##_args*);
#define HS_OPS(X) \
  X(embed, embed) X(embed_bwd, embed_bwd) X(rmsnorm, rmsnorm) X(rmsnorm_bwd, rmsnorm_bwd) X(gatednorm, gatednorm) \
  X(gatednorm_bwd, gatednorm_bwd) X(gemm, gemm) X(copy, vec) X(add, vec) X(convgate, convgate) X(convgate_bwd, convgate_bwd) X(gdn, gdn) \
  X(gdn_bwd, gdn_bwd) X(convgate_step, convgate_step) X(gdn_step, gdn_step) X(attnprep, attnprep) X(attnprep_bwd, attnprep_bwd) \
  X(attn, attn) X(attn_bwd, attn_bwd) X(gate, gate) X(gate_bwd, gate_bwd) X(kv_write, kv_write) X(attn_paged, attn_paged) \
  X(slot_copy, slot_copy) X(swiglu, swiglu) X(swiglu_bwd, swiglu_bwd) X(gather, gather) X(gather_bwd, gather) X(lmhead, lmhead) \
  X(lmhead_bwd, lmhead_bwd) X(sample, sample) X(adamw, adamw) X(sumsq, sumsq) X(lmhead_sample, lmhead_sample) \
  X(gemm_group, gemm_group) X(gemm_swiglu, gemm_swiglu)
HS_OPS(HS_OP)
#undef HS_OP

// ---- errors: the calling thread's text; run() puts the op's name before it ----
hs_status hs_fail(hs_status st, const char* fmt, ...) __attribute__((format(printf, 2, 3)));
#define HS_NEED(cond, ...) do { if (!(cond)) return hs_fail(HS_ERR_ARG, __VA_ARGS__); } while (0)
#define HS_NEED_SHAPE(T, D) HS_NEED(a->T > 0 && a->D > 0, #T " %lld, " #D " %lld: need both > 0", (long long)a->T, (long long)a->D)
#define HS_NEED_PTR(p) HS_NEED(a->p, #p " is required")
#define HS_NEED_WS(need) do { const int64_t n_ = (need); if (a->ws_bytes < n_ || (n_ > 0 && !a->ws)) \
  return hs_fail(HS_ERR_WORKSPACE, "ws_bytes %lld < %lld needed", (long long)(a->ws ? a->ws_bytes : 0), (long long)n_); } while (0)
#define HS_TRY(call) do { const hs_status st_ = (call); if (st_ != HS_OK) return st_; } while (0)
static inline int64_t hs_align(int64_t bytes) { return (bytes + 63) & ~(int64_t)63; }
static inline int64_t hs_sizeof(int32_t dtype) { return dtype == HS_F32 ? 4 : 2; }

// HS_DISPATCH(dtype, T, { ... T ... }): runs the block with T = float or bf16; other dtypes return HS_ERR_DTYPE.
#define HS_DISPATCH(dtype, T, ...) \
  switch (dtype) { \
    case HS_F32: { using T = float; __VA_ARGS__ } break; \
    case HS_BF16: { using T = bf16; __VA_ARGS__ } break; \
    default: return hs_fail(HS_ERR_DTYPE, "dtype %d: the cuda table stores f32 (0) or bf16 (2)", (int)(dtype)); \
  }

// ---- launches ----
// HS_LAUNCH(stream, kernel, grid, block, dynamic shared bytes, arguments...) -> hs_status. A kernel name with commas goes in parentheses.
// Arguments are converted to the kernel's parameter types and passed whole. An empty grid does nothing.
#ifdef HS_EMU
template <class... P> struct hs_launch_ctx {
  void (*kernel)(P...);
  std::tuple<P...> args;
  static void thunk(void* c) {
    const hs_launch_ctx* x = (const hs_launch_ctx*)c;
    std::apply(x->kernel, x->args);
  }
};
template <class... P, class... A>
static inline hs_status hs_launch(const char* name, cudaStream_t s, void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, A&&... a) {
  if (!grid.x || !grid.y || !grid.z) return HS_OK;
  hs_launch_ctx<P...> c = {kernel, std::tuple<P...>((P)a...)};
  return (hs_status)hs_emu_issue(s, [=]() mutable {
    return hs_emu_launch(name, grid, block, smem, hs_launch_ctx<P...>::thunk, &c) ? hs_fail(HS_ERR_DEVICE, "%s", hs_emu_error) : HS_OK;
  });
}
#else
#define HS_SHARED(T, name, ...) __shared__ __align__(16) T name __VA_ARGS__
#define HS_DYN_SHARED(T, name) \
  extern __shared__ __align__(128) unsigned char hs_dyn_smem[]; \
  T* const name = reinterpret_cast<T*>(hs_dyn_smem)
template <class... P, class... A>
static inline hs_status hs_launch(const char* name, cudaStream_t s, void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, A&&... a) {
  if (!grid.x || !grid.y || !grid.z) return HS_OK;
  cudaError_t e = cudaSuccess;
  if (smem > 48u << 10) e = cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
  auto call = [&](P... p) {
    void* ptrs[] = {(void*)&p..., nullptr};
    return cudaLaunchKernel((const void*)kernel, grid, block, ptrs, smem, s);
  };
  if (e == cudaSuccess) e = call((P)a...);
  return e == cudaSuccess ? HS_OK : hs_fail(HS_ERR_DEVICE, "kernel %s, grid (%u,%u,%u), block (%u,%u,%u), %zu bytes of shared memory: %s", name, grid.x,
                                            grid.y, grid.z, block.x, block.y, block.z, smem, cudaGetErrorString(e));
}
#endif
#define HS_LAUNCH(stream, kernel, grid, block, smem, ...) hs_launch(#kernel, stream, kernel, dim3(grid), dim3(block), smem, ##__VA_ARGS__)

// Sets n bytes of device memory on the stream.
static inline hs_status hs_memset(cudaStream_t s, void* p, int byte, size_t n) {
#ifdef HS_EMU
  return (hs_status)hs_emu_issue(s, [=] { return memset(p, byte, n), HS_OK; });
#else
  const cudaError_t e = cudaMemsetAsync(p, byte, n, s);
  return e == cudaSuccess ? HS_OK : hs_fail(HS_ERR_DEVICE, "set %zu bytes: %s", n, cudaGetErrorString(e));
#endif
}

// Second stage of a weight gradient: dw[D] += part[parts, D] summed in order (pointwise.cu).
hs_status hs_add_parts(cudaStream_t s, int64_t parts, int64_t D, const float* part, float* dw);

// ---- storage: T is float or bf16, arithmetic is f32 ----
static __device__ __forceinline__ float to_f(float x) { return x; }
static __device__ __forceinline__ float to_f(bf16 x) { return __bfloat162float(x); }
template <class T> __device__ __forceinline__ T from_f(float x);
template <> __device__ __forceinline__ float from_f<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_f<bf16>(float x) { return __float2bfloat16_rn(x); }

// N elements moved as one 16-byte (or smaller) access; the address must be a multiple of the pack's size.
template <class T, int N> struct alignas(sizeof(T) * N) pack {
  T v[N];
};
template <class T> constexpr int pack_n = 16 / (int)sizeof(T);
template <class T, int N> static __device__ __forceinline__ pack<T, N> load_pack(const T* p) {
#ifdef HS_EMU
  if ((uintptr_t)p % (sizeof(T) * N)) hs_emu_fail("load of %zu bytes from %p: not aligned", sizeof(T) * N, (const void*)p);
#endif
  return *reinterpret_cast<const pack<T, N>*>(p);
}
template <class T, int N> static __device__ __forceinline__ void store_pack(T* p, const pack<T, N>& v) {
#ifdef HS_EMU
  if ((uintptr_t)p % (sizeof(T) * N)) hs_emu_fail("store of %zu bytes to %p: not aligned", sizeof(T) * N, (void*)p);
#endif
  *reinterpret_cast<pack<T, N>*>(p) = v;
}
// Whether rows of `cols` elements starting at each of the pointers can be read in 16-byte packs.
static inline bool hs_packs(int64_t cols, int64_t elem, const void* p, const void* q = 0, const void* r = 0, const void* s = 0) {
  return cols * elem % 16 == 0 && (((uintptr_t)p | (uintptr_t)q | (uintptr_t)r | (uintptr_t)s) & 15) == 0;
}

// ---- math ----
static __device__ __forceinline__ float sigmoid_f(float x) { return 1.0f / (1.0f + expf(-x)); }
static __device__ __forceinline__ float swiglu_f(float gate, float up) { return gate * sigmoid_f(gate) * up; }

// ---- reductions in a fixed order: every lane (thread) gets the same bits ----
// A butterfly over the warp: lanes 16 apart, then 8, 4, 2, 1. The emulator does the five steps in one collective, with the same bits.
struct sum_of { template <class R> __device__ __forceinline__ R operator()(R a, R b) const { return a + b; } };
struct max_of { __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); } };
#ifdef HS_EMU
template <class R, class F> static void hs_emu_butterfly(hs_emu_thread* const* lanes, uint32_t) {
  R v[32], w[32];
  for (int i = 0; i < 32; i++) v[i] = *(const R*)lanes[i]->payload;
  for (int d = 16; d; d >>= 1) {
    for (int i = 0; i < 32; i++) w[i] = F()(v[i], v[i ^ d]);
    memcpy(v, w, sizeof v);
  }
  for (int i = 0; i < 32; i++) *(R*)lanes[i]->payload = v[i];
}
template <class R, class F> static inline R warp_butterfly(R v, F, HS_AT) {
  hs_emu_collective("warp reduction", HS_FULL, &v, hs_emu_butterfly<R, F>, at);
  return v;
}
#else
template <class R, class F> static __device__ __forceinline__ R warp_butterfly(R v, F f) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v = f(v, __shfl_xor_sync(HS_FULL, v, d));
  return v;
}
#endif
static __device__ __forceinline__ float warp_sum(float v) { return warp_butterfly(v, sum_of()); }
static __device__ __forceinline__ double warp_sum(double v) { return warp_butterfly(v, sum_of()); }
static __device__ __forceinline__ float warp_max(float v) { return warp_butterfly(v, max_of()); }
// Sum over the block's x dimension (a multiple of 32, the same for all threads; y = z = 1). Two barriers inside; may be called again.
template <class R> static __device__ __forceinline__ R block_sum(R v) {
  HS_SHARED(R, part, [32]);
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  v = warp_sum(v);
  if ((threadIdx.x & 31) == 0) part[warp] = v;
  __syncthreads();
  R s = part[0];
  for (int i = 1; i < warps; i++) s += part[i];
  __syncthreads();
  return s;
}
static __device__ __forceinline__ float block_max(float v) {
  HS_SHARED(float, part, [32]);
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  v = warp_max(v);
  if ((threadIdx.x & 31) == 0) part[warp] = v;
  __syncthreads();
  float s = part[0];
  for (int i = 1; i < warps; i++) s = fmaxf(s, part[i]);
  __syncthreads();
  return s;
}

// ---- PTX. Raw asm stands only here and in hopper.cuh; the emulator's bodies are warp collectives in f32. All 32 lanes must take part. ----
#ifdef HS_EMU
#define HS_PTX_AT , HS_AT
#define HS_PTX_AT_ONLY HS_AT
#else
#define HS_PTX_AT
#define HS_PTX_AT_ONLY
static __device__ __forceinline__ unsigned hs_smem(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
#endif

// d[16x8] = a[16x16] b[16x8] + c, bf16 -> f32 (mma.sync.m16n8k16). With g = lane/4, t = lane%4, each register two elements, low half first:
//   a[0] (g, 2t) a[1] (g+8, 2t) a[2] (g, 2t+8) a[3] (g+8, 2t+8);  b[0] (k = 2t, n = g) b[1] (k = 2t+8, n = g);
//   c, d: [0] (g, 2t) [1] (g, 2t+1) [2] (g+8, 2t) [3] (g+8, 2t+1).
static __device__ __forceinline__ void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4] HS_PTX_AT) {
#ifdef HS_EMU
  hs_emu_mma(d, a, b, c, at);
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#endif
}
// Four 8x8 bf16 matrices from shared memory; lane 8i+j gives the address of row j of matrix i. r[i] = elements (lane/4, 2(lane%4)) and
// the next one of matrix i, or of its transpose. Row-major A tile 16x16 at (0,0): row address = tile + (lane%16)*ld + 8*(lane/16).
static __device__ __forceinline__ void ldmatrix_x4(uint32_t r[4], const void* row HS_PTX_AT) {
#ifdef HS_EMU
  hs_emu_ldmatrix(r, 4, false, row, at);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(hs_smem(row)) : "memory");
#endif
}
static __device__ __forceinline__ void ldmatrix_x4_trans(uint32_t r[4], const void* row HS_PTX_AT) {
#ifdef HS_EMU
  hs_emu_ldmatrix(r, 4, true, row, at);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(hs_smem(row)) : "memory");
#endif
}
// Two matrices; lanes 0..15 give the addresses.
static __device__ __forceinline__ void ldmatrix_x2(uint32_t r[2], const void* row HS_PTX_AT) {
#ifdef HS_EMU
  hs_emu_ldmatrix(r, 2, false, row, at);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(hs_smem(row)) : "memory");
#endif
}
static __device__ __forceinline__ void ldmatrix_x2_trans(uint32_t r[2], const void* row HS_PTX_AT) {
#ifdef HS_EMU
  hs_emu_ldmatrix(r, 2, true, row, at);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(hs_smem(row)) : "memory");
#endif
}
// Starts a 16-byte copy from global to shared memory, both aligned; bytes past `valid` (0..16) become zero and are not read.
static __device__ __forceinline__ void cp_async16(void* dst, const void* src, int valid = 16) {
#ifdef HS_EMU
  hs_emu_cp_async(dst, src, 16, valid);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(hs_smem(dst)), "l"(src), "r"(valid) : "memory");
#endif
}
// The same for one 4-byte element, copied or zeroed.
static __device__ __forceinline__ void cp_async4(void* dst, const void* src, bool copied) {
#ifdef HS_EMU
  hs_emu_cp_async(dst, src, 4, copied ? 4 : 0);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(hs_smem(dst)), "l"(src), "r"(copied ? 4 : 0) : "memory");
#endif
}
static __device__ __forceinline__ void cp_async_commit() {
#ifdef HS_EMU
  hs_emu_cp_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most N of this thread's groups are in flight; a __syncthreads makes the data visible to the others.
template <int N> static __device__ __forceinline__ void cp_async_wait() {
#ifdef HS_EMU
  hs_emu_cp_wait(N);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}
// Four floats of shared memory, read even when the compiler has them in registers already.
static __device__ __forceinline__ pack<float, 4> load_shared_again(const float* p) {
#ifdef HS_EMU
  return load_pack<float, 4>(p);
#else
  pack<float, 4> x;
  asm volatile("ld.volatile.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.v[0]), "=f"(x.v[1]), "=f"(x.v[2]), "=f"(x.v[3]) : "r"(hs_smem(p)) : "memory");
  return x;
#endif
}
// Named barrier id (1..15; 0 is __syncthreads) for n threads, a multiple of 32.
static __device__ __forceinline__ void bar_sync(int id, int n HS_PTX_AT) {
#ifdef HS_EMU
  hs_emu_barrier(id, n, true, "bar.sync", at);
#else
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory");
#endif
}
static __device__ __forceinline__ void bar_arrive(int id, int n HS_PTX_AT) {
#ifdef HS_EMU
  hs_emu_barrier(id, n, false, "bar.arrive", at);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory");
#endif
}

// ---- Philox4x32-10 (Salmon et al., SC'11), the words of the cpu table's hs_philox ----
static __device__ __forceinline__ void philox4x32(uint32_t key0, uint32_t key1, const uint32_t ctr[4], uint32_t out[4]) {
  uint32_t a = ctr[0], b = ctr[1], c = ctr[2], d = ctr[3];
#pragma unroll
  for (int r = 0; r < 10; r++) {
    const uint32_t ph = __umulhi(0xD2511F53u, a), pl = 0xD2511F53u * a, qh = __umulhi(0xCD9E8D57u, c), ql = 0xCD9E8D57u * c;
    a = qh ^ b ^ key0, b = ql, c = ph ^ d ^ key1, d = pl;
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}
#endif
