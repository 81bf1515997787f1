// embed.cu - rows by index: embedding and gather, and the sums of their backward.
//
// Copy: a block per row, 16 bytes per thread. Floor on an H200: 16k rows of 2560 bf16 read and written, 168 MB, 0.04 ms at 4.3 TB/s;
// expected near it (unmeasured).
// Sums: a block per source row. It looks at all indices, 32 per ballot; if its own row is the first with its index, it adds every row
// with that index in ascending order in registers and writes the sum once; otherwise it stops at the first one. So there are no float
// atomics, no sort and no scratch, and the order is that of the loop dst[row[i]] += src[i]. Floor for 16k rows of 2560: dy read, dw read and
// written, at most 420 MB, 0.1 ms; the indices add about n^2/16 bytes of L2 reads, 16 MB per 16k rows and column tile, and an index that
// occurs m times is a chain of m row loads (unmeasured; both small against a training step).
#include "common.cuh"

static const int copy_threads = 256, add_threads = 512, add_words = 32;   // 32 indices per word

static int row_block(int64_t D, int N, int most) { return (int)HS_MIN(most, 32 * HS_CEIL(D, 32 * N)); }

// ---- dst[i] = src[row[i]] ----

template <class T, int N> __global__ void copy_rows_kernel(int64_t D, const int32_t* row, const T* src, T* dst) {
  const int32_t r = row[blockIdx.x];
  src += (r < 0 ? 0 : r) * D, dst += blockIdx.x * D;
  for (int64_t j = (int64_t)threadIdx.x * N; j < D; j += (int64_t)blockDim.x * N) store_pack<T, N>(dst + j, load_pack<T, N>(src + j));
}
template <class T> static hs_status copy_rows(cudaStream_t s, int64_t n, int64_t D, const int32_t* row, const void* src, void* dst) {
  constexpr int N = pack_n<T>;
  if (hs_packs(D, sizeof(T), src, dst))
    return HS_LAUNCH(s, (copy_rows_kernel<T, N>), (unsigned)n, row_block(D, N, copy_threads), 0, D, row, (const T*)src, (T*)dst);
  return HS_LAUNCH(s, (copy_rows_kernel<T, 1>), (unsigned)n, row_block(D, 1, copy_threads), 0, D, row, (const T*)src, (T*)dst);
}

// ---- dst[row[i]] += src[i], i ascending; one rounding per element of dst ----

// Bit k of words[w] = index base + 32 w + k equals r.
static __device__ __forceinline__ void match_words(uint32_t* words, int64_t base, int64_t n, const int32_t* row, int32_t r) {
  const int lane = threadIdx.x & 31, step = blockDim.x >> 5;
  for (int w = threadIdx.x >> 5; w < add_words && base + 32 * w < n; w += step) {
    const int64_t j = base + 32 * w + lane;
    const uint32_t m = __ballot_sync(HS_FULL, j < n && row[j] == r);
    if (lane == 0) words[w] = m;
  }
}

template <class S, class U, int N> __global__ void add_rows_kernel(int64_t n, int64_t D, const int32_t* row, const S* src, U* dst) {
  HS_SHARED(uint32_t, words, [add_words]);
  const int64_t i = blockIdx.x, col = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * N;
  const int32_t r = row[i];
  const bool mine = col < D;
  float acc[N] = {};
  int64_t first = -1;
  for (int64_t base = 0; base < n; base += 32 * add_words) {
    match_words(words, base, n, row, r);
    __syncthreads();
    for (int w = 0; w < add_words && base + 32 * w < n; w++)
      for (uint32_t m = words[w]; m; m &= m - 1) {
        const int64_t j = base + 32 * w + __ffs((int)m) - 1;
        if (first < 0) {
          first = j;
          if (j != i) return;   // the whole block: an earlier one adds this row
          if (mine) {
            const pack<U, N> d = load_pack<U, N>(dst + r * D + col);
            for (int k = 0; k < N; k++) acc[k] = to_f(d.v[k]);
          }
        }
        if (!mine) continue;
        const pack<S, N> x = load_pack<S, N>(src + j * D + col);
        for (int k = 0; k < N; k++) acc[k] += to_f(x.v[k]);
      }
    __syncthreads();
  }
  if (!mine) return;
  pack<U, N> d;
  for (int k = 0; k < N; k++) d.v[k] = from_f<U>(acc[k]);
  store_pack<U, N>(dst + r * D + col, d);
}
template <class S, class U> static hs_status add_rows(cudaStream_t s, int64_t n, int64_t D, const int32_t* row, const void* src, void* dst) {
  constexpr int N = 4;
  const bool packs = D % N == 0 && (uintptr_t)src % (N * sizeof(S)) == 0 && (uintptr_t)dst % (N * sizeof(U)) == 0;
  const int block = row_block(D, packs ? N : 1, add_threads);
  const dim3 grid((unsigned)n, (unsigned)HS_CEIL(D, (int64_t)block * (packs ? N : 1)));
  if (packs) return HS_LAUNCH(s, (add_rows_kernel<S, U, N>), grid, block, 0, n, D, row, (const S*)src, (U*)dst);
  return HS_LAUNCH(s, (add_rows_kernel<S, U, 1>), grid, block, 0, n, D, row, (const S*)src, (U*)dst);
}

// ---- the ops ----

extern "C" hs_status hs_op_embed(cudaStream_t s, const hs_embed_args* a) {
  HS_NEED_SHAPE(T, D);
  HS_NEED_PTR(ids); HS_NEED_PTR(w); HS_NEED_PTR(y);
  HS_DISPATCH(a->dtype, T, { return copy_rows<T>(s, a->T, a->D, a->ids, a->w, a->y); })
}
extern "C" hs_status hs_op_embed_bwd(cudaStream_t s, const hs_embed_bwd_args* a) {
  HS_NEED_SHAPE(T, D);
  HS_NEED_PTR(ids); HS_NEED_PTR(dy); HS_NEED_PTR(dw);
  HS_DISPATCH(a->dtype, T, { return (add_rows<T, float>)(s, a->T, a->D, a->ids, a->dy, a->dw); })
}
static hs_status gather_check(const hs_gather_args* a) {
  HS_NEED_SHAPE(N, D);
  HS_NEED_PTR(row); HS_NEED_PTR(src); HS_NEED_PTR(dst);
  return HS_OK;
}
extern "C" hs_status hs_op_gather(cudaStream_t s, const hs_gather_args* a) {
  HS_TRY(gather_check(a));
  HS_DISPATCH(a->dtype, T, { return copy_rows<T>(s, a->N, a->D, a->row, a->src, a->dst); })
}
extern "C" hs_status hs_op_gather_bwd(cudaStream_t s, const hs_gather_args* a) {
  HS_TRY(gather_check(a));
  HS_DISPATCH(a->dtype, T, { return (add_rows<T, T>)(s, a->N, a->D, a->row, a->src, a->dst); })
}
