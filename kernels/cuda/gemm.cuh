// gemm.cuh - which matrix product the gemm ops use.
#ifndef HS_GEMM_CUH
#define HS_GEMM_CUH
#include "common.cuh"

// "own" (default): bf16 by wgmma where the device and the operands allow it (gemm_wgmma.cu), else by mma.sync, f32 on CUDA cores (gemm.cu); K in
// order, so a row's bits do not depend on M. "mma": the same without wgmma. "cublaslt": NVIDIA's library, whose algorithm, and with it the
// rounding, depends on the shape.
hs_status hs_gemm_configure(const char* value);
const char* hs_gemm_name();

// The product itself, for ops that need one inside (lm_head): "own" or "mma"; checks nothing, needs no ws.
hs_status hs_gemm_own(cudaStream_t s, const hs_gemm_args* a);

// Whether "own" or "mma" takes wgmma for these operands: ops with a main loop of their own follow it, so that a matrix always has one form.
bool hs_gemm_by_wgmma(const hs_gemm_group_args* a);

// gemm_wgmma.cu: whether it can multiply these operands (of one form for all sets), and the product; swiglu: of sets 0 (gate) and 1 (up) into
// the c of set 0.
bool hs_gemm_wgmma_takes(const hs_gemm_group_args* a);
hs_status hs_gemm_wgmma(cudaStream_t s, const hs_gemm_group_args* a, bool swiglu);

// gemm_lt.cu: loads the library (HS_ERR_UNSUPPORTED with the places tried when there is none); the product.
hs_status hs_gemm_lt_load();
hs_status hs_gemm_lt(cudaStream_t s, const hs_gemm_args* a);
#endif
