// gdn.cu - the gated delta rule, forward over a forest and one row of decode (model.md 3.5), and its recurrent form: f32, and bf16 where
// hs_gdn_ring (abi.h) does not hold; the canonical chunks of the other shapes are in gdn_chunk.cu and gdn_step.cu.
//
// A thread owns a column of a head's state S [dk, dv] and carries it in registers through all rows of a segment: nothing is summed across threads,
// so the arithmetic of a row is one sequence of operations, gdn_row, and training, prefill in any split and decode give the same bits. One pass
// decays S in place and gives r = S^T k and p = S^T q, a second one writes:  d = beta (v - r),  S += k d,  o = p + (k.q) d.
// Each sum runs in four interleaved chains. Forward: a block of up to 128 columns takes one (segment, head) at a time in ticket order and a child
// waits for its parent's final state; rows come in tiles of 16 through shared memory, the next one by cp.async behind the arithmetic.
// Shapes: f32 with dk = dv = 16, 32, 64, 128 in registers; any other dk up to 256 and any dv in shared memory, 32 columns a block, same order of operations.
// H200: forward 4 FMA-pipe operations per element of S and row: 77 ns a row and layer of 32 heads of 128x128 when all schedulers have a warp
// (8 segments at least), 1.3 ms per 16k rows against a floor of 0.24 ms for the chunked form (gpu.md 6.4). Decode moves S in and out once:
// floor 62 us a layer at batch 64 (gpu.md 6.5), expected 1.2x. Unmeasured.
#include "ring.cuh"

static const int gdn_rows = 16, gdn_cols = 128;

// One thread's column: in registers, or (DK = 0) at `at` of the block's shared array [dk up to a multiple of 4, 32].
template <int DK> struct column {
  float x[DK];
  __device__ __forceinline__ column(float*) {}
  __device__ __forceinline__ float& operator()(int i) { return x[i]; }
};
template <> struct column<0> {
  float* x;
  __device__ __forceinline__ column(float* at) : x(at) {}
  __device__ __forceinline__ float& operator()(int i) { return x[32 * i]; }
};

static __host__ __device__ constexpr int up4(int n) { return (n + 3) & ~3; }

// ---- one row ----

// k.q in four chains. k, q: rows in shared memory, zero past dk up to a multiple of 4.
static __device__ __forceinline__ float gdn_kq(const float* k, const float* q, int dk) {
  float s[4] = {0, 0, 0, 0};
  for (int i = 0; i < dk; i += 4) {
    const pack<float, 4> a = load_pack<float, 4>(k + i), b = load_pack<float, 4>(q + i);
#pragma unroll
    for (int c = 0; c < 4; c++) s[c] = __fmaf_rn(a.v[c], b.v[c], s[c]);
  }
  return __fadd_rn(__fadd_rn(s[0], s[1]), __fadd_rn(s[2], s[3]));
}
template <int DK>
static __device__ __forceinline__ float gdn_row(column<DK>& s, int dk, const float* k, const float* q, float kq, float al, float beta, float v) {
  const int n = DK ? DK : dk;
  float r[4] = {0, 0, 0, 0}, p[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < n; i += 4) {
    const pack<float, 4> a = load_pack<float, 4>(k + i), b = load_pack<float, 4>(q + i);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const float x = __fmul_rn(al, s(i + c));
      s(i + c) = x;
      r[c] = __fmaf_rn(x, a.v[c], r[c]);
      p[c] = __fmaf_rn(x, b.v[c], p[c]);
    }
  }
  const float rs = __fadd_rn(__fadd_rn(r[0], r[1]), __fadd_rn(r[2], r[3])), ps = __fadd_rn(__fadd_rn(p[0], p[1]), __fadd_rn(p[2], p[3]));
  const float d = __fmul_rn(beta, __fsub_rn(v, rs));
#pragma unroll
  for (int i = 0; i < n; i += 4) {
    const pack<float, 4> a = load_shared_again(k + i);   // beside the column there is no room for it
#pragma unroll
    for (int c = 0; c < 4; c++) s(i + c) = __fmaf_rn(a.v[c], d, s(i + c));
  }
  return __fmaf_rn(kq, d, ps);
}
// Moves a column between S and memory [dk, dv]. A stride known to the compiler keeps 128 addresses out of the registers.
template <int DK> static __device__ __forceinline__ void column_in(column<DK>& s, int dk, const float* src, int64_t dv) {
  const int n = DK ? DK : dk;
#pragma unroll
  for (int i = 0; i < n; i++) s(i) = src ? __ldcg(src + i * (DK ? DK : dv)) : 0.0f;
  if (!DK)
    for (int i = n; i < up4(n); i++) s(i) = 0;
}
template <int DK> static __device__ __forceinline__ void column_out(column<DK>& s, int dk, float* dst, int64_t dv) {
  const int n = DK ? DK : dk;
#pragma unroll
  for (int i = 0; i < n; i++) dst[i * (DK ? DK : dv)] = s(i);
}

// ---- forward ----

// Shared memory of a block, in floats (elements for the staged rows).
struct gdn_smem {
  int ldk, cols;   // row strides of k, q and of v
  int64_t k, q, v, gate, state, stage, bytes;
  template <class T> static gdn_smem of(int dk, int cols, bool state_in_regs) {
    gdn_smem m;
    m.ldk = up4(dk) + 4, m.cols = cols;
    m.k = 0, m.q = m.k + gdn_rows * m.ldk, m.v = m.q + gdn_rows * m.ldk, m.gate = m.v + gdn_rows * cols;
    m.state = m.gate + 3 * gdn_rows, m.stage = m.state + (state_in_regs ? 0 : up4(dk) * 32);
    m.bytes = m.stage * 4 + hs_align((int64_t)gdn_rows * (2 * dk + cols) * sizeof(T)) + 16;
    return m;
  }
};
struct gdn_shape { int64_t nk, dk, nv, dv; int groups; bool packs; };

// Copies n elements of each of `rows` rows into the stage, by cp.async when rows are whole 16-byte packs.
template <class T> static __device__ __forceinline__ void stage_rows(T* dst, int ld, const T* src, int64_t stride, int rows, int n, bool packs) {
  if (packs) {
    constexpr int P = pack_n<T>;
    const int per = n / P;
    for (int i = threadIdx.x; i < rows * per; i += blockDim.x) cp_async16(dst + i / per * ld + i % per * P, src + i / per * stride + i % per * P);
  } else {
    for (int i = threadIdx.x; i < rows * n; i += blockDim.x) dst[i / n * ld + i % n] = src[i / n * stride + i % n];
  }
}
// stage -> float rows; columns n.. up to a multiple of 4 are zero.
template <class T> static __device__ __forceinline__ void widen_rows(float* dst, int ld, const T* src, int lds, int rows, int n) {
  const int w = up4(n);
  for (int i = threadIdx.x; i < rows * w; i += blockDim.x) dst[i / w * ld + i % w] = i % w < n ? to_f(src[i / w * lds + i % w]) : 0.0f;
}

template <class T, int DK>
__global__ void __launch_bounds__(gdn_cols)
    gdn_kernel(gdn_shape z, gdn_smem m, hs_forest f, const T* q, const T* k, const T* v, const float* beta, const float* g, T* o, float* states, float* rec, int* line) {
  HS_DYN_SHARED(float, sh);
  const int ticket = line_ticket(line), grp = ticket % z.groups, dk = (int)z.dk, n = m.cols;
  const int64_t h = ticket / z.groups % z.nv, s = ticket / z.groups / z.nv, hk = h / (z.nv / z.nk), ss = z.dk * z.dv;
  const int col = threadIdx.x, c0 = grp * n, width = (int)min((int64_t)n, z.dv - c0);
  const bool mine = col < width;
  const int32_t par = f.parent[s], slot = f.slot[s], len = f.len[s];
  float *kf = sh + m.k, *qf = sh + m.q, *vf = sh + m.v, *al = sh + m.gate, *be = al + gdn_rows, *kq = be + gdn_rows;
  T *ks = (T*)(sh + m.stage), *qs = ks + gdn_rows * dk, *vs = qs + gdn_rows * dk;
  const int64_t row0 = f.start[s];
  auto stage = [&](int at) {
    const int rows = min(gdn_rows, len - at);
    const int64_t row = row0 + at;
    stage_rows(ks, dk, k + (row * z.nk + hk) * dk, z.nk * dk, rows, dk, z.packs);
    stage_rows(qs, dk, q + (row * z.nk + hk) * dk, z.nk * dk, rows, dk, z.packs);
    stage_rows(vs, n, v + (row * z.nv + h) * z.dv + c0, z.nv * z.dv, rows, width, z.packs);
    cp_async_commit();
  };
  stage(0);
  if (par >= 0) {
    line_wait(line, (int)((par * z.nv + h) * z.groups + grp));
    __syncthreads();
  }
  column<DK> S(sh + m.state + col);
  const int64_t cell = h * ss + c0 + col;
  column_in<DK>(S, dk, !mine ? 0 : par >= 0 ? states + (f.nchunks + par) * z.nv * ss + cell : slot >= 0 ? rec + slot * z.nv * ss + cell : 0, z.dv);
  for (int at = 0; at < len; at += gdn_rows) {
    const int rows = min(gdn_rows, len - at);
    cp_async_wait<0>();
    __syncthreads();
    widen_rows(kf, m.ldk, ks, dk, rows, dk);
    widen_rows(qf, m.ldk, qs, dk, rows, dk);
    for (int i = threadIdx.x; i < rows * n; i += blockDim.x) vf[i] = i % n < width ? to_f(vs[i]) : 0.0f;
    if (col < rows) {
      const int64_t i = (row0 + at + col) * z.nv + h;
      al[col] = expf(g[i]), be[col] = beta[i];
    }
    __syncthreads();
    if (at + gdn_rows < len) stage(at + gdn_rows);
    if (col < rows) kq[col] = gdn_kq(kf + col * m.ldk, qf + col * m.ldk, dk);
    __syncthreads();
    if (!mine) continue;
    if (states && at % HS_GDN_CHUNK == 0) column_out<DK>(S, dk, states + (f.chunk_off[s] + at / HS_GDN_CHUNK) * z.nv * ss + cell, z.dv);
    T* out = o + ((row0 + at) * z.nv + h) * z.dv + c0 + col;
#pragma unroll 1
    for (int i = 0; i < rows; i++, out += z.nv * z.dv)
      *out = from_f<T>(gdn_row<DK>(S, dk, kf + i * m.ldk, qf + i * m.ldk, kq[i], al[i], be[i], vf[i * n + col]));
  }
  if (mine && states) column_out<DK>(S, dk, states + (f.nchunks + s) * z.nv * ss + cell, z.dv);
  if (mine && slot >= 0) column_out<DK>(S, dk, rec + slot * z.nv * ss + cell, z.dv);
  line_done(line, (int)((s * z.nv + h) * z.groups + grp));
}

// Whether columns live in registers, and columns per block. With bf16 such shapes are canonical, and kernels of T keep `held` rows there.
template <class A> static bool gdn_regs(const A* a) { return a->dtype == HS_F32 && a->dk == a->dv && (a->dk == 16 || a->dk == 32 || a->dk == 64 || a->dk == 128); }
template <class A> static int gdn_block(const A* a) { return gdn_regs(a) ? (int)HS_MAX(a->dv, 32) : 32; }
template <class T> static constexpr int held(int dk) { return sizeof(T) == 4 ? dk : 0; }
#define GDN_PICK(go, kernel) \
  (!gdn_regs(a) ? go((kernel<T, 0>)) : a->dk == 128 ? go((kernel<T, held<T>(128)>)) : a->dk == 64 ? go((kernel<T, held<T>(64)>)) \
   : a->dk == 32 ? go((kernel<T, held<T>(32)>)) : go((kernel<T, held<T>(16)>)))

static int64_t gdn_items(const hs_gdn_args* a) { return (int64_t)a->f.nseg * a->nv * (hs_gdn_ring(a->dtype, a->dk, a->dv) ? 1 : HS_CEIL(a->dv, gdn_block(a))); }
extern "C" int64_t hs_ws_gdn(const hs_gdn_args* a) { return a->f.nseg > 0 && a->nv > 0 && a->dv > 0 ? line_bytes(gdn_items(a)) : 0; }
extern "C" hs_status hs_op_gdn(cudaStream_t s, const hs_gdn_args* a) {
  HS_TRY(delta_check(a, a->T));
  HS_TRY(forest_check(a->f, a->T));
  HS_NEED_PTR(q); HS_NEED_PTR(k); HS_NEED_PTR(v); HS_NEED_PTR(beta); HS_NEED_PTR(g); HS_NEED_PTR(o);
  HS_NEED_WS(hs_ws_gdn(a));
  const int cols = gdn_block(a);
  HS_NEED(gdn_items(a) < INT32_MAX, "%d segments of %lld heads: too many blocks", (int)a->f.nseg, (long long)a->nv);
  HS_TRY(hs_memset(s, a->ws, 0, (size_t)line_bytes(gdn_items(a))));
  if (hs_gdn_ring(a->dtype, a->dk, a->dv)) return delta_chunks(s, a);
  HS_DISPATCH(a->dtype, T, {
    const gdn_shape z = {a->nk, a->dk, a->nv, a->dv, (int)HS_CEIL(a->dv, cols), hs_packs(a->dk, sizeof(T), a->q, a->k) && hs_packs(a->dv, sizeof(T), a->v)};
    auto go = [&](auto kernel) {
      const gdn_smem m = gdn_smem::of<T>((int)a->dk, cols, gdn_regs(a));
      return HS_LAUNCH(s, kernel, (unsigned)gdn_items(a), cols, (size_t)m.bytes, z, m, a->f, (const T*)a->q, (const T*)a->k, (const T*)a->v, (const float*)a->beta,
                       (const float*)a->g, (T*)a->o, (float*)a->states, (float*)a->rec_state, (int*)a->ws);
    };
    HS_TRY(GDN_PICK(go, gdn_kernel));
  })
  return HS_OK;
}

// ---- one row of decode ----

template <class T, int DK>
__global__ void __launch_bounds__(gdn_cols)
    gdn_step_kernel(gdn_shape z, const int32_t* slot, const T* q, const T* k, const T* v, const float* beta, const float* g, T* o, float* rec) {
  HS_DYN_SHARED(float, sh);
  const int dk = (int)z.dk, w = up4(dk), grp = blockIdx.x % z.groups;
  const int64_t h = blockIdx.x / z.groups % z.nv, b = blockIdx.x / z.groups / z.nv, hk = h / (z.nv / z.nk), j = (int64_t)grp * blockDim.x + threadIdx.x;
  const bool mine = j < z.dv;
  float *kf = sh, *qf = kf + w, *kq = qf + w;
  column<DK> S(sh + 2 * w + 4 + threadIdx.x);
  float* st = rec + ((int64_t)slot[b] * z.nv + h) * z.dk * z.dv + j;
  column_in<DK>(S, dk, mine ? st : 0, z.dv);
  for (int i = threadIdx.x; i < w; i += blockDim.x) {
    kf[i] = i < dk ? to_f(k[(b * z.nk + hk) * dk + i]) : 0.0f;
    qf[i] = i < dk ? to_f(q[(b * z.nk + hk) * dk + i]) : 0.0f;
  }
  const float al = expf(g[b * z.nv + h]), be = beta[b * z.nv + h];
  __syncthreads();
  if (threadIdx.x == 0) kq[0] = gdn_kq(kf, qf, dk);
  __syncthreads();
  if (!mine) return;
  const int64_t at = (b * z.nv + h) * z.dv + j;
  o[at] = from_f<T>(gdn_row<DK>(S, dk, kf, qf, kq[0], al, be, to_f(v[at])));
  column_out<DK>(S, dk, st, z.dv);
}
extern "C" hs_status hs_op_gdn_step(cudaStream_t s, const hs_gdn_step_args* a) {
  HS_TRY(delta_check(a, a->B));
  HS_NEED_PTR(slot); HS_NEED_PTR(q); HS_NEED_PTR(k); HS_NEED_PTR(v); HS_NEED_PTR(beta); HS_NEED_PTR(g); HS_NEED_PTR(o); HS_NEED_PTR(rec_state);
  if (hs_gdn_ring(a->dtype, a->dk, a->dv)) return delta_step(s, a);
  const int cols = gdn_block(a);
  const gdn_shape z = {a->nk, a->dk, a->nv, a->dv, (int)HS_CEIL(a->dv, cols), false};
  HS_DISPATCH(a->dtype, T, {
    auto go = [&](auto kernel) {
      const int64_t w = up4((int)a->dk), smem = (2 * w + 4 + (gdn_regs(a) ? 0 : w * 32)) * 4;
      return HS_LAUNCH(s, kernel, (unsigned)(a->B * a->nv * z.groups), cols, (size_t)smem, z, a->slot, (const T*)a->q, (const T*)a->k, (const T*)a->v, (const float*)a->beta,
                       (const float*)a->g, (T*)a->o, (float*)a->rec_state);
    };
    HS_TRY(GDN_PICK(go, gdn_step_kernel));
  })
  return HS_OK;
}
