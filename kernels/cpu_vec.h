// cpu_vec.h - one SIMD level's vocabulary; included by cpu_levels.h with HS_REAL, HS_LEVEL and HS_SUFFIX set.
//
//   real       float or double                 FN(f)     f with the level's suffix
//   VR, VI     vector of VW reals, of VW integers of the same width; + - * / and comparisons are GCC's vector operators
//   vload vstore            unaligned          vloadn vstoren   first n of VW lanes (others read as 0, not written), n >= VW = all
//   vset1 vzero vfma(a,b,c) = a*b+c (one rounding where the level has FMA)   vmax vsqrt vsel(mask,a,b)
//   vsum vhmax              across lanes, in a fixed tree
//   vexp vlog vsigmoid      f32: own polynomials, within 2 ulp (subnormals, infinities and NaN as libm); f64: libm lane by lane
//   rexp rlog rsigmoid rsoftplus rroot rfabs rfma    the same for one real: rexp(x) has the bits of a lane of vexp
//   vdot(a,b,n)             sum of a[i]*b[i]: VW lane chains, tail as a partial vector, then vsum
// A loop `for (i = 0; i < n; i += VW) vstoren(y+i, f(vloadn(x+i, n-i)), n-i)` gives each element the same bits wherever it stands.
#define HS_CAT2(a, b) a##_##b
#define HS_CAT(a, b) HS_CAT2(a, b)
#define FN(f) HS_CAT(f, HS_SUFFIX)
#define VR FN(hs_vr)
#define VRU FN(hs_vru)
#define VI FN(hs_vi)
#if HS_REAL == 64
#define real double
#define VW 2
#define hs_gemm hs_gemm_f64
#define hs_pgemm hs_pgemm_f64
#elif HS_LEVEL == 2
#define real float
#define VW 16
#define hs_gemm hs_gemm_f32
#define hs_pgemm hs_pgemm_f32
#elif HS_LEVEL == 1
#define real float
#define VW 8
#define hs_gemm hs_gemm_f32
#define hs_pgemm hs_pgemm_f32
#else
#define real float
#define VW 4
#define hs_gemm hs_gemm_f32
#define hs_pgemm hs_pgemm_f32
#endif
#define rexp FN(hs_rexp)
#define rlog FN(hs_rlog)
#define rroot FN(hs_rroot)
#define rsigmoid FN(hs_rsigmoid)
#define rsoftplus FN(hs_rsoftplus)
#define rfma FN(hs_rfma)
#define rfabs FN(hs_rfabs)
#define vload FN(hs_vload)
#define vstore FN(hs_vstore)
#define vloadn FN(hs_vloadn)
#define vstoren FN(hs_vstoren)
#define vset1 FN(hs_vset1)
#define vzero FN(hs_vzero)
#define vfma FN(hs_vfma)
#define vmax FN(hs_vmax)
#define vsqrt FN(hs_vsqrt)
#define vsel FN(hs_vsel)
#define vsum FN(hs_vsum)
#define vhmax FN(hs_vhmax)
#define vexp FN(hs_vexp)
#define vlog FN(hs_vlog)
#define vlogsum FN(hs_vlogsum)
#define vsigmoid FN(hs_vsigmoid)
#define vdot FN(hs_vdot)

// The functions of a level are stamped out once per translation unit, however many bodies it includes.
#if HS_REAL == 64 && !defined(HS_VEC_F64)
#define HS_VEC_F64
#define HS_VEC_EMIT
#elif HS_REAL == 32 && HS_LEVEL == 2 && !defined(HS_VEC_X16)
#define HS_VEC_X16
#define HS_VEC_EMIT
#elif HS_REAL == 32 && HS_LEVEL == 1 && !defined(HS_VEC_X8)
#define HS_VEC_X8
#define HS_VEC_EMIT
#elif HS_REAL == 32 && HS_LEVEL == 0 && !defined(HS_VEC_X4)
#define HS_VEC_X4
#define HS_VEC_EMIT
#endif

#ifdef HS_VEC_EMIT
#undef HS_VEC_EMIT
typedef real VR __attribute__((vector_size(VW * sizeof(real))));
typedef real VRU __attribute__((vector_size(VW * sizeof(real)), aligned(sizeof(real)), may_alias));
#if HS_REAL == 64
typedef int64_t VI __attribute__((vector_size(VW * 8)));
#else
typedef int32_t VI __attribute__((vector_size(VW * 4)));
#endif

HS_INLINE VR vload(const real* p) { return *(const VRU*)p; }
HS_INLINE void vstore(real* p, VR v) { *(VRU*)p = v; }
HS_INLINE VR vzero(void) { return (VR){0}; }
#if HS_REAL == 32 && HS_LEVEL == 2
HS_INLINE VR vset1(real x) { return (VR)_mm512_set1_ps(x); }   // a broadcasting load where x is in memory
#elif HS_REAL == 32 && HS_LEVEL == 1
HS_INLINE VR vset1(real x) { return (VR)_mm256_set1_ps(x); }
#elif HS_REAL == 32
HS_INLINE VR vset1(real x) { return (VR){x, x, x, x}; }
#else
HS_INLINE VR vset1(real x) { return (VR){x, x}; }
#endif
HS_INLINE VR vsel(VI m, VR a, VR b) { return (VR)(((VI)a & m) | ((VI)b & ~m)); }

HS_INLINE VR vloadn(const real* p, int64_t n) {
  if (n >= VW) return vload(p);
#if HS_REAL == 32 && HS_LEVEL == 2
  return (VR)_mm512_maskz_loadu_ps((__mmask16)((1u << (n > 0 ? n : 0)) - 1), p);
#else
  real t[VW] = {0};
  for (int64_t i = 0; i < n; i++) t[i] = p[i];
  return vload(t);
#endif
}
HS_INLINE void vstoren(real* p, VR v, int64_t n) {
  if (n >= VW) { vstore(p, v); return; }
#if HS_REAL == 32 && HS_LEVEL == 2
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << (n > 0 ? n : 0)) - 1), (__m512)v);
#else
  for (int64_t i = 0; i < n; i++) p[i] = v[i];
#endif
}

#if HS_REAL == 32 && HS_LEVEL == 2
HS_INLINE VR vfma(VR a, VR b, VR c) { return (VR)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
HS_INLINE VR vmax(VR a, VR b) { return (VR)_mm512_max_ps((__m512)a, (__m512)b); }
HS_INLINE VR vsqrt(VR a) { return (VR)_mm512_sqrt_ps((__m512)a); }
HS_INLINE real vsum(VR v) { return _mm512_reduce_add_ps((__m512)v); }
HS_INLINE real vhmax(VR v) { return _mm512_reduce_max_ps((__m512)v); }
HS_INLINE real rfma(real a, real b, real c) { return __builtin_fmaf(a, b, c); }
HS_INLINE real rroot(real x) { return __builtin_sqrtf(x); }
HS_INLINE real rfabs(real x) { return __builtin_fabsf(x); }
#else
HS_INLINE real vsum(VR v) {
  real t[VW];
  vstore(t, v);
  for (int w = VW / 2; w > 0; w /= 2)
    for (int i = 0; i < w; i++) t[i] += t[i + w];
  return t[0];
}
HS_INLINE real vhmax(VR v) {
  real m = v[0];
  for (int i = 1; i < VW; i++) m = v[i] > m ? v[i] : m;
  return m;
}
HS_INLINE VR vmax(VR a, VR b) { return vsel(a > b, a, b); }
#if HS_REAL == 64
HS_INLINE VR vfma(VR a, VR b, VR c) { return a * b + c; }
HS_INLINE VR vsqrt(VR a) { return (VR){sqrt(a[0]), sqrt(a[1])}; }
HS_INLINE real rfma(real a, real b, real c) { return a * b + c; }
HS_INLINE real rroot(real x) { return sqrt(x); }
HS_INLINE real rfabs(real x) { return fabs(x); }
#else
#if HS_LEVEL == 1
HS_INLINE VR vfma(VR a, VR b, VR c) { return (VR)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
HS_INLINE VR vsqrt(VR a) { return (VR)_mm256_sqrt_ps((__m256)a); }
HS_INLINE real rfma(real a, real b, real c) { return __builtin_fmaf(a, b, c); }
#else
HS_INLINE VR vfma(VR a, VR b, VR c) { return a * b + c; }
HS_INLINE VR vsqrt(VR a) {
  for (int i = 0; i < VW; i++) a[i] = __builtin_sqrtf(a[i]);
  return a;
}
HS_INLINE real rfma(real a, real b, real c) { return a * b + c; }
#endif
HS_INLINE real rroot(real x) { return __builtin_sqrtf(x); }
HS_INLINE real rfabs(real x) { return __builtin_fabsf(x); }
#endif
#endif

#if HS_REAL == 64
HS_INLINE VR vexp(VR x) { return (VR){exp(x[0]), exp(x[1])}; }
HS_INLINE VR vlog(VR x) { return (VR){log(x[0]), log(x[1])}; }
#else
// exp(x) = 2^n exp(r), n = round(x/ln2), |r| <= ln2/2; exp(r) by its Taylor polynomial of degree 7 (relative remainder 6e-9).
// 2^n is applied in two factors, so that results down to the smallest subnormal come out right.
HS_INLINE VR vexp(VR x) {
  const VR lo = vset1(-105.0f), hi = vset1(89.0f), magic = vset1(12582912.0f);
  VR y = vsel(x < lo, lo, x);
  y = vsel(y > hi, hi, y);
  VR t = vfma(y, vset1(1.44269504f), magic);
  VR n = t - magic;
  VR r = vfma(n, vset1(-0.693145752f), y);            // ln2, high part: 16 bits, so n*high is exact
  r = vfma(n, vset1(-1.42860677e-6f), r);
  VR p = vset1(1.0f / 5040);
  p = vfma(p, r, vset1(1.0f / 720));
  p = vfma(p, r, vset1(1.0f / 120));
  p = vfma(p, r, vset1(1.0f / 24));
  p = vfma(p, r, vset1(1.0f / 6));
  p = vfma(p, r, vset1(0.5f));
  p = vfma(p, r * r, r) + vset1(1.0f);
  VI ni = (VI)t - 0x4B400000;
  VI n1 = ni >> 1;
  VI n2 = ni - n1;
  return p * (VR)((n1 + 127) << 23) * (VR)((n2 + 127) << 23);
}
// ef ln2 + log(1+f), 1+f in [sqrt(1/2), sqrt(2)); log(1+f) = 2 atanh(s), s = f/(2+f), arranged so that f enters exactly.
HS_INLINE VR vlogsum(VR ef, VR f) {
  VR s = f / (f + vset1(2.0f));
  VR z = s * s;
  VR h = vset1(0.5f) * f * f;
  VR p = vset1(2.0f / 9);
  p = vfma(p, z, vset1(2.0f / 7));
  p = vfma(p, z, vset1(2.0f / 5));
  p = vfma(p, z, vset1(2.0f / 3));
  p = p * z;
  VR q = h - (s * (h + p) + ef * vset1(1.42860677e-6f));
  return ef * vset1(0.693145752f) - (q - f);
}
HS_INLINE VR vlog(VR x) {
  VI sub = x < vset1(1.17549435e-38f);
  VR y = vsel(sub, x * vset1(8388608.0f), x);
  VI i = (VI)y - 0x3f3504f3;
  VI e = i >> 23;
  VR f = (VR)((VI)y - (e << 23)) - vset1(1.0f);
  VR ef = __builtin_convertvector(e - (sub & 23), VR);
  VR out = vlogsum(ef, f);
  const VR inf = vset1(__builtin_inff());
  out = vsel(x < inf, out, x);                         // inf and NaN give themselves
  out = vsel(x == vzero(), -inf, out);
  return vsel(x < vzero(), vset1(__builtin_nanf("")), out);
}
#endif
HS_INLINE VR vsigmoid(VR x) { return vset1(1) / (vset1(1) + vexp(-x)); }
HS_INLINE real rexp(real x) { return vexp(vset1(x))[0]; }
HS_INLINE real rlog(real x) { return vlog(vset1(x))[0]; }
HS_INLINE real rsigmoid(real x) { return vsigmoid(vset1(x))[0]; }
HS_INLINE real rsoftplus(real x) { return x > 30 ? x : (real)log1p(exp((double)x)); }
HS_INLINE real vdot(const real* a, const real* b, int64_t n) {
  VR s = vzero();
  for (int64_t i = 0; i < n; i += VW) s = vfma(vloadn(a + i, n - i), vloadn(b + i, n - i), s);
  return vsum(s);
}
#endif
