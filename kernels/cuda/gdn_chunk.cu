// gdn_chunk.cu - the canonical delta rule over a forest, for training and prefill (ring.cuh has the arithmetic).
//
// A block takes one (segment, value head) in ticket order; a warp owns 16 columns of dv and carries S^T of them in registers, as accumulators:
// those of two neighbouring tiles are, split, the B operand of the next chunk's product. Per chunk of 16 positions: k, q, v through shared memory
// (cp.async, the next chunk behind the arithmetic); r and p by MMA while four warps make the 16x16 products k.k and q.k; substitution row by row,
// each finished d broadcast to the rows below; then the flush. A child starts at the chunk of its first row: from its parent's S there (the last
// entries of `states`) and the ancestors' rows since, whose d it computes again with the same bits. A root with a slot reads those rows' k, d and
// g from the slot's ring and leaves the rows after its last flush there.
// States inside a chunk, which the backward wants at 64-row chunks of such segments, are a flush of the rows so far into memory, tile by tile.
// H200: 210 MMAs of work a row block and warp, 6.6 M multiply-adds a row and layer of 32 heads of 128x128 (twice gpu.md 7.2, for hi + lo): 0.2 ms per
// 16k rows at 500 TFLOP/s of mma.sync, floor 0.24 ms by gpu.md 6.4. Expected 2x of that with 8 segments or more. Unmeasured.
#include "ring.cuh"

struct chunk_shape { int nk, nv, dv; int64_t head_bytes; };
static const int ring_ld = 20, warp_ld = 24;   // row strides: of 16x16 floats, of a warp's 16x16 bf16

// Shared memory of a block, in bytes: two stages of { k, q [16, ldk], v [16, ldv] bf16; g, beta [16] }, k.k and q.k [16, ring_ld], the decays
// from the chunk's start, of a flush and of the rows before the segment [3][16], per warp d as hi and lo.
struct chunk_smem {
  int ldk, ldv, q, v, gate, stage, kk, qk, from, split, bytes;
  static __host__ __device__ chunk_smem of(int dk, int dv) {
    chunk_smem m;
    m.ldk = dk + 8, m.ldv = dv + 8;
    m.q = ring_rows * m.ldk * 2, m.v = 2 * m.q, m.gate = m.v + ring_rows * m.ldv * 2, m.stage = m.gate + 2 * ring_rows * 4;
    m.kk = 2 * m.stage, m.qk = m.kk + ring_rows * ring_ld * 4, m.from = m.qk + ring_rows * ring_ld * 4, m.split = m.from + 3 * ring_rows * 4;
    m.bytes = m.split + dv / 16 * 2 * ring_rows * warp_ld * 2;
    return m;
  }
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
template <int KS> static __device__ __forceinline__ void decayed_products(float* M, const bf16* A, const bf16* K, int ld, int n, const ring_decays& D) {
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
    M[i * ring_ld + j] = j <= i ? __fmul_rn(D.from(i, j), c[e]) : 0.0f;
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

template <int KS>
__global__ void __launch_bounds__(256, KS >= 4 ? 1 : 2)
    delta_chunks_kernel(chunk_shape z, hs_forest f, const bf16* q, const bf16* k, const bf16* v, const float* beta, const float* g, bf16* o, float* states, char* rec, int* line) {
  constexpr int DK = 16 * KS;
  HS_DYN_SHARED(unsigned char, sh);
  HS_SHARED(int, above, [ring_rows]);   // the ancestors' rows in the segment's first chunk
  const chunk_smem m = chunk_smem::of(DK, z.dv);
  const int item = line_ticket(line), h = item % z.nv, s = item / z.nv, hk = h / (z.nv / z.nk), warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3;
  const int len = f.len[s], par = f.parent[s], slot = f.slot[s], before = f.pos[s] % ring_rows, first = slot >= 0 ? before : 0, at0 = 16 * warp;
  const int64_t row0 = f.start[s], ss = (int64_t)DK * z.dv;
  const ring_cell cell = slot >= 0 ? ring_at(rec, (int64_t)slot * z.nv + h, z.head_bytes, DK, z.dv) : ring_cell{0, 0, 0, 0};
  float *kk = (float*)(sh + m.kk), *qk = (float*)(sh + m.qk), *from = (float*)(sh + m.from);
  bf16* mem = (bf16*)(sh + m.split) + warp * 2 * ring_rows * warp_ld;
  if ((int)threadIdx.x < before) above[threadIdx.x] = par >= 0 ? ancestor_row(f, par, before - threadIdx.x) : -1;
  __syncthreads();

  // Row i of the chunk that starts at row `at` of the segment: its row in the batch, -1 when it is in the ring or past the end.
  auto row_of = [&](int at, int i) -> int64_t { return at + i >= len ? -1 : at + i >= 0 ? row0 + at + i : above[i]; };
  float next_g = 0, next_beta = 0;
  auto stage = [&](int at, unsigned char* to) {
    bf16 *K = (bf16*)to, *Q = (bf16*)(to + m.q), *V = (bf16*)(to + m.v);
    for (int x = threadIdx.x; x < ring_rows * 2 * KS; x += blockDim.x) {
      const int i = x / (2 * KS), c = x % (2 * KS) * 8;
      const int64_t row = row_of(at, i);
      const bf16* kr = row >= 0 ? k + (row * z.nk + hk) * DK : at + i < 0 ? cell.k + i * DK : 0;
      cp_async16(K + i * m.ldk + c, kr ? kr + c : k, kr ? 16 : 0);
      cp_async16(Q + i * m.ldk + c, row >= 0 ? q + (row * z.nk + hk) * DK + c : q, row >= 0 ? 16 : 0);
    }
    for (int x = threadIdx.x, n = z.dv / 8; x < ring_rows * n; x += blockDim.x) {
      const int i = x / n, c = x % n * 8;
      const int64_t row = row_of(at, i);
      cp_async16(V + i * m.ldv + c, row >= 0 ? v + (row * z.nv + h) * z.dv + c : v, row >= 0 ? 16 : 0);
    }
    cp_async_commit();
    if (threadIdx.x < ring_rows) {
      const int i = threadIdx.x;
      const int64_t row = row_of(at, i);
      next_g = row >= 0 ? g[row * z.nv + h] : at + i < 0 ? cell.g[i] : 0.0f;
      next_beta = row >= 0 ? beta[row * z.nv + h] : at + i < 0 ? 1.0f : 0.0f;
    }
  };
  auto stage_gates = [&](unsigned char* to) {
    float* x = (float*)(to + m.gate);
    if (threadIdx.x < ring_rows) x[threadIdx.x] = next_g, x[ring_rows + threadIdx.x] = next_beta;
  };

  stage(-before, sh);
  stage_gates(sh);
  if (par >= 0) {
    line_wait(line, par * z.nv + h);
    __syncthreads();
  }
  float S[2 * KS][4];
  {
    const float* src = par >= 0 ? states + ((int64_t)(f.nchunks + par) * z.nv + h) * ss : cell.S;
    each_state<KS>(S, z.dv, at0, [&](float& x, int i) { x = src ? __ldcg(src + i) : 0.0f; });
  }
  auto store = [&](float* dst) { each_state<KS>(S, z.dv, at0, [&](float& x, int i) { dst[i] = x; }); };
  bool flushed = false;
  unsigned char *now = sh, *then = sh + m.stage;
  for (int at = -before; at < len; at += ring_rows) {
    const int lo = max(0, -at), rows = min(ring_rows, len - at), ring = at < 0 ? first : 0;
    const bf16 *K = (const bf16*)now, *Q = (const bf16*)(now + m.q), *V = (const bf16*)(now + m.v);
    const float *gs = (const float*)(now + m.gate), *bs = gs + ring_rows;
    float* chunk = states && (at + before) % HS_GDN_CHUNK == 0 && at + before < len ? states + ((int64_t)(f.chunk_off[s] + (at + before) / HS_GDN_CHUNK) * z.nv + h) * ss : 0;
    cp_async_wait<0>();
    __syncthreads();
    if (at + ring_rows < len) stage(at + ring_rows, then);
    if (chunk && !before) store(chunk);
    {
      const ring_decays D(gs);
      for (int x = warp; x < 4; x += blockDim.x >> 5) decayed_products<KS>(x & 2 ? qk : kk, x & 2 ? Q : K, K, m.ldk, x & 1, D);
      for (int x = blockDim.x - 1 - threadIdx.x; x < 3 * ring_rows; x += blockDim.x) {
        const int i = x % ring_rows, to = x < ring_rows ? i : x < 2 * ring_rows ? ring_rows - 1 : before - 1;
        from[x] = D.from(to, x < ring_rows ? -1 : i);
      }
    }
    float u[2][4], y[2][4];
    read_state<KS>(u, y, S, K, Q, m.ldk);
    __syncthreads();
    float be[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = (lane >> 2) + 8 * half;
      const float e = from[i];
      be[half] = bs[i];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const int c = 8 * n + 2 * t;
        const pack<bf16, 2> x = load_pack<bf16, 2>(V + i * m.ldv + at0 + c);
#pragma unroll
        for (int w = 0; w < 2; w++) {
          u[n][2 * half + w] = i < ring ? cell.d[i * z.dv + at0 + c + w] : __fmaf_rn(-e, u[n][2 * half + w], to_f(x.v[w]));
          y[n][2 * half + w] = __fmul_rn(e, y[n][2 * half + w]);
        }
      }
    }
    substitute(u, y, be, kk, qk, ring, rows);
    const bool keep = slot >= 0 && rows < ring_rows;   // the segment's last chunk, unfinished
#pragma unroll
    for (int x = 0; x < 4; x++) {
      const int half = x & 1, n = x >> 1, i = (lane >> 2) + 8 * half, c = at0 + 8 * n + 2 * t;
      const float* d = &u[n][2 * half];
      if (i >= lo && i < rows) {
        store_pack(o + ((row0 + at + i) * z.nv + h) * z.dv + c, pack<bf16, 2>{{from_f<bf16>(y[n][2 * half]), from_f<bf16>(y[n][2 * half + 1])}});
        if (keep) store_pack(cell.d + i * z.dv + c, pack<float, 2>{{d[0], d[1]}});
      }
    }
    if (keep) {
      for (int x = threadIdx.x; x < rows * 2 * KS; x += blockDim.x) {
        const int i = x / (2 * KS), c = x % (2 * KS) * 8;
        store_pack(cell.k + i * DK + c, load_pack<bf16, 8>(K + i * m.ldk + c));
      }
      if ((int)threadIdx.x < rows) cell.g[threadIdx.x] = gs[threadIdx.x];
    }
    uint32_t hi[4], low[4];
    if (chunk && before) {
      scaled_rows(hi, low, u, from + 2 * ring_rows, before, mem);
      advance<KS>(S, from[before - 1], hi, low, K, m.ldk, [&](int T, const float* x) {
#pragma unroll
        for (int e = 0; e < 4; e++) chunk[(8 * T + 2 * t + (e & 1)) * z.dv + at0 + (lane >> 2) + 8 * (e >> 1)] = x[e];
      });
    }
    if (rows == ring_rows) {
      flushed = true;
      scaled_rows(hi, low, u, from + ring_rows, ring_rows, mem);
      advance<KS>(S, from[ring_rows - 1], hi, low, K, m.ldk, [&](int T, const float* x) {
#pragma unroll
        for (int e = 0; e < 4; e++) S[T][e] = x[e];
      });
    }
    stage_gates(then);
    unsigned char* x = now;
    now = then, then = x;
  }
  if (states) store(states + ((int64_t)(f.nchunks + s) * z.nv + h) * ss);
  if (slot >= 0 && flushed) store(cell.S);
  line_done(line, s * z.nv + h);
}

hs_status delta_chunks(cudaStream_t s, const hs_gdn_args* a) {
  const int dk = (int)a->dk, dv = (int)a->dv;
  HS_NEED(a->f.pos, "forest array is 0");
  HS_NEED(hs_packs(8, 2, a->q, a->k, a->v, a->rec_state), "q, k, v and rec_state must be multiples of 16");
  const chunk_shape z = {(int)a->nk, (int)a->nv, dv, hs_gdn_head_bytes(a->dtype, dk, dv)};
  auto go = [&](auto kernel) {
    return HS_LAUNCH(s, kernel, (unsigned)(a->f.nseg * a->nv), 2 * dv, (size_t)chunk_smem::of(dk, dv).bytes, z, a->f, (const bf16*)a->q, (const bf16*)a->k, (const bf16*)a->v,
                     (const float*)a->beta, (const float*)a->g, (bf16*)a->o, (float*)a->states, (char*)a->rec_state, (int*)a->ws);
  };
  switch (dk) {
    case 16: return go(delta_chunks_kernel<1>);
    case 32: return go(delta_chunks_kernel<2>);
    case 64: return go(delta_chunks_kernel<4>);
    default: return go(delta_chunks_kernel<8>);
  }
}
