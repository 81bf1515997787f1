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
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "abi.h"
#include "abi_layout.h"

// The text of a failure is the calling thread's, so it is copied inside the call that failed.
typedef struct { int status; char* text; } hs_result;

static hs_result hs_result_of(hs_status st) {
  hs_result r = {st, 0};
  if (st != HS_OK) r.text = strdup(hs_get_api(HS_ABI_VERSION)->last_error());
  return r;
}
static hs_result hs_shim_run(int32_t op, const void* args) { return hs_result_of(hs_get_api(HS_ABI_VERSION)->run(0, op, args)); }
static hs_result hs_shim_configure(const char* k, const char* v) { return hs_result_of(hs_get_api(HS_ABI_VERSION)->configure(k, v)); }
static int64_t hs_shim_workspace(int32_t op, const void* args) { return hs_get_api(HS_ABI_VERSION)->workspace(op, args); }
static const char* hs_shim_build(void) { return hs_get_api(HS_ABI_VERSION)->build_info(); }

static void hs_shim_copy_in(uint64_t dst, const void* src, int64_t n) { memcpy((void*)(uintptr_t)dst, src, (size_t)n); }
static void hs_shim_copy_out(void* dst, uint64_t src, int64_t n) { memcpy(dst, (const void*)(uintptr_t)src, (size_t)n); }
static void hs_shim_fill(uint64_t dst, int64_t n, int v) { memset((void*)(uintptr_t)dst, v, (size_t)n); }

// Memory from here up comes straight from the kernel (zeroed) with huge pages asked for: weights and activations walk fewer pages.
#define HS_MAP_BYTES ((int64_t)4 << 20)
#define HS_HUGE ((int64_t)2 << 20)
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

// tableVersion checks that the linked table serves the version of abi.h and has its size.
func tableVersion() (int, error) {
	api := C.hs_get_api(C.HS_ABI_VERSION)
	if api == nil {
		return 0, fmt.Errorf("the cpu table does not serve version %d of the interface", int(C.HS_ABI_VERSION))
	}
	if uintptr(api.size) != unsafe.Sizeof(*api) || api.version != C.HS_ABI_VERSION {
		return int(api.version), fmt.Errorf("the cpu table has version %d and %d bytes, want %d and %d", int(api.version), int(api.size), int(C.HS_ABI_VERSION), unsafe.Sizeof(*api))
	}
	return int(api.version), nil
}

func resultError(r C.hs_result) error {
	if r.status == C.HS_OK {
		return nil
	}
	defer C.free(unsafe.Pointer(r.text))
	return errors.New(C.GoString(r.text))
}

func tableRun(op Op, args unsafe.Pointer) error {
	return resultError(C.hs_shim_run(C.int32_t(op), args))
}

func tableWorkspace(op Op, args unsafe.Pointer) int64 {
	return int64(C.hs_shim_workspace(C.int32_t(op), args))
}

func tableConfigure(key, value string) error {
	k, v := C.CString(key), C.CString(value)
	defer C.free(unsafe.Pointer(k))
	defer C.free(unsafe.Pointer(v))
	return resultError(C.hs_shim_configure(k, v))
}

func tableBuildInfo() string { return C.GoString(C.hs_shim_build()) }

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

func numTableOps() int { return int(C.HS_NUM_OPS) }

// ABIVersion is the version of abi.h that this package speaks.
const ABIVersion = int(C.HS_ABI_VERSION)
