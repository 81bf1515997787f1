// gemm_lt.cuh - what gemm_lt.cu uses of cuBLASLt, declared here so that neither its headers nor the library are needed to build.
// lt_header.cpp compares each declaration with the true header where there is one (make cuda-check).
#pragma once
#include <cstddef>
#include <cstdint>

typedef void *lt_handle, *lt_desc, *lt_layout, *lt_pref;
struct lt_algo { uint64_t data[8]; };
struct lt_heuristic { lt_algo algo; size_t workspace; int state; float waves; int reserved[4]; };
const int compute_32f = 68, r_32f = 0, r_16bf = 14;              // cublasComputeType_t, cudaDataType_t
const int desc_transa = 3, desc_transb = 4, op_n = 0, op_t = 1;   // cublasLtMatmulDescAttributes_t, cublasOperation_t
const int pref_workspace = 1, pref_reduction = 3, pref_align_a = 5, pref_align_d = 8;   // cublasLtMatmulPreferenceAttributes_t
const int config_splitk = 2, config_reduction = 3;               // cublasLtMatmulAlgoConfigAttributes_t

#define LT_FUNCTIONS(X) \
  X(Create, (lt_handle*)) X(MatmulDescCreate, (lt_desc*, int, int)) X(MatmulDescSetAttribute, (lt_desc, int, const void*, size_t)) \
  X(MatrixLayoutCreate, (lt_layout*, int, uint64_t, uint64_t, int64_t)) X(MatmulPreferenceCreate, (lt_pref*)) \
  X(MatmulPreferenceSetAttribute, (lt_pref, int, const void*, size_t)) \
  X(MatmulAlgoGetHeuristic, (lt_handle, lt_desc, lt_layout, lt_layout, lt_layout, lt_layout, lt_pref, int, lt_heuristic*, int*)) \
  X(MatmulAlgoConfigGetAttribute, (const lt_algo*, int, void*, size_t, size_t*)) \
  X(Matmul, (lt_handle, lt_desc, const void*, const void*, lt_layout, const void*, lt_layout, const void*, const void*, lt_layout, void*, lt_layout, const lt_algo*, void*, size_t, cudaStream_t))
