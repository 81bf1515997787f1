// slots.cu - copies of whole state slots and pages. A thread owns a strip of bytes and walks the list in order, so a later copy sees an earlier
// one, as on the cpu table. H200 floor: two bytes moved per byte copied. Expected near it for slots of a megabyte; unmeasured.
#include "common.cuh"

struct strip { uint32_t w[4]; };

template <class W> __global__ void slot_copy_kernel(int64_t n, int64_t words, const int32_t* src, const int32_t* dst, W* base) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= words) return;
  for (int64_t j = 0; j < n; j++) {
    const int64_t from = src[j], to = dst[j];
    if (from < 0) base[to * words + i] = W{};
    else if (from != to) base[to * words + i] = base[from * words + i];
  }
}
extern "C" hs_status hs_op_slot_copy(cudaStream_t s, const hs_slot_copy_args* a) {
  HS_NEED(a->n >= 0 && a->bytes > 0, "n %lld, bytes %lld: need n >= 0, bytes > 0", (long long)a->n, (long long)a->bytes);
  if (a->n == 0) return HS_OK;
  HS_NEED_PTR(src); HS_NEED_PTR(dst); HS_NEED_PTR(base);
  const int block = 128;
  if (hs_packs(a->bytes, 1, a->base))
    return HS_LAUNCH(s, slot_copy_kernel<strip>, (unsigned)HS_CEIL(a->bytes / 16, block), block, 0, a->n, a->bytes / 16, a->src, a->dst, (strip*)a->base);
  return HS_LAUNCH(s, slot_copy_kernel<uint8_t>, (unsigned)HS_CEIL(a->bytes, block), block, 0, a->n, a->bytes, a->src, a->dst, (uint8_t*)a->base);
}
