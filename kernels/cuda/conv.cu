// conv.cu - the front of a gated delta layer (model.md 3.4 steps 2-6): causal conv of 4 taps, SiLU, l2norm of q and k, gates; its backward; one row
// of decode. Channels are [q: nk*dk][k: nk*dk][v: nv*dv].
//
// A warp owns one unit of channels (a q head, a k head, or 128 v channels) and walks a tile of rows; the window of four inputs moves through
// registers. Lane l holds channels 4l..4l+3, so the sum of squares has one order that depends on dk alone. Forward and step share conv_u and
// conv_out, whose arithmetic is written without contraction: a row has the same bits in training, prefill and decode. The last unit is the gates.
// Shapes: any nk, nv, dv; dk up to gdn_max_dk = 256 (one pack of 4 channels per lane up to 128, two above).
// H200 floor (gpu.md 6.3), 8192 channels: forward 32 KB a row, 125 us for 16k rows; backward 48 KB, 190 us. Expected 1.3x of that; unmeasured.
#include "delta.cuh"

static const int conv_warps = 4, fwd_rows = 32, bwd_rows = 64;   // rows of a tile

struct conv_dims {
  int64_t nk, dk, nv, dv;
  float eps;
  bool packs;   // rows may be read in packs of 4
  __host__ __device__ int64_t kw() const { return nk * dk; }
  __host__ __device__ int64_t vw() const { return nv * dv; }
  __host__ __device__ int64_t C() const { return 2 * kw() + vw(); }
  __host__ __device__ int vunit() const { return dk > 128 ? 256 : 128; }
  __host__ __device__ int units() const { return (int)(2 * nk + HS_CEIL(vw(), vunit())); }
};

// Unit u: `width` channels from c0; in a row of q, k or v (kind 0, 1, 2), which has `stride` elements, they start at `at`.
struct conv_unit {
  int kind, width;
  int64_t c0, at, stride;
};
static __device__ __forceinline__ conv_unit unit_of(const conv_dims& d, int u) {
  conv_unit r;
  if (u < 2 * d.nk) {
    r.kind = u >= d.nk;
    r.width = (int)d.dk, r.c0 = u * d.dk, r.at = r.c0 - (r.kind ? d.kw() : 0), r.stride = d.kw();
  } else {
    const int64_t w = (int64_t)(u - 2 * d.nk) * d.vunit();
    r.kind = 2, r.width = (int)min((int64_t)d.vunit(), d.vw() - w), r.c0 = 2 * d.kw() + w, r.at = w, r.stride = d.vw();
  }
  return r;
}

// ---- a lane's channels: NP packs of 4, pack i at 128 i + 4 lane ----

template <class T, int NP> static __device__ __forceinline__ void load_lane(float x[4 * NP], const T* row, int width, bool packs) {
#pragma unroll
  for (int i = 0; i < NP; i++) {
    const int c = 128 * i + 4 * (int)(threadIdx.x & 31);
    if (packs && row && c < width) {
      const pack<T, 4> p = load_pack<T, 4>(row + c);
#pragma unroll
      for (int j = 0; j < 4; j++) x[4 * i + j] = to_f(p.v[j]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++) x[4 * i + j] = row && c + j < width ? to_f(row[c + j]) : 0.0f;
    }
  }
}
template <class T, int NP> static __device__ __forceinline__ void store_lane(T* row, int width, bool packs, const float x[4 * NP]) {
#pragma unroll
  for (int i = 0; i < NP; i++) {
    const int c = 128 * i + 4 * (int)(threadIdx.x & 31);
    if (c >= width) continue;
    if (packs) {
      pack<T, 4> p;
#pragma unroll
      for (int j = 0; j < 4; j++) p.v[j] = from_f<T>(x[4 * i + j]);
      store_pack<T, 4>(row + c, p);
    } else {
      for (int j = 0; j < 4 && c + j < width; j++) row[c + j] = from_f<T>(x[4 * i + j]);
    }
  }
}
template <class T, int NP> static __device__ __forceinline__ void load_taps(float w[4][4 * NP], const T* taps, int width) {
#pragma unroll
  for (int i = 0; i < 4 * NP; i++) {
    const int c = 128 * (i / 4) + 4 * (int)(threadIdx.x & 31) + i % 4;
#pragma unroll
    for (int j = 0; j < 4; j++) w[j][i] = c < width ? to_f(taps[c * 4 + j]) : 0.0f;
  }
}

// ---- one row: what training, prefill and decode share ----

static __device__ __forceinline__ float conv_sigmoid(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x))); }

// u = w0 h3 + w1 h2 + w2 h1 + w3 h0, oldest first; h[0] is the row itself.
template <int N> static __device__ __forceinline__ void conv_u(float u[N], const float h[4][N], const float w[4][N]) {
#pragma unroll
  for (int i = 0; i < N; i++) u[i] = __fmaf_rn(w[3][i], h[0][i], __fmaf_rn(w[2][i], h[1][i], __fmaf_rn(w[1][i], h[2][i], __fmul_rn(w[0][i], h[3][i]))));
}
template <int N> static __device__ __forceinline__ float lane_dot(const float a[N], const float b[N]) {
  float s = 0;
#pragma unroll
  for (int i = 0; i < N; i++) s = __fmaf_rn(a[i], b[i], s);
  return s;
}
static __device__ __forceinline__ float l2_rstd(float ss, float eps) { return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(ss, eps))); }
static __device__ __forceinline__ float q_scale(int64_t dk) { return __fdiv_rn(1.0f, __fsqrt_rn((float)dk)); }

// u -> q, k or v of the row, in place.
template <int N> static __device__ __forceinline__ void conv_out(float u[N], int kind, const conv_dims& d) {
#pragma unroll
  for (int i = 0; i < N; i++) u[i] = __fmul_rn(u[i], conv_sigmoid(u[i]));
  if (kind == 2) return;
  float r = l2_rstd(warp_sum(lane_dot<N>(u, u)), d.eps);
  if (kind == 0) r = __fmul_rn(r, q_scale(d.dk));
#pragma unroll
  for (int i = 0; i < N; i++) u[i] = __fmul_rn(u[i], r);
}
static __device__ __forceinline__ float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }
template <class T> static __device__ __forceinline__ void gates(int64_t i, int64_t h, const T* a, const T* b, const float* a_log, const T* dt_bias, float* beta, float* g) {
  beta[i] = conv_sigmoid(to_f(b[i]));
  g[i] = __fmul_rn(-expf(a_log[h]), softplus(__fadd_rn(to_f(a[i]), to_f(dt_bias[h]))));
}

// ---- forward ----

// The input i+1 (0..2) positions before `row`: a row of p, a column of the state slot that its tree started from, or 0.
template <class T> static __device__ __forceinline__ const T* conv_hist(const hs_forest& f, const T* p, const T* state, int64_t C, int64_t row, int i) {
  const int32_t x = f.prev[row * 3 + i];
  if (x >= 0) return p + x * C;
  if (x == -1) return 0;
  return state + ((int64_t)f.slot[f.root[f.row_seg[row]]] * 3 + (-2 - x)) * C;
}
template <class T, int NP>
static __device__ __forceinline__ void load_window(float h[4][4 * NP], const hs_forest& f, const T* p, const T* state, const conv_dims& d, const conv_unit& u, int64_t row) {
  load_lane<T, NP>(h[0], p + row * d.C() + u.c0, u.width, d.packs);
#pragma unroll
  for (int i = 0; i < 3; i++) {
    const T* x = conv_hist(f, p, state, d.C(), row, i);
    load_lane<T, NP>(h[i + 1], x ? x + u.c0 : 0, u.width, d.packs);
  }
}

template <class T, int NP>
__global__ void __launch_bounds__(32 * conv_warps) convgate_kernel(conv_dims d, hs_forest f, int64_t rows, const T* p, const T* a, const T* b, const T* w, const float* a_log,
                                                                 const T* dt_bias, T* q, T* k, T* v, float* beta, float* g, const T* state) {
  constexpr int N = 4 * NP;
  const int unit = blockIdx.y * conv_warps + (threadIdx.x >> 5);
  const int64_t first = (int64_t)blockIdx.x * fwd_rows, last = min(first + fwd_rows, rows);
  if (unit > d.units()) return;
  if (unit == d.units()) {
    for (int64_t i = first * d.nv + (threadIdx.x & 31); i < last * d.nv; i += 32) gates(i, i % d.nv, a, b, a_log, dt_bias, beta, g);
    return;
  }
  const conv_unit u = unit_of(d, unit);
  T* out = (u.kind == 0 ? q : u.kind == 1 ? k : v) + u.at;
  float t[4][N], h[4][N], s[N];
  load_taps<T, NP>(t, w + u.c0 * 4, u.width);
  for (int64_t row = first; row < last; row++) {
    if (row > first && f.prev[row * 3] == row - 1) {
#pragma unroll
      for (int i = 0; i < N; i++) h[3][i] = h[2][i], h[2][i] = h[1][i], h[1][i] = h[0][i];
      load_lane<T, NP>(h[0], p + row * d.C() + u.c0, u.width, d.packs);
    } else load_window<T, NP>(h, f, p, state, d, u, row);
    conv_u<N>(s, h, t);
    conv_out<N>(s, u.kind, d);
    store_lane<T, NP>(out + row * u.stride, u.width, d.packs, s);
  }
}

// Conv states after the last rows, once every row has read the old ones. A thread owns a channel: all three columns are read first.
template <class T> __global__ void conv_state_kernel(int64_t C, hs_forest f, const T* p, T* state) {
  const int64_t s = blockIdx.y, c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (f.slot[s] < 0 || c >= C) return;
  const int64_t last = (int64_t)f.start[s] + f.len[s] - 1;
  const T *h2 = conv_hist(f, p, (const T*)state, C, last, 1), *h1 = conv_hist(f, p, (const T*)state, C, last, 0);
  const T x = h2 ? h2[c] : from_f<T>(0), y = h1 ? h1[c] : from_f<T>(0);
  T* dst = state + (int64_t)f.slot[s] * 3 * C + c;
  dst[0] = x, dst[C] = y, dst[2 * C] = p[last * C + c];
}

// Checks what convgate, its backward and its step have in common.
template <class A> static hs_status conv_check(const A* a, int64_t rows) {
  HS_TRY(delta_check(a, rows));
  HS_NEED_PTR(p); HS_NEED_PTR(a); HS_NEED_PTR(b); HS_NEED_PTR(w); HS_NEED_PTR(a_log); HS_NEED_PTR(dt_bias);
  return HS_OK;
}
template <class A> static conv_dims dims_of(const A* a, bool aligned) {
  conv_dims d = {a->nk, a->dk, a->nv, a->dv, (float)a->eps, false};
  d.packs = aligned && a->dk % 4 == 0 && d.vw() % 4 == 0;
  return d;
}
static dim3 conv_grid(const conv_dims& d, int64_t x) { return dim3((unsigned)x, (unsigned)HS_CEIL(d.units() + 1, conv_warps)); }

extern "C" hs_status hs_op_convgate(cudaStream_t s, const hs_convgate_args* a) {
  HS_TRY(conv_check(a, a->T));
  HS_TRY(forest_check(a->f, a->T));
  HS_NEED_PTR(q); HS_NEED_PTR(k); HS_NEED_PTR(v); HS_NEED_PTR(beta); HS_NEED_PTR(g);
  const conv_dims d = dims_of(a, hs_packs(16, 1, a->p, a->q, a->k, a->v) && hs_packs(16, 1, a->conv_state));
  HS_DISPATCH(a->dtype, T, {
    auto go = [&](auto kernel) {
      return HS_LAUNCH(s, kernel, conv_grid(d, HS_CEIL(a->T, fwd_rows)), 32 * conv_warps, 0, d, a->f, a->T, (const T*)a->p, (const T*)a->a, (const T*)a->b, (const T*)a->w,
                       (const float*)a->a_log, (const T*)a->dt_bias, (T*)a->q, (T*)a->k, (T*)a->v, (float*)a->beta, (float*)a->g, (const T*)a->conv_state);
    };
    HS_TRY(a->dk <= 128 ? go(convgate_kernel<T, 1>) : go(convgate_kernel<T, 2>));
    if (a->conv_state)
      HS_TRY(HS_LAUNCH(s, conv_state_kernel<T>, dim3((unsigned)HS_CEIL(d.C(), 128), (unsigned)a->f.nseg), 128, 0, d.C(), a->f, (const T*)a->p, (T*)a->conv_state));
  })
  return HS_OK;
}

// ---- one row of decode: reads and shifts conv_state[slot] ----

template <class T, int NP>
__global__ void __launch_bounds__(32 * conv_warps) convgate_step_kernel(conv_dims d, const int32_t* slot, const T* p, const T* a, const T* b, const T* w, const float* a_log,
                                                                      const T* dt_bias, T* q, T* k, T* v, float* beta, float* g, T* state) {
  constexpr int N = 4 * NP;
  const int unit = blockIdx.y * conv_warps + (threadIdx.x >> 5);
  const int64_t row = blockIdx.x;
  if (unit > d.units()) return;
  if (unit == d.units()) {
    for (int64_t h = threadIdx.x & 31; h < d.nv; h += 32) gates(row * d.nv + h, h, a, b, a_log, dt_bias, beta, g);
    return;
  }
  const conv_unit u = unit_of(d, unit);
  T* out = (u.kind == 0 ? q : u.kind == 1 ? k : v) + u.at;
  T* st = state + (int64_t)slot[row] * 3 * d.C() + u.c0;
  float t[4][N], h[4][N], x[N];
  load_taps<T, NP>(t, w + u.c0 * 4, u.width);
  load_lane<T, NP>(h[0], p + row * d.C() + u.c0, u.width, d.packs);
#pragma unroll
  for (int j = 0; j < 3; j++) load_lane<T, NP>(h[3 - j], st + j * d.C(), u.width, d.packs);
  conv_u<N>(x, h, t);
  conv_out<N>(x, u.kind, d);
  store_lane<T, NP>(out + row * u.stride, u.width, d.packs, x);
#pragma unroll
  for (int j = 0; j < 3; j++) store_lane<T, NP>(st + j * d.C(), u.width, d.packs, h[2 - j]);
}
extern "C" hs_status hs_op_convgate_step(cudaStream_t s, const hs_convgate_step_args* a) {
  HS_TRY(conv_check(a, a->B));
  HS_NEED_PTR(slot); HS_NEED_PTR(q); HS_NEED_PTR(k); HS_NEED_PTR(v); HS_NEED_PTR(beta); HS_NEED_PTR(g); HS_NEED_PTR(conv_state);
  const conv_dims d = dims_of(a, hs_packs(16, 1, a->p, a->q, a->k, a->v) && hs_packs(16, 1, a->conv_state));
  HS_DISPATCH(a->dtype, T, {
    auto go = [&](auto kernel) {
      return HS_LAUNCH(s, kernel, conv_grid(d, a->B), 32 * conv_warps, 0, d, a->slot, (const T*)a->p, (const T*)a->a, (const T*)a->b, (const T*)a->w, (const float*)a->a_log,
                       (const T*)a->dt_bias, (T*)a->q, (T*)a->k, (T*)a->v, (float*)a->beta, (float*)a->g, (T*)a->conv_state);
    };
    HS_TRY(a->dk <= 128 ? go(convgate_step_kernel<T, 1>) : go(convgate_step_kernel<T, 2>));
  })
  return HS_OK;
}

// ---- backward ----
// A warp walks its tile's rows from the last to the first and recomputes the row's conv. du of a row reaches dp of itself and of the three rows
// before it, so pend[e] carries what later rows have sent to the next rows: one order whatever the tiling. Before a segment's last row, pend is
// what its descendants' first rows send across the segment's end (edge, computed by a kernel before); a tile that ends inside a segment starts
// up to three rows later. dw and the gates' weights leave one part per tile.

// du of a row from its window and the gradient dy of its q, k or v: silu', l2norm' (y = x r: dx = r (dy - y (y.dy))).
template <class T, int NP>
static __device__ __forceinline__ void conv_du(float du[4 * NP], const float h[4][4 * NP], const float w[4][4 * NP], const T* dy, const conv_unit& u, const conv_dims& d) {
  constexpr int N = 4 * NP;
  float x[N], ds[N], up[N];
  load_lane<T, NP>(up, dy, u.width, d.packs);
  conv_u<N>(x, h, w);
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float sg = conv_sigmoid(x[i]);
    ds[i] = sg * (1 + x[i] * (1 - sg));
    x[i] *= sg;
  }
  if (u.kind == 2) {
#pragma unroll
    for (int i = 0; i < N; i++) du[i] = up[i] * ds[i];
    return;
  }
  const float r = l2_rstd(warp_sum(lane_dot<N>(x, x)), d.eps), dot = warp_sum(lane_dot<N>(x, up)) * r * r, f = u.kind ? r : r * q_scale(d.dk);
#pragma unroll
  for (int i = 0; i < N; i++) du[i] = f * (up[i] - dot * x[i]) * ds[i];
}

struct conv_bwd_ws {
  float *edge, *dw, *da_log, *ddt;   // [S, 3, C] du of the first rows of segments with a parent; parts [tiles, C*4], [tiles, nv], [tiles, nv]
  int64_t tiles, bytes;
};
static conv_bwd_ws conv_bwd_layout(const hs_convgate_bwd_args* a, void* ws) {
  const int64_t C = 2 * a->nk * a->dk + a->nv * a->dv;
  conv_bwd_ws x;
  x.tiles = HS_CEIL(a->T, bwd_rows);
  char* p = (char*)ws;
  auto take = [&](int64_t n) { float* r = (float*)p; p += hs_align(n * 4); return r; };
  x.edge = take((int64_t)a->f.nseg * 3 * C);
  x.dw = take(x.tiles * C * 4), x.da_log = take(x.tiles * a->nv), x.ddt = take(x.tiles * a->nv);
  x.bytes = p - (char*)ws;
  return x;
}

template <class T, int NP>
__global__ void __launch_bounds__(32 * conv_warps) conv_edge_kernel(conv_dims d, hs_forest f, const T* p, const T* w, const T* dq, const T* dk, const T* dv, float* edge) {
  constexpr int N = 4 * NP;
  const int unit = blockIdx.y * conv_warps + (threadIdx.x >> 5);
  const int64_t s = blockIdx.x;
  if (unit >= d.units() || f.parent[s] < 0) return;
  const conv_unit u = unit_of(d, unit);
  const T* dy = (u.kind == 0 ? dq : u.kind == 1 ? dk : dv) + u.at;
  float t[4][N], h[4][N], du[N];
  load_taps<T, NP>(t, w + u.c0 * 4, u.width);
  for (int x = 0; x < min(3, f.len[s]); x++) {
    const int64_t row = f.start[s] + x;
    load_window<T, NP>(h, f, p, 0, d, u, row);
    conv_du<T, NP>(du, h, t, dy + row * u.stride, u, d);
    store_lane<float, NP>(edge + (s * 3 + x) * d.C() + u.c0, u.width, d.packs, du);
  }
}

// pend[e] += w[2-x-e] du of the row that comes x rows after the segment's end, for the rows e = 0.. before that end.
template <int NP> static __device__ __forceinline__ void send_back(float pend[3][4 * NP], const float t[4][4 * NP], const float* du, int x, const conv_unit& u, bool packs) {
  float v[4 * NP];
  load_lane<float, NP>(v, du + u.c0, u.width, packs);
#pragma unroll
  for (int i = 0; i < 4 * NP; i++) {
    if (x == 0) {
      pend[0][i] = __fmaf_rn(t[2][i], v[i], pend[0][i]);
      pend[1][i] = __fmaf_rn(t[1][i], v[i], pend[1][i]);
      pend[2][i] = __fmaf_rn(t[0][i], v[i], pend[2][i]);
    } else if (x == 1) {
      pend[0][i] = __fmaf_rn(t[1][i], v[i], pend[0][i]);
      pend[1][i] = __fmaf_rn(t[0][i], v[i], pend[1][i]);
    } else pend[0][i] = __fmaf_rn(t[0][i], v[i], pend[0][i]);
  }
}
// The descendants within three rows of the end of segment s, depth first in segment order: at most three generations of short segments.
template <int NP>
static __device__ __forceinline__ void from_children(float pend[3][4 * NP], const float t[4][4 * NP], const hs_forest& f, const float* edge, int32_t s, const conv_unit& u,
                                                    const conv_dims& d) {
  int32_t at[3], end[3];
  int before[3], depth = 0;   // before[i]: rows between the end of s and the segments of generation i
  at[0] = f.child_off[s], end[0] = f.child_off[s + 1], before[0] = 0;
#pragma unroll 1
  while (depth >= 0) {
    // Selects instead of indexing keep the three generations in registers.
    const int32_t y = depth == 0 ? at[0] : depth == 1 ? at[1] : at[2], e = depth == 0 ? end[0] : depth == 1 ? end[1] : end[2];
    const int b = depth == 0 ? before[0] : depth == 1 ? before[1] : before[2];
    if (y == e) {
      depth--;
      continue;
    }
    if (depth == 0) at[0]++;
    else if (depth == 1) at[1]++;
    else at[2]++;
    const int32_t ch = f.child[y], n = f.len[ch];
#pragma unroll 1
    for (int x = b; x < min(3, b + n); x++) send_back<NP>(pend, t, edge + ((int64_t)ch * 3 + x - b) * d.C(), x, u, d.packs);
    if (b + n < 3) {
      depth++;
      const int32_t lo = f.child_off[ch], hi = f.child_off[ch + 1];
      if (depth == 1) at[1] = lo, end[1] = hi, before[1] = b + n;
      else at[2] = lo, end[2] = hi, before[2] = b + n;
    }
  }
}

// da = A sigmoid(a + dt) dg, db = dbeta beta (1 - beta); parts of dA_log = sum dg g and ddt_bias = sum da, rows ascending.
template <class T>
static __device__ __forceinline__ void gates_bwd(int64_t first, int64_t last, int64_t nv, const T* a, const T* b, const float* a_log, const T* dt_bias, const float* dbeta,
                                                 const float* dg, T* da, T* db, float* pa, float* pd) {
  for (int64_t h = threadIdx.x & 31; h < nv; h += 32) {
    const float A = -expf(a_log[h]), dt = to_f(dt_bias[h]);
    float sa = 0, sd = 0;
    for (int64_t i = first * nv + h; i < last * nv; i += nv) {
      const float x = to_f(a[i]) + dt, d = A * conv_sigmoid(x) * dg[i], be = conv_sigmoid(to_f(b[i]));
      da[i] = from_f<T>(d);
      db[i] = from_f<T>(dbeta[i] * be * (1 - be));
      sd += d;
      sa += dg[i] * (A * softplus(x));
    }
    pa[h] = sa, pd[h] = sd;
  }
}

template <class T, int NP>
__global__ void __launch_bounds__(32 * conv_warps)
    convgate_bwd_kernel(conv_dims d, hs_forest f, int64_t rows, const T* p, const T* a, const T* b, const T* w, const float* a_log, const T* dt_bias, const T* dq, const T* dk,
                        const T* dv, const float* dbeta, const float* dg, T* dp, T* da, T* db, conv_bwd_ws ws) {
  constexpr int N = 4 * NP;
  const int unit = blockIdx.y * conv_warps + (threadIdx.x >> 5);
  const int64_t tile = blockIdx.x, first = tile * bwd_rows, last = min(first + bwd_rows, rows);
  if (unit > d.units()) return;
  if (unit == d.units()) {
    gates_bwd(first, last, d.nv, a, b, a_log, dt_bias, dbeta, dg, da, db, ws.da_log + tile * d.nv, ws.ddt + tile * d.nv);
    return;
  }
  const conv_unit u = unit_of(d, unit);
  const T* dy = (u.kind == 0 ? dq : u.kind == 1 ? dk : dv) + u.at;
  float t[4][N], h[4][N], du[N], pend[3][N], dw[4][N];
  load_taps<T, NP>(t, w + u.c0 * 4, u.width);
#pragma unroll
  for (int i = 0; i < N; i++) dw[0][i] = dw[1][i] = dw[2][i] = dw[3][i] = 0;
  int32_t seg = f.row_seg[last - 1];
  const int64_t end = (int64_t)f.start[seg] + f.len[seg] - 1, top = min(end, last + 2);
  for (int64_t row = top; row >= first; row--) {
    const bool tail = row == top || f.row_seg[row] != seg;
    seg = f.row_seg[row];
    if (tail) {
#pragma unroll
      for (int i = 0; i < N; i++) pend[0][i] = pend[1][i] = pend[2][i] = 0;
      if (row != top || top == end) from_children<NP>(pend, t, f, ws.edge, seg, u, d);
      load_window<T, NP>(h, f, p, 0, d, u, row);
    } else {
      const T* x = conv_hist(f, p, (const T*)0, d.C(), row, 2);
#pragma unroll
      for (int i = 0; i < N; i++) h[0][i] = h[1][i], h[1][i] = h[2][i], h[2][i] = h[3][i];
      load_lane<T, NP>(h[3], x ? x + u.c0 : 0, u.width, d.packs);
    }
    conv_du<T, NP>(du, h, t, dy + row * u.stride, u, d);
    if (row < last) {
      float x[N];
#pragma unroll
      for (int i = 0; i < N; i++) {
        x[i] = __fmaf_rn(t[3][i], du[i], pend[0][i]);
#pragma unroll
        for (int j = 0; j < 4; j++) dw[j][i] = __fmaf_rn(du[i], h[3 - j][i], dw[j][i]);
      }
      store_lane<T, NP>(dp + row * d.C() + u.c0, u.width, d.packs, x);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
      pend[0][i] = __fmaf_rn(t[2][i], du[i], pend[1][i]);
      pend[1][i] = __fmaf_rn(t[1][i], du[i], pend[2][i]);
      pend[2][i] = __fmul_rn(t[0][i], du[i]);
    }
  }
  float* part = ws.dw + (tile * d.C() + u.c0) * 4;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const int c = 128 * (i / 4) + 4 * (int)(threadIdx.x & 31) + i % 4;
    if (c < u.width) {
      const pack<float, 4> x = {{dw[0][i], dw[1][i], dw[2][i], dw[3][i]}};
      store_pack<float, 4>(part + c * 4, x);
    }
  }
}

extern "C" int64_t hs_ws_convgate_bwd(const hs_convgate_bwd_args* a) { return a->T > 0 && a->f.nseg > 0 ? conv_bwd_layout(a, 0).bytes : 0; }
extern "C" hs_status hs_op_convgate_bwd(cudaStream_t s, const hs_convgate_bwd_args* a) {
  HS_TRY(conv_check(a, a->T));
  HS_TRY(forest_check(a->f, a->T));
  HS_NEED_PTR(dq); HS_NEED_PTR(dk_); HS_NEED_PTR(dv_); HS_NEED_PTR(dbeta); HS_NEED_PTR(dg); HS_NEED_PTR(dp); HS_NEED_PTR(da); HS_NEED_PTR(db);
  HS_NEED_WS(hs_ws_convgate_bwd(a));
  const conv_dims d = dims_of(a, hs_packs(16, 1, a->p, a->dq, a->dk_, a->dv_) && hs_packs(16, 1, a->dp));
  const conv_bwd_ws ws = conv_bwd_layout(a, a->ws);
  HS_DISPATCH(a->dtype, T, {
    auto edge = [&](auto kernel) {
      return HS_LAUNCH(s, kernel, conv_grid(d, a->f.nseg), 32 * conv_warps, 0, d, a->f, (const T*)a->p, (const T*)a->w, (const T*)a->dq, (const T*)a->dk_, (const T*)a->dv_, ws.edge);
    };
    auto go = [&](auto kernel) {
      return HS_LAUNCH(s, kernel, conv_grid(d, ws.tiles), 32 * conv_warps, 0, d, a->f, a->T, (const T*)a->p, (const T*)a->a, (const T*)a->b, (const T*)a->w, (const float*)a->a_log,
                       (const T*)a->dt_bias, (const T*)a->dq, (const T*)a->dk_, (const T*)a->dv_, (const float*)a->dbeta, (const float*)a->dg, (T*)a->dp, (T*)a->da, (T*)a->db, ws);
    };
    HS_TRY(a->dk <= 128 ? edge(conv_edge_kernel<T, 1>) : edge(conv_edge_kernel<T, 2>));
    HS_TRY(a->dk <= 128 ? go(convgate_bwd_kernel<T, 1>) : go(convgate_bwd_kernel<T, 2>));
  })
  if (a->dw) HS_TRY(hs_add_parts(s, ws.tiles, d.C() * 4, ws.dw, (float*)a->dw));
  if (a->da_log) HS_TRY(hs_add_parts(s, ws.tiles, a->nv, ws.da_log, (float*)a->da_log));
  if (a->ddt_bias) HS_TRY(hs_add_parts(s, ws.tiles, a->nv, ws.ddt, (float*)a->ddt_bias));
  return HS_OK;
}
