// gemm_wgmma.cu - bf16 products by wgmma on sm_90: C_i = op(A) op(B_i) (+ C_i) for up to 4 matrices B_i in one launch, or silu(A G^T) * (A U^T).
//
// The main loop is gemm_wgmma.cuh's; tiles of all B_i form one list, and a thread stores what it holds from registers. SwiGLU: half of a tile's
// columns are the gate's and half the up projection's, and a thread holds both values of each output.
//
// An element is one chain over K from zero, 16 at a time, whatever the tile; C is added last. So its bits depend on its row of A, its column
// of B and K alone, if the hardware treats all widths of wgmma alike (to be tested on a device). They need not be those of gemm.cu's
// mma.sync, so a matrix must always take the same form: which one depends on flags, leading dimensions and addresses (multiples of 16 bytes),
// never on M or N. A dense weight [N,K] whose K is a multiple of 8 is always multiplied here by y = x W^T, whoever calls.
//
// Floor on an H200: 790 TFLOP/s, or the bytes of B at 4.3 TB/s below about 184 rows (gpu.md 6.1). Expected, unmeasured: 80-90% of the former
// with 128 x 256 tiles at K >= 2560 (stores are not overlapped, no clusters), 70-85% of the latter where N fills the device (B tiles of
// 4-16 KB, 40 to 96 KB in flight per SM), less below N = 4096, for which K would have to be split.
#include "gemm_wgmma.cuh"

namespace {

struct out_set {
  void* c;
  int64_t ldc;
  int N;
  bool pairs;   // two columns can be stored at once
};
struct group_args {
  wg_tiles tiles;
  out_set set[HS_GEMM_SETS];
  bool add, wide;   // wide: C is f32
};

#if HS_HOPPER

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
  if (p.wide && p.add) return o.pairs ? store_as<float, true, true, W>(o, p.tiles.M, row, col, value) : store_as<float, true, false, W>(o, p.tiles.M, row, col, value);
  if (p.wide) return o.pairs ? store_as<float, false, true, W>(o, p.tiles.M, row, col, value) : store_as<float, false, false, W>(o, p.tiles.M, row, col, value);
  if (p.add) return o.pairs ? store_as<bf16, true, true, W>(o, p.tiles.M, row, col, value) : store_as<bf16, true, false, W>(o, p.tiles.M, row, col, value);
  return o.pairs ? store_as<bf16, false, true, W>(o, p.tiles.M, row, col, value) : store_as<bf16, false, false, W>(o, p.tiles.M, row, col, value);
}

#endif

template <int BM, int BN, bool TA, bool TB, bool swiglu>
__global__ void __launch_bounds__(wg_shape<BM, BN>::threads, wg_shape<BM, BN>::per_sm) gemm_wgmma_kernel(const __grid_constant__ group_args p) {
#if HS_HOPPER
  HS_DYN_SHARED(unsigned char, raw);
  wg_run<wg_shape<BM, BN>, TA, TB, swiglu>(p.tiles, raw, [&](const float(&d)[BN / 2], int row, int set, int n) {
    if constexpr (swiglu) {   // gate in the first half of the columns, up in the second
      const auto h = [&](int i) { return swiglu_f(to_f(from_f<bf16>(d[i])), to_f(from_f<bf16>(d[i + BN / 4]))); };
      if (p.set[0].pairs) store_as<bf16, false, true, BN / 4>(p.set[0], p.tiles.M, row, n * (BN / 2), h);
      else store_as<bf16, false, false, BN / 4>(p.set[0], p.tiles.M, row, n * (BN / 2), h);
    } else store<BN / 2>(p, p.set[set], row, n * BN, [&](int i) { return d[i]; });
  });
#endif
}

template <int BM, int BN, bool TA, bool TB, bool swiglu> hs_status launch(cudaStream_t s, const hs_gemm_group_args* a) {
  typedef wg_shape<BM, BN> S;
  group_args p = {};
  HS_TRY((wg_list<S, TA, TB, swiglu>(a, &p.tiles)));
  p.add = a->flags & HS_BETA1, p.wide = a->flags & HS_C_F32;
  for (int i = 0; i < p.tiles.sets; i++) {
    const hs_gemm_set& x = a->set[i];
    p.set[i] = {x.c, x.ldc, (int)x.N, x.ldc % 2 == 0 && (uintptr_t)x.c % (p.wide ? 8 : 4) == 0};
  }
  return HS_LAUNCH(s, (gemm_wgmma_kernel<BM, BN, TA, TB, swiglu>), wg_grid<S>(p.tiles), S::threads, S::ring, p);
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
