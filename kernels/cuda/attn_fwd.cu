// attn_fwd.cu - causal attention over a packed forest (gpu.md 6.6, 7.5; model.md 3.9 step 4).
//
// A block takes 64 MMA rows: query rows of one segment times the query heads of one kv head. It walks the key tiles of the chain from the
// root's first row to its own rows; positions count from the root's first row, and a tile may lie in several segments. K's next tile
// arrives during P V, V's tile during Q K^T. Arithmetic: attn.cuh, shared with attn_paged.cu.
// Floor on an H200, hd 256, 16 heads: 0.55 TFLOP per 4 sequences of 4k, 1.0 ms at 550 TFLOP/s. mma.sync with this structure reaches about
// 295 TFLOP/s elsewhere (FA2); expected about half the floor's rate (unmeasured).
// Any hd up to 256, any nh / nkv.
#include "attn.cuh"

// Rows b0.. of segment s.
struct forest_rows {
  const int32_t *start, *parent, *pos_;
  int s, b0, base;   // base: position of the root's first row
  __device__ __forceinline__ int pos(int i) const { return pos_[s] - base + b0 + i; }
  __device__ __forceinline__ int run(int i, int n, int) const { return n - i; }
  __device__ __forceinline__ int top(int i, int m) const { return pos(i + m - 1); }
  __device__ __forceinline__ int64_t key(int, int p) const {
    int a = s;
    const int q = p + base;
    while (pos_[a] > q) a = parent[a];
    return start[a] + q - pos_[a];
  }
};

template <class T, int HD, int WARPS> __global__ void __launch_bounds__(32 * WARPS, 2) attn_kernel(hs_forest f, attn_heads h, attn_io<T> io) {
  const int per = HS_CEIL(HS_GDN_CHUNK, h.QR) * h.groups;   // blocks per chunk of 64 rows; the last chunks, with the longest contexts, first
  const int ci = f.nchunks - 1 - (int)blockIdx.x / per, sub = (int)blockIdx.x % per, off = sub / h.groups * h.QR;
  const int s = segment_of(f, ci);
  const int b0 = (ci - f.chunk_off[s]) * HS_GDN_CHUNK + off, left = f.len[s] - b0, room = HS_GDN_CHUNK - off;
  const int n = HS_MIN(HS_MIN(h.QR, room), left);
  if (n <= 0) return;
  const forest_rows src = {f.start, f.parent, f.pos, s, b0, f.pos[f.root[s]]};
  attn_block<T, HD, WARPS>(src, h, io, f.start[s] + b0, n, (int)blockIdx.y, sub % h.groups * h.HB, 0, src.pos(n - 1) + 1);
}

extern "C" int64_t hs_ws_attn(const hs_attn_args* a) { return a->T > attn_split && a->nh > 0 && a->hd > 0 ? a->T * a->nh * a->hd * 4 : 0; }
extern "C" hs_status hs_op_attn(cudaStream_t s, const hs_attn_args* a) {
  HS_TRY(attn_check(a));
  HS_TRY(attn_check_forest(a->f, a->T));
  HS_NEED_PTR(q); HS_NEED_PTR(k); HS_NEED_PTR(v); HS_NEED_PTR(o);
  HS_NEED_WS(hs_ws_attn(a));
  HS_DISPATCH(a->dtype, T, {
    HS_ATTN_HD(a->hd, HD, {
      constexpr int W = 4;
      const attn_heads h = attn_layout(a->nh, a->nkv, a->hd, W, hs_packs(a->hd, sizeof(T), a->q, a->k, a->v, a->o));
      const attn_io<T> io = {(const T*)a->q, (const T*)a->k, (const T*)a->v, (T*)a->o, (float*)a->lse, (float*)a->ws, 0, 0, a->T};
      const dim3 grid((unsigned)(a->f.nchunks * HS_CEIL(HS_GDN_CHUNK, h.QR) * h.groups), (unsigned)a->nkv);
      HS_TRY(HS_LAUNCH(s, (attn_kernel<T, HD, W>), grid, 32 * W, (attn_smem<T, HD, W>::bytes), a->f, h, io));
    })
  })
  return HS_OK;
}
