// head.cuh - the row pass that trainer (lmhead) and sampler share: log-sum-exp and entropy of a row of f32 logits, and its Gumbel-max draw.
// A row is cut into tiles of 64 ids. Half a warp turns a tile, in registers, into a part (maximum, sum, dot) and a pick (its best id); a block adds
// the parts of a row in f64 in an order that depends on their number alone. The tile is the same function whether the logits come from
// memory or straight from the matrix product (head.cu), so trainer and sampler report the same bits. exp, log and noise are those of the cpu
// table with AVX-512 (cpu_head_body.h, cpu_vec.h), every rounding written out: logits of the same bits give the same tokens there.
#ifndef HS_HEAD_CUH
#define HS_HEAD_CUH
#include "common.cuh"
#include "../optim_math.h"

static const int head_tile = 64, head_lanes = 16;   // ids of a tile, lanes that share it
static const int64_t head_vocab = (int64_t)1 << 30;  // longest row

struct head_part { float max, sum, dot; };                 // of x = z*invt: max, sum e^(x-max), sum e^(x-max) (x-max)
struct head_pick { unsigned long long key; float z; };     // (order of the score, ~id), so that the larger key is the better id, and its logit
struct head_stats { float max, lnsum, entropy; };

// Unsigned integer in the order of the floats (-0 just below +0).
static __device__ __forceinline__ uint32_t order_key(float x) {
  const uint32_t u = __float_as_uint(x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// exp(x) by the polynomial of cpu_vec.h's vexp; results below the normal range are zero, as there.
static __device__ __forceinline__ float head_exp(float x) {
  float y = x < -105.0f ? -105.0f : x;
  y = y > 89.0f ? 89.0f : y;
  const float t = __fmaf_rn(y, 1.44269504f, 12582912.0f), n = __fsub_rn(t, 12582912.0f);
  float r = __fmaf_rn(n, -0.693145752f, y);
  r = __fmaf_rn(n, -1.42860677e-6f, r);
  float p = __fmaf_rn(1.0f / 5040, r, 1.0f / 720);
  p = __fmaf_rn(p, r, 1.0f / 120);
  p = __fmaf_rn(p, r, 1.0f / 24);
  p = __fmaf_rn(p, r, 1.0f / 6);
  p = __fmaf_rn(p, r, 0.5f);
  p = __fadd_rn(__fmaf_rn(p, __fmul_rn(r, r), r), 1.0f);
  const int e = __float_as_int(t) - 0x4B400000, e1 = e >> 1, e2 = e - e1;
  const float z = __fmul_rn(__fmul_rn(p, __int_as_float((int)((unsigned)(e1 + 127) << 23))), __int_as_float((int)((unsigned)(e2 + 127) << 23)));
  return z < 1.17549435e-38f ? 0.0f : z;
}
// ln(x) for normal x > 0, infinity and NaN: vlog of cpu_vec.h.
static __device__ __forceinline__ float head_log(float x) {
  const int i = __float_as_int(x), e = (i - 0x3f3504f3) >> 23;
  const float f = __fsub_rn(__int_as_float((int)((unsigned)i - ((unsigned)e << 23))), 1.0f), ef = (float)e;
  const float s = __fdiv_rn(f, __fadd_rn(f, 2.0f)), z = __fmul_rn(s, s), h = __fmul_rn(__fmul_rn(0.5f, f), f);
  float p = __fmaf_rn(2.0f / 9, z, 2.0f / 7);
  p = __fmaf_rn(p, z, 2.0f / 5);
  p = __fmaf_rn(p, z, 2.0f / 3);
  p = __fmul_rn(p, z);
  const float q = __fsub_rn(h, __fadd_rn(__fmul_rn(s, __fadd_rn(h, p)), __fmul_rn(ef, 1.42860677e-6f)));
  const float out = __fsub_rn(__fmul_rn(ef, 0.693145752f), __fsub_rn(q, f));
  return x < __int_as_float(0x7f800000) ? out : x;
}

// -ln(1 - x) of x in (0,1): race of cpu_head_body.h.
static __device__ __forceinline__ float head_race(float x) {
  const float y = __fsub_rn(1.0f, x);
  const int i = __float_as_int(y), e = (i - 0x3f3504f3) >> 23;
  const float f = e == 0 ? -x : __fsub_rn(__int_as_float((int)((unsigned)i - ((unsigned)e << 23))), 1.0f), ef = (float)e;
  const float s = __fdiv_rn(f, __fadd_rn(f, 2.0f)), z = __fmul_rn(s, s), h = __fmul_rn(__fmul_rn(0.5f, f), f);
  float p = __fmaf_rn(2.0f / 9, z, 2.0f / 7);
  p = __fmaf_rn(p, z, 2.0f / 5);
  p = __fmaf_rn(p, z, 2.0f / 3);
  p = __fmul_rn(p, z);
  const float q = __fsub_rn(h, __fadd_rn(__fmul_rn(s, __fadd_rn(h, p)), __fmul_rn(ef, 1.42860677e-6f)));
  return -__fsub_rn(__fmul_rn(ef, 0.693145752f), __fsub_rn(q, f));
}

// Exponent of a logit's weight exp(z*invt - max).
static __device__ __forceinline__ float head_arg(float z, float invt, float max) { return __fsub_rn(__fmul_rn(z, invt), max); }
static __device__ __forceinline__ float head_logp(const head_stats& s, float z, float invt) {
  return __fsub_rn(__fsub_rn(__fmul_rn(z, invt), s.max), s.lnsum);
}
static __device__ __forceinline__ bool head_finite(float lnsum) { return lnsum >= 0 && lnsum < __int_as_float(0x7f800000); }

// ---- sampling ----

static __device__ __forceinline__ float inverse_temperature(const hs_sample_row& r) { return r.temperature > 0 ? __fdiv_rn(1.0f, r.temperature) : 1.0f; }
static __device__ __forceinline__ bool truncates(const hs_sample_row& r, int64_t n) { return r.min_p != 0 || r.top_p < 1 || (r.top_k > 0 && r.top_k < n); }

// Gumbel noise of the ids 4 quad .. 4 quad + 3 of a row (abi.h, sampling); zero at temperature 0.
static __device__ __forceinline__ void head_noise(const hs_sample_row& r, uint32_t quad, float g[4]) {
  if (!(r.temperature > 0)) {
    g[0] = g[1] = g[2] = g[3] = 0;
    return;
  }
  const uint32_t ctr[4] = {(uint32_t)r.ctr, quad, (uint32_t)r.key_hi, (uint32_t)(r.key_hi >> 32)};
  uint32_t w[4];
  philox4x32((uint32_t)r.key_lo, (uint32_t)(r.key_lo >> 32), ctr, w);
  for (int c = 0; c < 4; c++) g[c] = -head_log(head_race(hs_unit(w[c])));
}
static __device__ __forceinline__ unsigned long long pick_key(float score, int64_t id) {
  return (unsigned long long)order_key(score) << 32 | (uint32_t)~(uint32_t)id;
}
static __device__ __forceinline__ int32_t pick_id(unsigned long long key) { return (int32_t)~(uint32_t)key; }

// ---- a tile, by 16 lanes ----

struct head_sums { float sum, dot; };
struct add_sums { __device__ __forceinline__ head_sums operator()(head_sums a, head_sums b) const { return {a.sum + b.sum, a.dot + b.dot}; } };
struct max_key { __device__ __forceinline__ unsigned long long operator()(unsigned long long a, unsigned long long b) const { return a > b ? a : b; } };

// A butterfly over each half of the warp; every lane gets the result of its half.
#ifdef HS_EMU
template <class R, class F> static void hs_emu_half(hs_emu_thread* const* lanes, uint32_t) {
  R v[32], w[32];
  for (int i = 0; i < 32; i++) memcpy(&v[i], lanes[i]->payload, sizeof(R));
  for (int d = head_lanes / 2; d; d >>= 1) {
    for (int i = 0; i < 32; i++) w[i] = F()(v[i], v[i ^ d]);
    memcpy(v, w, sizeof v);
  }
  for (int i = 0; i < 32; i++) memcpy(lanes[i]->payload, &v[i], sizeof(R));
}
template <class R, class F> static inline R half_butterfly(R v, F, HS_AT) {
  hs_emu_collective("half-warp reduction", HS_FULL, &v, hs_emu_half<R, F>, at);
  return v;
}
#else
template <class R, class F> static __device__ __forceinline__ R half_butterfly(R v, F f) {
#pragma unroll
  for (int d = head_lanes / 2; d; d >>= 1) {
    uint32_t w[sizeof(R) / 4];
    memcpy(w, &v, sizeof v);
#pragma unroll
    for (int i = 0; i < (int)(sizeof(R) / 4); i++) w[i] = __shfl_xor_sync(HS_FULL, w[i], d);
    R o;
    memcpy(&o, w, sizeof o);
    v = f(v, o);
  }
  return v;
}
#endif

// The tile of ids first .. first+63, of which `left` exist (at most 0: none); lane i of the half holds the logits z of ids first + 4 i ...
// Every lane gets the part. With DRAW also the key of the best id, for a row that samples.
template <bool DRAW> static __device__ __forceinline__ head_part tile_pass(const float z[4], int64_t first, int64_t left, float invt, const hs_sample_row* row,
                                                                          unsigned long long* key) {
  const int lane = threadIdx.x & (head_lanes - 1);
  const float ninf = -__int_as_float(0x7f800000);
  float x[4], most = ninf;
#pragma unroll
  for (int c = 0; c < 4; c++) {
    x[c] = 4 * lane + c < left ? __fmul_rn(z[c], invt) : ninf;
    most = fmaxf(most, x[c]);
  }
  head_part p = {half_butterfly(most, max_of()), 0, 0};
  head_sums s = {0, 0};
#pragma unroll
  for (int c = 0; c < 4; c++) {
    if (x[c] == ninf) continue;   // weighs nothing; NaN goes on and spoils the sum
    const float d = __fsub_rn(x[c], p.max), e = head_exp(d);
    s.sum = __fadd_rn(s.sum, e);
    s.dot = __fmaf_rn(e, d > -1000.0f ? d : -1000.0f, s.dot);
  }
  s = half_butterfly(s, add_sums());
  p.sum = s.sum, p.dot = s.dot;
  if (DRAW) {
    float g[4];
    head_noise(*row, (uint32_t)(first / 4) + lane, g);
    unsigned long long k = 0;
#pragma unroll
    for (int c = 0; c < 4; c++)
      if (4 * lane + c < left) k = max_key()(k, pick_key(__fadd_rn(x[c], g[c]), first + 4 * lane + c));
    *key = half_butterfly(k, max_key());
  }
  return p;
}

// ---- a row, by a block of merge_threads(tiles) ----

static inline int64_t head_tiles(int64_t n) { return HS_CEIL(n, head_tile); }
static inline int merge_threads(int64_t tiles) { return (int)HS_MIN(256, 32 * HS_CEIL(tiles, 128)); }

// Every thread gets the result. lnsum is not finite when a logit is NaN or plus infinity, or all are minus infinity.
static __device__ __forceinline__ head_stats merge_parts(const head_part* part, int64_t tiles) {
  const float ninf = -__int_as_float(0x7f800000);
  float most = ninf;
  for (int64_t i = threadIdx.x; i < tiles; i += blockDim.x) most = fmaxf(most, part[i].max);
  head_stats r;
  r.max = block_max(most);
  double sum = 0, dot = 0;
  for (int64_t i = threadIdx.x; i < tiles; i += blockDim.x) {
    const head_part p = part[i];
    const float d = p.max == ninf ? 0.0f : __fsub_rn(p.max, r.max), w = head_exp(d);
    sum += (double)p.sum * (double)w;
    dot += ((double)p.dot + (double)p.sum * (d > -1000.0f ? (double)d : -1000.0)) * (double)w;   // as in a tile: 0 times minus infinity is not 0
  }
  sum = block_sum(sum), dot = block_sum(dot);
  r.lnsum = sum > 0 ? head_log((float)sum) : __int_as_float(0x7fffffff);
  r.entropy = __fsub_rn(r.lnsum, (float)(dot / sum));
  return r;
}

// ---- head.cu ----

// The rows of a pass. The logits are z [rows, ld], or x [rows, D] w [n, D]^T with z = 0 (bf16 only). sample: how each row is drawn, or 0 with invt
// for all rows. parts [rows, tiles]; picks [rows, tiles] when rows are drawn; target_z[rows] receives the logit of target[rows] when it is asked for.
struct head_rows {
  int64_t rows, n, ld, D;
  const float* z;
  const bf16 *x, *w;
  float invt;
  const hs_sample_row* sample;
  const int32_t* target;
  head_part* parts;
  head_pick* picks;
  float* target_z;
};
hs_status hs_head_pass(cudaStream_t s, const head_rows& h);
#endif
