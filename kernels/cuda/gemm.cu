// gemm.cu - the product ops C[M,N] = op(A) op(B) (+ C), and the forms that any device has: bf16 on tensor cores (mma.sync m16n8k16, f32
// accumulators), f32 on CUDA cores. gemm_wgmma.cu has the one for sm_90.
// An element is one chain over K from zero, 16 at a time (bf16: one instruction, f32: the sum of 16 products in order, which keeps the
// rounding error near that of blocked sums); C is added last. So its bits depend on its row of A, its column of B and K alone: not on M, N,
// transposition or the tile it falls into. The K tail is padded with zeros.
// Floor on an H200: 790 TFLOP/s in bf16, or the bytes of B at 4.3 TB/s below about 184 rows (gpu.md 3.3, 6.1). Expected of mma.sync on sm_90: at
// most 60 % of the former; f32 is for tests, half of the 67 TFLOP/s of the FMA pipes. Unmeasured.
#include "gemm_tile.cuh"

// ---- bf16 ----

template <int BM, int BN, int WM, int WN, bool TA, bool TB>
__global__ void __launch_bounds__(32 * WM * WN)
gemm_mma_kernel(int64_t M, int64_t N, int64_t K, const bf16* a, int64_t lda, const bf16* b, int64_t ldb, void* c, int64_t ldc, bool c_f32, bool add,
                bool chunks_a, bool chunks_b) {
  HS_DYN_SHARED(bf16, smem);
  const int64_t m0 = (int64_t)blockIdx.x * BM, n0 = (int64_t)blockIdx.y * BN;
  mma_block<BM, BN, WM, WN, TA, TB> p;
  p.run(smem, m0, n0, M, N, K, a, lda, b, ldb, chunks_a, chunks_b);
  p.each([&](int i, int j, float x) {
    const int64_t m = m0 + i, n = n0 + j;
    if (m >= M || n >= N) return;
    const int64_t at = m * ldc + n;
    if (c_f32) ((float*)c)[at] = add ? ((float*)c)[at] + x : x;
    else ((bf16*)c)[at] = from_f<bf16>(add ? to_f(((bf16*)c)[at]) + x : x);
  });
}

template <int BM, int BN, int WM, int WN, bool TA, bool TB> static hs_status gemm_mma(cudaStream_t s, const hs_gemm_args* a) {
  const dim3 grid((unsigned)HS_CEIL(a->M, BM), (unsigned)HS_CEIL(a->N, BN));
  return HS_LAUNCH(s, (gemm_mma_kernel<BM, BN, WM, WN, TA, TB>), grid, 32 * WM * WN, (size_t)mma_block<BM, BN, WM, WN, TA, TB>::smem, a->M, a->N, a->K,
                   (const bf16*)a->a, a->lda, (const bf16*)a->b, a->ldb, a->c, a->ldc, (a->flags & HS_C_F32) != 0, (a->flags & HS_BETA1) != 0,
                   hs_packs(a->lda, 2, a->a), hs_packs(a->ldb, 2, a->b));
}
template <int BM, int BN, int WM, int WN> static hs_status gemm_mma_sized(cudaStream_t s, const hs_gemm_args* a) {
  switch (a->flags & (HS_TRANS_A | HS_TRANS_B)) {
    case 0: return gemm_mma<BM, BN, WM, WN, false, false>(s, a);
    case HS_TRANS_A: return gemm_mma<BM, BN, WM, WN, true, false>(s, a);
    case HS_TRANS_B: return gemm_mma<BM, BN, WM, WN, false, true>(s, a);
    default: return gemm_mma<BM, BN, WM, WN, true, true>(s, a);
  }
}

// ---- f32 ----

static const int f32_k = 16;

// 16 TM x 64 outputs per block of 16 x 16 threads, TM x 4 each.
template <int TM, bool TA, bool TB>
__global__ void __launch_bounds__(256, 2)   // at least 2 blocks: leaves 128 registers
gemm_f32_kernel(int64_t M, int64_t N, int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  constexpr int BM = 16 * TM, BN = 64;
  HS_SHARED(float, sa, [f32_k][BM + 4]);
  HS_SHARED(float, sb, [f32_k][BN + 4]);
  const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
  const int64_t m0 = (int64_t)blockIdx.x * BM, n0 = (int64_t)blockIdx.y * BN;
  float acc[TM][4];
  for (int i = 0; i < TM; i++)
    for (int j = 0; j < 4; j++) acc[i][j] = 0;
  for (int64_t k0 = 0; k0 < K; k0 += f32_k) {
    for (int i = threadIdx.x; i < BM * f32_k; i += 256) {
      const int m = TA ? i % BM : i / f32_k, k = TA ? i / BM : i % f32_k;
      sa[k][m] = m0 + m < M && k0 + k < K ? a[TA ? (k0 + k) * lda + m0 + m : (m0 + m) * lda + k0 + k] : 0.0f;
    }
    for (int i = threadIdx.x; i < BN * f32_k; i += 256) {
      const int n = TB ? i / f32_k : i % BN, k = TB ? i % f32_k : i / BN;
      sb[k][n] = n0 + n < N && k0 + k < K ? b[TB ? (n0 + n) * ldb + k0 + k : (k0 + k) * ldb + n0 + n] : 0.0f;
    }
    __syncthreads();
    float part[TM][4];
    for (int i = 0; i < TM; i++)
      for (int j = 0; j < 4; j++) part[i][j] = 0;
#pragma unroll
    for (int k = 0; k < f32_k; k++) {
      const pack<float, 4> y = load_pack<float, 4>(&sb[k][4 * tx]);
      for (int i = 0; i < TM; i++) {
        const float x = sa[k][TM * ty + i];
        for (int j = 0; j < 4; j++) part[i][j] += x * y.v[j];
      }
    }
    for (int i = 0; i < TM; i++)
      for (int j = 0; j < 4; j++) acc[i][j] += part[i][j];
    __syncthreads();
  }
  for (int i = 0; i < TM; i++)
    for (int j = 0; j < 4; j++) {
      const int64_t m = m0 + TM * ty + i, n = n0 + 4 * tx + j;
      if (m < M && n < N) c[m * ldc + n] = add ? c[m * ldc + n] + acc[i][j] : acc[i][j];
    }
}
template <int TM, bool TA, bool TB> static hs_status gemm_f32(cudaStream_t s, const hs_gemm_args* a) {
  const dim3 grid((unsigned)HS_CEIL(a->M, 16 * TM), (unsigned)HS_CEIL(a->N, 64));
  return HS_LAUNCH(s, (gemm_f32_kernel<TM, TA, TB>), grid, 256, 0, a->M, a->N, a->K, (const float*)a->a, a->lda, (const float*)a->b, a->ldb, (float*)a->c,
                   a->ldc, (a->flags & HS_BETA1) != 0);
}
template <int TM> static hs_status gemm_f32_sized(cudaStream_t s, const hs_gemm_args* a) {
  switch (a->flags & (HS_TRANS_A | HS_TRANS_B)) {
    case 0: return gemm_f32<TM, false, false>(s, a);
    case HS_TRANS_A: return gemm_f32<TM, true, false>(s, a);
    case HS_TRANS_B: return gemm_f32<TM, false, true>(s, a);
    default: return gemm_f32<TM, true, true>(s, a);
  }
}

// ---- the op ----

// The tile follows M and N for speed only.
static hs_status gemm_tiled(cudaStream_t s, const hs_gemm_args* a) {
  if (a->dtype == HS_F32) return a->M <= 16 ? gemm_f32_sized<1>(s, a) : gemm_f32_sized<4>(s, a);
  if (a->M <= 16) return gemm_mma_sized<16, 64, 1, 4>(s, a);
  if (a->M < 128 || a->N < 128) return gemm_mma_sized<64, 64, 2, 2>(s, a);
  return gemm_mma_sized<128, 128, 2, 4>(s, a);
}

static enum { OWN, MMA, LT } form;

hs_status hs_gemm_configure(const char* value) {
  if (!strcmp(value, "cublaslt")) {
    HS_TRY(hs_gemm_lt_load());
    form = LT;
    return HS_OK;
  }
  HS_NEED(!strcmp(value, "own") || !strcmp(value, "mma"), "configure gemm: \"%s\", want own, mma or cublaslt", value);
  form = strcmp(value, "own") ? MMA : OWN;
  return HS_OK;
}
const char* hs_gemm_name() { return form == LT ? "cublaslt" : form == MMA ? "mma" : "own"; }

bool hs_gemm_by_wgmma(const hs_gemm_group_args* a) { return form != MMA && hs_gemm_wgmma_takes(a); }
static hs_gemm_group_args group_of_one(const hs_gemm_args* a) {
  return {a->dtype, a->flags, a->M, a->K, 1, a->a, a->lda, {{a->N, a->b, a->ldb, a->c, a->ldc}}, 0, 0};
}
static hs_gemm_args one_of_group(const hs_gemm_group_args* a, int64_t i) {
  const hs_gemm_set& x = a->set[i];
  return {a->dtype, a->flags, a->M, x.N, a->K, a->a, a->lda, x.b, x.ldb, x.c, x.ldc, 0, 0};
}

hs_status hs_gemm_own(cudaStream_t s, const hs_gemm_args* a) {
  const hs_gemm_group_args g = group_of_one(a);
  return hs_gemm_by_wgmma(&g) ? hs_gemm_wgmma(s, &g, false) : gemm_tiled(s, a);
}
static hs_status gemm_any(cudaStream_t s, const hs_gemm_args* a) { return form == LT ? hs_gemm_lt(s, a) : hs_gemm_own(s, a); }

static hs_status gemm_check(const hs_gemm_args* a) {
  HS_NEED(a->M > 0 && a->N > 0 && a->K > 0, "M %lld, N %lld, K %lld: need all > 0", (long long)a->M, (long long)a->N, (long long)a->K);
  const int64_t ca = a->flags & HS_TRANS_A ? a->M : a->K, cb = a->flags & HS_TRANS_B ? a->K : a->N;
  HS_NEED(a->lda >= ca, "lda %lld < %lld columns of A", (long long)a->lda, (long long)ca);
  HS_NEED(a->ldb >= cb, "ldb %lld < %lld columns of B", (long long)a->ldb, (long long)cb);
  HS_NEED(a->ldc >= a->N, "ldc %lld < %lld columns of C", (long long)a->ldc, (long long)a->N);
  HS_NEED_PTR(a); HS_NEED_PTR(b); HS_NEED_PTR(c);
  if (a->dtype != HS_F32 && a->dtype != HS_BF16) return hs_fail(HS_ERR_DTYPE, "dtype %d: the cuda table stores f32 (0) or bf16 (2)", (int)a->dtype);
  return HS_OK;
}

extern "C" hs_status hs_op_gemm(cudaStream_t s, const hs_gemm_args* a) {
  HS_TRY(gemm_check(a));
  return gemm_any(s, a);
}

// ---- products that share A: one launch by wgmma when it takes them all, else one after the other. A single set decides for itself whether it
// is multiplied by wgmma, so a set that is not aligned changes the launches, never the bits of the others. ----

extern "C" hs_status hs_op_gemm_group(cudaStream_t s, const hs_gemm_group_args* a) {
  HS_NEED(a->n >= 1 && a->n <= HS_GEMM_SETS, "n %lld, want 1..%d", (long long)a->n, HS_GEMM_SETS);
  for (int64_t i = 0; i < a->n; i++) {
    const hs_gemm_args one = one_of_group(a, i);
    HS_TRY(gemm_check(&one));
  }
  if (form != LT && hs_gemm_by_wgmma(a)) return hs_gemm_wgmma(s, a, false);
  for (int64_t i = 0; i < a->n; i++) {
    const hs_gemm_args one = one_of_group(a, i);
    HS_TRY(gemm_any(s, &one));
  }
  return HS_OK;
}

static hs_gemm_group_args swiglu_group(const hs_gemm_swiglu_args* a) {
  return {a->dtype, HS_TRANS_B, a->M, a->K, 2, a->x, a->ldx, {{a->N, a->gate, a->ldw, a->h, a->N}, {a->N, a->up, a->ldw, a->ws, a->N}}, 0, 0};
}
extern "C" int64_t hs_ws_gemm_swiglu(const hs_gemm_swiglu_args* a) {
  const hs_gemm_group_args g = swiglu_group(a);
  return a->M <= 0 || a->N <= 0 || (form != LT && hs_gemm_by_wgmma(&g)) ? 0 : hs_align(a->M * a->N * hs_sizeof(a->dtype));
}
extern "C" hs_status hs_op_gemm_swiglu(cudaStream_t s, const hs_gemm_swiglu_args* a) {
  HS_NEED(a->x && a->gate && a->up && a->h, "x, gate, up and h are required");
  HS_NEED_WS(hs_ws_gemm_swiglu(a));
  const hs_gemm_group_args g = swiglu_group(a);
  hs_gemm_args gate = one_of_group(&g, 0), up = one_of_group(&g, 1);
  HS_TRY(gemm_check(&gate));
  if (form != LT && hs_gemm_by_wgmma(&g)) return hs_gemm_wgmma(s, &g, true);
  HS_TRY(gemm_any(s, &gate));
  HS_TRY(gemm_any(s, &up));
  const hs_swiglu_args act = {a->dtype, 0, a->M * a->N, a->h, a->ws, a->h};
  return hs_op_swiglu(s, &act);
}
