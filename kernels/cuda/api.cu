// api.cu - hs_get_api of libhs_cuda.so and libhs_emu.so: error text, dispatch, streams, configuration.
#include <cstdarg>
#include <cstdio>

#include "gemm.cuh"

static thread_local char error_text[640];

hs_status hs_fail(hs_status st, const char* fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(error_text, sizeof error_text, fmt, ap);
  va_end(ap);
  return st;
}
static const char* last_error() { return error_text; }

// ---- dispatch ----

typedef hs_status (*run_fn)(cudaStream_t, const void*);
typedef int64_t (*ws_fn)(const void*);
struct op_entry { const char* name; run_fn run; ws_fn ws; };
#define HS_ENTRY(op, args) {#op, (run_fn)hs_op_##op, (ws_fn)hs_ws_##op},
static const op_entry ops[] = {HS_OPS(HS_ENTRY)};   // in the order of hs_op
#undef HS_ENTRY
static_assert(sizeof ops / sizeof *ops == HS_NUM_OPS, "HS_OPS lists every op of abi.h");

// Ops past HS_NUM_OPS exist in the emulator's test library only (emu/broken.cu).
extern "C" __attribute__((weak)) hs_status hs_selftest(cudaStream_t, int32_t which, const void* args);

struct hs_stream { cudaStream_t native; };

static int64_t workspace(int32_t op, const void* args) {
  return op < 0 || op >= HS_NUM_OPS || !args || !ops[op].ws ? 0 : ops[op].ws(args);
}

static hs_status run(hs_stream* s, int32_t op, const void* args) {
  const cudaStream_t native = s ? s->native : 0;
  if (op >= HS_NUM_OPS && hs_selftest) return hs_selftest(native, op - HS_NUM_OPS, args);
  HS_NEED(op >= 0 && op < HS_NUM_OPS, "run: op %d, want 0..%d", (int)op, HS_NUM_OPS - 1);
  HS_NEED(args, "%s: no arguments", ops[op].name);
  if (!ops[op].run) return hs_fail(HS_ERR_UNSUPPORTED, "%s: no kernel for it in this table", ops[op].name);
  error_text[0] = 0;
  const hs_status st = ops[op].run(native, args);
  if (st != HS_OK) {
    char text[sizeof error_text];
    memcpy(text, error_text, sizeof text);
    hs_fail(st, "%s: %.600s", ops[op].name, text[0] ? text : "failed");
  }
  return st;
}

// ---- streams ----

static hs_stream* stream_create(void* native) {
  hs_stream* s = new hs_stream;
  s->native = (cudaStream_t)native;
  return s;
}
static void stream_destroy(hs_stream* s) { delete s; }
static hs_status stream_sync(hs_stream* s) {
#ifdef HS_EMU
  (void)s;
#else
  const cudaError_t e = cudaStreamSynchronize(s ? s->native : 0);
  if (e != cudaSuccess) return hs_fail(HS_ERR_DEVICE, "stream: %s", cudaGetErrorString(e));
#endif
  return HS_OK;
}

// ---- configuration ----

static hs_status configure(const char* key, const char* value) {
  if (!strcmp(key, "gemm")) return hs_gemm_configure(value);
#ifdef HS_EMU
  if (hs_emu_configure(key, value)) return HS_OK;
  return hs_fail(HS_ERR_ARG, "configure %s: \"%s\", want fiber_order forward|reverse|random:SEED, poison on|off or gemm own|cublaslt", key, value);
#else
  return hs_fail(HS_ERR_ARG, "configure: unknown key \"%s\", want gemm", key);
#endif
}

static const char* build_info() {
  static thread_local char text[160];
#ifdef HS_EMU
  snprintf(text, sizeof text, "emulated by c++ %s, gemm %s", __VERSION__, hs_gemm_name());
#else
  snprintf(text, sizeof text, "nvcc %d.%d, gemm %s", __CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__, hs_gemm_name());
#endif
  return text;
}

extern "C" __attribute__((visibility("default"))) const hs_api* hs_get_api(uint32_t version) {
#ifdef HS_EMU
  static const char name[] = "emu";
#else
  static const char name[] = "cuda";
#endif
  static const hs_api api = {sizeof(hs_api), HS_ABI_VERSION, name, build_info, last_error, configure, stream_create, stream_destroy, stream_sync, workspace, run};
  return version == HS_ABI_VERSION ? &api : 0;
}
