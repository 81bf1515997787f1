// libcuda.c - a libcuda.so.1 over host memory, so that the driver layer of the gpu build is tested on machines without a GPU: one device,
// one context, streams that run at once. Only the calls that driver_cu.go makes are answered; the shim answers "not found" for others.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NOT_READY = 600 };
static const size_t total = (size_t)1 << 30;
static size_t used;
static _Thread_local void* current;
static int context, streams_alive;

// A block's size stands in the 64 bytes before it.
int cuInit(unsigned flags) { return flags ? INVALID_VALUE : OK; }
int cuDriverGetVersion(int* v) { return *v = 13000, OK; }
int cuDeviceGetCount(int* n) { return *n = 1, OK; }
int cuDeviceGet(int* dev, int ordinal) { return ordinal ? INVALID_VALUE : (*dev = 0, OK); }
int cuDeviceGetName(char* name, int len, int dev) { return (void)dev, strncpy(name, "fake device", (size_t)len), OK; }
int cuDeviceTotalMem_v2(size_t* bytes, int dev) { return (void)dev, *bytes = total, OK; }
int cuDevicePrimaryCtxRetain(void** ctx, int dev) { return dev ? INVALID_VALUE : (*ctx = &context, OK); }
int cuDevicePrimaryCtxRelease_v2(int dev) { return dev ? INVALID_VALUE : OK; }
int cuCtxSetCurrent(void* ctx) { return current = ctx, OK; }
int cuCtxSynchronize(void) { return current ? OK : INVALID_CONTEXT; }

int cuMemAlloc_v2(uint64_t* p, size_t n) {
  if (!current) return INVALID_CONTEXT;
  if (used + n > total) return OUT_OF_MEMORY;
  char* at = aligned_alloc(64, 64 + ((n + 63) & ~(size_t)63));
  if (!at) return OUT_OF_MEMORY;
  memcpy(at, &n, sizeof n);
  memset(at + 64, 0xa5, n);   // fresh memory holds anything
  used += n;
  *p = (uint64_t)(uintptr_t)(at + 64);
  return OK;
}
int cuMemFree_v2(uint64_t p) {
  if (!current || !p) return INVALID_CONTEXT;
  size_t n;
  memcpy(&n, (char*)(uintptr_t)p - 64, sizeof n);
  used -= n;
  free((char*)(uintptr_t)p - 64);
  return OK;
}
int cuMemGetInfo_v2(size_t* avail, size_t* all) { return *avail = total - used, *all = total, current ? OK : INVALID_CONTEXT; }
int cuMemsetD8_v2(uint64_t p, unsigned char v, size_t n) { return current ? (memset((void*)(uintptr_t)p, v, n), OK) : INVALID_CONTEXT; }
int cuMemsetD8Async(uint64_t p, unsigned char v, size_t n, void* s) { return (void)s, cuMemsetD8_v2(p, v, n); }
int cuMemcpyHtoDAsync_v2(uint64_t dst, const void* src, size_t n, void* s) {
  return (void)s, current ? (memcpy((void*)(uintptr_t)dst, src, n), OK) : INVALID_CONTEXT;
}
int cuMemcpyDtoHAsync_v2(void* dst, uint64_t src, size_t n, void* s) {
  return (void)s, current ? (memcpy(dst, (const void*)(uintptr_t)src, n), OK) : INVALID_CONTEXT;
}
int cuStreamCreate(void** s, unsigned flags) { return (void)flags, current ? (*s = malloc(1), streams_alive++, OK) : INVALID_CONTEXT; }
int cuStreamSynchronize(void* s) { return (void)s, current ? OK : INVALID_CONTEXT; }
int cuStreamDestroy_v2(void* s) { return free(s), streams_alive--, OK; }

// Events hold the time they were recorded at. One that was recorded answers "not ready" to the first query, as a busy device would.
struct event { double ms; int queries; };
static double now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}
int cuEventCreate(void** e, unsigned flags) { return (void)flags, current ? (*e = calloc(1, sizeof(struct event)), OK) : INVALID_CONTEXT; }
int cuEventDestroy_v2(void* e) { return free(e), OK; }
int cuEventRecord(void* e, void* s) {
  struct event* x = e;
  return (void)s, current && e ? (x->ms = now_ms(), x->queries = 0, OK) : INVALID_VALUE;
}
int cuEventQuery(void* e) {
  struct event* x = e;
  return x->ms && !x->queries++ ? NOT_READY : OK;
}
int cuEventSynchronize(void* e) { return ((struct event*)e)->queries = 1, current ? OK : INVALID_CONTEXT; }
int cuEventElapsedTime_v2(float* ms, void* a, void* b) {
  const struct event *x = a, *y = b;
  return x->ms && y->ms ? (*ms = (float)(y->ms - x->ms), OK) : INVALID_VALUE;
}
int cuEventElapsedTime(float* ms, void* a, void* b) { return cuEventElapsedTime_v2(ms, a, b); }
