// gemm.cuh - which matrix product the gemm op uses.
#ifndef HS_GEMM_CUH
#define HS_GEMM_CUH
#include "common.cuh"

// "own" (default): the kernels of gemm.cu; K in order, so a row's bits do not depend on M. "cublaslt": NVIDIA's library, whose
// algorithm, and with it the rounding, depends on the shape.
hs_status hs_gemm_configure(const char* value);
const char* hs_gemm_name();

// The product itself, for ops that need one inside (lm_head): checks nothing, needs no ws.
hs_status hs_gemm_own(cudaStream_t s, const hs_gemm_args* a);

// gemm_lt.cu: loads the library (HS_ERR_UNSUPPORTED with the places tried when there is none); the product.
hs_status hs_gemm_lt_load();
hs_status hs_gemm_lt(cudaStream_t s, const hs_gemm_args* a);
#endif
