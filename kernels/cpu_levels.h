// cpu_levels.h - includes HS_BODY once per SIMD level and type. No include guard: each use stamps out one body file.
// HS_REAL is 32 or 64 (bits of `real`), HS_LEVEL as hs_simd_level(), HS_SUFFIX the name suffix FN() appends.
#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512")
#define HS_REAL 32
#define HS_LEVEL 2
#define HS_SUFFIX x16
#include "cpu_vec.h"
#include HS_BODY
#include "cpu_unvec.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define HS_REAL 32
#define HS_LEVEL 1
#define HS_SUFFIX x8
#include "cpu_vec.h"
#include HS_BODY
#include "cpu_unvec.h"
#pragma GCC pop_options
#endif

#define HS_REAL 32
#define HS_LEVEL 0
#define HS_SUFFIX x4
#include "cpu_vec.h"
#include HS_BODY
#include "cpu_unvec.h"

#define HS_REAL 64
#define HS_LEVEL 0
#define HS_SUFFIX f64
#include "cpu_vec.h"
#include HS_BODY
#include "cpu_unvec.h"

#undef HS_BODY
