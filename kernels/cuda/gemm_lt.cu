// gemm_lt.cu - the matrix product by cuBLASLt, loaded at run time so that the library is optional (declarations: its documented C ABI).
// Only algorithms that neither split K nor ask for workspace are used: no atomics and the same bits from run to run. The algorithm, and so
// the order over K, may still change with M, N and alignment. The emulator stands in for it with a loop over K in order, in f32.
#include "gemm.cuh"

#ifdef HS_EMU

hs_status hs_gemm_lt_load() { return HS_OK; }

static hs_status gemm_in_order(const hs_gemm_args* g) {
  const bool ta = g->flags & HS_TRANS_A, tb = g->flags & HS_TRANS_B, bf = g->dtype == HS_BF16, add = g->flags & HS_BETA1;
  const bool wide = !bf || g->flags & HS_C_F32;
  auto at = [&](const void* p, int64_t i) { return bf ? to_f(((const bf16*)p)[i]) : ((const float*)p)[i]; };
  for (int64_t m = 0; m < g->M; m++)
    for (int64_t n = 0; n < g->N; n++) {
      float s = 0;
      for (int64_t k = 0; k < g->K; k++) s += at(g->a, ta ? k * g->lda + m : m * g->lda + k) * at(g->b, tb ? n * g->ldb + k : k * g->ldb + n);
      const int64_t i = m * g->ldc + n;
      if (wide) ((float*)g->c)[i] = add ? ((float*)g->c)[i] + s : s;
      else ((bf16*)g->c)[i] = from_f<bf16>(add ? to_f(((bf16*)g->c)[i]) + s : s);
    }
  return HS_OK;
}
hs_status hs_gemm_lt(cudaStream_t s, const hs_gemm_args* g) {
  return (hs_status)hs_emu_issue(s, [g = *g] { return gemm_in_order(&g); });
}

#else

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <tuple>

#include "gemm_lt.cuh"

namespace {

#define X(name, args) int(*name) args;
struct {
  void* lib;
  lt_handle handle;
  LT_FUNCTIONS(X)
} lt;
#undef X

// One shape's descriptors and chosen algorithm, kept for the life of the process.
struct plan { lt_desc desc; lt_layout a, b, c; lt_algo algo; };
typedef std::tuple<int, uint32_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, uint32_t> plan_key;
std::map<plan_key, plan> plans;
std::mutex lock;

hs_status check(int status, const char* call) { return status == 0 ? HS_OK : hs_fail(HS_ERR_DEVICE, "cublasLt%s returned %d", call, status); }
#define LT(name, ...) HS_TRY(check(lt.name(__VA_ARGS__), #name))

// Row-major C = A B is column-major C' = B' A': the library's first operand is our B.
hs_status make_plan(const hs_gemm_args* g, uint32_t align, plan* p) {
  const int type = g->dtype == HS_BF16 ? r_16bf : r_32f, ctype = g->flags & HS_C_F32 ? r_32f : type;
  const bool ta = g->flags & HS_TRANS_A, tb = g->flags & HS_TRANS_B;
  const int opa = tb ? op_t : op_n, opb = ta ? op_t : op_n;
  LT(MatmulDescCreate, &p->desc, compute_32f, r_32f);
  LT(MatmulDescSetAttribute, p->desc, desc_transa, &opa, sizeof opa);
  LT(MatmulDescSetAttribute, p->desc, desc_transb, &opb, sizeof opb);
  LT(MatrixLayoutCreate, &p->a, type, (uint64_t)(tb ? g->K : g->N), (uint64_t)(tb ? g->N : g->K), g->ldb);
  LT(MatrixLayoutCreate, &p->b, type, (uint64_t)(ta ? g->M : g->K), (uint64_t)(ta ? g->K : g->M), g->lda);
  LT(MatrixLayoutCreate, &p->c, ctype, (uint64_t)g->N, (uint64_t)g->M, g->ldc);
  lt_pref pref;
  const size_t none = 0;
  const uint32_t no_reduction = 0;
  LT(MatmulPreferenceCreate, &pref);
  LT(MatmulPreferenceSetAttribute, pref, pref_workspace, &none, sizeof none);
  LT(MatmulPreferenceSetAttribute, pref, pref_reduction, &no_reduction, sizeof no_reduction);
  for (int k = pref_align_a; k <= pref_align_d; k++) LT(MatmulPreferenceSetAttribute, pref, k, &align, sizeof align);
  lt_heuristic found[32];
  int n = 0;
  LT(MatmulAlgoGetHeuristic, lt.handle, p->desc, p->a, p->b, p->c, p->c, pref, 32, found, &n);
  for (int i = 0; i < n; i++) {
    int32_t split = 0;
    uint32_t reduction = 0;
    size_t wrote;
    if (found[i].state != 0 || found[i].workspace != 0) continue;
    if (lt.MatmulAlgoConfigGetAttribute(&found[i].algo, config_splitk, &split, sizeof split, &wrote) || split > 1) continue;
    if (lt.MatmulAlgoConfigGetAttribute(&found[i].algo, config_reduction, &reduction, sizeof reduction, &wrote) || reduction) continue;
    p->algo = found[i].algo;
    return HS_OK;
  }
  return hs_fail(HS_ERR_UNSUPPORTED, "cuBLASLt has no algorithm without split K for M %lld, N %lld, K %lld (of %d offered); use gemm own", (long long)g->M,
                 (long long)g->N, (long long)g->K, n);
}

}  // namespace

hs_status hs_gemm_lt_load() {
  std::lock_guard<std::mutex> hold(lock);
  if (lt.handle) return HS_OK;
  static const char* const names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
  for (const char* name : names)
    if (!lt.lib) lt.lib = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!lt.lib) return hs_fail(HS_ERR_UNSUPPORTED, "configure gemm: neither libcublasLt.so.13 nor .12 loads (%s)", dlerror());
#define X(name, args) \
  if (!(lt.name = (int(*) args)dlsym(lt.lib, "cublasLt" #name))) return hs_fail(HS_ERR_UNSUPPORTED, "configure gemm: libcublasLt lacks cublasLt" #name);
  LT_FUNCTIONS(X)
#undef X
  return check(lt.Create(&lt.handle), "Create");
}

hs_status hs_gemm_lt(cudaStream_t s, const hs_gemm_args* g) {
  const uintptr_t low = ((uintptr_t)g->a | (uintptr_t)g->b | (uintptr_t)g->c | 256);
  const uint32_t align = (uint32_t)(low & -low);   // the largest power of two that divides every address, at most 256
  const uint32_t flags = g->flags & (HS_TRANS_A | HS_TRANS_B | HS_C_F32);
  plan p;
  {
    std::lock_guard<std::mutex> hold(lock);
    const plan_key key(g->dtype, flags, g->M, g->N, g->K, g->lda, g->ldb, g->ldc, align);
    auto it = plans.find(key);
    if (it == plans.end()) {
      HS_TRY(make_plan(g, align, &p));
      plans[key] = p;
    } else p = it->second;
  }
  const float one = 1, beta = g->flags & HS_BETA1 ? 1.0f : 0.0f;
  return check(lt.Matmul(lt.handle, p.desc, &one, g->b, p.a, g->a, p.b, &beta, g->c, p.c, g->c, p.c, &p.algo, nullptr, 0, s), "Matmul");
}

#endif
