// head.cu - the row pass over logits: parts and picks of tiles of 64 ids (head.cuh), from stored logits or in the epilogue of the product
// x w^T, whose logits then never leave the block.
//
// head_wgmma_kernel     the main loop of gemm_wgmma.cuh, where gemm takes it for w; each warp hands 16 rows of 64 outputs through shared memory to
//                       its half warps.
// head_product_kernel   else the main loop and the tiles of gemm.cu; the block's outputs go through shared memory.
// So logits have the bits of gemm either way.
// Floor on an H200, 256 rows, V 248,320, D 2560: weights 1.27 GB, 0.30 ms; 326 GFLOP, 0.41 ms at 790 TFLOP/s. Parts and picks are 24 bytes for 64
// ids, 24 MB a step. Noise costs a quarter of a Philox block and two logarithms an id, about 0.2 ms beside the product. Expected: the distance
// of gemm_wgmma.cu plus that, since a block's tensor cores rest during its row pass. Unmeasured.
#include "gemm_tile.cuh"
#include "gemm_wgmma.cuh"
#include "head.cuh"

static const int tiles_threads = 128;

static __device__ __forceinline__ float row_invt(const head_rows& h, int64_t row) { return h.sample ? inverse_temperature(h.sample[row]) : h.invt; }

// Part and pick of one tile; both halves of a warp call it together. live: the row exists.
template <bool DRAW> static __device__ __forceinline__ void tile_out(const head_rows& h, const float z[4], int64_t row, int64_t tile, int64_t tiles, bool live) {
  const int lane = threadIdx.x & (head_lanes - 1);
  const int64_t first = tile * head_tile, r = live ? row : 0, left = live ? h.n - first : 0;
  unsigned long long key = 0;
  const head_part p = tile_pass<DRAW>(z, first, left, row_invt(h, r), DRAW ? h.sample + r : 0, &key);
  if (left <= 0) return;
  const int64_t at = row * tiles + tile;
  if (lane == 0) h.parts[at] = p;
  if (DRAW) {
    const int64_t mine = pick_id(key) - first - 4 * lane;
    if (mine >= 0 && mine < 4) h.picks[at].key = key, h.picks[at].z = mine == 0 ? z[0] : mine == 1 ? z[1] : mine == 2 ? z[2] : z[3];
  }
  if (h.target_z)
#pragma unroll
    for (int c = 0; c < 4; c++)
      if (first + 4 * lane + c == h.target[row]) h.target_z[row] = z[c];
}

// ---- from stored logits ----

template <bool DRAW> __global__ void __launch_bounds__(tiles_threads) head_tiles_kernel(head_rows h, int64_t tiles) {
  const int64_t row = blockIdx.x, tile = (int64_t)blockIdx.y * (tiles_threads / head_lanes) + threadIdx.x / head_lanes;
  const int64_t id = tile * head_tile + 4 * (threadIdx.x & (head_lanes - 1));
  float z[4];
#pragma unroll
  for (int c = 0; c < 4; c++) z[c] = id + c < h.n ? h.z[row * h.ld + id + c] : 0.0f;
  tile_out<DRAW>(h, z, row, tile, tiles, tile < tiles);
}

// ---- from the product ----

template <int BM, int BN, int WM, int WN, bool DRAW>
__global__ void __launch_bounds__(32 * WM * WN) head_product_kernel(head_rows h, int64_t tiles, bool chunks) {
  typedef mma_block<BM, BN, WM, WN, false, true> block;
  constexpr int pitch = BN + 4, halves = block::threads / head_lanes, per_row = BN / head_tile;
  static_assert(BN % head_tile == 0 && BM * per_row % halves == 0, "half warps take whole tiles");
  HS_DYN_SHARED(float, sh);
  const int64_t m0 = (int64_t)blockIdx.x * BM, n0 = (int64_t)blockIdx.y * BN;
  {
    block p;
    p.run((bf16*)sh, m0, n0, h.rows, h.n, h.D, h.x, h.D, h.w, h.D, chunks, chunks);
    cp_async_wait<0>();
    __syncthreads();
    p.each([&](int i, int j, float x) { sh[i * pitch + j] = x; });
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < BM * per_row; i += halves) {
    const int at = i + (int)threadIdx.x / head_lanes, r = at / per_row, t = at % per_row;
    if (m0 + (i + (int)(threadIdx.x & ~31u) / head_lanes) / per_row >= h.rows) continue;   // the warp's first row, so its second too
    const pack<float, 4> z = load_pack<float, 4>(sh + r * pitch + t * head_tile + 4 * (threadIdx.x & (head_lanes - 1)));
    tile_out<DRAW>(h, z.v, m0 + r, n0 / head_tile + t, tiles, m0 + r < h.rows);
  }
}

template <int BM, int BN, int WM, int WN, bool DRAW> static hs_status head_product(cudaStream_t s, const head_rows& h) {
  typedef mma_block<BM, BN, WM, WN, false, true> block;
  const size_t smem = HS_MAX((size_t)block::smem, sizeof(float) * BM * (BN + 4));
  return HS_LAUNCH(s, (head_product_kernel<BM, BN, WM, WN, DRAW>), dim3((unsigned)HS_CEIL(h.rows, BM), (unsigned)HS_CEIL(h.n, BN)), block::threads, smem, h,
                   head_tiles(h.n), hs_packs(h.D, 2, h.x, h.w));
}

// ---- from the product by wgmma ----

struct head_wgmma_args {
  wg_tiles tiles;
  head_rows h;
  int64_t ntiles;   // of 64 ids
};
typedef wg_shape<64, 128, 7> head_few;   // rows: the ring takes what one block an SM can have
typedef wg_shape<128, 256> head_many;

template <class S, bool DRAW> __global__ void __launch_bounds__(S::threads) head_wgmma_kernel(const __grid_constant__ head_wgmma_args p) {
#if HS_HOPPER
  HS_DYN_SHARED(unsigned char, raw);
  wg_run<S, false, true, false>(p.tiles, raw, [&](const float(&d)[S::cols / 2], int row, int, int n) {
    const int lane = threadIdx.x & 31, half = lane / head_lanes, warp = threadIdx.x >> 5, first = row + 16 * (warp & 3);
    float* const mine = (float*)(raw + S::ring) + warp * 16 * head_tile;   // 16 rows of 64; piece c of 4 at c ^ 2 (row % 8), against bank conflicts
    if (first >= p.tiles.M) return;
#pragma unroll
    for (int s = 0; s < S::cols / head_tile; s++) {
#pragma unroll
      for (int i = 0; i < head_tile / 2; i += 2) {
        const int r = (lane >> 2) + 4 * (i & 2), c = 8 * (i >> 2) + 2 * (lane & 3);
        store_pack<float, 2>(mine + r * head_tile + (c ^ 8 * (r & 7)), {{d[s * (head_tile / 2) + i], d[s * (head_tile / 2) + i + 1]}});
      }
      __syncwarp();
#pragma unroll 1
      for (int i = 0; i < 16 && first + i < p.tiles.M; i += 2) {
        const int r = i + half;
        const pack<float, 4> z = load_pack<float, 4>(mine + r * head_tile + (4 * (lane & (head_lanes - 1)) ^ 8 * (r & 7)));
        tile_out<DRAW>(p.h, z.v, first + r, (int64_t)n * (S::cols / head_tile) + s, p.ntiles, first + r < p.tiles.M);
      }
      __syncwarp();
    }
  });
#endif
}

static hs_gemm_group_args head_operands(const head_rows& h) {
  return {HS_BF16, HS_TRANS_B | HS_C_F32, h.rows, h.D, 1, h.x, h.D, {{h.n, h.w, h.D, 0, h.n}}, 0, 0};
}
template <class S, bool DRAW> static hs_status head_wgmma(cudaStream_t s, const head_rows& h) {
  const hs_gemm_group_args a = head_operands(h);
  head_wgmma_args p = {};
  HS_TRY((wg_list<S, false, true, false>(&a, &p.tiles)));
  p.h = h, p.ntiles = head_tiles(h.n);
  return HS_LAUNCH(s, (head_wgmma_kernel<S, DRAW>), wg_grid<S>(p.tiles), S::threads, S::ring + S::groups * 4 * 16 * head_tile * sizeof(float), p);
}

template <bool DRAW> static hs_status head_pass(cudaStream_t s, const head_rows& h) {
  const hs_gemm_group_args a = head_operands(h);
  if (!h.z && hs_gemm_by_wgmma(&a)) return h.rows <= 64 ? head_wgmma<head_few, DRAW>(s, h) : head_wgmma<head_many, DRAW>(s, h);
  if (!h.z) return h.rows <= 16 ? head_product<16, 64, 1, 4, DRAW>(s, h) : h.rows < 128 || h.n < 128 ? head_product<64, 64, 2, 2, DRAW>(s, h) : head_product<128, 128, 2, 4, DRAW>(s, h);
  const int64_t tiles = head_tiles(h.n);
  return HS_LAUNCH(s, head_tiles_kernel<DRAW>, dim3((unsigned)h.rows, (unsigned)HS_CEIL(tiles, tiles_threads / head_lanes)), tiles_threads, 0, h, tiles);
}
hs_status hs_head_pass(cudaStream_t s, const head_rows& h) { return h.sample ? head_pass<true>(s, h) : head_pass<false>(s, h); }
