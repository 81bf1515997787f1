// optim.cu - AdamW in every storage form of weights and moments (abi.h, optim_math.h), and sums of squares.
//
// adamw  a warp per HS_STATE_BLOCK = 256 elements, 8 per lane in two quads, so that every access is 4 elements wide and the scale of a block
//        of 8-bit moments is a warp maximum. Each operation is rounded on its own, in the order of the cpu table: the bits are its bits, but
//        for subnormals, which the cpu table flushes to zero. Floor on an H200 at 4.3 TB/s with bf16 weights and lo: grad 4, w and lo 8, moments
//        4 (8 bits) or 8 bytes per parameter, so 16 or 20 ms for 4.2e9. Expected near it: about 60 integer and float instructions per
//        parameter, most of them Philox (unmeasured).
// sumsq  8 lanes per block of 4096 in the order of the cpu table, then the blocks one by one: its bits. Floor: 4.2e9 floats, 4 ms; the last
//        stage is one chain of a million double additions, some 5 ms (unmeasured).
#include "common.cuh"
#include "../optim_math.h"
#include <cmath>

// ---- AdamW ----

static const int adamw_warps = 8, lane_elems = 8;
static_assert(HS_STATE_BLOCK == 32 * lane_elems, "a warp is a block of moments");

enum weight_form { W_PLAIN, W_WIDE, W_HALF };   // f32; upper half widened to f32, and lo; upper half as bf16, and lo

struct adamw_consts { float b1, b2, nb1, nb2, c1, c2, lr, eps, decay, scale; };
struct adamw_args {
  adamw_consts c;
  int64_t n;
  uint64_t first, step, seed;
  void *w, *m, *v;
  int16_t* lo;
  float *ms, *vs;
  const float* grad;
  bool packs;   // four elements of every array may be read at once
};

// Four elements of p from i on: zero past n, nothing written there.
template <class X> static __device__ __forceinline__ pack<X, 4> get4(const void* p, int64_t i, int64_t n, bool packs) {
  const X* x = (const X*)p;
  if (packs && i + 4 <= n) return load_pack<X, 4>(x + i);
  pack<X, 4> q;
  for (int j = 0; j < 4; j++) q.v[j] = i + j < n ? x[i + j] : X(0);
  return q;
}
template <class X> static __device__ __forceinline__ void set4(void* p, int64_t i, int64_t n, bool packs, const pack<X, 4>& q) {
  X* x = (X*)p;
  if (packs && i + 4 <= n) store_pack<X, 4>(x + i, q);
  else
    for (int j = 0; j < 4 && i + j < n; j++) x[i + j] = q.v[j];
}

template <int W> static __device__ __forceinline__ void read_weights(const adamw_args& a, int64_t i, float w[4]) {
  if (W == W_PLAIN) {
    const pack<float, 4> x = get4<float>(a.w, i, a.n, a.packs);
    for (int j = 0; j < 4; j++) w[j] = x.v[j];
    return;
  }
  const pack<int16_t, 4> lo = get4<int16_t>(a.lo, i, a.n, a.packs);
  if (W == W_WIDE) {
    const pack<float, 4> hi = get4<float>(a.w, i, a.n, a.packs);
    for (int j = 0; j < 4; j++) w[j] = hs_join(hs_bits(hi.v[j]), lo.v[j]);
  } else {
    const pack<uint16_t, 4> hi = get4<uint16_t>(a.w, i, a.n, a.packs);
    for (int j = 0; j < 4; j++) w[j] = hs_join((uint32_t)hi.v[j] << 16, lo.v[j]);
  }
}
template <int W> static __device__ __forceinline__ void write_weights(const adamw_args& a, int64_t i, const float w[4]) {
  pack<float, 4> wide;
  pack<uint16_t, 4> half;
  pack<int16_t, 4> lo;
  for (int j = 0; j < 4; j++) {
    uint32_t h = hs_bits(w[j]);
    int32_t l = 0;
    if (W != W_PLAIN) hs_split(w[j], &h, &l);
    wide.v[j] = hs_float(h), half.v[j] = (uint16_t)(h >> 16), lo.v[j] = (int16_t)l;
  }
  if (W == W_HALF) set4<uint16_t>(a.w, i, a.n, a.packs, half);
  else set4<float>(a.w, i, a.n, a.packs, wide);
  if (W != W_PLAIN) set4<int16_t>(a.lo, i, a.n, a.packs, lo);
}

// One moment of four elements; block is the index of its scale.
template <int S> static __device__ __forceinline__ void read_moment(const adamw_args& a, const void* p, float scale, bool second, int64_t i, float x[4]) {
  if (S == HS_STATE_F32) {
    const pack<float, 4> q = get4<float>(p, i, a.n, a.packs);
    for (int j = 0; j < 4; j++) x[j] = q.v[j];
  } else if (S == HS_STATE_BF16) {
    const pack<uint16_t, 4> q = get4<uint16_t>(p, i, a.n, a.packs);
    for (int j = 0; j < 4; j++) x[j] = hs_from_bf16(q.v[j]);
  } else {
    const pack<uint8_t, 4> q = get4<uint8_t>(p, i, a.n, a.packs);
    for (int j = 0; j < 4; j++) x[j] = second ? hs_decode_v(q.v[j], scale) : hs_decode_m(q.v[j], scale);
  }
}
// r are the random bits; inverse multiplies 8-bit moments before they are encoded.
template <int S>
static __device__ __forceinline__ void write_moment(const adamw_args& a, void* p, float inverse, bool second, int64_t i, const float x[4], const uint32_t r[4]) {
  if (S == HS_STATE_F32) {
    pack<float, 4> q;
    for (int j = 0; j < 4; j++) q.v[j] = x[j];
    set4<float>(p, i, a.n, a.packs, q);
  } else if (S == HS_STATE_BF16) {
    pack<uint16_t, 4> q;
    for (int j = 0; j < 4; j++) q.v[j] = (uint16_t)hs_round_bf16(x[j], r[j]);
    set4<uint16_t>(p, i, a.n, a.packs, q);
  } else {
    pack<uint8_t, 4> q;
    for (int j = 0; j < 4; j++) {
      const float y = __fmul_rn(x[j], inverse);
      q.v[j] = (uint8_t)(second ? hs_code_v(y, r[j]) : hs_code_m(y, r[j]));
    }
    set4<uint8_t>(p, i, a.n, a.packs, q);
  }
}

static __device__ __forceinline__ void update(const adamw_consts& c, float grad, float& w, float& m, float& v) {
  const float g = __fmul_rn(grad, c.scale);
  m = __fadd_rn(__fmul_rn(c.b1, m), __fmul_rn(c.nb1, g));
  v = __fadd_rn(__fmul_rn(c.b2, v), __fmul_rn(c.nb2, __fmul_rn(g, g)));
  const float q = __fdiv_rn(__fmul_rn(m, c.c1), __fadd_rn(__fsqrt_rn(__fmul_rn(v, c.c2)), c.eps));
  w = __fsub_rn(w, __fmul_rn(c.lr, __fadd_rn(q, __fmul_rn(c.decay, w))));
}

// Scale of the block from the warp's largest magnitude; elements past n are zero.
static __device__ __forceinline__ float warp_scale(const float x[lane_elems]) {
  int most = 0;
  for (int k = 0; k < lane_elems; k++) most = max(most, (int)(hs_bits(x[k]) & 0x7fffffffu));
  return hs_code_scale((uint32_t)__reduce_max_sync(HS_FULL, most));
}

template <int W, int S> __global__ void __launch_bounds__(32 * adamw_warps) adamw_kernel(adamw_args a) {
  const int lane = threadIdx.x & 31;
  const int64_t block = (int64_t)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), at = block * HS_STATE_BLOCK;
  if (at >= a.n) return;
  float w[lane_elems], m[lane_elems], v[lane_elems];
  const float ms = S == HS_STATE_U8 ? a.ms[block] : 0, vs = S == HS_STATE_U8 ? a.vs[block] : 0;
#pragma unroll
  for (int k = 0; k < lane_elems; k += 4) {
    const int64_t i = at + 4 * lane + 32 * k;
    const pack<float, 4> g = get4<float>(a.grad, i, a.n, a.packs);
    read_weights<W>(a, i, w + k);
    read_moment<S>(a, a.m, ms, false, i, m + k);
    read_moment<S>(a, a.v, vs, true, i, v + k);
    for (int j = 0; j < 4; j++) update(a.c, g.v[j], w[k + j], m[k + j], v[k + j]);
    write_weights<W>(a, i, w + k);
  }
  float mi = 0, vi = 0;
  if (S == HS_STATE_U8) {
    const float m1 = warp_scale(m), v1 = warp_scale(v);
    mi = hs_code_inverse(m1), vi = hs_code_inverse(v1);
    if (lane == 0) a.ms[block] = m1, a.vs[block] = v1;
  }
#pragma unroll
  for (int k = 0; k < lane_elems; k += 4) {
    const int64_t i = at + 4 * lane + 32 * k;
    uint32_t rm[4] = {}, rv[4] = {};
    if (S != HS_STATE_F32)
      for (int j = 0; j < 4; j++) hs_optim_random(a.seed, a.first + (uint64_t)(i + j), a.step, &rm[j], &rv[j]);
    write_moment<S>(a, a.m, mi, false, i, m + k, rm);
    write_moment<S>(a, a.v, vi, true, i, v + k, rv);
  }
}

template <int W> static hs_status adamw_states(cudaStream_t s, int32_t states, const adamw_args& a) {
  const int n = (int)HS_MIN(adamw_warps, HS_CEIL(a.n, HS_STATE_BLOCK));
  const unsigned grid = (unsigned)HS_CEIL(a.n, (int64_t)n * HS_STATE_BLOCK);
  if (states == HS_STATE_F32) return HS_LAUNCH(s, (adamw_kernel<W, HS_STATE_F32>), grid, 32 * n, 0, a);
  if (states == HS_STATE_BF16) return HS_LAUNCH(s, (adamw_kernel<W, HS_STATE_BF16>), grid, 32 * n, 0, a);
  return HS_LAUNCH(s, (adamw_kernel<W, HS_STATE_U8>), grid, 32 * n, 0, a);
}

static hs_status check_storage(const hs_adamw_args* a) {
  if (a->dtype != HS_F32 && a->dtype != HS_BF16)
    return hs_fail(HS_ERR_DTYPE, "dtype %d: weights are f32 (0) or bf16 (2) on the cuda table", (int)a->dtype);
  if (!a->lo && a->dtype == HS_BF16) return hs_fail(HS_ERR_DTYPE, "bf16 weights need lo: without it small updates are lost");
  HS_NEED(a->states >= HS_STATE_F32 && a->states <= HS_STATE_U8, "states %d, want 0 (f32), 1 (bf16) or 2 (8-bit)", (int)a->states);
  if (a->states == HS_STATE_F32) return HS_OK;
  HS_NEED(a->first >= 0 && a->first % HS_STATE_BLOCK == 0, "first %lld, want a multiple of %d for narrow moments", (long long)a->first, HS_STATE_BLOCK);
  HS_NEED(a->states != HS_STATE_U8 || (a->ms && a->vs), "8-bit moments need their scales: ms and vs are required");
  return HS_OK;
}
extern "C" hs_status hs_op_adamw(cudaStream_t s, const hs_adamw_args* a) {
  HS_NEED(a->n > 0, "n %lld, need > 0", (long long)a->n);
  HS_NEED(a->step >= 1, "step %lld, need >= 1", (long long)a->step);
  HS_NEED(a->beta1 >= 0 && a->beta1 < 1 && a->beta2 >= 0 && a->beta2 < 1, "beta1 %g, beta2 %g: need 0 <= beta < 1", a->beta1, a->beta2);
  HS_NEED_PTR(w); HS_NEED_PTR(m); HS_NEED_PTR(v); HS_NEED_PTR(grad);
  HS_TRY(check_storage(a));
  const adamw_consts c = {(float)a->beta1, (float)a->beta2, (float)(1 - a->beta1), (float)(1 - a->beta2), (float)(1 / (1 - pow(a->beta1, (double)a->step))),
                          (float)(1 / (1 - pow(a->beta2, (double)a->step))), (float)a->lr, (float)a->eps, (float)a->decay, (float)a->grad_scale};
  const bool packs = (((uintptr_t)a->w | (uintptr_t)a->lo | (uintptr_t)a->m | (uintptr_t)a->v | (uintptr_t)a->grad) & 15) == 0;
  const adamw_args k = {c, a->n, (uint64_t)a->first, (uint64_t)a->step, a->seed, a->w, a->m, a->v, (int16_t*)a->lo,
                        (float*)a->ms, (float*)a->vs, (const float*)a->grad, packs};
  if (!a->lo) return adamw_states<W_PLAIN>(s, a->states, k);
  return a->dtype == HS_F32 ? adamw_states<W_WIDE>(s, a->states, k) : adamw_states<W_HALF>(s, a->states, k);
}

// ---- sum of squares ----

static const int64_t sumsq_block = 4096;
static const int sumsq_threads = 128, total_threads = 128, total_stage = 1024;

// Lane l of 8 sums elements l, l+8, ... of a block.
template <class T> __global__ void sumsq_kernel(int64_t n, int64_t blocks, const T* x, double* part) {
  const int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, b = at >> 3;
  const int64_t i0 = b * sumsq_block, end = i0 + sumsq_block < n ? i0 + sumsq_block : n;
  double s = 0;
  if (b < blocks) {
#pragma unroll 8
    for (int64_t i = i0 + (at & 7); i < end; i += 8) {
      const double v = (double)to_f(x[i]);
      s = __fma_rn(v, v, s);   // the product of two floats is exact
    }
  }
  s += __shfl_xor_sync(HS_FULL, s, 4);
  s += __shfl_xor_sync(HS_FULL, s, 2);
  s += __shfl_xor_sync(HS_FULL, s, 1);
  if (b < blocks && (at & 7) == 0) part[b] = s;
}
// One chain over the blocks; the other threads bring them into shared memory.
static __global__ void sumsq_total_kernel(int64_t blocks, const double* part, double* out) {
  HS_SHARED(double, stage, [total_stage]);
  double s = 0;
  for (int64_t b = 0; b < blocks; b += total_stage) {
    const int m = (int)(blocks - b < total_stage ? blocks - b : total_stage);
    for (int i = threadIdx.x; i < m; i += blockDim.x) stage[i] = part[b + i];
    __syncthreads();
    if (threadIdx.x == 0)
      for (int i = 0; i < m; i++) s += stage[i];
    __syncthreads();
  }
  if (threadIdx.x == 0) *out = s;
}
extern "C" int64_t hs_ws_sumsq(const hs_sumsq_args* a) { return a->n > 0 ? HS_CEIL(a->n, sumsq_block) * (int64_t)sizeof(double) : 0; }
extern "C" hs_status hs_op_sumsq(cudaStream_t s, const hs_sumsq_args* a) {
  HS_NEED(a->n > 0, "n %lld, need > 0", (long long)a->n);
  HS_NEED_PTR(x); HS_NEED_PTR(out);
  HS_NEED_WS(hs_ws_sumsq(a));
  const int64_t blocks = HS_CEIL(a->n, sumsq_block);
  const int threads = (int)HS_MIN(sumsq_threads, 32 * HS_CEIL(8 * blocks, 32));
  HS_DISPATCH(a->dtype, T, {
    HS_TRY(HS_LAUNCH(s, sumsq_kernel<T>, (unsigned)HS_CEIL(8 * blocks, threads), threads, 0, a->n, blocks, (const T*)a->x, (double*)a->ws));
  })
  return HS_LAUNCH(s, sumsq_total_kernel, 1, (int)HS_MIN(total_threads, 32 * HS_CEIL(blocks, 32)), 0, blocks, (const double*)a->ws, a->out);
}
