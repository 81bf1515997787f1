// attn.cuh - what attention's kernels share: tile products in accumulator layout, tile loads, and the canonical forward pass.
//
// Canonical arithmetic (gpu.md 7.2). The bits of an output row depend on its query, its keys and their positions alone:
//   keys      are taken in tiles of attn_tile positions on the absolute grid, in order, by online softmax in f32;
//   splits    every attn_split positions a fresh softmax state begins; finished states are merged in order (attn_merge), so that decode
//             may compute splits in different blocks and the trainer runs the same merges in one;
//   rows      16 rows share a warp's MMAs, whose rows are independent. A row that does not see a tile keeps its state bit for bit:
//             probabilities are exactly 0, the old state's weight exactly 1, and K and V rows past the context are zero.
// BF16: S = Q K^T and O += P V by mma_bf16, P rounded to bf16, row sums of the unrounded P. F32: the same tiles in FMA loops.
// Everything that decides bits is written with __fmaf_rn and friends: the kernels that include this may not be contracted differently.
//
// Legend: g = lane / 4, t = lane % 4. A fragment f[n][4] of a 16 x 8N tile is rows g (f[.][0,1]) and g + 8 (f[.][2,3]), columns 8n + 2t, 8n + 2t + 1.
// HD = hd rounded up to a template width; the columns past hd are zero in shared memory.
#ifndef HS_ATTN_CUH
#define HS_ATTN_CUH
#include "common.cuh"

static constexpr int attn_tile = 64, attn_split = 2048, attn_max_hd = 256;
template <class T> constexpr int attn_pad = 16 / (int)sizeof(T);   // per row of a tile in shared memory, against bank conflicts
template <class T, int W> constexpr int attn_ld = W + attn_pad<T>;

// HS_ATTN_HD(hd, HD, { ... HD ... }) runs the block with the smallest template width.
#define HS_ATTN_HD(hd, HD, ...) \
  if ((hd) <= 16) { constexpr int HD = 16; __VA_ARGS__ } \
  else if ((hd) <= 32) { constexpr int HD = 32; __VA_ARGS__ } \
  else if ((hd) <= 64) { constexpr int HD = 64; __VA_ARGS__ } \
  else if ((hd) <= 128) { constexpr int HD = 128; __VA_ARGS__ } \
  else { constexpr int HD = 256; __VA_ARGS__ }

template <class A> static inline hs_status attn_check(const A* a) {
  HS_NEED(a->T >= 1, "T %lld, need at least one row", (long long)a->T);
  HS_NEED(a->nh >= 1 && a->nkv >= 1 && a->hd >= 1, "nh %lld, nkv %lld, hd %lld: all must be positive", (long long)a->nh, (long long)a->nkv, (long long)a->hd);
  HS_NEED(a->nh % a->nkv == 0, "nh %lld is not a multiple of nkv %lld", (long long)a->nh, (long long)a->nkv);
  HS_NEED(a->hd <= attn_max_hd, "hd %lld: a warp keeps 16 rows of the output in registers, at most %d wide", (long long)a->hd, attn_max_hd);
  return HS_OK;
}
static inline hs_status attn_check_forest(const hs_forest& f, int64_t T) {
  HS_NEED(f.nrows == T, "forest of %d rows, T is %lld", (int)f.nrows, (long long)T);
  HS_NEED(f.nseg >= 1 && f.start && f.len && f.parent && f.pos && f.chunk_off && f.root, "the forest lacks an array");
  return HS_OK;
}

// The segment of chunk ci: the last one with chunk_off <= ci.
static __device__ __forceinline__ int segment_of(const hs_forest& f, int ci) {
  int s = 0, e = f.nseg;
  while (e - s > 1) {
    const int mid = (s + e) / 2;
    if (f.chunk_off[mid] <= ci) s = mid;
    else e = mid;
  }
  return s;
}

// ---- products; c[NT][4] is a warp's 16 x 8 NT fragment ----

static __device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  uint32_t u;
  memcpy(&u, &v, 4);
  return u;
}

// c += a[16, K] b[8 NT, K]^T, both row-major in shared memory.
template <int NT, int K> static __device__ __forceinline__ void mm_nt(float c[][4], const bf16* a, int lda, const bf16* b, int ldb) {
  const int lane = threadIdx.x & 31;
  a += (lane & 15) * lda + 8 * (lane >> 4);
  b += ((lane >> 4) * 8 + (lane & 7)) * ldb + (lane >> 3 & 1) * 8;
#pragma unroll 4
  for (int k = 0; k < K; k += 16) {
    uint32_t af[4];
    ldmatrix_x4(af, a + k);
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      uint32_t bf[4];
      ldmatrix_x4(bf, b + n * 8 * ldb + k);
      mma_bf16(c[n], af, bf, c[n]);
      mma_bf16(c[n + 1], af, bf + 2, c[n + 1]);
    }
  }
}
template <int NT, int K> static __device__ __forceinline__ void mm_nt(float c[][4], const float* a, int lda, const float* b, int ldb) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  a += g * lda, b += 2 * t * ldb;
#pragma unroll 1
  for (int k = 0; k < K; k += 4) {
    const pack<float, 4> a0 = load_pack<float, 4>(a + k), a1 = load_pack<float, 4>(a + 8 * lda + k);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const pack<float, 4> b0 = load_pack<float, 4>(b + n * 8 * ldb + k), b1 = load_pack<float, 4>(b + (n * 8 + 1) * ldb + k);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        c[n][0] = __fmaf_rn(a0.v[i], b0.v[i], c[n][0]), c[n][1] = __fmaf_rn(a0.v[i], b1.v[i], c[n][1]);
        c[n][2] = __fmaf_rn(a1.v[i], b0.v[i], c[n][2]), c[n][3] = __fmaf_rn(a1.v[i], b1.v[i], c[n][3]);
      }
    }
  }
}

// c += a[16, K] b[K, 8 NT]; af = a's fragment of 16 columns.
template <int NT> static __device__ __forceinline__ void mm_nn16(float c[][4], const uint32_t af[4], const bf16* b, int ldb) {
  const int lane = threadIdx.x & 31;
  b += (lane & 15) * ldb + (lane >> 4) * 8;
#pragma unroll
  for (int n = 0; n < NT; n += 2) {
    uint32_t bf[4];
    ldmatrix_x4_trans(bf, b + n * 8);
    mma_bf16(c[n], af, bf, c[n]);
    mma_bf16(c[n + 1], af, bf + 2, c[n + 1]);
  }
}
template <int NT, int K> static __device__ __forceinline__ void mm_nn(float c[][4], const bf16* a, int lda, const bf16* b, int ldb) {
  const int lane = threadIdx.x & 31;
  a += (lane & 15) * lda + 8 * (lane >> 4);
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    uint32_t af[4];
    ldmatrix_x4(af, a + k);
    mm_nn16<NT>(c, af, b + k * ldb, ldb);
  }
}
template <int NT, int K> static __device__ __forceinline__ void mm_nn(float c[][4], const float* a, int lda, const float* b, int ldb) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  a += g * lda, b += 2 * t;
#pragma unroll 1
  for (int k = 0; k < K; k++) {
    const float a0 = a[k], a1 = a[8 * lda + k];
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const pack<float, 2> v = load_pack<float, 2>(b + k * ldb + n * 8);
      c[n][0] = __fmaf_rn(a0, v.v[0], c[n][0]), c[n][1] = __fmaf_rn(a0, v.v[1], c[n][1]);
      c[n][2] = __fmaf_rn(a1, v.v[0], c[n][2]), c[n][3] = __fmaf_rn(a1, v.v[1], c[n][3]);
    }
  }
}

// c += p b[K, 8 NT] with p[16, K] a fragment. BF16 rounds p; F32 passes it through the warp's scratch[16][attn_ld<float, K>].
template <int NT, int K> static __device__ __forceinline__ void mm_pn(float c[][4], const float p[][4], const bf16* b, int ldb, bf16*) {
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    const float *x = p[k / 8], *y = p[k / 8 + 1];
    const uint32_t af[4] = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3])};
    mm_nn16<NT>(c, af, b + k * ldb, ldb);
  }
}
template <class T, int NT> static __device__ __forceinline__ void store_fragment(T* dst, int ld, const float p[][4]) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const pack<T, 2> v = {{from_f<T>(p[n][2 * r]), from_f<T>(p[n][2 * r + 1])}};
      store_pack<T, 2>(dst + (g + 8 * r) * ld + n * 8 + 2 * t, v);
    }
}
template <int NT, int K> static __device__ __forceinline__ void mm_pn(float c[][4], const float p[][4], const float* b, int ldb, float* scratch) {
  __syncwarp();
  store_fragment<float, K / 8>(scratch, attn_ld<float, K>, p);
  __syncwarp();
  mm_nn<NT, K>(c, scratch, attn_ld<float, K>, b, ldb);
}

// ---- tiles ----

// tile[rows][attn_ld<T, HD>] from row(j), j < n, hd columns each; the rest becomes zero. With packs the copy is asynchronous: commit, wait, barrier.
template <class T, int HD, class Row> static __device__ __forceinline__ void load_tile(T* tile, int rows, int n, int hd, bool packs, const T* base, Row row) {
  constexpr int N = pack_n<T>, C = HD / N;
#pragma unroll 4
  for (int i = threadIdx.x; i < rows * C; i += blockDim.x) {
    const int j = i / C, c = i % C * N;
    const bool in = j < n && c < hd;
    const T* src = in ? row(j) + c : base;
    T* dst = tile + j * attn_ld<T, HD> + c;
    if (packs) cp_async16(dst, src, in ? 16 : 0);
    else
      for (int e = 0; e < N; e++) dst[e] = in && c + e < hd ? src[e] : from_f<T>(0.0f);
  }
}

// A warp's fragment row r (0, 1) of an output of hd columns, scaled.
template <class T, int NT> static __device__ __forceinline__ void write_row(T* dst, const float o[][4], int r, int hd, bool packs, float scale) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < NT; n++) {
    const int c = n * 8 + 2 * t;
    const float x = __fmul_rn(o[n][2 * r], scale), y = __fmul_rn(o[n][2 * r + 1], scale);
    if (c + 1 < hd && packs) {
      const pack<T, 2> v = {{from_f<T>(x), from_f<T>(y)}};
      store_pack<T, 2>(dst + c, v);
    } else {
      if (c < hd) dst[c] = from_f<T>(x);
      if (c + 1 < hd) dst[c + 1] = from_f<T>(y);
    }
  }
}

// ---- softmax states; z = the largest score seen, in powers of two ----

// One tile: raw scores s become probabilities relative to z, columns from lim[r] on are unseen by row r. l is this lane's part of the sum.
// alpha[r] is what the old output is worth.
static __device__ __forceinline__ void softmax_tile(float s[][4], const int lim[2], float c, float z[2], float l[2], float alpha[2]) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float top = -INFINITY;
#pragma unroll
    for (int n = 0; n < attn_tile / 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = s[n][2 * r + e];
        if (n * 8 + 2 * t + e >= lim[r]) x = -INFINITY;
        top = fmaxf(top, x);
      }
    top = fmaxf(top, __shfl_xor_sync(HS_FULL, top, 1));
    top = fmaxf(top, __shfl_xor_sync(HS_FULL, top, 2));
    const float z1 = fmaxf(z[r], __fmul_rn(top, c)), zs = z1 == -INFINITY ? 0.0f : z1;
    alpha[r] = exp2f(__fsub_rn(z[r], zs));
    z[r] = z1;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < attn_tile / 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float& x = s[n][2 * r + e];
        x = exp2f(__fmaf_rn(x, c, -zs));
        sum = __fadd_rn(sum, x);
      }
    l[r] = __fmaf_rn(l[r], alpha[r], sum);
  }
}

// (z, l, o) of two disjoint sets of keys: z, l = l0 a + l1 b, o = o0 a + o1 b. A state without keys is (-inf, 0, 0) and changes nothing.
struct attn_weights { float z, a, b; };
static __device__ __forceinline__ attn_weights merge_weights(float z0, float z1) {
  const float z = fmaxf(z0, z1), zs = z == -INFINITY ? 0.0f : z;
  return {z, exp2f(__fsub_rn(z0, zs)), exp2f(__fsub_rn(z1, zs))};
}
static __device__ __forceinline__ float merge_value(const attn_weights& w, float x0, float x1) { return __fmaf_rn(x0, w.a, __fmul_rn(x1, w.b)); }

// ---- the forward pass of a block: WARPS * 16 rows of the MMAs are QR query rows times HB heads of one kv head ----

// How a block's MMA rows are laid out: row i*HB + r is query row i, head h0 + r of the kv head's rep.
struct attn_heads {
  int nh, nkv, hd, rep, HB, QR, groups;   // groups of HB heads cover rep
  float c;                                // log2(e) hd^-0.5
  bool packs;
};
static inline attn_heads attn_layout(int64_t nh, int64_t nkv, int64_t hd, int warps, bool packs) {
  const int rep = (int)(nh / nkv), HB = HS_MIN(rep, 16 * warps);
  return {(int)nh, (int)nkv, (int)hd, rep, HB, 16 * warps / HB, HS_CEIL(rep, HB), (float)(1.4426950408889634 / sqrt((double)hd)), packs};
}

// F32 keeps K and V in turn in one buffer, BF16 side by side; F32 also has a scratch per warp. At `index`: rows of k and v of two tiles' keys.
template <class T, int HD, int WARPS> struct attn_smem {
  static constexpr bool one = sizeof(T) == 4;
  static constexpr int q = 16 * WARPS * attn_ld<T, HD>, kv = attn_tile * attn_ld<T, HD>, scratch = one ? 16 * attn_ld<float, attn_tile> : 0;
  static constexpr size_t index = sizeof(T) * (q + (one ? 1 : 2) * kv + WARPS * scratch), bytes = index + 2 * attn_tile * 4;
};

template <class T> struct attn_io {
  const T *q, *k, *v;
  T* o;
  float *lse, *acc;       // [T, nh] or 0; [T, nh, hd] when a row may see several splits in this block
  float *part_o, *part_s; // [splits, T, nh, hd], [splits, T, nh, 2]: this block writes the state of one split there instead of o; or 0
  int64_t T_;
};

// src: pos(i) position of the block's row i; run(i, n, p0) how many rows from i on read the same keys of the tile at p0; top(i, m) the
// last position that rows i..i+m-1 see, at least one in [first, last); key(i, p) the row of k and v at position p as row i sees it. All uniform over the block.
// Covers positions [first, last) (first a multiple of attn_split) of query rows row0..row0+n-1.
template <class T, int HD, int WARPS, class Src>
static __device__ __forceinline__ void attn_block(const Src& src, const attn_heads& h, const attn_io<T>& io, int64_t row0, int n, int hk, int h0, int first, int last) {
  typedef attn_smem<T, HD, WARPS> S;
  constexpr int ld = attn_ld<T, HD>, NT = HD / 8;
  HS_DYN_SHARED(T, smem);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  T *qs = smem, *ks = qs + S::q, *vs = S::one ? ks : ks + S::kv, *scratch = vs + S::kv + warp * S::scratch;
  const int64_t kstride = (int64_t)h.nkv * h.hd;

  // Row r of this lane: query row i[r] at position pos[r] (-1: none), head out[r] / hd counted over [T, nh].
  int i[2], pos[2];
  int64_t out[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int m = warp * 16 + g + 8 * r, head = h0 + m % h.HB;
    i[r] = m / h.HB;
    const bool in = i[r] < n && head < h.rep;
    pos[r] = in ? src.pos(i[r]) : -1;
    out[r] = (row0 + i[r]) * h.nh + hk * h.rep + head;
  }
  constexpr int N = pack_n<T>;
  for (int x = threadIdx.x; x < 16 * WARPS * (HD / N); x += blockDim.x) {
    const int m = x / (HD / N), c = x % (HD / N) * N, head = h0 + m % h.HB;
    const bool in = m / h.HB < n && head < h.rep;
    const T* p = io.q + ((row0 + m / h.HB) * h.nh + hk * h.rep + head) * h.hd + c;
    pack<T, N> v;
    if (in && h.packs && c < h.hd) v = load_pack<T, N>(p);
    else
      for (int e = 0; e < N; e++) v.v[e] = in && c + e < h.hd ? p[e] : from_f<T>(0.0f);
    store_pack<T, N>(qs + m * ld + c, v);
  }

  // Finds the keys of a tile; a barrier later they can be loaded.
  int* index = (int*)((char*)smem + S::index);
  auto find = [&](int* rows, int p0, int lead, int run) {
    const int left = src.top(lead, run) + 1 - p0, keys = left < attn_tile ? left : attn_tile;
    for (int j = threadIdx.x; j < keys; j += blockDim.x) rows[j] = (int)src.key(lead, p0 + j);
    return keys;
  };
  auto load = [&](T* dst, const T* from, const int* rows, int keys) {
    load_tile<T, HD>(dst, attn_tile, keys, h.hd, h.packs, from, [&](int j) { return from + rows[j] * kstride + hk * h.hd; });
    cp_async_commit();
  };
  // The next (tile, rows) that somebody sees, from row `lead` of the tile at p0 on; p0 >= last when there is none.
  auto seek = [&](int& p0, int& lead, int& run) {
    for (; p0 < last; p0 += attn_tile, lead = 0)
      for (; lead < n; lead += run) {
        run = src.run(lead, n, p0);
        if (src.top(lead, run) >= p0) return;
      }
  };

  float o[NT][4], z[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0}, zt[2] = {-INFINITY, -INFINITY}, lt[2] = {0, 0};
#pragma unroll
  for (int x = 0; x < NT; x++) o[x][0] = o[x][1] = o[x][2] = o[x][3] = 0;

  int p0 = first, lead = 0, run = 0, splits = 0;
  seek(p0, lead, run);
  int keys = find(index, p0, lead, run), turn = 0;
  __syncthreads();
  load(ks, io.k, index, keys);
  while (p0 < last) {
    int np = p0, nlead = lead + run, nrun = 0;
    seek(np, nlead, nrun);
    const bool more = np < last;
    int lim[2];
#pragma unroll
    for (int r = 0; r < 2; r++) lim[r] = i[r] >= lead && i[r] < lead + run ? pos[r] + 1 - p0 : 0;
    const bool active = __any_sync(HS_FULL, lim[0] > 0 || lim[1] > 0);

    cp_async_wait<0>();
    __syncthreads();
    if (!S::one) load(vs, io.v, index + turn, keys);
    float s[attn_tile / 8][4], alpha[2];
#pragma unroll
    for (int x = 0; x < attn_tile / 8; x++) s[x][0] = s[x][1] = s[x][2] = s[x][3] = 0;
    if (active) {
      mm_nt<attn_tile / 8, HD>(s, qs + warp * 16 * ld, ld, ks, ld);
      softmax_tile(s, lim, h.c, z, l, alpha);
#pragma unroll
      for (int x = 0; x < NT; x++) {
        o[x][0] = __fmul_rn(o[x][0], alpha[0]), o[x][1] = __fmul_rn(o[x][1], alpha[0]);
        o[x][2] = __fmul_rn(o[x][2], alpha[1]), o[x][3] = __fmul_rn(o[x][3], alpha[1]);
      }
    }
    if (S::one) {
      __syncthreads();
      load(vs, io.v, index + turn, keys);
    }
    turn ^= attn_tile;
    if (more) keys = find(index + turn, np, nlead, nrun);
    cp_async_wait<0>();
    __syncthreads();
    if (!S::one && more) load(ks, io.k, index + turn, keys);
    if (active) mm_pn<NT, attn_tile>(o, s, vs, ld, scratch);
    if (S::one && more) {
      __syncthreads();
      load(ks, io.k, index + turn, keys);
    }

    if (!more || np / attn_split != p0 / attn_split) {   // the split's state is complete
#pragma unroll
      for (int r = 0; r < 2; r++) {
        l[r] = __fadd_rn(l[r], __shfl_xor_sync(HS_FULL, l[r], 1));
        l[r] = __fadd_rn(l[r], __shfl_xor_sync(HS_FULL, l[r], 2));
      }
      if (io.part_o) break;   // one split per block
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const attn_weights w = merge_weights(zt[r], z[r]);
        lt[r] = merge_value(w, lt[r], l[r]);
        zt[r] = w.z;
        if (pos[r] >= 0 && (splits || more)) {
          float* acc = io.acc + out[r] * h.hd;
#pragma unroll
          for (int x = 0; x < NT; x++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const int c = x * 8 + 2 * t + e;
              if (c >= h.hd) continue;
              float& y = o[x][2 * r + e];
              if (splits) y = merge_value(w, acc[c], y);
              if (more) acc[c] = y;
            }
        }
        z[r] = -INFINITY, l[r] = 0;
      }
      if (more) {
        splits++;
#pragma unroll
        for (int x = 0; x < NT; x++) o[x][0] = o[x][1] = o[x][2] = o[x][3] = 0;
      }
    }
    p0 = np, lead = nlead, run = nrun;
  }

#pragma unroll
  for (int r = 0; r < 2; r++) {
    if (pos[r] < first) continue;
    if (io.part_o) {
      const int64_t at = (int64_t)(first / attn_split) * io.T_ * h.nh + out[r];
      write_row<float, NT>(io.part_o + at * h.hd, o, r, h.hd, h.hd % 2 == 0, 1.0f);
      if (t == 0) io.part_s[2 * at] = z[r], io.part_s[2 * at + 1] = l[r];
      continue;
    }
    write_row<T, NT>(io.o + out[r] * h.hd, o, r, h.hd, h.packs, __fdiv_rn(1.0f, lt[r]));
    if (io.lse && t == 0) io.lse[out[r]] = __fmul_rn(__fadd_rn(zt[r], log2f(lt[r])), 0.69314718055994531f);
  }
}
#endif
