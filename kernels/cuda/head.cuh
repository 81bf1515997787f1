// head.cuh - the row pass that trainer (lmhead) and sampler share: maximum, log-sum-exp and entropy of a row of f32 logits.
// Its order and its exp and log are those of the cpu table with AVX-512 (cpu_head_body.h, cpu_vec.h), every rounding written out, so
// logits of the same bits give the same bits there, in the emulator and on a device.
#ifndef HS_HEAD_CUH
#define HS_HEAD_CUH
#include "common.cuh"

static const int head_lanes = 16, head_block = 4096;   // logits per f32 partial sum, summed by 16 lanes; partial sums are added in f64
static const int head_threads = 1024, head_parts = 1024;
static const int64_t head_vocab = (int64_t)head_block * head_parts;   // longest row

struct head_stats { float max, lnsum, entropy; };

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

// Exponent of a logit's weight exp(z*invt - max).
static __device__ __forceinline__ float head_arg(float z, float invt, float max) { return __fsub_rn(__fmul_rn(z, invt), max); }
static __device__ __forceinline__ float head_logp(const head_stats& s, float z, float invt) {
  return __fsub_rn(__fsub_rn(__fmul_rn(z, invt), s.max), s.lnsum);
}

// Threads for a row pass over n logits: 16 per block of them.
static inline int head_row_threads(int64_t n) { return (int)HS_MIN(head_threads, 32 * HS_CEIL(head_lanes * HS_CEIL(n, head_block), 32)); }

// Sum over the 16 lanes of a half warp, halves first; every lane gets it.
template <class R> static __device__ __forceinline__ R half_sum(R v) {
#pragma unroll
  for (int d = 8; d; d >>= 1) v += __shfl_xor_sync(HS_FULL, v, d);
  return v;
}

// The row pass by the whole block (blockDim.x threads, whole warps); every thread gets the result. lnsum is not finite when a
// logit is NaN or plus infinity, or all are minus infinity.
static __device__ head_stats row_stats(const float* z, int64_t n, float invt) {
  HS_SHARED(float, part, [head_parts][2]);
  float most = -__int_as_float(0x7f800000);
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) most = fmaxf(most, __fmul_rn(z[i], invt));
  head_stats r;
  r.max = block_max(most);
  const int lane = threadIdx.x & (head_lanes - 1), blocks = (int)HS_CEIL(n, head_block);
  for (int b0 = 0; b0 < blocks; b0 += blockDim.x / head_lanes) {   // the same number of rounds for both halves of a warp
    const int b = b0 + threadIdx.x / head_lanes;
    const int64_t end = HS_MIN(n, (int64_t)(b + 1) * head_block);
    float s = 0, t = 0;
#pragma unroll 4
    for (int64_t i = (int64_t)b * head_block + lane; i < end; i += head_lanes) {
      const float d = head_arg(z[i], invt, r.max), e = head_exp(d);
      s = __fadd_rn(s, e);
      t = __fmaf_rn(e, d > -1000.0f ? d : -1000.0f, t);
    }
    s = half_sum(s), t = half_sum(t);
    if (lane == 0 && b < blocks) part[b][0] = s, part[b][1] = t;
  }
  __syncthreads();
  double sum = 0, dot = 0;
  for (int b = 0; b < blocks; b++) sum += (double)part[b][0], dot += (double)part[b][1];
  r.lnsum = head_log((float)sum);
  r.entropy = __fsub_rn(r.lnsum, (float)(dot / sum));
  return r;
}
static __device__ __forceinline__ bool head_finite(float lnsum) { return lnsum >= 0 && lnsum < __int_as_float(0x7f800000); }
#endif
