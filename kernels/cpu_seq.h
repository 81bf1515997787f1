// cpu_seq.h - what the sequence ops (conv, delta rule, attention, paged attention) share on top of cpu.h: carving of ws, the list of
// trees of a forest, argument checks. Bodies are in cpu_seq_*_body.h, stamped out by cpu_levels.h; their products are in cpu_seq_mm.h.
#ifndef HS_CPU_SEQ_H
#define HS_CPU_SEQ_H
#include "cpu.h"

#define SEQ_UP(n, m) (((n) + (m) - 1) / (m) * (m))

// Rows per partial sum of a weight gradient: the order of those sums is fixed by this number, not by the thread count.
#define SEQ_ROWS 256

// Bump allocation over ws. With base 0 it only counts, so one layout function serves both workspace() and run().
typedef struct { char* base; int64_t used; } seq_arena;

HS_INLINE seq_arena seq_open(void* ws) {
  seq_arena m = {0, 64};
  if (ws) m.base = (char*)(((uintptr_t)ws + 63) & ~(uintptr_t)63);
  return m;
}
HS_INLINE void* seq_take(seq_arena* m, int64_t bytes) {
  char* p = m->base ? m->base + (m->used - 64) : 0;
  m->used += hs_align(bytes);
  return p;
}

// Lanes of the level in use: the widest padding any body wants is 16, so layouts pad to 16 whatever the level.
#define SEQ_PAD 16

// Checks the parts of a forest that an op walks: kernels.NewForest builds valid ones, this catches hand-made and stale ones.
hs_status seq_check_forest(const hs_forest* f, int64_t T);

// Segments grouped by tree, trees in order of their roots, segments ascending (parents first) inside a tree.
typedef struct { int32_t n, *off, *seg, *tmp; } seq_trees;
HS_INLINE void seq_trees_take(seq_arena* m, const hs_forest* f, seq_trees* t) {
  t->n = 0;
  t->off = seq_take(m, ((int64_t)f->nseg + 1) * 4);
  t->seg = seq_take(m, (int64_t)f->nseg * 4);
  t->tmp = seq_take(m, (int64_t)f->nseg * 4);
}
void seq_trees_fill(const hs_forest* f, seq_trees* t);

HS_INLINE int32_t seq_slot(const hs_forest* f, int32_t s) { return f->slot ? f->slot[s] : -1; }

#define SEQ_TRY(x)                \
  do {                            \
    hs_status st_ = (x);          \
    if (st_ != HS_OK) return st_; \
  } while (0)
#define SEQ_PTR(p) HS_NEED((p) != 0, "pointer " #p " is 0")
#endif
