// attn_prep.cu - around attention (model.md 3.9): q/k RMSNorm with partial RoPE, the output gate, both with their backward.
//
// prep      a block per packed row, a warp per head: the row is staged in shared memory as f32, so that a RoPE pair (j, j + rot/2) may
//           lie in two lanes. Angles are turns in double, reduced exactly before sin and cos. Floor on an H200: 20 heads x 256 read and
//           written, about 40 KB per token, 0.15 ms per 16k tokens at 4.3 TB/s; the same traffic as the floor, so expected near it
//           (unmeasured).
// prep_bwd  a block per prep_rows rows; each warp sums its heads' dw in shared memory, warps and blocks are added in order.
// gate      one thread per 16 bytes. Floor: o, gate in, y out: 0.1 ms per 16k tokens (unmeasured).
// Any hd up to max_hd, any even rot up to hd. Which lane sums which column depends on hd alone.
#include "common.cuh"

static const int prep_warps = 8, prep_rows = 32, gate_threads = 128;
static const int64_t max_hd = 1024;

// Columns i..i+N-1 of a row of n, zero past its end; packs = whole packs may be read.
template <class T, int N> static __device__ __forceinline__ void read_cols(float out[N], const T* row, int i, int n, bool packs) {
  if (packs) {
    const pack<T, N> p = load_pack<T, N>(row + i);
    for (int j = 0; j < N; j++) out[j] = to_f(p.v[j]);
  } else {
    for (int j = 0; j < N; j++) out[j] = i + j < n ? to_f(row[i + j]) : 0.0f;
  }
}
template <class T, int N> static __device__ __forceinline__ void write_cols(T* row, int i, int n, bool packs, const float v[N]) {
  if (packs) {
    pack<T, N> p;
    for (int j = 0; j < N; j++) p.v[j] = from_f<T>(v[j]);
    store_pack<T, N>(row + i, p);
  } else {
    for (int j = 0; j < N && i + j < n; j++) row[i + j] = from_f<T>(v[j]);
  }
}

// ---- q/k norm and RoPE ----

struct prep_shape {
  int64_t T, nh, nkv;
  int hd, rot;
  double theta;
  float eps;
};
template <class T> struct prep_in { const T *qg, *kin, *wq, *wk; };

// cos and sin of pos theta^(-2j/rot), j < rot/2, by all threads of the block. In turns, so that the reduction is a subtraction.
static __device__ void rope_table(const prep_shape& p, int32_t pos, float* cs, float* sn) {
  for (int j = threadIdx.x; j < p.rot / 2; j += blockDim.x) {
    const double turns = (double)pos * (pow(p.theta, -2.0 * j / p.rot) * 0.15915494309189535);   // 1 / (2 pi)
    double s, c;
    sincospi(2 * (turns - rint(turns)), &s, &c);
    cs[j] = (float)c, sn[j] = (float)s;
  }
}

// Stages a head in shared memory and returns 1 / rms.
template <class T> static __device__ __forceinline__ float stage_head(const T* x, float* row, int hd, float eps, bool packs) {
  constexpr int N = pack_n<T>;
  float s = 0;
  for (int i = (threadIdx.x & 31) * N; i < hd; i += 32 * N) {
    float v[N];
    read_cols<T, N>(v, x, i, hd, packs);
    for (int j = 0; j < N && i + j < hd; j++) {
      row[i + j] = v[j];
      s += v[j] * v[j];
    }
  }
  return 1.0f / sqrtf(warp_sum(s) / (float)hd + eps);
}

template <class T>
static __device__ void prep_head(const prep_shape& p, const T* x, const T* w, T* y, float* row, const float* cs, const float* sn, bool packs) {
  constexpr int N = pack_n<T>;
  const int half = p.rot / 2;
  const float r = stage_head(x, row, p.hd, p.eps, packs);
  __syncwarp();
  for (int i = (threadIdx.x & 31) * N; i < p.hd; i += 32 * N) {
    float v[N];
    for (int e = 0; e < N && i + e < p.hd; e++) {
      const int j = i + e;
      v[e] = row[j] * r * (1 + to_f(w[j]));
      if (j >= p.rot) continue;
      const int k = j < half ? j + half : j - half, a = j < half ? j : k;
      const float u = row[k] * r * (1 + to_f(w[k]));
      v[e] = j < half ? v[e] * cs[a] - u * sn[a] : v[e] * cs[a] + u * sn[a];
    }
    write_cols<T, N>(y, i, p.hd, packs, v);
  }
  __syncwarp();
}

template <class T> __global__ void attnprep_kernel(prep_shape p, const int32_t* rope_pos, prep_in<T> in, T* q, T* k, bool packs) {
  HS_DYN_SHARED(float, smem);
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  float *cs = smem, *sn = cs + p.rot / 2, *row = sn + p.rot / 2 + warp * p.hd;
  const int64_t t = blockIdx.x;
  rope_table(p, rope_pos[t], cs, sn);
  __syncthreads();
  for (int64_t h = warp; h < p.nh; h += warps) prep_head(p, in.qg + (t * p.nh + h) * 2 * p.hd, in.wq, q + (t * p.nh + h) * p.hd, row, cs, sn, packs);
  for (int64_t h = warp; h < p.nkv; h += warps) prep_head(p, in.kin + (t * p.nkv + h) * p.hd, in.wk, k + (t * p.nkv + h) * p.hd, row, cs, sn, packs);
}

static int prep_block(int64_t nh, int64_t nkv) { return (int)(32 * HS_MIN(prep_warps, HS_MAX(nh, nkv))); }

template <class A> static hs_status prep_check(const A* a) {
  HS_NEED(a->T >= 1 && a->nh >= 0 && a->nkv >= 0 && a->nh + a->nkv >= 1 && a->hd >= 1, "T %lld, nh %lld, nkv %lld, hd %lld: need rows and heads", (long long)a->T,
          (long long)a->nh, (long long)a->nkv, (long long)a->hd);
  HS_NEED(a->hd <= max_hd, "hd %lld > %lld", (long long)a->hd, (long long)max_hd);
  HS_NEED(a->rot >= 0 && a->rot % 2 == 0 && a->rot <= a->hd, "rot %lld must be even and at most hd %lld", (long long)a->rot, (long long)a->hd);
  HS_NEED(a->rot == 0 || a->theta > 0, "theta %g must be positive", a->theta);
  HS_NEED_PTR(rope_pos);
  return HS_OK;
}

extern "C" hs_status hs_op_attnprep(cudaStream_t s, const hs_attnprep_args* a) {
  HS_TRY(prep_check(a));
  if (a->nh) { HS_NEED_PTR(qg); HS_NEED_PTR(wq); HS_NEED_PTR(q); }
  if (a->nkv) { HS_NEED_PTR(kin); HS_NEED_PTR(wk); HS_NEED_PTR(k); }
  const prep_shape p = {a->T, a->nh, a->nkv, (int)a->hd, (int)a->rot, a->theta, (float)a->eps};
  const int block = prep_block(a->nh, a->nkv);
  const size_t smem = (size_t)(a->rot + block / 32 * a->hd) * 4;
  HS_DISPATCH(a->dtype, T, {
    const prep_in<T> in = {(const T*)a->qg, (const T*)a->kin, (const T*)a->wq, (const T*)a->wk};
    const bool packs = hs_packs(a->hd, sizeof(T), in.qg, in.kin, a->q, a->k);
    HS_TRY(HS_LAUNCH(s, attnprep_kernel<T>, (unsigned)a->T, block, smem, p, a->rope_pos, in, (T*)a->q, (T*)a->k, packs));
  })
  return HS_OK;
}

// With n = x rstd, d = the incoming gradient turned back, u = d (1 + w): dw += d n, dx = rstd (u - n mean(n u)).
template <class T>
static __device__ void prep_head_bwd(const prep_shape& p, const T* x, const T* w, const T* dy, T* dx, float* row, float* dw, const float* cs, const float* sn,
                                     bool packs) {
  constexpr int N = pack_n<T>;
  const int half = p.rot / 2, lane = threadIdx.x & 31;
  const float r = stage_head(x, row, p.hd, p.eps, packs);
  float* g = row + p.hd;
  for (int i = lane * N; i < p.hd; i += 32 * N) {
    float v[N];
    read_cols<T, N>(v, dy, i, p.hd, packs);
    for (int e = 0; e < N && i + e < p.hd; e++) g[i + e] = v[e];
  }
  __syncwarp();
  auto turned = [&](int j) {
    if (j >= p.rot) return g[j];
    return j < half ? g[j] * cs[j] + g[j + half] * sn[j] : g[j] * cs[j - half] - g[j - half] * sn[j - half];
  };
  float s = 0;
  for (int i = lane * N; i < p.hd; i += 32 * N)
    for (int j = i; j < i + N && j < p.hd; j++) {
      const float n = row[j] * r, d = turned(j);
      dw[j] += d * n;
      s += n * (d * (1 + to_f(w[j])));
    }
  const float mean = warp_sum(s) / (float)p.hd;
  for (int i = lane * N; i < p.hd; i += 32 * N) {
    float v[N];
    for (int j = i; j < i + N && j < p.hd; j++) v[j - i] = r * (turned(j) * (1 + to_f(w[j])) - row[j] * r * mean);
    write_cols<T, N>(dx, i, p.hd, packs, v);
  }
  __syncwarp();
}

// part: [2][blocks, hd], dwq's then dwk's.
template <class T>
__global__ void attnprep_bwd_kernel(prep_shape p, const int32_t* rope_pos, prep_in<T> in, const T* dq, const T* dk, T* dqg, T* dkin, float* part, bool packs) {
  HS_DYN_SHARED(float, smem);
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, hd = p.hd;
  float *cs = smem, *sn = cs + p.rot / 2, *sums = sn + p.rot / 2, *dwq = sums + warp * 2 * hd, *dwk = dwq + hd, *row = sums + (warps + warp) * 2 * hd;
  for (int i = threadIdx.x; i < warps * 2 * hd; i += blockDim.x) sums[i] = 0;
  const int64_t first = (int64_t)blockIdx.x * prep_rows, last = first + prep_rows < p.T ? first + prep_rows : p.T;
  for (int64_t t = first; t < last; t++) {
    __syncthreads();
    rope_table(p, rope_pos[t], cs, sn);
    __syncthreads();
    for (int64_t h = warp; h < p.nh; h += warps)
      prep_head_bwd(p, in.qg + (t * p.nh + h) * 2 * hd, in.wq, dq + (t * p.nh + h) * hd, dqg + (t * p.nh + h) * 2 * hd, row, dwq, cs, sn, packs);
    for (int64_t h = warp; h < p.nkv; h += warps)
      prep_head_bwd(p, in.kin + (t * p.nkv + h) * hd, in.wk, dk + (t * p.nkv + h) * hd, dkin + (t * p.nkv + h) * hd, row, dwk, cs, sn, packs);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * hd; i += blockDim.x) {
    float s = sums[i];
    for (int w = 1; w < warps; w++) s += sums[w * 2 * hd + i];
    part[((int64_t)(i / hd) * gridDim.x + blockIdx.x) * hd + i % hd] = s;
  }
}
extern "C" int64_t hs_ws_attnprep_bwd(const hs_attnprep_bwd_args* a) { return a->T > 0 && a->hd > 0 ? 2 * HS_CEIL(a->T, prep_rows) * a->hd * 4 : 0; }
extern "C" hs_status hs_op_attnprep_bwd(cudaStream_t s, const hs_attnprep_bwd_args* a) {
  HS_TRY(prep_check(a));
  if (a->nh) { HS_NEED_PTR(qg); HS_NEED_PTR(wq); HS_NEED_PTR(dq); HS_NEED_PTR(dqg); }
  if (a->nkv) { HS_NEED_PTR(kin); HS_NEED_PTR(wk); HS_NEED_PTR(dk); HS_NEED_PTR(dkin); }
  HS_NEED_WS(hs_ws_attnprep_bwd(a));
  const prep_shape p = {a->T, a->nh, a->nkv, (int)a->hd, (int)a->rot, a->theta, (float)a->eps};
  const int64_t blocks = HS_CEIL(a->T, prep_rows);
  const int block = prep_block(a->nh, a->nkv);
  const size_t smem = (size_t)(a->rot + block / 32 * 4 * a->hd) * 4;
  float* part = (float*)a->ws;
  HS_DISPATCH(a->dtype, T, {
    const prep_in<T> in = {(const T*)a->qg, (const T*)a->kin, (const T*)a->wq, (const T*)a->wk};
    const bool packs = hs_packs(a->hd, sizeof(T), in.qg, in.kin, a->dq, a->dk) && hs_packs(a->hd, sizeof(T), a->dqg, a->dkin);
    HS_TRY(HS_LAUNCH(s, attnprep_bwd_kernel<T>, (unsigned)blocks, block, smem, p, a->rope_pos, in, (const T*)a->dq, (const T*)a->dk, (T*)a->dqg, (T*)a->dkin, part,
                     packs));
  })
  if (a->nh && a->dwq) HS_TRY(hs_add_parts(s, blocks, a->hd, part, (float*)a->dwq));
  if (a->nkv && a->dwk) HS_TRY(hs_add_parts(s, blocks, a->hd, part + blocks * a->hd, (float*)a->dwk));
  return HS_OK;
}

// ---- output gate: a block column per row, N columns of [nh*hd] per thread; a pack lies in one head ----

template <class T, int N> __global__ void gate_kernel(int cols, int hd, const T* o, const T* qg, T* y) {
  const int c = (int)(blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (c >= cols) return;
  const int64_t i = (int64_t)blockIdx.x * cols + c, at = 2 * (i - c % hd) + hd + c % hd;
  const pack<T, N> x = load_pack<T, N>(o + i), g = load_pack<T, N>(qg + at);
  pack<T, N> out;
  for (int j = 0; j < N; j++) out.v[j] = from_f<T>(to_f(x.v[j]) * sigmoid_f(to_f(g.v[j])));
  store_pack<T, N>(y + i, out);
}
template <class T, int N> __global__ void gate_bwd_kernel(int cols, int hd, const T* o, const T* qg, const T* dy, T* dout, T* dqg) {
  const int c = (int)(blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (c >= cols) return;
  const int64_t i = (int64_t)blockIdx.x * cols + c, at = 2 * (i - c % hd) + hd + c % hd;
  const pack<T, N> x = load_pack<T, N>(o + i), g = load_pack<T, N>(qg + at), d = load_pack<T, N>(dy + i);
  pack<T, N> dx, dg;
  for (int j = 0; j < N; j++) {
    const float sg = sigmoid_f(to_f(g.v[j])), u = to_f(d.v[j]) * sg;
    dx.v[j] = from_f<T>(u);
    dg.v[j] = from_f<T>(u * to_f(x.v[j]) * (1 - sg));
  }
  store_pack<T, N>(dout + i, dx);
  store_pack<T, N>(dqg + at, dg);
}
static hs_status gate_check(int64_t T, int64_t nh, int64_t hd) {
  HS_NEED(T >= 1 && nh >= 1 && hd >= 1 && nh * hd <= 1 << 24, "T %lld, nh %lld, hd %lld: all must be positive, nh*hd at most 2^24", (long long)T, (long long)nh, (long long)hd);
  return HS_OK;
}
static int gate_block(int64_t cols, int N) { return (int)HS_MIN(gate_threads, 32 * HS_CEIL(cols, 32 * N)); }
static dim3 gate_grid(int64_t T, int64_t cols, int N) { return dim3((unsigned)T, (unsigned)HS_CEIL(cols, N * gate_block(cols, N))); }

extern "C" hs_status hs_op_gate(cudaStream_t s, const hs_gate_args* a) {
  HS_TRY(gate_check(a->T, a->nh, a->hd));
  HS_NEED_PTR(o); HS_NEED_PTR(qg); HS_NEED_PTR(y);
  const int64_t cols = a->nh * a->hd;
  HS_DISPATCH(a->dtype, T, {
    constexpr int N = pack_n<T>;
    const T *o = (const T*)a->o, *qg = (const T*)a->qg;
    if (hs_packs(a->hd, sizeof(T), o, qg, a->y))
      HS_TRY(HS_LAUNCH(s, (gate_kernel<T, N>), gate_grid(a->T, cols, N), gate_block(cols, N), 0, (int)cols, (int)a->hd, o, qg, (T*)a->y));
    else HS_TRY(HS_LAUNCH(s, (gate_kernel<T, 1>), gate_grid(a->T, cols, 1), gate_block(cols, 1), 0, (int)cols, (int)a->hd, o, qg, (T*)a->y));
  })
  return HS_OK;
}
extern "C" hs_status hs_op_gate_bwd(cudaStream_t s, const hs_gate_bwd_args* a) {
  HS_TRY(gate_check(a->T, a->nh, a->hd));
  HS_NEED_PTR(o); HS_NEED_PTR(qg); HS_NEED_PTR(dy); HS_NEED_PTR(do_); HS_NEED_PTR(dqg);
  const int64_t cols = a->nh * a->hd;
  HS_DISPATCH(a->dtype, T, {
    constexpr int N = pack_n<T>;
    const T *o = (const T*)a->o, *qg = (const T*)a->qg, *dy = (const T*)a->dy;
    T *dout = (T*)a->do_, *dqg = (T*)a->dqg;
    if (hs_packs(a->hd, sizeof(T), o, qg, dy, dout) && hs_packs(a->hd, sizeof(T), dqg))
      HS_TRY(HS_LAUNCH(s, (gate_bwd_kernel<T, N>), gate_grid(a->T, cols, N), gate_block(cols, N), 0, (int)cols, (int)a->hd, o, qg, dy, dout, dqg));
    else HS_TRY(HS_LAUNCH(s, (gate_bwd_kernel<T, 1>), gate_grid(a->T, cols, 1), gate_block(cols, 1), 0, (int)cols, (int)a->hd, o, qg, dy, dout, dqg));
  })
  return HS_OK;
}
