// Causal conv + SiLU + q/k l2norm + gates, one level (model.md 3.4). Channels are [q: nk*dk][k: nk*dk][v: nv*dv]; w is [C, 4], tap 3 is
// the current row. History rows h[1..3] are 1, 2, 3 positions back, 0 = before the sequence start.
#include "cpu_seq_mm.h"
#define CONV_ROWS 32

// Row `row`'s conv input i+1 positions earlier (i 0..2): another row, a column of the state slot its tree started from, or 0.
HS_INLINE const real* FN(conv_hist)(const hs_forest* f, const real* p, const real* state, int64_t C, int64_t row, int i) {
  const int32_t x = f->prev[row * 3 + i];
  if (x >= 0) return p + (int64_t)x * C;
  if (x == -1) return 0;
  return state + ((int64_t)f->slot[f->root[f->row_seg[row]]] * 3 + (-2 - x)) * C;
}

HS_INLINE void FN(conv_taps)(VR t[4], const real* w, int64_t n) {
  real b[4][VW];
  memset(b, 0, sizeof b);
  for (int64_t i = 0; i < HS_MIN(n, VW); i++)
    for (int j = 0; j < 4; j++) b[j][i] = w[i * 4 + j];
  for (int j = 0; j < 4; j++) t[j] = vload(b[j]);
}
HS_INLINE VR FN(conv_load)(const real* p, int64_t c, int64_t n) { return p ? vloadn(p + c, n) : vzero(); }
HS_INLINE VR FN(conv_u)(const real* const h[4], const VR t[4], int64_t c, int64_t n) {
  VR u = t[0] * FN(conv_load)(h[3], c, n);
  u = vfma(t[1], FN(conv_load)(h[2], c, n), u);
  u = vfma(t[2], FN(conv_load)(h[1], c, n), u);
  return vfma(t[3], vloadn(h[0] + c, n), u);
}

// Everything of convgate for rows with the given history; outputs start at the first of them.
static void FN(conv_rows)(int64_t rows, const real* (*h)[4], const real* a, const real* b, const real* w, const real* a_log,
                          const real* dt_bias, int64_t nk, int64_t dk, int64_t nv, int64_t dv, double eps, real* q, real* k, real* v,
                          real* beta, real* g) {
  const int64_t kw = nk * dk, vw = nv * dv;
  for (int part = 0; part < 3; part++) {
    real* out = part == 0 ? q : part == 1 ? k : v;
    const int64_t c0 = part * kw, width = part == 2 ? vw : kw;
    for (int64_t c = 0; c < width; c += VW) {
      VR t[4];
      FN(conv_taps)(t, w + (c0 + c) * 4, width - c);
      for (int64_t i = 0; i < rows; i++) {
        const VR u = FN(conv_u)(h[i], t, c0 + c, width - c);
        vstoren(out + i * width + c, u * vsigmoid(u), width - c);
      }
    }
  }
  const real scale = (real)(1.0 / sqrt((double)dk));
  for (int64_t i = 0; i < rows * nk; i++)
    for (int part = 0; part < 2; part++) {
      real* x = (part ? k : q) + i * dk;
      real r = (real)1 / rroot(vdot(x, x, dk) + (real)eps);
      if (!part) r *= scale;
      for (int64_t j = 0; j < dk; j += VW) vstoren(x + j, FN(splat)(r) * vloadn(x + j, dk - j), dk - j);
    }
  for (int64_t hd = 0; hd < nv; hd++) {
    const double A = -exp((double)a_log[hd]), dt = (double)dt_bias[hd];
    for (int64_t i = 0; i < rows; i++) {
      const double x = (double)a[i * nv + hd] + dt;
      g[i * nv + hd] = (real)(A * (x > 20 ? x : log1p(exp(x))));
    }
  }
  for (int64_t i = 0; i < rows * nv; i += VW) vstoren(beta + i, vsigmoid(vloadn(b + i, rows * nv - i)), rows * nv - i);
}

static void FN(convgate_task)(void* ctx, int64_t task, int worker) {
  const hs_convgate_args* a = ctx;
  (void)worker;
  const int64_t C = 2 * a->nk * a->dk + a->nv * a->dv, r0 = task * CONV_ROWS, n = HS_MIN(CONV_ROWS, a->T - r0);
  const real* h[CONV_ROWS][4];
  for (int64_t i = 0; i < n; i++) {
    h[i][0] = (const real*)a->p + (r0 + i) * C;
    for (int j = 0; j < 3; j++) h[i][j + 1] = FN(conv_hist)(&a->f, a->p, a->conv_state, C, r0 + i, j);
  }
  const int64_t kw = a->nk * a->dk, vw = a->nv * a->dv;
  FN(conv_rows)(n, h, (const real*)a->a + r0 * a->nv, (const real*)a->b + r0 * a->nv, a->w, a->a_log, a->dt_bias, a->nk, a->dk, a->nv, a->dv,
                a->eps, (real*)a->q + r0 * kw, (real*)a->k + r0 * kw, (real*)a->v + r0 * vw, (real*)a->beta + r0 * a->nv,
                (real*)a->g + r0 * a->nv);
}

static hs_status FN(convgate)(const hs_convgate_args* a) {
  hs_parallel(HS_CEIL(a->T, CONV_ROWS), FN(convgate_task), (void*)a);
  if (!a->f.slot || !a->conv_state) return HS_OK;
  // States after the last rows. Children first: they may still need the slot that their root overwrites. Columns move towards older
  // ones, so ascending order is safe in place.
  const int64_t C = 2 * a->nk * a->dk + a->nv * a->dv;
  real* st = a->conv_state;
  for (int32_t s = a->f.nseg - 1; s >= 0; s--) {
    if (a->f.slot[s] < 0) continue;
    const int64_t last = (int64_t)a->f.start[s] + a->f.len[s] - 1;
    for (int j = 0; j < 3; j++) {
      const real* src = j == 2 ? (const real*)a->p + last * C : FN(conv_hist)(&a->f, a->p, st, C, last, 1 - j);
      real* dst = st + ((int64_t)a->f.slot[s] * 3 + j) * C;
      if (src) memmove(dst, src, (size_t)C * sizeof(real));
      else memset(dst, 0, (size_t)C * sizeof(real));
    }
  }
  return HS_OK;
}

static void FN(convgate_step_task)(void* ctx, int64_t task, int worker) {
  const hs_convgate_step_args* a = ctx;
  (void)worker;
  const int64_t C = 2 * a->nk * a->dk + a->nv * a->dv, r0 = task * 16, n = HS_MIN(16, a->B - r0);
  const real* h[16][4];
  for (int64_t i = 0; i < n; i++) {
    const real* st = (const real*)a->conv_state + (int64_t)a->slot[r0 + i] * 3 * C;
    h[i][0] = (const real*)a->p + (r0 + i) * C;
    for (int j = 1; j < 4; j++) h[i][j] = st + (3 - j) * C;
  }
  const int64_t kw = a->nk * a->dk, vw = a->nv * a->dv;
  FN(conv_rows)(n, h, (const real*)a->a + r0 * a->nv, (const real*)a->b + r0 * a->nv, a->w, a->a_log, a->dt_bias, a->nk, a->dk, a->nv, a->dv,
                a->eps, (real*)a->q + r0 * kw, (real*)a->k + r0 * kw, (real*)a->v + r0 * vw, (real*)a->beta + r0 * a->nv,
                (real*)a->g + r0 * a->nv);
  for (int64_t i = 0; i < n; i++) {
    real* st = (real*)a->conv_state + (int64_t)a->slot[r0 + i] * 3 * C;
    memmove(st, st + C, (size_t)(2 * C) * sizeof(real));
    memcpy(st + 2 * C, h[i][0], (size_t)C * sizeof(real));
  }
}
static hs_status FN(convgate_step)(const hs_convgate_step_args* a) {
  hs_parallel(HS_CEIL(a->B, 16), FN(convgate_step_task), (void*)a);
  return HS_OK;
}

// ---- backward ----

typedef struct {
  const hs_convgate_bwd_args* a;
  real *du, *wt, *pw;  // [T, C], [4, Cp] taps, [blocks, 4, Cp] partial dw
  double* pg;          // [blocks, 2, nv] partial dA_log, d dt_bias
  char* tmp;           // per worker: [2, dk]
  int64_t C, Cp, blocks, per;
} FN(convb_ctx);

HS_INLINE VR FN(dsilu)(VR u, VR* s) {
  const VR sg = vsigmoid(u);
  *s = u * sg;
  return sg * (FN(splat)(1) + u * (FN(splat)(1) - sg));
}

// One block of SEQ_ROWS rows: du from the gradients of q, k, v; da, db; partial sums of dw and the gate parameters.
static void FN(convb_rows)(void* ctx, int64_t task, int worker) {
  FN(convb_ctx)* c = ctx;
  const hs_convgate_bwd_args* a = c->a;
  const int64_t C = c->C, nk = a->nk, dk = a->dk, nv = a->nv, dv = a->dv, kw = nk * dk, vw = nv * dv;
  const int64_t r0 = task * SEQ_ROWS, n = HS_MIN(SEQ_ROWS, a->T - r0);
  real *xs = (real*)(c->tmp + worker * c->per), *ds = xs + SEQ_UP(dk, SEQ_PAD);
  const real* h[SEQ_ROWS][4];
  for (int64_t i = 0; i < n; i++) {
    h[i][0] = (const real*)a->p + (r0 + i) * C;
    for (int j = 0; j < 3; j++) h[i][j + 1] = FN(conv_hist)(&a->f, a->p, 0, C, r0 + i, j);
  }
  real* du = c->du + r0 * C;
  for (int64_t ch = 0; ch < C; ch += VW) {
    VR t[4];
    FN(conv_taps)(t, (const real*)a->w + ch * 4, C - ch);
    for (int64_t i = 0; i < n; i++) vstoren(du + i * C + ch, FN(conv_u)(h[i], t, ch, C - ch), C - ch);
  }
  const real scale = (real)(1.0 / sqrt((double)dk));
  for (int64_t i = 0; i < n; i++) {
    for (int part = 0; part < 2; part++)
      for (int64_t hk = 0; hk < nk; hk++) {
        real* u = du + i * C + part * kw + hk * dk;
        const real* dy = (part ? (const real*)a->dk_ : (const real*)a->dq) + (r0 + i) * kw + hk * dk;
        for (int64_t j = 0; j < dk; j += VW) {
          VR s;
          const VR d = FN(dsilu)(vloadn(u + j, dk - j), &s);
          vstore(xs + j, s);
          vstore(ds + j, d);
        }
        const real r = (real)1 / rroot(vdot(xs, xs, dk) + (real)a->eps), sc = part ? (real)1 : scale;
        const real dot = vdot(xs, dy, dk) * r * r;  // (y . dy) r with y = x r
        for (int64_t j = 0; j < dk; j += VW) {
          const VR dx = FN(splat)(r * sc) * (vloadn(dy + j, dk - j) - FN(splat)(dot) * vload(xs + j));
          vstoren(u + j, dx * vload(ds + j), dk - j);
        }
      }
    const real* dvv = (const real*)a->dv_ + (r0 + i) * vw;
    real* u = du + i * C + 2 * kw;
    for (int64_t j = 0; j < vw; j += VW) {
      VR s;
      const VR d = FN(dsilu)(vloadn(u + j, vw - j), &s);
      vstoren(u + j, d * vloadn(dvv + j, vw - j), vw - j);
    }
  }
  for (int64_t ch = 0; ch < C; ch += VW) {
    VR acc[4] = {vzero(), vzero(), vzero(), vzero()};
    for (int64_t i = 0; i < n; i++) {
      const VR d = vloadn(du + i * C + ch, C - ch);
      for (int j = 0; j < 4; j++) acc[j] = vfma(d, FN(conv_load)(h[i][3 - j], ch, C - ch), acc[j]);
    }
    for (int j = 0; j < 4; j++) vstore(c->pw + (task * 4 + j) * c->Cp + ch, acc[j]);
  }
  for (int64_t hd = 0; hd < nv; hd++) {
    const double A = -exp((double)((const real*)a->a_log)[hd]), dt = (double)((const real*)a->dt_bias)[hd];
    double sa = 0, sd = 0;
    for (int64_t i = 0; i < n; i++) {
      const int64_t at = (r0 + i) * nv + hd;
      const double x = (double)((const real*)a->a)[at] + dt, dg = (double)((const real*)a->dg)[at];
      const double da = A * dg / (1 + exp(-x));
      ((real*)a->da)[at] = (real)da;
      sd += da;
      sa += dg * A * (x > 20 ? x : log1p(exp(x)));
      const double be = 1 / (1 + exp(-(double)((const real*)a->b)[at]));
      ((real*)a->db)[at] = (real)((double)((const real*)a->dbeta)[at] * be * (1 - be));
    }
    c->pg[(task * 2) * nv + hd] = sa;
    c->pg[(task * 2 + 1) * nv + hd] = sd;
  }
}

// dp[row] += w[3-o] du of every row that lies o positions after `row` through the children of segment s; the first child row is at
// distance o0 from it.
static void FN(convb_children)(const FN(convb_ctx) * c, real* dp, int32_t s, int64_t o, int64_t skip) {
  const hs_forest* f = &c->a->f;
  for (int32_t y = f->child_off[s]; y < f->child_off[s + 1]; y++) {
    const int32_t ch = f->child[y];
    if (skip >= f->len[ch]) {
      FN(convb_children)(c, dp, ch, o, skip - f->len[ch]);
      continue;
    }
    const real *du = c->du + (f->start[ch] + skip) * c->C, *w = c->wt + (3 - o) * c->Cp;
    for (int64_t j = 0; j < c->C; j += VW)
      vstoren(dp + j, vfma(vload(w + j), vloadn(du + j, c->C - j), vloadn(dp + j, c->C - j)), c->C - j);
  }
}
static void FN(convb_dp)(void* ctx, int64_t task, int worker) {
  FN(convb_ctx)* c = ctx;
  (void)worker;
  const hs_forest* f = &c->a->f;
  const int64_t C = c->C, r0 = task * CONV_ROWS, e = HS_MIN(c->a->T, r0 + CONV_ROWS);
  for (int64_t r = r0; r < e; r++) {
    const int32_t s = f->row_seg[r];
    const int64_t left = (int64_t)f->start[s] + f->len[s] - 1 - r, own = HS_MIN(3, left);
    real* dp = (real*)c->a->dp + r * C;
    const real* du = c->du + r * C;
    for (int64_t j = 0; j < C; j += VW) {
      VR x = vload(c->wt + 3 * c->Cp + j) * vloadn(du + j, C - j);
      for (int64_t o = 1; o <= own; o++) x = vfma(vload(c->wt + (3 - o) * c->Cp + j), vloadn(du + o * C + j, C - j), x);
      vstoren(dp + j, x, C - j);
    }
    for (int64_t o = own + 1; o <= 3; o++) FN(convb_children)(c, dp, s, o, o - own - 1);
  }
}

static int64_t FN(convgate_bwd_layout)(const hs_convgate_bwd_args* a, void* ws, FN(convb_ctx) * c) {
  seq_arena m = seq_open(ws);
  const int64_t R = sizeof(real);
  c->a = a;
  c->C = 2 * a->nk * a->dk + a->nv * a->dv;
  c->Cp = SEQ_UP(c->C, SEQ_PAD);
  c->blocks = HS_CEIL(a->T, SEQ_ROWS);
  c->per = hs_align(2 * SEQ_UP(a->dk, SEQ_PAD) * R);
  c->du = seq_take(&m, a->T * c->C * R);
  c->wt = seq_take(&m, 4 * c->Cp * R);
  c->pw = seq_take(&m, c->blocks * 4 * c->Cp * R);
  c->pg = seq_take(&m, c->blocks * 2 * a->nv * 8);
  c->tmp = seq_take(&m, c->per * hs_num_threads());
  return m.used;
}
static int64_t FN(convgate_bwd_ws)(const hs_convgate_bwd_args* a) {
  FN(convb_ctx) c;
  return FN(convgate_bwd_layout)(a, 0, &c);
}
static hs_status FN(convgate_bwd)(const hs_convgate_bwd_args* a) {
  FN(convb_ctx) c;
  HS_NEED_WS(a, FN(convgate_bwd_layout)(a, a->ws, &c));
  FN(transpose)(c.wt, c.Cp, a->w, 4, c.C, 4, c.Cp);
  hs_parallel(c.blocks, FN(convb_rows), &c);
  hs_parallel(HS_CEIL(a->T, CONV_ROWS), FN(convb_dp), &c);
  for (int64_t ch = 0; a->dw && ch < c.C; ch++)
    for (int j = 0; j < 4; j++) {
      real s = 0;
      for (int64_t b = 0; b < c.blocks; b++) s += c.pw[(b * 4 + j) * c.Cp + ch];
      ((real*)a->dw)[ch * 4 + j] += s;
    }
  for (int64_t hd = 0; hd < a->nv; hd++) {
    double sa = 0, sd = 0;
    for (int64_t b = 0; b < c.blocks; b++) {
      sa += c.pg[b * 2 * a->nv + hd];
      sd += c.pg[(b * 2 + 1) * a->nv + hd];
    }
    if (a->da_log) ((real*)a->da_log)[hd] += (real)sa;
    if (a->ddt_bias) ((real*)a->ddt_bias)[hd] += (real)sd;
  }
  return HS_OK;
}
#undef CONV_ROWS
