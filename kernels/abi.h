// abi.h - the only contract between Go and native code.
//
// One symbol, hs_get_api(version), returns a table of functions. Three tables exist or will exist behind it: cpu (C, linked in),
// cuda (libhs_cuda.so) and emu (the same .cu files compiled by g++). Everything here is plain data: device addresses, sizes, flags.
// kernels/ops.go mirrors every struct field by field; TestABILayout compares sizes and offsets.
//
// Shape legend: T packed rows, D hidden, I intermediate, V vocabulary, C conv channels (2*nk*dk + nv*dv), S segments, B sequences,
//   N targets; nk/dk linear key heads and their width, nv/dv linear value heads, nh/nkv/hd attention heads, kv heads, head width.
// Access legend, per pointer:  in read | out overwritten | acc added to | io read and written.
//   "flags & HS_ACC_x" turns an out into an acc. Weight gradients are always acc; 0 = not wanted (frozen weights), except of embed_bwd.
// Matrices are row-major and dense. dtype is that of activations and weights of the call: HS_F32 on every table, HS_F64 on the CPU
//   for reference runs, HS_BF16 on cuda and emu. Quantities marked f32 follow dtype F64 as doubles ("real"). Indices are int32, sizes int64.
// With HS_BF16 these stay f32: A_log and the gated norm's w; beta, g, dbeta, dg; rstd, lse, logp, entropy, dlogp, dent; states, rec_state (not k in its
//   rings); sampled logits; every weight gradient. All else is bf16: activations and their gradients, the residual stream, matrices, the other norm
//   weights, conv taps, dt_bias, KV pages, conv_state. Arithmetic is f32, with one rounding per stored element.
// Reductions have a fixed order that depends on the row alone: bits of a row do not depend on other rows, batch size or threads.
// Ops never allocate device memory, never synchronise. ws/ws_bytes is scratch of at least workspace(op, args) bytes.
#ifndef HS_ABI_H
#define HS_ABI_H
#include <stdint.h>

#define HS_ABI_VERSION 3

typedef enum { HS_OK = 0, HS_ERR_ARG = 1, HS_ERR_DTYPE = 2, HS_ERR_WORKSPACE = 3, HS_ERR_DEVICE = 4, HS_ERR_UNSUPPORTED = 5 } hs_status;
typedef enum { HS_F32 = 0, HS_F64 = 1, HS_BF16 = 2, HS_I32 = 3 } hs_dtype;

// GDN chunk length in rows, counted from the start of a segment.
#define HS_GDN_CHUNK 64
// Rows of a replay ring: the canonical chunk of the delta rule, counted in absolute positions (gpu.md 7.2).
#define HS_GDN_RING 16
// Conv taps; the window reaches HS_CONV-1 rows back.
#define HS_CONV 4

// Whether the delta rule runs in canonical chunks of HS_GDN_RING positions on tensor cores, with replay rings in its slots.
static inline int hs_gdn_ring(int32_t dtype, int64_t dk, int64_t dv) {
  return dtype == HS_BF16 && (dk == 16 || dk == 32 || dk == 64 || dk == 128) && dv >= 16 && dv <= 128 && dv % 16 == 0;
}
// Bytes of one value head's part of a slot of rec_state, and of a slot.
static inline int64_t hs_gdn_head_bytes(int32_t dtype, int64_t dk, int64_t dv) {
  const int64_t state = dk * dv * (dtype == HS_F64 ? 8 : 4);
  return hs_gdn_ring(dtype, dk, dv) ? state + HS_GDN_RING * (4 * dv + 2 * dk + 4) : state;
}
static inline int64_t hs_gdn_slot_bytes(int32_t dtype, int64_t nv, int64_t dk, int64_t dv) { return nv * hs_gdn_head_bytes(dtype, dk, dv); }

// A packed forest of segments (gpu.md 7.5). A segment continues after the LAST row of its parent, an earlier segment, or is a root (-1).
// Built and validated by kernels.NewForest; every array is on the device, int32.
//   prev[T*3]: row holding the conv input 1, 2, 3 positions earlier; -1 = before the sequence start (zero);
//              -2-j = column j (0 oldest .. 2 newest) of the conv state slot of this row's segment (inference only).
//   chunk_off[S+1]: index of the segment's first GDN chunk; chunk_off[S] = number of chunks.
//   child_off[S+1], child[]: children in segment order. root[S]: index of the root segment of each segment's tree.
//   slot[S]: recurrent/conv state slot that a root starts from and that receives the state after the segment's last row; -1 = start from
//              zero and write nothing (training).
typedef struct {
  int32_t nseg, nrows, nchunks, max_len;
  const int32_t *start, *len, *parent, *pos;
  const int32_t *row_seg, *prev, *chunk_off, *child_off, *child, *root, *slot;
} hs_forest;

// Flags
#define HS_ACC_DX 1u     // input gradient (first one) is added to instead of overwritten
#define HS_TRANS_A 2u
#define HS_TRANS_B 4u
#define HS_BETA1 8u      // gemm: C += instead of C =
#define HS_C_F32 16u     // gemm with dtype BF16: C is f32 (weight gradients, logits); A and B stay bf16
#define HS_TRUNCATED 32u // lmhead_sample: a row has top_k, top_p or min_p, so that logits must be stored

// y[T,D] = W[ids]. d_w[V,D] acc += dy scattered (fixed order). A device reads row 0 for an id below 0: of a sampled row without a distribution, whose
// token the caller sees only after it was fed.
typedef struct { int32_t dtype; uint32_t flags; int64_t T, D, V; const int32_t* ids; const void* w; void* y; void *ws; int64_t ws_bytes; } hs_embed_args;
typedef struct { int32_t dtype; uint32_t flags; int64_t T, D, V; const int32_t* ids; const void* dy; void* dw; void *ws; int64_t ws_bytes; } hs_embed_bwd_args;

// Zero-centred RMSNorm (model.md 3.2): y = x*rstd*(1+w); rstd[T] out (may be 0).
// bwd: dx out (acc with HS_ACC_DX), dw acc. rstd is recomputed when its pointer is 0.
typedef struct { int32_t dtype; uint32_t flags; int64_t T, D; double eps; const void *x, *w; void *y, *rstd; void *ws; int64_t ws_bytes; } hs_rmsnorm_args;
typedef struct { int32_t dtype; uint32_t flags; int64_t T, D; double eps; const void *x, *w, *rstd, *dy; void *dx, *dw; void *ws; int64_t ws_bytes; } hs_rmsnorm_bwd_args;

// Gated RMSNorm (3.3): per head of width dv: y = w * norm(o) * silu(z). o,z,y [T, nv*dv], w[dv].
// bwd: do_, dz out; dw acc.
typedef struct { int32_t dtype; uint32_t flags; int64_t T, nv, dv; double eps; const void *o, *z, *w; void *y; void *ws; int64_t ws_bytes; } hs_gatednorm_args;
typedef struct { int32_t dtype; uint32_t flags; int64_t T, nv, dv; double eps; const void *o, *z, *w, *dy; void *do_, *dz, *dw; void *ws; int64_t ws_bytes; } hs_gatednorm_bwd_args;

// C[M,N] (ldc) = op(A)[M,K] op(B)[K,N] (+ C with HS_BETA1). A is [M,K] (lda) or [K,M] with HS_TRANS_A; B is [K,N] (ldb) or [N,K] with HS_TRANS_B.
// A linear layer y = x W^T is TRANS_B; dx = dy W is plain; dW += dy^T x is TRANS_A|BETA1. Fixed K order; a row's bits do not depend on M.
typedef struct { int32_t dtype; uint32_t flags; int64_t M, N, K; const void* a; int64_t lda; const void* b; int64_t ldb; void* c; int64_t ldc; void *ws; int64_t ws_bytes; } hs_gemm_args;

// Up to HS_GEMM_SETS products of one A: set i is C_i[M,N_i] (ldc) = op(A) op(B_i) (+ C_i), with the flags of gemm and the bits of n gemms.
#define HS_GEMM_SETS 4
typedef struct { int64_t N; const void* b; int64_t ldb; void* c; int64_t ldc; } hs_gemm_set;
typedef struct { int32_t dtype; uint32_t flags; int64_t M, K, n; const void* a; int64_t lda; hs_gemm_set set[HS_GEMM_SETS]; void *ws; int64_t ws_bytes; } hs_gemm_group_args;
// h[M,N] dense = silu(x gate^T) * (x up^T) with both products rounded to dtype: the bits of gemm, gemm, swiglu. x[M,K] (ldx), gate, up [N,K] (ldw).
typedef struct { int32_t dtype; uint32_t flags; int64_t M, N, K; const void* x; int64_t ldx; const void *gate, *up; int64_t ldw; void* h; void *ws; int64_t ws_bytes; } hs_gemm_swiglu_args;

// dst[n] = src[n] (copy); dst[n] += src[n] (add). Element type dtype.
typedef struct { int32_t dtype; uint32_t flags; int64_t n; const void* src; void* dst; } hs_vec_args;

// Causal depthwise conv + SiLU + q/k l2norm + gates in one op (3.4 steps 2-6).
// in: p[T,C] conv inputs, a[T,nv], b[T,nv], w[C,4], A_log[nv], dt_bias[nv]; forest gives the conv history.
// out: q[T,nk*dk] (l2-normalised, times dk^-0.5), k[T,nk*dk] (l2-normalised), v[T,nv*dv], beta[T,nv], g[T,nv].
// conv_state [slots, 3, C] (pre-activation inputs, oldest column first) io when forest slots are set, else 0.
typedef struct {
  int32_t dtype; uint32_t flags; int64_t T, nk, dk, nv, dv; double eps; hs_forest f;
  const void *p, *a, *b, *w, *a_log, *dt_bias; void *q, *k, *v, *beta, *g; void* conv_state; void *ws; int64_t ws_bytes;
} hs_convgate_args;
// bwd: dp, da, db out; dw, da_log, ddt_bias acc. Recomputes what it needs from p, a, b. Training forests only (no slots).
typedef struct {
  int32_t dtype; uint32_t flags; int64_t T, nk, dk, nv, dv; double eps; hs_forest f;
  const void *p, *a, *b, *w, *a_log, *dt_bias; const void *dq, *dk_, *dv_, *dbeta, *dg; void *dp, *da, *db, *dw, *da_log, *ddt_bias; void *ws; int64_t ws_bytes;
} hs_convgate_bwd_args;

// Gated delta rule (3.5-3.7), chunked by HS_GDN_CHUNK from each segment's start. o[T, nv*dv] out.
// states [nchunks + S, nv, dk, dv] out: state at each chunk's start, then each segment's final state; 0 only when no backward follows and no
//   segment has a parent. rec_state [slots] of hs_gdn_slot_bytes io for forests with slots, else 0. Value head h reads key head h / (nv/nk).
// A slot is the state after the sequence's last row, [nv, dk, dv], or where hs_gdn_ring says so, per value head
//   { S f32 [dk, dv]: the state at the last multiple of HS_GDN_RING positions; the rows since then, row i at i: d f32 [16, dv], k bf16 [16, dk], g f32 [16] },
//   d as in model.md 3.5. How many rows those are follows from the position (forest pos of a root with a slot; pos of a step), so a slot is
//   forked and cleared as plain bytes. There states' last S entries are the segments' S at the last multiple, not after the last row.
typedef struct {
  int32_t dtype; uint32_t flags; int64_t T, nk, dk, nv, dv; hs_forest f;
  const void *q, *k, *v, *beta, *g; void *o, *states, *rec_state; void *ws; int64_t ws_bytes;
} hs_gdn_args;
// bwd: dq, dk_ [T,nk*dk] out (summed over the value heads of a key head in head order), dv_, dbeta, dg out.
typedef struct {
  int32_t dtype; uint32_t flags; int64_t T, nk, dk, nv, dv; hs_forest f;
  const void *q, *k, *v, *beta, *g, *states, *do_; void *dq, *dk_, *dv_, *dbeta, *dg; void *ws; int64_t ws_bytes;
} hs_gdn_bwd_args;

// Decode, one row per sequence. slot[B] distinct, but for rows whose results and slot nobody reads. Conv: reads and shifts conv_state[slot]; GDN: updates rec_state[slot]; pos[B] is the row's
// absolute position, read where slots have rings (else it may be 0).
typedef struct {
  int32_t dtype; uint32_t flags; int64_t B, nk, dk, nv, dv; double eps; const int32_t* slot;
  const void *p, *a, *b, *w, *a_log, *dt_bias; void *q, *k, *v, *beta, *g; void* conv_state;
} hs_convgate_step_args;
typedef struct {
  int32_t dtype; uint32_t flags; int64_t B, nk, dk, nv, dv; const int32_t *slot, *pos;
  const void *q, *k, *v, *beta, *g; void *o, *rec_state;
} hs_gdn_step_args;

// qk-norm + partial RoPE (3.9 steps 1-3). qg[T, nh*2*hd] (per head: query then gate), kin[T, nkv*hd]; wq, wk [hd] zero-centred.
// rope_pos[T] absolute positions; rot = rotary width (even, first dims, pairing j with j+rot/2), angle = pos * theta^(-2j/rot), f64 inside.
// out: q[T, nh*hd], k[T, nkv*hd].
// bwd: dq, dk in; the query half of dqg [T, nh*2*hd] out (the gate half is written by gate_bwd), dkin out, dwq, dwk acc.
typedef struct {
  int32_t dtype; uint32_t flags; int64_t T, nh, nkv, hd, rot; double theta, eps; const int32_t* rope_pos;
  const void *qg, *kin, *wq, *wk; void *q, *k; void *ws; int64_t ws_bytes;
} hs_attnprep_args;
typedef struct {
  int32_t dtype; uint32_t flags; int64_t T, nh, nkv, hd, rot; double theta, eps; const int32_t* rope_pos;
  const void *qg, *kin, *wq, *wk, *dq, *dk; void *dqg, *dkin, *dwq, *dwk; void *ws; int64_t ws_bytes;
} hs_attnprep_bwd_args;

// Causal softmax attention over a forest: a row sees every row of its ancestors and its own segment up to itself. Scale hd^-0.5, GQA.
// o[T, nh*hd] out, lse[T, nh] out (natural log, f32). bwd: dq, dk, dv out.
typedef struct {
  int32_t dtype; uint32_t flags; int64_t T, nh, nkv, hd; hs_forest f; const void *q, *k, *v; void *o, *lse; void *ws; int64_t ws_bytes;
} hs_attn_args;
typedef struct {
  int32_t dtype; uint32_t flags; int64_t T, nh, nkv, hd; hs_forest f; const void *q, *k, *v, *o, *lse, *do_; void *dq, *dk, *dv; void *ws; int64_t ws_bytes;
} hs_attn_bwd_args;

// Output gate: y[T,nh*hd] = o * sigmoid(gate), gate = second half of each head of qg.
// bwd: do_ out, gate half of dqg out (query half untouched).
typedef struct { int32_t dtype; uint32_t flags; int64_t T, nh, hd; const void *o, *qg; void* y; } hs_gate_args;
typedef struct { int32_t dtype; uint32_t flags; int64_t T, nh, hd; const void *o, *qg, *dy; void *do_, *dqg; } hs_gate_bwd_args;

// Paged KV. Pages: kcache, vcache [pages, page_size, nkv*hd]. block_table [slots? no: B, max_pages] int32 page ids per sequence.
// kv_write: rows T of k, v go to sequence seq[T] at position pos[T].
typedef struct {
  int32_t dtype; uint32_t flags; int64_t T, nkv, hd, page_size, max_pages; const int32_t *seq, *pos, *block_table; const void *k, *v; void *kcache, *vcache;
} hs_kv_write_args;
// attn_paged: row t of sequence seq[t] at position pos[t] attends cache positions 0..pos[t] (its own K/V already written).
// Rows of one sequence are adjacent and ascending; T rows in all, decode has one row per sequence.
typedef struct {
  int32_t dtype; uint32_t flags; int64_t T, nh, nkv, hd, page_size, max_pages; const int32_t *seq, *pos, *block_table; const void *q, *kcache, *vcache; void* o; void *ws; int64_t ws_bytes;
} hs_attn_paged_args;
// Copies n slots of `bytes` bytes each: base + dst[i]*bytes = base + src[i]*bytes; src[i] = -1 clears. Pages and state slots alike.
typedef struct { int64_t n, bytes; const int32_t *src, *dst; void* base; } hs_slot_copy_args;

// h[T,I] = silu(gate)*up. bwd: dgate, dup out.
typedef struct { int32_t dtype; uint32_t flags; int64_t n; const void *gate, *up; void* h; } hs_swiglu_args;
typedef struct { int32_t dtype; uint32_t flags; int64_t n; const void *gate, *up, *dh; void *dgate, *dup; } hs_swiglu_bwd_args;

// Rows: dst[i, :] = src[row[i], :] (gather); bwd adds: dst[row[i], :] += src[i, :], i ascending.
typedef struct { int32_t dtype; uint32_t flags; int64_t N, D, T; const int32_t* row; const void* src; void* dst; } hs_gather_args;

// LM head: for target i: z = x[row[i]] W^T / temperature over the first vocab_valid columns; logp[i] = log softmax(z)[target[i]],
// entropy[i] = -sum p ln p (nats), lse[i]. Rows ascending (equal rows share logits). Full logits are never stored: `chunk` rows at a time in ws.
// out: logp[N], entropy[N], lse[N] (f32).
// bwd: dlogp[N], dent[N] (dent may be 0) in; dx[T,D] acc; dw[V,D] acc.
typedef struct {
  int32_t dtype; uint32_t flags; int64_t N, T, D, V, vocab_valid, chunk; double temperature; const int32_t *row, *target;
  const void *x, *w; void *logp, *entropy, *lse; void *ws; int64_t ws_bytes;
} hs_lmhead_args;
typedef struct {
  int32_t dtype; uint32_t flags; int64_t N, T, D, V, vocab_valid, chunk; double temperature; const int32_t *row, *target;
  const void *x, *w, *lse, *entropy, *dlogp, *dent; void *dx, *dw; void *ws; int64_t ws_bytes;
} hs_lmhead_bwd_args;

// Sampling from logits[B,V]. Per row: key (two u64 words), counter < 2^32; temperature 0 = argmax (lowest id on ties); top_k 0, top_p 1,
// min_p 0 = off. Order: temperature, min_p, top_k, top_p (at least one token kept). The token is the kept id v with the largest
// z_v/temperature - ln(-ln(1 - x_v)) (lowest id on ties): Gumbel-max, a draw from the softmax over the kept ids (gpu.md 6.8). x_v is word v%4 of
// Philox4x32-10(key.lo, counter {ctr, v/4, key.hi}), mapped to (0,1) (optim_math.h), so the noise of an id depends on the row's key and counter alone.
// out: token[B] int32, logp[B] f32: log-prob under softmax(z/temperature) over vocab_valid, WITHOUT the truncations (what the trainer recomputes;
// temperature 0 reports at temperature 1), entropy[B] f32 (0 = not wanted).
// A row without a distribution (NaN, plus infinity, or nothing but minus infinity): the cpu table fails; a device writes token -1, logp and
// entropy NaN, and the caller looks.
typedef struct { uint64_t key_lo, key_hi, ctr; float temperature, top_p, min_p; int32_t top_k; } hs_sample_row;
typedef struct { int32_t dtype; uint32_t flags; int64_t B, V, vocab_valid; const void* logits; const hs_sample_row* rows; int32_t* token; void *logp, *entropy; void *ws; int64_t ws_bytes; } hs_sample_args;
// The LM head and the draw in one: sample of the logits x[B,D] w[V,D]^T, which a device stores only with HS_TRUNCATED. Without that flag a row that
// has a truncation gets token -1. logp and entropy are the bits of lmhead for the same row and target.
typedef struct {
  int32_t dtype; uint32_t flags; int64_t B, D, V, vocab_valid; const void *x, *w; const hs_sample_row* rows; int32_t* token; void *logp, *entropy; void *ws; int64_t ws_bytes;
} hs_lmhead_sample_args;

// AdamW, decoupled decay: g = grad*grad_scale; m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; w -= lr*( m^/(sqrt(v^)+eps) + decay*w ). step >= 1.
// Weights: lo = 0: w is the master, of type dtype (F32, F64). lo != 0: the master is a float32 split as hi = nearest bfloat16 (ties away from
//   zero) and lo[n] int16, bits(master) = (bits(hi) << 16) + lo; w holds hi, as bf16 (dtype BF16) or widened to float32 (dtype F32).
// States (grad is f32, f64 with dtype F64): HS_STATE_F32 m, v [n] real; HS_STATE_BF16 m, v [n] bf16, rounded stochastically; HS_STATE_U8 m, v [n]
//   8-bit codes with f32 scales ms, vs [ceil(n/HS_STATE_BLOCK)] per block, rounded stochastically (optim_math.h). n of all but the last call of an arena and `first`
//   are multiples of HS_STATE_BLOCK.
// Random bits: Philox4x32-10(key = seed, counter = {first + i, step}), so they depend on the element's place in its arena, not on how it is cut.
#define HS_STATE_BLOCK 256
typedef enum { HS_STATE_F32 = 0, HS_STATE_BF16 = 1, HS_STATE_U8 = 2 } hs_state;
typedef struct {
  int32_t dtype; uint32_t flags; int32_t states; int32_t reserved; int64_t n, first, step; uint64_t seed; double lr, beta1, beta2, eps, decay, grad_scale;
  void *w, *lo, *m, *v, *ms, *vs; const void* grad;
} hs_adamw_args;
// out[0] (double) = sum of squares of x[n], fixed blocks of 4096 summed in order, accumulated in f64.
typedef struct { int32_t dtype; uint32_t flags; int64_t n; const void* x; double* out; void *ws; int64_t ws_bytes; } hs_sumsq_args;

typedef enum {
  HS_OP_EMBED, HS_OP_EMBED_BWD, HS_OP_RMSNORM, HS_OP_RMSNORM_BWD, HS_OP_GATEDNORM, HS_OP_GATEDNORM_BWD, HS_OP_GEMM, HS_OP_COPY, HS_OP_ADD,
  HS_OP_CONVGATE, HS_OP_CONVGATE_BWD, HS_OP_GDN, HS_OP_GDN_BWD, HS_OP_CONVGATE_STEP, HS_OP_GDN_STEP, HS_OP_ATTNPREP, HS_OP_ATTNPREP_BWD,
  HS_OP_ATTN, HS_OP_ATTN_BWD, HS_OP_GATE, HS_OP_GATE_BWD, HS_OP_KV_WRITE, HS_OP_ATTN_PAGED, HS_OP_SLOT_COPY, HS_OP_SWIGLU, HS_OP_SWIGLU_BWD,
  HS_OP_GATHER, HS_OP_GATHER_BWD, HS_OP_LMHEAD, HS_OP_LMHEAD_BWD, HS_OP_SAMPLE, HS_OP_ADAMW, HS_OP_SUMSQ, HS_OP_LMHEAD_SAMPLE,
  HS_OP_GEMM_GROUP, HS_OP_GEMM_SWIGLU, HS_NUM_OPS
} hs_op;

typedef struct hs_stream hs_stream;   // opaque; the CPU's runs every op before returning
typedef struct hs_graph hs_graph;     // opaque: launches with their arguments, in order

typedef struct hs_api {
  uint32_t size, version;             // sizeof(hs_api), HS_ABI_VERSION
  const char* name;                   // "cpu", "cuda", "emu"
  const char* (*build_info)(void);    // compiler, SIMD level chosen at run time, BLAS in use
  const char* (*last_error)(void);    // text of the calling thread's last failure: op, argument, value, what was expected
  hs_status (*configure)(const char* key, const char* value);   // cpu: "threads" N, "simd" auto|avx512|avx2|scalar, "gemm" own|openblas
  hs_stream* (*stream_create)(void* native);                    // native: raw stream handle or 0
  void (*stream_destroy)(hs_stream*);
  hs_status (*stream_sync)(hs_stream*);
  int64_t (*workspace)(int32_t op, const void* args);           // bytes of ws that run(op, args) needs; args as for run, pointers may be 0
  hs_status (*run)(hs_stream*, int32_t op, const void* args);   // the one entry for all ops: args points at the op's struct

  // Graphs (cuda, emu; cpu answers HS_ERR_UNSUPPORTED). From graph_begin to graph_end, on one thread, run() checks and records what the op
  // would launch, arguments copied, and runs nothing; stream_sync is an error. graph_launch runs it all in order with the same arguments, so what
  // changes from one launch to the next must lie in device memory. graph_end ends the recording also when it fails. nodes: kernels and memsets.
  hs_status (*graph_begin)(hs_stream*);
  hs_status (*graph_end)(hs_stream*, hs_graph** out, int64_t* nodes);
  hs_status (*graph_launch)(hs_stream*, hs_graph*);
  void (*graph_destroy)(hs_graph*);

  // Host memory that a device copies from and to by itself (page-locked on cuda), 64-byte aligned, zeroed.
  hs_status (*host_alloc)(int64_t bytes, void** out);
  void (*host_free)(void*);
} hs_api;

const hs_api* hs_get_api(uint32_t version);   // 0 when the version is not served
#endif
