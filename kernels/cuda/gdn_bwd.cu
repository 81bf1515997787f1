// gdn_bwd.cu - backward of the gated delta rule over a forest, chunked by 64 rows from the states that the forward left (model.md 3.7; names from there).
//
// Two kernels. scan: a block per (segment, value head, 64 columns of dv) walks the chunks backwards with D = dL/dS in shared memory; it leaves D at
// each chunk's end and Z, which need neither S0 nor Delta. Segments come in reverse ticket order; a parent waits for its children and adds their
// initial-state gradients in segment order. chunk: a block per (chunk, key head) recomputes Delta from S0 and does the rest, value head after value
// head, so that dq and dk are summed over them in head order. Triangular systems are solved by substitution inside 16x16 blocks, products between.
// BF16: products on tensor cores; q, k, do are exact, everything else (S0, D, Delta, Z, the 64x64 matrices) is split into two bf16 (tiles.cuh).
// Shapes: any dims whose tiles fit into shared memory (dk = dv = 128: scan and chunk 111 and 158 KB with bf16, 154 and 209 KB with f32).
// H200: about 11 M multiply-adds a chunk and value head, 2.3 products each; floor 1.6 ms per 32k rows (gpu.md 6.4); expected 10x of that, as fragments
// are gathered element by element and not by ldmatrix from pre-split tiles. Unmeasured.
#include "delta.cuh"
#include "tiles.cuh"

static const int R = HS_GDN_CHUNK, ldr = R + 4;   // rows of a chunk; row stride of 64x64 matrices
static const int scan_cols = 64, scan_threads = 128, chunk_threads = 256;

struct gdnb_shape {
  int nk, dk, nv, dv, rep, dkp, dvp, groups;   // dkp, dvp: multiples of 16
  int nchunks, nseg;
};
// Workspace: zero-padded f32. d: gradient of the state after each chunk; seg: of each segment's initial state; z: Z; acc: dq and dk of the heads so far.
struct gdnb_ws {
  float *d, *seg, *z, *acc;   // [nchunks, nv, dkp, dvp] [S, nv, dkp, dvp] [nchunks, nv, 64, dvp] [2, T, nk, dk] (rep > 1)
  int* line;
  int64_t bytes, items;
};
static gdnb_shape gdnb_dims(const hs_gdn_bwd_args* a) {
  gdnb_shape z = {(int)a->nk, (int)a->dk, (int)a->nv, (int)a->dv, (int)(a->nv / a->nk), (int)HS_CEIL(a->dk, 16) * 16, (int)HS_CEIL(a->dv, 16) * 16, 0, a->f.nchunks, a->f.nseg};
  z.groups = HS_CEIL(z.dvp, scan_cols);
  return z;
}
static gdnb_ws gdnb_layout(const hs_gdn_bwd_args* a, void* ws) {
  const gdnb_shape z = gdnb_dims(a);
  gdnb_ws w;
  char* p = (char*)ws;
  auto take = [&](int64_t n) { float* r = (float*)p; p += hs_align(n * 4); return r; };
  w.items = (int64_t)z.nseg * z.nv * z.groups;
  w.line = (int*)p, p += line_bytes(w.items);
  w.d = take((int64_t)z.nchunks * z.nv * z.dkp * z.dvp);
  w.seg = take((int64_t)z.nseg * z.nv * z.dkp * z.dvp);
  w.z = take((int64_t)z.nchunks * z.nv * R * z.dvp);
  w.acc = take(z.rep > 1 ? 2 * a->T * z.nk * z.dk : 0);
  w.bytes = p - (char*)ws;
  return w;
}

// ---- what both kernels load and build ----

// Rows of a chunk as [np, ld], zero past n rows and cols columns; np and the width are multiples of 16.
template <class T> static __device__ __forceinline__ void load_rows(T* dst, int ld, const T* src, int64_t stride, int n, int np, int cols, int width) {
  for (int i = threadIdx.x; i < np * width; i += blockDim.x) {
    const int r = i / width, c = i % width;
    dst[r * ld + c] = r < n && c < cols ? src[r * stride + c] : from_f<T>(0);
  }
}
// Gates of a chunk and value head; rows from n on repeat the last decay and have beta 0.
struct chunk_gates {
  double G[R];                              // cumulative
  float eG[R], Ed[R], beta[R], be[R], eC;   // e^G, e^(G_C - G), beta, beta e^G, e^(G_C)
};
static __device__ __forceinline__ void load_gates(chunk_gates& c, const float* g, const float* beta, int nv, int n) {
  if (threadIdx.x == 0) {
    double s = 0;
    for (int i = 0; i < R; i++) {
      if (i < n) s += (double)g[(int64_t)i * nv];
      c.G[i] = s;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < R; i += blockDim.x) {
    c.eG[i] = expf((float)c.G[i]);
    c.Ed[i] = expf((float)(c.G[R - 1] - c.G[i]));
    c.beta[i] = i < n ? beta[(int64_t)i * nv] : 0.0f;
    c.be[i] = c.beta[i] * c.eG[i];
    if (i == R - 1) c.eC = c.eG[i];
  }
  __syncthreads();
}
static __device__ __forceinline__ float gam(const chunk_gates& c, int i, int j) { return expf((float)(c.G[i] - c.G[j])); }

// M[np, np] (ldr) = fn(i, j, (X Y^T)_ij). No barrier.
template <class T, class X, class Y, class F> static __device__ __forceinline__ void square(float* M, const X& x, const Y& y, int np, int K, const F& fn) {
  for (int c = 8 * (threadIdx.x >> 5); c < np; c += 8 * (blockDim.x >> 5)) {
    float acc[4][4];
    clear<4>(acc);
    strips<T, 4>(acc, x, 0, np / 16, y, c, K);
    each<4>(acc, 0, np / 16, c, [&](int i, int j, float& v) { M[i * ldr + j] = fn(i, j, v); });
  }
}

// Solves (I + L) X = X, or with L^T, in place for columns c0..c0+w (w = 8 or 16) of X [np, ld] by one warp.
template <class T, bool transposed> static __device__ __forceinline__ void solve(const float* L, float* X, int ld, int np, int c0, int w) {
  const int lane = threadIdx.x & 31;
  for (int step = 0; step < np / 16; step++) {
    const int blk = transposed ? np / 16 - 1 - step : step, r0 = 16 * blk;
    if (step) {
      for (int c = c0; c < c0 + w; c += 8) {
        float acc[1][4];
        clear<1>(acc);
        if (transposed) {   // rows below: X_b -= L[below, b]^T X[below]
          const int from = r0 + 16;
          strips<T, 1>(acc, across<float>{L + from * ldr + r0, ldr}, 0, 1, across<float>{X + from * ld, ld}, c, np - from);
        } else strips<T, 1>(acc, along<float>{L + r0 * ldr, ldr}, 0, 1, across<float>{X, ld}, c, r0);
        each<1>(acc, 0, 1, c, [&](int i, int j, float& v) { X[(r0 + i) * ld + j] -= v; });
      }
      __syncwarp();
    }
    if (lane < w) {
      float* x = X + r0 * ld + c0 + lane;
      const float* l = L + r0 * ldr + r0;
      if (transposed) {
        for (int i = 14; i >= 0; i--) {
          float s = x[i * ld];
          for (int j = 15; j > i; j--) s = __fmaf_rn(-l[j * ldr + i], x[j * ld], s);
          x[i * ld] = s;
        }
      } else {
        for (int i = 1; i < 16; i++) {
          float s = x[i * ld];
          for (int j = 0; j < i; j++) s = __fmaf_rn(-l[i * ldr + j], x[j * ld], s);
          x[i * ld] = s;
        }
      }
    }
    __syncwarp();
  }
}

// ---- scan ----

struct scan_smem {
  int ldk, ldo, ldd;
  int64_t q, o, m, z, d, bytes;   // byte offsets; k is at 0
  template <class T> static __host__ __device__ scan_smem of(const gdnb_shape& s) {
    scan_smem x;
    const int cols = HS_MIN(scan_cols, s.dvp);
    x.ldk = s.dkp + 8, x.ldo = cols + 8, x.ldd = cols + 4;
    x.q = (int64_t)R * x.ldk * sizeof(T), x.o = 2 * x.q, x.m = x.o + (int64_t)R * x.ldo * sizeof(T);
    x.z = x.m + R * ldr * 4, x.d = x.z + (int64_t)R * x.ldd * 4, x.bytes = x.d + (int64_t)s.dkp * x.ldd * 4;
    return x;
  }
};

template <class T>
__global__ void __launch_bounds__(scan_threads, 2)
    gdn_scan_kernel(gdnb_shape p, hs_forest f, const T* q, const T* k, const float* beta, const float* g, const T* do_, gdnb_ws ws) {
  HS_DYN_SHARED(unsigned char, sh);
  HS_SHARED(chunk_gates, gates, [1]);
  chunk_gates& G = gates[0];
  const scan_smem m = scan_smem::of<T>(p);
  T *K = (T*)sh, *Q = (T*)(sh + m.q), *O = (T*)(sh + m.o);
  float *M = (float*)(sh + m.m), *Z = (float*)(sh + m.z), *D = (float*)(sh + m.d);
  const int ticket = line_ticket(ws.line), grp = ticket % p.groups, h = ticket / p.groups % p.nv, s = p.nseg - 1 - ticket / p.groups / p.nv, hk = h / p.rep;
  const int c0 = grp * scan_cols, width = min(scan_cols, p.dvp - c0), warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int64_t cell = (int64_t)p.dkp * p.dvp;
  auto dtile = [&](float* at, const auto& fn) {   // fn(shared, global) over this block's part of a [dkp, dvp] matrix
    for (int i = threadIdx.x; i < p.dkp * width; i += blockDim.x) fn(D[i / width * m.ldd + i % width], at[(int64_t)(i / width) * p.dvp + c0 + i % width]);
  };
  dtile(ws.d, [](float& d, float&) { d = 0; });
  for (int y = f.child_off[s]; y < f.child_off[s + 1]; y++) {
    const int c = f.child[y];
    line_wait(ws.line, (c * p.nv + h) * p.groups + grp);
    __syncthreads();
    dtile(ws.seg + ((int64_t)c * p.nv + h) * cell, [](float& d, float& x) { d += __ldcg(&x); });
  }
  for (int ch = (f.len[s] - 1) / R; ch >= 0; ch--) {
    const int n = min(R, f.len[s] - ch * R), np = (n + 15) / 16 * 16, ns = np / 16;
    const int64_t row = f.start[s] + (int64_t)ch * R, at = (f.chunk_off[s] + ch) * (int64_t)p.nv + h;
    __syncthreads();
    load_rows(K, m.ldk, k + (row * p.nk + hk) * p.dk, (int64_t)p.nk * p.dk, n, np, p.dk, p.dkp);
    load_rows(Q, m.ldk, q + (row * p.nk + hk) * p.dk, (int64_t)p.nk * p.dk, n, np, p.dk, p.dkp);
    load_rows(O, m.ldo, do_ + (row * p.nv + h) * p.dv + c0, (int64_t)p.nv * p.dv, n, np, min(width, p.dv - c0), width);
    dtile(ws.d + at * cell, [](float& d, float& x) { x = d; });
    load_gates(G, g + row * p.nv + h, beta + row * p.nv + h, p.nv, n);
    const along<T> Ka = {K, m.ldk}, Qa = {Q, m.ldk};
    square<T>(M, Qa, Ka, np, p.dkp, [&](int i, int j, float v) { return i >= j ? v * gam(G, i, j) : 0.0f; });   // P
    __syncthreads();
    for (int c = 8 * warp; c < width; c += 8 * warps) {   // dDelta = Ed (K D) + P^T dO
      float acc[4][4];
      clear<4>(acc);
      strips<T, 4>(acc, Ka, 0, ns, across<float>{D, m.ldd}, c, p.dkp);
      each<4>(acc, 0, ns, c, [&](int i, int, float& v) { v *= G.Ed[i]; });
      strips<T, 4>(acc, across<float>{M, ldr}, 0, ns, across<T>{O, m.ldo}, c, np);
      each<4>(acc, 0, ns, c, [&](int i, int j, float& v) { Z[i * m.ldd + j] = v; });
    }
    __syncthreads();
    square<T>(M, Ka, Ka, np, p.dkp, [&](int i, int j, float v) { return i > j ? G.beta[i] * v * gam(G, i, j) : 0.0f; });   // L
    __syncthreads();
    for (int c = 16 * warp; c < width; c += 16 * warps) solve<T, true>(M, Z, m.ldd, np, c, 16);
    __syncthreads();
    float* zout = ws.z + at * R * p.dvp + c0;
    for (int i = threadIdx.x; i < np * width; i += blockDim.x) zout[(int64_t)(i / width) * p.dvp + i % width] = Z[i / width * m.ldd + i % width];
    for (int i = threadIdx.x; i < np * width; i += blockDim.x) Z[i / width * m.ldd + i % width] *= -G.be[i / width];
    __syncthreads();
    for (int c = 8 * warp; c < width; c += 8 * warps)   // D = e^(G_C) D + Q^T (e^G dO) - K^T (beta e^G Z)
      for (int s0 = 0; s0 < p.dkp / 16; s0 += 4) {
        const int nd = min(4, p.dkp / 16 - s0);
        float acc[4][4];
        clear<4>(acc);
        each<4>(acc, s0, nd, c, [&](int i, int j, float& v) { v = G.eC * D[i * m.ldd + j]; });
        strips<T, 4>(acc, across<T>{Q, m.ldk}, s0, nd, by(G.eG, across<T>{O, m.ldo}), c, np);
        strips<T, 4>(acc, across<T>{K, m.ldk}, s0, nd, across<float>{Z, m.ldd}, c, np);
        each<4>(acc, s0, nd, c, [&](int i, int j, float& v) { D[i * m.ldd + j] = v; });
      }
  }
  __syncthreads();
  if (f.parent[s] >= 0) dtile(ws.seg + ((int64_t)s * p.nv + h) * cell, [](float& d, float& x) { x = d; });
  line_done(ws.line, (s * p.nv + h) * p.groups + grp);
}

// ---- chunks ----

struct chunk_smem {
  int ldk, ldo, ldx;
  int64_t q, o, x, kk, qk, pg, e, rows, bytes;
  template <class T> static __host__ __device__ chunk_smem of(const gdnb_shape& s) {
    chunk_smem m;
    const int64_t sq = R * ldr * 4;
    m.ldk = s.dkp + 8, m.ldo = s.dvp + 8, m.ldx = s.dvp + 4;
    m.q = (int64_t)R * m.ldk * sizeof(T), m.o = 2 * m.q, m.x = m.o + (int64_t)R * m.ldo * sizeof(T);
    m.kk = m.x + (int64_t)R * m.ldx * 4, m.qk = m.kk + sq, m.pg = m.qk + sq, m.e = m.pg + sq, m.rows = m.e + sq;
    m.bytes = m.rows + 3 * (chunk_threads / 32) * R * 4;
    return m;
  }
};

// The segment of chunk c: the last one whose first chunk is not after c.
static __device__ __forceinline__ int chunk_segment(const hs_forest& f, int c) {
  int lo = 0, hi = f.nseg - 1;
  while (lo < hi) {
    const int mid = (lo + hi + 1) / 2;
    if (f.chunk_off[mid] <= c) lo = mid;
    else hi = mid - 1;
  }
  return lo;
}
// part[row] += the quad's sum of v for rows g + 8i of each strip; lanes with t = 0 write. v has 8 values, strip by strip.
static __device__ __forceinline__ void add_rows(float* part, float v[8], int ns) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (i / 2 >= ns) break;
    const float s = quad_sum(v[i]);
    if ((lane & 3) == 0) part[16 * (i / 2) + 8 * (i & 1) + (lane >> 2)] += s;
  }
}

template <class T>
__global__ void __launch_bounds__(chunk_threads)
    gdn_chunk_kernel(gdnb_shape p, hs_forest f, int64_t rows, const T* q, const T* k, const T* v, const float* beta, const float* g, const float* states, const T* do_, T* dq,
                     T* dk_, T* dv_, float* dbeta, float* dg, gdnb_ws ws) {
  HS_DYN_SHARED(unsigned char, sh);
  HS_SHARED(chunk_gates, gates, [1]);
  HS_SHARED(float, dG, [2 * R]);
  chunk_gates& G = gates[0];
  const chunk_smem m = chunk_smem::of<T>(p);
  T *K = (T*)sh, *Q = (T*)(sh + m.q), *O = (T*)(sh + m.o);
  float *X = (float*)(sh + m.x), *KK = (float*)(sh + m.kk), *QK = (float*)(sh + m.qk), *PG = (float*)(sh + m.pg), *E = (float*)(sh + m.e);
  const int ci = blockIdx.x, hk = blockIdx.y, s = chunk_segment(f, ci), ch = ci - f.chunk_off[s], n = min(R, f.len[s] - ch * R), np = (n + 15) / 16 * 16, ns = np / 16;
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int64_t row = f.start[s] + (int64_t)ch * R;
  float* parts = (float*)(sh + m.rows);   // [3][warps][64]: per row and warp: dbeta, what dG gets, x
  float *part_b = parts + warp * R, *part_g = part_b + warps * R, *part_x = part_g + warps * R;
  load_rows(K, m.ldk, k + (row * p.nk + hk) * p.dk, (int64_t)p.nk * p.dk, n, np, p.dk, p.dkp);
  load_rows(Q, m.ldk, q + (row * p.nk + hk) * p.dk, (int64_t)p.nk * p.dk, n, np, p.dk, p.dkp);
  __syncthreads();
  const along<T> Ka = {K, m.ldk}, Qa = {Q, m.ldk}, Oa = {O, m.ldo};
  const across<T> Kt = {K, m.ldk}, Qt = {Q, m.ldk};
  square<T>(KK, Ka, Ka, np, p.dkp, [](int, int, float x) { return x; });
  square<T>(QK, Qa, Ka, np, p.dkp, [](int, int, float x) { return x; });
  for (int r = 0; r < p.rep; r++) {
    const int h = hk * p.rep + r;
    const int64_t cell = (int64_t)ci * p.nv + h;
    const float *S0 = states + cell * p.dk * p.dv, *D = ws.d + cell * p.dkp * p.dvp, *Z = ws.z + cell * R * p.dvp;
    const T* V = v + (row * p.nv + h) * p.dv;
    __syncthreads();
    load_rows(O, m.ldo, do_ + (row * p.nv + h) * p.dv, (int64_t)p.nv * p.dv, n, np, p.dv, p.dvp);
    for (int i = threadIdx.x; i < 3 * warps * R; i += blockDim.x) parts[i] = 0;
    load_gates(G, g + row * p.nv + h, beta + row * p.nv + h, p.nv, n);
    for (int i = threadIdx.x; i < np * np; i += blockDim.x) {   // L, where E will be
      const int a = i / np, b = i % np;
      E[a * ldr + b] = a > b ? G.beta[a] * KK[a * ldr + b] * gam(G, a, b) : 0.0f;
    }
    __syncthreads();
    // Delta: (I + L) Delta = beta (V - e^G K S0); dbeta gets Z (V - e^G K S0).
    for (int c = 16 * warp; c < p.dvp; c += 16 * warps) {
      for (int w = 0; w < 16; w += 8) {
        float acc[4][4], b[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        clear<4>(acc);
        strips<T, 4>(acc, Ka, 0, ns, across_within{S0, p.dv, p.dv, p.dk}, c + w, p.dkp);
        int e = 0;
        each<4>(acc, 0, ns, c + w, [&](int i, int j, float& x) {
          const float res = (i < n && j < p.dv ? to_f(V[(int64_t)i * p.nv * p.dv + j]) : 0.0f) - G.eG[i] * x;
          b[e++ / 2] += Z[i * p.dvp + j] * res;
          X[i * m.ldx + j] = G.beta[i] * res;
        });
        add_rows(part_b, b, ns);
      }
      __syncwarp();
      solve<T, false>(E, X, m.ldx, np, c, 16);
    }
    __syncthreads();
    const along<float> Xa = {X, m.ldx}, Za = {Z, p.dvp};
    square<T>(PG, Oa, Xa, np, p.dvp, [&](int i, int j, float x) { return i >= j ? x * gam(G, i, j) : 0.0f; });
    square<T>(E, Za, Xa, np, p.dvp, [&](int i, int j, float x) { return i > j ? -x * gam(G, i, j) : 0.0f; });
    __syncthreads();
    // What both say about the gates: rows by the first 64 threads, columns by the next.
    if (threadIdx.x < 2 * R) {
      const int i = threadIdx.x % R;
      float a = 0, b = 0;
      if (i < np && threadIdx.x < R) {
        for (int j = 0; j <= i; j++) {
          const float ek = E[i * ldr + j] * KK[i * ldr + j];
          b += ek;
          a += G.beta[i] * ek + PG[i * ldr + j] * QK[i * ldr + j];
        }
        parts[i] += b;
      } else if (i < np) {
        for (int j = i; j < np; j++) a += G.beta[j] * (E[j * ldr + i] * KK[j * ldr + i]) + PG[j * ldr + i] * QK[j * ldr + i];
      }
      dG[threadIdx.x] = a;
    }
    // dQ = e^G (dO S0^T) + PG K;  dK = Ed (Delta D^T) - beta e^G (Z S0^T) + PG^T Q + E^T (beta K) + beta (E K).
    for (int c = 8 * warp; c < p.dkp; c += 8 * warps) {
      float q4[4][4], k4[4][4], acc[4][4], y[8] = {0, 0, 0, 0, 0, 0, 0, 0}, x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      const along_within St = {S0, p.dv, p.dk, p.dv};
      clear<4>(q4);
      strips<T, 4>(q4, Oa, 0, ns, St, c, p.dvp);
      int e = 0;
      each<4>(q4, 0, ns, c, [&](int i, int j, float& t) { t *= G.eG[i], y[e++ / 2] += to_f(Q[i * m.ldk + j]) * t; });
      strips<T, 4>(q4, along<float>{PG, ldr}, 0, ns, Kt, c, np);
      clear<4>(k4);
      strips<T, 4>(k4, Za, 0, ns, St, c, p.dvp);
      e = 0;
      each<4>(k4, 0, ns, c, [&](int i, int j, float& t) { t *= -G.be[i], y[e++ / 2] += to_f(K[i * m.ldk + j]) * t; });
      clear<4>(acc);
      strips<T, 4>(acc, Xa, 0, ns, along<float>{D, p.dvp}, c, p.dvp);
      e = 0;
      each<4>(acc, 0, ns, c, [&](int i, int j, float& t) { t *= G.Ed[i], x[e++ / 2] += to_f(K[i * m.ldk + j]) * t; });
#pragma unroll
      for (int i = 0; i < 16; i++) k4[i / 4][i % 4] += acc[i / 4][i % 4];
      strips<T, 4>(k4, across<float>{PG, ldr}, 0, ns, Qt, c, np);
      strips<T, 4>(k4, across<float>{E, ldr}, 0, ns, by(G.beta, Kt), c, np);
      clear<4>(acc);
      strips<T, 4>(acc, along<float>{E, ldr}, 0, ns, Kt, c, np);
      each<4>(acc, 0, ns, c, [&](int i, int, float& t) { t *= G.beta[i]; });
#pragma unroll
      for (int i = 0; i < 16; i++) k4[i / 4][i % 4] += acc[i / 4][i % 4];
      add_rows(part_g, y, ns);
      add_rows(part_x, x, ns);
      auto out = [&](float a4[4][4], T* dst, float* sum) {
        each<4>(a4, 0, ns, c, [&](int i, int j, float& t) {
          if (i >= n || j >= p.dk) return;
          const int64_t at = ((row + i) * p.nk + hk) * p.dk + j;
          if (r) t += sum[at];
          if (r + 1 < p.rep) sum[at] = t;
          else dst[at] = from_f<T>(t);
        });
      };
      out(q4, dq, ws.acc);
      out(k4, dk_, ws.acc + rows * p.nk * p.dk);
    }
    float ds = 0;
    for (int i = threadIdx.x; i < p.dk * p.dv; i += blockDim.x) ds += D[(int64_t)(i / p.dv) * p.dvp + i % p.dv] * S0[i];
    ds = block_sum(ds);
    for (int i = threadIdx.x; i < n * p.dv; i += blockDim.x)
      dv_[((row + i / p.dv) * p.nv + h) * p.dv + i % p.dv] = from_f<T>(G.beta[i / p.dv] * Z[(int64_t)(i / p.dv) * p.dvp + i % p.dv]);
    __syncthreads();
    if (threadIdx.x < R) {
      const int i = threadIdx.x;
      float b = 0, y = 0, x = 0;
      for (int w = 0; w < warps; w++) b += parts[w * R + i], y += parts[(warps + w) * R + i], x += parts[(2 * warps + w) * R + i];
      if (i < n) dbeta[(row + i) * p.nv + h] = b;
      dG[i] = dG[i] - dG[R + i] + y - x;
      dG[R + i] = x;
    }
    __syncthreads();
    if (threadIdx.x == 0) {   // dg: reverse cumulative sum; the last row also gets sum(x) + e^(G_C) <D, S0>
      double sum = (double)(G.eC * ds);
      for (int i = 0; i < n; i++) sum += (double)dG[R + i];
      for (int i = n - 1; i >= 0; i--) {
        sum += (double)dG[i];
        dg[(row + i) * p.nv + h] = (float)sum;
      }
    }
  }
}

extern "C" int64_t hs_ws_gdn_bwd(const hs_gdn_bwd_args* a) { return a->f.nseg > 0 && a->nk > 0 && a->dk > 0 && a->dv > 0 && a->nv >= a->nk ? gdnb_layout(a, 0).bytes : 0; }
extern "C" hs_status hs_op_gdn_bwd(cudaStream_t s, const hs_gdn_bwd_args* a) {
  HS_TRY(delta_check(a, a->T));
  HS_TRY(forest_check(a->f, a->T));
  HS_NEED_PTR(q); HS_NEED_PTR(k); HS_NEED_PTR(v); HS_NEED_PTR(beta); HS_NEED_PTR(g); HS_NEED_PTR(states); HS_NEED_PTR(do_);
  HS_NEED_PTR(dq); HS_NEED_PTR(dk_); HS_NEED_PTR(dv_); HS_NEED_PTR(dbeta); HS_NEED_PTR(dg);
  HS_NEED_WS(hs_ws_gdn_bwd(a));
  const gdnb_shape p = gdnb_dims(a);
  const gdnb_ws ws = gdnb_layout(a, a->ws);
  HS_NEED(ws.items < INT32_MAX, "%d segments of %d heads: too many blocks", p.nseg, p.nv);
  HS_TRY(hs_memset(s, ws.line, 0, (size_t)line_bytes(ws.items)));
  HS_DISPATCH(a->dtype, T, {
    const int64_t scan = scan_smem::of<T>(p).bytes, chunk = chunk_smem::of<T>(p).bytes, most = HS_MAX(scan, chunk);
    HS_NEED(most <= 224 << 10, "dk %d, dv %d in %s need %lld bytes of shared memory per block, have %d", p.dk, p.dv, sizeof(T) == 4 ? "f32" : "bf16", (long long)most, 224 << 10);
    HS_TRY(HS_LAUNCH(s, gdn_scan_kernel<T>, (unsigned)ws.items, scan_threads, (size_t)scan, p, a->f, (const T*)a->q, (const T*)a->k, (const float*)a->beta, (const float*)a->g,
                     (const T*)a->do_, ws));
    HS_TRY(HS_LAUNCH(s, gdn_chunk_kernel<T>, dim3((unsigned)p.nchunks, (unsigned)p.nk), chunk_threads, (size_t)chunk, p, a->f, a->T, (const T*)a->q, (const T*)a->k,
                     (const T*)a->v, (const float*)a->beta, (const float*)a->g, (const float*)a->states, (const T*)a->do_, (T*)a->dq, (T*)a->dk_, (T*)a->dv_, (float*)a->dbeta,
                     (float*)a->dg, ws));
  })
  return HS_OK;
}
