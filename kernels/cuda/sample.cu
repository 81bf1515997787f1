// sample.cu - sampling from rows of f32 logits, with the tokens of the cpu table (cpu_head_body.h).
//
// sample_stats  row pass (head.cuh), a block per row: log-prob and entropy are the bits that lmhead computes for the same logits.
// sample        a block per row. Without truncation: sums of up to 256 stretches of ids, then the ids of the stretch that u falls into, one by
//               one; every sum in the order of the cpu table with AVX-512. With truncation: min_p is a threshold; top_k and top_p are found by
//               radix descent, 4 bits of the order-preserving key at a time, each thread with its own counts and masses (no sort, no float
//               atomics). Their masses are f64 sums of f32 weights. As long as the weights lie within 2^-28 of the mass these are exact, so that
//               their order does not matter. Beyond that each addition may differ from the cpu table's by 2^-53 of the mass, and u, or top_p,
//               has to lie that close to a boundary between ids to give another token: at most n^2 2^-53, 7 in 10^6 draws from 248,320
//               ids, or with signs that cancel n^1.5 2^-53, 1 in 10^8.
//
// Floor on an H200, 256 rows of 248,320: 254 MB a pass, 0.06 ms at 4.3 TB/s. Three passes without truncation, and about 10 us for the chains
// at the end; top_k and top_p take up to 8 more each, most of them with few ids to weigh, 0.5 ms (unmeasured).
// A row that holds NaN or plus infinity, or only minus infinity, gets token -1 and NaN (the cpu table fails instead).
#include "head.cuh"

static const int sample_threads = 512, radix = 16, radix_bits = 4;
static const int draw_block = 128, draw_blocks = 256, draw_piece = 1024;   // as in cpu_head_body.h; a piece is what is walked at once

// Unsigned integer in the order of the floats (-0 just below +0).
static __device__ __forceinline__ uint32_t order_key(float x) {
  const uint32_t u = __float_as_uint(x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

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

// The id that u in (0,1) falls on; trunc = only the ids that k keeps, weighed in f64.
template <bool trunc> static __device__ int draw(const row_in& r, const keep_rule& k, double u) {
  HS_SHARED(double, sums, [draw_blocks]);
  HS_SHARED(float, weight, [draw_piece]);
  const int len = HS_CEIL(HS_CEIL(r.n, draw_block), draw_blocks) * draw_block, blocks = HS_CEIL(r.n, len), lane = threadIdx.x & (head_lanes - 1);
  auto weigh = [&](int i) {
    const float d = head_arg(r.z[i], r.invt, r.max);
    return !trunc || kept(k, r.z[i], d, i) ? head_exp(d) : 0.0f;
  };
  for (int b0 = 0; b0 < blocks; b0 += blockDim.x / head_lanes) {
    const int b = b0 + threadIdx.x / head_lanes;
    double sum = 0;
    for (int i = b * len; i < (b + 1) * len; i += draw_block) {
      float s = 0;
      for (int j = i + lane; j < i + draw_block && j < r.n; j += head_lanes) {
        if (trunc) sum += (double)weigh(j);
        else s = __fadd_rn(s, weigh(j));
      }
      if (!trunc) sum += (double)half_sum(s);
    }
    if (trunc) sum = half_sum(sum);
    if (lane == 0 && b < blocks) sums[b] = sum;
  }
  __syncthreads();
  double total = 0, cum = 0;   // from here on all threads compute the same
  for (int b = 0; b < blocks; b++) total += sums[b];
  const double stop = u * total;
  int last = 0;
  for (int b = 0; b < blocks; b++) {
    if (cum + sums[b] <= stop && b + 1 < blocks) {
      cum += sums[b];
      continue;
    }
    for (int i = b * len; i < (b + 1) * len && i < r.n; i += draw_piece) {
      __syncthreads();
      const int end = HS_MIN(HS_MIN(r.n, (b + 1) * len), i + draw_piece);
      for (int j = threadIdx.x; j < HS_CEIL(end - i, 4) * 4; j += blockDim.x) weight[j] = i + j < end ? weigh(i + j) : 0.0f;
      __syncthreads();
      for (int j = 0; j < end - i; j += 4) {
        const pack<float, 4> e = load_pack<float, 4>(weight + j);
        for (int c = 0; c < 4; c++) {
          if (!(e.v[c] > 0)) continue;
          cum += (double)e.v[c];
          last = i + j + c;
          if (cum > stop) return last;
        }
      }
    }
  }
  return last;
}

// Uniform in (0,1): 52 bits of the first two words, centred in their cell.
static __device__ __forceinline__ double uniform(const hs_sample_row& r) {
  const uint32_t ctr[4] = {(uint32_t)r.ctr, (uint32_t)(r.ctr >> 32), (uint32_t)r.key_hi, (uint32_t)(r.key_hi >> 32)};
  uint32_t w[4];
  philox4x32((uint32_t)r.key_lo, (uint32_t)(r.key_lo >> 32), ctr, w);
  return ((double)(((uint64_t)w[1] << 32 | w[0]) >> 12) + 0.5) * 0x1p-52;
}

static __device__ int draw_truncated(const row_in& r, const hs_sample_row& row, double* mass, int* count) {
  keep_rule k = {-__int_as_float(0x7f800000), {0, 0}, {0x7fffffff, 0x7fffffff}};
  if (row.min_p >= 1.17549435e-38f) k.dmin = fminf(head_log(row.min_p), 0.0f);
  if (row.top_k > 0 && row.top_k < r.n) lower_bound(r, k, 0, (double)row.top_k, mass, count);
  if (row.top_p < 1) lower_bound(r, k, 1, (double)row.top_p, mass, count);
  return draw<true>(r, k, uniform(row));
}
// Lowest id among the largest logits.
static __device__ int argmax(const row_in& r) {
  HS_SHARED(int, best, [1]);
  if (threadIdx.x == 0) best[0] = r.n;
  __syncthreads();
  for (int i = threadIdx.x; i < r.n; i += blockDim.x)
    if (r.z[i] == r.max) {
      atomicMin(best, i);
      break;
    }
  __syncthreads();
  return best[0];
}

// ---- the op ----

static __device__ __forceinline__ float inverse_temperature(const hs_sample_row& r) { return r.temperature > 0 ? __fdiv_rn(1.0f, r.temperature) : 1.0f; }

static __global__ void __launch_bounds__(head_threads) sample_stats_kernel(int64_t V, int64_t n, const float* z, const hs_sample_row* rows, head_stats* stats) {
  const head_stats s = row_stats(z + blockIdx.x * V, n, inverse_temperature(rows[blockIdx.x]));
  if (threadIdx.x == 0) stats[blockIdx.x] = s;
}
static __global__ void __launch_bounds__(sample_threads)
sample_kernel(int64_t V, int64_t n, const float* z, const hs_sample_row* rows, const head_stats* stats, int32_t* token, float* logp, float* entropy) {
  HS_DYN_SHARED(double, mass);   // [radix][threads + 1], then counts of the same shape
  int* count = (int*)(mass + radix * (blockDim.x + 1));
  const hs_sample_row row = rows[blockIdx.x];
  const head_stats s = stats[blockIdx.x];
  const row_in r = {z + blockIdx.x * V, (int)n, inverse_temperature(row), s.max};
  int tok = -1;
  if (head_finite(s.lnsum)) {
    if (!(row.temperature > 0)) tok = argmax(r);
    else if (row.min_p == 0 && row.top_p >= 1 && (row.top_k == 0 || row.top_k >= r.n)) tok = draw<false>(r, keep_rule(), uniform(row));
    else tok = draw_truncated(r, row, mass, count);
  }
  if (threadIdx.x) return;
  token[blockIdx.x] = tok;
  logp[blockIdx.x] = tok < 0 ? __int_as_float(0x7fffffff) : head_logp(s, r.z[tok], r.invt);
  if (entropy) entropy[blockIdx.x] = tok < 0 ? __int_as_float(0x7fffffff) : s.entropy;
}

extern "C" int64_t hs_ws_sample(const hs_sample_args* a) { return a->B > 0 ? a->B * (int64_t)sizeof(head_stats) : 0; }
extern "C" hs_status hs_op_sample(cudaStream_t s, const hs_sample_args* a) {
  HS_NEED(a->B > 0, "B %lld, need > 0", (long long)a->B);
  HS_NEED(a->vocab_valid > 0 && a->vocab_valid <= a->V, "vocab_valid %lld, want 1..V (%lld)", (long long)a->vocab_valid, (long long)a->V);
  HS_NEED(a->vocab_valid <= head_vocab, "vocab_valid %lld, want at most %lld", (long long)a->vocab_valid, (long long)head_vocab);
  HS_NEED_PTR(logits); HS_NEED_PTR(rows); HS_NEED_PTR(token); HS_NEED_PTR(logp);
  if (a->dtype != HS_F32 && a->dtype != HS_BF16) return hs_fail(HS_ERR_DTYPE, "dtype %d: the cuda table stores f32 (0) or bf16 (2)", (int)a->dtype);
  HS_NEED_WS(hs_ws_sample(a));
  const int64_t n = a->vocab_valid;
  head_stats* stats = (head_stats*)a->ws;
  const int threads = (int)HS_MIN(sample_threads, 32 * HS_CEIL(n, 1024));
  HS_TRY(HS_LAUNCH(s, sample_stats_kernel, (unsigned)a->B, head_row_threads(n), 0, a->V, n, (const float*)a->logits, a->rows, stats));
  return HS_LAUNCH(s, sample_kernel, (unsigned)a->B, threads, (size_t)radix * (threads + 1) * 12, a->V, n, (const float*)a->logits, a->rows, stats, a->token,
                   (float*)a->logp, (float*)a->entropy);
}
