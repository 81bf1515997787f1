// cpu_head_body.h - log-probs and entropy of logit rows (trainer) and sampling (sampler), from one row pass: given the same hidden
// row, both report the same bits. Stamped out per SIMD level by cpu_levels.h.

typedef struct { real max, lnsum, entropy; } FN(stats);

HS_INLINE VI FN(lanes_below)(int64_t n) {
  VI m;
  for (int i = 0; i < VW; i++) m[i] = i < n ? -1 : 0;
  return m;
}

// The row pass: maximum of z*invt, ln sum exp(z*invt - max), entropy in nats. A logit that far below the maximum that its weight
// is 0 (minus infinity included) adds nothing.
static __attribute__((noinline)) FN(stats) FN(row_stats)(const real* z, int64_t n, real invt) {
  const VR tv = vset1(invt), ninf = vset1(-INFINITY);
  VR mv = ninf;
  for (int64_t i = 0; i < n; i += VW) {
    VR x = vloadn(z + i, n - i) * tv;
    mv = vmax(n - i >= VW ? x : vsel(FN(lanes_below)(n - i), x, ninf), mv);
  }
  FN(stats) r = {vhmax(mv), 0, 0};
  const VR m = vset1(r.max), floor = vset1(-1000);
  double sum = 0, dot = 0;
  for (int64_t b = 0; b < n; b += HEAD_BLOCK) {
    int64_t end = HS_MIN(b + HEAD_BLOCK, n);
    VR s = vzero(), t = vzero();
    for (int64_t i = b; i < end; i += VW) {
      VR d = vloadn(z + i, end - i) * tv - m;
      VR e = vexp(d);
      if (end - i < VW) e = (VR)((VI)e & FN(lanes_below)(end - i));
      s = s + e;
      t = vfma(e, vmax(d, floor), t);
    }
    sum += (double)vsum(s);
    dot += (double)vsum(t);
  }
  r.lnsum = rlog((real)sum);
  r.entropy = r.lnsum - (real)(dot / sum);
  return r;
}
HS_INLINE real FN(logp_of)(FN(stats) s, real z, real invt) { return z * invt - s.max - s.lnsum; }

// ---- lmhead ----

typedef struct {
  int64_t* first;   // first[r]: first target of the chunk's r-th distinct row
  real *x, *z, *dx;
} FN(head_buf);

HS_INLINE FN(head_buf) FN(head_carve)(void* ws, int64_t rows, int64_t D, int64_t valid, int bwd) {
  FN(head_buf) b;
  char* p = ws;
  b.first = (int64_t*)p;
  p += hs_align((rows + 1) * 8);
  b.x = (real*)p;
  p += hs_align(rows * D * (int64_t)sizeof(real));
  b.z = (real*)p;
  p += hs_align(rows * valid * (int64_t)sizeof(real));
  b.dx = bwd ? (real*)p : 0;
  return b;
}

// Finds up to `chunk` distinct rows from target i on, gathers them and forms their logits; returns the number of rows.
static int64_t FN(head_logits)(FN(head_buf)* b, int64_t i, int64_t N, int64_t D, int64_t valid, int64_t chunk, const int32_t* row, const real* x, const real* w) {
  int64_t rows = 0;
  for (; i < N && rows < chunk; rows++) {
    b->first[rows] = i;
    memcpy(b->x + rows * D, x + row[i] * D, (size_t)D * sizeof(real));
    int32_t r = row[i];
    while (i < N && row[i] == r) i++;
  }
  b->first[rows] = i;
  hs_pgemm(HS_TRANS_B, rows, valid, D, b->x, D, w, D, b->z, valid);
  return rows;
}

typedef struct { const void* a; FN(head_buf) b; real invt; int64_t chunk; } FN(head_ctx);

static void FN(lmhead_task)(void* c_, int64_t r, int worker) {
  (void)worker;
  const FN(head_ctx)* c = c_;
  const hs_lmhead_args* a = c->a;
  const real* z = c->b.z + r * a->vocab_valid;
  FN(stats) s = FN(row_stats)(z, a->vocab_valid, c->invt);
  for (int64_t i = c->b.first[r]; i < c->b.first[r + 1]; i++) {
    ((real*)a->logp)[i] = FN(logp_of)(s, z[a->target[i]], c->invt);
    ((real*)a->entropy)[i] = s.entropy;
    ((real*)a->lse)[i] = s.max + s.lnsum;
  }
}

static hs_status FN(head_check)(int64_t N, int64_t T, int64_t D, int64_t V, int64_t valid, int64_t chunk, double temperature, const int32_t* row, const int32_t* target) {
  HS_NEED(N > 0 && T > 0 && D > 0, "N %lld, T %lld, D %lld: need all > 0", (long long)N, (long long)T, (long long)D);
  HS_NEED(valid > 0 && valid <= V, "vocab_valid %lld, want 1..V (%lld)", (long long)valid, (long long)V);
  HS_NEED(chunk > 0, "chunk %lld, need > 0", (long long)chunk);
  HS_NEED(temperature > 0, "temperature %g, need > 0", temperature);
  HS_NEED(row && target, "row and target are required");
  for (int64_t i = 0; i < N; i++) {
    HS_NEED(row[i] >= 0 && row[i] < T, "row[%lld] %d, want 0..%lld", (long long)i, row[i], (long long)T - 1);
    HS_NEED(i == 0 || row[i] >= row[i - 1], "row[%lld] %d after %d: rows must ascend", (long long)i, row[i], row[i - 1]);
    HS_NEED(target[i] >= 0 && target[i] < valid, "target[%lld] %d, want 0..%lld", (long long)i, target[i], (long long)valid - 1);
  }
  return HS_OK;
}

static hs_status FN(lmhead)(const hs_lmhead_args* a) {
  hs_status st = FN(head_check)(a->N, a->T, a->D, a->V, a->vocab_valid, a->chunk, a->temperature, a->row, a->target);
  if (st != HS_OK) return st;
  HS_NEED(a->x && a->w && a->logp && a->entropy && a->lse, "x, w, logp, entropy and lse are required");
  HS_NEED_WS(a, head_ws(a->N, a->D, a->vocab_valid, a->chunk, a->dtype, 1));
  const int64_t chunk = HS_MIN(a->chunk, a->N);
  FN(head_ctx) c = {a, FN(head_carve)(a->ws, chunk, a->D, a->vocab_valid, 0), 1 / (real)(float)a->temperature, chunk};
  for (int64_t i = 0; i < a->N;) {
    int64_t rows = FN(head_logits)(&c.b, i, a->N, a->D, a->vocab_valid, chunk, a->row, a->x, a->w);
    hs_parallel(rows, FN(lmhead_task), &c);
    i = c.b.first[rows];
  }
  return HS_OK;
}

// dz_v = (sum_i dlogp_i ([v = target_i] - p_v) - sum_i dent_i p_v (ln p_v + H)) / temperature, in place of the logits.
static void FN(lmhead_bwd_task)(void* c_, int64_t r, int worker) {
  (void)worker;
  const FN(head_ctx)* c = c_;
  const hs_lmhead_bwd_args* a = c->a;
  const int64_t n = a->vocab_valid, i0 = c->b.first[r], i1 = c->b.first[r + 1];
  real* z = c->b.z + r * n;
  const real *dlogp = a->dlogp, *dent = a->dent;
  real sl = 0, se = 0;
  for (int64_t i = i0; i < i1; i++) {
    sl += dlogp[i];
    if (dent) se += dent[i];
  }
  const VR tv = vset1(c->invt), lse = vset1(((const real*)a->lse)[i0]), h = vset1(((const real*)a->entropy)[i0]), floor = vset1(-1000);
  const VR slv = vset1(sl), sev = vset1(se);
  for (int64_t v = 0; v < n; v += VW) {
    VR lp = vmax(vloadn(z + v, n - v) * tv - lse, floor);
    vstoren(z + v, -(vexp(lp) * (slv + sev * (lp + h))) * tv, n - v);
  }
  for (int64_t i = i0; i < i1; i++) z[a->target[i]] += dlogp[i] * c->invt;
}
static void FN(lmhead_dx_task)(void* c_, int64_t r, int worker) {
  (void)worker;
  const FN(head_ctx)* c = c_;
  const hs_lmhead_bwd_args* a = c->a;
  real* d = (real*)a->dx + a->row[c->b.first[r]] * a->D;
  const real* s = c->b.dx + r * a->D;
  for (int64_t j = 0; j < a->D; j++) d[j] += s[j];
}

static hs_status FN(lmhead_bwd)(const hs_lmhead_bwd_args* a) {
  hs_status st = FN(head_check)(a->N, a->T, a->D, a->V, a->vocab_valid, a->chunk, a->temperature, a->row, a->target);
  if (st != HS_OK) return st;
  HS_NEED(a->x && a->w && a->lse && a->entropy && a->dlogp && a->dx, "x, w, lse, entropy, dlogp and dx are required");
  HS_NEED_WS(a, head_ws(a->N, a->D, a->vocab_valid, a->chunk, a->dtype, 2));
  const int64_t chunk = HS_MIN(a->chunk, a->N), D = a->D, n = a->vocab_valid;
  FN(head_ctx) c = {a, FN(head_carve)(a->ws, chunk, D, n, 1), 1 / (real)(float)a->temperature, chunk};
  for (int64_t i = 0; i < a->N;) {
    int64_t rows = FN(head_logits)(&c.b, i, a->N, D, n, chunk, a->row, a->x, a->w);
    hs_parallel(rows, FN(lmhead_bwd_task), &c);
    hs_pgemm(0, rows, D, n, c.b.z, n, a->w, D, c.b.dx, D);
    if (a->dw) hs_pgemm(HS_TRANS_A | HS_BETA1, n, D, rows, c.b.z, n, c.b.x, D, a->dw, D);
    hs_parallel(rows, FN(lmhead_dx_task), &c);
    i = c.b.first[rows];
  }
  return HS_OK;
}

// ---- sample ----

#if HS_REAL == 64
typedef uint64_t FN(okey);
#else
typedef uint32_t FN(okey);
#endif

// Unsigned integer in the order of the reals (-0 just below +0).
HS_INLINE FN(okey) FN(order_key)(real x) {
  FN(okey) u;
  memcpy(&u, &x, sizeof u);
  const FN(okey) sign = (FN(okey))1 << (HS_REAL - 1);
  return u & sign ? ~u : u | sign;
}

// Which ids may be drawn: weight exp(d) with d = z*invt - max at least the min_p bound, among the top_k largest, in the smallest set
// of largest ones with mass top_p. Ties at a bound go to the lower ids: `left` many of them.
typedef struct {
  real dmin;
  FN(okey) key[2];    // bounds of top_k and top_p; ids above both are kept
  int64_t left[2];    // ids at the bound that are kept, in id order
} FN(keep);

HS_INLINE int FN(kept)(FN(keep)* k, real z, real d) {
  if (!(d >= k->dmin)) return 0;
  const FN(okey) u = FN(order_key)(z);
  for (int i = 0; i < 2; i++) {
    if (u < k->key[i]) return 0;
    if (u == k->key[i] && --k->left[i] < 0) return 0;
  }
  return 1;
}

#define SAMPLE_BLOCK 512

typedef struct { double* hist; int64_t* count; FN(okey) prefix; int shift, mass; int64_t at, kept; double total, at_mass; } FN(scan);

// One pass over the row in id order. Counts and weighs the kept ids; with a histogram, sorts those whose key has the given prefix
// above `shift` + 8 bits by their next 8 bits.
static void FN(sample_scan)(const real* z, int64_t n, real invt, real max, FN(keep) k, FN(scan)* s) {
  real e[SAMPLE_BLOCK], d[SAMPLE_BLOCK];
  s->kept = 0;
  s->total = 0;
  for (int64_t b = 0; b < n; b += SAMPLE_BLOCK) {
    int64_t m = HS_MIN(SAMPLE_BLOCK, n - b);
    for (int64_t i = 0; i < m; i += VW) {
      VR x = vloadn(z + b + i, m - i) * vset1(invt) - vset1(max);
      vstoren(d + i, x, m - i);
      vstoren(e + i, vexp(x), m - i);
    }
    for (int64_t i = 0; i < m; i++) {
      if (!FN(kept)(&k, z[b + i], d[i])) continue;
      s->kept++;
      s->total += e[i];
      if (!s->hist) continue;
      FN(okey) u = FN(order_key)(z[b + i]);
      if (s->shift + 8 < HS_REAL && (u >> (s->shift + 8)) != s->prefix) continue;
      s->hist[(u >> s->shift) & 255] += e[i];
      s->count[(u >> s->shift) & 255]++;
    }
  }
}

// Lowers bound `which` of k by radix descent: keeps ids from the largest down until their number (which 0) or mass (1) reaches need.
static void FN(bound)(const real* z, int64_t n, real invt, real max, FN(keep)* k, int which, double need) {
  double hist[256], above = 0;
  int64_t count[256];
  FN(okey) prefix = 0;
  int64_t ties = 0;
  double tie_mass = 0;
  for (int shift = HS_REAL - 8; shift >= 0; shift -= 8) {
    memset(hist, 0, sizeof hist);
    memset(count, 0, sizeof count);
    FN(scan) s = {.hist = hist, .count = count, .prefix = prefix, .shift = shift};
    FN(sample_scan)(z, n, invt, max, *k, &s);
    int last = -1, bin;
    for (bin = 255; bin >= 0; bin--) {
      if (!count[bin]) continue;
      last = bin;
      double add = which ? hist[bin] : (double)count[bin];
      if (above + add >= need) break;
      above += add;
    }
    if (bin < 0) {   // rounding kept the mass just short: everything in the lowest bin is in
      bin = last;
      above -= which ? hist[bin] : (double)count[bin];
    }
    prefix = prefix << 8 | (FN(okey))bin;
    ties = count[bin];
    tie_mass = hist[bin];
  }
  k->key[which] = prefix;
  double each = which ? tie_mass / (double)ties : 1;
  double want = each > 0 ? ceil((need - above) / each) : 1;
  k->left[which] = want < 1 ? 1 : want > (double)ties ? ties : (int64_t)want;
}

// -ln(1 - x): the waiting time of an exponential race, exact to a few ulp down to the smallest x.
HS_INLINE VR FN(race)(VR x) {
#if HS_REAL == 64
  return (VR){-log1p(-x[0]), -log1p(-x[1])};
#else
  VR y = vset1(1.0f) - x;                              // as vlog, with f = -x where 1 - x would round
  VI i = (VI)y - 0x3f3504f3;
  VI e = i >> 23;
  VR f = vsel(e == 0, -x, (VR)((VI)y - (e << 23)) - vset1(1.0f));
  VR ef = __builtin_convertvector(e, VR);
  return -vlogsum(ef, f);
#endif
}

// The id with the largest z*invt - ln(race), of those that k keeps (0 = all).
static int32_t FN(draw)(const real* z, int64_t n, real invt, real max, FN(keep)* k, const hs_sample_row* r) {
  const VR tv = vset1(invt), ninf = vset1(-INFINITY);
  real best = -INFINITY;
  int32_t tok = 0;
  for (int64_t b = 0; b < n; b += 64) {
    const int64_t m = HS_MIN(64, n - b);
    float x[64];
    real u[64], score[64];
    sample_units(x, r, b);
    for (int i = 0; i < 64; i++) u[i] = x[i];
    VR top = ninf;
    for (int64_t i = 0; i < m; i += VW) {
      VR s = vloadn(z + b + i, m - i) * tv - vlog(FN(race)(vload(u + i)));
      if (m - i < VW) s = vsel(FN(lanes_below)(m - i), s, ninf);
      vstore(score + i, s);
      top = vmax(s, top);
    }
    if (!k && vhmax(top) <= best) continue;
    for (int64_t i = 0; i < m; i++)
      if ((!k || FN(kept)(k, z[b + i], z[b + i] * invt - max)) && score[i] > best) best = score[i], tok = (int32_t)(b + i);
  }
  return tok;
}

typedef struct { const hs_sample_args* a; volatile int64_t bad; } FN(sample_ctx);

static void FN(sample_task)(void* c_, int64_t row, int worker) {
  (void)worker;
  FN(sample_ctx)* c = c_;
  const hs_sample_args* a = c->a;
  const hs_sample_row* r = a->rows + row;
  const real* z = (const real*)a->logits + row * a->V;
  const int64_t n = a->vocab_valid;
  const real invt = r->temperature > 0 ? 1 / (real)r->temperature : 1;
  FN(stats) s = FN(row_stats)(z, n, invt);
  if (!(s.lnsum >= 0 && s.lnsum < INFINITY)) {   // NaN or infinite logits
    c->bad = row + 1;
    return;
  }
  int32_t tok = 0;
  if (r->temperature > 0 && r->min_p == 0 && r->top_p >= 1 && (r->top_k == 0 || r->top_k >= n)) {
    tok = FN(draw)(z, n, invt, s.max, 0, r);
  } else if (r->temperature > 0) {
    FN(keep) k = {-INFINITY, {0, 0}, {n, n}};
    if (r->min_p > 0) k.dmin = rlog((real)r->min_p);
    if (k.dmin > 0) k.dmin = 0;
    if (r->top_k > 0 && r->top_k < n) FN(bound)(z, n, invt, s.max, &k, 0, r->top_k);
    if (r->top_p < 1) {
      FN(scan) all = {0};
      FN(sample_scan)(z, n, invt, s.max, k, &all);
      FN(bound)(z, n, invt, s.max, &k, 1, r->top_p * all.total);
    }
    tok = FN(draw)(z, n, invt, s.max, &k, r);
  } else {
    for (int64_t i = 1; i < n; i++)
      if (z[i] > z[tok]) tok = (int32_t)i;
  }
  a->token[row] = tok;
  ((real*)a->logp)[row] = FN(logp_of)(s, z[tok], invt);
  if (a->entropy) ((real*)a->entropy)[row] = s.entropy;
}

static hs_status FN(sample)(const hs_sample_args* a) {
  HS_NEED(a->B > 0, "B %lld, need > 0", (long long)a->B);
  HS_NEED(a->vocab_valid > 0 && a->vocab_valid <= a->V, "vocab_valid %lld, want 1..V (%lld)", (long long)a->vocab_valid, (long long)a->V);
  HS_NEED(a->logits && a->rows && a->token && a->logp, "logits, rows, token and logp are required");
  for (int64_t b = 0; b < a->B; b++) {
    const hs_sample_row* r = a->rows + b;
    HS_NEED(r->temperature >= 0 && r->temperature < INFINITY, "row %lld: temperature %g, need >= 0", (long long)b, r->temperature);
    HS_NEED(r->top_p > 0, "row %lld: top_p %g, need > 0 (1 = off)", (long long)b, r->top_p);
    HS_NEED(r->min_p >= 0 && r->min_p <= 1, "row %lld: min_p %g, want 0..1", (long long)b, r->min_p);
    HS_NEED(r->top_k >= 0, "row %lld: top_k %d, need >= 0", (long long)b, r->top_k);
    HS_NEED(r->ctr >> 32 == 0, "row %lld: ctr %llu, need < 2^32", (long long)b, (unsigned long long)r->ctr);
  }
  FN(sample_ctx) c = {a, 0};
  hs_parallel(a->B, FN(sample_task), &c);
  HS_NEED(!c.bad, "logits of row %lld hold NaN or infinity", (long long)c.bad - 1);
  return HS_OK;
}

static hs_status FN(lmhead_sample)(const hs_lmhead_sample_args* a) {
  HS_NEED(a->B > 0 && a->D > 0 && a->V > 0, "B %lld, D %lld, V %lld: need all > 0", (long long)a->B, (long long)a->D, (long long)a->V);
  HS_NEED(a->x && a->w, "x and w are required");
  HS_NEED_WS(a, hs_align(a->B * a->V * (int64_t)sizeof(real)));
  hs_pgemm(HS_TRANS_B, a->B, a->V, a->D, a->x, a->D, a->w, a->D, a->ws, a->V);
  const hs_sample_args s = {a->dtype, 0, a->B, a->V, a->vocab_valid, a->ws, a->rows, a->token, a->logp, a->entropy, 0, 0};
  return FN(sample)(&s);
}
