// hopper.cuh - what sm_90 adds and the products use: mbarriers, tensor copies by TMA, warpgroup products (wgmma). Raw asm, like common.cuh.
// Sections are those of the PTX ISA 9.0. Device code that uses it stands inside #if HS_HOPPER; the kernel for other
// architectures has an empty body and is never launched.
//
// Tiles lie in shared memory as TMA writes them with 128-byte swizzle: lines of 64 bf16 (128 bytes), 8 lines to a pattern of 1024 bytes that
// starts at a multiple of 1024; the 16-byte piece c of line r lies at piece c ^ (r % 8). wgmma undoes it (9.7.15.5.1.2).
//
// The emulator (emu/async.cpp) makes the least of every promise: a copy poisons its destination when it is issued and arrives when a thread
// waits for it; accumulators are poisoned by the first product of a chain and hold its sum after the wait. Wrong byte counts, descriptors
// outside shared memory, unaligned addresses, and copies or products in flight at a kernel's end are faults.
#ifndef HS_HOPPER_CUH
#define HS_HOPPER_CUH
#include "common.cuh"

#ifdef HS_EMU
#define HS_HOPPER 1
typedef hs_emu_map hs_tma;
static inline unsigned hs_smem(const void* p) { return hs_emu_smem(p); }
#else
#include <cuda.h>
typedef CUtensorMap hs_tma;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define HS_HOPPER 1
#else
#define HS_HOPPER 0
#endif
#endif

// ---- host side (hopper.cu) ----

// Multiprocessors of the current device when it has wgmma, else 0. The emulator has 4.
int hs_hopper_sms();
// m = the matrix of bf16 at base: rows of cols elements, ld elements apart; base and ld*2 multiples of 16 bytes. A copy moves boxes of box_rows
// lines of 64 elements; elements outside the matrix arrive as zeros and are not read.
hs_status hs_tma_matrix(hs_tma* m, const void* base, int64_t rows, int64_t cols, int64_t ld, int box_rows);

// ---- mbarrier.init, .arrive, .try_wait: a phase completes when `count` arrivals and all expected bytes are in; phases alternate between parity 0 and 1 ----

static __device__ __forceinline__ void mbar_init(uint64_t* bar, unsigned count HS_PTX_AT) {
#ifdef HS_EMU
  hs_emu_mbar_init(bar, count, at);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(hs_smem(bar)), "r"(count) : "memory");
#endif
}
// Makes this thread's writes to shared memory, mbar_init among them, visible to copies and products; then a __syncthreads.
static __device__ __forceinline__ void fence_proxy_async() {
#ifdef HS_EMU
  hs_emu_fence_proxy();
#else
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}
static __device__ __forceinline__ void mbar_arrive(uint64_t* bar HS_PTX_AT) {
#ifdef HS_EMU
  hs_emu_mbar_arrive(bar, 0, at);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(hs_smem(bar)) : "memory");
#endif
}
// Arrives, and adds bytes that copies will bring to those the phase waits for.
static __device__ __forceinline__ void mbar_arrive_expect(uint64_t* bar, unsigned bytes HS_PTX_AT) {
#ifdef HS_EMU
  hs_emu_mbar_arrive(bar, bytes, at);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(hs_smem(bar)), "r"(bytes) : "memory");
#endif
}
// Waits until the phase of this parity has completed. The first phase has parity 0; a fresh barrier's parity 1 counts as completed.
static __device__ __forceinline__ void mbar_wait(uint64_t* bar, unsigned parity HS_PTX_AT) {
#ifdef HS_EMU
  hs_emu_mbar_wait(bar, parity, at);
#else
  unsigned done = 0;
  while (!done)
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(hs_smem(bar)), "r"(parity) : "memory");
#endif
}

// ---- TMA (cp.async.bulk.tensor): starts copying the box at column x, row y of the matrix to dst (128-byte aligned); its bytes arrive at bar ----
static __device__ __forceinline__ void tma_load(void* dst, const hs_tma* m, int x, int y, uint64_t* bar HS_PTX_AT) {
#ifdef HS_EMU
  hs_emu_tma_load(dst, m, x, y, bar, at);
#else
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(hs_smem(dst)), "l"(m), "r"(x), "r"(y), "r"(hs_smem(bar)) : "memory");
#endif
}

// ---- wgmma (9.7.15): D[64, N] (+)= A[64, 16] B[16, N] by the 128 threads of a warpgroup, bf16 from shared memory -> f32 in registers ----

// Matrix descriptor with 128-byte swizzle (9.7.15.5.1.2.2): bits 0-13 address / 16, 16-29 leading and 32-45 stride offset / 16, 62-63 swizzle 1.
// Lines along K ("K-major"): stride = bytes from 8 rows of M (N) to the next 8; leading is not used; 16 further K are 32 bytes on.
// Lines along M or N: stride = bytes from 8 K to the next 8, leading = from 64 of M (N) to the next 64; 16 further K are 2048 bytes on.
static __device__ __forceinline__ uint64_t wgmma_desc(const void* tile, int leading, int stride) {
  return (uint64_t)((hs_smem(tile) & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 | (uint64_t)1 << 62;
}
// The descriptor of what lies so many bytes further.
static __device__ __forceinline__ uint64_t wgmma_desc_at(uint64_t desc, int bytes) { return desc + (uint64_t)(bytes >> 4); }

// Before the first product, and before one whose accumulators this thread has touched.
static __device__ __forceinline__ void wgmma_fence() {
#ifdef HS_EMU
  hs_emu_wgmma_fence();
#else
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
static __device__ __forceinline__ void wgmma_commit() {
#ifdef HS_EMU
  hs_emu_wgmma_commit();
#else
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until at most `groups` committed groups are in flight; before that nobody may touch their accumulators or overwrite their tiles.
template <int groups> static __device__ __forceinline__ void wgmma_wait(HS_PTX_AT_ONLY) {
#ifdef HS_EMU
  hs_emu_wgmma_wait(groups, at);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
#endif
}

// The compiler may not use d before this point: to stand behind the wait for the products that write it, which asm does not tell.
template <int W> static __device__ __forceinline__ void wgmma_arrived(float (&d)[W]) {
#ifndef HS_EMU
#pragma unroll
  for (int i = 0; i < W; i++) asm volatile("" : "+f"(d[i])::"memory");
#else
  (void)d;
#endif
}
// setmaxnreg: a warpgroup takes (more) or gives up registers: n per thread, a multiple of 8, of a block that was started with as many
// in all. Every warp of the warpgroup executes it.
template <int n, bool more> static __device__ __forceinline__ void set_max_registers() {
  static_assert(n % 8 == 0 && n >= 24 && n <= 256, "setmaxnreg takes 24 to 256 in steps of 8");
#ifndef HS_EMU
  if (more) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
#endif
}

#ifndef HS_EMU
#define HS_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define HS_R32 HS_R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define HS_R64 HS_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define HS_R128 HS_R64 \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95" \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define HS_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define HS_D16(i) HS_D8(i), HS_D8(i + 8)
#define HS_D32(i) HS_D16(i), HS_D16(i + 16)
#define HS_D64(i) HS_D32(i), HS_D32(i + 32)
#define HS_D128(i) HS_D64(i), HS_D64(i + 64)
#define HS_WGMMA(n, regs, outs, da, db, sum, ta, tb) \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " sum ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" regs "}, " da ", " db \
               ", p, 1, 1, " ta ", " tb ";\n}" : outs : "l"(a), "l"(b), "r"((int)add), "n"((int)TA), "n"((int)TB))
#endif

// add: to what d holds; otherwise d is only written. TA, TB: lines along M, N instead of K. Thread w*32 + l of the warpgroup holds in
// d[4j + e] row 16 w + l/4 + 8 (e/2), column 8 j + 2 (l%4) + e%2.
template <int N, bool TA, bool TB> static __device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool add HS_PTX_AT) {
  static_assert(N == 32 || N == 64 || N == 128 || N == 256, "the widths in use");
#ifdef HS_EMU
  hs_emu_wgmma(d, N, TA, TB, a, b, add, at);
#else
  if constexpr (N == 32) HS_WGMMA(32, HS_R16, HS_D16(0), "%16", "%17", "%18", "%19", "%20");
  if constexpr (N == 64) HS_WGMMA(64, HS_R32, HS_D32(0), "%32", "%33", "%34", "%35", "%36");
  if constexpr (N == 128) HS_WGMMA(128, HS_R64, HS_D64(0), "%64", "%65", "%66", "%67", "%68");
  if constexpr (N == 256) HS_WGMMA(256, HS_R128, HS_D128(0), "%128", "%129", "%130", "%131", "%132");
#endif
}
#endif
