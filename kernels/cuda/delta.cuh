// delta.cuh - what the files of the gated delta rule share: argument checks, and segments handed out so that one can wait for another.
#ifndef HS_DELTA_CUH
#define HS_DELTA_CUH
#include "common.cuh"

static const int gdn_max_dk = 256;

template <class A> static hs_status delta_check(const A* a, int64_t rows) {
  HS_NEED(rows >= 1, "T %lld, need at least one row", (long long)rows);
  HS_NEED(a->nk >= 1 && a->dk >= 1 && a->nv >= 1 && a->dv >= 1, "nk %lld, dk %lld, nv %lld, dv %lld: all must be positive", (long long)a->nk, (long long)a->dk,
          (long long)a->nv, (long long)a->dv);
  HS_NEED(a->nv % a->nk == 0, "nv %lld is not a multiple of nk %lld", (long long)a->nv, (long long)a->nk);
  HS_NEED(a->dk <= gdn_max_dk, "dk %lld, the cuda table has up to %d", (long long)a->dk, gdn_max_dk);
  return HS_OK;
}
static inline hs_status forest_check(const hs_forest& f, int64_t T) {
  HS_NEED(f.nseg >= 1, "forest with %d segments, need at least 1", (int)f.nseg);
  HS_NEED(f.nrows == T, "forest of %d rows, T is %lld", (int)f.nrows, (long long)T);
  HS_NEED(f.start && f.len && f.parent && f.chunk_off && f.child_off && f.root && f.row_seg && f.prev && f.slot, "forest array is 0");
  return HS_OK;
}

// A line of work: [0] is the next ticket, [1 + i] says that item i is done; zero before the launch. Blocks take tickets in the order in which
// they start, so whoever waits for a smaller ticket waits for a block that runs already. (The emulator runs blocks one after the other.)
static inline int64_t line_bytes(int64_t items) { return hs_align((items + 1) * 4); }
static __device__ __forceinline__ int line_ticket(int* line) {
  HS_SHARED(int, ticket, [1]);
  if (threadIdx.x == 0) ticket[0] = atomicAdd(line, 1);
  __syncthreads();
  return ticket[0];
}
// Waits until item i is done. Thread 0 waits for the block; a __syncthreads must follow before what the item wrote is read, by __ldcg.
static __device__ __forceinline__ void line_wait(int* line, int i) {
  while (threadIdx.x == 0 && atomicAdd(line + 1 + i, 0) == 0) {}
  __threadfence();
}
// Every thread of the block has written its share of item i.
static __device__ __forceinline__ void line_done(int* line, int i) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicExch(line + 1 + i, 1);
}
#endif
