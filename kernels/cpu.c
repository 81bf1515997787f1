// cpu.c - the cpu table: error text, SIMD choice, thread pool, and the dispatch of every op.
// Bodies: cpu_point_body.h (pointwise, norms), cpu_head_body.h (log-probs, sampling), cpu_adamw.c, cpu_gemm.c, cpu_seq*.c.
#include "cpu.h"
#include "optim_math.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

// ---- errors ----

static __thread char error_text[512];

hs_status hs_fail(hs_status st, const char* fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(error_text, sizeof error_text, fmt, ap);
  va_end(ap);
  return st;
}

static const char* last_error(void) { return error_text; }

// ---- SIMD level ----

static atomic_int simd_level = -1;

static int detect_simd(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return 2;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
  return 0;
}

int hs_simd_level(void) {
  int l = atomic_load_explicit(&simd_level, memory_order_relaxed);
  if (l < 0) {
    l = detect_simd();
    atomic_store(&simd_level, l);
  }
  return l;
}

// ---- thread pool ----
// One job at a time. `state` is (generation, first, end) of the tasks left; a worker takes one by compare-and-swap, so a swap that
// succeeds proves that the job fields it read before belong to that generation: the owner empties the state before it rewrites them.
// The caller and even workers take tasks from the front, odd workers from the back: tasks are rows in order, so from op to op a core
// meets the rows that its own cache holds. The caller waits for tasks, never for workers: one that is still asleep costs nothing.

#define POOL_BITS 20   // of first and of end
#define POOL_MAX ((1 << POOL_BITS) - 1)
#define POOL_STATE(gen, first, end) ((uint64_t)(gen) << 2 * POOL_BITS | (uint64_t)(first) << POOL_BITS | (uint64_t)(end))
#define POOL_SPINS 1200   // pauses before a worker sleeps: under 100 microseconds, which bridges the host work between two decode steps

static struct {
  pthread_mutex_t owner;               // held by the caller whose job it is
  _Atomic(uint64_t) state;
  _Atomic(uint32_t) done;
  _Atomic(uintptr_t) fn, ctx;
  _Atomic(uint32_t) wake, sleepers;    // wake is the futex word
  atomic_int threads;                  // in use, the caller included
  int spawned;                         // workers started
  pthread_mutex_t mu;                  // without futexes
  pthread_cond_t cv;
} pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .mu = PTHREAD_MUTEX_INITIALIZER, .cv = PTHREAD_COND_INITIALIZER, .threads = 1};

static __thread int in_pool;

// Subnormals read as zero and results below the normal range become zero while ops run: decays and softmax weights pass through that
// range, and each such operand costs a hundred cycles. Set on the workers for good and around run() on the caller, so both agree.
HS_INLINE uint32_t flush_on(void) {
#if defined(__x86_64__)
  const uint32_t old = _mm_getcsr();
  _mm_setcsr(old | 0x8040);
  return old;
#else
  return 0;
#endif
}
HS_INLINE void flush_restore(uint32_t old) {
#if defined(__x86_64__)
  _mm_setcsr(old);
#else
  (void)old;
#endif
}

static void pause_cpu(void) {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

static void sleep_on(uint32_t seen) {
#ifdef __linux__
  syscall(SYS_futex, &pool.wake, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
#else
  pthread_mutex_lock(&pool.mu);
  while (atomic_load(&pool.wake) == seen) pthread_cond_wait(&pool.cv, &pool.mu);
  pthread_mutex_unlock(&pool.mu);
#endif
}

static void wake_all(void) {
#ifdef __linux__
  atomic_fetch_add(&pool.wake, 1);
  syscall(SYS_futex, &pool.wake, FUTEX_WAKE_PRIVATE, HS_MAX_THREADS, 0, 0, 0);
#else
  pthread_mutex_lock(&pool.mu);
  atomic_fetch_add(&pool.wake, 1);
  pthread_cond_broadcast(&pool.cv);
  pthread_mutex_unlock(&pool.mu);
#endif
}

// Runs tasks of the current job until none is left; returns whether it ran any.
static int work(int worker) {
  int any = 0;
  uint64_t s = atomic_load(&pool.state);
  for (;;) {
    const uint64_t first = s >> POOL_BITS & POOL_MAX, end = s & POOL_MAX;
    if (first == end) return any;
    void (*fn)(void*, int64_t, int) = (void (*)(void*, int64_t, int))atomic_load(&pool.fn);
    void* ctx = (void*)atomic_load(&pool.ctx);
    const int back = worker & 1;
    if (!atomic_compare_exchange_weak(&pool.state, &s, back ? s - 1 : s + (1 << POOL_BITS))) continue;
    any = 1;
    fn(ctx, (int64_t)(back ? end - 1 : first), worker);
    atomic_fetch_add(&pool.done, 1);
    s = atomic_load(&pool.state);
  }
}

static void* worker_main(void* arg) {
  const int id = (int)(intptr_t)arg;
  in_pool = 1;
  flush_on();
  for (;;) {
    int worked = 0;
    for (int i = 0; i < POOL_SPINS; i++) {
      if (id < atomic_load_explicit(&pool.threads, memory_order_relaxed) && work(id)) {
        worked = 1;
        break;
      }
      pause_cpu();
    }
    if (worked) continue;
    uint32_t seen = atomic_load(&pool.wake);
    atomic_fetch_add(&pool.sleepers, 1);
    if (!(id < atomic_load(&pool.threads) && work(id))) sleep_on(seen);
    atomic_fetch_sub(&pool.sleepers, 1);
  }
  return 0;
}

int hs_num_threads(void) { return atomic_load_explicit(&pool.threads, memory_order_relaxed); }

void hs_parallel(int64_t ntasks, void (*fn)(void*, int64_t, int), void* ctx) {
  if (ntasks <= 1 || in_pool || ntasks > POOL_MAX || hs_num_threads() == 1 || pthread_mutex_trylock(&pool.owner)) {
    for (int64_t i = 0; i < ntasks; i++) fn(ctx, i, 0);
    return;
  }
  in_pool = 1;
  const uint64_t gen = (atomic_load(&pool.state) >> 2 * POOL_BITS) + 1;
  atomic_store(&pool.state, POOL_STATE(gen, 0, 0));
  atomic_store(&pool.done, 0);
  atomic_store(&pool.fn, (uintptr_t)fn);
  atomic_store(&pool.ctx, (uintptr_t)ctx);
  atomic_store(&pool.state, POOL_STATE(gen, 0, ntasks));
  if (atomic_load(&pool.sleepers)) wake_all();
  work(0);
  for (int spins = 0; atomic_load(&pool.done) != (uint32_t)ntasks; spins++) {
    if (spins < 4 * POOL_SPINS) pause_cpu();
    else sched_yield();
  }
  in_pool = 0;
  pthread_mutex_unlock(&pool.owner);
}

static hs_status set_threads(const char* value) {
  char* end;
  long n = strtol(value, &end, 10);
  HS_NEED(*value && !*end && n >= 1 && n <= HS_MAX_THREADS, "configure threads: \"%s\", want 1..%d", value, HS_MAX_THREADS);
  pthread_mutex_lock(&pool.owner);
  hs_status st = HS_OK;
  while (pool.spawned < n - 1) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);   // signals are the Go runtime's business
    pthread_t t;
    int rc = pthread_create(&t, 0, worker_main, (void*)(intptr_t)(pool.spawned + 1));
    pthread_sigmask(SIG_SETMASK, &old, 0);
    if (rc) {
      st = hs_fail(HS_ERR_DEVICE, "configure threads: start thread %d of %ld: %s", pool.spawned + 1, n, strerror(rc));
      break;
    }
    pthread_detach(t);
    pool.spawned++;
  }
  if (st == HS_OK) atomic_store(&pool.threads, (int)n);
  pthread_mutex_unlock(&pool.owner);
  return st;
}

// ---- configuration ----

hs_status hs_gemm_backend(const char* name);   // cpu_gemm.c
const char* hs_gemm_backend_name(void);

static hs_status set_simd(const char* value) {
  static const char* const names[] = {"scalar", "avx2", "avx512"};
  int best = detect_simd();
  if (!strcmp(value, "auto")) {
    atomic_store(&simd_level, best);
    return HS_OK;
  }
  for (int l = 0; l < 3; l++) {
    if (strcmp(value, names[l])) continue;
    HS_NEED(l <= best, "configure simd: \"%s\", but this CPU has at most %s", value, names[best]);
    atomic_store(&simd_level, l);
    return HS_OK;
  }
  return hs_fail(HS_ERR_ARG, "configure simd: \"%s\", want auto, avx512, avx2 or scalar", value);
}

static hs_status configure(const char* key, const char* value) {
  if (!strcmp(key, "threads")) return set_threads(value);
  if (!strcmp(key, "simd")) return set_simd(value);
  if (!strcmp(key, "gemm")) return hs_gemm_backend(value);
  return hs_fail(HS_ERR_ARG, "configure: unknown key \"%s\", want threads, simd or gemm", key);
}

static const char* build_info(void) {
  static __thread char text[160];
  static const char* const names[] = {"baseline", "avx2", "avx512"};
  snprintf(text, sizeof text, "cc %s, simd %s, gemm %s", __VERSION__, names[hs_simd_level()], hs_gemm_backend_name());
  return text;
}

// ---- slot_copy: bytes, whatever the type ----

typedef struct { const hs_slot_copy_args* a; int64_t stripe; } slot_ctx;

static void slot_task(void* c, int64_t task, int worker) {
  (void)worker;
  const slot_ctx* x = c;
  const hs_slot_copy_args* a = x->a;
  int64_t from = task * x->stripe, n = HS_MIN(x->stripe, a->bytes - from);
  for (int64_t i = 0; i < a->n; i++) {
    char* d = (char*)a->base + a->dst[i] * a->bytes + from;
    if (a->src[i] < 0) memset(d, 0, (size_t)n);
    else if (a->src[i] != a->dst[i]) memcpy(d, (const char*)a->base + a->src[i] * a->bytes + from, (size_t)n);
  }
}

static hs_status slot_copy(const hs_slot_copy_args* a) {
  HS_NEED(a->n >= 0 && a->bytes > 0, "n %lld, bytes %lld: need n >= 0, bytes > 0", (long long)a->n, (long long)a->bytes);
  if (a->n == 0) return HS_OK;
  HS_NEED(a->src && a->dst && a->base, "src, dst and base are required");
  for (int64_t i = 0; i < a->n; i++)
    HS_NEED(a->src[i] >= -1 && a->dst[i] >= 0, "copy %lld: from %d to %d", (long long)i, a->src[i], a->dst[i]);
  slot_ctx x = {a, HS_MAX(16384, hs_align(HS_CEIL(a->bytes, 64)))};
  hs_parallel(HS_CEIL(a->bytes, x.stripe), slot_task, &x);
  return HS_OK;
}

// ---- bodies ----

#define SUMSQ_BLOCK 4096
// Weight gradients are summed over blocks of this many rows, then block by block: a fixed order for any thread count.
#define NORM_ROWS 64
#define SCATTER_CLASSES 16
#define ELEM_BLOCK 16384

typedef struct { const void* a; int64_t rows; } point_ctx;

HS_INLINE int64_t norm_bwd_ws(int64_t T, int64_t D, int32_t dtype) { return HS_CEIL(T, NORM_ROWS) * hs_align(D * hs_sizeof(dtype)); }
// Rows per task so that one is worth handing out; never changes results.
HS_INLINE int64_t rows_per_task(int64_t D) { return HS_MAX(1, 8192 / HS_MAX(D, 1)); }

#define HS_BODY "cpu_point_body.h"
#include "cpu_levels.h"
#define HEAD_BLOCK 4096   // logits per partial sum; partial sums are added in f64

// Scratch of the head: first[chunk+1], gathered rows, logits, and for backward the rows' gradients.
HS_INLINE int64_t head_ws(int64_t N, int64_t D, int64_t valid, int64_t chunk, int32_t dtype, int rowbufs) {
  int64_t c = HS_MIN(chunk, N), e = hs_sizeof(dtype);
  return hs_align((c + 1) * 8) + rowbufs * hs_align(c * D * e) + hs_align(c * valid * e);
}

// The Philox of optim_math.h on arrays.
void hs_philox(uint32_t key0, uint32_t key1, const uint32_t ctr[4], uint32_t out[4]) {
  memcpy(out, ctr, 16);
  hs_philox4x32(key0, key1, &out[0], &out[1], &out[2], &out[3]);
}

// Uniforms of the 64 ids from `first` on, a multiple of 64 (abi.h, sampling).
static __attribute__((unused)) void sample_units(float x[64], const hs_sample_row* r, int64_t first) {
  uint32_t a[16], b[16], c[16], d[16];
  for (int j = 0; j < 16; j++) {
    a[j] = (uint32_t)r->ctr, b[j] = (uint32_t)(first / 4) + (uint32_t)j, c[j] = (uint32_t)r->key_hi, d[j] = (uint32_t)(r->key_hi >> 32);
    hs_philox4x32((uint32_t)r->key_lo, (uint32_t)(r->key_lo >> 32), a + j, b + j, c + j, d + j);
  }
  for (int j = 0; j < 16; j++) x[4 * j] = hs_unit(a[j]), x[4 * j + 1] = hs_unit(b[j]), x[4 * j + 2] = hs_unit(c[j]), x[4 * j + 3] = hs_unit(d[j]);
}

#define HS_BODY "cpu_head_body.h"
#include "cpu_levels.h"

#define POINT_OPS(X) \
  X(embed, embed) X(embed_bwd, embed_bwd) X(rmsnorm, rmsnorm) X(rmsnorm_bwd, rmsnorm_bwd) X(gatednorm, gatednorm) \
  X(gatednorm_bwd, gatednorm_bwd) X(vec_copy, vec) X(vec_add, vec) X(swiglu, swiglu) X(swiglu_bwd, swiglu_bwd) X(gather, gather) \
  X(gather_bwd, gather) X(lmhead, lmhead) X(lmhead_bwd, lmhead_bwd) X(sample, sample) X(lmhead_sample, lmhead_sample) X(sumsq, sumsq)

#define X(op, args) \
  static hs_status run_##op(const void* p) { \
    const hs_##args##_args* a = p; \
    HS_NEED_DTYPE(a); \
    return HS_PICK(op, a->dtype)(a); \
  }
POINT_OPS(X)
#undef X

#define SEQ_OPS(X) \
  X(convgate) X(convgate_bwd) X(gdn) X(gdn_bwd) X(convgate_step) X(gdn_step) X(attnprep) X(attnprep_bwd) X(attn) X(attn_bwd) \
  X(gate) X(gate_bwd) X(kv_write) X(attn_paged) X(gemm) X(gemm_group) X(adamw)
#define X(op) \
  static hs_status run_##op(const void* p) { return hs_cpu_##op(p); } \
  static int64_t ws_##op(const void* p) { return hs_cpu_##op##_ws(p); }
SEQ_OPS(X)
#undef X

static int64_t ws_gemm_swiglu(const void* p) {
  const hs_gemm_swiglu_args* a = p;
  return a->M > 0 && a->N > 0 ? hs_align(a->M * a->N * hs_sizeof(a->dtype)) : 0;
}
static hs_status run_gemm_swiglu(const void* p) {
  const hs_gemm_swiglu_args* a = p;
  HS_NEED(a->gate && a->up && a->x && a->h, "x, gate, up and h are required");
  HS_NEED_WS(a, ws_gemm_swiglu(a));
  const hs_gemm_args gate = {a->dtype, HS_TRANS_B, a->M, a->N, a->K, a->x, a->ldx, a->gate, a->ldw, a->h, a->N, 0, 0};
  const hs_gemm_args up = {a->dtype, HS_TRANS_B, a->M, a->N, a->K, a->x, a->ldx, a->up, a->ldw, a->ws, a->N, 0, 0};
  const hs_swiglu_args act = {a->dtype, 0, a->M * a->N, a->h, a->ws, a->h};
  hs_status st = hs_cpu_gemm(&gate);
  if (st == HS_OK) st = hs_cpu_gemm(&up);
  return st == HS_OK ? run_swiglu(&act) : st;
}

static hs_status run_slot_copy(const void* p) { return slot_copy(p); }

static int64_t ws_rmsnorm_bwd(const void* p) {
  const hs_rmsnorm_bwd_args* a = p;
  return a->T > 0 && a->D > 0 ? norm_bwd_ws(a->T, a->D, a->dtype) : 0;
}
static int64_t ws_gatednorm_bwd(const void* p) {
  const hs_gatednorm_bwd_args* a = p;
  return a->T > 0 && a->dv > 0 ? norm_bwd_ws(a->T, a->dv, a->dtype) : 0;
}
static int64_t ws_lmhead(const void* p) {
  const hs_lmhead_args* a = p;
  return a->N > 0 && a->D > 0 && a->V > 0 && a->chunk > 0 ? head_ws(a->N, a->D, a->vocab_valid, a->chunk, a->dtype, 1) : 0;
}
static int64_t ws_lmhead_bwd(const void* p) {
  const hs_lmhead_bwd_args* a = p;
  return a->N > 0 && a->D > 0 && a->V > 0 && a->chunk > 0 ? head_ws(a->N, a->D, a->vocab_valid, a->chunk, a->dtype, 2) : 0;
}
static int64_t ws_lmhead_sample(const void* p) {
  const hs_lmhead_sample_args* a = p;
  return a->B > 0 && a->V > 0 ? hs_align(a->B * a->V * hs_sizeof(a->dtype)) : 0;
}
static int64_t ws_sumsq(const void* p) {
  const hs_sumsq_args* a = p;
  return a->n > 0 ? HS_CEIL(a->n, SUMSQ_BLOCK) * (int64_t)sizeof(double) : 0;
}

static const struct {
  const char* name;
  hs_status (*run)(const void*);
  int64_t (*ws)(const void*);   // 0 = none
} ops[HS_NUM_OPS] = {
  [HS_OP_EMBED] = {"embed", run_embed, 0}, [HS_OP_EMBED_BWD] = {"embed_bwd", run_embed_bwd, 0},
  [HS_OP_RMSNORM] = {"rmsnorm", run_rmsnorm, 0}, [HS_OP_RMSNORM_BWD] = {"rmsnorm_bwd", run_rmsnorm_bwd, ws_rmsnorm_bwd},
  [HS_OP_GATEDNORM] = {"gatednorm", run_gatednorm, 0}, [HS_OP_GATEDNORM_BWD] = {"gatednorm_bwd", run_gatednorm_bwd, ws_gatednorm_bwd},
  [HS_OP_GEMM] = {"gemm", run_gemm, ws_gemm}, [HS_OP_COPY] = {"copy", run_vec_copy, 0}, [HS_OP_ADD] = {"add", run_vec_add, 0},
  [HS_OP_CONVGATE] = {"convgate", run_convgate, ws_convgate}, [HS_OP_CONVGATE_BWD] = {"convgate_bwd", run_convgate_bwd, ws_convgate_bwd},
  [HS_OP_GDN] = {"gdn", run_gdn, ws_gdn}, [HS_OP_GDN_BWD] = {"gdn_bwd", run_gdn_bwd, ws_gdn_bwd},
  [HS_OP_CONVGATE_STEP] = {"convgate_step", run_convgate_step, ws_convgate_step}, [HS_OP_GDN_STEP] = {"gdn_step", run_gdn_step, ws_gdn_step},
  [HS_OP_ATTNPREP] = {"attnprep", run_attnprep, ws_attnprep}, [HS_OP_ATTNPREP_BWD] = {"attnprep_bwd", run_attnprep_bwd, ws_attnprep_bwd},
  [HS_OP_ATTN] = {"attn", run_attn, ws_attn}, [HS_OP_ATTN_BWD] = {"attn_bwd", run_attn_bwd, ws_attn_bwd},
  [HS_OP_GATE] = {"gate", run_gate, ws_gate}, [HS_OP_GATE_BWD] = {"gate_bwd", run_gate_bwd, ws_gate_bwd},
  [HS_OP_KV_WRITE] = {"kv_write", run_kv_write, ws_kv_write}, [HS_OP_ATTN_PAGED] = {"attn_paged", run_attn_paged, ws_attn_paged},
  [HS_OP_SLOT_COPY] = {"slot_copy", run_slot_copy, 0}, [HS_OP_SWIGLU] = {"swiglu", run_swiglu, 0},
  [HS_OP_SWIGLU_BWD] = {"swiglu_bwd", run_swiglu_bwd, 0}, [HS_OP_GATHER] = {"gather", run_gather, 0},
  [HS_OP_GATHER_BWD] = {"gather_bwd", run_gather_bwd, 0}, [HS_OP_LMHEAD] = {"lmhead", run_lmhead, ws_lmhead},
  [HS_OP_LMHEAD_BWD] = {"lmhead_bwd", run_lmhead_bwd, ws_lmhead_bwd}, [HS_OP_SAMPLE] = {"sample", run_sample, 0},
  [HS_OP_ADAMW] = {"adamw", run_adamw, 0}, [HS_OP_SUMSQ] = {"sumsq", run_sumsq, ws_sumsq},
  [HS_OP_LMHEAD_SAMPLE] = {"lmhead_sample", run_lmhead_sample, ws_lmhead_sample},
  [HS_OP_GEMM_GROUP] = {"gemm_group", run_gemm_group, ws_gemm_group}, [HS_OP_GEMM_SWIGLU] = {"gemm_swiglu", run_gemm_swiglu, ws_gemm_swiglu},
};

// ---- table ----

struct hs_stream { int unused; };

static hs_stream* stream_create(void* native) {
  (void)native;
  return calloc(1, sizeof(hs_stream));
}
static void stream_destroy(hs_stream* s) { free(s); }
static hs_status stream_sync(hs_stream* s) {
  (void)s;
  return HS_OK;
}

static hs_status no_graphs(void) { return hs_fail(HS_ERR_UNSUPPORTED, "graphs exist on cuda and emu, not on the cpu"); }
static hs_status graph_begin(hs_stream* s) { return (void)s, no_graphs(); }
static hs_status graph_end(hs_stream* s, hs_graph** out, int64_t* nodes) { return (void)s, *out = 0, *nodes = 0, no_graphs(); }
static hs_status graph_launch(hs_stream* s, hs_graph* g) { return (void)s, (void)g, no_graphs(); }
static void graph_destroy(hs_graph* g) { (void)g; }

static hs_status host_alloc(int64_t bytes, void** out) {
  HS_NEED(bytes > 0, "host memory: %lld bytes", (long long)bytes);
  *out = aligned_alloc(64, (size_t)HS_CEIL(bytes, 64) * 64);
  if (!*out) return hs_fail(HS_ERR_DEVICE, "out of host memory for %lld bytes", (long long)bytes);
  memset(*out, 0, (size_t)bytes);
  return HS_OK;
}
static void host_free(void* p) { free(p); }

static int64_t workspace(int32_t op, const void* args) {
  if (op < 0 || op >= HS_NUM_OPS || !args || !ops[op].ws) return 0;
  return ops[op].ws(args);
}

static hs_status run(hs_stream* s, int32_t op, const void* args) {
  (void)s;
  HS_NEED(op >= 0 && op < HS_NUM_OPS, "run: op %d, want 0..%d", (int)op, HS_NUM_OPS - 1);
  HS_NEED(args, "%s: no arguments", ops[op].name);
  error_text[0] = 0;
  const uint32_t mode = flush_on();
  hs_status st = ops[op].run(args);
  flush_restore(mode);
  if (st != HS_OK) {
    char text[sizeof error_text];
    memcpy(text, error_text, sizeof text);
    hs_fail(st, "%s: %.480s", ops[op].name, text[0] ? text : "failed");
  }
  return st;
}

const hs_api* hs_get_api(uint32_t version) {
  static const hs_api api = {
    .size = sizeof(hs_api), .version = HS_ABI_VERSION, .name = "cpu", .build_info = build_info, .last_error = last_error, .configure = configure,
    .stream_create = stream_create, .stream_destroy = stream_destroy, .stream_sync = stream_sync, .workspace = workspace, .run = run,
    .graph_begin = graph_begin, .graph_end = graph_end, .graph_launch = graph_launch, .graph_destroy = graph_destroy,
    .host_alloc = host_alloc, .host_free = host_free,
  };
  return version == HS_ABI_VERSION ? &api : 0;
}
