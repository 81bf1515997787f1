// Full attention over forests, one level (model.md 3.9): q/k norm + RoPE, flash-style attention forward and backward, output gate.
// Keys and values are first laid out in tiles of 64 rows per segment and kv head (tile index = the forest's chunk index). A block of up
// to QB query rows, all query heads of its kv head together (M = rows * rep vectors), walks the tiles from its own back to the root.
#include "cpu_seq_mm.h"
#define QB 32
#define TK HS_GDN_CHUNK
#define PREP_ROWS 32

// ---- q/k norm and RoPE ----

// cos and sin of pos * theta^(-2j/rot), j < rot/2; angles in double.
HS_INLINE void FN(rope_table)(real* cs, real* sn, const double* freq, int32_t pos, int64_t half) {
  for (int64_t j = 0; j < half; j++) {
    const double th = (double)pos * freq[j];
    cs[j] = (real)cos(th);
    sn[j] = (real)sin(th);
  }
}
HS_INLINE void FN(rope_freq)(double* freq, double theta, int64_t rot) {
  for (int64_t j = 0; j < rot / 2; j++) freq[j] = pow(theta, -2.0 * (double)j / (double)rot);
}
// Rotates the pairs (j, j + half) of x by the angles, sign -1 turns back.
HS_INLINE void FN(rope)(real* x, const real* cs, const real* sn, int64_t half, real sign) {
  for (int64_t j = 0; j < half; j += VW) {
    const int64_t w = half - j;
    const VR c = vloadn(cs + j, w), s = FN(splat)(sign) * vloadn(sn + j, w), a = vloadn(x + j, w), b = vloadn(x + half + j, w);
    vstoren(x + j, vfma(a, c, -(b * s)), w);
    vstoren(x + half + j, vfma(b, c, a * s), w);
  }
}

static void FN(attnprep_task)(void* ctx, int64_t task, int worker) {
  const hs_attnprep_args* a = ctx;
  (void)worker;
  const int64_t hd = a->hd, half = a->rot / 2, e = HS_MIN(a->T, (task + 1) * PREP_ROWS);
  double freq[ATTN_MAX_HD / 2];
  real cs[ATTN_MAX_HD / 2], sn[ATTN_MAX_HD / 2];
  FN(rope_freq)(freq, a->theta, a->rot);
  for (int64_t t = task * PREP_ROWS; t < e; t++) {
    FN(rope_table)(cs, sn, freq, a->rope_pos[t], half);
    for (int64_t h = 0; h < a->nh + a->nkv; h++) {
      const int isq = h < a->nh;
      const real* x = isq ? (const real*)a->qg + (t * a->nh + h) * 2 * hd : (const real*)a->kin + (t * a->nkv + h - a->nh) * hd;
      real* y = isq ? (real*)a->q + (t * a->nh + h) * hd : (real*)a->k + (t * a->nkv + h - a->nh) * hd;
      const real* w = isq ? a->wq : a->wk;
      const VR r = FN(splat)((real)1 / rroot(vdot(x, x, hd) / (real)hd + (real)a->eps));
      for (int64_t j = 0; j < hd; j += VW)
        vstoren(y + j, vloadn(x + j, hd - j) * r * (FN(splat)(1) + vloadn(w + j, hd - j)), hd - j);
      FN(rope)(y, cs, sn, half, 1);
    }
  }
}
static hs_status FN(attnprep)(const hs_attnprep_args* a) {
  hs_parallel(HS_CEIL(a->T, PREP_ROWS), FN(attnprep_task), (void*)a);
  return HS_OK;
}

typedef struct {
  const hs_attnprep_bwd_args* a;
  real* pw;  // [blocks, 2, hdp] partial dwq, dwk
  int64_t hdp;
} FN(prepb_ctx);

static void FN(attnprep_bwd_task)(void* ctx, int64_t task, int worker) {
  FN(prepb_ctx)* c = ctx;
  const hs_attnprep_bwd_args* a = c->a;
  (void)worker;
  const int64_t hd = a->hd, half = a->rot / 2, e = HS_MIN(a->T, (task + 1) * SEQ_ROWS);
  double freq[ATTN_MAX_HD / 2];
  real cs[ATTN_MAX_HD / 2], sn[ATTN_MAX_HD / 2], dy[ATTN_MAX_HD + VW], nx[ATTN_MAX_HD + VW];
  FN(rope_freq)(freq, a->theta, a->rot);
  real* pw = c->pw + task * 2 * c->hdp;
  memset(pw, 0, (size_t)(2 * c->hdp) * sizeof(real));
  for (int64_t t = task * SEQ_ROWS; t < e; t++) {
    FN(rope_table)(cs, sn, freq, a->rope_pos[t], half);
    for (int64_t h = 0; h < a->nh + a->nkv; h++) {
      const int isq = h < a->nh;
      const int64_t hk = h - a->nh;
      const real* x = isq ? (const real*)a->qg + (t * a->nh + h) * 2 * hd : (const real*)a->kin + (t * a->nkv + hk) * hd;
      const real* g = isq ? (const real*)a->dq + (t * a->nh + h) * hd : (const real*)a->dk + (t * a->nkv + hk) * hd;
      real* dx = isq ? (real*)a->dqg + (t * a->nh + h) * 2 * hd : (real*)a->dkin + (t * a->nkv + hk) * hd;
      const real* w = isq ? a->wq : a->wk;
      real* p = isq ? pw : pw + c->hdp;
      const real rr = (real)1 / rroot(vdot(x, x, hd) / (real)hd + (real)a->eps);
      const VR r = FN(splat)(rr);
      for (int64_t j = 0; j < hd; j += VW) vstore(dy + j, vloadn(g + j, hd - j));
      FN(rope)(dy, cs, sn, half, -1);
      for (int64_t j = 0; j < hd; j += VW) {
        const VR n = vloadn(x + j, hd - j) * r, d = vload(dy + j);
        vstore(p + j, vfma(d, n, vload(p + j)));
        vstore(nx + j, n);
        vstore(dy + j, d * (FN(splat)(1) + vloadn(w + j, hd - j)));
      }
      const VR mean = FN(splat)(vdot(nx, dy, hd) / (real)hd);
      for (int64_t j = 0; j < hd; j += VW) vstoren(dx + j, r * (vload(dy + j) - vload(nx + j) * mean), hd - j);
    }
  }
}
static int64_t FN(attnprep_bwd_layout)(const hs_attnprep_bwd_args* a, void* ws, FN(prepb_ctx) * c) {
  seq_arena m = seq_open(ws);
  c->a = a;
  c->hdp = SEQ_UP(a->hd, SEQ_PAD);
  c->pw = seq_take(&m, HS_CEIL(a->T, SEQ_ROWS) * 2 * c->hdp * (int64_t)sizeof(real));
  return m.used;
}
static int64_t FN(attnprep_bwd_ws)(const hs_attnprep_bwd_args* a) {
  FN(prepb_ctx) c;
  return FN(attnprep_bwd_layout)(a, 0, &c);
}
static hs_status FN(attnprep_bwd)(const hs_attnprep_bwd_args* a) {
  FN(prepb_ctx) c;
  HS_NEED_WS(a, FN(attnprep_bwd_layout)(a, a->ws, &c));
  const int64_t blocks = HS_CEIL(a->T, SEQ_ROWS);
  hs_parallel(blocks, FN(attnprep_bwd_task), &c);
  for (int64_t j = 0; j < a->hd; j++) {
    real sq = 0, sk = 0;
    for (int64_t b = 0; b < blocks; b++) {
      sq += c.pw[b * 2 * c.hdp + j];
      sk += c.pw[(b * 2 + 1) * c.hdp + j];
    }
    if (a->nh && a->dwq) ((real*)a->dwq)[j] += sq;
    if (a->nkv && a->dwk) ((real*)a->dwk)[j] += sk;
  }
  return HS_OK;
}

// ---- attention ----

typedef struct {
  const hs_forest* f;
  int64_t nh, nkv, hd, hdp, rep, M;
  const real *q, *k, *v, *o, *lse, *dout;
  real *oo, *olse, *dq, *dk, *dv;
  int32_t* seg;                       // [nchunks]: segment of a tile
  real *KT, *V, *K, *VT, *dKa, *dVa;  // tiles [nchunks, nkv, 64*hdp]; KT, VT are [hd, 64]
  seq_trees tr;
  char* tmp;
  int64_t per;
} FN(attn_ctx);

// Scratch of one worker; the last three only in the backward pass.
typedef struct { real *Q, *O, *S, *m, *l, *dO, *dQ, *dS; } FN(attn_tmp);

static void FN(attn_take)(seq_arena* m, FN(attn_tmp) * t, const FN(attn_ctx) * c, int bwd) {
  const int64_t R = sizeof(real);
  t->Q = seq_take(m, c->M * c->hdp * R);
  t->O = seq_take(m, c->M * c->hdp * R);
  t->S = seq_take(m, c->M * TK * R);
  t->m = seq_take(m, c->M * R);
  t->l = seq_take(m, c->M * R);
  if (!bwd) return;
  t->dO = seq_take(m, c->M * c->hdp * R);
  t->dQ = seq_take(m, c->M * c->hdp * R);
  t->dS = seq_take(m, c->M * TK * R);
}

static void FN(attn_tile_task)(void* ctx, int64_t task, int worker) {
  FN(attn_ctx)* c = ctx;
  (void)worker;
  const int64_t ci = task / c->nkv, hk = task % c->nkv, hd = c->hd, ts = TK * c->hdp;
  const int32_t s = c->seg[ci];
  const int64_t c0 = (ci - c->f->chunk_off[s]) * TK, n = HS_MIN(TK, c->f->len[s] - c0), row = c->f->start[s] + c0;
  const real *k = c->k + (row * c->nkv + hk) * hd, *v = c->v + (row * c->nkv + hk) * hd;
  FN(transpose)(c->KT + task * ts, TK, k, c->nkv * hd, n, hd, TK);
  if (c->V) FN(pack)(c->V + task * ts, c->hdp, v, c->nkv * hd, n, hd);
  if (!c->K) return;
  FN(pack)(c->K + task * ts, c->hdp, k, c->nkv * hd, n, hd);
  FN(transpose)(c->VT + task * ts, TK, v, c->nkv * hd, n, hd, TK);
}

// dst[rows*rep, hdp] = scale * src rows [row, row+rows), query heads of kv head hk.
HS_INLINE void FN(attn_load)(const FN(attn_ctx) * c, real* dst, const real* src, int64_t row, int64_t rows, int64_t hk, real scale) {
  const VR sc = FN(splat)(scale);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t r = 0; r < c->rep; r++) {
      const real* x = src + ((row + i) * c->nh + hk * c->rep + r) * c->hd;
      real* y = dst + (i * c->rep + r) * c->hdp;
      for (int64_t j = 0; j < c->hdp; j += VW) vstore(y + j, sc * vloadn(x + j, HS_MAX(0, c->hd - j)));
    }
}
HS_INLINE void FN(attn_store)(const FN(attn_ctx) * c, real* dst, const real* src, int64_t row, int64_t rows, int64_t hk) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t r = 0; r < c->rep; r++)
      FN(unpack)(dst + ((row + i) * c->nh + hk * c->rep + r) * c->hd, c->hd, src + (i * c->rep + r) * c->hdp, c->hdp, 1, c->hd);
}
HS_INLINE VR FN(attn_mask)(VR s, int64_t j, int64_t lim, real fill) {
  if (j + VW <= lim) return s;
  VI idx;
  for (int i = 0; i < VW; i++) idx[i] = i;
  const VI m = (VI)(idx < (VI){0} + (int)(lim - j));
  return vsel(m, s, FN(splat)(fill));
}

// One block of query rows [b0, b0+rows) of segment s, kv head hk.
static void FN(attn_block)(const FN(attn_ctx) * c, FN(attn_tmp) * t, int32_t s, int64_t b0, int64_t hk) {
  const hs_forest* f = c->f;
  const int64_t hd = c->hd, hdp = c->hdp, rep = c->rep, ts = TK * hdp;
  const int64_t rows = HS_MIN(QB, f->len[s] - b0), M = rows * rep, row = f->start[s] + b0;
  FN(attn_load)(c, t->Q, c->q, row, rows, hk, (real)(1.0 / sqrt((double)hd)));
  memset(t->O, 0, (size_t)(M * hdp) * sizeof(real));
  for (int64_t i = 0; i < M; i++) {
    t->m[i] = (real)-INFINITY;
    t->l[i] = 0;
  }
  for (int32_t a = s; a >= 0; a = f->parent[a]) {
    const int64_t keys = a == s ? b0 + rows : f->len[a];  // own segment: up to the block's last row
    for (int64_t tile = (keys - 1) / TK; tile >= 0; tile--) {
      const int64_t n = HS_MIN(TK, keys - tile * TK), at = ((f->chunk_off[a] + tile) * c->nkv + hk) * ts, np = SEQ_UP(n, VW);
      FN(mm0)(t->S, TK, t->Q, hdp, 1, c->KT + at, TK, M, np, hd);
      for (int64_t i = 0; i < M; i++) {
        const int64_t lim = a == s ? HS_MIN(n, b0 + i / rep + 1 - tile * TK) : n;
        real* S = t->S + i * TK;
        VR mx = FN(splat)((real)-INFINITY);
        for (int64_t j = 0; j < np; j += VW) {
          const VR x = FN(attn_mask)(vload(S + j), j, lim, (real)-INFINITY);
          vstore(S + j, x);
          mx = vmax(mx, x);
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
          const VR va = FN(splat)(al);
          for (int64_t j = 0; j < hdp; j += VW) vstore(t->O + i * hdp + j, va * vload(t->O + i * hdp + j));
        }
        t->l[i] += vsum(sum);
      }
      FN(mm1)(t->O, hdp, t->S, TK, 1, c->V + at, hdp, M, hdp, n);
    }
  }
  for (int64_t i = 0; i < M; i++) {
    const VR inv = FN(splat)((real)1 / t->l[i]);
    for (int64_t j = 0; j < hdp; j += VW) vstore(t->O + i * hdp + j, inv * vload(t->O + i * hdp + j));
    if (c->olse) c->olse[(row + i / rep) * c->nh + hk * rep + i % rep] = t->m[i] + rlog(t->l[i]);
  }
  FN(attn_store)(c, c->oo, t->O, row, rows, hk);
}
static void FN(attn_task)(void* ctx, int64_t task, int worker) {
  FN(attn_ctx)* c = ctx;
  FN(attn_tmp) t;
  seq_arena m = seq_open(c->tmp + worker * c->per);
  FN(attn_take)(&m, &t, c, 0);
  const int64_t per = TK / QB, hk = task % c->nkv, blk = task / c->nkv, ci = blk / per;
  const int32_t s = c->seg[ci];
  const int64_t b0 = (ci - c->f->chunk_off[s]) * TK + blk % per * QB;
  if (b0 < c->f->len[s]) FN(attn_block)(c, &t, s, b0, hk);
}

static void FN(attn_shape)(FN(attn_ctx) * c, const hs_forest* f, int64_t nh, int64_t nkv, int64_t hd) {
  memset(c, 0, sizeof *c);
  c->f = f;
  c->nh = nh; c->nkv = nkv; c->hd = hd;
  c->hdp = SEQ_UP(hd, SEQ_PAD);
  c->rep = nh / nkv;
  c->M = QB * c->rep;
}
static void FN(attn_segs)(FN(attn_ctx) * c) {
  for (int32_t s = 0; s < c->f->nseg; s++)
    for (int32_t i = c->f->chunk_off[s]; i < c->f->chunk_off[s] + HS_CEIL(c->f->len[s], TK); i++) c->seg[i] = s;
}

static int64_t FN(attn_layout)(const hs_attn_args* a, void* ws, FN(attn_ctx) * c) {
  FN(attn_shape)(c, &a->f, a->nh, a->nkv, a->hd);
  seq_arena m = seq_open(ws), one = seq_open(0);
  FN(attn_tmp) t;
  FN(attn_take)(&one, &t, c, 0);
  const int64_t tiles = (int64_t)a->f.nchunks * a->nkv * TK * c->hdp * (int64_t)sizeof(real);
  c->q = a->q; c->k = a->k; c->v = a->v; c->oo = a->o; c->olse = a->lse;
  c->seg = seq_take(&m, (int64_t)a->f.nchunks * 4);
  c->KT = seq_take(&m, tiles);
  c->V = seq_take(&m, tiles);
  c->per = one.used + 64;
  c->tmp = seq_take(&m, c->per * hs_num_threads());
  return m.used;
}
static int64_t FN(attn_ws)(const hs_attn_args* a) {
  FN(attn_ctx) c;
  return FN(attn_layout)(a, 0, &c);
}
static hs_status FN(attn)(const hs_attn_args* a) {
  FN(attn_ctx) c;
  HS_NEED_WS(a, FN(attn_layout)(a, a->ws, &c));
  FN(attn_segs)(&c);
  hs_parallel((int64_t)a->f.nchunks * a->nkv, FN(attn_tile_task), &c);
  hs_parallel((int64_t)a->f.nchunks * (TK / QB) * a->nkv, FN(attn_task), &c);
  return HS_OK;
}

// Backward of one query block: dq out, dK and dV tiles of every key it saw added to.
static void FN(attnb_block)(const FN(attn_ctx) * c, FN(attn_tmp) * t, int32_t s, int64_t b0, int64_t hk) {
  const hs_forest* f = c->f;
  const int64_t hd = c->hd, hdp = c->hdp, rep = c->rep, ts = TK * hdp;
  const int64_t rows = HS_MIN(QB, f->len[s] - b0), M = rows * rep, row = f->start[s] + b0;
  const real scale = (real)(1.0 / sqrt((double)hd));
  FN(attn_load)(c, t->Q, c->q, row, rows, hk, scale);
  FN(attn_load)(c, t->O, c->o, row, rows, hk, 1);
  FN(attn_load)(c, t->dO, c->dout, row, rows, hk, 1);
  memset(t->dQ, 0, (size_t)(M * hdp) * sizeof(real));
  for (int64_t i = 0; i < M; i++) {
    t->l[i] = c->lse[(row + i / rep) * c->nh + hk * rep + i % rep];
    t->m[i] = vdot(t->dO + i * hdp, t->O + i * hdp, hdp);
  }
  for (int32_t a = s; a >= 0; a = f->parent[a]) {
    const int64_t keys = a == s ? b0 + rows : f->len[a];
    for (int64_t tile = (keys - 1) / TK; tile >= 0; tile--) {
      const int64_t n = HS_MIN(TK, keys - tile * TK), at = ((f->chunk_off[a] + tile) * c->nkv + hk) * ts, np = SEQ_UP(n, VW);
      FN(mm0)(t->S, TK, t->Q, hdp, 1, c->KT + at, TK, M, np, hd);
      FN(mm0)(t->dS, TK, t->dO, hdp, 1, c->VT + at, TK, M, np, hd);
      for (int64_t i = 0; i < M; i++) {
        const int64_t lim = a == s ? HS_MIN(n, b0 + i / rep + 1 - tile * TK) : n;
        const VR l = FN(splat)(t->l[i]), D = FN(splat)(t->m[i]);
        for (int64_t j = 0; j < np; j += VW) {
          const VR p = FN(expz)(FN(attn_mask)(vload(t->S + i * TK + j) - l, j, lim, (real)-INFINITY));
          vstore(t->S + i * TK + j, p);
          vstore(t->dS + i * TK + j, p * (vload(t->dS + i * TK + j) - D));
        }
      }
      FN(mm1)(c->dVa + at, hdp, t->S, 1, TK, t->dO, hdp, n, hdp, M);
      FN(mm1)(c->dKa + at, hdp, t->dS, 1, TK, t->Q, hdp, n, hdp, M);
      FN(mm1)(t->dQ, hdp, t->dS, TK, 1, c->K + at, hdp, M, hdp, n);
    }
  }
  for (int64_t j = 0; j < M * hdp; j += VW) vstore(t->dQ + j, FN(splat)(scale) * vload(t->dQ + j));
  FN(attn_store)(c, c->dq, t->dQ, row, rows, hk);
}
// One tree and kv head: segments in order, so that a key's gradient sums its own segment's rows first, then its descendants'.
static void FN(attnb_task)(void* ctx, int64_t task, int worker) {
  FN(attn_ctx)* c = ctx;
  const hs_forest* f = c->f;
  FN(attn_tmp) t;
  seq_arena m = seq_open(c->tmp + worker * c->per);
  FN(attn_take)(&m, &t, c, 1);
  const int64_t tree = task / c->nkv, hk = task % c->nkv, ts = TK * c->hdp;
  for (int32_t x = c->tr.off[tree]; x < c->tr.off[tree + 1]; x++) {
    const int32_t s = c->tr.seg[x];
    for (int64_t i = 0; i < HS_CEIL(f->len[s], TK); i++) {
      memset(c->dKa + ((f->chunk_off[s] + i) * c->nkv + hk) * ts, 0, (size_t)ts * sizeof(real));
      memset(c->dVa + ((f->chunk_off[s] + i) * c->nkv + hk) * ts, 0, (size_t)ts * sizeof(real));
    }
    for (int64_t b0 = 0; b0 < f->len[s]; b0 += QB) FN(attnb_block)(c, &t, s, b0, hk);
  }
  for (int32_t x = c->tr.off[tree]; x < c->tr.off[tree + 1]; x++) {
    const int32_t s = c->tr.seg[x];
    for (int64_t i = 0; i < HS_CEIL(f->len[s], TK); i++) {
      const int64_t at = ((f->chunk_off[s] + i) * c->nkv + hk) * ts, row = f->start[s] + i * TK, n = HS_MIN(TK, f->len[s] - i * TK);
      FN(unpack)(c->dk + (row * c->nkv + hk) * c->hd, c->nkv * c->hd, c->dKa + at, c->hdp, n, c->hd);
      FN(unpack)(c->dv + (row * c->nkv + hk) * c->hd, c->nkv * c->hd, c->dVa + at, c->hdp, n, c->hd);
    }
  }
}

static int64_t FN(attn_bwd_layout)(const hs_attn_bwd_args* a, void* ws, FN(attn_ctx) * c) {
  FN(attn_shape)(c, &a->f, a->nh, a->nkv, a->hd);
  seq_arena m = seq_open(ws), one = seq_open(0);
  FN(attn_tmp) t;
  FN(attn_take)(&one, &t, c, 1);
  const int64_t tiles = (int64_t)a->f.nchunks * a->nkv * TK * c->hdp * (int64_t)sizeof(real);
  c->q = a->q; c->k = a->k; c->v = a->v; c->o = a->o; c->lse = a->lse; c->dout = a->do_;
  c->dq = a->dq; c->dk = a->dk; c->dv = a->dv;
  c->seg = seq_take(&m, (int64_t)a->f.nchunks * 4);
  seq_trees_take(&m, &a->f, &c->tr);
  c->KT = seq_take(&m, tiles);
  c->K = seq_take(&m, tiles);
  c->VT = seq_take(&m, tiles);
  c->dKa = seq_take(&m, tiles);
  c->dVa = seq_take(&m, tiles);
  c->per = one.used + 64;
  c->tmp = seq_take(&m, c->per * hs_num_threads());
  return m.used;
}
static int64_t FN(attn_bwd_ws)(const hs_attn_bwd_args* a) {
  FN(attn_ctx) c;
  return FN(attn_bwd_layout)(a, 0, &c);
}
static hs_status FN(attn_bwd)(const hs_attn_bwd_args* a) {
  FN(attn_ctx) c;
  HS_NEED_WS(a, FN(attn_bwd_layout)(a, a->ws, &c));
  FN(attn_segs)(&c);
  seq_trees_fill(&a->f, &c.tr);
  hs_parallel((int64_t)a->f.nchunks * a->nkv, FN(attn_tile_task), &c);
  hs_parallel((int64_t)c.tr.n * a->nkv, FN(attnb_task), &c);
  return HS_OK;
}

// ---- output gate ----

static void FN(gate_task)(void* ctx, int64_t task, int worker) {
  const hs_gate_args* a = ctx;
  (void)worker;
  const int64_t hd = a->hd, e = HS_MIN(a->T, (task + 1) * 64) * a->nh;
  for (int64_t i = task * 64 * a->nh; i < e; i++) {
    const real *o = (const real*)a->o + i * hd, *g = (const real*)a->qg + (i * 2 + 1) * hd;
    real* y = (real*)a->y + i * hd;
    for (int64_t j = 0; j < hd; j += VW) vstoren(y + j, vloadn(o + j, hd - j) * vsigmoid(vloadn(g + j, hd - j)), hd - j);
  }
}
static hs_status FN(gate)(const hs_gate_args* a) {
  hs_parallel(HS_CEIL(a->T, 64), FN(gate_task), (void*)a);
  return HS_OK;
}
static void FN(gate_bwd_task)(void* ctx, int64_t task, int worker) {
  const hs_gate_bwd_args* a = ctx;
  (void)worker;
  const int64_t hd = a->hd, e = HS_MIN(a->T, (task + 1) * 64) * a->nh;
  for (int64_t i = task * 64 * a->nh; i < e; i++) {
    const real *o = (const real*)a->o + i * hd, *g = (const real*)a->qg + (i * 2 + 1) * hd, *dy = (const real*)a->dy + i * hd;
    real *d = (real*)a->do_ + i * hd, *dg = (real*)a->dqg + (i * 2 + 1) * hd;
    for (int64_t j = 0; j < hd; j += VW) {
      const VR s = vsigmoid(vloadn(g + j, hd - j)), u = vloadn(dy + j, hd - j) * s, ov = vloadn(o + j, hd - j);
      vstoren(d + j, u, hd - j);
      vstoren(dg + j, u * ov * (FN(splat)(1) - s), hd - j);
    }
  }
}
static hs_status FN(gate_bwd)(const hs_gate_bwd_args* a) {
  hs_parallel(HS_CEIL(a->T, 64), FN(gate_bwd_task), (void*)a);
  return HS_OK;
}
#undef QB
#undef TK
#undef PREP_ROWS
