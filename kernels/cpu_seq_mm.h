// cpu_seq_mm.h - small products and copies of the sequence ops, one instance per level (no include guard). Matrices are row-major and
// padded with zeros to SEQ_PAD columns where a comment says so.

HS_INLINE VR FN(splat)(real x) { return x - (VR){0}; }

// dst[rows, dp] = src[rows, d] (row stride lds), columns d..dp-1 zero.
static __attribute__((unused)) void FN(pack)(real* dst, int64_t dp, const real* src, int64_t lds, int64_t rows, int64_t d) {
  for (int64_t i = 0; i < rows; i++) {
    const real* s = src + i * lds;
    real* o = dst + i * dp;
    int64_t j = 0;
    for (; j < d; j += VW) vstore(o + j, vloadn(s + j, d - j));
    for (; j < dp; j += VW) vstore(o + j, vzero());
  }
}
// dst[rows, d] (row stride ldd) = src[rows, dp].
HS_INLINE void FN(unpack)(real* dst, int64_t ldd, const real* src, int64_t dp, int64_t rows, int64_t d) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < d; j += VW) vstoren(dst + i * ldd + j, vload(src + i * dp + j), d - j);
}
// dst[d, ldd] = src[rows, d]^T (row stride lds), columns rows..cols-1 zero.
static __attribute__((unused)) void FN(transpose)(real* dst, int64_t ldd, const real* src, int64_t lds, int64_t rows, int64_t d, int64_t cols) {
  for (int64_t i0 = 0; i0 < rows; i0 += 8) {
    const int64_t e = HS_MIN(rows, i0 + 8);
    for (int64_t j = 0; j < d; j++)
      for (int64_t i = i0; i < e; i++) dst[j * ldd + i] = src[i * lds + j];
  }
  if (cols > rows)
    for (int64_t j = 0; j < d; j++) memset(dst + j * ldd + rows, 0, (size_t)(cols - rows) * sizeof(real));
}

// Register block of c[R, W*VW]: mode 0 c = a b, 1 c += a b, 2 c -= a b. Element (r, k) of a is a[r*ars + k*acs]. One chain over
// ascending k per element whatever R and W are, so a row's bits do not depend on how many rows go with it.
HS_INLINE void FN(mk)(real* c, int64_t ldc, const real* a, int64_t ars, int64_t acs, const real* b, int64_t ldb, int64_t K, const int R,
                      const int W, const int mode) {
  VR acc[8][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    acc[r][0] = mode ? vload(c + r * ldc) : vzero();
    acc[r][1] = mode && W > 1 ? vload(c + r * ldc + VW) : vzero();
  }
  for (int64_t k = 0; k < K; k++) {
    const VR b0 = vload(b + k * ldb);
    const VR b1 = W > 1 ? vload(b + k * ldb + VW) : b0;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      VR x = FN(splat)(a[r * ars + k * acs]);
      if (mode == 2) x = -x;
      acc[r][0] = vfma(x, b0, acc[r][0]);
      if (W > 1) acc[r][1] = vfma(x, b1, acc[r][1]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    vstore(c + r * ldc, acc[r][0]);
    if (W > 1) vstore(c + r * ldc + VW, acc[r][1]);
  }
}
HS_INLINE void FN(mmcol)(real* c, int64_t ldc, const real* a, int64_t ars, int64_t acs, const real* b, int64_t ldb, int64_t M, int64_t K,
                         const int W, const int mode) {
  int64_t m = 0;
  for (; m + 8 <= M; m += 8) FN(mk)(c + m * ldc, ldc, a + m * ars, ars, acs, b, ldb, K, 8, W, mode);
  if (m + 4 <= M) {
    FN(mk)(c + m * ldc, ldc, a + m * ars, ars, acs, b, ldb, K, 4, W, mode);
    m += 4;
  }
  for (; m < M; m++) FN(mk)(c + m * ldc, ldc, a + m * ars, ars, acs, b, ldb, K, 1, W, mode);
}
HS_INLINE void FN(mmany)(real* c, int64_t ldc, const real* a, int64_t ars, int64_t acs, const real* b, int64_t ldb, int64_t M, int64_t Nc,
                         int64_t K, const int mode) {
  int64_t n = 0;
  for (; n + 2 * VW <= Nc; n += 2 * VW) FN(mmcol)(c + n, ldc, a, ars, acs, b + n, ldb, M, K, 2, mode);
  if (n < Nc) FN(mmcol)(c + n, ldc, a, ars, acs, b + n, ldb, M, K, 1, mode);
}
#define SEQ_MM_ARGS real *c, int64_t ldc, const real *a, int64_t ars, int64_t acs, const real *b, int64_t ldb, int64_t M, int64_t Nc, int64_t K
#define SEQ_MM_FN static __attribute__((noinline, unused)) void
// c[M, Nc] = a[M, K] b[K, Nc]; Nc a multiple of VW, b and c padded to it. mm0 overwrites, mm1 adds, mm2 subtracts.
SEQ_MM_FN FN(mm0)(SEQ_MM_ARGS) { FN(mmany)(c, ldc, a, ars, acs, b, ldb, M, Nc, K, 0); }
SEQ_MM_FN FN(mm1)(SEQ_MM_ARGS) { FN(mmany)(c, ldc, a, ars, acs, b, ldb, M, Nc, K, 1); }
SEQ_MM_FN FN(mm2)(SEQ_MM_ARGS) { FN(mmany)(c, ldc, a, ars, acs, b, ldb, M, Nc, K, 2); }
#undef SEQ_MM_ARGS
#undef SEQ_MM_FN
