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

struct hs_stream {
  cudaStream_t native;
  bool recording;   // a graph
#ifdef HS_EMU
  hs_emu_stream emu;
#endif
};

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
  hs_stream* s = new hs_stream();
  s->native = (cudaStream_t)native;
#ifdef HS_EMU
  s->native = &s->emu;   // any native handle is the stand-in driver's
#endif
  return s;
}
static void stream_destroy(hs_stream* s) { delete s; }
static hs_status stream_sync(hs_stream* s) {
  HS_NEED(!s || !s->recording, "stream: waited for while it records a graph");
#ifndef HS_EMU
  const cudaError_t e = cudaStreamSynchronize(s ? s->native : 0);
  if (e != cudaSuccess) return hs_fail(HS_ERR_DEVICE, "stream: %s", cudaGetErrorString(e));
#endif
  return HS_OK;
}

// ---- graphs ----

struct hs_graph {
#ifdef HS_EMU
  std::vector<std::function<int()>> nodes;
#else
  cudaGraphExec_t exec;
#endif
};

#ifndef HS_EMU
static hs_status graph_check(cudaError_t e, const char* call) {
  return e == cudaSuccess ? HS_OK : hs_fail(HS_ERR_DEVICE, "graph: cuda%s: %s", call, cudaGetErrorString(e));
}
#define GRAPH(name, ...) graph_check(cuda##name(__VA_ARGS__), #name)
#endif

static hs_status graph_begin(hs_stream* s) {
  HS_NEED(s && s->native, "graph: needs a stream of its own");
  HS_NEED(!s->recording, "graph: the stream records one already");
#ifdef HS_EMU
  s->emu.recorded = new std::vector<std::function<int()>>;
#else
  HS_TRY(GRAPH(StreamBeginCapture, s->native, cudaStreamCaptureModeThreadLocal));
#endif
  s->recording = true;
  return HS_OK;
}
static hs_status graph_end(hs_stream* s, hs_graph** out, int64_t* nodes) {
  *out = 0, *nodes = 0;
  HS_NEED(s && s->recording, "graph: none was begun on the stream");
  s->recording = false;
  hs_graph* g = new hs_graph();
#ifdef HS_EMU
  g->nodes.swap(*s->emu.recorded);
  delete s->emu.recorded;
  s->emu.recorded = 0;
  *nodes = (int64_t)g->nodes.size();
#else
  cudaGraph_t raw = 0;
  size_t n = 0;
  hs_status st = GRAPH(StreamEndCapture, s->native, &raw);
  if (st == HS_OK) st = GRAPH(GraphGetNodes, raw, nullptr, &n);
  if (st == HS_OK) st = GRAPH(GraphInstantiateWithFlags, &g->exec, raw, 0);
  if (raw) cudaGraphDestroy(raw);
  if (st != HS_OK) return delete g, st;
  *nodes = (int64_t)n;
#endif
  *out = g;
  return HS_OK;
}
static hs_status graph_launch(hs_stream* s, hs_graph* g) {
  HS_NEED(s && g, "graph: a launch needs a stream and a graph");
  HS_NEED(!s->recording, "graph: a graph inside a graph");
#ifdef HS_EMU
  for (auto& node : g->nodes) HS_TRY((hs_status)node());
  return HS_OK;
#else
  return GRAPH(GraphLaunch, g->exec, s->native);
#endif
}
static void graph_destroy(hs_graph* g) {
#ifndef HS_EMU
  if (g) cudaGraphExecDestroy(g->exec);
#endif
  delete g;
}

// ---- host memory ----

static hs_status host_alloc(int64_t bytes, void** out) {
  HS_NEED(bytes > 0, "host memory: %lld bytes", (long long)bytes);
#ifdef HS_EMU
  *out = aligned_alloc(64, (size_t)hs_align(bytes));
  if (!*out) return hs_fail(HS_ERR_DEVICE, "out of host memory for %lld bytes", (long long)bytes);
#else
  const cudaError_t e = cudaHostAlloc(out, (size_t)bytes, cudaHostAllocDefault);
  if (e != cudaSuccess) return hs_fail(HS_ERR_DEVICE, "lock %lld bytes of host memory: %s", (long long)bytes, cudaGetErrorString(e));
#endif
  memset(*out, 0, (size_t)bytes);
  return HS_OK;
}
static void host_free(void* p) {
#ifdef HS_EMU
  free(p);
#else
  cudaFreeHost(p);
#endif
}

// ---- configuration ----

static hs_status configure(const char* key, const char* value) {
  if (!strcmp(key, "gemm")) return hs_gemm_configure(value);
#ifdef HS_EMU
  if (hs_emu_configure(key, value)) return HS_OK;
  return hs_fail(HS_ERR_ARG, "configure %s: \"%s\", want fiber_order forward|reverse|random:SEED, poison on|off or gemm own|mma|cublaslt", key, value);
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
  static const hs_api api = {sizeof(hs_api), HS_ABI_VERSION, name, build_info, last_error, configure, stream_create, stream_destroy, stream_sync, workspace, run,
                             graph_begin, graph_end, graph_launch, graph_destroy, host_alloc, host_free};
  return version == HS_ABI_VERSION ? &api : 0;
}
