// hopper.cu - host side of hopper.cuh: whether the device has wgmma, and tensor maps. The driver's encoder is asked of the runtime, so nothing
// links to libcuda.
#include "hopper.cuh"

#ifdef HS_EMU

int hs_hopper_sms() { return 4; }

static hs_status encode(hs_tma* m, const void* base, int64_t rows, int64_t cols, int64_t ld, int box_rows) {
  *m = {(const char*)base, rows, cols, 2 * ld, box_rows};
  return HS_OK;
}

#else

#include <mutex>

int hs_hopper_sms() {
  static std::mutex lock;
  static int known[64];   // by device: SMs + 1
  int dev = 0, major = 0, sms = 0;
  if (cudaGetDevice(&dev) != cudaSuccess || dev < 0 || dev >= 64) return 0;
  std::lock_guard<std::mutex> hold(lock);
  if (!known[dev]) {
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, dev) != cudaSuccess ||
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, dev) != cudaSuccess) return 0;
    known[dev] = 1 + (major == 9 ? sms : 0);
  }
  return known[dev] - 1;
}

typedef decltype(&cuTensorMapEncodeTiled) encode_fn;

static encode_fn find_encode() {
  void* fn = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t e = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &fn, cudaEnableDefault, &found);
#endif
  return e == cudaSuccess && found == cudaDriverEntryPointSuccess ? (encode_fn)fn : nullptr;
}

static hs_status encode(hs_tma* m, const void* base, int64_t rows, int64_t cols, int64_t ld, int box_rows) {
  static const encode_fn fn = find_encode();
  if (!fn) return hs_fail(HS_ERR_DEVICE, "the driver has no cuTensorMapEncodeTiled; a driver for CUDA 12 or later is needed");
  const cuuint64_t dim[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, pitch[1] = {(cuuint64_t)ld * 2};
  const cuuint32_t box[2] = {64, (cuuint32_t)box_rows}, step[2] = {1, 1};
  const CUresult e = fn(m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(base), dim, pitch, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (e != CUDA_SUCCESS)
    return hs_fail(HS_ERR_DEVICE, "tensor map of %lld rows of %lld, %lld apart, boxes of %d rows: driver error %d", (long long)rows, (long long)cols, (long long)ld, box_rows, (int)e);
  return HS_OK;
}

#endif

hs_status hs_tma_matrix(hs_tma* m, const void* base, int64_t rows, int64_t cols, int64_t ld, int box_rows) {
  const int64_t most = (int64_t)1 << 31;   // coordinates are int32
  HS_NEED((uintptr_t)base % 16 == 0 && ld % 8 == 0, "TMA of a matrix at %p, rows %lld elements apart: need multiples of 16 bytes", base, (long long)ld);
  HS_NEED(rows > 0 && cols > 0 && rows < most && cols < most && ld >= cols && box_rows > 0 && box_rows <= 256,
          "TMA of %lld rows of %lld, %lld apart, boxes of %d rows", (long long)rows, (long long)cols, (long long)ld, box_rows);
  return encode(m, base, rows, cols, ld, box_rows);
}
