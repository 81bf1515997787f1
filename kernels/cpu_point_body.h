// cpu_point_body.h - embedding, norms, pointwise ops, gather, sum of squares. Stamped out per SIMD level by cpu_levels.h (see cpu.h).
// A row's sums run over VW lanes with the tail as a partial vector: its bits depend on the row alone.

#define TASK(name) static void FN(name)(void* c_, int64_t task, int worker)
#define TASK_ARGS(type) (void)worker; const point_ctx* c = c_; const type* a = c->a; (void)a
#define NEED_SHAPE(T, D) HS_NEED(a->T > 0 && a->D > 0, #T " %lld, " #D " %lld: need both > 0", (long long)a->T, (long long)a->D)
#define NEED_PTR(p) HS_NEED(a->p, #p " is required")

// ---- embed ----

TASK(embed_task) {
  TASK_ARGS(hs_embed_args);
  const real* w = a->w;
  real* y = a->y;
  int64_t end = HS_MIN((task + 1) * c->rows, a->T);
  for (int64_t t = task * c->rows; t < end; t++) memcpy(y + t * a->D, w + a->ids[t] * a->D, (size_t)a->D * sizeof(real));
}
static hs_status FN(embed)(const hs_embed_args* a) {
  NEED_SHAPE(T, D);
  NEED_PTR(ids); NEED_PTR(w); NEED_PTR(y);
  for (int64_t t = 0; t < a->T; t++) HS_NEED(a->ids[t] >= 0 && a->ids[t] < a->V, "ids[%lld] %d, want 0..%lld", (long long)t, a->ids[t], (long long)a->V - 1);
  point_ctx c = {a, rows_per_task(a->D)};
  hs_parallel(HS_CEIL(a->T, c.rows), FN(embed_task), &c);
  return HS_OK;
}

// dst[row[i]] += src[i] for the rows of one class (a range of row numbers), i ascending.
HS_INLINE void FN(scatter)(real* dst, const real* src, const int32_t* row, int64_t n, int64_t D, int64_t from, int64_t to) {
  for (int64_t i = 0; i < n; i++) {
    if (row[i] < from || row[i] >= to) continue;
    real* d = dst + row[i] * D;
    const real* s = src + i * D;
    for (int64_t j = 0; j < D; j++) d[j] += s[j];
  }
}
TASK(embed_bwd_task) {
  TASK_ARGS(hs_embed_bwd_args);
  FN(scatter)(a->dw, a->dy, a->ids, a->T, a->D, a->V * task / SCATTER_CLASSES, a->V * (task + 1) / SCATTER_CLASSES);
}
static hs_status FN(embed_bwd)(const hs_embed_bwd_args* a) {
  NEED_SHAPE(T, D);
  NEED_PTR(ids); NEED_PTR(dy); NEED_PTR(dw);
  for (int64_t t = 0; t < a->T; t++) HS_NEED(a->ids[t] >= 0 && a->ids[t] < a->V, "ids[%lld] %d, want 0..%lld", (long long)t, a->ids[t], (long long)a->V - 1);
  point_ctx c = {a, 0};
  hs_parallel(SCATTER_CLASSES, FN(embed_bwd_task), &c);
  return HS_OK;
}

// ---- gather ----

TASK(gather_task) {
  TASK_ARGS(hs_gather_args);
  int64_t end = HS_MIN((task + 1) * c->rows, a->N);
  for (int64_t i = task * c->rows; i < end; i++)
    memcpy((real*)a->dst + i * a->D, (const real*)a->src + a->row[i] * a->D, (size_t)a->D * sizeof(real));
}
TASK(gather_bwd_task) {
  TASK_ARGS(hs_gather_args);
  FN(scatter)(a->dst, a->src, a->row, a->N, a->D, a->T * task / SCATTER_CLASSES, a->T * (task + 1) / SCATTER_CLASSES);
}
static hs_status FN(gather_check)(const hs_gather_args* a) {
  NEED_SHAPE(N, D);
  NEED_PTR(row); NEED_PTR(src); NEED_PTR(dst);
  for (int64_t i = 0; i < a->N; i++) HS_NEED(a->row[i] >= 0 && a->row[i] < a->T, "row[%lld] %d, want 0..%lld", (long long)i, a->row[i], (long long)a->T - 1);
  return HS_OK;
}
static hs_status FN(gather)(const hs_gather_args* a) {
  hs_status st = FN(gather_check)(a);
  if (st != HS_OK) return st;
  point_ctx c = {a, rows_per_task(a->D)};
  hs_parallel(HS_CEIL(a->N, c.rows), FN(gather_task), &c);
  return HS_OK;
}
static hs_status FN(gather_bwd)(const hs_gather_args* a) {
  hs_status st = FN(gather_check)(a);
  if (st != HS_OK) return st;
  point_ctx c = {a, 0};
  hs_parallel(SCATTER_CLASSES, FN(gather_bwd_task), &c);
  return HS_OK;
}

// ---- rmsnorm (model.md 3.2) ----

HS_INLINE real FN(rstd_of)(const real* x, int64_t D, double eps) { return 1 / rroot(vdot(x, x, D) / (real)D + (real)eps); }

TASK(rmsnorm_task) {
  TASK_ARGS(hs_rmsnorm_args);
  const int64_t D = a->D;
  const real* w = a->w;
  int64_t end = HS_MIN((task + 1) * c->rows, a->T);
  for (int64_t t = task * c->rows; t < end; t++) {
    const real* x = (const real*)a->x + t * D;
    real* y = (real*)a->y + t * D;
    real r = FN(rstd_of)(x, D, a->eps);
    if (a->rstd) ((real*)a->rstd)[t] = r;
    for (int64_t i = 0; i < D; i++) y[i] = x[i] * r * (1 + w[i]);
  }
}
static hs_status FN(rmsnorm)(const hs_rmsnorm_args* a) {
  NEED_SHAPE(T, D);
  NEED_PTR(x); NEED_PTR(w); NEED_PTR(y);
  point_ctx c = {a, rows_per_task(a->D)};
  hs_parallel(HS_CEIL(a->T, c.rows), FN(rmsnorm_task), &c);
  return HS_OK;
}

TASK(rmsnorm_bwd_task) {
  TASK_ARGS(hs_rmsnorm_bwd_args);
  const int64_t D = a->D;
  const real* w = a->w;
  real* part = (real*)((char*)a->ws + task * hs_align(D * (int64_t)sizeof(real)));
  memset(part, 0, (size_t)D * sizeof(real));
  int64_t end = HS_MIN((task + 1) * NORM_ROWS, a->T);
  for (int64_t t = task * NORM_ROWS; t < end; t++) {
    const real* x = (const real*)a->x + t * D;
    const real* dy = (const real*)a->dy + t * D;
    real* dx = (real*)a->dx + t * D;
    real r = a->rstd ? ((const real*)a->rstd)[t] : FN(rstd_of)(x, D, a->eps);
    VR s = vzero(), rv = vset1(r), one = vset1(1);
    for (int64_t i = 0; i < D; i += VW) {
      VR n = vloadn(x + i, D - i) * rv, g = vloadn(dy + i, D - i);
      vstoren(part + i, vloadn(part + i, D - i) + g * n, D - i);
      s = vfma(n, g * (one + vloadn(w + i, D - i)), s);
    }
    VR m = vset1(vsum(s) / (real)D);
    for (int64_t i = 0; i < D; i += VW) {
      VR n = vloadn(x + i, D - i) * rv, dn = vloadn(dy + i, D - i) * (one + vloadn(w + i, D - i));
      VR d = rv * (dn - n * m);
      if (a->flags & HS_ACC_DX) d = vloadn(dx + i, D - i) + d;
      vstoren(dx + i, d, D - i);
    }
  }
}
// dw += the blocks of ws in order.
HS_INLINE void FN(add_blocks)(real* dw, const void* ws, int64_t blocks, int64_t D) {
  const int64_t stride = hs_align(D * (int64_t)sizeof(real));
  for (int64_t i = 0; i < D; i += VW) {
    VR s = vzero();
    for (int64_t b = 0; b < blocks; b++) s = s + vloadn((const real*)((const char*)ws + b * stride) + i, D - i);
    vstoren(dw + i, vloadn(dw + i, D - i) + s, D - i);
  }
}
static hs_status FN(rmsnorm_bwd)(const hs_rmsnorm_bwd_args* a) {
  NEED_SHAPE(T, D);
  NEED_PTR(x); NEED_PTR(w); NEED_PTR(dy); NEED_PTR(dx);
  HS_NEED_WS(a, norm_bwd_ws(a->T, a->D, a->dtype));
  point_ctx c = {a, NORM_ROWS};
  hs_parallel(HS_CEIL(a->T, NORM_ROWS), FN(rmsnorm_bwd_task), &c);
  if (a->dw) FN(add_blocks)(a->dw, a->ws, HS_CEIL(a->T, NORM_ROWS), a->D);
  return HS_OK;
}

// ---- gated rmsnorm (model.md 3.3) ----

TASK(gatednorm_task) {
  TASK_ARGS(hs_gatednorm_args);
  const int64_t D = a->dv;
  const real* w = a->w;
  int64_t end = HS_MIN((task + 1) * c->rows, a->T * a->nv);
  for (int64_t t = task * c->rows; t < end; t++) {
    const real *o = (const real*)a->o + t * D, *z = (const real*)a->z + t * D;
    real* y = (real*)a->y + t * D;
    VR r = vset1(FN(rstd_of)(o, D, a->eps));
    for (int64_t i = 0; i < D; i += VW) {
      VR zi = vloadn(z + i, D - i);
      vstoren(y + i, vloadn(w + i, D - i) * (vloadn(o + i, D - i) * r) * (zi * vsigmoid(zi)), D - i);
    }
  }
}
static hs_status FN(gatednorm)(const hs_gatednorm_args* a) {
  NEED_SHAPE(T, dv);
  HS_NEED(a->nv > 0, "nv %lld, need > 0", (long long)a->nv);
  NEED_PTR(o); NEED_PTR(z); NEED_PTR(w); NEED_PTR(y);
  point_ctx c = {a, rows_per_task(a->dv)};
  hs_parallel(HS_CEIL(a->T * a->nv, c.rows), FN(gatednorm_task), &c);
  return HS_OK;
}

TASK(gatednorm_bwd_task) {
  TASK_ARGS(hs_gatednorm_bwd_args);
  const int64_t D = a->dv;
  const real* w = a->w;
  real* part = (real*)((char*)a->ws + task * hs_align(D * (int64_t)sizeof(real)));
  memset(part, 0, (size_t)D * sizeof(real));
  int64_t end = HS_MIN((task + 1) * NORM_ROWS, a->T) * a->nv;
  for (int64_t t = task * NORM_ROWS * a->nv; t < end; t++) {
    const real *o = (const real*)a->o + t * D, *z = (const real*)a->z + t * D, *dy = (const real*)a->dy + t * D;
    real *dO = (real*)a->do_ + t * D, *dz = (real*)a->dz + t * D;
    VR s = vzero(), r = vset1(FN(rstd_of)(o, D, a->eps)), one = vset1(1);
    for (int64_t i = 0; i < D; i += VW) {
      VR zi = vloadn(z + i, D - i), n = vloadn(o + i, D - i) * r, g = vloadn(dy + i, D - i), wi = vloadn(w + i, D - i);
      VR sg = vsigmoid(zi), silu = zi * sg;
      vstoren(part + i, vloadn(part + i, D - i) + g * silu * n, D - i);
      vstoren(dz + i, g * wi * n * (sg * (one + zi * (one - sg))), D - i);
      VR dn = g * wi * silu;
      vstoren(dO + i, dn, D - i);
      s = vfma(n, dn, s);
    }
    VR m = vset1(vsum(s) / (real)D);
    for (int64_t i = 0; i < D; i += VW) vstoren(dO + i, r * (vloadn(dO + i, D - i) - vloadn(o + i, D - i) * r * m), D - i);
  }
}
static hs_status FN(gatednorm_bwd)(const hs_gatednorm_bwd_args* a) {
  NEED_SHAPE(T, dv);
  HS_NEED(a->nv > 0, "nv %lld, need > 0", (long long)a->nv);
  NEED_PTR(o); NEED_PTR(z); NEED_PTR(w); NEED_PTR(dy); NEED_PTR(do_); NEED_PTR(dz);
  HS_NEED_WS(a, norm_bwd_ws(a->T, a->dv, a->dtype));
  point_ctx c = {a, NORM_ROWS};
  hs_parallel(HS_CEIL(a->T, NORM_ROWS), FN(gatednorm_bwd_task), &c);
  if (a->dw) FN(add_blocks)(a->dw, a->ws, HS_CEIL(a->T, NORM_ROWS), a->dv);
  return HS_OK;
}

// ---- elementwise ----

#define ELEMS(n) int64_t i = task * ELEM_BLOCK, end = HS_MIN(i + ELEM_BLOCK, (n))

TASK(copy_task) {
  TASK_ARGS(hs_vec_args);
  ELEMS(a->n);
  memcpy((real*)a->dst + i, (const real*)a->src + i, (size_t)(end - i) * sizeof(real));
}
TASK(add_task) {
  TASK_ARGS(hs_vec_args);
  ELEMS(a->n);
  real* d = a->dst;
  const real* s = a->src;
  for (; i < end; i += VW) vstoren(d + i, vloadn(d + i, end - i) + vloadn(s + i, end - i), end - i);
}
static hs_status FN(vec_run)(const hs_vec_args* a, void (*task)(void*, int64_t, int)) {
  HS_NEED(a->n > 0, "n %lld, need > 0", (long long)a->n);
  NEED_PTR(src); NEED_PTR(dst);
  point_ctx c = {a, 0};
  hs_parallel(HS_CEIL(a->n, ELEM_BLOCK), task, &c);
  return HS_OK;
}
static hs_status FN(vec_copy)(const hs_vec_args* a) { return FN(vec_run)(a, FN(copy_task)); }
static hs_status FN(vec_add)(const hs_vec_args* a) { return FN(vec_run)(a, FN(add_task)); }

TASK(swiglu_task) {
  TASK_ARGS(hs_swiglu_args);
  ELEMS(a->n);
  const real *gate = a->gate, *up = a->up;
  real* h = a->h;
  for (; i < end; i += VW) {
    VR g = vloadn(gate + i, end - i);
    vstoren(h + i, g * vsigmoid(g) * vloadn(up + i, end - i), end - i);
  }
}
static hs_status FN(swiglu)(const hs_swiglu_args* a) {
  HS_NEED(a->n > 0, "n %lld, need > 0", (long long)a->n);
  NEED_PTR(gate); NEED_PTR(up); NEED_PTR(h);
  point_ctx c = {a, 0};
  hs_parallel(HS_CEIL(a->n, ELEM_BLOCK), FN(swiglu_task), &c);
  return HS_OK;
}
TASK(swiglu_bwd_task) {
  TASK_ARGS(hs_swiglu_bwd_args);
  ELEMS(a->n);
  const real *gate = a->gate, *up = a->up, *dh = a->dh;
  real *dg = a->dgate, *du = a->dup;
  const VR one = vset1(1);
  for (; i < end; i += VW) {
    VR g = vloadn(gate + i, end - i), u = vloadn(up + i, end - i), d = vloadn(dh + i, end - i), s = vsigmoid(g);
    vstoren(dg + i, d * u * (s * (one + g * (one - s))), end - i);
    vstoren(du + i, d * (g * s), end - i);
  }
}
static hs_status FN(swiglu_bwd)(const hs_swiglu_bwd_args* a) {
  HS_NEED(a->n > 0, "n %lld, need > 0", (long long)a->n);
  NEED_PTR(gate); NEED_PTR(up); NEED_PTR(dh); NEED_PTR(dgate); NEED_PTR(dup);
  point_ctx c = {a, 0};
  hs_parallel(HS_CEIL(a->n, ELEM_BLOCK), FN(swiglu_bwd_task), &c);
  return HS_OK;
}

// ---- gradient norm ----

TASK(sumsq_task) {
  TASK_ARGS(hs_sumsq_args);
  const real* x = a->x;
  int64_t i = task * SUMSQ_BLOCK, end = HS_MIN(i + SUMSQ_BLOCK, a->n);
  double s[8] = {0};
  for (; i + 8 <= end; i += 8)
    for (int l = 0; l < 8; l++) s[l] += (double)x[i + l] * (double)x[i + l];
  for (int l = 0; i < end; i++, l++) s[l] += (double)x[i] * (double)x[i];
  ((double*)a->ws)[task] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}
static hs_status FN(sumsq)(const hs_sumsq_args* a) {
  HS_NEED(a->n > 0, "n %lld, need > 0", (long long)a->n);
  NEED_PTR(x); NEED_PTR(out);
  const int64_t blocks = HS_CEIL(a->n, SUMSQ_BLOCK);
  HS_NEED_WS(a, blocks * (int64_t)sizeof(double));
  point_ctx c = {a, 0};
  hs_parallel(blocks, FN(sumsq_task), &c);
  double s = 0;
  for (int64_t b = 0; b < blocks; b++) s += ((const double*)a->ws)[b];
  *a->out = s;
  return HS_OK;
}

#undef ELEMS
