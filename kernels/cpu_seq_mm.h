// cpu_seq_mm.h - small products and copies of the sequence ops, one instance per level (no include guard). Matrices are row-major and
// padded with zeros to SEQ_PAD columns where a comment says so.

HS_INLINE VR FN(splat)(real x) { return x - (VR){0}; }

// exp(x) for x < 88, exactly 0 below -87 (f32) or -708 (f64): subnormal results, which cost a hundred cycles each, are never formed.
// f32: 2^n exp(r), |r| <= ln2/2, Taylor polynomial of degree 7 as in cpu_vec.h; NaN passes through.
HS_INLINE VR FN(expz)(VR x) {
#if HS_REAL == 32
  const VI m = (VI)(x < FN(splat)(-87.0f));
  const VR y = vsel(m, vzero(), x), magic = FN(splat)(12582912.0f);
  const VR t = vfma(y, FN(splat)(1.44269504f), magic), n = t - magic;
  const VR r = vfma(n, FN(splat)(-1.42860677e-6f), vfma(n, FN(splat)(-0.693145752f), y));
  VR p = vfma(FN(splat)(1.0f / 5040), r, FN(splat)(1.0f / 720));
  p = vfma(p, r, FN(splat)(1.0f / 120));
  p = vfma(p, r, FN(splat)(1.0f / 24));
  p = vfma(p, r, FN(splat)(1.0f / 6));
  p = vfma(p, r, FN(splat)(0.5f));
  p = vfma(p, r * r, r) + FN(splat)(1.0f);
  return vsel(m, vzero(), p * (VR)(((VI)t << 23) + 0x3F800000));  // the low bits of t are n, and << 23 drops the rest
#else
  const VI m = (VI)(x < FN(splat)(-708));
  return vsel(m, vzero(), vexp(vsel(m, vzero(), x)));
#endif
}

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
// dst[d, ldd] = src[rows, d]^T (row stride lds), columns rows..cols-1 zero. Nothing right of max(rows, cols) is written.
static __attribute__((unused)) void FN(transpose)(real* dst, int64_t ldd, const real* src, int64_t lds, int64_t rows, int64_t d, int64_t cols) {
  cols = HS_MAX(rows, cols);
#if HS_REAL == 32 && HS_LEVEL == 2
  for (int64_t i0 = 0; i0 < cols; i0 += 16)
    for (int64_t j0 = 0; j0 < d; j0 += 16) {
      __m512 r[16], t[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) r[i] = i0 + i < rows ? (__m512)vloadn(src + (i0 + i) * lds + j0, d - j0) : _mm512_setzero_ps();
#pragma GCC unroll 16
      for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
      }
#define SEQ_PD(f, a, b) _mm512_castpd_ps(f(_mm512_castps_pd(a), _mm512_castps_pd(b)))
#pragma GCC unroll 16
      for (int i = 0; i < 16; i += 4) {  // 128-bit lane l of r[i+c]: column 4l+c of rows i..i+3
        r[i] = SEQ_PD(_mm512_unpacklo_pd, t[i], t[i + 2]);
        r[i + 1] = SEQ_PD(_mm512_unpackhi_pd, t[i], t[i + 2]);
        r[i + 2] = SEQ_PD(_mm512_unpacklo_pd, t[i + 1], t[i + 3]);
        r[i + 3] = SEQ_PD(_mm512_unpackhi_pd, t[i + 1], t[i + 3]);
      }
#undef SEQ_PD
#pragma GCC unroll 16
      for (int c = 0; c < 4; c++) {
        const __m512 a = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
        const __m512 e = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88), f = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
        t[c] = _mm512_shuffle_f32x4(a, e, 0x88);
        t[4 + c] = _mm512_shuffle_f32x4(b, f, 0x88);
        t[8 + c] = _mm512_shuffle_f32x4(a, e, 0xdd);
        t[12 + c] = _mm512_shuffle_f32x4(b, f, 0xdd);
      }
#pragma GCC unroll 16
      for (int j = 0; j < 16; j++)
        if (j0 + j < d) vstoren(dst + (j0 + j) * ldd + i0, (VR)t[j], cols - i0);
    }
#else
  for (int64_t i0 = 0; i0 < rows; i0 += 8) {
    const int64_t e = HS_MIN(rows, i0 + 8);
    for (int64_t j = 0; j < d; j++)
      for (int64_t i = i0; i < e; i++) dst[j * ldd + i] = src[i * lds + j];
  }
  if (cols > rows)
    for (int64_t j = 0; j < d; j++) memset(dst + j * ldd + rows, 0, (size_t)(cols - rows) * sizeof(real));
#endif
}

// Terms of one FMA chain. Short chains keep rounding near that of single operations: a chain of n terms loses about sqrt(n) roundings
// of its running sum, and a sum that starts at a large c would lose every term's low bits.
#define SEQ_CHAIN 32

// Register block of c[R, W*VW]: mode 0 c = a b, 1 c += a b, 2 c -= a b. Element (r, k) of a is a[r*ars + k*acs]. Per element: sums of
// SEQ_CHAIN terms, each one chain over ascending k from zero, added to c in order, whatever R and W are; so a row's bits do not depend
// on how many rows go with it.
HS_INLINE void FN(mk)(real* c, int64_t ldc, const real* a, int64_t ars, int64_t acs, const real* b, int64_t ldb, int64_t K, const int R,
                      const int W, const int mode) {
  for (int64_t k0 = 0; k0 < K || k0 == 0; k0 += SEQ_CHAIN) {
    const int64_t k1 = HS_MIN(K, k0 + SEQ_CHAIN);
    VR acc[8][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = vzero();
    for (int64_t k = k0; k < k1; k++) {
      const VR b0 = vload(b + k * ldb);
      const VR b1 = W > 1 ? vload(b + k * ldb + VW) : b0;
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const VR x = FN(splat)(a[r * ars + k * acs]);
        acc[r][0] = vfma(x, b0, acc[r][0]);
        if (W > 1) acc[r][1] = vfma(x, b1, acc[r][1]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int w = 0; w < W; w++) {
        real* q = c + r * ldc + w * VW;
        vstore(q, mode == 2 ? vload(q) - acc[r][w] : mode == 1 || k0 ? vload(q) + acc[r][w] : acc[r][w]);
      }
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
