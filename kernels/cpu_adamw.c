// AdamW on the CPU over every storage form of weights and moments (abi.h, optim_math.h).
#include "cpu.h"
#include "optim_math.h"

#define ADAMW_TASK 64   // blocks per task
#define HS_BODY "cpu_adamw_body.h"
#include "cpu_levels.h"

int64_t hs_cpu_adamw_ws(const hs_adamw_args* a) { (void)a; return 0; }

static hs_status check_storage(const hs_adamw_args* a) {
  if (a->dtype != HS_F32 && a->dtype != HS_F64 && a->dtype != HS_BF16)
    return hs_fail(HS_ERR_DTYPE, "dtype %d: weights are f32 (0), f64 (1) or bf16 (2)", (int)a->dtype);
  if (a->lo && a->dtype == HS_F64) return hs_fail(HS_ERR_DTYPE, "lo is set with f64 weights: only a float32 master is split");
  if (!a->lo && a->dtype == HS_BF16) return hs_fail(HS_ERR_DTYPE, "bf16 weights need lo: without it small updates are lost");
  HS_NEED(a->states >= HS_STATE_F32 && a->states <= HS_STATE_U8, "states %d, want 0 (f32), 1 (bf16) or 2 (8-bit)", (int)a->states);
  if (a->states == HS_STATE_F32) return HS_OK;
  HS_NEED(a->first >= 0 && a->first % HS_STATE_BLOCK == 0, "first %lld, want a multiple of %d for narrow moments", (long long)a->first, HS_STATE_BLOCK);
  HS_NEED(a->states != HS_STATE_U8 || (a->ms && a->vs), "8-bit moments need their scales: ms and vs are required");
  return HS_OK;
}

hs_status hs_cpu_adamw(const hs_adamw_args* a) {
  HS_NEED(a->n > 0, "n %lld, need > 0", (long long)a->n);
  HS_NEED(a->step >= 1, "step %lld, need >= 1", (long long)a->step);
  HS_NEED(a->beta1 >= 0 && a->beta1 < 1 && a->beta2 >= 0 && a->beta2 < 1, "beta1 %g, beta2 %g: need 0 <= beta < 1", a->beta1, a->beta2);
  HS_NEED(a->w, "w is required");
  HS_NEED(a->m, "m is required");
  HS_NEED(a->v, "v is required");
  HS_NEED(a->grad, "grad is required");
  hs_status st = check_storage(a);
  return st == HS_OK ? HS_PICK(adamw, a->dtype)(a) : st;
}
