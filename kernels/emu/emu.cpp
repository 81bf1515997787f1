// emu.cpp - runs the kernels of libhs_emu.so: fibers, barriers, warp collectives, shared memory, faults. Interface: shim.h.
//
// One launch at a time in the process. A block's fibers share a pool of stacks: a thread that ends without waiting hands its stack to
// the next one, so kernels without barriers never switch. What a GPU leaves undefined is a fault here, and a fault names the kernel,
// the block, the thread and the line: a barrier that not all threads reach at one line, a collective whose mask names threads that
// have left, an address outside every buffer (SIGSEGV), shared memory written past its end.
#include "emu.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>

extern "C" {
#include "../abi.h"
}

#if !defined(__x86_64__) || defined(HS_EMU_UCONTEXT)
#define UCONTEXT 1
#include <ucontext.h>
#endif

static const unsigned max_threads = 1024, max_warps = 32, num_barriers = 16, max_copies = 128;
static const size_t stack_bytes = 128 << 10, page = 4096;   // a page below each stack is never mapped
static const size_t shared_bytes = 227 << 10, static_limit = 48 << 10, redzone = 16;
static const uint32_t poison_word = 0xffa5ffa5u;             // a signalling NaN as f32 and, twice, as bf16

struct copy { void* dst; const void* src; int bytes, valid, group; };
struct group { uint32_t mask, arrived; hs_emu_resolve fn; const char* what; hs_emu_at at; };
struct barrier { unsigned arrived, want, waiting[max_warps]; const char* what; hs_emu_at at; };
struct warp {
  uint32_t exists, runnable, exited;
  unsigned ngroups;
  group groups[32];
  hs_emu_thread* lanes[32];
};

hs_emu_thread* hs_emu_cur;
uint3 hs_emu_block;
dim3 hs_emu_block_dim, hs_emu_grid_dim;
char* hs_emu_dynamic;
char hs_emu_error[512];

static pthread_mutex_t launch_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
  hs_emu_thread threads[max_threads];
  copy copies[max_threads][max_copies];
  warp warps[max_warps];
  barrier barriers[num_barriers];
  int free_stacks[max_threads];
  char* stacks;
  char* shared;        // static part grows up from here; the dynamic part ends at a guard page
  size_t used;
  hs_emu_site* sites[256];
  size_t site_bytes[256];
  unsigned nsites, nfree, nthreads, nwarps, nexited, live_warps;
  uint64_t serial, rng;
  const char* kernel;
  void (*thunk)(void*);
  void* ctx;
  void* main_sp;
  bool failed;
  sigjmp_buf fault;
  pthread_t owner;
} E;
static struct {
  enum { FORWARD, REVERSE, RANDOM } order;
  uint64_t seed;
  bool poison;
} opt;
static struct sigaction old_segv, old_bus;

// ---- context switch ----

#ifdef UCONTEXT
static ucontext_t contexts[max_threads + 1];   // by stack; the last is the scheduler's
static void switch_to(void** save, void* to) {
  ucontext_t* from = hs_emu_cur && save != &E.main_sp ? (ucontext_t*)*save : &contexts[max_threads];
  swapcontext(from, (ucontext_t*)to);
}
#else
extern "C" void hs_emu_switch(void** save, void* to);
asm(R"(
.text
.globl hs_emu_switch
.hidden hs_emu_switch
.type hs_emu_switch,@function
hs_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hs_emu_switch, .-hs_emu_switch
)");
#define switch_to hs_emu_switch
#endif

static void fiber_main();

// Stacks are shifted against each other so that the hot frames of a warp's fibers do not fall into the same cache sets.
static void* fresh_stack(int stack) {
  char* base = E.stacks + (size_t)stack * (stack_bytes + page) + page;
  char* top = base + stack_bytes - (size_t)(stack & 31) * 1088;
#ifdef UCONTEXT
  ucontext_t* c = &contexts[stack];
  getcontext(c);
  c->uc_stack.ss_sp = base;
  c->uc_stack.ss_size = (size_t)(top - base);
  c->uc_link = 0;
  makecontext(c, fiber_main, 0);
  return c;
#else
  void** sp = (void**)(top - 16);
  *sp = (void*)fiber_main;
  sp -= 6;
  memset(sp, 0, 6 * sizeof *sp);
  return sp;
#endif
}

// ---- scheduling ----

static inline uint32_t next_random() {
  E.rng ^= E.rng << 13, E.rng ^= E.rng >> 7, E.rng ^= E.rng << 17;
  return (uint32_t)(E.rng >> 20);
}
static inline unsigned random_bit(uint32_t m) {
  const unsigned r = next_random() & 31;
  return ((unsigned)__builtin_ctz(m >> r | m << ((32 - r) & 31)) + r) & 31;
}
static inline void set_runnable(warp& w, uint32_t mask) {
  w.runnable |= mask;
  E.live_warps |= 1u << (unsigned)(&w - E.warps);
}
static inline void clear_runnable(const hs_emu_thread* t) {
  warp& w = E.warps[t->warp];
  w.runnable &= ~(1u << t->lane);
  if (!w.runnable) E.live_warps &= ~(1u << t->warp);
}

// The next thread that can run, 0 when none can. Forward and reverse finish what a warp can do before the next warp.
static hs_emu_thread* pick() {
  if (!E.live_warps) return 0;
  const unsigned cw = hs_emu_cur ? hs_emu_cur->warp : 0;
  unsigned w;
  if (opt.order == opt.RANDOM) {
    w = random_bit(E.live_warps);
    return E.warps[w].lanes[random_bit(E.warps[w].runnable)];
  }
  const bool fwd = opt.order == opt.FORWARD;
  if (hs_emu_cur && E.warps[cw].runnable) w = cw;
  else if (fwd) {
    const uint32_t above = hs_emu_cur ? E.live_warps & ~((2u << cw) - 1) : 0;
    w = (unsigned)__builtin_ctz(above ? above : E.live_warps);
  } else {
    const uint32_t below = hs_emu_cur ? E.live_warps & ((1u << cw) - 1) : 0;
    w = 31 - (unsigned)__builtin_clz(below ? below : E.live_warps);
  }
  const uint32_t m = E.warps[w].runnable;
  return E.warps[w].lanes[fwd ? (unsigned)__builtin_ctz(m) : 31 - (unsigned)__builtin_clz(m)];
}

// Leaves the running fiber's stack for thread t's. save = where the running context goes.
static inline void go(void** save, hs_emu_thread* t) {
  hs_emu_cur = t;
  if (t->stack < 0) {
    t->stack = E.free_stacks[--E.nfree];
    t->sp = fresh_stack(t->stack);
  }
  switch_to(save, t->sp);
}

[[noreturn]] static void to_main() {
  void* lost;
#ifdef UCONTEXT
  (void)lost;
  setcontext((ucontext_t*)E.main_sp);
#else
  switch_to(&lost, E.main_sp);
#endif
  abort();
}

static void vreport(const char* fmt, va_list ap) {
  const hs_emu_thread* t = hs_emu_cur;
  char text[400];
  vsnprintf(text, sizeof text, fmt, ap);
  snprintf(hs_emu_error, sizeof hs_emu_error, "kernel %.60s, block (%u,%u,%u), thread (%u,%u,%u): %s", E.kernel, hs_emu_block.x, hs_emu_block.y,
           hs_emu_block.z, t ? t->tid.x : 0, t ? t->tid.y : 0, t ? t->tid.z : 0, text);
  E.failed = true;
}
static void report(const char* fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  vreport(fmt, ap);
  va_end(ap);
}
void hs_emu_fail(const char* fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  vreport(fmt, ap);
  va_end(ap);
  to_main();
}

const char* hs_emu_base_name(const char* path) {
  const char* s = path ? strrchr(path, '/') : 0;
  return s ? s + 1 : path ? path : "?";
}

// Nobody can run and not everybody is done: says who waits where, one line per place (the first thread of each).
[[noreturn]] static void deadlock() {
  char text[360];
  size_t n = 0;
  const hs_emu_thread* seen[4];
  unsigned places = 0, counts[4] = {0, 0, 0, 0};
  for (unsigned i = 0; i < E.nthreads; i++) {
    const hs_emu_thread* t = &E.threads[i];
    if (!t->waits) continue;
    unsigned k = 0;
    while (k < places && (seen[k]->line != t->line || strcmp(seen[k]->waits, t->waits))) k++;
    if (k == places) {
      if (places == 4) continue;
      seen[places++] = t;
    }
    counts[k]++;
  }
  for (unsigned k = 0; k < places && n < sizeof text; k++)
    n += (size_t)snprintf(text + n, sizeof text - n, "%s%u thread%s from (%u,%u,%u) in %s at %s:%d", k ? ", " : "", counts[k], counts[k] == 1 ? "" : "s",
                          seen[k]->tid.x, seen[k]->tid.y, seen[k]->tid.z, seen[k]->waits, hs_emu_base_name(seen[k]->file), seen[k]->line);
  if (n < sizeof text) n += hs_emu_async_waits(text + n, sizeof text - n);
  hs_emu_fail("deadlock: %s; %u of %u threads have left the kernel", n ? text : "no thread can run", E.nexited, E.nthreads);
}

static void wait_here() {
  hs_emu_thread *me = hs_emu_cur, *t = pick();
  if (!t) deadlock();
  go(&me->sp, t);
}

void hs_emu_park(const char* what, hs_emu_at at) {
  hs_emu_thread* t = hs_emu_cur;
  t->waits = what, t->file = at.file, t->line = at.line;
  clear_runnable(t);
  wait_here();
}
void hs_emu_unpark(hs_emu_thread* t) {
  t->waits = 0;
  set_runnable(E.warps[t->warp], 1u << t->lane);
}
void hs_emu_run_now(hs_emu_thread* t) {
  hs_emu_thread* me = hs_emu_cur;
  go(&me->sp, t);
}
hs_emu_thread* hs_emu_thread_at(unsigned i) { return &E.threads[i]; }
unsigned hs_emu_num_threads() { return E.nthreads; }

// Thread t has returned from the kernel.
static void finish(hs_emu_thread* t) {
  warp& w = E.warps[t->warp];
  hs_emu_async_leave(t);
  clear_runnable(t);
  w.exited |= 1u << t->lane;
  E.nexited++;
  if (E.barriers[0].arrived)
    hs_emu_fail("leaves the kernel while %u threads wait in %s at %s:%d: every thread of a block must reach it", E.barriers[0].arrived,
                E.barriers[0].what, hs_emu_base_name(E.barriers[0].at.file), E.barriers[0].at.line);
  for (unsigned i = 0; i < w.ngroups; i++)
    if (w.groups[i].mask >> t->lane & 1)
      hs_emu_fail("leaves the kernel, but lanes %#x of its warp wait for it in %s at %s:%d", w.groups[i].arrived, w.groups[i].what,
                  hs_emu_base_name(w.groups[i].at.file), w.groups[i].at.line);
}

static void fiber_main() {
  for (;;) {
    E.thunk(E.ctx);
    hs_emu_thread* t = hs_emu_cur;
    hs_emu_cp_wait(0);
    finish(t);
    hs_emu_thread* n = pick();
    if (!n) {
      if (E.nexited != E.nthreads) deadlock();
      to_main();
    }
    const int stack = t->stack;
    t->stack = -1;
    if (n->stack < 0) {   // not started yet: goes on with this stack
      n->stack = stack;
      hs_emu_cur = n;
      continue;
    }
    E.free_stacks[E.nfree++] = stack;
#ifdef UCONTEXT
    hs_emu_cur = n;
    setcontext((ucontext_t*)n->sp);
#else
    void* lost;
    go(&lost, n);
#endif
  }
}

// ---- barriers and collectives ----

void hs_emu_barrier(int id, int count, bool wait, const char* what, hs_emu_at at) {
  hs_emu_thread* t = hs_emu_cur;
  if (id < 0 || id >= (int)num_barriers || count < 0 || count % 32 || count > (int)E.nthreads)
    hs_emu_fail("%s at %s:%d: barrier %d for %d threads, want 0..%u and a multiple of 32 up to the block's %u", what, hs_emu_base_name(at.file), at.line, id, count,
                num_barriers - 1, E.nthreads);
  barrier& b = E.barriers[id];
  const unsigned want = count ? (unsigned)count : E.nthreads;
  if (!count && E.nexited)
    hs_emu_fail("%s at %s:%d, but %u threads of the block have left the kernel", what, hs_emu_base_name(at.file), at.line, E.nexited);
  if (!b.arrived) b.want = want, b.what = what, b.at = at;
  if (b.want != want || (!count && b.at.line != at.line))
    hs_emu_fail("divergence: %s at %s:%d while %u threads wait in %s at %s:%d", what, hs_emu_base_name(at.file), at.line, b.arrived, b.what, hs_emu_base_name(b.at.file),
                b.at.line);
  if (++b.arrived == b.want) {
    b.arrived = 0;
    for (unsigned w = 0; w < E.nwarps; w++)
      if (b.waiting[w]) {
        for (uint32_t m = b.waiting[w]; m; m &= m - 1) E.warps[w].lanes[__builtin_ctz(m)]->waits = 0;
        set_runnable(E.warps[w], b.waiting[w]);
        b.waiting[w] = 0;
      }
    return;
  }
  if (!wait) return;
  b.waiting[t->warp] |= 1u << t->lane;
  hs_emu_park(what, at);
}

void hs_emu_collective(const char* what, uint32_t mask, void* payload, hs_emu_resolve fn, hs_emu_at at) {
  hs_emu_thread* t = hs_emu_cur;
  warp& w = E.warps[t->warp];
  if (!(mask >> t->lane & 1)) hs_emu_fail("%s at %s:%d: mask %#x lacks the calling lane %u", what, hs_emu_base_name(at.file), at.line, mask, t->lane);
  if (mask & (w.exited | ~w.exists))
    hs_emu_fail("%s at %s:%d: mask %#x names lanes %#x, which have left the kernel or do not exist", what, hs_emu_base_name(at.file), at.line, mask,
                mask & (w.exited | ~w.exists));
  unsigned i = 0;
  while (i < w.ngroups && w.groups[i].mask != mask) i++;
  if (i == w.ngroups) w.groups[w.ngroups++] = {mask, 0, fn, what, at};
  group& g = w.groups[i];
  if (g.fn != fn || g.at.line != at.line)
    hs_emu_fail("divergence: %s at %s:%d while lanes %#x of its warp wait in %s at %s:%d", what, hs_emu_base_name(at.file), at.line, g.arrived, g.what,
                hs_emu_base_name(g.at.file), g.at.line);
  g.arrived |= 1u << t->lane;
  t->payload = payload;
  if (g.arrived == mask) {
    fn(w.lanes, mask);
    w.groups[i] = w.groups[--w.ngroups];
    for (uint32_t m = mask; m; m &= m - 1) w.lanes[__builtin_ctz(m)]->waits = 0;
    set_runnable(w, mask);
    return;
  }
  hs_emu_park(what, at);
}

void hs_emu_shfl_resolve(hs_emu_thread* const* lanes, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    hs_emu_shfl* p = (hs_emu_shfl*)lanes[__builtin_ctz(m)]->payload;
    const bool active = mask >> p->src & 1;   // reading a lane outside the mask is undefined on a GPU
    p->out = active ? ((hs_emu_shfl*)lanes[p->src]->payload)->v : (uint64_t)poison_word << 32 | poison_word;
  }
}
void hs_emu_ballot_resolve(hs_emu_thread* const* lanes, uint32_t mask) {
  uint32_t r = 0;
  for (uint32_t m = mask; m; m &= m - 1) r |= ((hs_emu_vote*)lanes[__builtin_ctz(m)]->payload)->in << __builtin_ctz(m);
  for (uint32_t m = mask; m; m &= m - 1) ((hs_emu_vote*)lanes[__builtin_ctz(m)]->payload)->out = r;
}

// ---- PTX: mma.sync.m16n8k16, ldmatrix, cp.async (fragment layouts: PTX ISA 9.7.14/9.7.15) ----

struct mma_regs { float* d; const uint32_t *a, *b; const float* c; };
static inline float bf(uint32_t reg, int hi) { return __uint_as_float(hi ? reg & 0xffff0000u : reg << 16); }

static void mma_resolve(hs_emu_thread* const* lanes, uint32_t) {
  float A[16][16], B[16][8], C[16][8];
  for (int l = 0; l < 32; l++) {
    const mma_regs* p = (const mma_regs*)lanes[l]->payload;
    const int g = l >> 2, t = l & 3;
    for (int i = 0; i < 4; i++)
      for (int h = 0; h < 2; h++) A[g + 8 * (i & 1)][2 * t + h + 8 * (i >> 1)] = bf(p->a[i], h);
    for (int i = 0; i < 2; i++)
      for (int h = 0; h < 2; h++) B[2 * t + h + 8 * i][g] = bf(p->b[i], h);
    for (int i = 0; i < 4; i++) C[g + 8 * (i >> 1)][2 * t + (i & 1)] = p->c[i];
  }
  for (int k = 0; k < 16; k++)
    for (int i = 0; i < 16; i++)
      for (int j = 0; j < 8; j++) C[i][j] += A[i][k] * B[k][j];
  for (int l = 0; l < 32; l++) {
    const mma_regs* p = (const mma_regs*)lanes[l]->payload;
    for (int i = 0; i < 4; i++) p->d[i] = C[(l >> 2) + 8 * (i >> 1)][2 * (l & 3) + (i & 1)];
  }
}
void hs_emu_mma(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4], hs_emu_at at) {
  mma_regs p = {d, a, b, c};
  hs_emu_collective("mma.sync", 0xffffffffu, &p, mma_resolve, at);
}

struct ldm_regs { uint32_t* r; const void* row; int n; bool trans; };
static void ldm_resolve(hs_emu_thread* const* lanes, uint32_t) {
  const ldm_regs* first = (const ldm_regs*)lanes[0]->payload;
  for (int i = 0; i < first->n; i++)
    for (int l = 0; l < 32; l++) {
      uint16_t e[2];
      for (int h = 0; h < 2; h++) {
        const int row = first->trans ? 2 * (l & 3) + h : l >> 2, col = first->trans ? l >> 2 : 2 * (l & 3) + h;
        e[h] = ((const uint16_t*)((const ldm_regs*)lanes[8 * i + row]->payload)->row)[col];
      }
      ((const ldm_regs*)lanes[l]->payload)->r[i] = e[0] | (uint32_t)e[1] << 16;
    }
}
void hs_emu_ldmatrix(uint32_t* r, int n, bool trans, const void* row, hs_emu_at at) {
  if ((int)hs_emu_cur->lane < 8 * n && (uintptr_t)row & 15) hs_emu_fail("ldmatrix at %s:%d: row address %p is not 16-byte aligned", hs_emu_base_name(at.file), at.line, row);
  ldm_regs p = {r, row, n, trans};
  hs_emu_collective("ldmatrix", 0xffffffffu, &p, ldm_resolve, at);
}

// Copies arrive when the thread waits for them, so that a missing wait reads old data.
void hs_emu_cp_async(void* dst, const void* src, int bytes, int valid) {
  hs_emu_thread* t = hs_emu_cur;
  if ((uintptr_t)dst % (unsigned)bytes || (uintptr_t)src % (unsigned)bytes) hs_emu_fail("cp.async of %d bytes from %p to %p: not aligned", bytes, src, dst);
  if (t->ncopies == (int)max_copies) hs_emu_fail("more than %u cp.async in flight in one thread", max_copies);
  E.copies[t->linear][t->ncopies++] = {dst, src, bytes, valid, t->ngroups};
}
void hs_emu_cp_commit() { hs_emu_cur->ngroups++; }
void hs_emu_cp_wait(int groups) {
  hs_emu_thread* t = hs_emu_cur;
  int kept = 0;
  copy* q = E.copies[t->linear];
  for (int i = 0; i < t->ncopies; i++) {
    if (groups && q[i].group >= t->ngroups - groups) {
      q[kept++] = q[i];
      continue;
    }
    memcpy(q[i].dst, q[i].src, (size_t)q[i].valid);
    memset((char*)q[i].dst + q[i].valid, 0, (size_t)(q[i].bytes - q[i].valid));
  }
  t->ncopies = kept;
}

// ---- shared memory ----

void hs_emu_fill_poison(void* p, size_t n) {
  for (size_t i = 0; i + 4 <= n; i += 4) memcpy((char*)p + i, &poison_word, 4);
}

void* hs_emu_shared(hs_emu_site* s, size_t bytes) {
  if (s->serial == E.serial) return s->at;
  const size_t at = (E.used + 15) & ~(size_t)15, room = (bytes + 15) & ~(size_t)15;
  if (at + room + redzone > static_limit || E.nsites == sizeof E.sites / sizeof *E.sites)
    hs_emu_fail("static shared memory past %zu bytes", static_limit);
  s->serial = E.serial;
  s->at = E.shared + at;
  if (opt.poison) hs_emu_fill_poison(s->at, room);
  memset(E.shared + at + bytes, 0x5a, room - bytes + redzone);
  E.sites[E.nsites] = s;
  E.site_bytes[E.nsites++] = bytes;
  E.used = at + room + redzone;
  return s->at;
}

static void check_redzones() {
  for (unsigned i = 0; i < E.nsites; i++)
    for (const char *p = (const char*)E.sites[i]->at + E.site_bytes[i], *end = p + redzone; p < end; p++)
      if (*p != 0x5a) {
        report("shared memory written %zu bytes past the end of an array of %zu bytes", (size_t)(p - end) + redzone, E.site_bytes[i]);
        return;
      }
}

// ---- launch ----

static void on_fault(int sig, siginfo_t* info, void* uc) {
  if (E.kernel && pthread_equal(E.owner, pthread_self())) {
    const char* a = (const char*)info->si_addr;
    const bool stack = a >= E.stacks && a < E.stacks + max_threads * (stack_bytes + page);
    if (stack) report("stack overflow: a thread has %zu KB here", stack_bytes >> 10);
    else report("access outside every buffer, address %p", (const void*)a);
    siglongjmp(E.fault, 1);
  }
  const struct sigaction* old = sig == SIGSEGV ? &old_segv : &old_bus;
  if (old->sa_flags & SA_SIGINFO) old->sa_sigaction(sig, info, uc);
  else if (old->sa_handler == SIG_DFL || old->sa_handler == SIG_IGN) sigaction(sig, old, 0);   // happens again, with the default action
  else old->sa_handler(sig);
}

static bool map_memory() {
  if (E.stacks) return true;
  const size_t stacks = max_threads * (stack_bytes + page), shared = (shared_bytes + page) & ~(page - 1);
  char* s = (char*)mmap(0, stacks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  char* m = (char*)mmap(0, static_limit + shared + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (s == MAP_FAILED || m == MAP_FAILED) return false;
  for (unsigned i = 0; i < max_threads; i++) mprotect(s + i * (stack_bytes + page), page, PROT_NONE);
  mprotect(m + static_limit + shared, page, PROT_NONE);
  E.stacks = s;
  E.shared = m;
  return true;
}

char* hs_emu_shared_end() { return E.shared + static_limit + ((shared_bytes + page) & ~(page - 1)); }

static void run_block(size_t smem) {
  const size_t room = (smem + 15) & ~(size_t)15;
  hs_emu_async_start();
  E.serial++;
  E.used = 0, E.nsites = 0, E.nexited = 0, E.live_warps = 0;
  hs_emu_dynamic = hs_emu_shared_end() - room;
  if (opt.poison) hs_emu_fill_poison(hs_emu_dynamic, room);
  E.rng = (opt.seed + 1) * 0x9e3779b97f4a7c15u ^ E.serial;
  if (!E.rng) E.rng = 1;
  E.nfree = max_threads;
  for (unsigned i = 0; i < max_threads; i++) E.free_stacks[i] = (int)(max_threads - 1 - i);
  memset(E.barriers, 0, sizeof E.barriers);
  for (unsigned w = 0; w < E.nwarps; w++) {
    warp& x = E.warps[w];
    const unsigned left = E.nthreads - 32 * w;
    x.exists = left >= 32 ? 0xffffffffu : (1u << left) - 1;
    x.exited = 0, x.ngroups = 0, x.runnable = 0;
    set_runnable(x, x.exists);
  }
  for (unsigned i = 0; i < E.nthreads; i++) {
    hs_emu_thread* t = &E.threads[i];
    t->stack = -1, t->waits = 0, t->ncopies = 0, t->ngroups = 0;
  }
  hs_emu_cur = 0;
  hs_emu_thread* first = pick();
#ifdef UCONTEXT
  E.main_sp = &contexts[max_threads];
#endif
  go(&E.main_sp, first);
  if (!E.failed) {
    hs_emu_cur = 0;
    check_redzones();
    if (const char* wrong = hs_emu_async_end()) report("%s", wrong);
  }
}

int hs_emu_launch(const char* kernel, dim3 g, dim3 b, size_t smem, void (*thunk)(void*), void* ctx) {
  const uint64_t threads = (uint64_t)b.x * b.y * b.z;
  if (!threads || threads > max_threads || b.z > 64 || g.y > 65535 || g.z > 65535 || g.x > 0x7fffffffu || smem > shared_bytes) {
    snprintf(hs_emu_error, sizeof hs_emu_error, "kernel %.60s: grid (%u,%u,%u), block (%u,%u,%u), %zu bytes of shared memory: past a device's limits", kernel,
             g.x, g.y, g.z, b.x, b.y, b.z, smem);
    return HS_ERR_DEVICE;
  }
  if (!g.x || !g.y || !g.z) return HS_OK;
  pthread_mutex_lock(&launch_lock);
  if (!map_memory()) {
    snprintf(hs_emu_error, sizeof hs_emu_error, "kernel %.60s: no memory for stacks", kernel);
    pthread_mutex_unlock(&launch_lock);
    return HS_ERR_DEVICE;
  }
  E.kernel = kernel, E.thunk = thunk, E.ctx = ctx, E.failed = false, E.owner = pthread_self();
  E.nthreads = (unsigned)threads, E.nwarps = (E.nthreads + 31) / 32;
  hs_emu_block_dim = b, hs_emu_grid_dim = g;
  for (unsigned i = 0; i < E.nthreads; i++) {
    hs_emu_thread* t = &E.threads[i];
    t->tid = {i % b.x, i / b.x % b.y, i / (b.x * b.y)};
    t->linear = i, t->lane = i & 31, t->warp = i >> 5;
    E.warps[t->warp].lanes[t->lane] = t;
  }
  struct sigaction sa = {};
  sa.sa_sigaction = on_fault;
  sa.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &sa, &old_segv);
  sigaction(SIGBUS, &sa, &old_bus);
  if (!sigsetjmp(E.fault, 0)) {
    const uint64_t blocks = (uint64_t)g.x * g.y * g.z;
    for (uint64_t i = 0; i < blocks && !E.failed; i++) {
      const uint64_t n = opt.order == opt.REVERSE ? blocks - 1 - i : i;
      hs_emu_block = {(unsigned)(n % g.x), (unsigned)(n / g.x % g.y), (unsigned)(n / g.x / g.y)};
      run_block(smem);
    }
  }
  E.kernel = 0;
  sigaction(SIGSEGV, &old_segv, 0);
  sigaction(SIGBUS, &old_bus, 0);
  const bool failed = E.failed;
  pthread_mutex_unlock(&launch_lock);
  return failed ? HS_ERR_DEVICE : HS_OK;
}

bool hs_emu_configure(const char* key, const char* value) {
  pthread_mutex_lock(&launch_lock);
  bool ok = true;
  char* end;
  if (!strcmp(key, "poison") && !strcmp(value, "on")) opt.poison = true;
  else if (!strcmp(key, "poison") && !strcmp(value, "off")) opt.poison = false;
  else if (strcmp(key, "fiber_order")) ok = false;
  else if (!strcmp(value, "forward")) opt.order = opt.FORWARD;
  else if (!strcmp(value, "reverse")) opt.order = opt.REVERSE;
  else if (!strncmp(value, "random:", 7) && value[7] && (opt.seed = strtoull(value + 7, &end, 10), !*end)) opt.order = opt.RANDOM;
  else ok = false;
  pthread_mutex_unlock(&launch_lock);
  return ok;
}
