// attn_bwd.cu - backward of attention over a packed forest (model.md 3.9): with P recomputed from lse and D = rowsum(do * o),
//   dS = P (do V^T - D),  dq = scale dS K,  dk = scale dS^T q,  dv = P^T do.
//
// delta_kernel  D, a warp per row and head.
// dq_kernel     a block per 64 MMA rows (query rows x heads of a kv head, as in attn.cuh), over the key tiles of their chain in order.
// dkv_kernel    a block per tile of keys of one segment and kv head, over the MMA rows that see it in order: its own segment's from the
//               tile on, then every descendant's in segment order; within a row the query heads in order. That order is the sum's.
// Both passes form S and do V^T anew: 7 products where a pass with atomics has 5, but every sum has a fixed order and place.
// BF16: mma_bf16, P and dS rounded to bf16. F32: FMA loops on smaller tiles.
// Floor on an H200: 2.5 x forward's FLOPs, about 2.5 ms per 4 sequences of 4k at 550 TFLOP/s; 7/5 of that work at mma.sync's rate is
// expected at 3 to 4 times it (unmeasured). Any hd up to 256, any nh / nkv.
#include "attn.cuh"

template <class T> struct bwd_io {
  const T *q, *k, *v, *o, *dout;
  const float *lse, *delta;   // [T, nh]
  T *dq, *dk, *dv;
  float scale;
};
static const float log2e = 1.4426950408889634f;

template <class T> __global__ void delta_kernel(int64_t rows, int hd, const T* o, const T* dout, float* delta) {
  const int64_t i = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (i >= rows) return;
  float s = 0;
  for (int j = threadIdx.x & 31; j < hd; j += 32) s += to_f(o[i * hd + j]) * to_f(dout[i * hd + j]);
  s = warp_sum(s);
  if ((threadIdx.x & 31) == 0) delta[i] = s;
}

// ---- dq ----

// F32 at hd 256 takes two warps: Q and do of 64 rows would not fit beside the keys.
template <class T, int HD> struct dq_smem {
  static constexpr int warps = sizeof(T) == 4 && HD == 256 ? 2 : 4, keys = 32, ld = attn_ld<T, HD>;
  static constexpr int q = 16 * warps * ld, kv = keys * ld, scratch = sizeof(T) == 4 ? 16 * attn_ld<float, keys> : 0;
  static constexpr size_t bytes = sizeof(T) * (2 * q + 2 * kv + warps * scratch);
};

template <class T, int HD> __global__ void __launch_bounds__(32 * dq_smem<T, HD>::warps, 2) dq_kernel(hs_forest f, attn_heads h, bwd_io<T> io) {
  typedef dq_smem<T, HD> S;
  constexpr int BK = S::keys, NT = HD / 8, ld = S::ld;
  HS_DYN_SHARED(T, smem);
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  T *qs = smem, *dos = qs + S::q, *ks = dos + S::q, *vs = ks + S::kv, *scratch = vs + S::kv + warp * S::scratch;

  const int per = HS_CEIL(HS_GDN_CHUNK, h.QR) * h.groups;   // as in attn_fwd.cu
  const int ci = f.nchunks - 1 - (int)blockIdx.x / per, sub = (int)blockIdx.x % per, off = sub / h.groups * h.QR, h0 = sub % h.groups * h.HB;
  const int s = segment_of(f, ci), hk = (int)blockIdx.y, b0 = (ci - f.chunk_off[s]) * HS_GDN_CHUNK + off;
  const int left = f.len[s] - b0, room = HS_GDN_CHUNK - off, n = HS_MIN(HS_MIN(h.QR, room), left);
  if (n <= 0) return;
  const int64_t row0 = f.start[s] + b0, kstride = (int64_t)h.nkv * h.hd;
  const int base = f.pos[f.root[s]], pos0 = f.pos[s] - base + b0;

  auto row_of = [&](int m) { return (row0 + m / h.HB) * h.nh + hk * h.rep + h0 + m % h.HB; };   // of [T, nh]
  auto valid = [&](int m) { return m / h.HB < n && h0 + m % h.HB < h.rep; };
  for (int m = warp; m < 16 * S::warps; m += S::warps)   // a warp loads its rows one by one: an invalid one becomes zero
    for (int c = (threadIdx.x & 31) * pack_n<T>; c < HD; c += 32 * pack_n<T>)
      for (int which = 0; which < 2; which++) {
        const T* p = (which ? io.dout : io.q) + (valid(m) ? row_of(m) * h.hd + c : 0);
        pack<T, pack_n<T>> v;
        if (valid(m) && h.packs && c < h.hd) v = load_pack<T, pack_n<T>>(p);
        else
          for (int e = 0; e < pack_n<T>; e++) v.v[e] = valid(m) && c + e < h.hd ? p[e] : from_f<T>(0.0f);
        store_pack<T, pack_n<T>>((which ? dos : qs) + m * ld + c, v);
      }
  int pos[2];
  float l2[2], delta[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int m = warp * 16 + g + 8 * r;
    pos[r] = valid(m) ? pos0 + m / h.HB : -1;
    l2[r] = pos[r] < 0 ? 0.0f : io.lse[row_of(m)] * log2e;
    delta[r] = pos[r] < 0 ? 0.0f : io.delta[row_of(m)];
  }
  float dq[NT][4];
#pragma unroll
  for (int x = 0; x < NT; x++) dq[x][0] = dq[x][1] = dq[x][2] = dq[x][3] = 0;

  const int last = pos0 + n;   // the block's keys are 0..last-1
  for (int p0 = 0; p0 < last; p0 += BK) {
    const int keys = HS_MIN(BK, last - p0);
    auto from = [&](const T* x, int j) {
      int a = s;
      const int p = p0 + j + base;
      while (f.pos[a] > p) a = f.parent[a];
      return x + (f.start[a] + p - f.pos[a]) * kstride + hk * h.hd;
    };
    __syncthreads();
    load_tile<T, HD>(ks, BK, keys, h.hd, h.packs, io.k, [&](int j) { return from(io.k, j); });
    load_tile<T, HD>(vs, BK, keys, h.hd, h.packs, io.v, [&](int j) { return from(io.v, j); });
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    float p[BK / 8][4], dp[BK / 8][4];
#pragma unroll
    for (int x = 0; x < BK / 8; x++) p[x][0] = p[x][1] = p[x][2] = p[x][3] = dp[x][0] = dp[x][1] = dp[x][2] = dp[x][3] = 0;
    mm_nt<BK / 8, HD>(p, qs + warp * 16 * ld, ld, ks, ld);
    mm_nt<BK / 8, HD>(dp, dos + warp * 16 * ld, ld, vs, ld);
#pragma unroll
    for (int x = 0; x < BK / 8; x++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int r = e / 2;
        const bool sees = p0 + x * 8 + 2 * t + e % 2 <= pos[r];
        p[x][e] = sees ? exp2f(__fmaf_rn(p[x][e], h.c, -l2[r])) * (dp[x][e] - delta[r]) : 0.0f;
      }
    mm_pn<NT, BK>(dq, p, ks, ld, scratch);
  }
#pragma unroll
  for (int r = 0; r < 2; r++)
    if (pos[r] >= 0) write_row<T, NT>(io.dq + row_of(warp * 16 + g + 8 * r) * h.hd, dq, r, h.hd, h.packs, io.scale);
}

// ---- dk, dv ----

// KG groups of 16 keys x parts of the columns = warps: a warp keeps dk and dv of its keys and columns, HD / parts registers each lane.
template <class T, int HD> struct dkv_smem {
  static constexpr int parts = HD == 256 ? 2 : 1, keys = sizeof(T) == 4 ? 32 : 64, rows = keys, groups = keys / 16, warps = groups * parts;
  static constexpr int ld = attn_ld<T, HD>, kv = keys * ld, q = rows * ld, ldp = attn_ld<T, rows>, p = keys * ldp;
  static constexpr size_t bytes = sizeof(T) * (2 * kv + 2 * q + 2 * p) + 3 * rows * 4;
};

template <class T, int HD> __global__ void __launch_bounds__(32 * dkv_smem<T, HD>::warps, 1) dkv_kernel(hs_forest f, attn_heads h, bwd_io<T> io) {
  typedef dkv_smem<T, HD> S;
  constexpr int BK = S::keys, BQ = S::rows, ld = S::ld, ldp = S::ldp, NQ = BQ / 8 / S::parts, NC = HD / 8 / S::parts;
  HS_DYN_SHARED(T, smem);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, kg = warp % S::groups, part = warp / S::groups;
  T *ks = smem, *vs = ks + S::kv, *qs = vs + S::kv, *dos = qs + S::q, *ps = dos + S::q, *dss = ps + S::p;
  float *l2 = (float*)(dss + S::p), *delta = l2 + BQ;
  int* row = (int*)(delta + BQ);   // of its segment

  constexpr int per = HS_GDN_CHUNK / BK;
  const int ci = (int)blockIdx.x / per, s = segment_of(f, ci), hk = (int)blockIdx.y;
  const int k0 = (ci - f.chunk_off[s]) * HS_GDN_CHUNK + (int)blockIdx.x % per * BK, left = f.len[s] - k0, keys = HS_MIN(BK, left);
  if (keys <= 0) return;
  const int64_t at = ((int64_t)(f.start[s] + k0) * h.nkv + hk) * h.hd, kstride = (int64_t)h.nkv * h.hd;
  load_tile<T, HD>(ks, BK, keys, h.hd, h.packs, io.k, [&](int j) { return io.k + at + j * kstride; });
  load_tile<T, HD>(vs, BK, keys, h.hd, h.packs, io.v, [&](int j) { return io.v + at + j * kstride; });
  cp_async_commit();

  float dk[NC][4], dv[NC][4];
#pragma unroll
  for (int x = 0; x < NC; x++) dk[x][0] = dk[x][1] = dk[x][2] = dk[x][3] = dv[x][0] = dv[x][1] = dv[x][2] = dv[x][3] = 0;

  // MMA row m = row i * rep + head of segment x, from row i0 on. Key j of the tile is seen by rows i >= k0 + j of its own segment, all of others.
  auto rows_of = [&](int x, int i0) {
    const int64_t end = (int64_t)f.len[x] * h.rep;
    for (int64_t m0 = (int64_t)i0 * h.rep; m0 < end; m0 += BQ) {
      const int n = (int)HS_MIN((int64_t)BQ, end - m0);
      auto of = [&](int m) { return (int64_t)(f.start[x] + (m0 + m) / h.rep) * h.nh + hk * h.rep + (m0 + m) % h.rep; };
      __syncthreads();
      load_tile<T, HD>(qs, BQ, n, h.hd, h.packs, io.q, [&](int m) { return io.q + of(m) * h.hd; });
      load_tile<T, HD>(dos, BQ, n, h.hd, h.packs, io.dout, [&](int m) { return io.dout + of(m) * h.hd; });
      cp_async_commit();
      for (int m = threadIdx.x; m < BQ; m += blockDim.x) {
        l2[m] = m < n ? io.lse[of(m)] * log2e : 0.0f;
        delta[m] = m < n ? io.delta[of(m)] : 0.0f;
        row[m] = m >= n ? -1 : x == s ? (int)((m0 + m) / h.rep) : INT32_MAX;
      }
      cp_async_wait<0>();
      __syncthreads();
      float p[NQ][4], dp[NQ][4];
#pragma unroll
      for (int y = 0; y < NQ; y++) p[y][0] = p[y][1] = p[y][2] = p[y][3] = dp[y][0] = dp[y][1] = dp[y][2] = dp[y][3] = 0;
      const int c0 = part * NQ * 8;
      mm_nt<NQ, HD>(p, ks + kg * 16 * ld, ld, qs + c0 * ld, ld);
      mm_nt<NQ, HD>(dp, vs + kg * 16 * ld, ld, dos + c0 * ld, ld);
#pragma unroll
      for (int y = 0; y < NQ; y++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int j = kg * 16 + g + 8 * (e / 2), m = c0 + y * 8 + 2 * t + e % 2;
          const bool sees = j < keys && k0 + j <= row[m];
          p[y][e] = sees ? exp2f(__fmaf_rn(p[y][e], h.c, -l2[m])) : 0.0f;
          dp[y][e] = p[y][e] * (dp[y][e] - delta[m]);
        }
      store_fragment<T, NQ>(ps + kg * 16 * ldp + c0, ldp, p);
      store_fragment<T, NQ>(dss + kg * 16 * ldp + c0, ldp, dp);
      __syncthreads();
      mm_nn<NC, BQ>(dv, ps + kg * 16 * ldp, ldp, dos + part * NC * 8, ld);
      mm_nn<NC, BQ>(dk, dss + kg * 16 * ldp, ldp, qs + part * NC * 8, ld);
    }
  };
  rows_of(s, k0);
  for (int x0 = s + 1; x0 < f.nseg; x0 += 32) {   // descendants in segment order; every warp finds them for itself
    int a = x0 + lane;
    while (a > s && a < f.nseg) a = f.parent[a];
    for (unsigned m = __ballot_sync(HS_FULL, a == s); m; m &= m - 1) rows_of(x0 + __ffs((int)m) - 1, 0);
  }

#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int j = kg * 16 + g + 8 * r, c0 = part * NC * 8;
    if (j >= keys || c0 >= h.hd) continue;
    write_row<T, NC>(io.dk + at + j * kstride + c0, dk, r, h.hd - c0, h.packs, io.scale);
    write_row<T, NC>(io.dv + at + j * kstride + c0, dv, r, h.hd - c0, h.packs, 1.0f);
  }
}

extern "C" int64_t hs_ws_attn_bwd(const hs_attn_bwd_args* a) { return a->T > 0 && a->nh > 0 ? a->T * a->nh * 4 : 0; }
extern "C" hs_status hs_op_attn_bwd(cudaStream_t s, const hs_attn_bwd_args* a) {
  HS_TRY(attn_check(a));
  HS_TRY(attn_check_forest(a->f, a->T));
  HS_NEED_PTR(q); HS_NEED_PTR(k); HS_NEED_PTR(v); HS_NEED_PTR(o); HS_NEED_PTR(lse); HS_NEED_PTR(do_);
  HS_NEED_PTR(dq); HS_NEED_PTR(dk); HS_NEED_PTR(dv);
  HS_NEED_WS(hs_ws_attn_bwd(a));
  HS_DISPATCH(a->dtype, T, {
    const T *o = (const T*)a->o, *dout = (const T*)a->do_;
    const bwd_io<T> io = {(const T*)a->q, (const T*)a->k, (const T*)a->v, o, dout, (const float*)a->lse, (const float*)a->ws, (T*)a->dq, (T*)a->dk, (T*)a->dv,
                          (float)(1 / sqrt((double)a->hd))};
    const bool packs = hs_packs(a->hd, sizeof(T), io.q, io.k, io.v, dout) && hs_packs(a->hd, sizeof(T), io.dq, io.dk, io.dv);
    HS_TRY(HS_LAUNCH(s, delta_kernel<T>, (unsigned)HS_CEIL(a->T * a->nh, 4), 128, 0, a->T * a->nh, (int)a->hd, o, dout, (float*)a->ws));
    HS_ATTN_HD(a->hd, HD, {
      typedef dq_smem<T, HD> A;
      typedef dkv_smem<T, HD> B;
      const attn_heads h = attn_layout(a->nh, a->nkv, a->hd, A::warps, packs);
      const unsigned blocks = (unsigned)(a->f.nchunks * HS_CEIL(HS_GDN_CHUNK, h.QR) * h.groups), kv = (unsigned)a->nkv;
      HS_TRY(HS_LAUNCH(s, (dq_kernel<T, HD>), dim3(blocks, kv), 32 * A::warps, A::bytes, a->f, h, io));
      HS_TRY(HS_LAUNCH(s, (dkv_kernel<T, HD>), dim3((unsigned)(a->f.nchunks * (HS_GDN_CHUNK / B::keys)), kv), 32 * B::warps, B::bytes, a->f, h, io));
    })
  })
  return HS_OK;
}
