// Paged KV cache on the CPU: writing rows and attending over pages. Work is split into (rows of one sequence, kv head); the query heads
// that share a kv head go together.
#include "cpu_seq.h"
#define HS_BODY "cpu_seq_paged_body.h"
#include "cpu_levels.h"

// Every row's page must be inside its sequence's table and assigned; with context, so must every page before it.
static hs_status rows(int64_t T, int64_t page_size, int64_t max_pages, const int32_t* seq, const int32_t* pos, const int32_t* table,
                      int context) {
  for (int64_t t = 0; t < T; t++) {
    HS_NEED(seq[t] >= 0, "row %lld has sequence %d", (long long)t, (int)seq[t]);
    HS_NEED(pos[t] >= 0 && pos[t] < max_pages * page_size, "row %lld at position %d, the table holds 0..%lld", (long long)t, (int)pos[t],
            (long long)(max_pages * page_size - 1));
    const int32_t page = table[seq[t] * max_pages + pos[t] / page_size];
    HS_NEED(page >= 0, "row %lld: sequence %d has no page for position %d", (long long)t, (int)seq[t], (int)pos[t]);
    if (!context || (t + 1 < T && seq[t + 1] == seq[t])) continue;
    for (int64_t p = 0; p < pos[t] / page_size; p++)
      HS_NEED(table[seq[t] * max_pages + p] >= 0, "sequence %d has no page for position %lld", (int)seq[t], (long long)(p * page_size));
  }
  return HS_OK;
}

int64_t hs_cpu_kv_write_ws(const hs_kv_write_args* a) { (void)a; return 0; }
hs_status hs_cpu_kv_write(const hs_kv_write_args* a) {
  HS_NEED_DTYPE(a);
  HS_NEED(a->T >= 1 && a->nkv >= 1 && a->hd >= 1 && a->page_size >= 1 && a->max_pages >= 1, "T %lld, nkv %lld, hd %lld, page_size %lld, max_pages %lld: all must be positive",
          (long long)a->T, (long long)a->nkv, (long long)a->hd, (long long)a->page_size, (long long)a->max_pages);
  SEQ_PTR(a->seq); SEQ_PTR(a->pos); SEQ_PTR(a->block_table); SEQ_PTR(a->k); SEQ_PTR(a->v); SEQ_PTR(a->kcache); SEQ_PTR(a->vcache);
  SEQ_TRY(rows(a->T, a->page_size, a->max_pages, a->seq, a->pos, a->block_table, 0));
  return HS_PICK(kv_write, a->dtype)(a);
}

int64_t hs_cpu_attn_paged_ws(const hs_attn_paged_args* a) { return a->nkv < 1 ? 0 : HS_PICK(attn_paged_ws, a->dtype)(a); }
hs_status hs_cpu_attn_paged(const hs_attn_paged_args* a) {
  HS_NEED_DTYPE(a);
  HS_NEED(a->T >= 1 && a->nh >= 1 && a->nkv >= 1 && a->hd >= 1 && a->page_size >= 1 && a->max_pages >= 1,
          "T %lld, nh %lld, nkv %lld, hd %lld, page_size %lld, max_pages %lld: all must be positive", (long long)a->T, (long long)a->nh,
          (long long)a->nkv, (long long)a->hd, (long long)a->page_size, (long long)a->max_pages);
  HS_NEED(a->nh % a->nkv == 0, "nh %lld is not a multiple of nkv %lld", (long long)a->nh, (long long)a->nkv);
  SEQ_PTR(a->seq); SEQ_PTR(a->pos); SEQ_PTR(a->block_table); SEQ_PTR(a->q); SEQ_PTR(a->kcache); SEQ_PTR(a->vcache); SEQ_PTR(a->o);
  SEQ_TRY(rows(a->T, a->page_size, a->max_pages, a->seq, a->pos, a->block_table, 1));
  for (int64_t t = 1; t < a->T; t++)
    HS_NEED(a->seq[t] != a->seq[t - 1] || a->pos[t] > a->pos[t - 1], "rows %lld and %lld of sequence %d: positions %d, %d do not ascend",
            (long long)t - 1, (long long)t, (int)a->seq[t], (int)a->pos[t - 1], (int)a->pos[t]);
  return HS_PICK(attn_paged, a->dtype)(a);
}
