// cpu.h - what the C files of the cpu table share: errors, thread pool, SIMD levels, small matrix products.
//
// How a kernel file is laid out. The bodies live in NAME_body.h, written once in terms of `real`, `VR` and the v* helpers of
// cpu_vec.h, each function wrapped in FN(). NAME.c includes them once per SIMD level and type:
//
//     #include "cpu.h"
//     #define HS_BODY "cpu_seq_body.h"
//     #include "cpu_levels.h"               // f32 with AVX-512, f32 with AVX2+FMA, f32 baseline, f64 baseline
//     hs_status hs_cpu_gdn(const hs_gdn_args* a) { return HS_PICK(gdn, a->dtype)(a); }
//
// (FN(gdn) is gdn_x16, gdn_x8, gdn_x4 or gdn_f64.) Bits may differ between levels, never between thread counts, batch sizes or
// positions in a batch: there is no FP contraction (-std=c11), so the FMAs are those written with vfma/rfma.
#ifndef HS_CPU_H
#define HS_CPU_H
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-math-errno", "no-trapping-math")
#endif
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "abi.h"

#define HS_INLINE static inline __attribute__((always_inline, unused))
#define HS_MIN(a, b) ((a) < (b) ? (a) : (b))
#define HS_MAX(a, b) ((a) > (b) ? (a) : (b))
#define HS_CEIL(a, b) (((a) + (b) - 1) / (b))

// ---- errors: text is thread-local and starts with the op's name when it comes back from run() ----
hs_status hs_fail(hs_status st, const char* fmt, ...) __attribute__((format(printf, 2, 3)));
// HS_NEED(cond, fmt, ...): returns HS_ERR_ARG with the text unless cond holds.
#define HS_NEED(cond, ...) do { if (!(cond)) return hs_fail(HS_ERR_ARG, __VA_ARGS__); } while (0)
#define HS_NEED_DTYPE(a) do { if ((a)->dtype != HS_F32 && (a)->dtype != HS_F64) \
  return hs_fail(HS_ERR_DTYPE, "dtype %d: the cpu table computes in f32 (0) or f64 (1)", (int)(a)->dtype); } while (0)
#define HS_NEED_WS(a, need) do { int64_t n_ = (need); if ((a)->ws_bytes < n_ || (n_ > 0 && !(a)->ws)) \
  return hs_fail(HS_ERR_WORKSPACE, "ws_bytes %lld < %lld needed", (long long)((a)->ws ? (a)->ws_bytes : 0), (long long)n_); } while (0)
HS_INLINE int64_t hs_sizeof(int32_t dtype) { return dtype == HS_F64 ? 8 : 4; }
HS_INLINE int64_t hs_align(int64_t bytes) { return (bytes + 63) & ~(int64_t)63; }

// ---- thread pool ----
// Calls fn(ctx, task, worker) once for each task in [0, ntasks), worker in [0, hs_num_threads()), and returns when all are done.
// Which worker runs which task is not fixed: a task's result must depend on its number alone. One task, a pool of one, a nested
// call or a pool that is busy with another caller runs inline on the calling thread as worker 0.
void hs_parallel(int64_t ntasks, void (*fn)(void* ctx, int64_t task, int worker), void* ctx);
int hs_num_threads(void);
#define HS_MAX_THREADS 64

// ---- SIMD level in use: 0 baseline, 1 AVX2+FMA, 2 AVX-512 (F, DQ, BW, VL) ----
int hs_simd_level(void);
// HS_PICK needs signatures without `real` in them (all four alike); HS_PICK32 picks among the float ones.
#if defined(__x86_64__)
#define HS_PICK32(fn) (hs_simd_level() == 2 ? fn##_x16 : hs_simd_level() == 1 ? fn##_x8 : fn##_x4)
#else
#define HS_PICK32(fn) (fn##_x4)
#endif
#define HS_PICK(fn, dtype) ((dtype) == HS_F64 ? fn##_f64 : HS_PICK32(fn))

// ---- matrix product on the calling thread: C[M,N] = op(A) op(B) (+ C with HS_BETA1), flags as in hs_gemm_args ----
// Any size, no scratch from the caller (about 350 KiB of stack). K is summed in order inside blocks of HS_GEMM_KC, one FMA chain per
// element and block, blocks added in order; so an element's bits depend on its row of A, its column of B and K alone.
#define HS_GEMM_KC 64
void hs_gemm_f32(uint32_t flags, int64_t M, int64_t N, int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc);
void hs_gemm_f64(uint32_t flags, int64_t M, int64_t N, int64_t K, const double* a, int64_t lda, const double* b, int64_t ldb, double* c, int64_t ldc);
// The same over the pool (same bits).
void hs_pgemm_f32(uint32_t flags, int64_t M, int64_t N, int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc);
void hs_pgemm_f64(uint32_t flags, int64_t M, int64_t N, int64_t K, const double* a, int64_t lda, const double* b, int64_t ldb, double* c, int64_t ldc);

// ---- ops defined outside cpu.c; the _ws form returns bytes of ws for these args (pointers may be 0) ----
#define HS_DECL(op) hs_status hs_cpu_##op(const hs_##op##_args*); int64_t hs_cpu_##op##_ws(const hs_##op##_args*);
HS_DECL(convgate) HS_DECL(convgate_bwd) HS_DECL(gdn) HS_DECL(gdn_bwd) HS_DECL(convgate_step) HS_DECL(gdn_step)
HS_DECL(attnprep) HS_DECL(attnprep_bwd) HS_DECL(attn) HS_DECL(attn_bwd) HS_DECL(gate) HS_DECL(gate_bwd)
HS_DECL(kv_write) HS_DECL(attn_paged)
HS_DECL(gemm) HS_DECL(gemm_group) HS_DECL(adamw)
#undef HS_DECL

#endif
