// gdn_step.cu - one row of decode of the canonical delta rule, from the slot's state and replay ring (ring.cuh has the arithmetic; gpu.md 6.5).
//
// A block takes one (row, value head), a warp 32 columns of dv. S at the last multiple of 16 positions is streamed once, by 16-byte loads two
// k-steps ahead: a lane's four columns become the same column of four MMA tiles, so that what it loaded is its B operand. MMA rows 0..7 all hold
// k, rows 8..15 all q; the ring's k and d come through shared memory meanwhile. Then a lane has one column: substitution over the ring, o, and d
// into the ring. The row at position 15 of 16 also flushes: S is read again (from L2), advanced and written.
// H200: a head moves 66 KB of S, 6.6 KB of ring on average, and at every 16th position S once more. Floor 33 / 133 us a layer of 32 heads of 128x128
// at batch 64 / 256 for reading S, 37 / 147 us with the rest; 80 KB in flight a multiprocessor (five blocks of two 8 KB k-steps). Expected 1.2x of
// that. Unmeasured.
#include "ring.cuh"

struct step_shape { int nk, nv, dv; int64_t head_bytes; };

// Shared memory of a block, in bytes: k [16, ld] and q bf16, d [16, dv], g, k_j.k and k_j.q decayed [3][16].
struct step_smem {
  int ld, q, d, g, bytes;
  static __host__ __device__ step_smem of(int dk, int dv) {
    step_smem m;
    m.ld = dk + 8, m.q = ring_rows * m.ld * 2, m.d = m.q + m.ld * 2, m.g = m.d + ring_rows * dv * 4, m.bytes = m.g + 3 * ring_rows * 4;
    return m;
  }
};

// A lane's part of a k-step: rows 2t, 2t+1, 2t+8, 2t+9 of 16, four columns.
typedef pack<float, 4> four;
struct state_step { four x[4]; };
static __device__ __forceinline__ four load_cg(const float* p) {
  const float4 x = __ldcg((const float4*)p);
  return {{x.x, x.y, x.z, x.w}};
}
static __device__ __forceinline__ int step_row(int i) { return 2 * (threadIdx.x & 3) + (i & 1) + 8 * (i >> 1); }
static __device__ __forceinline__ void fetch(state_step& to, const float* S, int dv, int s, int col) {
#pragma unroll
  for (int i = 0; i < 4; i++) to.x[i] = col < dv ? load_cg(S + (int64_t)(16 * s + step_row(i)) * dv + col) : four{{0, 0, 0, 0}};
}

// S <- D(15,-1) S + sum_j k_j (D(15,j) d_j)^T for the warp's columns; K and d [16, dv] in shared memory.
template <int KS> static __device__ __forceinline__ void flush(float* S, int dv, int col, const bf16* K, int ld, const float* d, const float* g) {
  uint32_t hi[2][4], lo[2][4];   // columns 0 and 1, columns 2 and 3 of the lane's four
#pragma unroll
  for (int half = 0; half < 2; half++) {   // chunk rows 2t, 2t+1 and 2t+8, 2t+9
    const int j = step_row(2 * half);
    const float w0 = decay(g, ring_rows - 1, j), w1 = decay(g, ring_rows - 1, j + 1);
    const four zero = {{0, 0, 0, 0}}, x = col < dv ? load_pack<float, 4>(d + j * dv + col) : zero, y = col < dv ? load_pack<float, 4>(d + (j + 1) * dv + col) : zero;
#pragma unroll
    for (int c = 0; c < 4; c++) ring_split(__fmul_rn(w0, x.v[c]), __fmul_rn(w1, y.v[c]), hi[c >> 1][2 * half + (c & 1)], lo[c >> 1][2 * half + (c & 1)]);
  }
  const float e = decay(g, ring_rows - 1, -1);
  state_step a;
#pragma unroll 1
  for (int s = 0; s < KS; s++) {
    uint32_t b[4];
    ldmatrix_x4_trans(b, b_pair(K, ld, 16 * s));
    fetch(a, S, dv, s, col);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = __fmul_rn(e, a.x[2 * n + (i & 1)].v[2 * c + (i >> 1)]);
        mma_bf16(x, hi[c], b + 2 * n, x);
        mma_bf16(x, lo[c], b + 2 * n, x);
#pragma unroll
        for (int i = 0; i < 4; i++) a.x[2 * n + (i & 1)].v[2 * c + (i >> 1)] = x[i];
      }
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (col < dv) store_pack(S + (int64_t)(16 * s + step_row(i)) * dv + col, a.x[i]);
  }
}

// DV: dv when it is known to the compiler, else 0.
template <int KS, int DV>
__global__ void __launch_bounds__(128, KS == 8 && !DV ? 4 : 5)
    delta_step_kernel(step_shape z, const int32_t* slot, const int32_t* pos, const bf16* q, const bf16* k, const bf16* v, const float* beta, const float* g, bf16* o, char* rec) {
  constexpr int DK = 16 * KS;
  const int dv = DV ? DV : z.dv;
  HS_DYN_SHARED(unsigned char, sh);
  const step_smem m = step_smem::of(DK, dv);
  bf16 *K = (bf16*)sh, *Q = (bf16*)(sh + m.q);
  float *d = (float*)(sh + m.d), *gs = (float*)(sh + m.g), *kk = gs + ring_rows, *qk = kk + ring_rows;
  const int h = blockIdx.x % z.nv, b = blockIdx.x / z.nv, hk = h / (z.nv / z.nk), warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3;
  const int r = pos[b] % ring_rows, col = 32 * warp + (lane & ~3), at = b * z.nv + h;   // this row's place in the ring; the first of four columns
  const ring_cell cell = ring_at(rec, (int64_t)slot[b] * z.nv + h, z.head_bytes, DK, dv);
  state_step x[2];
  fetch(x[0], cell.S, dv, 0, col);
  if (KS > 1) fetch(x[1], cell.S, dv, 1, col);

  const bf16 *kr = k + ((int64_t)b * z.nk + hk) * DK, *qr = q + ((int64_t)b * z.nk + hk) * DK;
#pragma unroll 1
  for (int i = threadIdx.x; i < (ring_rows + 1) * 2 * KS; i += blockDim.x) {
    const int row = i / (2 * KS), c = i % (2 * KS) * 8;
    const bf16* src = row == ring_rows ? qr : row < r ? cell.k + row * DK : kr;
    cp_async16(K + row * m.ld + c, src + c, row <= r || row == ring_rows ? 16 : 0);   // q is row 16
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < r * dv / 4; i += blockDim.x) cp_async16(d + 4 * i, cell.d + 4 * i);
  cp_async_commit();
  if (threadIdx.x < ring_rows) gs[threadIdx.x] = (int)threadIdx.x < r ? cell.g[threadIdx.x] : (int)threadIdx.x == r ? g[at] : 0.0f;
  const int mine = 32 * warp + 8 * t + (lane >> 2);   // the lane's column
  const float be = beta[at], vs = mine < dv ? to_f(v[(int64_t)at * dv + mine]) : 0.0f;
  cp_async_wait<0>();
  __syncthreads();

  auto rows_kq = [&](uint32_t (&a)[4], int s) {
#pragma unroll
    for (int i = 0; i < 4; i++) memcpy(&a[i], (i & 1 ? Q : K + r * m.ld) + 16 * s + 2 * t + 8 * (i >> 1), 4);
  };
#pragma unroll 1
  for (int n = warp; n <= r / 8; n += blockDim.x >> 5) {
    float c[4] = {0, 0, 0, 0};
#pragma unroll
    for (int s = 0; s < KS; s++) {
      uint32_t a[4], bk[2];
      rows_kq(a, s);
      ldmatrix_x2(bk, b_rows(K, m.ld, 8 * n, 16 * s));
      mma_bf16(c, a, bk, c);
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int j = 8 * n + 2 * t + e;
      const float w = decay(gs, r, j);
      if (lane < 4 && j <= r) kk[j] = __fmul_rn(w, c[e]), qk[j] = __fmul_rn(w, c[2 + e]);
    }
  }
  float acc[4][4];
#pragma unroll
  for (int i = 0; i < 16; i++) acc[i >> 2][i & 3] = 0;
#pragma unroll
  for (int s = 0; s < KS; s++) {
    uint32_t a[4];
    rows_kq(a, s);
    const state_step& y = x[s & 1];
#pragma unroll
    for (int c = 0; c < 4; c++) {
      uint32_t hi[2], lo[2];
      ring_split(y.x[0].v[c], y.x[1].v[c], hi[0], lo[0]);
      ring_split(y.x[2].v[c], y.x[3].v[c], hi[1], lo[1]);
      mma_bf16(acc[c], a, hi, acc[c]);
      mma_bf16(acc[c], a, lo, acc[c]);
    }
    if (s + 2 < KS) fetch(x[s & 1], cell.S, dv, s + 2, col);
  }
  __syncthreads();

  // Tile c's columns 2t, 2t+1 are columns 8t+c, 8t+4+c of the warp: of the eight here, the lane takes number lane/4.
  float rs = acc[0][0], ps = acc[0][2];
#pragma unroll
  for (int c = 1; c < 8; c++)
    if (lane >> 2 == c) rs = acc[c & 3][c >> 2], ps = acc[c & 3][2 + (c >> 2)];
  if (mine < dv) {
    const float e = decay(gs, r, -1);
    float u = __fmaf_rn(-e, rs, vs), y = __fmul_rn(e, ps);
    for (int j = 0; j < r; j++) {
      const float dj = d[j * dv + mine];
      u = __fmaf_rn(-kk[j], dj, u);
      y = __fmaf_rn(qk[j], dj, y);
    }
    u = __fmul_rn(be, u);
    o[(int64_t)at * dv + mine] = from_f<bf16>(__fmaf_rn(qk[r], u, y));
    d[r * dv + mine] = cell.d[r * dv + mine] = u;
  }
  if (threadIdx.x < 2 * KS) store_pack(cell.k + r * DK + 8 * threadIdx.x, load_pack<bf16, 8>(K + r * m.ld + 8 * threadIdx.x));
  if (threadIdx.x == 0) cell.g[r] = gs[r];
  if (r < ring_rows - 1) return;
  __syncwarp();
  flush<KS>(cell.S, dv, col, K, m.ld, d, gs);
}

hs_status delta_step(cudaStream_t s, const hs_gdn_step_args* a) {
  const int dk = (int)a->dk, dv = (int)a->dv;
  HS_NEED_PTR(pos);
  HS_NEED(hs_packs(8, 2, a->q, a->k, a->rec_state), "q, k and rec_state must be multiples of 16");
  const step_shape z = {(int)a->nk, (int)a->nv, dv, hs_gdn_head_bytes(a->dtype, dk, dv)};
  auto go = [&](auto kernel) {
    return HS_LAUNCH(s, kernel, (unsigned)(a->B * a->nv), 32 * HS_CEIL(dv, 32), (size_t)step_smem::of(dk, dv).bytes, z, a->slot, a->pos, (const bf16*)a->q, (const bf16*)a->k,
                     (const bf16*)a->v, (const float*)a->beta, (const float*)a->g, (bf16*)a->o, (char*)a->rec_state);
  };
  switch (dk) {
    case 16: return go(delta_step_kernel<1, 0>);
    case 32: return go(delta_step_kernel<2, 0>);
    case 64: return go(delta_step_kernel<4, 0>);
    default: return dv == 128 ? go(delta_step_kernel<8, 128>) : go(delta_step_kernel<8, 0>);
  }
}
