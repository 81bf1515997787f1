// Gated delta rule on the CPU: chunked forward and backward over packed forests, and the one-row step of decode.
// Work is split into (tree, key head): a tree is sequential through its states, everything else is independent.
#include "cpu_seq.h"
#define HS_BODY "cpu_seq_gdn_body.h"
#include "cpu_levels.h"

hs_status seq_check_forest(const hs_forest* f, int64_t T) {
  HS_NEED(f->nseg >= 1, "forest with %d segments, need at least 1", (int)f->nseg);
  HS_NEED(f->nrows == T, "forest of %d rows, T is %lld", (int)f->nrows, (long long)T);
  HS_NEED(f->start && f->len && f->parent && f->chunk_off && f->child_off && f->root && f->row_seg && f->prev, "forest array is 0");
  int64_t chunks = 0;
  for (int32_t s = 0; s < f->nseg; s++) {
    HS_NEED(f->len[s] >= 1, "segment %d is empty (len %d)", (int)s, (int)f->len[s]);
    HS_NEED(f->start[s] >= 0 && (int64_t)f->start[s] + f->len[s] <= T, "segment %d covers rows %d..%lld of %lld", (int)s, (int)f->start[s],
            (long long)f->start[s] + f->len[s] - 1, (long long)T);
    HS_NEED(f->parent[s] < s && f->parent[s] >= -1, "segment %d has parent %d, want an earlier one or -1", (int)s, (int)f->parent[s]);
    const int32_t root = f->parent[s] < 0 ? s : f->root[f->parent[s]];
    HS_NEED(f->root[s] == root, "segment %d has root %d, want %d", (int)s, (int)f->root[s], (int)root);
    HS_NEED(f->chunk_off[s] == chunks, "segment %d has chunk_off %d, want %lld", (int)s, (int)f->chunk_off[s], (long long)chunks);
    HS_NEED(f->child_off[s] <= f->child_off[s + 1] && (f->child_off[s] == f->child_off[s + 1] || f->child), "children of segment %d", (int)s);
    chunks += HS_CEIL(f->len[s], HS_GDN_CHUNK);
  }
  HS_NEED(f->nchunks == chunks, "forest has nchunks %d, want %lld", (int)f->nchunks, (long long)chunks);
  return HS_OK;
}

void seq_trees_fill(const hs_forest* f, seq_trees* t) {
  t->n = 0;
  for (int32_t s = 0; s < f->nseg; s++)
    if (f->root[s] == s) t->tmp[s] = t->n++;
  for (int32_t i = 0; i <= t->n; i++) t->off[i] = 0;
  for (int32_t s = 0; s < f->nseg; s++) t->off[t->tmp[f->root[s]] + 1]++;
  for (int32_t i = 0; i < t->n; i++) t->off[i + 1] += t->off[i];
  for (int32_t s = 0; s < f->nseg; s++) t->seg[t->off[t->tmp[f->root[s]]]++] = s;
  for (int32_t i = t->n; i > 0; i--) t->off[i] = t->off[i - 1];
  t->off[0] = 0;
}

static hs_status dims(int32_t dtype, int64_t T, int64_t nk, int64_t dk, int64_t nv, int64_t dv) {
  (void)dtype;
  HS_NEED(T >= 1, "T %lld, need at least one row", (long long)T);
  HS_NEED(nk >= 1 && dk >= 1 && nv >= 1 && dv >= 1, "nk %lld, dk %lld, nv %lld, dv %lld: all must be positive", (long long)nk, (long long)dk,
          (long long)nv, (long long)dv);
  HS_NEED(nv % nk == 0, "nv %lld is not a multiple of nk %lld", (long long)nv, (long long)nk);
  return HS_OK;
}

static int any_slot(const hs_forest* f) {
  for (int32_t s = 0; f->slot && s < f->nseg; s++)
    if (f->slot[s] >= 0) return 1;
  return 0;
}

int64_t hs_cpu_gdn_ws(const hs_gdn_args* a) { return a->nk < 1 ? 0 : HS_PICK(gdn_ws, a->dtype)(a); }
hs_status hs_cpu_gdn(const hs_gdn_args* a) {
  HS_NEED_DTYPE(a);
  SEQ_TRY(dims(a->dtype, a->T, a->nk, a->dk, a->nv, a->dv));
  SEQ_TRY(seq_check_forest(&a->f, a->T));
  SEQ_PTR(a->q); SEQ_PTR(a->k); SEQ_PTR(a->v); SEQ_PTR(a->beta); SEQ_PTR(a->g); SEQ_PTR(a->o);
  HS_NEED(a->rec_state || !any_slot(&a->f), "forest with slots but rec_state is 0");
  if (!a->states)
    for (int32_t s = 0; s < a->f.nseg; s++) HS_NEED(a->f.parent[s] < 0, "states is 0 but segment %d has a parent", (int)s);
  return HS_PICK(gdn, a->dtype)(a);
}
int64_t hs_cpu_gdn_bwd_ws(const hs_gdn_bwd_args* a) { return a->nk < 1 ? 0 : HS_PICK(gdn_bwd_ws, a->dtype)(a); }
hs_status hs_cpu_gdn_bwd(const hs_gdn_bwd_args* a) {
  HS_NEED_DTYPE(a);
  SEQ_TRY(dims(a->dtype, a->T, a->nk, a->dk, a->nv, a->dv));
  SEQ_TRY(seq_check_forest(&a->f, a->T));
  SEQ_PTR(a->q); SEQ_PTR(a->k); SEQ_PTR(a->v); SEQ_PTR(a->beta); SEQ_PTR(a->g); SEQ_PTR(a->states); SEQ_PTR(a->do_);
  SEQ_PTR(a->dq); SEQ_PTR(a->dk_); SEQ_PTR(a->dv_); SEQ_PTR(a->dbeta); SEQ_PTR(a->dg);
  return HS_PICK(gdn_bwd, a->dtype)(a);
}
int64_t hs_cpu_gdn_step_ws(const hs_gdn_step_args* a) { (void)a; return 0; }
hs_status hs_cpu_gdn_step(const hs_gdn_step_args* a) {
  HS_NEED_DTYPE(a);
  SEQ_TRY(dims(a->dtype, a->B, a->nk, a->dk, a->nv, a->dv));
  SEQ_PTR(a->slot); SEQ_PTR(a->q); SEQ_PTR(a->k); SEQ_PTR(a->v); SEQ_PTR(a->beta); SEQ_PTR(a->g); SEQ_PTR(a->o); SEQ_PTR(a->rec_state);
  for (int64_t b = 0; b < a->B; b++) HS_NEED(a->slot[b] >= 0, "slot %d of row %lld", (int)a->slot[b], (long long)b);
  return HS_PICK(gdn_step, a->dtype)(a);
}
