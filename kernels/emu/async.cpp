// async.cpp - mbarriers, tensor copies and warpgroup products of the emulator. Contract: ../cuda/hopper.cuh.
//
// Everything asynchronous happens as late as a GPU may do it. A copy poisons its destination at once and brings its bytes when all of its phase's
// copies are there and a thread waits. A product runs when its warpgroup waits for it: it reads its tiles then, so a tile that was released too
// early is poison, and until then its accumulators are poison too (unless they held a sum before). A thread that waits for arrivals alone, such
// as for a tile to be released, goes on at the last of them. Products are in order of K, each step rounded to f32. Rows of A that are zero are
// skipped when B is finite: they would add zeros.
#include "emu.h"

#include <cstdarg>

static const unsigned max_bars = 64, max_copies = 256, max_ops = 64, group_threads = 128;
static const uint64_t bar_tag = 0x6d626172ull << 32;   // in the barrier's 8 bytes, with its index

struct mbar {
  unsigned count, pending, phase, waiters;
  int64_t expected, queued;   // bytes of the phase
  bool fenced;
  uint32_t waiting[32];       // lanes by warp
};
struct tma_copy { hs_emu_map m; char* dst; int x, y; unsigned bar; };
struct product { uint64_t a, b; int n, line; bool ta, tb, add; unsigned group, seen; float* acc[group_threads]; };
struct warpgroup {
  product ops[max_ops];
  unsigned issued, done, done_groups, waiting;   // products asked for and done; groups done; threads in the wait
  int wait_line;
  bool cached;                   // sum holds the accumulators at acc
  int n;
  float* acc[group_threads];
  alignas(64) float sum[64][256];
};
struct wg_thread { unsigned issued, group; bool fenced; };

static struct {
  mbar bars[max_bars];
  tma_copy copies[max_copies];
  unsigned nbars, ncopies;
  bool used[8];   // warpgroups with products in this block
  warpgroup groups[8];
  wg_thread threads[1024];
} H;

void hs_emu_async_start() {
  H.nbars = 0, H.ncopies = 0;
  for (unsigned g = 0; g < 8; g++)
    if (H.used[g]) {
      warpgroup& w = H.groups[g];
      w.issued = w.done = w.done_groups = w.waiting = 0, w.cached = false, H.used[g] = false;
      memset(H.threads + group_threads * g, 0, group_threads * sizeof *H.threads);
    }
}
const char* hs_emu_async_end() { return H.ncopies ? "TMA copies are in flight at the end of the block: nobody waited for them" : 0; }
void hs_emu_async_leave(const hs_emu_thread* t) {
  const unsigned g = t->linear / group_threads;
  if (H.used[g] && H.threads[t->linear].issued > H.groups[g].done) hs_emu_fail("leaves the kernel with %u wgmma in flight", H.threads[t->linear].issued - H.groups[g].done);
}
size_t hs_emu_async_waits(char* text, size_t n) {
  size_t at = 0;
  for (unsigned i = 0; i < H.nbars && at < n; i++)
    if (H.bars[i].waiters)
      at += (size_t)snprintf(text + at, n - at, ", mbarrier %u lacks %u of %u arrivals and %lld of %lld bytes", i, H.bars[i].pending, H.bars[i].count,
                             (long long)(H.bars[i].expected - H.bars[i].queued), (long long)H.bars[i].expected);
  return at < n ? at : n;
}

// ---- shared memory addresses ----

static const unsigned window = 256 << 10;
unsigned hs_emu_smem(const void* p) {
  const char *end = hs_emu_shared_end(), *q = (const char*)p;
  if (q < end - window || q >= end) hs_emu_fail("address %p is not one of the block's dynamic shared memory", p);
  return (unsigned)(q - (end - window));
}
// The 16 bytes at a swizzled address.
static inline const uint16_t* swizzled(unsigned at) {
  at = (at ^ (at >> 7 & 7) << 4) & (window - 1);
  const char *end = hs_emu_shared_end(), *p = end - window + at;
  if (p < hs_emu_dynamic) hs_emu_fail("wgmma reads %ld bytes before the block's dynamic shared memory", (long)(hs_emu_dynamic - p));
  return (const uint16_t*)p;
}

// ---- mbarriers and copies ----

static mbar& find(const uint64_t* bar, const char* what, hs_emu_at at) {
  const unsigned i = (unsigned)*bar;
  if ((*bar & ~0xffffffffull) != bar_tag || i >= H.nbars) hs_emu_fail("%s at %s:%d: no mbarrier was made at %p", what, hs_emu_base_name(at.file), at.line, (const void*)bar);
  return H.bars[i];
}
void hs_emu_mbar_init(uint64_t* bar, unsigned count, hs_emu_at at) {
  if ((uintptr_t)bar & 7 || !count || count > 0xfffff) hs_emu_fail("mbarrier.init at %s:%d: address %p, count %u", hs_emu_base_name(at.file), at.line, (void*)bar, count);
  hs_emu_smem(bar);
  if (H.nbars == max_bars) hs_emu_fail("more than %u mbarriers", max_bars);
  *bar = bar_tag | H.nbars;
  H.bars[H.nbars++] = {count, count, 0, 0, 0, 0, false, {}};
}
void hs_emu_fence_proxy() {
  for (unsigned i = 0; i < H.nbars; i++) H.bars[i].fenced = true;
}

// The box's lines, 16 bytes at a time, zeros outside the matrix.
static void deliver(const tma_copy& c) {
  for (int r = 0; r < c.m.box_rows; r++) {
    const int64_t y = (int64_t)c.y + r;
    const char* row = c.m.base + y * c.m.pitch;
    for (int p = 0; p < 8; p++) {
      const int64_t x = (int64_t)c.x + 8 * p;
      char* line = c.dst + 128 * r;
      char* to = line + 16 * (p ^ (int)(hs_emu_smem(line) >> 7 & 7));
      const int64_t n = y < 0 || y >= c.m.rows || x < 0 ? 0 : std::min<int64_t>(8, c.m.cols - x);
      if (n == 8) memcpy(to, row + 2 * x, 16);
      else {
        memset(to, 0, 16);
        if (n > 0) memcpy(to, row + 2 * x, (size_t)(2 * n));
      }
    }
  }
}
// Completes the phase when nothing is missing. Returns one of the threads that waited for it, 0 when none did.
static hs_emu_thread* settle(mbar& b) {
  const unsigned i = (unsigned)(&b - H.bars);
  if (b.pending) return 0;
  if (b.queued > b.expected)
    hs_emu_fail("mbarrier %u: copies bring %lld bytes, %lld were expected", i, (long long)b.queued, (long long)b.expected);
  if (b.expected && (!b.waiters || b.queued < b.expected)) return 0;
  if (b.queued) {
    unsigned kept = 0;
    for (unsigned c = 0; c < H.ncopies; c++) {
      if (H.copies[c].bar == i) deliver(H.copies[c]);
      else if (c != kept++) H.copies[kept - 1] = H.copies[c];
    }
    H.ncopies = kept;
  }
  b.pending = b.count, b.expected = b.queued = 0, b.phase++;
  if (!b.waiters) return 0;
  b.waiters = 0;
  hs_emu_thread* first = 0;
  for (unsigned w = 0; w < 32; w++) {
    for (uint32_t m = b.waiting[w]; m; m &= m - 1) {
      hs_emu_thread* t = hs_emu_thread_at(32 * w + (unsigned)__builtin_ctz(m));
      hs_emu_unpark(t);
      if (!first) first = t;
    }
    b.waiting[w] = 0;
  }
  return first;
}
void hs_emu_mbar_arrive(uint64_t* bar, unsigned bytes, hs_emu_at at) {
  mbar& b = find(bar, "mbarrier.arrive", at);
  if (!b.pending) hs_emu_fail("mbarrier.arrive at %s:%d: all %u arrivals of the phase are in", hs_emu_base_name(at.file), at.line, b.count);
  b.pending--, b.expected += bytes;
  const bool copies = b.expected;
  hs_emu_thread* waited = settle(b);
  if (waited && !copies) hs_emu_run_now(waited);
}
void hs_emu_mbar_wait(uint64_t* bar, unsigned parity, hs_emu_at at) {
  mbar& b = find(bar, "mbarrier.try_wait", at);
  if ((b.phase & 1) != (parity & 1)) return;
  const hs_emu_thread* t = hs_emu_cur;
  b.waiters++;
  settle(b);
  if ((b.phase & 1) != (parity & 1)) return;
  b.waiting[t->warp] |= 1u << t->lane;
  hs_emu_park("mbarrier.try_wait", at);
}
void hs_emu_tma_load(void* dst, const hs_emu_map* m, int x, int y, uint64_t* bar, hs_emu_at at) {
  mbar& b = find(bar, "cp.async.bulk.tensor", at);
  const size_t bytes = (size_t)m->box_rows * 128;
  if (hs_emu_smem(dst) & 127) hs_emu_fail("cp.async.bulk.tensor at %s:%d: destination %p is not 128-byte aligned", hs_emu_base_name(at.file), at.line, dst);
  if ((char*)dst + bytes > hs_emu_shared_end()) hs_emu_fail("cp.async.bulk.tensor at %s:%d: writes past shared memory", hs_emu_base_name(at.file), at.line);
  if (!b.fenced) hs_emu_fail("cp.async.bulk.tensor at %s:%d: no fence.proxy.async since its mbarrier was made", hs_emu_base_name(at.file), at.line);
  if (H.ncopies == max_copies) hs_emu_fail("more than %u TMA copies in flight", max_copies);
  hs_emu_fill_poison(dst, bytes);
  H.copies[H.ncopies++] = {*m, (char*)dst, x, y, (unsigned)(&b - H.bars)};
  b.queued += (int64_t)bytes;
  settle(b);
}

// ---- wgmma ----

typedef float v16 __attribute__((vector_size(64)));

// c[0..16 V) += a[k] b[k][0..16 V), k upwards.
template <int V> static inline __attribute__((always_inline)) void multiply_row(float* c, const float* a, const float (*b)[256]) {
  v16 s[V];
  for (int v = 0; v < V; v++) memcpy(&s[v], c + 16 * v, 64);
  for (int k = 0; k < 16; k++)
    for (int v = 0; v < V; v++) {
      v16 x;
      memcpy(&x, b[k] + 16 * v, 64);
      s[v] += a[k] * x;
    }
  for (int v = 0; v < V; v++) memcpy(c + 16 * v, &s[v], 64);
}
#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
static void multiply(float (*c)[256], const float (*a)[16], const float (*b)[256], const bool* skip, int n) {
  for (int i = 0; i < 64; i++) {
    if (skip[i]) continue;
    int j = 0;
    for (; j + 64 <= n; j += 64) multiply_row<4>(c[i] + j, a[i], (const float (*)[256])&b[0][j]);
    for (; j < n; j += 32) multiply_row<2>(c[i] + j, a[i], (const float (*)[256])&b[0][j]);
  }
}

static inline float widen(uint16_t x) { return __uint_as_float((uint32_t)x << 16); }

// fn(row, k, value) over a tile of `rows` by 16 as its descriptor says.
template <class F> static inline void read_tile(uint64_t desc, int rows, bool along_mn, const F& fn) {
  const unsigned start = (unsigned)(desc & 0x3fff) << 4, leading = (unsigned)(desc >> 16 & 0x3fff) << 4, stride = (unsigned)(desc >> 32 & 0x3fff) << 4;
  if (desc >> 62 != 1 || desc >> 49 & 7) hs_emu_fail("wgmma descriptor %#llx: want swizzle 1 (128 bytes), base offset 0", (unsigned long long)desc);
  if (along_mn) {
    for (int k = 0; k < 16; k++)
      for (int r = 0; r < rows; r += 8) {
        const uint16_t* p = swizzled(start + (unsigned)(r / 64) * leading + (unsigned)(r % 64) * 2 + (unsigned)(k / 8) * stride + (unsigned)(k % 8) * 128);
        for (int e = 0; e < 8; e++) fn(r + e, k, p[e]);
      }
  } else {
    for (int r = 0; r < rows; r++)
      for (int k = 0; k < 16; k += 8) {
        const uint16_t* p = swizzled(start + (unsigned)(r / 8) * stride + (unsigned)(r % 8) * 128 + (unsigned)k * 2);
        for (int e = 0; e < 8; e++) fn(r, k + e, p[e]);
      }
  }
}

// fn(thread, register, row, column) over the accumulator.
template <class F> static inline void each_register(int n, const F& fn) {
  for (int t = 0; t < (int)group_threads; t++)
    for (int i = 0; i < n / 2; i++) fn(t, i, t / 32 * 16 + t % 32 / 4 + 8 * (i >> 1 & 1), 8 * (i / 4) + 2 * (t % 4) + (i & 1));
}
static void put_back(warpgroup& w) {
  if (w.cached) each_register(w.n, [&](int t, int i, int r, int c) { w.acc[t][i] = w.sum[r][c]; });
  w.cached = false;
}
static void run(warpgroup& w, const product& p) {
  static float a[64][16];
  alignas(64) static float b[16][256];
  bool skip[64], finite = true;
  if (!w.cached || w.acc[0] != p.acc[0]) {
    put_back(w);
    memcpy(w.acc, p.acc, sizeof w.acc);
    w.cached = true, w.n = p.n;
    if (p.add) each_register(p.n, [&](int t, int i, int r, int c) { w.sum[r][c] = w.acc[t][i]; });
  }
  if (!p.add)
    for (int i = 0; i < 64; i++) memset(w.sum[i], 0, (size_t)p.n * sizeof(float));
  for (int i = 0; i < 64; i++) skip[i] = true;
  bool zero = true;
  read_tile(p.a, 64, p.ta, [&](int r, int k, uint16_t x) {
    a[r][k] = widen(x);
    if (x & 0x7fff) skip[r] = zero = false;
  });
  read_tile(p.b, p.n, p.tb, [&](int r, int k, uint16_t x) {
    b[k][r] = widen(x);
    if ((x & 0x7f80) == 0x7f80) finite = false;
  });
  if (!finite) memset(skip, 0, sizeof skip);
  else if (zero) return;
  multiply(w.sum, a, b, skip, p.n);
}

static warpgroup& group_of(const char* what, hs_emu_at at) {
  const unsigned g = hs_emu_cur->linear / group_threads;
  if (group_threads * (g + 1) > hs_emu_num_threads()) hs_emu_fail("%s at %s:%d: the block has no whole warpgroup here", what, hs_emu_base_name(at.file), at.line);
  H.used[g] = true;
  return H.groups[g];
}
void hs_emu_wgmma(float* d, int n, bool ta, bool tb, uint64_t a, uint64_t b, bool add, hs_emu_at at) {
  warpgroup& w = group_of("wgmma", at);
  wg_thread& t = H.threads[hs_emu_cur->linear];
  if (!t.fenced) hs_emu_fail("wgmma at %s:%d: no wgmma.fence before", hs_emu_base_name(at.file), at.line);
  if (t.issued - w.done == max_ops) hs_emu_fail("wgmma at %s:%d: more than %u in flight", hs_emu_base_name(at.file), at.line, max_ops);
  product& p = w.ops[t.issued % max_ops];
  if (t.issued++ == w.issued) {
    w.issued++;
    p.a = a, p.b = b, p.n = n, p.line = at.line, p.ta = ta, p.tb = tb, p.add = add, p.group = t.group, p.seen = 0;
  } else if (p.a != a || p.b != b || p.n != n || p.line != at.line || p.add != add || p.group != t.group)
    hs_emu_fail("divergence: wgmma at %s:%d with other operands than its warpgroup's at line %d", hs_emu_base_name(at.file), at.line, p.line);
  p.acc[hs_emu_cur->linear % group_threads] = d;
  p.seen++;
  if (!add) hs_emu_fill_poison(d, (size_t)n * 2);
}
void hs_emu_wgmma_fence() { H.threads[hs_emu_cur->linear].fenced = true; }
void hs_emu_wgmma_commit() { H.threads[hs_emu_cur->linear].group++; }
void hs_emu_wgmma_wait(int groups, hs_emu_at at) {
  warpgroup& w = group_of("wgmma.wait_group", at);
  const wg_thread& t = H.threads[hs_emu_cur->linear];
  const unsigned until = t.group > (unsigned)groups ? t.group - (unsigned)groups : 0;
  if (until <= w.done_groups && w.waiting == 0) return;
  if (w.waiting++ == 0) w.wait_line = at.line;
  if (w.wait_line != at.line) hs_emu_fail("divergence: wgmma.wait_group at %s:%d while its warpgroup waits at line %d", hs_emu_base_name(at.file), at.line, w.wait_line);
  if (w.waiting < group_threads) {
    hs_emu_park("wgmma.wait_group", at);
    return;
  }
  for (; w.done < w.issued && w.ops[w.done % max_ops].group < until; w.done++) {
    const product& p = w.ops[w.done % max_ops];
    if (p.seen != group_threads) hs_emu_fail("wgmma at line %d was reached by %u of %u threads", p.line, p.seen, group_threads);
    run(w, p);
  }
  bool pending = false;
  for (unsigned i = w.done; i < w.issued; i++) pending |= w.ops[i % max_ops].acc[0] == w.acc[0] && w.ops[i % max_ops].add;
  if (!pending) put_back(w);
  w.done_groups = until, w.waiting = 0;
  const unsigned first = hs_emu_cur->linear / group_threads * group_threads;
  for (unsigned i = first; i < first + group_threads; i++)
    if (i != hs_emu_cur->linear) hs_emu_unpark(hs_emu_thread_at(i));
}
