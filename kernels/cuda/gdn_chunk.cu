// gdn_chunk.cu - the canonical delta rule over a forest, for training and prefill (ring.cuh has the arithmetic).
//
// A block takes one (segment, value head) in ticket order; a warp owns 16 columns of dv and carries S^T of them in registers, as accumulators:
// those of two neighbouring tiles are, split, the B operand of the next chunk's product. Per chunk of 16 positions: k, q, v through shared memory
// (cp.async, the next chunk behind the arithmetic); r and p by MMA while four warps make the 16x16 products k.k and q.k; substitution row by row,
// each finished d broadcast to the rows below; then the flush. A child starts at the chunk of its first row: from its parent's S there (the last
// entries of `states`) and the ancestors' rows since, whose d it computes again with the same bits. A root with a slot reads those rows' k, d and
// g from the slot's ring and leaves the rows after its last flush there.
// States inside a chunk, which the backward wants at 64-row chunks of such segments, are a flush of the rows so far into memory, tile by tile.
// Shapes: those of hs_gdn_ring; dk = dv = 128 has kernels of its own, 128 registers and 41 KB of shared memory, two blocks a multiprocessor.
// H200: about 100 MMAs a chunk and warp, 6.6 MFLOP a row and layer of 32 heads of 128x128 (gpu.md 7.2 counts 3.7, without hi + lo): 0.21 ms per 16k
// rows at 500 TFLOP/s of mma.sync; floor 0.24 ms (gpu.md 6.4), expected 2x of it with 8 segments or more. Unmeasured.
#include "ring.cuh"

struct chunk_shape { int nk, nv, dv; int64_t head_bytes; };
static const int ring_ld = 20, warp_ld = 24;   // row strides: of 16x16 floats, of a warp's 16x16 bf16

// Shared memory of a block, byte offsets: two stages of { k, q [16, ldk], v [16, ldv] bf16; g, beta [16] }, k.k and q.k [16, ring_ld], the decays
// from the chunk's start, of a flush and of the rows before the segment [3][16], per warp d as hi and lo.
template <int DK> struct chunk_smem {
  static constexpr int ldk = DK + 8, ldv = 128 + 8;
  static constexpr int q = ring_rows * ldk * 2, v = 2 * q, gate = v + ring_rows * ldv * 2, stage = gate + 2 * ring_rows * 4;
  static constexpr int kk = 2 * stage, qk = kk + ring_rows * ring_ld * 4, from = qk + ring_rows * ring_ld * 4, split = from + 3 * ring_rows * 4;
  static constexpr int warp = 2 * ring_rows * warp_ld * 2;
  static int bytes(int dv) { return split + dv / 16 * warp; }
};

// The row `back` positions before the end of segment s (1 = its last row).
static __device__ __forceinline__ int ancestor_row(const hs_forest& f, int s, int back) {
  while (back > f.len[s]) back -= f.len[s], s = f.parent[s];
  return f.start[s] + f.len[s] - back;
}

// fn(value, index into [dk, dv]) over a lane's part of S^T: tile T holds rows 8T.. of S, columns at..at+16.
template <int KS, class F> static __device__ __forceinline__ void each_state(float (&S)[2 * KS][4], int dv, int at, const F& fn) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int T = 0; T < 2 * KS; T++)
#pragma unroll
    for (int e = 0; e < 4; e++) fn(S[T][e], (8 * T + 2 * (lane & 3) + (e & 1)) * dv + at + (lane >> 2) + 8 * (e >> 1));
}

// r, p [16 rows, 16 columns] = [k; q] S.
template <int KS>
static __device__ __forceinline__ void read_state(float (&r)[2][4], float (&p)[2][4], const float (&S)[2 * KS][4], const bf16* K, const bf16* Q, int ld) {
#pragma unroll
  for (int i = 0; i < 8; i++) r[i >> 2][i & 3] = p[i >> 2][i & 3] = 0;
#pragma unroll
  for (int s = 0; s < KS; s++) {
    uint32_t ka[4], qa[4], hi[2][2], lo[2][2];
    ldmatrix_x4(ka, a_tile(K, ld, 16 * s));
    ldmatrix_x4(qa, a_tile(Q, ld, 16 * s));
#pragma unroll
    for (int i = 0; i < 4; i++) ring_split(S[2 * s + (i & 1)][2 * (i >> 1)], S[2 * s + (i & 1)][2 * (i >> 1) + 1], hi[i >> 1][i & 1], lo[i >> 1][i & 1]);
#pragma unroll
    for (int n = 0; n < 2; n++) mma_bf16(r[n], ka, hi[n], r[n]), mma_bf16(p[n], qa, hi[n], p[n]);
#pragma unroll
    for (int n = 0; n < 2; n++) mma_bf16(r[n], ka, lo[n], r[n]), mma_bf16(p[n], qa, lo[n], p[n]);
  }
}

// M[i][j] = D(i, j) (a_i . k_j) for columns 8n..8n+8, j <= i; zero above.
template <int KS> static __device__ __forceinline__ void decayed_products(float* M, const bf16* A, const bf16* K, int ld, int n, const float* g) {
  const int lane = threadIdx.x & 31;
  float c[4] = {0, 0, 0, 0};
#pragma unroll
  for (int s = 0; s < KS; s++) {
    uint32_t a[4], b[2];
    ldmatrix_x4(a, a_tile(A, ld, 16 * s));
    ldmatrix_x2(b, b_rows(K, ld, 8 * n, 16 * s));
    mma_bf16(c, a, b, c);
  }
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const int i = (lane >> 2) + 8 * (e >> 1), j = 8 * n + 2 * (lane & 3) + (e & 1);
    M[i * ring_ld + j] = j <= i ? __fmul_rn(decay(g, i, j), c[e]) : 0.0f;
  }
}

// Rows 0..rows of a chunk, by a warp: u (in: v - D(i,-1) r; for rows below `first`, which stand in the ring, d with beta 1) becomes d, y (in: D(i,-1) p) o.
static __device__ __forceinline__ void substitute(float (&u)[2][4], float (&y)[2][4], const float (&beta)[2], const float* kk, const float* qk, int first, int rows) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
#pragma unroll
  for (int j4 = 0; j4 < ring_rows; j4 += 4) {
    if (j4 >= rows) break;
    pack<float, 4> a[2], b[2];
#pragma unroll
    for (int h = j4 / 8; h < 2; h++) a[h] = load_pack<float, 4>(kk + (g + 8 * h) * ring_ld + j4), b[h] = load_pack<float, 4>(qk + (g + 8 * h) * ring_ld + j4);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int j = j4 + e, own = j / 8;
      float2 d[2];
#pragma unroll
      for (int n = 0; n < 2; n++)
        d[n] = shfl_pair(make_float2(__fmul_rn(beta[own], u[n][2 * own]), __fmul_rn(beta[own], u[n][2 * own + 1])), (j & 7) * 4 + (lane & 3));
#pragma unroll
      for (int h = own; h < 2; h++) {
        const int i = g + 8 * h;
#pragma unroll
        for (int n = 0; n < 2; n++) {
          if (i > j && i >= first) u[n][2 * h] = __fmaf_rn(-a[h].v[e], d[n].x, u[n][2 * h]), u[n][2 * h + 1] = __fmaf_rn(-a[h].v[e], d[n].y, u[n][2 * h + 1]);
          if (i >= j) y[n][2 * h] = __fmaf_rn(b[h].v[e], d[n].x, y[n][2 * h]), y[n][2 * h + 1] = __fmaf_rn(b[h].v[e], d[n].y, y[n][2 * h + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) u[i >> 2][i & 3] = __fmul_rn(beta[i >> 1 & 1], u[i >> 2][i & 3]);
}

// (w_j d_j)^T of the rows below n as an A operand, hi and lo, through the warp's part of shared memory; zero from n on.
static __device__ __forceinline__ void scaled_rows(uint32_t (&hi)[4], uint32_t (&lo)[4], const float (&d)[2][4], const float* w, int n, bf16* mem) {
  const int lane = threadIdx.x & 31;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = (lane >> 2) + 8 * (i & 1), at = row * warp_ld + 8 * (i >> 1) + 2 * (lane & 3);
    const float *x = &d[i >> 1][2 * (i & 1)], s = w[row];
    uint32_t h = 0, l = 0;
    if (row < n) ring_split(__fmul_rn(s, x[0]), __fmul_rn(s, x[1]), h, l);
    memcpy(mem + at, &h, 4);
    memcpy(mem + ring_rows * warp_ld + at, &l, 4);
  }
  __syncwarp();
  const bf16* at = mem + ((lane & 7) + 8 * (lane >> 4)) * warp_ld + 8 * (lane >> 3 & 1);
  ldmatrix_x4_trans(hi, at);
  ldmatrix_x4_trans(lo, at + ring_rows * warp_ld);
}

// fn(T, tile): tile T of e S + (scaled rows)^T k.
template <int KS, class F>
static __device__ __forceinline__ void advance(const float (&S)[2 * KS][4], float e, const uint32_t (&hi)[4], const uint32_t (&lo)[4], const bf16* K, int ld, const F& fn) {
#pragma unroll
  for (int s = 0; s < KS; s++) {
    uint32_t b[4];
    ldmatrix_x4_trans(b, b_pair(K, ld, 16 * s));
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = __fmul_rn(e, S[2 * s + n][i]);
      mma_bf16(x, hi, b + 2 * n, x);
      mma_bf16(x, lo, b + 2 * n, x);
      fn(2 * s + n, x);
    }
  }
}

// What a block works on, in shared memory as registers are short: value and key head, segment and what the forest says of it, rows of its first
// chunk before its own, index of its first 64-row chunk, and the ancestors' rows in the first chunk (-1: in the ring).
struct chunk_item { int h, hk, s, parent, slot, row0, len, before, chunk0, above[ring_rows]; };

// DV: dv when it is known to the compiler, else 0.
template <int KS, int DV>
__global__ void __launch_bounds__(256, KS == 8 && !DV ? 1 : 2)
    delta_chunks_kernel(chunk_shape z, hs_forest f, const bf16* q, const bf16* k, const bf16* v, const float* beta, const float* g, bf16* o, float* states, char* rec, int* line) {
  constexpr int DK = 16 * KS;
  const int dv = DV ? DV : z.dv;
  HS_DYN_SHARED(unsigned char, sh);
  HS_SHARED(chunk_item, of, [1]);
  typedef chunk_smem<DK> m;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3, at0 = 16 * warp, ss = DK * dv;
  const chunk_item& w = of[0];
  {
    const int item = line_ticket(line), s = item / z.nv, h = item % z.nv;
    if (threadIdx.x == 0) {
      of[0] = {h, h / (z.nv / z.nk), s, f.parent[s], f.slot[s], f.start[s], f.len[s], f.pos[s] % ring_rows, f.chunk_off[s], {}};
      for (int i = 0; i < w.before; i++) of[0].above[i] = w.parent >= 0 ? ancestor_row(f, w.parent, w.before - i) : -1;
    }
    __syncthreads();
  }
  auto ring_of = [&]() { return ring_at(rec, (int64_t)w.slot * z.nv + w.h, z.head_bytes, DK, dv); };
  auto state_of = [&](int i) { return states + ((int64_t)i * z.nv + w.h) * ss; };
  float *kk = (float*)(sh + m::kk), *qk = (float*)(sh + m::qk), *from = (float*)(sh + m::from);
  bf16* mem = (bf16*)(sh + m::split + warp * m::warp);

  // Stages the 16 rows from row `at` of the segment; in its first chunk some stand before the segment: with the ancestors, or in the ring.
  auto stage = [&](int at, unsigned char* to, bool first) {
    bf16 *K = (bf16*)to, *Q = (bf16*)(to + m::q), *V = (bf16*)(to + m::v);
    float* G = (float*)(to + m::gate);
    auto row_of = [&](int i) { return at + i >= w.len ? -1 : !first || at + i >= 0 ? w.row0 + at + i : w.above[i]; };
    auto ringed = [&](int i) { return first && at + i < 0 && w.slot >= 0; };
#pragma unroll 1
    for (unsigned x = threadIdx.x; x < ring_rows * 2 * KS; x += blockDim.x) {
      const int i = x / (2 * KS), c = x % (2 * KS) * 8, row = row_of(i);
      const int64_t from = ((int64_t)row * z.nk + w.hk) * DK + c;
      cp_async16(K + i * m::ldk + c, row >= 0 ? k + from : ringed(i) ? ring_of().k + i * DK + c : k, row >= 0 || ringed(i) ? 16 : 0);
      cp_async16(Q + i * m::ldk + c, row >= 0 ? q + from : q, row >= 0 ? 16 : 0);
    }
#pragma unroll 1
    for (unsigned x = threadIdx.x, n = dv / 8; x < ring_rows * n; x += blockDim.x) {
      const int i = x / n, c = x % n * 8, row = row_of(i);
      cp_async16(V + i * m::ldv + c, row >= 0 ? v + ((int64_t)row * z.nv + w.h) * dv + c : v, row >= 0 ? 16 : 0);
    }
    if (threadIdx.x < ring_rows) {
      const int i = threadIdx.x, row = row_of(i);
      const int64_t from = (int64_t)row * z.nv + w.h;
      cp_async4(G + i, row >= 0 ? g + from : ringed(i) ? ring_of().g + i : g, row >= 0 || ringed(i));
      cp_async4(G + ring_rows + i, row >= 0 ? beta + from : beta, row >= 0);
    }
    cp_async_commit();
  };

  stage(-w.before, sh, true);
  if (w.parent >= 0) {
    line_wait(line, w.parent * z.nv + w.h);
    __syncthreads();
  }
  float S[2 * KS][4];
  each_state<KS>(S, dv, at0, [&](float& x, int) { x = 0; });
  if (w.parent >= 0 || w.slot >= 0) {
    const float* src = w.parent >= 0 ? state_of(f.nchunks + w.parent) : ring_of().S;
    each_state<KS>(S, dv, at0, [&](float& x, int i) { x = *(const volatile float*)(src + i); });
  }
  auto store = [&](float* dst) { each_state<KS>(S, dv, at0, [&](float& x, int i) { dst[i] = x; }); };
  for (int at = -w.before; at < w.len; at += ring_rows) {
    const int now = (at + w.before) / ring_rows % 2 * m::stage;   // the stage in use
    const bf16 *K = (const bf16*)(sh + now), *Q = (const bf16*)(sh + now + m::q), *V = (const bf16*)(sh + now + m::v);
    const float *gs = (const float*)(sh + now + m::gate), *bs = gs + ring_rows;
    auto starts = [&]() { return states && (at + w.before) % HS_GDN_CHUNK == 0 && at + w.before < w.len; };   // one of the backward's chunks does
    cp_async_wait<0>();
    __syncthreads();
    if (at + ring_rows < w.len) stage(at + ring_rows, sh + (m::stage - now), false);
    if (!w.before && starts()) store(state_of(w.chunk0 + at / HS_GDN_CHUNK));
#pragma unroll 1
    for (int x = warp; x < 4; x += blockDim.x >> 5) decayed_products<KS>(x & 2 ? qk : kk, x & 2 ? Q : K, K, m::ldk, x & 1, gs);
#pragma unroll 1
    for (int x = blockDim.x - 1 - threadIdx.x; x < 3 * ring_rows; x += blockDim.x) {
      const int i = x % ring_rows, to = x < ring_rows ? i : x < 2 * ring_rows ? ring_rows - 1 : w.before - 1;
      from[x] = decay(gs, to, x < ring_rows ? -1 : i);
    }
    float u[2][4], y[2][4];
    read_state<KS>(u, y, S, K, Q, m::ldk);
    __syncthreads();
    const int rows = min(ring_rows, w.len - at), ring = at < 0 && w.slot >= 0 ? w.before : 0;
    float be[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = (lane >> 2) + 8 * half;
      const float e = from[i];
      be[half] = i < ring ? 1.0f : bs[i];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int c = 8 * n + 2 * t;
        const pack<bf16, 2> x = load_pack<bf16, 2>(V + i * m::ldv + at0 + c);
#pragma unroll
        for (int b = 0; b < 2; b++) {
          u[n][2 * half + b] = __fmaf_rn(-e, u[n][2 * half + b], to_f(x.v[b]));
          y[n][2 * half + b] = __fmul_rn(e, y[n][2 * half + b]);
          if (i < ring) u[n][2 * half + b] = ring_of().d[i * dv + at0 + c + b];
        }
      }
    }
    substitute(u, y, be, kk, qk, ring, rows);
    const bool keep = w.slot >= 0 && rows < ring_rows;   // the segment's last chunk, unfinished
#pragma unroll
    for (int x = 0; x < 4; x++) {
      const int half = x & 1, n = x >> 1, i = (lane >> 2) + 8 * half, c = at0 + 8 * n + 2 * t;
      const float* d = &u[n][2 * half];
      if (at + i >= 0 && i < rows) {
        store_pack(o + ((int64_t)(w.row0 + at + i) * z.nv + w.h) * dv + c, pack<bf16, 2>{{from_f<bf16>(y[n][2 * half]), from_f<bf16>(y[n][2 * half + 1])}});
        if (keep) store_pack(ring_of().d + i * dv + c, pack<float, 2>{{d[0], d[1]}});
      }
    }
    if (keep) {
#pragma unroll 1
      for (int x = threadIdx.x; x < rows * 2 * KS; x += blockDim.x) {
        const int i = x / (2 * KS), c = x % (2 * KS) * 8;
        store_pack(ring_of().k + i * DK + c, load_pack<bf16, 8>(K + i * m::ldk + c));
      }
      if ((int)threadIdx.x < rows) ring_of().g[threadIdx.x] = gs[threadIdx.x];
    }
    uint32_t hi[4], low[4];
    if (w.before && starts()) {
      float* dst = state_of(w.chunk0 + (at + w.before) / HS_GDN_CHUNK);
      scaled_rows(hi, low, u, from + 2 * ring_rows, w.before, mem);
      advance<KS>(S, from[w.before - 1], hi, low, K, m::ldk, [&](int T, const float* x) {
#pragma unroll
        for (int e = 0; e < 4; e++) dst[(8 * T + 2 * t + (e & 1)) * dv + at0 + (lane >> 2) + 8 * (e >> 1)] = x[e];
      });
    }
    if (rows == ring_rows) {
      scaled_rows(hi, low, u, from + ring_rows, ring_rows, mem);
      advance<KS>(S, from[ring_rows - 1], hi, low, K, m::ldk, [&](int T, const float* x) {
#pragma unroll
        for (int e = 0; e < 4; e++) S[T][e] = x[e];
      });
    }
  }
  if (states) store(state_of(f.nchunks + w.s));
  if (w.slot >= 0 && w.before + w.len >= ring_rows) store(ring_of().S);
  line_done(line, w.s * z.nv + w.h);
}

hs_status delta_chunks(cudaStream_t s, const hs_gdn_args* a) {
  const int dk = (int)a->dk, dv = (int)a->dv;
  HS_NEED(a->f.pos, "forest array is 0");
  HS_NEED(hs_packs(8, 2, a->q, a->k, a->v, a->rec_state), "q, k, v and rec_state must be multiples of 16");
  const chunk_shape z = {(int)a->nk, (int)a->nv, dv, hs_gdn_head_bytes(a->dtype, dk, dv)};
  auto go = [&](auto kernel, int smem) {
    return HS_LAUNCH(s, kernel, (unsigned)(a->f.nseg * a->nv), 2 * dv, (size_t)smem, z, a->f, (const bf16*)a->q, (const bf16*)a->k, (const bf16*)a->v,
                     (const float*)a->beta, (const float*)a->g, (bf16*)a->o, (float*)a->states, (char*)a->rec_state, (int*)a->ws);
  };
  switch (dk) {
    case 16: return go(delta_chunks_kernel<1, 0>, chunk_smem<16>::bytes(dv));
    case 32: return go(delta_chunks_kernel<2, 0>, chunk_smem<32>::bytes(dv));
    case 64: return go(delta_chunks_kernel<4, 0>, chunk_smem<64>::bytes(dv));
    default: return dv == 128 ? go(delta_chunks_kernel<8, 128>, chunk_smem<128>::bytes(dv)) : go(delta_chunks_kernel<8, 0>, chunk_smem<128>::bytes(dv));
  }
}
