// gemm_tile.cuh - the bf16 main loop of gemm.cu and head.cu: a block's BM x BN outputs in mma.sync accumulators, K in order.
#ifndef HS_GEMM_TILE_CUH
#define HS_GEMM_TILE_CUH
#include "gemm.cuh"

static const int mma_k = 32, mma_stages = 3;   // K per tile, tiles in flight

// A tile of R rows and W columns in shared memory; the pitch keeps ldmatrix free of bank conflicts.
template <int R, int W> struct tile {
  static const int pitch = W + 8, size = R * pitch;
};

// Starts loading rows r0.. and columns c0.. of g[rows, cols] (ld elements per row) into a tile, zero outside. chunks = rows of g start at
// multiples of 16 bytes.
template <int R, int W, int threads>
static __device__ __forceinline__ void load_tile(bf16* dst, const bf16* g, int64_t ld, int64_t r0, int64_t rows, int64_t c0, int64_t cols, bool chunks) {
#pragma unroll
  for (int i = 0; i < R * W / 8; i += threads) {
    const int at = i + (int)threadIdx.x, r = at / (W / 8), c = at % (W / 8) * 8;
    if (R * W / 8 % threads && at >= R * W / 8) break;
    const int64_t left = r0 + r < rows ? cols - (c0 + c) : 0;
    const int n = left <= 0 ? 0 : left < 8 ? (int)left : 8;
    const bf16* src = n ? g + (r0 + r) * ld + c0 + c : g;
    bf16* to = dst + r * tile<R, W>::pitch + c;
    if (chunks) cp_async16(to, src, 2 * n);
    else {
      pack<bf16, 8> p;
      for (int j = 0; j < 8; j++) p.v[j] = j < n ? src[j] : from_f<bf16>(0.0f);
      store_pack<bf16, 8>(to, p);
    }
  }
}

// BM x BN outputs of a block of WM x WN warps. TA, TB: the operand lies as [K, M] and [N, K]. After run(), thread `lane` of a warp holds
// of fragment (i, j), rows wm + 16 i + lane/4 (+ 8 for e >= 2) and columns wn + 8 j + 2 (lane%4) + e%2.
template <int BM, int BN, int WM, int WN, bool TA, bool TB> struct mma_block {
  static const int threads = 32 * WM * WN, FM = BM / WM / 16, FN = BN / WN / 8;
  static_assert(FM > 0 && FN % 2 == 0, "a warp has whole fragments");
  typedef tile<TA ? mma_k : BM, TA ? BM : mma_k> tile_a;
  typedef tile<TB ? BN : mma_k, TB ? mma_k : BN> tile_b;
  static const int smem = (int)sizeof(bf16) * mma_stages * (tile_a::size + tile_b::size);
  float acc[FM][FN][4];

  __device__ __forceinline__ static int wm() { return (int)(threadIdx.x >> 5) / WN * (BM / WM); }
  __device__ __forceinline__ static int wn() { return (int)(threadIdx.x >> 5) % WN * (BN / WN); }
  // All products of the block. sa: `smem` bytes of shared memory, free again after a __syncthreads().
  __device__ __forceinline__ void run(bf16* sa, int64_t m0, int64_t n0, int64_t M, int64_t N, int64_t K, const bf16* a, int64_t lda, const bf16* b,
                                      int64_t ldb, bool chunks_a, bool chunks_b) {
    bf16* sb = sa + mma_stages * tile_a::size;
    const int lane = threadIdx.x & 31;
    const int64_t nk = (K + mma_k - 1) / mma_k;
    auto load = [&](int64_t t) {
      if (t < nk) {
        bf16 *da = sa + t % mma_stages * tile_a::size, *db = sb + t % mma_stages * tile_b::size;
        if (TA) load_tile<mma_k, BM, threads>(da, a, lda, t * mma_k, K, m0, M, chunks_a);
        else load_tile<BM, mma_k, threads>(da, a, lda, m0, M, t * mma_k, K, chunks_a);
        if (TB) load_tile<BN, mma_k, threads>(db, b, ldb, n0, N, t * mma_k, K, chunks_b);
        else load_tile<mma_k, BN, threads>(db, b, ldb, t * mma_k, K, n0, N, chunks_b);
      }
      cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < FM; i++)
#pragma unroll
      for (int j = 0; j < FN; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) acc[i][j][e] = 0;
#pragma unroll
    for (int t = 0; t < mma_stages - 1; t++) load(t);
    for (int64_t t = 0; t < nk; t++) {
      cp_async_wait<mma_stages - 2>();
      __syncthreads();
      load(t + mma_stages - 1);
      const bf16 *ta = sa + t % mma_stages * tile_a::size, *tb = sb + t % mma_stages * tile_b::size;
#pragma unroll
      for (int k = 0; k < mma_k; k += 16) {
        uint32_t fa[FM][4], fb[FN][2];
#pragma unroll
        for (int i = 0; i < FM; i++) {
          const int m = wm() + 16 * i;
          if (TA) ldmatrix_x4_trans(fa[i], ta + (k + (lane & 7) + 8 * (lane >> 4)) * tile_a::pitch + m + 8 * (lane >> 3 & 1));
          else ldmatrix_x4(fa[i], ta + (m + (lane & 15)) * tile_a::pitch + k + 8 * (lane >> 4));
        }
#pragma unroll
        for (int j = 0; j < FN; j += 2) {
          const int n = wn() + 8 * j;
          uint32_t r[4];
          if (TB) ldmatrix_x4(r, tb + (n + (lane & 7) + 8 * (lane >> 4)) * tile_b::pitch + k + 8 * (lane >> 3 & 1));
          else ldmatrix_x4_trans(r, tb + (k + (lane & 15)) * tile_b::pitch + n + 8 * (lane >> 4));
          fb[j][0] = r[0], fb[j][1] = r[1], fb[j + 1][0] = r[2], fb[j + 1][1] = r[3];
        }
#pragma unroll
        for (int i = 0; i < FM; i++)
#pragma unroll
          for (int j = 0; j < FN; j++) mma_bf16(acc[i][j], fa[i], fb[j], acc[i][j]);
      }
    }
  }
  // Calls f(row of the block, column of the block, value) for each output of the thread.
  template <class F> __device__ __forceinline__ void each(F f) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < FM; i++)
#pragma unroll
      for (int j = 0; j < FN; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) f(wm() + 16 * i + (lane >> 2) + 8 * (e >> 1), wn() + 8 * j + 2 * (lane & 3) + (e & 1), acc[i][j][e]);
  }
};
#endif
