// tiles.cuh - products of small matrices by warps: 16-row strips by 8 columns, fragments read through operands. Storage bf16: mma_bf16, where an
// operand that is not bf16 already goes as the sum of two bf16 (hi + lo; hi*hi + hi*lo + lo*hi, error about 2^-16 of the product). Storage
// f32: FMA. Dimensions are padded with zeros to multiples of 16. k runs upwards in steps of 16, so the order depends on K alone.
#ifndef HS_TILES_CUH
#define HS_TILES_CUH
#include "common.cuh"

// ---- operands: at2(r, k) gives elements (r, k) and (r, k+1), k even; r counts rows of A or columns of B; exact: the values are bf16 ----

// p[r*ld + k]: k is contiguous, ld is even.
template <class E> struct along {
  const E* p;
  int64_t ld;
  static constexpr bool exact = sizeof(E) == 2;
  __device__ __forceinline__ float2 at2(int r, int k) const {
    const pack<E, 2> x = load_pack<E, 2>(p + r * ld + k);
    return make_float2(to_f(x.v[0]), to_f(x.v[1]));
  }
};
// p[k*ld + r]: the transpose.
template <class E> struct across {
  const E* p;
  int64_t ld;
  static constexpr bool exact = sizeof(E) == 2;
  __device__ __forceinline__ float2 at2(int r, int k) const { return make_float2(to_f(p[k * ld + r]), to_f(p[(k + 1) * ld + r])); }
};
// The same two over an unpadded matrix of nr by nk: zero outside.
struct along_within {
  const float* p;
  int ld, nr, nk;
  static constexpr bool exact = false;
  __device__ __forceinline__ float2 at2(int r, int k) const {
    if (r >= nr) return make_float2(0, 0);
    return make_float2(k < nk ? p[(int64_t)r * ld + k] : 0.0f, k + 1 < nk ? p[(int64_t)r * ld + k + 1] : 0.0f);
  }
};
struct across_within {
  const float* p;
  int ld, nr, nk;
  static constexpr bool exact = false;
  __device__ __forceinline__ float2 at2(int r, int k) const {
    if (r >= nr) return make_float2(0, 0);
    return make_float2(k < nk ? p[(int64_t)k * ld + r] : 0.0f, k + 1 < nk ? p[(int64_t)(k + 1) * ld + r] : 0.0f);
  }
};
// op with element k scaled by s[k].
template <class Op> struct scaled {
  Op op;
  const float* s;
  static constexpr bool exact = false;
  __device__ __forceinline__ float2 at2(int r, int k) const {
    const float2 x = op.at2(r, k);
    return make_float2(x.x * s[k], x.y * s[k + 1]);
  }
};
template <class Op> static __device__ __forceinline__ scaled<Op> by(const float* s, const Op& op) { return {op, s}; }

// ---- products ----

// Two values as bf16 pairs: hi nearest, lo the rest (unused for exact values).
static __device__ __forceinline__ uint32_t pair_bits(float x, float y) {
  return (uint32_t)__bfloat16_as_ushort(__float2bfloat16_rn(x)) | (uint32_t)__bfloat16_as_ushort(__float2bfloat16_rn(y)) << 16;
}
static __device__ __forceinline__ void split_pair(float2 v, bool exact, uint32_t& hi, uint32_t& lo) {
  hi = pair_bits(v.x, v.y);
  lo = exact ? 0 : pair_bits(v.x - __uint_as_float(hi << 16), v.y - __uint_as_float(hi & 0xffff0000u));
}

// acc[s] += A[16 (s0+s).., K] B[K, col..col+8), s < ns: the layout of mma_bf16's c. T says how: bf16 by tensor cores, float by FMA.
template <class T, int NS, class A, class B>
static __device__ __forceinline__ void strips(float acc[NS][4], const A& a, int s0, int ns, const B& b, int col, int K) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if constexpr (sizeof(T) == 2) {
    for (int k = 0; k < K; k += 16) {
      uint32_t bh[2], bl[2];
#pragma unroll
      for (int i = 0; i < 2; i++) split_pair(b.at2(col + g, k + 2 * t + 8 * i), B::exact, bh[i], bl[i]);
#pragma unroll
      for (int s = 0; s < NS; s++) {
        if (s >= ns) break;
        uint32_t ah[4], al[4];
#pragma unroll
        for (int i = 0; i < 4; i++) split_pair(a.at2(16 * (s0 + s) + g + 8 * (i & 1), k + 2 * t + 8 * (i >> 1)), A::exact, ah[i], al[i]);
        if (!A::exact) mma_bf16(acc[s], al, bh, acc[s]);
        if (!B::exact) mma_bf16(acc[s], ah, bl, acc[s]);
        mma_bf16(acc[s], ah, bh, acc[s]);
      }
    }
  } else {
    for (int k = 0; k < K; k += 2) {
      const float2 b0 = b.at2(col + 2 * t, k), b1 = b.at2(col + 2 * t + 1, k);
#pragma unroll
      for (int s = 0; s < NS; s++) {
        if (s >= ns) break;
        const float2 x = a.at2(16 * (s0 + s) + g, k), y = a.at2(16 * (s0 + s) + g + 8, k);
        acc[s][0] = __fmaf_rn(x.y, b0.y, __fmaf_rn(x.x, b0.x, acc[s][0]));
        acc[s][1] = __fmaf_rn(x.y, b1.y, __fmaf_rn(x.x, b1.x, acc[s][1]));
        acc[s][2] = __fmaf_rn(y.y, b0.y, __fmaf_rn(y.x, b0.x, acc[s][2]));
        acc[s][3] = __fmaf_rn(y.y, b1.y, __fmaf_rn(y.x, b1.x, acc[s][3]));
      }
    }
  }
}
template <int NS> static __device__ __forceinline__ void clear(float acc[NS][4]) {
#pragma unroll
  for (int s = 0; s < NS; s++) acc[s][0] = acc[s][1] = acc[s][2] = acc[s][3] = 0;
}
// fn(row, column, value&) over a lane's elements of ns strips from s0 at columns col..
template <int NS, class F> static __device__ __forceinline__ void each(float acc[NS][4], int s0, int ns, int col, const F& fn) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int s = 0; s < NS; s++) {
    if (s >= ns) break;
#pragma unroll
    for (int i = 0; i < 4; i++) fn(16 * (s0 + s) + g + 8 * (i >> 1), col + 2 * t + (i & 1), acc[s][i]);
  }
}
// Sum over the four lanes that hold a row.
static __device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(HS_FULL, v, 1);
  return v + __shfl_xor_sync(HS_FULL, v, 2);
}
#endif
