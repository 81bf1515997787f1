// sample.cu - drawing a token of each row by Gumbel-max (abi.h): from stored f32 logits, or with the LM head in one, which stores none.
//
// The row pass (head.cu) gives each tile's best id and the parts of log-sum-exp; a block per row merges them. Log-prob and
// entropy are the bits of lmhead for the same hidden row. A row that truncates needs its logits in memory: min_p is a threshold; top_k and
// top_p are found by radix descent, 4 bits of the order-preserving key at a time, each thread with its own counts and masses (no sort, no float
// atomics); the draw is the best of the ids that are kept. Tokens are those of the cpu table for the same logits: scores are compared, not
// summed. Only top_p adds masses, in f64: it can keep another set of ids when it lies within 2^-53 n of a boundary.
//
// Floor on an H200, 256 rows of 248,320 stored: 254 MB a pass, 0.06 ms at 4.3 TB/s, one pass and 24 MB of parts and picks; top_k and top_p
// take up to 8 more each, most of them with few ids to weigh, 0.5 ms. Unmeasured.
// A row that holds NaN or plus infinity, or only minus infinity, gets token -1 and NaN (the cpu table fails instead).
#include "gemm.cuh"
#include "head.cuh"

static const int sample_threads = 512, radix = 16, radix_bits = 4;

struct row_in { const float* z; int n; float invt, max; };

// Which ids may be drawn: weight at least the min_p bound, key above the bounds of top_k and top_p, or at a bound and id below its cut.
struct keep_rule { float dmin; uint32_t key[2]; int cut[2]; };
static __device__ __forceinline__ bool kept(const keep_rule& k, float z, float d, int id) {
  const uint32_t u = order_key(z);
  bool in = d >= k.dmin;
  for (int i = 0; i < 2; i++) in = in && (u > k.key[i] || (u == k.key[i] && id < k.cut[i]));
  return in;
}

// ---- bounds ----

// One digit of the descent. Every thread counts and weighs the kept ids whose key starts with prefix in its own columns; then thread t adds
// 16 columns of digit t % 16, and thread b those sums of digit b. All threads end with the same totals in shared memory.
static __device__ void digit_totals(const row_in& r, const keep_rule& k, uint32_t prefix, int shift, double* mass, int* count, double* masses, int* counts) {
  const int T = blockDim.x, t = threadIdx.x, pitch = T + 1;   // off by one: no bank conflicts between digits
  for (int b = 0; b < radix; b++) mass[b * pitch + t] = 0, count[b * pitch + t] = 0;
  for (int i = t; i < r.n; i += T) {
    const float z = r.z[i];
    const uint32_t u = order_key(z);
    if (shift + radix_bits < 32 && (u >> (shift + radix_bits)) != prefix) continue;
    const float d = head_arg(z, r.invt, r.max);
    if (!kept(k, z, d, i)) continue;
    const int b = (int)(u >> shift & (radix - 1));
    mass[b * pitch + t] += (double)head_exp(d);
    count[b * pitch + t]++;
  }
  __syncthreads();
  auto add = [&](int at, int n, int step) {
    double m = 0;
    int c = 0;
    for (int i = 0; i < n; i++) m += mass[at + i * step], c += count[at + i * step];
    mass[at] = m, count[at] = c;
  };
  add(t % radix * pitch + t / radix * radix, radix, 1);
  __syncthreads();
  if (t < radix) {
    add(t * pitch, T / radix, radix);
    masses[t] = mass[t * pitch], counts[t] = count[t * pitch];
  }
  __syncthreads();
}

// The id behind the left-th one, in id order, that is kept and has this key. Each warp looks at its own stretch of ids.
static __device__ int tie_cut(const row_in& r, const keep_rule& k, uint32_t key, int left) {
  HS_SHARED(int, found, [33]);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  const int len = HS_CEIL(HS_CEIL(r.n, warps), 32) * 32, from = warp * len, to = from + len;
  auto ties = [&](int i0) {
    const int i = i0 + lane;
    return __ballot_sync(HS_FULL, i < r.n && order_key(r.z[i]) == key && kept(k, r.z[i], head_arg(r.z[i], r.invt, r.max), i));
  };
  int n = 0;
  for (int i = from; i < to; i += 32) n += __popc(ties(i));
  if (lane == 0) found[warp] = n;
  __syncthreads();
  int before = 0;
  for (int w = 0; w < warp; w++) before += found[w];
  if (before < left && left <= before + n)   // one warp
    for (int i = from; i < to && before < left; i += 32)
      for (uint32_t m = ties(i); m && before < left; m &= m - 1)
        if (++before == left) found[32] = i + __ffs((int)m);
  __syncthreads();
  const int cut = found[32];
  __syncthreads();
  return cut;
}

// Lowers bound `which` of k: keeps ids from the largest down until their number (which 0) reaches need, or their mass (1) need times the
// mass of all that k keeps.
static __device__ void lower_bound(const row_in& r, keep_rule& k, int which, double need, double* mass, int* count) {
  HS_SHARED(double, masses, [radix]);
  HS_SHARED(int, counts, [radix]);
  double above = 0, tie_mass = 0;
  uint32_t prefix = 0;
  int ties = 0, shift = 32;
  while (shift > 0 && ties != 1) {   // a single id needs no more digits
    shift -= radix_bits;
    digit_totals(r, k, prefix, shift, mass, count, masses, counts);
    if (which && shift == 32 - radix_bits) {
      double all = 0;
      for (int b = radix - 1; b >= 0; b--) all += masses[b];
      need *= all;
    }
    int last = 0, b = radix - 1;
    for (; b >= 0; b--) {
      if (!counts[b]) continue;
      last = b;
      const double add = which ? masses[b] : (double)counts[b];
      if (above + add >= need) break;
      above += add;
    }
    if (b < 0) {   // rounding kept the mass just short: everything in the lowest digit is in
      b = last;
      above -= which ? masses[b] : (double)counts[b];
    }
    prefix = prefix << radix_bits | (uint32_t)b;
    ties = counts[b], tie_mass = masses[b];
  }
  const uint32_t key = prefix << shift;
  const double each = which ? tie_mass / (double)ties : 1.0, want = each > 0 ? ceil((need - above) / each) : 1.0;
  const int left = want < 1 ? 1 : want > (double)ties ? ties : (int)want;
  if (left < ties) k.cut[which] = tie_cut(r, k, key, left);
  k.key[which] = key;
}

// ---- draw ----

// The best key of the block's threads; every thread gets it.
static __device__ __forceinline__ unsigned long long block_best(unsigned long long k) {
  HS_SHARED(unsigned long long, part, [32]);
  const int warps = blockDim.x >> 5;
  k = warp_butterfly(k, max_key());
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = k;
  __syncthreads();
  k = part[0];
  for (int i = 1; i < warps; i++) k = max_key()(k, part[i]);
  __syncthreads();
  return k;
}

// Among the kept ids.
static __device__ int draw_truncated(const row_in& r, const hs_sample_row& row, double* mass, int* count) {
  keep_rule k = {-__int_as_float(0x7f800000), {0, 0}, {0x7fffffff, 0x7fffffff}};
  if (row.min_p >= 1.17549435e-38f) k.dmin = fminf(head_log(row.min_p), 0.0f);
  if (row.top_k > 0 && row.top_k < r.n) lower_bound(r, k, 0, (double)row.top_k, mass, count);
  if (row.top_p < 1) lower_bound(r, k, 1, (double)row.top_p, mass, count);
  unsigned long long best = 0;
  for (int q = threadIdx.x; 4 * q < r.n; q += blockDim.x) {
    bool in[4], any = false;
    for (int c = 0; c < 4; c++) {
      const int i = 4 * q + c;
      in[c] = i < r.n && kept(k, r.z[i], head_arg(r.z[i], r.invt, r.max), i);
      any |= in[c];
    }
    if (!any) continue;
    float g[4];
    head_noise(row, (uint32_t)q, g);
    for (int c = 0; c < 4; c++)
      if (in[c]) best = max_key()(best, pick_key(__fadd_rn(__fmul_rn(r.z[4 * q + c], r.invt), g[c]), 4 * q + c));
  }
  return pick_id(block_best(best));
}

// ---- the ops ----

struct sample_out { int32_t* token; float *logp, *entropy; };
static __device__ __forceinline__ void write_sample(const sample_out& o, int64_t i, const head_stats& s, float invt, int tok, float z) {
  const float nan = __int_as_float(0x7fffffff);
  o.token[i] = tok;
  o.logp[i] = tok < 0 ? nan : head_logp(s, z, invt);
  if (o.entropy) o.entropy[i] = tok < 0 ? nan : s.entropy;
}

// A block per row merges the tiles and writes the row's best id; none for a row that truncates, or has no distribution.
static __global__ void sample_kernel(head_rows h, int64_t tiles, sample_out o) {
  HS_SHARED(float, best_z, [1]);
  const int64_t i = blockIdx.x;
  const hs_sample_row row = h.sample[i];
  const head_stats s = merge_parts(h.parts + i * tiles, tiles);
  unsigned long long k = 0;
  float z = 0;
  for (int64_t t = threadIdx.x; t < tiles; t += blockDim.x) {
    const head_pick p = h.picks[i * tiles + t];
    if (p.key > k) k = p.key, z = p.z;
  }
  const unsigned long long best = block_best(k);
  if (k == best) best_z[0] = z;   // ids are part of the key: one thread
  __syncthreads();
  const bool none = !head_finite(s.lnsum) || (row.temperature > 0 && truncates(row, h.n));
  if (threadIdx.x == 0) write_sample(o, i, s, inverse_temperature(row), none ? -1 : pick_id(best), best_z[0]);
}

// The rows that truncate, from stored logits.
static __global__ void __launch_bounds__(sample_threads, 1) sample_truncated_kernel(head_rows h, int64_t tiles, sample_out o) {
  HS_DYN_SHARED(double, mass);   // [radix][threads + 1], then counts of the same shape
  int* count = (int*)(mass + radix * (blockDim.x + 1));
  const int64_t i = blockIdx.x;
  const hs_sample_row row = h.sample[i];
  if (!(row.temperature > 0) || !truncates(row, h.n)) return;
  const head_stats s = merge_parts(h.parts + i * tiles, tiles);
  if (!head_finite(s.lnsum)) return;
  const float invt = inverse_temperature(row), *z = h.z + i * h.ld;
  const int tok = draw_truncated({z, (int)h.n, invt, s.max}, row, mass, count);
  if (threadIdx.x == 0) write_sample(o, i, s, invt, tok, z[tok]);
}

template <class A> static hs_status sample_check(const A* a) {
  HS_NEED(a->B > 0, "B %lld, need > 0", (long long)a->B);
  HS_NEED(a->vocab_valid > 0 && a->vocab_valid <= a->V, "vocab_valid %lld, want 1..V (%lld)", (long long)a->vocab_valid, (long long)a->V);
  HS_NEED(a->vocab_valid <= head_vocab, "vocab_valid %lld, want at most %lld", (long long)a->vocab_valid, (long long)head_vocab);
  HS_NEED_PTR(rows); HS_NEED_PTR(token); HS_NEED_PTR(logp);
  if (a->dtype != HS_F32 && a->dtype != HS_BF16) return hs_fail(HS_ERR_DTYPE, "dtype %d: the cuda table stores f32 (0) or bf16 (2)", (int)a->dtype);
  return HS_OK;
}

// Scratch: parts and picks of every tile, then logits of the rows where they are stored.
struct sample_ws { int64_t picks, z, bytes; };
static sample_ws sample_carve(int64_t B, int64_t n, bool logits) {
  sample_ws w;
  w.picks = hs_align(B * head_tiles(n) * (int64_t)sizeof(head_part));
  w.z = w.picks + hs_align(B * head_tiles(n) * (int64_t)sizeof(head_pick));
  w.bytes = w.z + (logits ? hs_align(B * HS_CEIL(n, 4) * 16) : 0);
  return w;
}
static hs_status sample_rows(cudaStream_t s, head_rows h, char* ws, int32_t* token, void* logp, void* entropy) {
  h.parts = (head_part*)ws, h.picks = (head_pick*)(ws + sample_carve(h.rows, h.n, false).picks);
  HS_TRY(hs_head_pass(s, h));
  const int64_t tiles = head_tiles(h.n);
  const sample_out o = {token, (float*)logp, (float*)entropy};
  HS_TRY(HS_LAUNCH(s, sample_kernel, (unsigned)h.rows, merge_threads(tiles), 0, h, tiles, o));
  if (!h.z) return HS_OK;
  const int threads = (int)HS_MIN(sample_threads, 32 * HS_CEIL(h.n, 1024));
  return HS_LAUNCH(s, sample_truncated_kernel, (unsigned)h.rows, threads, (size_t)radix * (threads + 1) * 12, h, tiles, o);
}

extern "C" int64_t hs_ws_sample(const hs_sample_args* a) { return a->B > 0 && a->vocab_valid > 0 ? sample_carve(a->B, a->vocab_valid, false).bytes : 0; }
extern "C" hs_status hs_op_sample(cudaStream_t s, const hs_sample_args* a) {
  HS_TRY(sample_check(a));
  HS_NEED_PTR(logits);
  HS_NEED_WS(hs_ws_sample(a));
  head_rows h = {};
  h.rows = a->B, h.n = a->vocab_valid, h.ld = a->V, h.z = (const float*)a->logits, h.sample = a->rows;
  return sample_rows(s, h, (char*)a->ws, a->token, a->logp, a->entropy);
}

static bool stores_logits(const hs_lmhead_sample_args* a) { return a->dtype == HS_F32 || a->flags & HS_TRUNCATED; }
extern "C" int64_t hs_ws_lmhead_sample(const hs_lmhead_sample_args* a) {
  return a->B > 0 && a->vocab_valid > 0 ? sample_carve(a->B, a->vocab_valid, stores_logits(a)).bytes : 0;
}
extern "C" hs_status hs_op_lmhead_sample(cudaStream_t s, const hs_lmhead_sample_args* a) {
  HS_TRY(sample_check(a));
  HS_NEED(a->D > 0, "D %lld, need > 0", (long long)a->D);
  HS_NEED_PTR(x); HS_NEED_PTR(w);
  HS_NEED_WS(hs_ws_lmhead_sample(a));
  head_rows h = {};
  h.rows = a->B, h.n = a->vocab_valid, h.D = a->D, h.sample = a->rows;
  if (stores_logits(a)) {
    float* z = (float*)((char*)a->ws + sample_carve(a->B, h.n, true).z);
    h.ld = HS_CEIL(h.n, 4) * 4, h.z = z;
    const hs_gemm_args p = {a->dtype, HS_TRANS_B | HS_C_F32, a->B, h.n, a->D, a->x, a->D, a->w, a->D, z, h.ld, 0, 0};
    HS_TRY(hs_gemm_own(s, &p));
  } else {
    h.x = (const bf16*)a->x, h.w = (const bf16*)a->w;
  }
  return sample_rows(s, h, (char*)a->ws, a->token, a->logp, a->entropy);
}
