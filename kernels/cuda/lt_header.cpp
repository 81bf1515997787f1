// lt_header.cpp - compiled, never linked: gemm_lt.cuh against the true cublasLt.h. Values must be equal; types need only travel alike
// through a call: pointers as pointers, enumerations as ints, structures with the same size and members in the same places.
#include <cublasLt.h>

#include "gemm_lt.cuh"

#include <type_traits>

template <class A, class B> constexpr bool alike() {
  if (std::is_pointer<A>::value || std::is_pointer<B>::value) return std::is_pointer<A>::value && std::is_pointer<B>::value;
  return sizeof(A) == sizeof(B) && std::is_floating_point<A>::value == std::is_floating_point<B>::value && !std::is_class<A>::value && !std::is_class<B>::value;
}
template <class F, class G> struct calls { static const bool same = false; };
template <class R, class S, class... A, class... B> struct calls<R (*)(A...), S (*)(B...)> {
  template <bool n, class = void> struct each { static const bool same = false; };
  template <class T> struct each<true, T> { static const bool same = (alike<A, B>() && ...) && alike<R, S>(); };
  static const bool same = each<sizeof...(A) == sizeof...(B)>::same;
};
#define X(name, args) static_assert(calls<decltype(&cublasLt##name), int (*) args>::same, "cublasLt" #name " takes other arguments");
LT_FUNCTIONS(X)
#undef X

static_assert(compute_32f == CUBLAS_COMPUTE_32F && r_32f == CUDA_R_32F && r_16bf == CUDA_R_16BF && CUBLAS_STATUS_SUCCESS == 0, "types");
static_assert(op_n == CUBLAS_OP_N && op_t == CUBLAS_OP_T, "operations");
static_assert(desc_transa == CUBLASLT_MATMUL_DESC_TRANSA && desc_transb == CUBLASLT_MATMUL_DESC_TRANSB, "descriptor");
static_assert(pref_workspace == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES && pref_reduction == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, "preference");
static_assert(pref_align_a == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES && pref_align_a + 1 == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES &&
              pref_align_a + 2 == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES && pref_align_d == CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, "alignment");
static_assert(config_splitk == CUBLASLT_ALGO_CONFIG_SPLITK_NUM && config_reduction == CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME && CUBLASLT_REDUCTION_SCHEME_NONE == 0, "algorithm");
static_assert(sizeof(lt_algo) == sizeof(cublasLtMatmulAlgo_t) && sizeof(lt_heuristic) == sizeof(cublasLtMatmulHeuristicResult_t), "sizes");
static_assert(offsetof(lt_heuristic, algo) == offsetof(cublasLtMatmulHeuristicResult_t, algo) &&
              offsetof(lt_heuristic, workspace) == offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize) &&
              offsetof(lt_heuristic, state) == offsetof(cublasLtMatmulHeuristicResult_t, state) &&
              offsetof(lt_heuristic, waves) == offsetof(cublasLtMatmulHeuristicResult_t, wavesCount), "members");
