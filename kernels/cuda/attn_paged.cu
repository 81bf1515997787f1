// attn_paged.cu - the paged KV cache: writing rows, and attention of cached positions for prefill and decode (gpu.md 6.6).
//
// Arithmetic and bits are those of attn (attn.cuh): a row's output is the same in training, in any piece of a prefill and in a decode step.
// Adjacent rows whose block tables name the same pages for a tile read it once, so a prefill piece shares everything and the members of
// a group share their prompt (cascade); where tables part, the block walks the tile once per table.
//   few rows   (decode) a warp per block: 16 MMA rows hold 4 query rows x 4 heads; blocks split the context every attn_split positions, and
//              combine_kernel merges the states in order. Floor at B = 256, ctx 4k, 4 kv heads of 256: 1.0 ms per
//              layer (KV bytes / 4.3 TB/s).
//   many rows  (prefill) 64 MMA rows per block, which walks all splits. Both unmeasured.
// Any hd up to 256, any nh / nkv, any page size.
#include "attn.cuh"

static const int write_threads = 128;
static const int64_t few_rows = 512, part_limit = (int64_t)256 << 20;

// ---- kv_write ----

template <class T, int N>
__global__ void kv_write_kernel(int width, int page_size, int max_pages, const int32_t* seq, const int32_t* pos, const int32_t* table, const T* k, const T* v, T* kc, T* vc) {
  const int c = (int)(blockIdx.y * blockDim.x + threadIdx.x) * N;
  if (c >= width) return;
  const int64_t t = blockIdx.x, page = table[(int64_t)seq[t] * max_pages + pos[t] / page_size], at = (page * page_size + pos[t] % page_size) * width + c;
  store_pack<T, N>(kc + at, load_pack<T, N>(k + t * width + c));
  store_pack<T, N>(vc + at, load_pack<T, N>(v + t * width + c));
}
template <class A> static hs_status paged_check(const A* a) {
  HS_NEED(a->T >= 1 && a->nkv >= 1 && a->hd >= 1 && a->page_size >= 1 && a->max_pages >= 1, "T %lld, nkv %lld, hd %lld, page_size %lld, max_pages %lld: all must be positive",
          (long long)a->T, (long long)a->nkv, (long long)a->hd, (long long)a->page_size, (long long)a->max_pages);
  HS_NEED(a->page_size * a->max_pages <= INT32_MAX && a->nkv * a->hd <= 1 << 24, "page_size %lld * max_pages %lld: positions are int32", (long long)a->page_size,
          (long long)a->max_pages);
  HS_NEED_PTR(seq); HS_NEED_PTR(pos); HS_NEED_PTR(block_table); HS_NEED_PTR(kcache); HS_NEED_PTR(vcache);
  return HS_OK;
}
extern "C" hs_status hs_op_kv_write(cudaStream_t s, const hs_kv_write_args* a) {
  HS_TRY(paged_check(a));
  HS_NEED_PTR(k); HS_NEED_PTR(v);
  const int64_t width = a->nkv * a->hd;
  HS_DISPATCH(a->dtype, T, {
    constexpr int N = pack_n<T>;
    auto launch = [&](auto kernel, int n) {
      const int block = (int)HS_MIN(write_threads, 32 * HS_CEIL(width, 32 * n));
      return HS_LAUNCH(s, kernel, dim3((unsigned)a->T, (unsigned)HS_CEIL(width, n * block)), block, 0, (int)width, (int)a->page_size, (int)a->max_pages, a->seq, a->pos,
                       a->block_table, (const T*)a->k, (const T*)a->v, (T*)a->kcache, (T*)a->vcache);
    };
    HS_TRY(hs_packs(width, sizeof(T), a->k, a->v, a->kcache, a->vcache) ? launch(kv_write_kernel<T, N>, N) : launch(kv_write_kernel<T, 1>, 1));
  })
  return HS_OK;
}

// ---- attn_paged ----

// Rows row0.. of the call.
struct paged_rows {
  const int32_t *seq_, *pos_, *table;
  int page_size, max_pages;
  int64_t row0;
  bool one;   // all rows belong to one sequence
  __device__ __forceinline__ int pos(int i) const { return pos_[row0 + i]; }
  __device__ __forceinline__ const int32_t* pages(int i) const { return table + (int64_t)seq_[row0 + i] * max_pages; }
  __device__ __forceinline__ int64_t key(int i, int p) const { return (int64_t)pages(i)[p / page_size] * page_size + p % page_size; }
  // Whether rows i and j find the tile at p0 on the same pages; entries behind both contexts count too, so that this is transitive.
  __device__ __forceinline__ bool share(int i, int j, int p0) const {
    const int32_t *a = pages(i), *b = pages(j);
    bool same = true;
    for (int e = p0 / page_size; same && a != b && e <= (p0 + attn_tile - 1) / page_size && e < max_pages; e++) same = a[e] == b[e];
    return same;
  }
  __device__ __forceinline__ int run(int i, int n, int p0) const {
    if (one) return n - i;
    int m = 1;
    for (; i + m < n; m += 32) {
      const int j = i + m + (int)(threadIdx.x & 31);
      const unsigned ends = __ballot_sync(HS_FULL, j >= n || !share(j - 1, j, p0));
      if (ends) return m + __ffs((int)ends) - 1;
    }
    return HS_MIN(m, n - i);
  }
  __device__ __forceinline__ int top(int i, int m) const {
    if (one) return pos(i + m - 1);
    int p = pos(i);
    for (int j = 1; j < m; j++) p = max(p, pos(i + j));
    return p;
  }
};

// Block x = row x and those after it that go with it: up to the next multiple of QR, while they reach the split and share its first tile.
template <class T, int HD, int WARPS> __global__ void __launch_bounds__(32 * WARPS, 2) attn_paged_kernel(paged_rows src, attn_heads h, attn_io<T> io) {
  const int first = (int)blockIdx.z * attn_split;
  const int64_t t = blockIdx.x;
  if (src.pos_[t] < first) return;
  auto joins = [&](int64_t r) { return r < io.T_ && r % h.QR != 0 && src.pos_[r] >= first && src.pos_[r - 1] >= first && src.share((int)r - 1, (int)r, first); };
  if (joins(t)) return;
  int n = 1;
  while (joins(t + n)) n++;
  src.row0 = t;
  src.one = src.seq_[t] == src.seq_[t + n - 1];
  const int top = src.top(0, n) + 1;
  attn_block<T, HD, WARPS>(src, h, io, t, n, (int)blockIdx.y / h.groups, (int)blockIdx.y % h.groups * h.HB, first, io.part_o ? HS_MIN(top, first + attn_split) : top);
}

// o of row x, head y from the states of its splits, in order: the merges of attn_block.
template <class T> __global__ void combine_kernel(int hd, const int32_t* pos, attn_io<T> io) {
  const int64_t t = blockIdx.x, at = t * gridDim.y + blockIdx.y, stride = io.T_ * gridDim.y;
  const int splits = pos[t] / attn_split + 1;
  for (int c = threadIdx.x; c < hd; c += blockDim.x) {
    float z = -INFINITY, l = 0, o = 0;
    for (int s = 0; s < splits; s++) {
      const int64_t p = s * stride + at;
      const attn_weights w = merge_weights(z, io.part_s[2 * p]);
      z = w.z, l = merge_value(w, l, io.part_s[2 * p + 1]);
      o = s ? merge_value(w, o, io.part_o[p * hd + c]) : io.part_o[p * hd + c];
    }
    io.o[at * hd + c] = from_f<T>(__fmul_rn(o, __fdiv_rn(1.0f, l)));
  }
}

static int64_t paged_splits(const hs_attn_paged_args* a) { return HS_CEIL(a->max_pages * a->page_size, attn_split); }
// Bytes of the splits' states, or 0 when each block merges its own.
static int64_t paged_parts(const hs_attn_paged_args* a) {
  const int64_t bytes = paged_splits(a) * a->T * a->nh * (a->hd + 2) * 4;
  return paged_splits(a) > 1 && a->T <= few_rows && bytes <= part_limit ? bytes : 0;
}
extern "C" int64_t hs_ws_attn_paged(const hs_attn_paged_args* a) {
  if (a->T < 1 || a->nh < 1 || a->hd < 1 || paged_splits(a) < 2) return 0;
  return paged_parts(a) ? paged_parts(a) : a->T * a->nh * a->hd * 4;
}
extern "C" hs_status hs_op_attn_paged(cudaStream_t s, const hs_attn_paged_args* a) {
  HS_TRY(attn_check(a));
  HS_TRY(paged_check(a));
  HS_NEED_PTR(q); HS_NEED_PTR(o);
  HS_NEED_WS(hs_ws_attn_paged(a));
  const bool parts = paged_parts(a) > 0;
  const int64_t states = paged_splits(a) * a->T * a->nh;
  const paged_rows src = {a->seq, a->pos, a->block_table, (int)a->page_size, (int)a->max_pages, 0, false};
  HS_DISPATCH(a->dtype, T, {
    float* ws = (float*)a->ws;
    const attn_io<T> io = {(const T*)a->q, (const T*)a->kcache, (const T*)a->vcache, (T*)a->o, 0, ws, parts ? ws : 0, ws + states * a->hd, a->T};
    const bool packs = hs_packs(a->hd, sizeof(T), a->q, a->kcache, a->vcache, a->o);
    HS_ATTN_HD(a->hd, HD, {
      auto launch = [&](auto kernel, int warps, size_t smem) {
        const attn_heads h = attn_layout(a->nh, a->nkv, a->hd, warps, packs);
        const dim3 grid((unsigned)a->T, (unsigned)(a->nkv * h.groups), (unsigned)(parts ? paged_splits(a) : 1));
        return HS_LAUNCH(s, kernel, grid, 32 * warps, smem, src, h, io);
      };
      HS_TRY(a->T <= few_rows ? launch(attn_paged_kernel<T, HD, 1>, 1, attn_smem<T, HD, 1>::bytes) : launch(attn_paged_kernel<T, HD, 4>, 4, attn_smem<T, HD, 4>::bytes));
    })
    if (parts) HS_TRY(HS_LAUNCH(s, combine_kernel<T>, dim3((unsigned)a->T, (unsigned)a->nh), (unsigned)HS_MIN(128, 32 * HS_CEIL(a->hd, 32)), 0, (int)a->hd, a->pos, io));
  })
  return HS_OK;
}
