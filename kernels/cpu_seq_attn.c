// Full attention on the CPU: q/k norm with RoPE, causal attention over forests, output gate, each with its backward.
// Forward work is split into (query block, kv head), backward into (tree, kv head).
#include "cpu_seq.h"
#define ATTN_MAX_HD 1024
#define HS_BODY "cpu_seq_attn_body.h"
#include "cpu_levels.h"

static hs_status heads(int64_t T, int64_t nh, int64_t nkv, int64_t hd) {
  HS_NEED(T >= 1, "T %lld, need at least one row", (long long)T);
  HS_NEED(nh >= 1 && nkv >= 1 && hd >= 1, "nh %lld, nkv %lld, hd %lld: all must be positive", (long long)nh, (long long)nkv, (long long)hd);
  HS_NEED(nh % nkv == 0, "nh %lld is not a multiple of nkv %lld", (long long)nh, (long long)nkv);
  HS_NEED(hd <= ATTN_MAX_HD, "hd %lld > %d", (long long)hd, ATTN_MAX_HD);
  return HS_OK;
}
// Prep takes query heads, kv heads or both; the pointers of an absent part are 0.
static hs_status prep_heads(int64_t T, int64_t nh, int64_t nkv, int64_t hd) {
  HS_NEED(T >= 1 && nh >= 0 && nkv >= 0 && nh + nkv >= 1 && hd >= 1, "T %lld, nh %lld, nkv %lld, hd %lld: need rows and heads", (long long)T,
          (long long)nh, (long long)nkv, (long long)hd);
  HS_NEED(hd <= ATTN_MAX_HD, "hd %lld > %d", (long long)hd, ATTN_MAX_HD);
  return HS_OK;
}
static hs_status rotary(int64_t rot, int64_t hd, double theta) {
  HS_NEED(rot >= 0 && rot % 2 == 0 && rot <= hd, "rot %lld must be even and at most hd %lld", (long long)rot, (long long)hd);
  HS_NEED(rot == 0 || theta > 0, "theta %g must be positive", theta);
  return HS_OK;
}

int64_t hs_cpu_attnprep_ws(const hs_attnprep_args* a) { (void)a; return 0; }
hs_status hs_cpu_attnprep(const hs_attnprep_args* a) {
  HS_NEED_DTYPE(a);
  SEQ_TRY(prep_heads(a->T, a->nh, a->nkv, a->hd));
  SEQ_TRY(rotary(a->rot, a->hd, a->theta));
  SEQ_PTR(a->rope_pos);
  if (a->nh) { SEQ_PTR(a->qg); SEQ_PTR(a->wq); SEQ_PTR(a->q); }
  if (a->nkv) { SEQ_PTR(a->kin); SEQ_PTR(a->wk); SEQ_PTR(a->k); }
  return HS_PICK(attnprep, a->dtype)(a);
}
int64_t hs_cpu_attnprep_bwd_ws(const hs_attnprep_bwd_args* a) { return HS_PICK(attnprep_bwd_ws, a->dtype)(a); }
hs_status hs_cpu_attnprep_bwd(const hs_attnprep_bwd_args* a) {
  HS_NEED_DTYPE(a);
  SEQ_TRY(prep_heads(a->T, a->nh, a->nkv, a->hd));
  SEQ_TRY(rotary(a->rot, a->hd, a->theta));
  SEQ_PTR(a->rope_pos);
  if (a->nh) { SEQ_PTR(a->qg); SEQ_PTR(a->wq); SEQ_PTR(a->dq); SEQ_PTR(a->dqg); }
  if (a->nkv) { SEQ_PTR(a->kin); SEQ_PTR(a->wk); SEQ_PTR(a->dk); SEQ_PTR(a->dkin); }
  return HS_PICK(attnprep_bwd, a->dtype)(a);
}

int64_t hs_cpu_attn_ws(const hs_attn_args* a) { return a->nkv < 1 ? 0 : HS_PICK(attn_ws, a->dtype)(a); }
hs_status hs_cpu_attn(const hs_attn_args* a) {
  HS_NEED_DTYPE(a);
  SEQ_TRY(heads(a->T, a->nh, a->nkv, a->hd));
  SEQ_TRY(seq_check_forest(&a->f, a->T));
  SEQ_PTR(a->q); SEQ_PTR(a->k); SEQ_PTR(a->v); SEQ_PTR(a->o);
  return HS_PICK(attn, a->dtype)(a);
}
int64_t hs_cpu_attn_bwd_ws(const hs_attn_bwd_args* a) { return a->nkv < 1 ? 0 : HS_PICK(attn_bwd_ws, a->dtype)(a); }
hs_status hs_cpu_attn_bwd(const hs_attn_bwd_args* a) {
  HS_NEED_DTYPE(a);
  SEQ_TRY(heads(a->T, a->nh, a->nkv, a->hd));
  SEQ_TRY(seq_check_forest(&a->f, a->T));
  SEQ_PTR(a->q); SEQ_PTR(a->k); SEQ_PTR(a->v); SEQ_PTR(a->o); SEQ_PTR(a->lse); SEQ_PTR(a->do_);
  SEQ_PTR(a->dq); SEQ_PTR(a->dk); SEQ_PTR(a->dv);
  return HS_PICK(attn_bwd, a->dtype)(a);
}

int64_t hs_cpu_gate_ws(const hs_gate_args* a) { (void)a; return 0; }
hs_status hs_cpu_gate(const hs_gate_args* a) {
  HS_NEED_DTYPE(a);
  SEQ_TRY(heads(a->T, a->nh, 1, a->hd));
  SEQ_PTR(a->o); SEQ_PTR(a->qg); SEQ_PTR(a->y);
  return HS_PICK(gate, a->dtype)(a);
}
int64_t hs_cpu_gate_bwd_ws(const hs_gate_bwd_args* a) { (void)a; return 0; }
hs_status hs_cpu_gate_bwd(const hs_gate_bwd_args* a) {
  HS_NEED_DTYPE(a);
  SEQ_TRY(heads(a->T, a->nh, 1, a->hd));
  SEQ_PTR(a->o); SEQ_PTR(a->qg); SEQ_PTR(a->dy); SEQ_PTR(a->do_); SEQ_PTR(a->dqg);
  return HS_PICK(gate_bwd, a->dtype)(a);
}
