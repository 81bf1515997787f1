// gemm_wgmma.cu - bf16 products by wgmma on sm_90: C_i = op(A) op(B_i) (+ C_i) for up to 4 matrices B_i in one launch, or silu(A G^T) * (A U^T).
//
// Blocks are persistent. One warp keeps a ring of 4 to 8 stages of 64 K filled by TMA (tiles with 128-byte swizzle, zeros outside the
// matrices); each of BM/64 warpgroups multiplies 64 rows by BN columns, one wgmma group in flight while the next stage is awaited, and stores
// from registers. Tiles of all B_i form one list; 8 tiles of M in a column of N run side by side, so that both operands are read from L2.
// SwiGLU: half of a tile's columns are the gate's and half the up projection's, and a thread holds both values of each output.
//
// An element is one chain over K from zero, 16 at a time, whatever the tile; C is added last. So its bits depend on its row of A, its column
// of B and K alone, if the hardware treats all widths of wgmma alike (to be tested on a device). They need not be those of gemm.cu's
// mma.sync, so a matrix must always take the same form: which one depends on flags, leading dimensions and addresses (multiples of 16 bytes),
// never on M or N. A dense weight [N,K] whose K is a multiple of 8 is always multiplied here by y = x W^T, whoever calls.
//
// Floor on an H200: 790 TFLOP/s, or the bytes of B at 4.3 TB/s below about 184 rows (gpu.md 6.1). Expected, unmeasured: 80-90% of the former
// with 128 x 256 tiles at K >= 2560 (stores are not overlapped, no clusters), 70-85% of the latter where N fills the device (B tiles of
// 4-16 KB, 40 to 96 KB in flight per SM), less below N = 4096, for which K would have to be split.
#include "gemm.cuh"
#include "hopper.cuh"

namespace {

struct out_set {
  void* c;
  int64_t ldc;
  int N, tile0;   // columns; place of its first tile in the list
  bool pairs;     // two columns can be stored at once
};
struct group_args {
  hs_tma a, b[HS_GEMM_SETS];
  out_set set[HS_GEMM_SETS];
  int M, K, sets, mtiles, ntiles;
  bool add, wide;   // wide: C is f32
};

template <int BM, int BN> struct shape {
  static const int groups = BM / 64, threads = 128 * groups + 32;
  static const int stage = (BM + BN) * 128, stages = BN == 256 ? 4 : HS_MIN(8, (96 << 10) / stage), per_sm = BN == 256 ? 1 : 2;
  static const int smem = 1024 + stages * stage + 16 * stages;
};

#if HS_HOPPER

const int wg_k = 64, raster = 8;   // K per stage; tiles of M that run side by side
const int chunk = 64 * 128;        // bytes of 64 lines

// Tile t of the list: its place along M, the matrix it belongs to and its place along that one's N.
__device__ __forceinline__ void locate(const group_args& p, int t, int& m, int& set, int& n) {
  const int first = t / (raster * p.ntiles) * raster, rows = min(raster, p.mtiles - first), r = t - first * p.ntiles;
  m = first + r % rows, n = r / rows, set = 0;
  while (set + 1 < p.sets && n >= p.set[set + 1].tile0) set++;
  n -= p.set[set].tile0;
}

// Ring position: stage and the parity of its round.
struct ring {
  int stage = 0;
  unsigned parity = 0;
  template <int stages> __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

template <int BM, int BN, bool TA, bool TB, bool swiglu>
__device__ __forceinline__ void produce(const group_args& p, unsigned char* tiles, uint64_t* full, uint64_t* empty) {
  typedef shape<BM, BN> S;
  ring at;
  for (int t = blockIdx.x; t < p.mtiles * p.ntiles; t += gridDim.x) {
    int m, set, n;
    locate(p, t, m, set, n);
    for (int k = 0; k < p.K; k += wg_k) {
      unsigned char *sa = tiles + at.stage * S::stage, *sb = sa + BM * 128;
      uint64_t* bar = full + at.stage;
      mbar_wait(empty + at.stage, at.parity ^ 1);
      mbar_arrive_expect(bar, S::stage);
      if (TA)
        for (int i = 0; i < BM / 64; i++) tma_load(sa + i * chunk, &p.a, m * BM + 64 * i, k, bar);
      else tma_load(sa, &p.a, k, m * BM, bar);
      if (!TB)
        for (int i = 0; i < BN / 64; i++) tma_load(sb + i * chunk, &p.b[set], n * BN + 64 * i, k, bar);
      else
        for (int h = 0; h < 2; h++)
          if (swiglu) tma_load(sb + h * BN * 64, &p.b[h], k, n * (BN / 2), bar);
          else tma_load(sb + h * BN * 64, &p.b[set], k, n * BN + h * (BN / 2), bar);
      at.next<S::stages>();
    }
  }
}

template <class T, bool add> __device__ __forceinline__ void put(T* at, float x) { *at = from_f<T>(add ? to_f(*at) + x : x); }
template <class T, bool add> __device__ __forceinline__ void put_pair(T* at, float x, float y) {
  pack<T, 2> v = {};
  if (add) v = load_pack<T, 2>(at);
  v.v[0] = from_f<T>(add ? to_f(v.v[0]) + x : x), v.v[1] = from_f<T>(add ? to_f(v.v[1]) + y : y);
  store_pack<T, 2>(at, v);
}
// Stores what a warpgroup holds of 64 rows by 2 W columns: value(i) is register i of W. pairs: two columns at once.
template <class T, bool add, bool pairs, int W, class F>
__device__ __forceinline__ void store_as(const out_set& o, int M, int row, int col, const F& value) {
  const int lane = threadIdx.x & 31, r0 = row + 16 * (threadIdx.x >> 5 & 3) + (lane >> 2), c0 = col + 2 * (lane & 3);
  T* const at = (T*)o.c + r0 * o.ldc + c0;
#pragma unroll
  for (int i = 0; i < W; i += 2) {
    const int r = r0 + 4 * (i & 2), c = c0 + 8 * (i >> 2);
    T* const to = at + (i & 2 ? 8 * o.ldc : 0) + 8 * (i >> 2);
    if (r >= M) continue;
    if (pairs && c + 1 < o.N) put_pair<T, add>(to, value(i), value(i + 1));
    else {
      if (c < o.N) put<T, add>(to, value(i));
      if (!pairs && c + 1 < o.N) put<T, add>(to + 1, value(i + 1));
    }
  }
}
template <int W, class F> __device__ __forceinline__ void store(const group_args& p, const out_set& o, int row, int col, const F& value) {
  if (p.wide && p.add) return o.pairs ? store_as<float, true, true, W>(o, p.M, row, col, value) : store_as<float, true, false, W>(o, p.M, row, col, value);
  if (p.wide) return o.pairs ? store_as<float, false, true, W>(o, p.M, row, col, value) : store_as<float, false, false, W>(o, p.M, row, col, value);
  if (p.add) return o.pairs ? store_as<bf16, true, true, W>(o, p.M, row, col, value) : store_as<bf16, true, false, W>(o, p.M, row, col, value);
  return o.pairs ? store_as<bf16, false, true, W>(o, p.M, row, col, value) : store_as<bf16, false, false, W>(o, p.M, row, col, value);
}

template <int BM, int BN, bool TA, bool TB, bool swiglu>
__device__ __forceinline__ void consume(const group_args& p, unsigned char* tiles, uint64_t* full, uint64_t* empty, int group) {
  typedef shape<BM, BN> S;
  constexpr int step_a = TA ? 16 * 128 : 32, step_b = TB ? 32 : 16 * 128;   // bytes from 16 K to the next
  const bool signals = (threadIdx.x & 31) == 0;
  const uint64_t a0 = wgmma_desc(tiles + group * chunk, TA ? chunk : 0, 1024), b0 = wgmma_desc(tiles + BM * 128, TB ? 0 : chunk, 1024);
  ring at;
  for (int t = blockIdx.x; t < p.mtiles * p.ntiles; t += gridDim.x) {
    float d[BN / 2];
    int before = 0;
    for (int k = 0; k < p.K; k += wg_k) {
      const uint64_t a = wgmma_desc_at(a0, at.stage * S::stage), b = wgmma_desc_at(b0, at.stage * S::stage);
      mbar_wait(full + at.stage, at.parity);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < wg_k / 16; j++) wgmma<BN, TA, !TB>(d, wgmma_desc_at(a, j * step_a), wgmma_desc_at(b, j * step_b), k > 0 || j > 0);
      wgmma_commit();
      if (k > 0) {
        wgmma_wait<1>();
        if (signals) mbar_arrive(empty + before);
      }
      before = at.stage;
      at.next<S::stages>();
    }
    wgmma_wait<0>();
    if (signals) mbar_arrive(empty + before);
    int m, set, n;
    locate(p, t, m, set, n);
    const int row = m * BM + 64 * group;
    if constexpr (swiglu) {   // gate in the first half of the columns, up in the second
      const auto h = [&](int i) { return swiglu_f(to_f(from_f<bf16>(d[i])), to_f(from_f<bf16>(d[i + BN / 4]))); };
      if (p.set[0].pairs) store_as<bf16, false, true, BN / 4>(p.set[0], p.M, row, n * (BN / 2), h);
      else store_as<bf16, false, false, BN / 4>(p.set[0], p.M, row, n * (BN / 2), h);
    } else store<BN / 2>(p, p.set[set], row, n * BN, [&](int i) { return d[i]; });
  }
}

#endif

template <int BM, int BN, bool TA, bool TB, bool swiglu>
__global__ void __launch_bounds__(shape<BM, BN>::threads, shape<BM, BN>::per_sm) gemm_wgmma_kernel(const __grid_constant__ group_args p) {
#if HS_HOPPER
  typedef shape<BM, BN> S;
  HS_DYN_SHARED(unsigned char, raw);
  unsigned char* tiles = raw + (-hs_smem(raw) & 1023);
  uint64_t *full = (uint64_t*)(tiles + S::stages * S::stage), *empty = full + S::stages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::stages; i++) mbar_init(full + i, 1), mbar_init(empty + i, 4 * S::groups);
    fence_proxy_async();
  }
  __syncthreads();
  const int group = threadIdx.x >> 7;
  if (group < S::groups) consume<BM, BN, TA, TB, swiglu>(p, tiles, full, empty, group);
  else if ((threadIdx.x & 31) == 0) produce<BM, BN, TA, TB, swiglu>(p, tiles, full, empty);
#endif
}

// ---- host ----

template <int BM, int BN, bool TA, bool TB, bool swiglu> hs_status launch(cudaStream_t s, const hs_gemm_group_args* a) {
  typedef shape<BM, BN> S;
  const int64_t cols = swiglu ? BN / 2 : BN, sets = swiglu ? 1 : a->n;
  group_args p = {};
  p.M = (int)a->M, p.K = (int)a->K, p.sets = (int)sets, p.mtiles = (int)HS_CEIL(a->M, BM);
  p.add = a->flags & HS_BETA1, p.wide = a->flags & HS_C_F32;
  if (TA) HS_TRY(hs_tma_matrix(&p.a, a->a, a->K, a->M, a->lda, 64));
  else HS_TRY(hs_tma_matrix(&p.a, a->a, a->M, a->K, a->lda, BM));
  for (int i = 0; i < a->n; i++) {
    const hs_gemm_set& x = a->set[i];
    if (TB) HS_TRY(hs_tma_matrix(&p.b[i], x.b, x.N, a->K, x.ldb, BN / 2));
    else HS_TRY(hs_tma_matrix(&p.b[i], x.b, a->K, x.N, x.ldb, 64));
    if (i >= sets) continue;
    p.set[i] = {x.c, x.ldc, (int)x.N, p.ntiles, x.ldc % 2 == 0 && (uintptr_t)x.c % (p.wide ? 8 : 4) == 0};
    p.ntiles += (int)HS_CEIL(x.N, cols);
  }
  const int64_t tiles = (int64_t)p.mtiles * p.ntiles;
  HS_NEED(tiles < (int64_t)1 << 31, "%lld tiles of %d x %d", (long long)tiles, BM, BN);
  return HS_LAUNCH(s, (gemm_wgmma_kernel<BM, BN, TA, TB, swiglu>), (unsigned)HS_MIN(tiles, (int64_t)hs_hopper_sms() * S::per_sm), S::threads, S::smem, p);
}

int64_t count_tiles(const hs_gemm_group_args* a, int64_t BM, int64_t BN, bool swiglu) {
  int64_t n = 0;
  for (int i = 0; i < a->n; i++) n += HS_CEIL(a->set[i].N, swiglu ? BN / 2 : BN);
  return HS_CEIL(a->M, BM) * (swiglu ? n / 2 : n);
}

// The tile follows M and N for speed only: the largest that still gives every SM one.
template <bool TA, bool TB, bool swiglu> hs_status launch_sized(cudaStream_t s, const hs_gemm_group_args* a) {
  const int64_t sms = hs_hopper_sms();
  if (a->M > 64) return count_tiles(a, 128, 256, swiglu) >= sms ? launch<128, 256, TA, TB, swiglu>(s, a) : launch<128, 64, TA, TB, swiglu>(s, a);
  if constexpr (TB && !TA) {
    if (count_tiles(a, 64, 128, swiglu) >= sms) return launch<64, 128, TA, TB, swiglu>(s, a);
    if (count_tiles(a, 64, 64, swiglu) < sms) return launch<64, 32, TA, TB, swiglu>(s, a);
  }
  return launch<64, 64, TA, TB, swiglu>(s, a);
}

}  // namespace

bool hs_gemm_wgmma_takes(const hs_gemm_group_args* a) {
  const uint32_t trans = a->flags & (HS_TRANS_A | HS_TRANS_B);
  if (a->dtype != HS_BF16 || trans == (HS_TRANS_A | HS_TRANS_B) || !hs_hopper_sms()) return false;
  bool aligned = a->lda % 8 == 0 && (uintptr_t)a->a % 16 == 0;
  for (int i = 0; i < a->n; i++) aligned = aligned && a->set[i].ldb % 8 == 0 && (uintptr_t)a->set[i].b % 16 == 0;
  return aligned;
}

hs_status hs_gemm_wgmma(cudaStream_t s, const hs_gemm_group_args* a, bool swiglu) {
  switch (a->flags & (HS_TRANS_A | HS_TRANS_B)) {
    case 0: return launch_sized<false, false, false>(s, a);
    case HS_TRANS_A: return launch_sized<true, false, false>(s, a);
    default: return swiglu ? launch_sized<false, true, true>(s, a) : launch_sized<false, true, false>(s, a);
  }
}
