// optim_math.h - the scalar formulas of the optimiser's storage forms, shared by every table: plain C that is also C++ and CUDA.
// Everything here works on bits or is exact in float32, so that all tables give the same bits. The contract is hs_adamw_args of abi.h.
#ifndef HS_OPTIM_MATH_H
#define HS_OPTIM_MATH_H
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define HS_HD static __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define HS_HD static inline __attribute__((always_inline, unused))
#else
#define HS_HD static inline
#endif

HS_HD uint32_t hs_bits(float x) {
  uint32_t b;
  memcpy(&b, &x, 4);
  return b;
}
HS_HD float hs_float(uint32_t b) {
  float x;
  memcpy(&x, &b, 4);
  return x;
}
HS_HD int hs_is_nan(uint32_t b) { return (b & 0x7fffffffu) > 0x7f800000u; }

// ---- random bits: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) ----

#define HS_PHILOX_ROUND(a, b, c, d, k0, k1) do { \
  const uint64_t p_ = (uint64_t)0xD2511F53u * (a), q_ = (uint64_t)0xCD9E8D57u * (c); \
  (a) = (uint32_t)(q_ >> 32) ^ (b) ^ (k0); \
  (b) = (uint32_t)q_; \
  (c) = (uint32_t)(p_ >> 32) ^ (d) ^ (k1); \
  (d) = (uint32_t)p_; \
  (k0) += 0x9E3779B9u; \
  (k1) += 0xBB67AE85u; \
} while (0)

// Counter in, random words out. Written without a loop so that a loop over counters vectorises.
HS_HD void hs_philox4x32(uint32_t k0, uint32_t k1, uint32_t* a, uint32_t* b, uint32_t* c, uint32_t* d) {
  uint32_t x = *a, y = *b, z = *c, w = *d;
  HS_PHILOX_ROUND(x, y, z, w, k0, k1); HS_PHILOX_ROUND(x, y, z, w, k0, k1);
  HS_PHILOX_ROUND(x, y, z, w, k0, k1); HS_PHILOX_ROUND(x, y, z, w, k0, k1);
  HS_PHILOX_ROUND(x, y, z, w, k0, k1); HS_PHILOX_ROUND(x, y, z, w, k0, k1);
  HS_PHILOX_ROUND(x, y, z, w, k0, k1); HS_PHILOX_ROUND(x, y, z, w, k0, k1);
  HS_PHILOX_ROUND(x, y, z, w, k0, k1); HS_PHILOX_ROUND(x, y, z, w, k0, k1);
  *a = x, *b = y, *c = z, *d = w;
}

// A random word as a float in (0,1), the centre of its cell of 2^-32; the largest are capped below 1.
HS_HD float hs_unit(uint32_t w) {
  const float x = (float)w * 0x1p-32f + 0x1p-33f;
  return x < 0x1.fffffep-1f ? x : 0x1.fffffep-1f;
}

// The bits of element i of an arena at a step: rm rounds its first moment, rv its second.
HS_HD void hs_optim_random(uint64_t seed, uint64_t i, uint64_t step, uint32_t* rm, uint32_t* rv) {
  uint32_t a = (uint32_t)i, b = (uint32_t)(i >> 32), c = (uint32_t)step, d = (uint32_t)(step >> 32);
  hs_philox4x32((uint32_t)seed, (uint32_t)(seed >> 32), &a, &b, &c, &d);
  *rm = a, *rv = b;
}

// ---- a float32 master in two halves (gpu.md 3.7, caution 2) ----
// hi is the nearest bfloat16, ties away from zero; lo what is missing, as an integer on the bits: exact for every float32, -0 and
// subnormals included. hi of a magnitude of at least 0x1.ffp127, which is beyond the largest bfloat16, is infinity while the master stays
// finite. Every NaN becomes the quiet NaN of its sign: the rounding of other payloads would carry into the sign and hide it.

HS_HD void hs_split(float x, uint32_t* hi, int32_t* lo) {
  uint32_t b = hs_bits(x);
  b = hs_is_nan(b) ? (b & 0x80000000u) | 0x7fc00000u : b;
  *hi = (b + 0x8000u) & 0xffff0000u;   // as float32 bits
  *lo = (int32_t)(b - *hi);            // -0x8000 .. 0x7fff
}
HS_HD float hs_join(uint32_t hi, int32_t lo) { return hs_float(hi + (uint32_t)lo); }

// ---- stochastic rounding ----
// Adding random bits below the cut and truncating rounds up with a probability of exactly (x - down) / (up - down), since a float's value is
// linear in its bits between two neighbours: the mean is x. Magnitudes, so a sign takes no part.

// To bfloat16, with the low 16 bits of r. Above the largest bfloat16 there is no finite neighbour: such values round down to it. NaN
// and infinity stay.
HS_HD uint32_t hs_round_bf16(float x, uint32_t r) {
  const uint32_t b = hs_bits(x), mag = b & 0x7fffffffu, sign = (b >> 16) & 0x8000u;
  uint32_t up = (mag + (r & 0xffffu)) >> 16;
  up = up > 0x7f7fu ? 0x7f7fu : up;
  up = mag == 0x7f800000u ? 0x7f80u : up;
  return sign | (mag > 0x7f800000u ? 0x7fc0u : up);
}
HS_HD float hs_from_bf16(uint32_t h) { return hs_float(h << 16); }

// ---- 8-bit codes of a block of HS_STATE_BLOCK moments ----
// A code is a small float times the block's scale, three mantissa bits in both (neighbours are 6 to 12 % apart):
//
//   m  s eeee fff    sign, 2^(e-15) * (1 + f/8) for e = 1..15, 2^-14 * f/8 for e = 0 (codes 0..7 are linear down to zero)
//   v  eeeee fff     2^(e-31) * (1 + f/8), except that code 0 is zero
//
//   code of m     0   1      8      16     64     120  127          code of v     0   1           8      128    248  255
//   value/scale   0   2^-17  2^-14  2^-13  2^-7   1    1.875        value/scale   0   2^-31*1.125 2^-30  2^-15  1    1.875
//
// Blocks with their own scale are from Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861); small floats
// in place of its table need no look-up, reach lower (v: 2^-31 against 2^-23) and round stochastically by their bits.
// The scale is the power of two that puts the block's largest magnitude into (0.9375, 1.875]. A power of two, not that magnitude itself:
// scaling is then exact, and the grid of codes stays where it is while the magnitude moves.
// A positive v never becomes 0 (Li et al., "Memory Efficient Optimizers with 4-bit States", arXiv 2309.01507, on the zero point of v),
// and the smallest v stands for a gradient of 2^-15.4 of the block's largest, above the smallest |m| of 2^-17: rounding m up
// from zero beside the smallest v moves a weight by about one learning rate, not by thousands.

#define HS_CODE_CUT 20         // float32 bits below a code's mantissa
#define HS_CODE_M_BASE 896u    // code = (bits >> HS_CODE_CUT) - base
#define HS_CODE_V_BASE 768u
#define HS_CODE_M_NORM 0x1p-14f

// Scale of a block from the largest of its |x|'s bits: a power of two in [2^-126, 2^126], 0 when all are 0 or subnormal. Infinity and
// NaN are the scale themselves, so the block reads back as not finite.
HS_HD float hs_code_scale(uint32_t maxbits) {
  uint32_t s = (maxbits + 0x0fffffu) & 0x7f800000u;
  s = s > 0x7e800000u ? 0x7e800000u : s;
  return hs_float(maxbits >= 0x7f800000u ? maxbits : s);
}
// What moments are multiplied by before they are encoded: 1/scale, exactly.
HS_HD float hs_code_inverse(float scale) {
  const uint32_t s = hs_bits(scale);
  return s == 0 || s >= 0x7f800000u ? 0.0f : hs_float(0x7f000000u - s);
}

// Code of y = m/scale with 20 random bits. The linear codes are those of the binade above, shifted by its lower end.
HS_HD uint32_t hs_code_m(float y, uint32_t r) {
  const uint32_t b = hs_bits(y), mag = b & 0x7fffffffu, sign = (b >> 24) & 0x80u;
  const float a = hs_float(mag);
  const int low = a < HS_CODE_M_NORM;
  const uint32_t t = hs_bits(low ? a + HS_CODE_M_NORM : a);
  uint32_t c = ((t + (r >> 12)) >> HS_CODE_CUT) - (low ? HS_CODE_M_BASE + 8 : HS_CODE_M_BASE);
  c = c > 127u ? 127u : c;
  return c ? sign | c : 0;
}
HS_HD float hs_decode_m(uint32_t code, float scale) {
  const uint32_t c = code & 0x7fu, low = c < 8;
  const float a = hs_float((c + (low ? HS_CODE_M_BASE + 8 : HS_CODE_M_BASE)) << HS_CODE_CUT) - (low ? HS_CODE_M_NORM : 0.0f);
  return hs_float(hs_bits(a) | (code & 0x80u) << 24) * scale;
}

// Code of y = v/scale >= 0 with 20 random bits: 1 at least when y > 0.
HS_HD uint32_t hs_code_v(float y, uint32_t r) {
  const uint32_t t = (hs_bits(y) + (r >> 12)) >> HS_CODE_CUT;
  uint32_t c = t > HS_CODE_V_BASE ? t - HS_CODE_V_BASE : 1;
  c = c > 255u ? 255u : c;
  return y > 0.0f ? c : 0;
}
HS_HD float hs_decode_v(uint32_t code, float scale) {
  return (code ? hs_float((code + HS_CODE_V_BASE) << HS_CODE_CUT) : 0.0f) * scale;
}

#endif
