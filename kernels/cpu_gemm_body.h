// cpu_gemm_body.h - the own matrix product (see cpu_gemm.c). Stamped out per SIMD level by cpu_levels.h.
//
// A register tile is MR rows x NV vectors of columns; per K step it loads NV vectors of the packed panel and broadcasts MR elements
// of A, read through a row stride and a K stride, so A may be transposed.

#if HS_LEVEL == 2
#define TILE_NV 3   // 8 x 48: 24 sums, 3 columns, 1 broadcast of 32 registers
#define TILE_MR 8
#elif HS_LEVEL == 1
#define TILE_NV 2   // 6 x 16: 12 sums of 16 registers
#define TILE_MR 6
#else
#define TILE_NV 2
#define TILE_MR 4
#endif

typedef struct {
  uint32_t flags;
  int64_t M, N, K;
  const real* a;
  int64_t ars, aks;   // strides of A: from row to row, from k to k
  const real* b;
  int64_t ldb;
  real* c;
  int64_t ldc;
  int64_t nv, panels, rows, group, groups;   // vectors per panel, panels; rows and panels per task; groups of panels
} FN(gemm_ctx);

// dst[k][NR] = the panel's n columns from k0 on, zero beyond them.
HS_INLINE void FN(pack_rows)(real* dst, const real* b, int64_t ldb, int64_t kc, int64_t n, int64_t nr) {
  for (int64_t k = 0; k < kc; k++)
    for (int64_t j = 0; j < nr; j += VW) vstore(dst + k * nr + j, vloadn(b + k * ldb + j, n - j));
}

#if HS_REAL == 32 && HS_LEVEL == 2
// 16 x 16 transpose: rows of B (16 columns of the panel) to K-major.
HS_INLINE void FN(pack_16)(real* dst, int64_t nr, const real* b, int64_t ldb, int64_t n, int64_t kn) {
  __m512 r[16], t[16];
  const __mmask16 m = (__mmask16)((1u << kn) - 1);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = i < n ? _mm512_maskz_loadu_ps(m, b + i * ldb) : _mm512_setzero_ps();
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++)
    if (i < kn) _mm512_storeu_ps(dst + i * nr, r[i]);
}
#endif

HS_INLINE void FN(pack_cols)(real* dst, const real* b, int64_t ldb, int64_t kc, int64_t n, int64_t nr) {
#if HS_REAL == 32 && HS_LEVEL == 2
  for (int64_t j = 0; j < nr; j += 16)
    for (int64_t k = 0; k < kc; k += 16) FN(pack_16)(dst + k * nr + j, nr, b + j * ldb + k, ldb, n - j, HS_MIN(16, kc - k));
#else
  for (int64_t j = 0; j < nr; j++)
    for (int64_t k = 0; k < kc; k++) dst[k * nr + j] = j < n ? b[j * ldb + k] : 0;
#endif
}

// One register tile: c (+)= A rows x packed panel over kc steps; n columns are stored. add: c += sum, else c = sum.
HS_INLINE __attribute__((flatten)) void FN(tile)(const int mr, const int nv, const real* a, int64_t ars, int64_t aks, const real* p, int64_t kc, real* c, int64_t ldc, int64_t n, int add) {
  VR s[TILE_MR][TILE_NV];
#pragma GCC unroll 8
  for (int i = 0; i < mr; i++)
#pragma GCC unroll 3
    for (int j = 0; j < nv; j++) s[i][j] = vzero();
  const real *a0 = a, *a3 = a + 3 * ars, *a6 = a + 6 * ars;
  for (int64_t k = 0; k < kc; k++) {
    VR b[TILE_NV];
#pragma GCC unroll 3
    for (int j = 0; j < nv; j++) b[j] = vload(p + j * VW);
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) {
      const real* ai = i < 3 ? a0 + i * ars : i < 6 ? a3 + (i - 3) * ars : a6 + (i - 6) * ars;
      VR x = vset1(*ai);
#pragma GCC unroll 3
      for (int j = 0; j < nv; j++) s[i][j] = vfma(x, b[j], s[i][j]);
    }
    p += nv * VW;
    a0 += aks;
    a3 += aks;
    a6 += aks;
  }
#pragma GCC unroll 8
  for (int i = 0; i < mr; i++)
#pragma GCC unroll 3
    for (int j = 0; j < nv; j++) {
      real* q = c + i * ldc + j * VW;
      int64_t left = n - j * VW;
      if (left <= 0) continue;
      vstoren(q, add ? vloadn(q, left) + s[i][j] : s[i][j], left);
    }
}

#define TILE(MR, NV) \
  static __attribute__((noinline)) void FN(tile_##MR##_##NV)(const real* a, int64_t ars, int64_t aks, const real* p, int64_t kc, real* c, int64_t ldc, int64_t n, int add) { \
    FN(tile)(MR, NV, a, ars, aks, p, kc, c, ldc, n, add); \
  }
#define TILES(NV) TILE(1, NV) TILE(2, NV) TILE(3, NV) TILE(4, NV)
TILES(1) TILES(2)
#if TILE_MR >= 6
TILE(5, 1) TILE(6, 1) TILE(5, 2) TILE(6, 2)
#endif
#if TILE_MR >= 8
TILE(7, 1) TILE(8, 1) TILE(7, 2) TILE(8, 2)
TILES(3) TILE(5, 3) TILE(6, 3) TILE(7, 3) TILE(8, 3)
#endif

typedef void (*FN(tile_fn))(const real*, int64_t, int64_t, const real*, int64_t, real*, int64_t, int64_t, int);

HS_INLINE FN(tile_fn) FN(tile_for)(int64_t mr, int64_t nv) {
  static const FN(tile_fn) t[TILE_NV][TILE_MR] = {
#if TILE_MR == 4
    {FN(tile_1_1), FN(tile_2_1), FN(tile_3_1), FN(tile_4_1)},
    {FN(tile_1_2), FN(tile_2_2), FN(tile_3_2), FN(tile_4_2)},
#elif TILE_MR == 6
    {FN(tile_1_1), FN(tile_2_1), FN(tile_3_1), FN(tile_4_1), FN(tile_5_1), FN(tile_6_1)},
    {FN(tile_1_2), FN(tile_2_2), FN(tile_3_2), FN(tile_4_2), FN(tile_5_2), FN(tile_6_2)},
#else
    {FN(tile_1_1), FN(tile_2_1), FN(tile_3_1), FN(tile_4_1), FN(tile_5_1), FN(tile_6_1), FN(tile_7_1), FN(tile_8_1)},
    {FN(tile_1_2), FN(tile_2_2), FN(tile_3_2), FN(tile_4_2), FN(tile_5_2), FN(tile_6_2), FN(tile_7_2), FN(tile_8_2)},
    {FN(tile_1_3), FN(tile_2_3), FN(tile_3_3), FN(tile_4_3), FN(tile_5_3), FN(tile_6_3), FN(tile_7_3), FN(tile_8_3)},
#endif
  };
  return t[nv - 1][mr - 1];
}

// A block [kc][m] of a transposed A to tiles of MR rows, each [kc][MR]: read in the order of memory, then from L2.
HS_INLINE void FN(pack_a)(real* dst, const real* a, int64_t lda, int64_t kc, int64_t m) {
  for (int64_t k = 0; k < kc; k++) {
    const real* row = a + k * lda;
    int64_t i = 0;
    for (; i + TILE_MR <= m; i += TILE_MR) memcpy(dst + i * kc + k * TILE_MR, row + i, TILE_MR * sizeof(real));
    for (int64_t j = 0; i + j < m; j++) dst[i * kc + k * TILE_MR + j] = row[i + j];
  }
}

// Where the block of B after panel p and k0 starts in a task's walk over panels [p0, p1), 0 after its last one.
HS_INLINE const real* FN(next_block)(const FN(gemm_ctx)* g, int64_t p, int64_t p0, int64_t p1, int64_t k0) {
  if (p + 1 < p1) return g->b + (p + 1) * g->nv * VW * g->ldb + k0;
  if (k0 + HS_GEMM_KC < g->K) return g->b + p0 * g->nv * VW * g->ldb + k0 + HS_GEMM_KC;
  return p1 < g->panels ? g->b + p1 * g->nv * VW * g->ldb : 0;
}

static void FN(gemm_task)(void* c_, int64_t task, int worker) {
  (void)worker;
  const FN(gemm_ctx)* g = c_;
  real panel[HS_GEMM_KC * TILE_NV * VW] __attribute__((aligned(64)));
  real block[HS_MAX(HS_GEMM_KC * GEMM_TRANS_ROWS, SPREAD_LD * GEMM_ROWS)] __attribute__((aligned(64)));
  const int64_t i0 = task / g->groups * g->rows, p0 = task % g->groups * g->group, p1 = HS_MIN(p0 + g->group, g->panels);
  const int64_t m = HS_MIN(g->rows, g->M - i0);
  const int packed = g->ars == 1 && m > 1;
  for (int64_t k0 = 0; k0 < g->K; k0 += HS_GEMM_KC) {
    const int64_t kc = HS_MIN(HS_GEMM_KC, g->K - k0);
    const int add = k0 > 0 || (g->flags & HS_BETA1);
    const real* a = g->a + i0 * g->ars + k0 * g->aks;
    if (packed) FN(pack_a)(block, a, g->aks, kc, m);
    // Rows a multiple of half a page apart fall into the same few cache sets: copies spread them out.
    const int spread = !packed && p1 - p0 > 1 && m > 128 && g->ars * (int64_t)sizeof(real) % 2048 == 0;
    if (spread)
      for (int64_t i = 0; i < m; i++) memcpy(block + i * SPREAD_LD, a + i * g->ars, (size_t)kc * sizeof(real));
    const real* at = spread ? block : a;
    const int64_t ars = spread ? SPREAD_LD : g->ars;
    for (int64_t p = p0; p < p1; p++) {
      const int64_t j0 = p * g->nv * VW, nv = HS_MIN(g->nv, HS_CEIL(g->N - j0, VW)), nr = nv * VW, n = HS_MIN(nr, g->N - j0);
      if (g->flags & HS_TRANS_B) FN(pack_cols)(panel, g->b + j0 * g->ldb + k0, g->ldb, kc, n, nr);
      else FN(pack_rows)(panel, g->b + k0 * g->ldb + j0, g->ldb, kc, n, nr);
      real* c = g->c + i0 * g->ldc + j0;
      // Ask for the next block of B while this one is in use, a few rows of it per tile.
      const real* ahead = (g->flags & HS_TRANS_B) ? FN(next_block)(g, p, p0, p1, k0) : 0;
      const int64_t last = (g->N - 1) * g->ldb + g->K, lines = HS_CEIL(nr * TILE_MR, m);
      for (int64_t i = 0; i < m; i += TILE_MR) {
        for (int64_t r = i / TILE_MR * lines; ahead && r < HS_MIN(nr, (i / TILE_MR + 1) * lines); r++)
          for (int64_t k = 0; k < HS_GEMM_KC && ahead + r * g->ldb + k < g->b + last; k += 64 / (int64_t)sizeof(real))
            __builtin_prefetch(ahead + r * g->ldb + k);
        // Rows of A lie apart: fetch those of the next tile too.
        if (!packed && m > 128)
          for (int64_t r = i + TILE_MR; r < HS_MIN(m, i + 2 * TILE_MR); r++)
            for (int64_t k = 0; k < kc; k += 64 / (int64_t)sizeof(real)) __builtin_prefetch(at + r * ars + k);
        const FN(tile_fn) tile = FN(tile_for)(HS_MIN(TILE_MR, m - i), nv);
        if (packed) tile(block + i * kc, 1, TILE_MR, panel, kc, c + i * g->ldc, g->ldc, n, add);
        else tile(at + i * ars, ars, g->aks, panel, kc, c + i * g->ldc, g->ldc, n, add);
      }
    }
  }
}

static void FN(gemm_run)(uint32_t flags, int64_t M, int64_t N, int64_t K, const real* a, int64_t lda, const real* b, int64_t ldb, real* c, int64_t ldc, int parallel) {
  FN(gemm_ctx) g = {.flags = flags, .M = M, .N = N, .K = K, .a = a, .ars = lda, .aks = 1, .b = b, .ldb = ldb, .c = c, .ldc = ldc};
  if (flags & HS_TRANS_A) g.ars = 1, g.aks = lda;
  // Panels of 3 vectors run fastest, but few uneven panels share out badly.
  const int64_t vecs = HS_CEIL(N, VW), threads = parallel ? hs_num_threads() : 1;
  g.nv = HS_MIN(vecs, TILE_NV);
  if (TILE_NV == 3 && vecs < 16 && vecs % 3 && vecs % 2 == 0) g.nv = 2;
  g.panels = HS_CEIL(vecs, g.nv);
  const int64_t most = g.ars == 1 ? GEMM_TRANS_ROWS : GEMM_ROWS;
  g.rows = HS_CEIL(HS_MIN(M, g.ars == 1 ? HS_MIN(most, HS_CEIL(M, threads)) : most), TILE_MR) * TILE_MR;
  g.rows = HS_MIN(g.rows, most);
  const int64_t chunks = HS_CEIL(M, g.rows);
  // A task takes several panels of its rows while there are enough tasks: A is then read from cache again.
  g.group = HS_MAX(1, HS_MIN(g.panels, g.panels * chunks / (4 * threads)));
  if (g.ars == 1 && chunks >= threads) g.group = g.panels;
  g.groups = HS_CEIL(g.panels, g.group);
  if (parallel && M * N * K > 16384) hs_parallel(g.groups * chunks, FN(gemm_task), &g);
  else
    for (int64_t t = 0; t < g.groups * chunks; t++) FN(gemm_task)(&g, t, 0);
}

#undef TILE_NV
#undef TILE_MR
#undef TILE
#undef TILES
