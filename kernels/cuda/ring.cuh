// ring.cuh - the canonical delta rule (gpu.md 7.2), as training, prefill (gdn_chunk.cu) and decode (gdn_step.cu) share it: chunks of 16 absolute
// positions, S the state at a chunk's start. For row i, with D(i, j) = e^(g_i + .. + g_(j+1)) and j = -1 for the chunk's start:
//     r, p = S^T k_i, S^T q_i         mma_bf16, k-steps of 16 upwards, S as bf16 hi + lo: hi, then lo, into one accumulator
//     d_i  = beta_i (v_i - D(i,-1) r - sum_(j<i) D(i,j) (k_j.k_i) d_j)          one FMA a term, j upwards; the dot products by mma_bf16
//     o_i  = D(i,-1) p + sum_(j<=i) D(i,j) (k_j.q_i) d_j
// and after row 15 S <- D(15,-1) S + sum_j k_j (D(15,j) d_j)^T, by mma_bf16 with the scaled d as hi + lo. A row of an MMA is computed alike
// wherever it stands and whatever the others hold, and later rows never enter, so the bits of a row are a function of its sequence alone.
// The sums of g run from i down, without the cancellation that differences of cumulative sums have. hi + lo loses at most
// 2^-18 of an element; measured on the emulator, states of 272 rows are 1e-6 to 4e-6 from float64, with no growth (float32 row by row: 5e-8 to 2e-6).
#ifndef HS_RING_CUH
#define HS_RING_CUH
#include "delta.cuh"

static const int ring_rows = HS_GDN_RING;

// One value head of a slot (abi.h): state and ring.
struct ring_cell {
  float *S, *d;   // [dk, dv] [16, dv]
  bf16* k;        // [16, dk]
  float* g;       // [16]
};
static __device__ __forceinline__ ring_cell ring_at(char* slots, int64_t head, int64_t head_bytes, int dk, int dv) {
  ring_cell c;
  c.S = (float*)(slots + head * head_bytes), c.d = c.S + (int64_t)dk * dv, c.k = (bf16*)(c.d + ring_rows * dv), c.g = (float*)(c.k + ring_rows * dk);
  return c;
}

// D(i, j), -1 <= j <= i, of a chunk with the log decays g in shared memory.
static __device__ __forceinline__ float decay(const float* g, int i, int j) {
  float s = 0;
#pragma unroll
  for (int m = ring_rows - 4; m >= 0; m -= 4) {
    const pack<float, 4> x = load_pack<float, 4>(g + m);
#pragma unroll
    for (int e = 3; e >= 0; e--)
      if (m + e <= i && m + e > j) s = __fadd_rn(s, x.v[e]);
  }
  return expf(s);
}

// Two values as bf16 pairs: hi nearest, lo the rest. Products must come from __fmul_rn, so that no compiler joins them with the difference.
static __device__ __forceinline__ uint32_t ring_pair(float x, float y) {
  const __nv_bfloat162 p = __floats2bfloat162_rn(x, y);
  return (uint32_t)__bfloat16_as_ushort(p.x) | (uint32_t)__bfloat16_as_ushort(p.y) << 16;
}
static __device__ __forceinline__ void ring_split(float x, float y, uint32_t& hi, uint32_t& lo) {
  hi = ring_pair(x, y);
  lo = ring_pair(__fsub_rn(x, __uint_as_float(hi << 16)), __fsub_rn(y, __uint_as_float(hi & 0xffff0000u)));
}
static __device__ __forceinline__ float2 shfl_pair(float2 v, int lane) {
  long long x;
  memcpy(&x, &v, 8);
  x = __shfl_sync(HS_FULL, x, lane);
  memcpy(&v, &x, 8);
  return v;
}

// Addresses for ldmatrix of a row-major tile at (row, col): a 16x16 A operand; an 8x16 block of rows as B operand (x2); 16x16, transposed, as
// the B operands of two neighbouring column tiles.
static __device__ __forceinline__ const bf16* a_tile(const bf16* p, int ld, int col) {
  const int lane = threadIdx.x & 31;
  return p + (lane & 15) * ld + col + 8 * (lane >> 4);
}
static __device__ __forceinline__ const bf16* b_rows(const bf16* p, int ld, int row, int col) {
  const int lane = threadIdx.x & 31;
  return p + (row + (lane & 7)) * ld + col + 8 * (lane >> 3 & 1);
}
static __device__ __forceinline__ const bf16* b_pair(const bf16* p, int ld, int col) {
  const int lane = threadIdx.x & 31;
  return p + (lane & 15) * ld + col + 8 * (lane >> 4);
}

// The forward and the step of this form; the ops call them where hs_gdn_ring holds (gdn.cu).
hs_status delta_chunks(cudaStream_t s, const hs_gdn_args* a);
hs_status delta_step(cudaStream_t s, const hs_gdn_step_args* a);
#endif
