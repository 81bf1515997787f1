// cpu_gemm.c - matrix products: own register-blocked kernels, or OpenBLAS by dlopen when configured.
//
// Own kernels. Each element is the sum over blocks of HS_GEMM_KC of K, and in a block one FMA chain in K order from zero; block sums
// are added in order (to C first with HS_BETA1). The tile an element falls into, its place there and the thread never matter.
// Tasks are row ranges x groups of column panels; a task packs B panel by panel on its own stack and reads A in place, or copies its
// rows (transposed A; rows whose addresses share cache sets).
#include "cpu.h"

#include <dlfcn.h>
#include <stdatomic.h>

#define GEMM_ROWS 512         // rows of A per task: small enough to share out, large enough to pay for packing the panel
#define GEMM_TRANS_ROWS 192   // the same for a transposed A, which is packed (a multiple of every tile height)

#define SPREAD_LD (HS_GEMM_KC + 16)   // row stride of copied rows of A

#define HS_BODY "cpu_gemm_body.h"
#include "cpu_levels.h"

// ---- OpenBLAS ----

typedef void (*sgemm_fn)(int, int, int, int, int, int, float, const float*, int, const float*, int, float, float*, int);
typedef void (*dgemm_fn)(int, int, int, int, int, int, double, const double*, int, const double*, int, double, double*, int);
static struct { atomic_int on; sgemm_fn s; dgemm_fn d; } blas;

hs_status hs_gemm_backend(const char* name) {
  if (!strcmp(name, "own")) {
    atomic_store(&blas.on, 0);
    return HS_OK;
  }
  HS_NEED(!strcmp(name, "openblas"), "configure gemm: \"%s\", want own or openblas", name);
  void* lib = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
  if (!lib) return hs_fail(HS_ERR_UNSUPPORTED, "configure gemm: %s", dlerror());
  sgemm_fn s = (sgemm_fn)dlsym(lib, "cblas_sgemm");
  dgemm_fn d = (dgemm_fn)dlsym(lib, "cblas_dgemm");
  void (*threads)(int) = (void (*)(int))dlsym(lib, "openblas_set_num_threads");
  if (!s || !d) return hs_fail(HS_ERR_UNSUPPORTED, "configure gemm: libopenblas.so.0 has no cblas_sgemm or cblas_dgemm");
  if (threads) threads(hs_num_threads());
  blas.s = s;
  blas.d = d;
  atomic_store(&blas.on, 1);
  return HS_OK;
}
const char* hs_gemm_backend_name(void) { return atomic_load(&blas.on) ? "openblas" : "own"; }

// ---- entry points ----

void hs_gemm_f32(uint32_t flags, int64_t M, int64_t N, int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) {
  HS_PICK32(gemm_run)(flags, M, N, K, a, lda, b, ldb, c, ldc, 0);
}
void hs_gemm_f64(uint32_t flags, int64_t M, int64_t N, int64_t K, const double* a, int64_t lda, const double* b, int64_t ldb, double* c, int64_t ldc) {
  gemm_run_f64(flags, M, N, K, a, lda, b, ldb, c, ldc, 0);
}
void hs_pgemm_f32(uint32_t flags, int64_t M, int64_t N, int64_t K, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) {
  if (atomic_load(&blas.on))
    blas.s(101, flags & HS_TRANS_A ? 112 : 111, flags & HS_TRANS_B ? 112 : 111, (int)M, (int)N, (int)K, 1, a, (int)lda, b, (int)ldb, flags & HS_BETA1 ? 1 : 0, c, (int)ldc);
  else
    HS_PICK32(gemm_run)(flags, M, N, K, a, lda, b, ldb, c, ldc, 1);
}
void hs_pgemm_f64(uint32_t flags, int64_t M, int64_t N, int64_t K, const double* a, int64_t lda, const double* b, int64_t ldb, double* c, int64_t ldc) {
  if (atomic_load(&blas.on))
    blas.d(101, flags & HS_TRANS_A ? 112 : 111, flags & HS_TRANS_B ? 112 : 111, (int)M, (int)N, (int)K, 1, a, (int)lda, b, (int)ldb, flags & HS_BETA1 ? 1 : 0, c, (int)ldc);
  else
    gemm_run_f64(flags, M, N, K, a, lda, b, ldb, c, ldc, 1);
}

int64_t hs_cpu_gemm_ws(const hs_gemm_args* a) {
  (void)a;
  return 0;
}

hs_status hs_cpu_gemm(const hs_gemm_args* a) {
  HS_NEED_DTYPE(a);
  HS_NEED(a->M > 0 && a->N > 0 && a->K > 0, "M %lld, N %lld, K %lld: need all > 0", (long long)a->M, (long long)a->N, (long long)a->K);
  int64_t acols = a->flags & HS_TRANS_A ? a->M : a->K, bcols = a->flags & HS_TRANS_B ? a->K : a->N;
  HS_NEED(a->lda >= acols, "lda %lld < %lld columns of A", (long long)a->lda, (long long)acols);
  HS_NEED(a->ldb >= bcols, "ldb %lld < %lld columns of B", (long long)a->ldb, (long long)bcols);
  HS_NEED(a->ldc >= a->N, "ldc %lld < N %lld", (long long)a->ldc, (long long)a->N);
  HS_NEED(a->a && a->b && a->c, "a, b and c are required");
  if (a->dtype == HS_F64) hs_pgemm_f64(a->flags, a->M, a->N, a->K, a->a, a->lda, a->b, a->ldb, a->c, a->ldc);
  else hs_pgemm_f32(a->flags, a->M, a->N, a->K, a->a, a->lda, a->b, a->ldb, a->c, a->ldc);
  return HS_OK;
}

int64_t hs_cpu_gemm_group_ws(const hs_gemm_group_args* a) {
  (void)a;
  return 0;
}

hs_status hs_cpu_gemm_group(const hs_gemm_group_args* a) {
  HS_NEED(a->n >= 1 && a->n <= HS_GEMM_SETS, "n %lld, want 1..%d", (long long)a->n, HS_GEMM_SETS);
  for (int64_t i = 0; i < a->n; i++) {
    const hs_gemm_set* s = &a->set[i];
    const hs_gemm_args g = {a->dtype, a->flags, a->M, s->N, a->K, a->a, a->lda, s->b, s->ldb, s->c, s->ldc, 0, 0};
    const hs_status st = hs_cpu_gemm(&g);
    if (st != HS_OK) return st;
  }
  return HS_OK;
}
