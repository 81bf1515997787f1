// Conv, SiLU, l2norm and gates of the linear layers on the CPU: forest forward and backward, and the one-row step of decode.
// Rows are independent given their history, so work is split into fixed row blocks; step and forward share conv_rows, bit for bit.
#include "cpu_seq.h"
#define HS_BODY "cpu_seq_conv_body.h"
#include "cpu_levels.h"

static hs_status dims(int64_t T, int64_t nk, int64_t dk, int64_t nv, int64_t dv) {
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

int64_t hs_cpu_convgate_ws(const hs_convgate_args* a) { (void)a; return 0; }
hs_status hs_cpu_convgate(const hs_convgate_args* a) {
  HS_NEED_DTYPE(a);
  SEQ_TRY(dims(a->T, a->nk, a->dk, a->nv, a->dv));
  SEQ_TRY(seq_check_forest(&a->f, a->T));
  SEQ_PTR(a->p); SEQ_PTR(a->a); SEQ_PTR(a->b); SEQ_PTR(a->w); SEQ_PTR(a->a_log); SEQ_PTR(a->dt_bias);
  SEQ_PTR(a->q); SEQ_PTR(a->k); SEQ_PTR(a->v); SEQ_PTR(a->beta); SEQ_PTR(a->g);
  HS_NEED(a->conv_state || !any_slot(&a->f), "forest with slots but conv_state is 0");
  return HS_PICK(convgate, a->dtype)(a);
}
int64_t hs_cpu_convgate_bwd_ws(const hs_convgate_bwd_args* a) { return HS_PICK(convgate_bwd_ws, a->dtype)(a); }
hs_status hs_cpu_convgate_bwd(const hs_convgate_bwd_args* a) {
  HS_NEED_DTYPE(a);
  SEQ_TRY(dims(a->T, a->nk, a->dk, a->nv, a->dv));
  SEQ_TRY(seq_check_forest(&a->f, a->T));
  HS_NEED(!any_slot(&a->f), "forest has state slots: backward is for training forests");
  SEQ_PTR(a->p); SEQ_PTR(a->a); SEQ_PTR(a->b); SEQ_PTR(a->w); SEQ_PTR(a->a_log); SEQ_PTR(a->dt_bias);
  SEQ_PTR(a->dq); SEQ_PTR(a->dk_); SEQ_PTR(a->dv_); SEQ_PTR(a->dbeta); SEQ_PTR(a->dg);
  SEQ_PTR(a->dp); SEQ_PTR(a->da); SEQ_PTR(a->db);
  return HS_PICK(convgate_bwd, a->dtype)(a);
}
int64_t hs_cpu_convgate_step_ws(const hs_convgate_step_args* a) { (void)a; return 0; }
hs_status hs_cpu_convgate_step(const hs_convgate_step_args* a) {
  HS_NEED_DTYPE(a);
  SEQ_TRY(dims(a->B, a->nk, a->dk, a->nv, a->dv));
  SEQ_PTR(a->slot); SEQ_PTR(a->p); SEQ_PTR(a->a); SEQ_PTR(a->b); SEQ_PTR(a->w); SEQ_PTR(a->a_log); SEQ_PTR(a->dt_bias);
  SEQ_PTR(a->q); SEQ_PTR(a->k); SEQ_PTR(a->v); SEQ_PTR(a->beta); SEQ_PTR(a->g); SEQ_PTR(a->conv_state);
  for (int64_t b = 0; b < a->B; b++) HS_NEED(a->slot[b] >= 0, "slot %d of row %lld", (int)a->slot[b], (long long)b);
  return HS_PICK(convgate_step, a->dtype)(a);
}
