// loss.cu - log-probs and entropy of targets under the LM head, and their gradient. Full logits are never stored: waves of `chunk` targets.
//
// Forward   gather the wave's rows of x, then product and row pass in one (head.cu); in float32 the wave's logits are stored. The bits of log-prob
//           and entropy are those of lmhead_sample for the same rows, and of a gemm of them with HS_C_F32 followed by sample.
// Backward  the logits again, stored; in place, dz_v = (sum_i dlogp_i ([v = target_i] - p_v) - sum_i dent_i p_v (ln p_v + H)) / temperature in
//           the storage type; dx = dz W in f32, added to its row with one rounding; dW += dz^T x in f32. Adjacent targets with the same row are
//           a run, summed into the dz of its first target, whatever wave the others fall into: theirs is zero and adds nothing.
//
// Floor on an H200 for 16k targets, V 248,320, D 2560 at 790 TFLOP/s: 26 ms forward, 79 ms backward (three products).
// Forward moves no logits; backward 16 GB each written and read, 8 ms at 4.3 TB/s, and half of that written and read twice by the
// products. Expected: these plus the distance of gemm.cu from its floor (unmeasured).
#include "gemm.cuh"
#include "head.cuh"

static const int bwd_threads = 512, bwd_packs = 4;

// A wave's scratch: gathered rows; forward the tiles' parts and the targets' logits; where they are stored the logits (rows of ld floats); backward
// the rows' gradients.
struct wave_ws {
  int64_t chunk, ld, bytes;
  char* x;
  head_part* parts;
  float *target_z, *z, *dx;
};
template <class A> static wave_ws carve(const A* a, bool bwd) {
  wave_ws w;
  w.chunk = HS_MIN(a->chunk, a->N);
  w.ld = HS_CEIL(a->vocab_valid, 8) * 8;
  char* p = (char*)a->ws;
  auto take = [&](int64_t bytes) { char* at = p; p += hs_align(bytes); return at; };
  w.x = take(w.chunk * a->D * hs_sizeof(a->dtype));
  w.parts = bwd ? 0 : (head_part*)take(w.chunk * head_tiles(a->vocab_valid) * (int64_t)sizeof(head_part));
  w.target_z = bwd ? 0 : (float*)take(w.chunk * 4);
  w.z = bwd || a->dtype == HS_F32 ? (float*)take(w.chunk * w.ld * 4) : 0;
  w.dx = bwd ? (float*)take(w.chunk * a->D * 4) : 0;
  w.bytes = p - (char*)a->ws;
  return w;
}
template <class A> static hs_status head_check(const A* a) {
  HS_NEED(a->N > 0 && a->T > 0 && a->D > 0, "N %lld, T %lld, D %lld: need all > 0", (long long)a->N, (long long)a->T, (long long)a->D);
  HS_NEED(a->vocab_valid > 0 && a->vocab_valid <= a->V, "vocab_valid %lld, want 1..V (%lld)", (long long)a->vocab_valid, (long long)a->V);
  HS_NEED(a->vocab_valid <= head_vocab, "vocab_valid %lld, want at most %lld", (long long)a->vocab_valid, (long long)head_vocab);
  HS_NEED(a->chunk > 0, "chunk %lld, need > 0", (long long)a->chunk);
  HS_NEED(a->temperature > 0, "temperature %g, need > 0", a->temperature);
  HS_NEED(a->row && a->target, "row and target are required");
  if (a->dtype != HS_F32 && a->dtype != HS_BF16) return hs_fail(HS_ERR_DTYPE, "dtype %d: the cuda table stores f32 (0) or bf16 (2)", (int)a->dtype);
  return HS_OK;
}

// Rows of x of targets i..i+m-1, and their logits where the wave stores them.
template <class A> static hs_status wave_rows(cudaStream_t s, const A* a, const wave_ws& w, int64_t i, int64_t m) {
  const hs_gather_args g = {a->dtype, 0, m, a->D, a->T, a->row + i, a->x, w.x};
  HS_TRY(hs_op_gather(s, &g));
  if (!w.z) return HS_OK;
  const hs_gemm_args p = {a->dtype, HS_TRANS_B | HS_C_F32, m, a->vocab_valid, a->D, w.x, a->D, a->w, a->D, w.z, w.ld, 0, 0};
  return hs_gemm_own(s, &p);
}

// ---- forward ----

// A block per target.
static __global__ void lmhead_kernel(head_rows h, int64_t tiles, float* logp, float* entropy, float* lse) {
  const int64_t i = blockIdx.x;
  const head_stats s = merge_parts(h.parts + i * tiles, tiles);
  if (threadIdx.x) return;
  logp[i] = head_logp(s, h.target_z[i], h.invt);
  entropy[i] = s.entropy;
  lse[i] = __fadd_rn(s.max, s.lnsum);
}

extern "C" int64_t hs_ws_lmhead(const hs_lmhead_args* a) { return a->N > 0 && a->D > 0 && a->V > 0 && a->chunk > 0 ? carve(a, false).bytes : 0; }
extern "C" hs_status hs_op_lmhead(cudaStream_t s, const hs_lmhead_args* a) {
  HS_TRY(head_check(a));
  HS_NEED(a->x && a->w && a->logp && a->entropy && a->lse, "x, w, logp, entropy and lse are required");
  HS_NEED_WS(hs_ws_lmhead(a));
  const wave_ws w = carve(a, false);
  for (int64_t i = 0; i < a->N; i += w.chunk) {
    const int64_t m = HS_MIN(w.chunk, a->N - i);
    HS_TRY(wave_rows(s, a, w, i, m));
    head_rows h = {};
    h.rows = m, h.n = a->vocab_valid, h.ld = w.ld, h.D = a->D, h.z = w.z, h.x = (const bf16*)w.x, h.w = (const bf16*)a->w;
    h.invt = 1.0f / (float)a->temperature, h.target = a->target + i, h.parts = w.parts, h.target_z = w.target_z;
    HS_TRY(hs_head_pass(s, h));
    const int64_t tiles = head_tiles(h.n);
    HS_TRY(HS_LAUNCH(s, lmhead_kernel, (unsigned)m, merge_threads(tiles), 0, h, tiles, (float*)a->logp + i, (float*)a->entropy + i, (float*)a->lse + i));
  }
  return HS_OK;
}

// ---- backward ----

struct head_grad {
  int64_t N, n, ld, base;   // targets, valid ids, floats per row, first target of the wave
  float invt;
  const int32_t *row, *target;
  const float *lse, *entropy, *dlogp, *dent;
};

// dz in place of the wave's logits, as U at twice the row pitch where U is half as wide. A tile is read by all threads before it is
// written, and what is written lies at or below what has been read.
template <class U> __global__ void __launch_bounds__(bwd_threads) dlogits_kernel(head_grad a, float* z) {
  z += blockIdx.x * a.ld;
  U* dz = (U*)z;
  const int64_t i0 = a.base + blockIdx.x, tile = (int64_t)bwd_packs * 4 * blockDim.x;
  const bool first = i0 == 0 || a.row[i0] != a.row[i0 - 1];
  int64_t i1 = i0;
  float sl = 0, se = 0;
  for (; first && i1 < a.N && a.row[i1] == a.row[i0]; i1++) {
    sl += a.dlogp[i1];
    if (a.dent) se += a.dent[i1];
  }
  const float lse = a.lse[i0], h = a.entropy[i0];
  for (int64_t v0 = 0; v0 < a.n; v0 += tile) {
    float g[bwd_packs][4];
#pragma unroll
    for (int k = 0; k < bwd_packs; k++) {
      const int64_t v = v0 + 4 * ((int64_t)k * blockDim.x + threadIdx.x);
      if (v >= a.n) continue;
      const pack<float, 4> x = load_pack<float, 4>(z + v);
      for (int j = 0; j < 4; j++) {
        float lp = head_arg(x.v[j], a.invt, lse);
        lp = lp > -1000.0f ? lp : -1000.0f;
        const float d = __fmul_rn(-__fmul_rn(head_exp(lp), __fadd_rn(sl, __fmul_rn(se, __fadd_rn(lp, h)))), a.invt);
        g[k][j] = first ? d : 0.0f;
      }
      for (int64_t i = i0; i < i1; i++)
        for (int j = 0; j < 4; j++)
          if (a.target[i] == v + j) g[k][j] = __fadd_rn(g[k][j], __fmul_rn(a.dlogp[i], a.invt));
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < bwd_packs; k++) {
      const int64_t v = v0 + 4 * ((int64_t)k * blockDim.x + threadIdx.x);
      if (v >= a.n) continue;
      pack<U, 4> y;
      for (int j = 0; j < 4; j++) y.v[j] = from_f<U>(g[k][j]);
      store_pack<U, 4>(dz + v, y);
    }
  }
}

// dx of the row of each run += the wave's gradient.
template <class T> __global__ void add_dx_kernel(int64_t base, int64_t D, const int32_t* row, const float* dx, T* out) {
  const int64_t i = base + blockIdx.x;
  if (i > 0 && row[i] == row[i - 1]) return;
  out += row[i] * D, dx += blockIdx.x * D;
  for (int64_t j = threadIdx.x; j < D; j += blockDim.x) out[j] = from_f<T>(to_f(out[j]) + dx[j]);
}

template <class T> static hs_status wave_bwd(cudaStream_t s, const hs_lmhead_bwd_args* a, const wave_ws& w, int64_t i, int64_t m) {
  const int64_t n = a->vocab_valid, D = a->D, ldz = w.ld * 4 / (int64_t)sizeof(T);
  const head_grad g = {a->N, n, w.ld, i, 1.0f / (float)a->temperature, a->row, a->target,
                       (const float*)a->lse, (const float*)a->entropy, (const float*)a->dlogp, (const float*)a->dent};
  HS_TRY(HS_LAUNCH(s, dlogits_kernel<T>, (unsigned)m, (int)HS_MIN(bwd_threads, 32 * HS_CEIL(n, 128)), 0, g, w.z));
  const hs_gemm_args dx = {a->dtype, HS_C_F32, m, D, n, w.z, ldz, a->w, D, w.dx, D, 0, 0};
  const hs_gemm_args dw = {a->dtype, HS_TRANS_A | HS_BETA1 | HS_C_F32, n, D, m, w.z, ldz, w.x, D, a->dw, D, 0, 0};
  HS_TRY(hs_gemm_own(s, &dx));
  HS_TRY(HS_LAUNCH(s, add_dx_kernel<T>, (unsigned)m, (int)HS_MIN(256, 32 * HS_CEIL(D, 32)), 0, i, D, a->row, w.dx, (T*)a->dx));
  return a->dw ? hs_gemm_own(s, &dw) : HS_OK;
}

extern "C" int64_t hs_ws_lmhead_bwd(const hs_lmhead_bwd_args* a) { return a->N > 0 && a->D > 0 && a->V > 0 && a->chunk > 0 ? carve(a, true).bytes : 0; }
extern "C" hs_status hs_op_lmhead_bwd(cudaStream_t s, const hs_lmhead_bwd_args* a) {
  HS_TRY(head_check(a));
  HS_NEED(a->x && a->w && a->lse && a->entropy && a->dlogp && a->dx, "x, w, lse, entropy, dlogp and dx are required");
  HS_NEED_WS(hs_ws_lmhead_bwd(a));
  const wave_ws w = carve(a, true);
  for (int64_t i = 0; i < a->N; i += w.chunk) {
    const int64_t m = HS_MIN(w.chunk, a->N - i);
    HS_TRY(wave_rows(s, a, w, i, m));
    HS_DISPATCH(a->dtype, T, { HS_TRY(wave_bwd<T>(s, a, w, i, m)); })
  }
  return HS_OK;
}
