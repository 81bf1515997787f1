// shim.c - stands in for -lcuda at link time (libcuda.a), so that one binary runs with and without NVIDIA's driver.
//
// gorgonia.org/cu calls cuInit from its init() and ends the process on any error. This cuInit loads libcuda.so.1 and always returns 0; the
// true status is hs_cu_status(). Every other entry of the driver API jumps through a slot: to the driver's function once it is loaded,
// to one that returns CUDA_ERROR_NO_DEVICE before. Without a driver there are 0 devices. symbols.inc lists the entries that cu refers to
// (nm -u over its package archive); one that the loaded driver lacks answers CUDA_ERROR_NOT_FOUND.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

enum { NO_DEVICE = 100, NOT_FOUND = 500 };

static int no_device(void) { return NO_DEVICE; }
static int not_found(void) { return NOT_FOUND; }
static int no_devices(int* count) { return *count = 0; }

#define X(name) __attribute__((visibility("hidden"))) void* hs_cu_slot_##name = (void*)no_device;
#include "symbols.inc"
#undef X

#if defined(__x86_64__)
#define X(name) __asm__(".text\n.globl " #name "\n.type " #name ",@function\n" #name ":\n  jmp *hs_cu_slot_" #name "(%rip)\n");
#elif defined(__aarch64__)
#define X(name) __asm__(".text\n.globl " #name "\n.type " #name ",%function\n" #name ":\n  adrp x16, hs_cu_slot_" #name "\n  ldr x16, [x16, :lo12:hs_cu_slot_" #name "]\n  br x16\n");
#else
#error "no trampoline for this processor"
#endif
#include "symbols.inc"
#undef X

static int status = -1;
static char why[512];

// The status of the true cuInit; -1 before cuInit ran or when libcuda.so.1 does not load.
int hs_cu_status(void) { return status; }
// What dlopen said when libcuda.so.1 did not load, else "".
const char* hs_cu_why(void) { return why; }

int cuInit(unsigned flags) {
  static const struct { const char* name; void** slot; } entries[] = {
#define X(name) {#name, &hs_cu_slot_##name},
#include "symbols.inc"
#undef X
  };
  if (status == 0) return 0;
  hs_cu_slot_cuDeviceGetCount = (void*)no_devices;
  void* lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  int (*init)(unsigned) = lib ? (int (*)(unsigned))dlsym(lib, "cuInit") : NULL;
  if (!init) {
    const char* text = dlerror();
    for (size_t i = 0; text && text[i] && i + 1 < sizeof why; i++) why[i] = text[i], why[i + 1] = 0;
    return 0;
  }
  status = init(flags);
  if (status != 0) return 0;
  for (size_t i = 0; i < sizeof entries / sizeof *entries; i++) {
    void* f = dlsym(lib, entries[i].name);
    *entries[i].slot = f ? f : (void*)not_found;
  }
  return 0;
}
