// gemm_wgmma.cuh - the main loop of the wgmma products: a list of BM x BN tiles by persistent blocks, and what an op does with a tile.
//
// One thread keeps a ring of stages of 64 K filled by TMA (tiles with 128-byte swizzle, zeros outside the matrices); each of BM/64 warpgroups
// multiplies 64 rows by BN columns, one wgmma group in flight while the next stage is awaited.
#ifndef HS_GEMM_WGMMA_CUH
#define HS_GEMM_WGMMA_CUH
#include "gemm.cuh"
#include "hopper.cuh"

// Tiles of A times those of all B_i, in one list.
struct wg_tiles {
  hs_tma a, b[HS_GEMM_SETS];
  int tile0[HS_GEMM_SETS];   // place of B_i's first tile along N
  int M, K, sets, mtiles, ntiles;
};

// stages: of the ring. per_sm: blocks that fit.
template <int BM, int BN, int stages_ = BN == 256 ? 4 : HS_MIN(8, (96 << 10) / ((BM + BN) * 128))> struct wg_shape {
  static const int groups = BM / 64, rows = BM, cols = BN;
  static const int producers = BN == 256 ? 128 : 32, threads = 128 * groups + producers;   // a whole warpgroup can give registers away
  static const int stage = (BM + BN) * 128, stages = stages_, per_sm = stages * stage > 96 << 10 ? 1 : 2;
  static const int ring = 1024 + stages * stage + 16 * stages;   // bytes of shared memory from its start, rounded to 1024
};

#if HS_HOPPER

static const int wg_k = 64, wg_raster = 8;   // K per stage; tiles of M that run side by side in a column of N, so that L2 serves both operands
static const int wg_chunk = 64 * 128;        // bytes of 64 lines

// Tile t of the list: its place along M, the matrix it belongs to and its place along that one's N.
static __device__ __forceinline__ void wg_locate(const wg_tiles& p, int t, int& m, int& set, int& n) {
  const int first = t / (wg_raster * p.ntiles) * wg_raster, rows = min(wg_raster, p.mtiles - first), r = t - first * p.ntiles;
  m = first + r % rows, n = r / rows, set = 0;
  while (set + 1 < p.sets && n >= p.tile0[set + 1]) set++;
  n -= p.tile0[set];
}

// Ring position: stage and the parity of its round.
struct wg_place {
  int stage = 0;
  unsigned parity = 0;
  template <int stages> __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// PAIR: a tile takes half of its columns from B_0 and half from B_1.
template <class S, bool TA, bool TB, bool PAIR> __device__ __forceinline__ void wg_produce(const wg_tiles& p, unsigned char* tiles, uint64_t* full, uint64_t* empty) {
  constexpr int BM = S::rows, BN = S::cols;
  wg_place at;
  for (int t = blockIdx.x; t < p.mtiles * p.ntiles; t += gridDim.x) {
    int m, set, n;
    wg_locate(p, t, m, set, n);
    for (int k = 0; k < p.K; k += wg_k) {
      unsigned char *sa = tiles + at.stage * S::stage, *sb = sa + BM * 128;
      uint64_t* bar = full + at.stage;
      mbar_wait(empty + at.stage, at.parity ^ 1);
      mbar_arrive_expect(bar, S::stage);
      if (TA)
        for (int i = 0; i < BM / 64; i++) tma_load(sa + i * wg_chunk, &p.a, m * BM + 64 * i, k, bar);
      else tma_load(sa, &p.a, k, m * BM, bar);
      if (!TB)
        for (int i = 0; i < BN / 64; i++) tma_load(sb + i * wg_chunk, &p.b[set], n * BN + 64 * i, k, bar);
      else
        for (int h = 0; h < 2; h++)
          if (PAIR) tma_load(sb + h * BN * 64, &p.b[h], k, n * (BN / 2), bar);
          else tma_load(sb + h * BN * 64, &p.b[set], k, n * BN + h * (BN / 2), bar);
      at.template next<S::stages>();
    }
  }
}

// out(d, row, set, n): the warpgroup's 64 rows from `row` by the n-th BN columns of the set, in the layout of wgmma.
template <class S, bool TA, bool TB, class F>
__device__ __forceinline__ void wg_consume(const wg_tiles& p, unsigned char* tiles, uint64_t* full, uint64_t* empty, int group, const F& out) {
  constexpr int BM = S::rows, BN = S::cols, step_a = TA ? 16 * 128 : 32, step_b = TB ? 32 : 16 * 128;   // bytes from 16 K to the next
  const bool signals = (threadIdx.x & 31) == 0;
  const uint64_t a0 = wgmma_desc(tiles + group * wg_chunk, TA ? wg_chunk : 0, 1024), b0 = wgmma_desc(tiles + BM * 128, TB ? 0 : wg_chunk, 1024);
  wg_place at;
  for (int t = blockIdx.x; t < p.mtiles * p.ntiles; t += gridDim.x) {
    float d[BN / 2];
    int before = 0, m, set, n;
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
      at.template next<S::stages>();
    }
    wgmma_wait<0>();
    wgmma_arrived(d);
    if (signals) mbar_arrive(empty + before);
    wg_locate(p, t, m, set, n);
    out(d, m * BM + 64 * group, set, n);
  }
}

// The kernel: raw is the block's dynamic shared memory, at least S::ring bytes.
template <class S, bool TA, bool TB, bool PAIR, class F> __device__ __forceinline__ void wg_run(const wg_tiles& p, unsigned char* raw, const F& out) {
  unsigned char* tiles = raw + (-hs_smem(raw) & 1023);
  uint64_t *full = (uint64_t*)(tiles + S::stages * S::stage), *empty = full + S::stages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::stages; i++) mbar_init(full + i, 1), mbar_init(empty + i, 4 * S::groups);
    fence_proxy_async();
  }
  __syncthreads();
  const int group = threadIdx.x >> 7;
  constexpr bool moves = S::producers == 128;
  if (group < S::groups) {
    if (moves) set_max_registers<232, true>();
    wg_consume<S, TA, TB>(p, tiles, full, empty, group, out);
  } else {
    if (moves) set_max_registers<40, false>();
    if (threadIdx.x == 128 * S::groups) wg_produce<S, TA, TB, PAIR>(p, tiles, full, empty);
  }
}
#endif

// ---- host ----

template <class S, bool TA, bool TB, bool PAIR> hs_status wg_list(const hs_gemm_group_args* a, wg_tiles* p) {
  const int64_t cols = PAIR ? S::cols / 2 : S::cols;
  p->M = (int)a->M, p->K = (int)a->K, p->sets = PAIR ? 1 : (int)a->n, p->mtiles = (int)HS_CEIL(a->M, S::rows), p->ntiles = 0;
  if (TA) HS_TRY(hs_tma_matrix(&p->a, a->a, a->K, a->M, a->lda, 64));
  else HS_TRY(hs_tma_matrix(&p->a, a->a, a->M, a->K, a->lda, S::rows));
  for (int i = 0; i < a->n; i++) {
    const hs_gemm_set& x = a->set[i];
    if (TB) HS_TRY(hs_tma_matrix(&p->b[i], x.b, x.N, a->K, x.ldb, S::cols / 2));
    else HS_TRY(hs_tma_matrix(&p->b[i], x.b, a->K, x.N, x.ldb, 64));
    if (i >= p->sets) continue;
    p->tile0[i] = p->ntiles;
    p->ntiles += (int)HS_CEIL(x.N, cols);
  }
  const int64_t tiles = (int64_t)p->mtiles * p->ntiles;
  HS_NEED(tiles < (int64_t)1 << 31, "%lld tiles of %d x %d", (long long)tiles, S::rows, S::cols);
  return HS_OK;
}
template <class S> unsigned wg_grid(const wg_tiles& p) { return (unsigned)HS_MIN(p.mtiles * p.ntiles, hs_hopper_sms() * S::per_sm); }
#endif
