// Gated delta rule, one level (see cpu_levels.h). Names follow model.md 3.6 and 3.7: n rows in the chunk, G cumulative gate,
// Gam decay matrix, L, P, Delta, D the gradient of the state after the chunk. [n x n] matrices have row stride 64.
// Instead of U and W the chunk's Delta is solved directly: (I + L) Delta = beta * (V - e^G * (K S0)), the same function.
#include "cpu_seq_mm.h"
#define LDN HS_GDN_CHUNK

// Scratch of one worker.
typedef struct {
  real *K, *Q, *KT, *KK, *QK;        // [64,dkp] [64,dkp] [dk,64] [64,64] [64,64], of one key head
  real *V, *dO, *L, *P, *Gam, *PG, *E, *DeltaT;
  real *KS, *QS, *X, *Z, *dD, *T1, *T2, *T3, *eK, *eQ, *dQ, *dK, *S0T, *DT;
  real *eG, *Ed, *beta, *db;         // [64]
  double *G, *dG;                    // [64]
  real* S;                           // [rep, dk, dvp]: state (forward) or its gradient (backward) of each value head
  real* S0;                          // [dk, dvp]
} FN(gdn_tmp);

static void FN(gdn_take)(seq_arena* m, FN(gdn_tmp) * t, int64_t dk, int64_t dv, int64_t rep, int bwd) {
  const int64_t R = sizeof(real), C = HS_GDN_CHUNK, dkp = SEQ_UP(dk, SEQ_PAD), dvp = SEQ_UP(dv, SEQ_PAD);
  t->K = seq_take(m, C * dkp * R); t->Q = seq_take(m, C * dkp * R); t->KT = seq_take(m, dk * C * R);
  t->KK = seq_take(m, C * C * R); t->QK = seq_take(m, C * C * R);
  t->V = seq_take(m, C * dvp * R); t->L = seq_take(m, C * C * R); t->P = seq_take(m, C * C * R); t->Gam = seq_take(m, C * C * R);
  t->KS = seq_take(m, C * dvp * R); t->QS = seq_take(m, C * dvp * R); t->X = seq_take(m, C * dvp * R);
  t->eK = seq_take(m, C * dkp * R);
  t->eG = seq_take(m, C * R); t->Ed = seq_take(m, C * R); t->beta = seq_take(m, C * R); t->db = seq_take(m, C * R);
  t->G = seq_take(m, C * 8); t->dG = seq_take(m, C * 8);
  t->S = seq_take(m, rep * dk * dvp * R); t->S0 = seq_take(m, dk * dvp * R);
  if (!bwd) return;
  t->dO = seq_take(m, C * dvp * R); t->PG = seq_take(m, C * C * R); t->E = seq_take(m, C * C * R); t->DeltaT = seq_take(m, dv * C * R);
  t->Z = seq_take(m, C * dvp * R); t->dD = seq_take(m, C * dvp * R);
  t->T1 = seq_take(m, C * dkp * R); t->T2 = seq_take(m, C * dkp * R); t->T3 = seq_take(m, C * dkp * R);
  t->eQ = seq_take(m, C * dkp * R); t->dQ = seq_take(m, C * dkp * R); t->dK = seq_take(m, C * dkp * R);
  t->S0T = seq_take(m, dv * dkp * R); t->DT = seq_take(m, dv * dkp * R);
}

// c[n, 64] = a[n, K] b[K, 64] for columns j <= i only (whole vectors, whole blocks of 8 rows).
HS_INLINE void FN(mm_lower)(real* c, const real* a, int64_t lda, const real* b, int64_t n, int64_t K) {
  for (int64_t i = 0; i < n; i += 8)
    FN(mm0)(c + i * LDN, LDN, a + i * lda, lda, 1, b, LDN, HS_MIN(8, n - i), SEQ_UP(HS_MIN(n, i + 8), VW), K);
}
// c[n, d] += A b with A lower triangular including its diagonal.
HS_INLINE void FN(mm_tri)(real* c, int64_t ldc, const real* A, const real* b, int64_t ldb, int64_t n, int64_t d) {
  for (int64_t i = 0; i < n; i += 8) FN(mm1)(c + i * ldc, ldc, A + i * LDN, LDN, 1, b, ldb, HS_MIN(8, n - i), d, HS_MIN(n, i + 8));
}
// c[n, d] += A^T b with A lower triangular including its diagonal.
HS_INLINE void FN(mm_triT)(real* c, int64_t ldc, const real* A, const real* b, int64_t ldb, int64_t n, int64_t d) {
  for (int64_t j = 0; j < n; j += 8) FN(mm1)(c + j * ldc, ldc, A + j * LDN + j, 1, LDN, b + j * ldb, ldb, HS_MIN(8, n - j), d, n - j);
}
// Columns of Gam, L, P that are defined (and zero above the diagonal) in row i.
#define ROWCOLS(i) SEQ_UP(((i) | 7) + 1, VW)

// Loads the rows of key head hk and its two products.
static void FN(gdn_load_key)(FN(gdn_tmp) * t, const real* q, const real* k, int64_t ld, int64_t n, int64_t dk, int64_t dkp) {
  FN(pack)(t->K, dkp, k, ld, n, dk);
  FN(pack)(t->Q, dkp, q, ld, n, dk);
  FN(transpose)(t->KT, LDN, k, ld, n, dk, SEQ_UP(n, SEQ_PAD));
  FN(mm_lower)(t->KK, t->K, dkp, t->KT, n, dk);
  FN(mm_lower)(t->QK, t->Q, dkp, t->KT, n, dk);
}

// Decays of one value head (cumulative gate in double), then L and P.
static void FN(gdn_decay)(FN(gdn_tmp) * t, const real* g, const real* beta, int64_t ld, int64_t n) {
  double s = 0;
  for (int64_t i = 0; i < n; i++) {
    s += (double)g[i * ld];
    t->G[i] = s;
    t->beta[i] = beta[i * ld];
  }
  for (int64_t i = n; i < LDN; i++) t->G[i] = s;
  for (int64_t i = 0; i < LDN; i++) {
    t->eG[i] = (real)t->G[i];
    t->Ed[i] = (real)(s - t->G[i]);
  }
  for (int64_t i = 0; i < n; i += VW) {
    vstore(t->eG + i, FN(expz)(vload(t->eG + i)));
    vstore(t->Ed + i, FN(expz)(vload(t->Ed + i)));
  }
  VI lane;
  for (int l = 0; l < VW; l++) lane[l] = l;
  // Gam row by row, in blocks of VW rows: exp(G_i - G_j) where the block meets the diagonal, exp(G_i - G_r) exp(G_r - G_j) with r the
  // block's first row left of it. All three differences are <= 0, the mask comes before exp (exp(-1e4) = 0).
  for (int64_t r = 0; r < n; r += VW) {
    real left[LDN], row[VW];
    for (int64_t j = 0; j < r; j++) left[j] = (real)(t->G[r] - t->G[j]);
    for (int64_t j = 0; j < r; j += VW) vstore(left + j, FN(expz)(vload(left + j)));
    for (int64_t i = 0; i < VW; i++) row[i] = (real)(t->G[HS_MIN(r + i, n - 1)] - t->G[r]);
    vstore(row, FN(expz)(vload(row)));
    for (int64_t i = r; i < HS_MIN(n, r + VW); i++) {
      const int64_t w = ROWCOLS(i);
      real *gam = t->Gam + i * LDN, *L = t->L + i * LDN, *P = t->P + i * LDN, diff[VW];
      const real *KK = t->KK + i * LDN, *QK = t->QK + i * LDN;
      const VR b = FN(splat)(t->beta[i]), f = FN(splat)(row[i - r]);
      for (int64_t j = 0; j < r; j += VW) {
        const VR e = f * vload(left + j);
        vstore(gam + j, e);
        vstore(L + j, b * vload(KK + j) * e);
        vstore(P + j, vload(QK + j) * e);
      }
      const double Gi = t->G[i], *G = t->G + r;
      for (int64_t j = 0; j < VW; j++) diff[j] = (real)(Gi - G[j]);
      const VR e = FN(expz)(vsel((VI)(lane <= (VI){0} + (int)(i - r)), vload(diff), FN(splat)((real)-1e4)));
      vstore(gam + r, e);
      vstore(L + r, b * vload(KK + r) * e);
      vstore(P + r, vload(QK + r) * e);
      for (int64_t j = r + VW; j < w; j += VW) {
        vstore(gam + j, vzero());
        vstore(L + j, vzero());
        vstore(P + j, vzero());
      }
    }
  }
}

// X = (I + L)^-1 X by forward substitution, blocks of 8 rows.
static void FN(gdn_solve)(const real* L, real* X, int64_t n, int64_t dvp) {
  for (int64_t i0 = 0; i0 < n; i0 += 8) {
    const int64_t m = HS_MIN(8, n - i0);
    if (i0) FN(mm2)(X + i0 * dvp, dvp, L + i0 * LDN, LDN, 1, X, dvp, m, dvp, i0);
    for (int64_t i = i0 + 1; i < i0 + m; i++)
      for (int64_t c = 0; c < dvp; c += VW) {
        VR x = vload(X + i * dvp + c);
        for (int64_t j = i0; j < i; j++) x = vfma(-FN(splat)(L[i * LDN + j]), vload(X + j * dvp + c), x);
        vstore(X + i * dvp + c, x);
      }
  }
}
// Z = (I + L)^-T Z by back substitution.
static void FN(gdn_solveT)(const real* L, real* Z, int64_t n, int64_t dvp) {
  for (int64_t i0 = (n - 1) / 8 * 8; i0 >= 0; i0 -= 8) {
    const int64_t m = HS_MIN(8, n - i0), e = i0 + m;
    if (e < n) FN(mm2)(Z + i0 * dvp, dvp, L + e * LDN + i0, 1, LDN, Z + e * dvp, dvp, m, dvp, n - e);
    for (int64_t i = e - 2; i >= i0; i--)
      for (int64_t c = 0; c < dvp; c += VW) {
        VR x = vload(Z + i * dvp + c);
        for (int64_t j = i + 1; j < e; j++) x = vfma(-FN(splat)(L[j * LDN + i]), vload(Z + j * dvp + c), x);
        vstore(Z + i * dvp + c, x);
      }
  }
}

// Delta into t->X, K S0 into t->KS. S0 is [dk, dvp].
static void FN(gdn_delta)(FN(gdn_tmp) * t, const real* S0, int64_t n, int64_t dk, int64_t dkp, int64_t dvp) {
  FN(mm0)(t->KS, dvp, t->K, dkp, 1, S0, dvp, n, dvp, dk);
  for (int64_t i = 0; i < n; i++) {
    const VR e = FN(splat)(t->eG[i]), b = FN(splat)(t->beta[i]);
    for (int64_t j = 0; j < dvp; j += VW)
      vstore(t->X + i * dvp + j, b * vfma(-e, vload(t->KS + i * dvp + j), vload(t->V + i * dvp + j)));
  }
  FN(gdn_solve)(t->L, t->X, n, dvp);
}

// dst[i, :] = s[i] * src[i, :] (and times s2[i] when given).
HS_INLINE void FN(scale_rows)(real* dst, const real* src, const real* s, const real* s2, int64_t n, int64_t d) {
  for (int64_t i = 0; i < n; i++) {
    const VR x = FN(splat)(s2 ? s[i] * s2[i] : s[i]);
    for (int64_t j = 0; j < d; j += VW) vstore(dst + i * d + j, x * vload(src + i * d + j));
  }
}

typedef struct {
  const hs_gdn_args* a;
  seq_trees tr;
  char* tmp;
  int64_t per;
} FN(gdn_ctx);

static void FN(gdn_task)(void* ctx, int64_t task, int worker) {
  FN(gdn_ctx)* c = ctx;
  const hs_gdn_args* a = c->a;
  const hs_forest* f = &a->f;
  const int64_t nk = a->nk, dk = a->dk, nv = a->nv, dv = a->dv, rep = nv / nk;
  const int64_t dkp = SEQ_UP(dk, SEQ_PAD), dvp = SEQ_UP(dv, SEQ_PAD), ss = dk * dv;
  FN(gdn_tmp) t;
  seq_arena m = seq_open(c->tmp + worker * c->per);
  FN(gdn_take)(&m, &t, dk, dv, rep, 0);
  const int64_t tree = task / nk, hk = task % nk;
  const real *q = a->q, *k = a->k, *v = a->v, *beta = a->beta, *g = a->g;
  real *o = a->o, *states = a->states, *rec = a->rec_state;
  for (int32_t x = c->tr.off[tree]; x < c->tr.off[tree + 1]; x++) {
    const int32_t s = c->tr.seg[x], par = f->parent[s], slot = seq_slot(f, s);
    for (int64_t r = 0; r < rep; r++) {
      real* S = t.S + r * dk * dvp;
      const int64_t h = hk * rep + r;
      if (par >= 0) FN(pack)(S, dvp, states + ((f->nchunks + par) * nv + h) * ss, dv, dk, dv);
      else if (slot >= 0) FN(pack)(S, dvp, rec + (slot * nv + h) * ss, dv, dk, dv);
      else memset(S, 0, (size_t)(dk * dvp) * sizeof(real));
    }
    for (int64_t c0 = 0, ci = f->chunk_off[s]; c0 < f->len[s]; c0 += HS_GDN_CHUNK, ci++) {
      const int64_t n = HS_MIN(HS_GDN_CHUNK, f->len[s] - c0), row = f->start[s] + c0;
      FN(gdn_load_key)(&t, q + (row * nk + hk) * dk, k + (row * nk + hk) * dk, nk * dk, n, dk, dkp);
      for (int64_t r = 0; r < rep; r++) {
        const int64_t h = hk * rep + r;
        real* S = t.S + r * dk * dvp;
        if (states) FN(unpack)(states + (ci * nv + h) * ss, dv, S, dvp, dk, dv);
        FN(gdn_decay)(&t, g + row * nv + h, beta + row * nv + h, nv, n);
        FN(pack)(t.V, dvp, v + (row * nv + h) * dv, nv * dv, n, dv);
        FN(gdn_delta)(&t, S, n, dk, dkp, dvp);
        FN(mm0)(t.QS, dvp, t.Q, dkp, 1, S, dvp, n, dvp, dk);
        FN(scale_rows)(t.QS, t.QS, t.eG, 0, n, dvp);
        FN(mm_tri)(t.QS, dvp, t.P, t.X, dvp, n, dvp);
        FN(unpack)(o + (row * nv + h) * dv, nv * dv, t.QS, dvp, n, dv);
        FN(scale_rows)(t.eK, t.K, t.Ed, 0, n, dkp);
        const VR eC = FN(splat)(t.eG[n - 1]);
        for (int64_t j = 0; j < dk * dvp; j += VW) vstore(S + j, eC * vload(S + j));
        FN(mm1)(S, dvp, t.eK, 1, dkp, t.X, dvp, dk, dvp, n);
      }
    }
    for (int64_t r = 0; r < rep; r++) {
      const int64_t h = hk * rep + r;
      if (states) FN(unpack)(states + ((f->nchunks + s) * nv + h) * ss, dv, t.S + r * dk * dvp, dvp, dk, dv);
      if (slot >= 0) FN(unpack)(rec + (slot * nv + h) * ss, dv, t.S + r * dk * dvp, dvp, dk, dv);
    }
  }
}

static int64_t FN(gdn_layout)(const hs_gdn_args* a, void* ws, FN(gdn_ctx) * c) {
  seq_arena m = seq_open(ws), one = seq_open(0);
  FN(gdn_tmp) t;
  FN(gdn_take)(&one, &t, a->dk, a->dv, a->nv / a->nk, 0);
  c->a = a;
  c->per = one.used + 64;
  seq_trees_take(&m, &a->f, &c->tr);
  c->tmp = seq_take(&m, c->per * hs_num_threads());
  return m.used;
}
static int64_t FN(gdn_ws)(const hs_gdn_args* a) {
  FN(gdn_ctx) c;
  return FN(gdn_layout)(a, 0, &c);
}
static hs_status FN(gdn)(const hs_gdn_args* a) {
  FN(gdn_ctx) c;
  HS_NEED_WS(a, FN(gdn_layout)(a, a->ws, &c));
  seq_trees_fill(&a->f, &c.tr);
  hs_parallel((int64_t)c.tr.n * a->nk, FN(gdn_task), &c);
  return HS_OK;
}

// ---- backward ----

typedef struct {
  const hs_gdn_bwd_args* a;
  seq_trees tr;
  real* dseg;  // [S, nv, dk, dvp]: gradient of a segment's initial state, handed to its parent
  char* tmp;
  int64_t per;
} FN(gdnb_ctx);

// One chunk of value head h: adds into t->dQ, t->dK, writes dv, dbeta, dg, turns D (gradient of the state after the chunk) into dS0.
static void FN(gdnb_chunk)(const hs_gdn_bwd_args* a, FN(gdn_tmp) * t, real* D, int64_t h, int64_t row, int64_t n, int64_t ci) {
  const int64_t dk = a->dk, nv = a->nv, dv = a->dv, dkp = SEQ_UP(dk, SEQ_PAD), dvp = SEQ_UP(dv, SEQ_PAD), np = SEQ_UP(n, SEQ_PAD);
  const real* s0 = (const real*)a->states + (ci * nv + h) * dk * dv;
  FN(gdn_decay)(t, (const real*)a->g + row * nv + h, (const real*)a->beta + row * nv + h, nv, n);
  FN(pack)(t->V, dvp, (const real*)a->v + (row * nv + h) * dv, nv * dv, n, dv);
  FN(pack)(t->dO, dvp, (const real*)a->do_ + (row * nv + h) * dv, nv * dv, n, dv);
  FN(pack)(t->S0, dvp, s0, dv, dk, dv);
  FN(transpose)(t->S0T, dkp, s0, dv, dk, dv, dkp);
  FN(transpose)(t->DT, dkp, D, dvp, dk, dv, dkp);
  FN(gdn_delta)(t, t->S0, n, dk, dkp, dvp);
  FN(transpose)(t->DeltaT, LDN, t->X, dvp, n, dv, np);
  // dDelta = Ed * (K D) + P^T dO, then Z.
  FN(mm0)(t->Z, dvp, t->K, dkp, 1, D, dvp, n, dvp, dk);
  FN(scale_rows)(t->Z, t->Z, t->Ed, 0, n, dvp);
  FN(mm_triT)(t->Z, dvp, t->P, t->dO, dvp, n, dvp);
  FN(gdn_solveT)(t->L, t->Z, n, dvp);
  // PG = tril(dO Delta^T) * Gam, E = -stril(Z Delta^T) * Gam, and what both say about the gates.
  FN(mm_lower)(t->PG, t->dO, dvp, t->DeltaT, n, dv);
  FN(mm_lower)(t->E, t->Z, dvp, t->DeltaT, n, dv);
  real cs[LDN] = {0};
  for (int64_t i = 0; i < n; i++) {
    const int64_t w = ROWCOLS(i);
    const VR b = FN(splat)(t->beta[i]);
    VR rowsum = vzero(), rowb = vzero();
    for (int64_t j = 0; j < w; j += VW) {
      const int in = j <= i;
      const VR gam = vload(t->Gam + i * LDN + j);
      const VR pg = in ? vload(t->PG + i * LDN + j) * gam : vzero();
      VR e = in ? -vload(t->E + i * LDN + j) * gam : vzero();
      if (j <= i && i < j + VW) e[i - j] = 0;
      vstore(t->PG + i * LDN + j, pg);
      vstore(t->E + i * LDN + j, e);
      if (!in) continue;
      const VR ek = e * vload(t->KK + i * LDN + j);
      const VR both = vfma(b, ek, pg * vload(t->QK + i * LDN + j));
      rowb += ek;
      rowsum += both;
      vstore(cs + j, vload(cs + j) + both);
    }
    t->db[i] = vsum(rowb);
    t->dG[i] = (double)vsum(rowsum);
  }
  for (int64_t i = 0; i < n; i++) t->dG[i] -= (double)cs[i];
  FN(mm0)(t->T1, dkp, t->dO, dvp, 1, t->S0T, dkp, n, dkp, dv);  // dO S0^T
  FN(mm0)(t->T2, dkp, t->Z, dvp, 1, t->S0T, dkp, n, dkp, dv);   // Z S0^T
  FN(mm0)(t->T3, dkp, t->X, dvp, 1, t->DT, dkp, n, dkp, dv);    // Delta D^T
  double xs = 0;
  for (int64_t i = 0; i < n; i++) {
    const real eg = t->eG[i], be = t->beta[i], ed = t->Ed[i];
    const real *K = t->K + i * dkp, *Q = t->Q + i * dkp, *t1 = t->T1 + i * dkp, *t2 = t->T2 + i * dkp, *t3 = t->T3 + i * dkp;
    const real *Z = t->Z + i * dvp, *Vv = t->V + i * dvp, *KS = t->KS + i * dvp;
    const double x = (double)(ed * vdot(K, t3, dkp));
    t->dG[i] += (double)(eg * vdot(Q, t1, dkp)) - (double)(be * eg * vdot(K, t2, dkp)) - x;
    xs += x;
    VR s = vzero();
    const VR veg = FN(splat)(eg);
    for (int64_t j = 0; j < dvp; j += VW) s = vfma(vload(Z + j), vfma(-veg, vload(KS + j), vload(Vv + j)), s);
    t->db[i] += vsum(s);
    // dQ += e^G t1;  dK += Ed t3 - beta e^G t2;  eK = beta K for E^T (beta K).
    const VR bg = FN(splat)(be * eg), vd = FN(splat)(ed), vb = FN(splat)(be);
    for (int64_t j = 0; j < dkp; j += VW) {
      vstore(t->dQ + i * dkp + j, vfma(veg, vload(t1 + j), vload(t->dQ + i * dkp + j)));
      vstore(t->dK + i * dkp + j, vfma(vd, vload(t3 + j), vfma(-bg, vload(t2 + j), vload(t->dK + i * dkp + j))));
      vstore(t->eK + i * dkp + j, vb * vload(K + j));
    }
  }
  const real eC = t->eG[n - 1];
  t->dG[n - 1] += xs + (double)(eC * vdot(D, t->S0, dk * dvp));
  FN(mm_tri)(t->dQ, dkp, t->PG, t->K, dkp, n, dkp);
  FN(mm_triT)(t->dK, dkp, t->PG, t->Q, dkp, n, dkp);
  FN(mm_triT)(t->dK, dkp, t->E, t->eK, dkp, n, dkp);
  memset(t->T1, 0, (size_t)(n * dkp) * sizeof(real));
  FN(mm_tri)(t->T1, dkp, t->E, t->K, dkp, n, dkp);
  for (int64_t i = 0; i < n; i++) {
    const VR b = FN(splat)(t->beta[i]);
    for (int64_t j = 0; j < dkp; j += VW)
      vstore(t->dK + i * dkp + j, vfma(b, vload(t->T1 + i * dkp + j), vload(t->dK + i * dkp + j)));
  }
  // D = e^{G_C} D + (e^G Q)^T dO - (beta e^G K)^T Z.
  FN(scale_rows)(t->eQ, t->Q, t->eG, 0, n, dkp);
  FN(scale_rows)(t->eK, t->K, t->eG, t->beta, n, dkp);
  for (int64_t j = 0; j < dk * dvp; j += VW) vstore(D + j, FN(splat)(eC) * vload(D + j));
  FN(mm1)(D, dvp, t->eQ, 1, dkp, t->dO, dvp, dk, dvp, n);
  FN(mm2)(D, dvp, t->eK, 1, dkp, t->Z, dvp, dk, dvp, n);
  // Out: dV = beta Z, dbeta, dg = reverse cumulative sum of dG.
  FN(scale_rows)(t->Z, t->Z, t->beta, 0, n, dvp);
  FN(unpack)((real*)a->dv_ + (row * nv + h) * dv, nv * dv, t->Z, dvp, n, dv);
  real *db = (real*)a->dbeta + row * nv + h, *dg = (real*)a->dg + row * nv + h;
  double sum = 0;
  for (int64_t i = n - 1; i >= 0; i--) {
    sum += t->dG[i];
    dg[i * nv] = (real)sum;
    db[i * nv] = t->db[i];
  }
}

static void FN(gdnb_task)(void* ctx, int64_t task, int worker) {
  FN(gdnb_ctx)* c = ctx;
  const hs_gdn_bwd_args* a = c->a;
  const hs_forest* f = &a->f;
  const int64_t nk = a->nk, dk = a->dk, nv = a->nv, dv = a->dv, rep = nv / nk, dkp = SEQ_UP(dk, SEQ_PAD), dvp = SEQ_UP(dv, SEQ_PAD);
  const int64_t ss = dk * dvp;
  FN(gdn_tmp) t;
  seq_arena m = seq_open(c->tmp + worker * c->per);
  FN(gdn_take)(&m, &t, dk, dv, rep, 1);
  const int64_t tree = task / nk, hk = task % nk;
  for (int32_t x = c->tr.off[tree + 1] - 1; x >= c->tr.off[tree]; x--) {
    const int32_t s = c->tr.seg[x];
    memset(t.S, 0, (size_t)(rep * ss) * sizeof(real));
    for (int32_t y = f->child_off[s]; y < f->child_off[s + 1]; y++) {
      const real* d = c->dseg + (f->child[y] * nv + hk * rep) * ss;
      for (int64_t j = 0; j < rep * ss; j += VW) vstore(t.S + j, vload(t.S + j) + vload(d + j));
    }
    const int64_t last = (f->len[s] - 1) / HS_GDN_CHUNK;
    for (int64_t ch = last; ch >= 0; ch--) {
      const int64_t n = HS_MIN(HS_GDN_CHUNK, f->len[s] - ch * HS_GDN_CHUNK), row = f->start[s] + ch * HS_GDN_CHUNK;
      const int64_t at = (row * nk + hk) * dk;
      FN(gdn_load_key)(&t, (const real*)a->q + at, (const real*)a->k + at, nk * dk, n, dk, dkp);
      memset(t.dQ, 0, (size_t)(n * dkp) * sizeof(real));
      memset(t.dK, 0, (size_t)(n * dkp) * sizeof(real));
      for (int64_t r = 0; r < rep; r++) FN(gdnb_chunk)(a, &t, t.S + r * ss, hk * rep + r, row, n, f->chunk_off[s] + ch);
      FN(unpack)((real*)a->dq + at, nk * dk, t.dQ, dkp, n, dk);
      FN(unpack)((real*)a->dk_ + at, nk * dk, t.dK, dkp, n, dk);
    }
    if (f->parent[s] >= 0) memcpy(c->dseg + (s * nv + hk * rep) * ss, t.S, (size_t)(rep * ss) * sizeof(real));
  }
}

static int64_t FN(gdn_bwd_layout)(const hs_gdn_bwd_args* a, void* ws, FN(gdnb_ctx) * c) {
  seq_arena m = seq_open(ws), one = seq_open(0);
  FN(gdn_tmp) t;
  FN(gdn_take)(&one, &t, a->dk, a->dv, a->nv / a->nk, 1);
  c->a = a;
  c->per = one.used + 64;
  seq_trees_take(&m, &a->f, &c->tr);
  c->dseg = seq_take(&m, (int64_t)a->f.nseg * a->nv * a->dk * SEQ_UP(a->dv, SEQ_PAD) * (int64_t)sizeof(real));
  c->tmp = seq_take(&m, c->per * hs_num_threads());
  return m.used;
}
static int64_t FN(gdn_bwd_ws)(const hs_gdn_bwd_args* a) {
  FN(gdnb_ctx) c;
  return FN(gdn_bwd_layout)(a, 0, &c);
}
static hs_status FN(gdn_bwd)(const hs_gdn_bwd_args* a) {
  FN(gdnb_ctx) c;
  HS_NEED_WS(a, FN(gdn_bwd_layout)(a, a->ws, &c));
  seq_trees_fill(&a->f, &c.tr);
  hs_parallel((int64_t)c.tr.n * a->nk, FN(gdnb_task), &c);
  return HS_OK;
}

// ---- one step (model.md 3.5) ----

// W*VW columns of one head's state; reads ahead in the state at `next`. Sums over dk run in two interleaved chains.
HS_INLINE void FN(gdn_step_cols)(real* S, const real* next, int64_t dv, int64_t dk, const real* q, const real* k, const real* v, real* o,
                                 real beta, real al, int64_t w, const int W) {
  const VR va = FN(splat)(al), vb = FN(splat)(beta);
  VR r[2][2], d[2];
#pragma GCC unroll 2
  for (int c = 0; c < W; c++) r[0][c] = r[1][c] = vzero();
  int64_t i = 0;
  for (; i + 2 <= dk; i += 2)
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
#pragma GCC unroll 2
      for (int c = 0; c < W; c++) __builtin_prefetch(next + (i + h) * dv + c * VW);
#pragma GCC unroll 2
      for (int c = 0; c < W; c++) r[h][c] = vfma(FN(splat)(k[i + h]), vloadn(S + (i + h) * dv + c * VW, w - c * VW), r[h][c]);
    }
  if (i < dk)
#pragma GCC unroll 2
    for (int c = 0; c < W; c++) r[0][c] = vfma(FN(splat)(k[i]), vloadn(S + i * dv + c * VW, w - c * VW), r[0][c]);
#pragma GCC unroll 2
  for (int c = 0; c < W; c++) {
    d[c] = vb * (vloadn(v + c * VW, w - c * VW) - va * (r[0][c] + r[1][c]));
    r[0][c] = r[1][c] = vzero();
  }
  for (i = 0; i < dk; i++)
#pragma GCC unroll 2
    for (int c = 0; c < W; c++) {
      const VR x = vfma(FN(splat)(k[i]), d[c], va * vloadn(S + i * dv + c * VW, w - c * VW));
      vstoren(S + i * dv + c * VW, x, w - c * VW);
      r[0][c] = vfma(FN(splat)(q[i]), x, r[0][c]);
    }
#pragma GCC unroll 2
  for (int c = 0; c < W; c++) vstoren(o + c * VW, r[0][c], w - c * VW);
}

static void FN(gdn_step_task)(void* ctx, int64_t task, int worker) {
  const hs_gdn_step_args* a = ctx;
  (void)worker;
  const int64_t nk = a->nk, dk = a->dk, nv = a->nv, dv = a->dv, rep = nv / nk, e = HS_MIN(a->B, (task + 1) * 4);
  for (int64_t b = task * 4; b < e; b++)
    for (int64_t h = 0; h < nv; h++) {
      const real *q = (const real*)a->q + (b * nk + h / rep) * dk, *k = (const real*)a->k + (b * nk + h / rep) * dk;
      const real* v = (const real*)a->v + (b * nv + h) * dv;
      const real beta = ((const real*)a->beta)[b * nv + h], al = rexp(((const real*)a->g)[b * nv + h]);
      real *S = (real*)a->rec_state + (a->slot[b] * nv + h) * dk * dv, *o = (real*)a->o + (b * nv + h) * dv;
      const real* next = h + 1 < nv ? S + dk * dv : (const real*)a->rec_state + a->slot[HS_MIN(b + 1, a->B - 1)] * nv * dk * dv;
      int64_t j = 0;
      if (dv == 2 * VW) FN(gdn_step_cols)(S, next, 2 * VW, dk, q, k, v, o, beta, al, 2 * VW, 2);
      else {
        for (; dv - j >= 2 * VW; j += 2 * VW) FN(gdn_step_cols)(S + j, next + j, dv, dk, q, k, v + j, o + j, beta, al, 2 * VW, 2);
        for (; j < dv; j += VW) FN(gdn_step_cols)(S + j, next + j, dv, dk, q, k, v + j, o + j, beta, al, dv - j, 1);
      }
    }
}
static hs_status FN(gdn_step)(const hs_gdn_step_args* a) {
  hs_parallel((a->B + 3) / 4, FN(gdn_step_task), (void*)a);
  return HS_OK;
}
#undef LDN
#undef ROWCOLS
