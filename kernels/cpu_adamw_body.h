// cpu_adamw_body.h - AdamW, stamped out per SIMD level by cpu_levels.h (see cpu.h).
// One block of HS_STATE_BLOCK elements at a time: what is not stored in the real type is read into it on the stack, updated, and stored
// again. The update itself sees moments before they are rounded. Loops below are elementwise, so the compiler's vectors cannot change bits.

typedef struct { const hs_adamw_args* a; real b1, b2, nb1, nb2, c1, c2, lr, eps, decay, scale; } FN(adamw_ctx);
typedef struct { real w[HS_STATE_BLOCK], m[HS_STATE_BLOCK], v[HS_STATE_BLOCK]; } FN(adamw_block);

// ---- split weights ----

static void FN(weights_join)(const hs_adamw_args* a, int64_t at, int n, real* restrict w) {
  const int16_t* restrict lo = (const int16_t*)a->lo + at;
  if (a->dtype == HS_BF16) {
    const uint16_t* restrict hi = (const uint16_t*)a->w + at;
    for (int i = 0; i < n; i++) w[i] = (real)hs_join((uint32_t)hi[i] << 16, lo[i]);
  } else {
    const float* restrict hi = (const float*)a->w + at;
    for (int i = 0; i < n; i++) w[i] = (real)hs_join(hs_bits(hi[i]), lo[i]);
  }
}
static void FN(weights_split)(const hs_adamw_args* a, int64_t at, int n, const real* restrict w) {
  int16_t* restrict lo = (int16_t*)a->lo + at;
  uint32_t h;
  int32_t l;
  if (a->dtype == HS_BF16) {
    uint16_t* restrict hi = (uint16_t*)a->w + at;
    for (int i = 0; i < n; i++) hs_split((float)w[i], &h, &l), hi[i] = (uint16_t)(h >> 16), lo[i] = (int16_t)l;
  } else {
    float* restrict hi = (float*)a->w + at;
    for (int i = 0; i < n; i++) hs_split((float)w[i], &h, &l), hi[i] = hs_float(h), lo[i] = (int16_t)l;
  }
}

// ---- narrow moments ----

static void FN(moments_read)(const hs_adamw_args* a, int64_t at, int n, real* restrict m, real* restrict v) {
  if (a->states == HS_STATE_BF16) {
    const uint16_t *restrict mh = (const uint16_t*)a->m + at, *restrict vh = (const uint16_t*)a->v + at;
    for (int i = 0; i < n; i++) m[i] = (real)hs_from_bf16(mh[i]), v[i] = (real)hs_from_bf16(vh[i]);
    return;
  }
  const uint8_t *restrict mc = (const uint8_t*)a->m + at, *restrict vc = (const uint8_t*)a->v + at;
  const float ms = ((const float*)a->ms)[at / HS_STATE_BLOCK], vs = ((const float*)a->vs)[at / HS_STATE_BLOCK];
  for (int i = 0; i < n; i++) m[i] = (real)hs_decode_m(mc[i], ms), v[i] = (real)hs_decode_v(vc[i], vs);
}

HS_INLINE float FN(block_scale)(const real* x, int n) {
  uint32_t most = 0;
  for (int i = 0; i < n; i++) {
    const uint32_t b = hs_bits((float)x[i]) & 0x7fffffffu;
    most = b > most ? b : most;
  }
  return hs_code_scale(most);
}
static void FN(moments_write)(const hs_adamw_args* a, int64_t at, int n, const real* restrict m, const real* restrict v) {
  uint32_t rm[HS_STATE_BLOCK], rv[HS_STATE_BLOCK];
  const uint64_t first = (uint64_t)(a->first + at), seed = a->seed, step = (uint64_t)a->step;
  for (int i = 0; i < n; i++) hs_optim_random(seed, first + (uint64_t)i, step, &rm[i], &rv[i]);
  if (a->states == HS_STATE_BF16) {
    uint16_t *restrict mh = (uint16_t*)a->m + at, *restrict vh = (uint16_t*)a->v + at;
    for (int i = 0; i < n; i++) mh[i] = (uint16_t)hs_round_bf16((float)m[i], rm[i]);
    for (int i = 0; i < n; i++) vh[i] = (uint16_t)hs_round_bf16((float)v[i], rv[i]);
    return;
  }
  uint8_t *restrict mc = (uint8_t*)a->m + at, *restrict vc = (uint8_t*)a->v + at;
  const float ms = FN(block_scale)(m, n), vs = FN(block_scale)(v, n);
  const float mi = hs_code_inverse(ms), vi = hs_code_inverse(vs);
  for (int i = 0; i < n; i++) mc[i] = (uint8_t)hs_code_m((float)m[i] * mi, rm[i]);
  for (int i = 0; i < n; i++) vc[i] = (uint8_t)hs_code_v((float)v[i] * vi, rv[i]);
  ((float*)a->ms)[at / HS_STATE_BLOCK] = ms;
  ((float*)a->vs)[at / HS_STATE_BLOCK] = vs;
}

// ---- update ----

HS_INLINE void FN(adamw_update)(const FN(adamw_ctx)* c, real* w, real* m, real* v, const real* grad, int64_t n) {
  const VR b1 = vset1(c->b1), b2 = vset1(c->b2), nb1 = vset1(c->nb1), nb2 = vset1(c->nb2), c1 = vset1(c->c1), c2 = vset1(c->c2);
  const VR lr = vset1(c->lr), eps = vset1(c->eps), decay = vset1(c->decay), scale = vset1(c->scale);
  for (int64_t i = 0; i < n; i += VW) {
    VR g = vloadn(grad + i, n - i) * scale, wi = vloadn(w + i, n - i);
    VR mi = b1 * vloadn(m + i, n - i) + nb1 * g, vi = b2 * vloadn(v + i, n - i) + nb2 * (g * g);
    vstoren(m + i, mi, n - i);
    vstoren(v + i, vi, n - i);
    vstoren(w + i, wi - lr * (mi * c1 / (vsqrt(vi * c2) + eps) + decay * wi), n - i);
  }
}

static void FN(adamw_task)(void* c_, int64_t task, int worker) {
  (void)worker;
  const FN(adamw_ctx)* c = c_;
  const hs_adamw_args* a = c->a;
  const int64_t end = HS_MIN((task + 1) * ADAMW_TASK * HS_STATE_BLOCK, a->n);
  FN(adamw_block) b;
  for (int64_t at = task * ADAMW_TASK * HS_STATE_BLOCK; at < end; at += HS_STATE_BLOCK) {
    const int n = (int)HS_MIN(end - at, HS_STATE_BLOCK);
    real *w = (real*)a->w + at, *m = (real*)a->m + at, *v = (real*)a->v + at;
    if (a->lo) FN(weights_join)(a, at, n, w = b.w);
    if (a->states != HS_STATE_F32) FN(moments_read)(a, at, n, m = b.m, v = b.v);
    FN(adamw_update)(c, w, m, v, (const real*)a->grad + at, n);
    if (a->states != HS_STATE_F32) FN(moments_write)(a, at, n, m, v);
    if (a->lo) FN(weights_split)(a, at, n, w);
  }
}

static hs_status FN(adamw)(const hs_adamw_args* a) {
  FN(adamw_ctx) c = {
    a, (real)a->beta1, (real)a->beta2, (real)(1 - a->beta1), (real)(1 - a->beta2), (real)(1 / (1 - pow(a->beta1, (double)a->step))),
    (real)(1 / (1 - pow(a->beta2, (double)a->step))), (real)a->lr, (real)a->eps, (real)a->decay, (real)a->grad_scale,
  };
  hs_parallel(HS_CEIL(a->n, ADAMW_TASK * HS_STATE_BLOCK), FN(adamw_task), &c);
  return HS_OK;
}
