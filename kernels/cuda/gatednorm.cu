// gatednorm.cu - gated RMSNorm of the delta-rule output (model.md 3.3), forward and backward: y = w * o/rms(o) * silu(z) per head.
//
// A warp per head row; lane l owns columns 4l..4l+3 of every 128, whatever the alignment, so a row's bits depend on the row. The backward
// gives each warp bwd_rows rows, whose dw it sums in shared memory (each lane its own columns); warps, then blocks, are added in order.
// Floors on an H200 for 16k tokens of 32 heads x 128 in bf16: forward reads o, z and writes y, 403 MB, 0.09 ms at 4.3 TB/s; backward reads
// o, z, dy and writes do, dz, 671 MB, 0.16 ms. Both move just that (the second look at a row hits L1); expected near the floor, unmeasured.
// Any dv up to the shared memory of a warp's dw (12288 floats).
#include "common.cuh"

static const int warps = 8, bwd_rows = 64;
static const int64_t max_dv = 12288;

struct norm_shape {
  int64_t rows, D;
  float eps;
  bool packs;   // rows may be read four columns at a time
};

template <class X> static __device__ __forceinline__ void read4(float v[4], const X* x, int64_t i, const norm_shape& p) {
  if (p.packs) {
    const pack<X, 4> q = load_pack<X, 4>(x + i);
    for (int j = 0; j < 4; j++) v[j] = to_f(q.v[j]);
  } else {
    for (int j = 0; j < 4; j++) v[j] = i + j < p.D ? to_f(x[i + j]) : 0.0f;
  }
}
template <class X> static __device__ __forceinline__ void write4(X* x, int64_t i, const norm_shape& p, const float v[4]) {
  if (p.packs) {
    pack<X, 4> q;
    for (int j = 0; j < 4; j++) q.v[j] = from_f<X>(v[j]);
    store_pack<X, 4>(x + i, q);
  } else {
    for (int j = 0; j < 4 && i + j < p.D; j++) x[i + j] = from_f<X>(v[j]);
  }
}
template <class T> static __device__ __forceinline__ float rstd_of(const T* o, const norm_shape& p) {
  float s = 0;
  for (int64_t i = 4 * (threadIdx.x & 31); i < p.D; i += 128) {
    float v[4];
    read4(v, o, i, p);
    for (int j = 0; j < 4; j++) s += v[j] * v[j];
  }
  return 1.0f / sqrtf(warp_sum(s) / (float)p.D + p.eps);
}

template <class T> __global__ void gatednorm_kernel(norm_shape p, const T* o, const T* z, const float* w, T* y) {
  const int64_t row = (int64_t)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (row >= p.rows) return;
  o += row * p.D, z += row * p.D, y += row * p.D;
  const float r = rstd_of(o, p);
  for (int64_t i = 4 * (threadIdx.x & 31); i < p.D; i += 128) {
    float v[4], g[4], s[4];
    read4(v, o, i, p);
    read4(g, z, i, p);
    read4(s, w, i, p);
    for (int j = 0; j < 4; j++) v[j] = s[j] * (v[j] * r) * (g[j] * sigmoid_f(g[j]));
    write4(y, i, p, v);
  }
}

// With n = o rstd, g = silu(z), dn = dy w g: do = rstd (dn - n mean(n dn)), dz = dy w n g'(z), dw = sum over rows of dy g n.
template <class T> struct norm_bwd { const T *o, *z, *dy; const float* w; T *dO, *dz; };

// One row; the sums of dw go into acc[D].
template <class T> static __device__ __forceinline__ void bwd_row(const norm_shape& p, const norm_bwd<T>& a, int64_t row, float* acc) {
  const T *o = a.o + row * p.D, *z = a.z + row * p.D, *dy = a.dy + row * p.D;
  const float r = rstd_of(o, p);
  float sum = 0;
  for (int64_t i = 4 * (threadIdx.x & 31); i < p.D; i += 128) {
    float v[4], g[4], d[4], s[4];
    read4(v, o, i, p);
    read4(g, z, i, p);
    read4(d, dy, i, p);
    read4(s, a.w, i, p);
    for (int j = 0; j < 4; j++) {
      const float n = v[j] * r, sg = sigmoid_f(g[j]), silu = g[j] * sg;
      if (i + j < p.D) acc[i + j] += d[j] * silu * n;
      sum += n * (d[j] * s[j] * silu);
      v[j] = d[j] * s[j] * n * (sg * (1 + g[j] * (1 - sg)));
    }
    write4(a.dz + row * p.D, i, p, v);
  }
  const float mean = warp_sum(sum) / (float)p.D;
  for (int64_t i = 4 * (threadIdx.x & 31); i < p.D; i += 128) {
    float v[4], g[4], d[4], s[4];
    read4(v, o, i, p);
    read4(g, z, i, p);
    read4(d, dy, i, p);
    read4(s, a.w, i, p);
    for (int j = 0; j < 4; j++) v[j] = r * (d[j] * s[j] * (g[j] * sigmoid_f(g[j])) - v[j] * r * mean);
    write4(a.dO + row * p.D, i, p, v);
  }
}
template <class T> __global__ void gatednorm_bwd_kernel(norm_shape p, norm_bwd<T> a, float* part) {
  HS_DYN_SHARED(float, sums);   // [warps][D]
  const int warp = threadIdx.x >> 5, n = blockDim.x >> 5;
  float* acc = sums + warp * p.D;
  for (int64_t i = 4 * (threadIdx.x & 31); i < p.D; i += 128)
    for (int j = 0; j < 4 && i + j < p.D; j++) acc[i + j] = 0;
  const int64_t first = ((int64_t)blockIdx.x * n + warp) * bwd_rows;
  for (int64_t row = first; row < first + bwd_rows && row < p.rows; row++) bwd_row(p, a, row, acc);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < p.D; i += blockDim.x) {
    float s = 0;
    for (int k = 0; k < n; k++) s += sums[k * p.D + i];
    part[blockIdx.x * p.D + i] = s;
  }
}

// ---- the ops ----

static bool packs4(int64_t D, int64_t elem, const void* a, const void* b, const void* c, const void* d = 0) {
  return D % 4 == 0 && (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)d) & (4 * elem - 1)) == 0;
}
// Warps per block of the backward: enough for the rows, and their sums fit into shared memory.
static int bwd_warps(int64_t rows, int64_t dv) { return (int)HS_MIN(HS_MIN(warps, HS_CEIL(rows, bwd_rows)), HS_MAX(1, max_dv / dv)); }
static int64_t bwd_blocks(int64_t rows, int64_t dv) { return HS_CEIL(rows, bwd_rows * bwd_warps(rows, dv)); }

extern "C" hs_status hs_op_gatednorm(cudaStream_t s, const hs_gatednorm_args* a) {
  HS_NEED_SHAPE(T, dv);
  HS_NEED(a->nv > 0, "nv %lld, need > 0", (long long)a->nv);
  HS_NEED_PTR(o); HS_NEED_PTR(z); HS_NEED_PTR(w); HS_NEED_PTR(y);
  const int64_t rows = a->T * a->nv;
  const int n = (int)HS_MIN(warps, rows);
  HS_DISPATCH(a->dtype, T, {
    const norm_shape p = {rows, a->dv, (float)a->eps, packs4(a->dv, sizeof(T), a->o, a->z, a->y) && packs4(a->dv, 4, a->w, 0, 0)};
    HS_TRY(HS_LAUNCH(s, gatednorm_kernel<T>, (unsigned)HS_CEIL(rows, n), 32 * n, 0, p, (const T*)a->o, (const T*)a->z, (const float*)a->w, (T*)a->y));
  })
  return HS_OK;
}

extern "C" int64_t hs_ws_gatednorm_bwd(const hs_gatednorm_bwd_args* a) {
  return a->T > 0 && a->nv > 0 && a->dv > 0 ? bwd_blocks(a->T * a->nv, a->dv) * a->dv * 4 : 0;
}
extern "C" hs_status hs_op_gatednorm_bwd(cudaStream_t s, const hs_gatednorm_bwd_args* a) {
  HS_NEED_SHAPE(T, dv);
  HS_NEED(a->nv > 0, "nv %lld, need > 0", (long long)a->nv);
  HS_NEED(a->dv <= max_dv, "dv %lld, want at most %lld", (long long)a->dv, (long long)max_dv);
  HS_NEED_PTR(o); HS_NEED_PTR(z); HS_NEED_PTR(w); HS_NEED_PTR(dy); HS_NEED_PTR(do_); HS_NEED_PTR(dz);
  HS_NEED_WS(hs_ws_gatednorm_bwd(a));
  const int64_t rows = a->T * a->nv, blocks = bwd_blocks(rows, a->dv);
  const int n = bwd_warps(rows, a->dv);
  HS_DISPATCH(a->dtype, T, {
    const norm_shape p = {rows, a->dv, (float)a->eps,
                          packs4(a->dv, sizeof(T), a->o, a->z, a->dy) && packs4(a->dv, sizeof(T), a->do_, a->dz, 0) && packs4(a->dv, 4, a->w, 0, 0)};
    const norm_bwd<T> b = {(const T*)a->o, (const T*)a->z, (const T*)a->dy, (const float*)a->w, (T*)a->do_, (T*)a->dz};
    HS_TRY(HS_LAUNCH(s, gatednorm_bwd_kernel<T>, (unsigned)blocks, 32 * n, (size_t)n * a->dv * 4, p, b, (float*)a->ws));
  })
  return a->dw ? hs_add_parts(s, blocks, a->dv, (const float*)a->ws, (float*)a->dw) : HS_OK;
}
