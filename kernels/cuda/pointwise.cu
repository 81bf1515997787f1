// pointwise.cu - copy, add, SwiGLU and RMSNorm, forward and backward.
// T rows, D columns. A row belongs to one block, and which thread sums which column depends on D alone: a row's bits depend on the row.
// Floors on an H200 at 4.3 TB/s, bf16, T = 16k, sizes of the 4B: RMSNorm 4 bytes an element, D = 2560: 39 us (gpu.md 6.2 counts it with the
// residual's addition, which is in the product before it: 78 us); backward about 10 bytes: 98 us; SwiGLU 6 bytes, I = 9216: 211 us, backward 10
// bytes: 351 us. Expected: 1.1 to 1.2 times that. Unmeasured.
#include "common.cuh"

static const int elem_threads = 256, norm_threads = 256;
static const int norm_rows = 32;   // rows per partial sum of a weight gradient

// ---- elements: one thread per 16 bytes, or per element when an address is not a multiple of 16 ----

template <class T, int N, bool add> __global__ void vec_kernel(int64_t n, const T* src, T* dst) {
  const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
  if (i >= n) return;
  pack<T, N> x = load_pack<T, N>(src + i);
  if (add) {
    const pack<T, N> y = load_pack<T, N>(dst + i);
    for (int j = 0; j < N; j++) x.v[j] = from_f<T>(to_f(y.v[j]) + to_f(x.v[j]));
  }
  store_pack<T, N>(dst + i, x);
}
template <bool add> static hs_status vec(cudaStream_t s, const hs_vec_args* a) {
  HS_NEED(a->n > 0, "n %lld, need > 0", (long long)a->n);
  HS_NEED_PTR(src); HS_NEED_PTR(dst);
  HS_DISPATCH(a->dtype, T, {
    constexpr int N = pack_n<T>;
    if (hs_packs(a->n, sizeof(T), a->src, a->dst))
      HS_TRY(HS_LAUNCH(s, (vec_kernel<T, N, add>), (unsigned)HS_CEIL(a->n, N * elem_threads), elem_threads, 0, a->n, (const T*)a->src, (T*)a->dst));
    else HS_TRY(HS_LAUNCH(s, (vec_kernel<T, 1, add>), (unsigned)HS_CEIL(a->n, elem_threads), elem_threads, 0, a->n, (const T*)a->src, (T*)a->dst));
  })
  return HS_OK;
}
extern "C" hs_status hs_op_copy(cudaStream_t s, const hs_vec_args* a) { return vec<false>(s, a); }
extern "C" hs_status hs_op_add(cudaStream_t s, const hs_vec_args* a) { return vec<true>(s, a); }

template <class T, int N> __global__ void swiglu_kernel(int64_t n, const T* gate, const T* up, T* h) {
  const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
  if (i >= n) return;
  const pack<T, N> g = load_pack<T, N>(gate + i), u = load_pack<T, N>(up + i);
  pack<T, N> y;
  for (int j = 0; j < N; j++) y.v[j] = from_f<T>(swiglu_f(to_f(g.v[j]), to_f(u.v[j])));
  store_pack<T, N>(h + i, y);
}
extern "C" hs_status hs_op_swiglu(cudaStream_t s, const hs_swiglu_args* a) {
  HS_NEED(a->n > 0, "n %lld, need > 0", (long long)a->n);
  HS_NEED_PTR(gate); HS_NEED_PTR(up); HS_NEED_PTR(h);
  HS_DISPATCH(a->dtype, T, {
    constexpr int N = pack_n<T>;
    const T *gate = (const T*)a->gate, *up = (const T*)a->up;
    if (hs_packs(a->n, sizeof(T), gate, up, a->h))
      HS_TRY(HS_LAUNCH(s, (swiglu_kernel<T, N>), (unsigned)HS_CEIL(a->n, N * elem_threads), elem_threads, 0, a->n, gate, up, (T*)a->h));
    else HS_TRY(HS_LAUNCH(s, (swiglu_kernel<T, 1>), (unsigned)HS_CEIL(a->n, elem_threads), elem_threads, 0, a->n, gate, up, (T*)a->h));
  })
  return HS_OK;
}

// d silu(g) / dg = s (1 + g (1 - s)), s = sigmoid(g).
template <class T, int N> __global__ void swiglu_bwd_kernel(int64_t n, const T* gate, const T* up, const T* dh, T* dgate, T* dup) {
  const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
  if (i >= n) return;
  const pack<T, N> g = load_pack<T, N>(gate + i), u = load_pack<T, N>(up + i), d = load_pack<T, N>(dh + i);
  pack<T, N> dg, du;
  for (int j = 0; j < N; j++) {
    const float x = to_f(g.v[j]), sg = sigmoid_f(x), dy = to_f(d.v[j]);
    dg.v[j] = from_f<T>(dy * to_f(u.v[j]) * (sg * (1 + x * (1 - sg))));
    du.v[j] = from_f<T>(dy * (x * sg));
  }
  store_pack<T, N>(dgate + i, dg);
  store_pack<T, N>(dup + i, du);
}
extern "C" hs_status hs_op_swiglu_bwd(cudaStream_t s, const hs_swiglu_bwd_args* a) {
  HS_NEED(a->n > 0, "n %lld, need > 0", (long long)a->n);
  HS_NEED_PTR(gate); HS_NEED_PTR(up); HS_NEED_PTR(dh); HS_NEED_PTR(dgate); HS_NEED_PTR(dup);
  HS_DISPATCH(a->dtype, T, {
    constexpr int N = pack_n<T>;
    const T *gate = (const T*)a->gate, *up = (const T*)a->up, *dh = (const T*)a->dh;
    T *dgate = (T*)a->dgate, *dup = (T*)a->dup;
    if (hs_packs(a->n, sizeof(T), gate, up, dh, dgate) && hs_packs(a->n, sizeof(T), dup))
      HS_TRY(HS_LAUNCH(s, (swiglu_bwd_kernel<T, N>), (unsigned)HS_CEIL(a->n, N * elem_threads), elem_threads, 0, a->n, gate, up, dh, dgate, dup));
    else HS_TRY(HS_LAUNCH(s, (swiglu_bwd_kernel<T, 1>), (unsigned)HS_CEIL(a->n, elem_threads), elem_threads, 0, a->n, gate, up, dh, dgate, dup));
  })
  return HS_OK;
}

// ---- RMSNorm (model.md 3.2): y = x * rstd * (1 + w) ----

// Columns i..i+N-1 of a row of D, zero past its end. packs = the row may be read in whole packs; the values are the same either way.
template <class T, int N> static __device__ __forceinline__ void load_cols(float out[N], const T* row, int64_t i, int64_t D, bool packs) {
  if (packs) {
    const pack<T, N> p = load_pack<T, N>(row + i);
    for (int j = 0; j < N; j++) out[j] = to_f(p.v[j]);
  } else {
    for (int j = 0; j < N; j++) out[j] = i + j < D ? to_f(row[i + j]) : 0.0f;
  }
}
template <class T, int N> static __device__ __forceinline__ void store_cols(T* row, int64_t i, int64_t D, bool packs, const float v[N]) {
  if (packs) {
    pack<T, N> p;
    for (int j = 0; j < N; j++) p.v[j] = from_f<T>(v[j]);
    store_pack<T, N>(row + i, p);
  } else {
    for (int j = 0; j < N && i + j < D; j++) row[i + j] = from_f<T>(v[j]);
  }
}
static int norm_block(int64_t D, int N) { return (int)HS_MIN(norm_threads, 32 * HS_CEIL(D, 32 * N)); }

template <class T> static __device__ __forceinline__ float rstd_of(const T* x, int64_t D, float eps, bool packs) {
  constexpr int N = pack_n<T>;
  float s = 0;
  for (int64_t i = (int64_t)threadIdx.x * N; i < D; i += (int64_t)blockDim.x * N) {
    float v[N];
    load_cols<T, N>(v, x, i, D, packs);
    for (int j = 0; j < N; j++) s += v[j] * v[j];
  }
  return 1.0f / sqrtf(block_sum(s) / (float)D + eps);
}

template <class T> __global__ void rmsnorm_kernel(int64_t D, float eps, const T* x, const T* w, T* y, float* rstd, bool packs) {
  constexpr int N = pack_n<T>;
  const int64_t t = blockIdx.x;
  x += t * D, y += t * D;
  const float r = rstd_of(x, D, eps, packs);
  if (rstd && threadIdx.x == 0) rstd[t] = r;
  for (int64_t i = (int64_t)threadIdx.x * N; i < D; i += (int64_t)blockDim.x * N) {
    float v[N], g[N];
    load_cols<T, N>(v, x, i, D, packs);
    load_cols<T, N>(g, w, i, D, packs);
    for (int j = 0; j < N; j++) v[j] = v[j] * r * (1 + g[j]);
    store_cols<T, N>(y, i, D, packs, v);
  }
}
extern "C" hs_status hs_op_rmsnorm(cudaStream_t s, const hs_rmsnorm_args* a) {
  HS_NEED_SHAPE(T, D);
  HS_NEED_PTR(x); HS_NEED_PTR(w); HS_NEED_PTR(y);
  HS_DISPATCH(a->dtype, T, {
    const bool packs = hs_packs(a->D, sizeof(T), a->x, a->w, a->y);
    HS_TRY(HS_LAUNCH(s, rmsnorm_kernel<T>, (unsigned)a->T, norm_block(a->D, pack_n<T>), 0, a->D, (float)a->eps, (const T*)a->x, (const T*)a->w, (T*)a->y,
                     (float*)a->rstd, packs));
  })
  return HS_OK;
}

// With n = x rstd and g = dy (1 + w): dx = rstd (g - n mean(n g)), dw = sum over rows of dy n. A block takes norm_rows rows in order and
// leaves its part of dw in part[block, D]; each thread owns the same columns in every row.
template <class T>
__global__ void rmsnorm_bwd_kernel(int64_t rows, int64_t D, float eps, bool add, const T* x, const T* w, const float* rstd, const T* dy, T* dx, float* part,
                                   bool packs) {
  constexpr int N = pack_n<T>;
  if (part) part += blockIdx.x * D; // 0: dw is not wanted
  const int64_t first = (int64_t)blockIdx.x * norm_rows, last = first + norm_rows < rows ? first + norm_rows : rows;
  for (int64_t t = first; t < last; t++) {
    const T *xt = x + t * D, *dyt = dy + t * D;
    const float r = rstd ? rstd[t] : rstd_of(xt, D, eps, packs);
    float s = 0;
    for (int64_t i = (int64_t)threadIdx.x * N; i < D; i += (int64_t)blockDim.x * N) {
      float v[N], g[N], d[N];
      load_cols<T, N>(v, xt, i, D, packs);
      load_cols<T, N>(g, w, i, D, packs);
      load_cols<T, N>(d, dyt, i, D, packs);
      for (int j = 0; j < N && i + j < D; j++) {
        const float n = v[j] * r;
        if (part) part[i + j] = (t == first ? 0.0f : part[i + j]) + d[j] * n;
        s += n * (d[j] * (1 + g[j]));
      }
    }
    const float mean = block_sum(s) / (float)D;
    for (int64_t i = (int64_t)threadIdx.x * N; i < D; i += (int64_t)blockDim.x * N) {
      float v[N], g[N], d[N];
      load_cols<T, N>(v, xt, i, D, packs);
      load_cols<T, N>(g, w, i, D, packs);
      load_cols<T, N>(d, dyt, i, D, packs);
      for (int j = 0; j < N; j++) v[j] = r * (d[j] * (1 + g[j]) - v[j] * r * mean);
      if (add) {
        load_cols<T, N>(d, dx + t * D, i, D, packs);
        for (int j = 0; j < N; j++) v[j] += d[j];
      }
      store_cols<T, N>(dx + t * D, i, D, packs, v);
    }
  }
}
extern "C" int64_t hs_ws_rmsnorm_bwd(const hs_rmsnorm_bwd_args* a) { return a->T > 0 && a->D > 0 ? HS_CEIL(a->T, norm_rows) * a->D * 4 : 0; }
extern "C" hs_status hs_op_rmsnorm_bwd(cudaStream_t s, const hs_rmsnorm_bwd_args* a) {
  HS_NEED_SHAPE(T, D);
  HS_NEED_PTR(x); HS_NEED_PTR(w); HS_NEED_PTR(dy); HS_NEED_PTR(dx);
  HS_NEED_WS(hs_ws_rmsnorm_bwd(a));
  const int64_t blocks = HS_CEIL(a->T, norm_rows);
  HS_DISPATCH(a->dtype, T, {
    const bool packs = hs_packs(a->D, sizeof(T), a->x, a->w, a->dy, a->dx);
    HS_TRY(HS_LAUNCH(s, rmsnorm_bwd_kernel<T>, (unsigned)blocks, norm_block(a->D, pack_n<T>), 0, a->T, a->D, (float)a->eps, (a->flags & HS_ACC_DX) != 0,
                     (const T*)a->x, (const T*)a->w, (const float*)a->rstd, (const T*)a->dy, (T*)a->dx, a->dw ? (float*)a->ws : (float*)0, packs));
  })
  if (!a->dw) return HS_OK;
  return hs_add_parts(s, blocks, a->D, (const float*)a->ws, (float*)a->dw);
}

// dw[j] += the parts of column j, in order.
static __global__ void add_parts_kernel(int64_t parts, int64_t D, const float* part, float* dw) {
  const int64_t j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= D) return;
  float s = 0;
  for (int64_t b = 0; b < parts; b++) s += part[b * D + j];
  dw[j] += s;
}
hs_status hs_add_parts(cudaStream_t s, int64_t parts, int64_t D, const float* part, float* dw) {
  return HS_LAUNCH(s, add_parts_kernel, (unsigned)HS_CEIL(D, 128), 128, 0, parts, D, part, dw);
}
