// Attention over a paged KV cache, one level. A sequence with one row in the call (decode) takes paged_one: dot products per key, one
// softmax over the whole context. A sequence with more rows (prefill) takes paged_block: tiles of 64 positions counted from 0, as attn.
// Which one is a property of the sequence's own rows, so a row's bits never depend on other sequences.
#include "cpu_seq_mm.h"
#define PB 32
#define TK 64

typedef struct {
  const hs_attn_paged_args* a;
  int32_t *first, *rows;  // per task group: first row, number of rows (of one sequence)
  int64_t ngroups, hdp, rep, M, ctx;
  char* tmp;
  int64_t per;
} FN(paged_ctx);

typedef struct { real *Q, *O, *S, *KT, *V, *m, *l; } FN(paged_tmp);
static void FN(paged_take)(seq_arena* m, FN(paged_tmp) * t, const FN(paged_ctx) * c) {
  const int64_t R = sizeof(real);
  t->Q = seq_take(m, c->M * c->hdp * R);
  t->O = seq_take(m, c->M * c->hdp * R);
  t->S = seq_take(m, HS_MAX(c->M * TK, c->rep * c->ctx) * R);
  t->KT = seq_take(m, c->a->hd * TK * R);
  t->V = seq_take(m, HS_MAX(TK, c->a->page_size) * c->hdp * R);
  t->m = seq_take(m, c->M * R);
  t->l = seq_take(m, c->M * R);
}

// Address of the cache row of one kv head at a position.
HS_INLINE const real* FN(paged_at)(const hs_attn_paged_args* a, const void* cache, int64_t seq, int64_t pos, int64_t hk) {
  const int64_t page = a->block_table[seq * a->max_pages + pos / a->page_size];
  return (const real*)cache + ((page * a->page_size + pos % a->page_size) * a->nkv + hk) * a->hd;
}

HS_INLINE void FN(paged_load_q)(const FN(paged_ctx) * c, real* dst, int64_t row, int64_t rows, int64_t hk) {
  const hs_attn_paged_args* a = c->a;
  const VR sc = FN(splat)((real)(1.0 / sqrt((double)a->hd)));
  for (int64_t i = 0; i < rows; i++)
    for (int64_t r = 0; r < c->rep; r++) {
      const real* x = (const real*)a->q + ((row + i) * a->nh + hk * c->rep + r) * a->hd;
      for (int64_t j = 0; j < c->hdp; j += VW) vstore(dst + (i * c->rep + r) * c->hdp + j, sc * vloadn(x + j, HS_MAX(0, a->hd - j)));
    }
}
HS_INLINE void FN(paged_store)(const FN(paged_ctx) * c, const real* src, int64_t row, int64_t rows, int64_t hk) {
  const hs_attn_paged_args* a = c->a;
  for (int64_t i = 0; i < rows; i++)
    for (int64_t r = 0; r < c->rep; r++)
      FN(unpack)((real*)a->o + ((row + i) * a->nh + hk * c->rep + r) * a->hd, a->hd, src + (i * c->rep + r) * c->hdp, c->hdp, 1, a->hd);
}

// Lane i = sum of the lanes of p[i].
HS_INLINE VR FN(sums)(VR p[VW]) {
#if HS_REAL == 32 && HS_LEVEL == 2
#define SUM_PD(f, a, b) _mm512_castpd_ps(f(_mm512_castps_pd(a), _mm512_castps_pd(b)))
  __m512 t[8], u[4];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) t[i] = _mm512_unpacklo_ps((__m512)p[2 * i], (__m512)p[2 * i + 1]) + _mm512_unpackhi_ps((__m512)p[2 * i], (__m512)p[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) u[i] = SUM_PD(_mm512_unpacklo_pd, t[2 * i], t[2 * i + 1]) + SUM_PD(_mm512_unpackhi_pd, t[2 * i], t[2 * i + 1]);
#undef SUM_PD
  const __m512 a = _mm512_shuffle_f32x4(u[0], u[1], 0x88) + _mm512_shuffle_f32x4(u[0], u[1], 0xdd);
  const __m512 b = _mm512_shuffle_f32x4(u[2], u[3], 0x88) + _mm512_shuffle_f32x4(u[2], u[3], 0xdd);
  return (VR)(_mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd));
#else
  VR r;
  for (int i = 0; i < VW; i++) r[i] = vsum(p[i]);
  return r;
#endif
}

// S[i] = q . k[i] for e keys, n vectors wide (q is padded with zeros).
HS_INLINE void FN(paged_scores)(real* S, const real* q, const real* k, int64_t ld, int64_t e, int64_t hd, const int64_t n) {
  for (int64_t i0 = 0; i0 < e; i0 += VW) {
    VR p[VW];
#pragma GCC unroll 16
    for (int i = 0; i < VW; i++) {
      const real* x = k + (i0 + (i0 + i < e ? i : 0)) * ld;
      p[i] = vload(q) * vloadn(x, hd);
      for (int64_t j = 1; j < n; j++) p[i] = vfma(vload(q + j * VW), vloadn(x + j * VW, hd - j * VW), p[i]);
    }
    vstoren(S + i0, FN(sums)(p), e - i0);
  }
}

// Columns [j0, j0 + W*VW) of O for R query heads from r0 on: each page's products from zero, pages added in order.
HS_INLINE void FN(paged_values)(const FN(paged_ctx) * c, FN(paged_tmp) * t, const int32_t* pages, int64_t n, int64_t hk, int64_t r0, int64_t j0,
                                const int R, const int W) {
  const hs_attn_paged_args* a = c->a;
  const int64_t ps = a->page_size, ld = a->nkv * a->hd, left = a->hd - j0;
  VR o[4][2];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) o[r][0] = o[r][1] = vzero();
  for (int64_t p0 = 0; p0 < n; p0 += ps) {
    const real* v = (const real*)a->vcache + ((int64_t)*pages++ * ps * a->nkv + hk) * a->hd + j0;
    const int64_t e = HS_MIN(ps, n - p0);
    const real* S = t->S + r0 * c->ctx + p0;
    VR s[4][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) s[r][0] = s[r][1] = vzero();
    for (int64_t i = 0; i < e; i++) {
      const VR b0 = vloadn(v + i * ld, left), b1 = W > 1 ? vloadn(v + i * ld + VW, left - VW) : b0;
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const VR x = vset1(S[r * c->ctx + i]);
        s[r][0] = vfma(x, b0, s[r][0]);
        if (W > 1) s[r][1] = vfma(x, b1, s[r][1]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      o[r][0] = o[r][0] + s[r][0];
      if (W > 1) o[r][1] = o[r][1] + s[r][1];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    real* O = t->O + (r0 + r) * c->hdp + j0;
    const VR l = vset1(t->l[r0 + r]);
    vstore(O, o[r][0] / l);
    if (W > 1) vstore(O + VW, o[r][1] / l);
  }
}

static void FN(paged_one)(const FN(paged_ctx) * c, FN(paged_tmp) * t, int64_t row, int64_t hk) {
  const hs_attn_paged_args* a = c->a;
  const int64_t hd = a->hd, hdp = c->hdp, rep = c->rep, n = (int64_t)a->pos[row] + 1, ld = a->nkv * hd;
  const int64_t np = SEQ_UP(n, VW), ps = a->page_size;
  const int32_t* pages = a->block_table + a->seq[row] * a->max_pages;
  FN(paged_load_q)(c, t->Q, row, 1, hk);
  for (int64_t p0 = 0, i = 0; p0 < n; p0 += ps, i++) {
    const real* k = (const real*)a->kcache + ((int64_t)pages[i] * ps * a->nkv + hk) * hd;
    const int64_t e = HS_MIN(ps, n - p0);
    // Keys two pages ahead and this page's values are on their way while the scores are formed: pages are short and lie anywhere.
    const real* ahead = (const real*)a->kcache + ((int64_t)pages[p0 + 2 * ps < n ? i + 2 : i] * ps * a->nkv + hk) * hd;
    const real* v = (const real*)a->vcache + ((int64_t)pages[i] * ps * a->nkv + hk) * hd;
    for (int64_t x = 0; x < e; x++)
      for (int64_t j = 0; j < hd; j += 64 / (int64_t)sizeof(real)) {
        __builtin_prefetch(ahead + x * ld + j);
        __builtin_prefetch(v + x * ld + j);
      }
    for (int64_t r = 0; r < rep; r++) {
      if (hd == 2 * VW) FN(paged_scores)(t->S + r * c->ctx + p0, t->Q + r * hdp, k, ld, e, 2 * VW, 2);
      else FN(paged_scores)(t->S + r * c->ctx + p0, t->Q + r * hdp, k, ld, e, hd, HS_CEIL(hd, VW));
    }
  }
  for (int64_t r = 0; r < rep; r++) {
    real* S = t->S + r * c->ctx;
    for (int64_t i = n; i < np; i++) S[i] = (real)-INFINITY;
    VR mx = vload(S), sum = vzero();
    for (int64_t i = VW; i < np; i += VW) mx = vmax(mx, vload(S + i));
    const VR m = FN(splat)(vhmax(mx));
    for (int64_t i = 0; i < np; i += VW) {
      const VR p = FN(expz)(vload(S + i) - m);
      vstore(S + i, p);
      sum += p;
    }
    t->l[r] = vsum(sum);
  }
  for (int64_t j = 0; j < hd; j += 2 * VW) {
    int64_t r = 0;
    if (hd - j > VW) {
      for (; r + 4 <= rep; r += 4) FN(paged_values)(c, t, pages, n, hk, r, j, 4, 2);
      for (; r + 2 <= rep; r += 2) FN(paged_values)(c, t, pages, n, hk, r, j, 2, 2);
      if (r < rep) FN(paged_values)(c, t, pages, n, hk, r, j, 1, 2);
    } else {
      for (; r + 4 <= rep; r += 4) FN(paged_values)(c, t, pages, n, hk, r, j, 4, 1);
      for (; r < rep; r++) FN(paged_values)(c, t, pages, n, hk, r, j, 1, 1);
    }
  }
  FN(paged_store)(c, t->O, row, 1, hk);
}

static void FN(paged_block)(const FN(paged_ctx) * c, FN(paged_tmp) * t, int64_t row, int64_t rows, int64_t hk) {
  const hs_attn_paged_args* a = c->a;
  const int64_t hd = a->hd, hdp = c->hdp, rep = c->rep, seq = a->seq[row], ld = a->nkv * hd, M = rows * rep;
  const int64_t keys = (int64_t)a->pos[row + rows - 1] + 1;
  FN(paged_load_q)(c, t->Q, row, rows, hk);
  memset(t->O, 0, (size_t)(M * hdp) * sizeof(real));
  for (int64_t i = 0; i < M; i++) {
    t->m[i] = (real)-INFINITY;
    t->l[i] = 0;
  }
  for (int64_t t0 = 0; t0 < keys; t0 += TK) {
    const int64_t n = HS_MIN(TK, keys - t0), np = SEQ_UP(n, VW);
    for (int64_t j = 0; j < n;) {  // gather runs of positions that share a page
      const int64_t e = HS_MIN(n - j, a->page_size - (t0 + j) % a->page_size);
      FN(transpose)(t->KT + j, TK, FN(paged_at)(a, a->kcache, seq, t0 + j, hk), ld, e, hd, e);
      FN(pack)(t->V + j * hdp, hdp, FN(paged_at)(a, a->vcache, seq, t0 + j, hk), ld, e, hd);
      j += e;
    }
    for (int64_t d = 0; d < hd && n < np; d++) memset(t->KT + d * TK + n, 0, (size_t)(np - n) * sizeof(real));
    FN(mm0)(t->S, TK, t->Q, hdp, 1, t->KT, TK, M, np, hd);
    for (int64_t i = 0; i < M; i++) {
      const int64_t lim = HS_MIN(n, (int64_t)a->pos[row + i / rep] + 1 - t0);
      real* S = t->S + i * TK;
      VI idx;
      for (int l = 0; l < VW; l++) idx[l] = l;
      VR mx = FN(splat)((real)-INFINITY);
      for (int64_t j = 0; j < np; j += VW) {
        const VR x = vsel((VI)(idx < (VI){0} + (int)(lim - j)), vload(S + j), FN(splat)((real)-INFINITY));
        vstore(S + j, x);
        mx = vmax(mx, x);
      }
      if (lim <= 0) {  // the row ends before this tile
        for (int64_t j = 0; j < np; j += VW) vstore(S + j, vzero());
        continue;
      }
      const real m0 = t->m[i], top = vhmax(mx), m1 = top > m0 ? top : m0;
      const VR vm = FN(splat)(m1);
      VR sum = vzero();
      for (int64_t j = 0; j < np; j += VW) {
        const VR p = FN(expz)(vload(S + j) - vm);
        vstore(S + j, p);
        sum += p;
      }
      if (m1 != m0) {
        const real al = FN(expz)(FN(splat)(m0 - m1))[0];
        t->m[i] = m1;
        t->l[i] *= al;
        for (int64_t j = 0; j < hdp; j += VW) vstore(t->O + i * hdp + j, FN(splat)(al) * vload(t->O + i * hdp + j));
      }
      t->l[i] += vsum(sum);
    }
    FN(mm1)(t->O, hdp, t->S, TK, 1, t->V, hdp, M, hdp, n);
  }
  for (int64_t i = 0; i < M; i++)
    for (int64_t j = 0; j < hdp; j += VW) vstore(t->O + i * hdp + j, vload(t->O + i * hdp + j) / FN(splat)(t->l[i]));
  FN(paged_store)(c, t->O, row, rows, hk);
}

static void FN(paged_task)(void* ctx, int64_t task, int worker) {
  FN(paged_ctx)* c = ctx;
  FN(paged_tmp) t;
  seq_arena m = seq_open(c->tmp + worker * c->per);
  FN(paged_take)(&m, &t, c);
  const int64_t gi = task / c->a->nkv, hk = task % c->a->nkv;
  // rows < 0 marks a sequence with a single row.
  if (c->rows[gi] < 0) FN(paged_one)(c, &t, c->first[gi], hk);
  else FN(paged_block)(c, &t, c->first[gi], c->rows[gi], hk);
}

static int64_t FN(attn_paged_layout)(const hs_attn_paged_args* a, void* ws, FN(paged_ctx) * c) {
  seq_arena m = seq_open(ws), one = seq_open(0);
  FN(paged_tmp) t;
  c->a = a;
  c->hdp = SEQ_UP(a->hd, SEQ_PAD);
  c->rep = a->nh / a->nkv;
  c->M = PB * c->rep;
  c->ctx = SEQ_UP(a->max_pages * a->page_size, SEQ_PAD);
  FN(paged_take)(&one, &t, c);
  c->per = one.used + 64;
  c->first = seq_take(&m, a->T * 4);
  c->rows = seq_take(&m, a->T * 4);
  c->tmp = seq_take(&m, c->per * hs_num_threads());
  return m.used;
}
static int64_t FN(attn_paged_ws)(const hs_attn_paged_args* a) {
  FN(paged_ctx) c;
  return FN(attn_paged_layout)(a, 0, &c);
}
static hs_status FN(attn_paged)(const hs_attn_paged_args* a) {
  FN(paged_ctx) c;
  HS_NEED_WS(a, FN(attn_paged_layout)(a, a->ws, &c));
  c.ngroups = 0;
  for (int64_t r = 0; r < a->T;) {
    int64_t e = r + 1;
    while (e < a->T && a->seq[e] == a->seq[r]) e++;
    for (int64_t b = r; b < e; b += PB) {
      c.first[c.ngroups] = (int32_t)b;
      c.rows[c.ngroups++] = e - r == 1 ? -1 : (int32_t)HS_MIN(PB, e - b);
    }
    r = e;
  }
  hs_parallel(c.ngroups * a->nkv, FN(paged_task), &c);
  return HS_OK;
}

static hs_status FN(kv_write)(const hs_kv_write_args* a) {
  const int64_t w = a->nkv * a->hd;
  for (int64_t t = 0; t < a->T; t++) {
    const int64_t at = (int64_t)a->block_table[a->seq[t] * a->max_pages + a->pos[t] / a->page_size] * a->page_size + a->pos[t] % a->page_size;
    memcpy((real*)a->kcache + at * w, (const real*)a->k + t * w, (size_t)w * sizeof(real));
    memcpy((real*)a->vcache + at * w, (const real*)a->v + t * w, (size_t)w * sizeof(real));
  }
  return HS_OK;
}
#undef PB
#undef TK
