package kernels

/*
#cgo CFLAGS: -O3 -std=c11 -Wall -Wextra -Wno-psabi -Wno-unused-function -Wno-unknown-pragmas
#cgo LDFLAGS: -lpthread -ldl -lm
#cgo noescape hs_shim_run
#cgo nocallback hs_shim_run
#cgo noescape hs_shim_workspace
#cgo nocallback hs_shim_workspace
#cgo noescape hs_shim_copy_in
#cgo nocallback hs_shim_copy_in
#cgo noescape hs_shim_copy_out
#cgo nocallback hs_shim_copy_out

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "abi.h"
#include "abi_layout.h"
#include "optim_math.h"

// The text of a failure is the calling thread's, so it is copied inside the call that failed.
typedef struct { int status; char* text; } hs_result;

static hs_result hs_result_of(const hs_api* api, hs_status st) {
  hs_result r = {st, 0};
  if (st != HS_OK) r.text = strdup(api->last_error());
  return r;
}
static hs_result hs_shim_run(const hs_api* api, uintptr_t stream, int32_t op, const void* args) {
  return hs_result_of(api, api->run((hs_stream*)stream, op, args));
}
static hs_result hs_shim_configure(const hs_api* api, const char* k, const char* v) { return hs_result_of(api, api->configure(k, v)); }
static hs_result hs_shim_sync(const hs_api* api, uintptr_t stream) { return hs_result_of(api, api->stream_sync((hs_stream*)stream)); }
static uintptr_t hs_shim_stream(const hs_api* api, uintptr_t native) { return (uintptr_t)api->stream_create((void*)native); }
static void hs_shim_end_stream(const hs_api* api, uintptr_t stream) { api->stream_destroy((hs_stream*)stream); }

static hs_result hs_shim_graph_begin(const hs_api* api, uintptr_t stream) { return hs_result_of(api, api->graph_begin((hs_stream*)stream)); }
static hs_result hs_shim_graph_end(const hs_api* api, uintptr_t stream, uintptr_t* out, int64_t* nodes) {
  hs_graph* g = 0;
  hs_result r = hs_result_of(api, api->graph_end((hs_stream*)stream, &g, nodes));
  *out = (uintptr_t)g;
  return r;
}
static hs_result hs_shim_graph_launch(const hs_api* api, uintptr_t stream, uintptr_t g) {
  return hs_result_of(api, api->graph_launch((hs_stream*)stream, (hs_graph*)g));
}
static void hs_shim_graph_destroy(const hs_api* api, uintptr_t g) { api->graph_destroy((hs_graph*)g); }
static hs_result hs_shim_host_alloc(const hs_api* api, int64_t n, void** out) { return hs_result_of(api, api->host_alloc(n, out)); }
static void hs_shim_host_free(const hs_api* api, void* p) { api->host_free(p); }
static double hs_shim_now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

// Of cuda/shim/shim.c, which the gpu build links: why there is no NVIDIA driver.
__attribute__((weak)) const char* hs_cu_why(void);
static const char* hs_shim_driver_why(void) { return hs_cu_why ? hs_cu_why() : ""; }
static int64_t hs_shim_workspace(const hs_api* api, int32_t op, const void* args) { return api->workspace(op, args); }
static const char* hs_shim_build(const hs_api* api) { return api->build_info(); }

// The table of the library at path, or a text that says why there is none. A library stays loaded for the life of the process.
static const hs_api* hs_shim_load(const char* path, char* text, size_t n) {
  void* lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!lib) {
    snprintf(text, n, "%s", dlerror());
    return 0;
  }
  const hs_api* (*get)(uint32_t) = (const hs_api* (*)(uint32_t))dlsym(lib, "hs_get_api");
  if (!get) {
    snprintf(text, n, "%s: no hs_get_api", path);
    return 0;
  }
  const hs_api* api = get(HS_ABI_VERSION);
  for (uint32_t v = 1; !api && v < 1000; v++)   // which one it speaks, for the message
    if (v != HS_ABI_VERSION && get(v)) {
      snprintf(text, n, "%s speaks version %u of the interface, this program version %u", path, v, (unsigned)HS_ABI_VERSION);
      return 0;
    }
  if (!api) snprintf(text, n, "%s does not speak version %u of the interface", path, (unsigned)HS_ABI_VERSION);
  return api;
}

static void hs_shim_copy_in(uint64_t dst, const void* src, int64_t n) { memcpy((void*)(uintptr_t)dst, src, (size_t)n); }
static void hs_shim_copy_out(void* dst, uint64_t src, int64_t n) { memcpy(dst, (const void*)(uintptr_t)src, (size_t)n); }
static void hs_shim_fill(uint64_t dst, int64_t n, int v) { memset((void*)(uintptr_t)dst, v, (size_t)n); }

// Memory from here up comes straight from the kernel (zeroed) with huge pages asked for: weights and activations walk fewer pages.
#define HS_MAP_BYTES ((int64_t)4 << 20)
#define HS_HUGE ((int64_t)2 << 20)
// Tests of kernels put each allocation against pages that are not mapped: [bytes of its pages][guard page]. The last byte is at most
// 15 bytes before the guard; what lies around the allocation in its own pages holds a pattern that free checks.
#define HS_PAGE ((int64_t)4096)
#define HS_PATTERN 0x5a
static int64_t hs_guard_pages(int64_t n) { return (n + 15 + HS_PAGE - 1) & ~(HS_PAGE - 1); }
static uint64_t hs_shim_guard_alloc(int64_t n) {
  const int64_t pages = hs_guard_pages(n);
  char* p = mmap(0, (size_t)(pages + 2 * HS_PAGE), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return 0;
  p += HS_PAGE;
  if (mprotect(p, (size_t)pages, PROT_READ | PROT_WRITE)) return 0;
  char* at = p + pages - ((n + 15) & ~(int64_t)15);
  memset(p, HS_PATTERN, (size_t)pages);
  memset(at, 0, (size_t)n);
  return (uint64_t)(uintptr_t)at;
}
// Frees, and returns the distance of the first byte written outside [0, n) (negative = before), or 0.
static int64_t hs_shim_guard_free(uint64_t at, int64_t n) {
  char *a = (char*)(uintptr_t)at, *end = a + ((n + 15) & ~(int64_t)15), *p = end - hs_guard_pages(n);
  int64_t bad = 0;
  for (char* c = end - 1; c >= a + n; c--) if (*c != HS_PATTERN) bad = c - a;
  for (char* c = p; c < a && !bad; c++) if (*c != HS_PATTERN) bad = c - a;
  munmap(p - HS_PAGE, (size_t)(hs_guard_pages(n) + 2 * HS_PAGE));
  return bad;
}
static uint64_t hs_shim_alloc(int64_t n) {
  if (n < HS_MAP_BYTES) {
    void* p = 0;
    n = (n + 63) & ~(int64_t)63;
    if (posix_memalign(&p, 64, (size_t)n)) return 0;
    memset(p, 0, (size_t)n);
    return (uint64_t)(uintptr_t)p;
  }
  n = (n + HS_HUGE - 1) & ~(HS_HUGE - 1);
  char* p = mmap(0, (size_t)(n + HS_HUGE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return 0;
  int64_t skip = (int64_t)(-(uintptr_t)p & (uintptr_t)(HS_HUGE - 1));
  if (skip) munmap(p, (size_t)skip);
  if (HS_HUGE - skip) munmap(p + skip + n, (size_t)(HS_HUGE - skip));
#ifdef MADV_HUGEPAGE
  madvise(p + skip, (size_t)n, MADV_HUGEPAGE);
#endif
  return (uint64_t)(uintptr_t)(p + skip);
}
static void hs_shim_free(uint64_t p, int64_t n) {
  if (n < HS_MAP_BYTES) free((void*)(uintptr_t)p);
  else munmap((void*)(uintptr_t)p, (size_t)((n + HS_HUGE - 1) & ~(HS_HUGE - 1)));
}
void hs_philox(uint32_t key0, uint32_t key1, const uint32_t ctr[4], uint32_t out[4]);
// One formula of optim_math.h on n elements: x are float32 bits (scale for the codes in s), r random words.
static void hs_shim_optim(int f, int64_t n, const uint32_t* x, const uint32_t* r, float s, uint32_t* out) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t hi;
    int32_t lo;
    switch (f) {
    case 0: hs_split(hs_float(x[i]), &hi, &lo); out[i] = hs_bits(hs_join(hi, (int16_t)lo)); break;
    case 1: hs_split(hs_float(x[i]), &hi, &lo); out[i] = hi | (uint16_t)lo; break;
    case 2: out[i] = hs_round_bf16(hs_float(x[i]), r[i]); break;
    case 3: out[i] = hs_code_m(hs_float(x[i]), r[i]); break;
    case 4: out[i] = hs_code_v(hs_float(x[i]), r[i]); break;
    case 5: out[i] = hs_bits(hs_decode_m(x[i], s)); break;
    case 6: out[i] = hs_bits(hs_decode_v(x[i], s)); break;
    default: out[i] = hs_bits(hs_code_scale(x[i]));
    }
  }
}
static int64_t hs_shim_memory(void) { return (int64_t)sysconf(_SC_PHYS_PAGES) * (int64_t)sysconf(_SC_PAGESIZE); }
*/
import "C"

import (
	"errors"
	"fmt"
	"unsafe"
)

// maxThreads is HS_MAX_THREADS of cpu.h.
const maxThreads = 64

// table is one table of native functions.
type table struct{ api *C.hs_api }

// linkedTable is the cpu table, which is part of the program.
func linkedTable() (table, error) { return checkTable(C.hs_get_api(C.HS_ABI_VERSION), "the cpu table") }

// loadTable opens the library at path and takes its table.
func loadTable(path string) (table, error) {
	p := C.CString(path)
	defer C.free(unsafe.Pointer(p))
	var text [1024]C.char
	api := C.hs_shim_load(p, &text[0], C.size_t(len(text)))
	if api == nil {
		return table{}, errors.New(C.GoString(&text[0]))
	}
	return checkTable(api, path)
}

// checkTable refuses a table whose version or size is not that of abi.h.
func checkTable(api *C.hs_api, what string) (table, error) {
	if api == nil {
		return table{}, fmt.Errorf("%s does not serve version %d of the interface", what, ABIVersion)
	}
	if uintptr(api.size) != unsafe.Sizeof(*api) || int(api.version) != ABIVersion {
		return table{}, fmt.Errorf("%s has version %d of the interface and %d bytes, this program version %d and %d", what, int(api.version), int(api.size), ABIVersion, unsafe.Sizeof(*api))
	}
	return table{api}, nil
}

func resultError(r C.hs_result) error {
	if r.status == C.HS_OK {
		return nil
	}
	defer C.free(unsafe.Pointer(r.text))
	err := errors.New(C.GoString(r.text))
	if r.status == C.HS_ERR_UNSUPPORTED {
		return &unsupportedError{err}
	}
	return err
}

func (t table) run(stream uintptr, op Op, args unsafe.Pointer) error {
	return resultError(C.hs_shim_run(t.api, C.uintptr_t(stream), C.int32_t(op), args))
}

func (t table) workspace(op Op, args unsafe.Pointer) int64 {
	return int64(C.hs_shim_workspace(t.api, C.int32_t(op), args))
}

func (t table) configure(key, value string) error {
	k, v := C.CString(key), C.CString(value)
	defer C.free(unsafe.Pointer(k))
	defer C.free(unsafe.Pointer(v))
	return resultError(C.hs_shim_configure(t.api, k, v))
}

// newStream gives the table's handle for a driver's raw stream.
func (t table) newStream(native uintptr) uintptr {
	return uintptr(C.hs_shim_stream(t.api, C.uintptr_t(native)))
}

func (t table) freeStream(h uintptr) { C.hs_shim_end_stream(t.api, C.uintptr_t(h)) }

func (t table) sync(h uintptr) error { return resultError(C.hs_shim_sync(t.api, C.uintptr_t(h))) }

func (t table) graphBegin(h uintptr) error {
	return resultError(C.hs_shim_graph_begin(t.api, C.uintptr_t(h)))
}

func (t table) graphEnd(h uintptr) (g uintptr, nodes int64, err error) {
	var out C.uintptr_t
	var n C.int64_t
	err = resultError(C.hs_shim_graph_end(t.api, C.uintptr_t(h), &out, &n))
	return uintptr(out), int64(n), err
}

func (t table) graphLaunch(h, g uintptr) error {
	return resultError(C.hs_shim_graph_launch(t.api, C.uintptr_t(h), C.uintptr_t(g)))
}

func (t table) graphFree(g uintptr) { C.hs_shim_graph_destroy(t.api, C.uintptr_t(g)) }

// allocHost is host memory that the device copies from and to by itself.
func (t table) allocHost(bytes int64) (p unsafe.Pointer, err error) {
	err = resultError(C.hs_shim_host_alloc(t.api, C.int64_t(bytes), &p))
	return p, err
}

func (t table) freeHost(p unsafe.Pointer) { C.hs_shim_host_free(t.api, p) }

// nowMS is a clock for the intervals between events, in milliseconds.
func nowMS() float64 { return float64(C.hs_shim_now_ms()) }

// driverWhy says why no NVIDIA driver was loaded; "" when one was or this build has none.
func driverWhy() string { return C.GoString(C.hs_shim_driver_why()) }

func (t table) name() string      { return C.GoString(t.api.name) }
func (t table) buildInfo() string { return C.GoString(C.hs_shim_build(t.api)) }

func guardAlloc(bytes int64) Ptr { return Ptr(C.hs_shim_guard_alloc(C.int64_t(bytes))) }
func guardFree(p Ptr, bytes int64) int64 {
	return int64(C.hs_shim_guard_free(C.uint64_t(p), C.int64_t(bytes)))
}
func hostAlloc(bytes int64) Ptr   { return Ptr(C.hs_shim_alloc(C.int64_t(bytes))) }
func hostFree(p Ptr, bytes int64) { C.hs_shim_free(C.uint64_t(p), C.int64_t(bytes)) }
func hostCopyIn(dst Ptr, src unsafe.Pointer, n int64) {
	C.hs_shim_copy_in(C.uint64_t(dst), src, C.int64_t(n))
}
func hostCopyOut(dst unsafe.Pointer, src Ptr, n int64) {
	C.hs_shim_copy_out(dst, C.uint64_t(src), C.int64_t(n))
}
func hostFill(dst Ptr, n int64, v byte) { C.hs_shim_fill(C.uint64_t(dst), C.int64_t(n), C.int(v)) }
func hostMemory() int64                 { return int64(C.hs_shim_memory()) }

// layoutFact is the i-th size or offset listed in abi_layout.h, -1 past the end (for TestABILayout).
func layoutFact(i int) int64 { return int64(C.hs_layout(C.int(i))) }

// philox is the cpu table's Philox4x32-10 (for its test).
func philox(key [2]uint32, ctr [4]uint32) (out [4]uint32) {
	in := [4]C.uint32_t{C.uint32_t(ctr[0]), C.uint32_t(ctr[1]), C.uint32_t(ctr[2]), C.uint32_t(ctr[3])}
	var w [4]C.uint32_t
	C.hs_philox(C.uint32_t(key[0]), C.uint32_t(key[1]), &in[0], &w[0])
	for i := range w {
		out[i] = uint32(w[i])
	}
	return out
}

// Formulas of optim_math.h, for their tests.
const (
	optimRoundTrip = iota // split and joined again
	optimSplit            // upper half and lo below it
	optimBF16
	optimCodeM
	optimCodeV
	optimDecodeM
	optimDecodeV
	optimScale
)

// optimFormula applies a formula to float32 bits (codes for the decoders) x[i] with random words r[i]; r may be nil where none is used.
func optimFormula(f int, x, r []uint32, scale float32) []uint32 {
	out := make([]uint32, len(x))
	if len(x) == 0 {
		return out
	}
	if r == nil {
		r = x
	}
	C.hs_shim_optim(C.int(f), C.int64_t(len(x)), (*C.uint32_t)(&x[0]), (*C.uint32_t)(&r[0]), C.float(scale), (*C.uint32_t)(&out[0]))
	return out
}

func numTableOps() int { return int(C.HS_NUM_OPS) }

// GDNSlotBytes is the size of one slot of the delta rule's recurrent state: nv heads of state [dk, dv], with replay rings where the kernels
// of dt keep them (abi.h, hs_gdn_ring).
func GDNSlotBytes(dt DType, nv, dk, dv int) int64 {
	return int64(C.hs_gdn_slot_bytes(C.int32_t(dt), C.int64_t(nv), C.int64_t(dk), C.int64_t(dv)))
}

// GDNRing says whether slots have replay rings; what they hold then depends on the position.
func GDNRing(dt DType, dk, dv int) bool {
	return C.hs_gdn_ring(C.int32_t(dt), C.int64_t(dk), C.int64_t(dv)) != 0
}

// ABIVersion is the version of abi.h that this package speaks.
const ABIVersion = int(C.HS_ABI_VERSION)
