// cuda.h - lets gorgonia.org/cu v0.9.6 compile against CUDA 13 headers: includes the real cuda.h and gives five calls whose prototypes
// changed their CUDA 12 form. Its folder stands first on the include path (CGO_CFLAGS; the Makefile's gpu target). Nothing to do for 12.x.
#ifndef HS_COMPAT_CUDA_H
#define HS_COMPAT_CUDA_H
#include_next <cuda.h>
#if CUDA_VERSION >= 13000 && !defined(__cplusplus)

static inline CUresult hs_cuCtxCreate(CUcontext* ctx, unsigned flags, CUdevice dev) { return cuCtxCreate(ctx, NULL, flags, dev); }

// Device -1 (CU_DEVICE_CPU) is the host.
static inline CUmemLocation hs_cu_location(CUdevice dev) {
  CUmemLocation at;
  at.type = dev < 0 ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE;
  at.id = dev < 0 ? 0 : dev;
  return at;
}
static inline CUresult hs_cuMemAdvise(CUdeviceptr p, size_t n, CUmem_advise advice, CUdevice dev) { return cuMemAdvise(p, n, advice, hs_cu_location(dev)); }
static inline CUresult hs_cuMemPrefetchAsync(CUdeviceptr p, size_t n, CUdevice dev, CUstream s) {
  return cuMemPrefetchAsync(p, n, hs_cu_location(dev), 0, s);
}
static inline CUresult hs_cuGraphAddDependencies(CUgraph g, const CUgraphNode* from, const CUgraphNode* to, size_t n) {
  return cuGraphAddDependencies(g, from, to, NULL, n);
}
static inline CUresult hs_cuGraphGetEdges(CUgraph g, CUgraphNode* from, CUgraphNode* to, size_t* n) { return cuGraphGetEdges(g, from, to, NULL, n); }

#undef cuCtxCreate
#undef cuMemAdvise
#undef cuMemPrefetchAsync
#undef cuGraphAddDependencies
#undef cuGraphGetEdges
#define cuCtxCreate hs_cuCtxCreate
#define cuMemAdvise hs_cuMemAdvise
#define cuMemPrefetchAsync hs_cuMemPrefetchAsync
#define cuGraphAddDependencies hs_cuGraphAddDependencies
#define cuGraphGetEdges hs_cuGraphGetEdges
#endif
#endif
