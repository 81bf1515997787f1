package kernels

import (
	"fmt"
	"unsafe"
)

// The structs below mirror abi.h field by field (TestABILayout): dims and flags by value, device addresses as Ptr, 0 = absent.
// Names are those of the C fields in Go case; where two would meet, the pointer carries an underscore (DK_ and DV_ are gradients
// beside the dims DK and DV, B_ is the beta projection beside the batch B). abi.h says which pointers are read, written or added to.
// WS is scratch of at least Device.Workspace bytes.

// Flags of an op's argument struct.
const (
	AccDX     uint32 = 1 << iota // the (first) input gradient is added to instead of written
	TransA                       // gemm: A is [K,M]
	TransB                       // gemm: B is [N,K]
	Beta1                        // gemm: C += instead of C =
	CF32                         // gemm with BF16: C is float32
	Truncated                    // lmhead_sample: a row has TopK, TopP or MinP
)

// DType is the element type of an op or a buffer.
type DType uint32

// Values of hs_dtype.
const (
	F32 DType = iota
	F64
	BF16
	I32
)

// Size is the number of bytes of one element.
func (t DType) Size() int {
	switch t {
	case F64:
		return 8
	case BF16:
		return 2
	}
	return 4
}

// Wide is the type of what is never stored below float32 in an op of type t: gradients of weights, gates, states, log-probs (abi.h).
func (t DType) Wide() DType {
	if t == BF16 {
		return F32
	}
	return t
}

func (t DType) String() string {
	names := [...]string{"f32", "f64", "bf16", "i32"}
	if int(t) < len(names) {
		return names[t]
	}
	return fmt.Sprintf("dtype(%d)", uint32(t))
}

// Op numbers an entry of the table (hs_op).
type Op int32

// The ops, in the order of hs_op.
const (
	OpEmbed Op = iota
	OpEmbedBwd
	OpRMSNorm
	OpRMSNormBwd
	OpGatedNorm
	OpGatedNormBwd
	OpGemm
	OpCopy
	OpAdd
	OpConvGate
	OpConvGateBwd
	OpGDN
	OpGDNBwd
	OpConvGateStep
	OpGDNStep
	OpAttnPrep
	OpAttnPrepBwd
	OpAttn
	OpAttnBwd
	OpGate
	OpGateBwd
	OpKVWrite
	OpAttnPaged
	OpSlotCopy
	OpSwiGLU
	OpSwiGLUBwd
	OpGather
	OpGatherBwd
	OpLMHead
	OpLMHeadBwd
	OpSample
	OpAdamW
	OpSumSq
	OpLMHeadSample
	OpGemmGroup
	OpGemmSwiGLU
	numOps
)

func (o Op) String() string {
	names := [...]string{
		"embed",
		"embed_bwd",
		"rmsnorm",
		"rmsnorm_bwd",
		"gatednorm",
		"gatednorm_bwd",
		"gemm",
		"copy",
		"add",
		"convgate",
		"convgate_bwd",
		"gdn",
		"gdn_bwd",
		"convgate_step",
		"gdn_step",
		"attnprep",
		"attnprep_bwd",
		"attn",
		"attn_bwd",
		"gate",
		"gate_bwd",
		"kv_write",
		"attn_paged",
		"slot_copy",
		"swiglu",
		"swiglu_bwd",
		"gather",
		"gather_bwd",
		"lmhead",
		"lmhead_bwd",
		"sample",
		"adamw",
		"sumsq",
		"lmhead_sample",
		"gemm_group",
		"gemm_swiglu",
	}
	if o >= 0 && int(o) < len(names) {
		return names[o]
	}
	return fmt.Sprintf("op(%d)", int32(o))
}

// ForestArgs mirrors hs_forest: a Forest uploaded to the device. Made by Forest.Upload.
type ForestArgs struct {
	NumSeg, NumRows, NumChunks, MaxLen                                           int32
	Start, Len, Parent, Pos, RowSeg, Prev, ChunkOff, ChildOff, Child, Root, Slot Ptr
}

// EmbedArgs: y[T,D] = W[ids]; W [V,D], ids int32 in [0,V).
type EmbedArgs struct {
	DType         DType
	Flags         uint32
	T, D, V       int64
	IDs, W, Y, WS Ptr
	WSBytes       int64
}

// EmbedBwdArgs: dw[V,D] += dy[T,D] scattered by ids, rows in ascending order.
type EmbedBwdArgs struct {
	DType           DType
	Flags           uint32
	T, D, V         int64
	IDs, DY, DW, WS Ptr
	WSBytes         int64
}

// RMSNormArgs: y = x*rstd*(1+w) by rows of D (model.md 3.2); Rstd [T] is written when set.
type RMSNormArgs struct {
	DType             DType
	Flags             uint32
	T, D              int64
	Eps               float64
	X, W, Y, Rstd, WS Ptr
	WSBytes           int64
}

// RMSNormBwdArgs: dx written (added to with AccDX), dw[D] added to; Rstd 0 = recomputed.
type RMSNormBwdArgs struct {
	DType                      DType
	Flags                      uint32
	T, D                       int64
	Eps                        float64
	X, W, Rstd, DY, DX, DW, WS Ptr
	WSBytes                    int64
}

// GatedNormArgs: y = w * norm(o) * silu(z) per head of width DV (model.md 3.3); o, z, y [T, NV*DV], w [DV].
type GatedNormArgs struct {
	DType          DType
	Flags          uint32
	T, NV, DV      int64
	Eps            float64
	O, Z, W, Y, WS Ptr
	WSBytes        int64
}

// GatedNormBwdArgs: do, dz written, dw[DV] added to.
type GatedNormBwdArgs struct {
	DType                       DType
	Flags                       uint32
	T, NV, DV                   int64
	Eps                         float64
	O, Z, W, DY, DO, DZ, DW, WS Ptr
	WSBytes                     int64
}

// GemmArgs: C[M,N] = op(A)[M,K] op(B)[K,N] (+ C with Beta1); TransA: A is [K,M]; TransB: B is [N,K]. LD* are row strides.
type GemmArgs struct {
	DType   DType
	Flags   uint32
	M, N, K int64
	A       Ptr
	LDA     int64
	B       Ptr
	LDB     int64
	C       Ptr
	LDC     int64
	WS      Ptr
	WSBytes int64
}

// GemmSets is the most products of a GemmGroupArgs.
const GemmSets = 4

// GemmSet is one product of a GemmGroupArgs: C[M,N] = op(A) op(B) (+ C with Beta1).
type GemmSet struct {
	N   int64
	B   Ptr
	LDB int64
	C   Ptr
	LDC int64
}

// GemmGroupArgs: the first N of Set, products of one A, with the flags of GemmArgs and the bits of as many Gemms.
type GemmGroupArgs struct {
	DType   DType
	Flags   uint32
	M, K, N int64
	A       Ptr
	LDA     int64
	Set     [GemmSets]GemmSet
	WS      Ptr
	WSBytes int64
}

// GemmSwiGLUArgs: h[M,N] dense = silu(x Gate^T) * (x Up^T), both products rounded to DType: the bits of Gemm, Gemm, SwiGLU. X is [M,K] (LDX),
// Gate and Up are [N,K] (LDW).
type GemmSwiGLUArgs struct {
	DType    DType
	Flags    uint32
	M, N, K  int64
	X        Ptr
	LDX      int64
	Gate, Up Ptr
	LDW      int64
	H        Ptr
	WS       Ptr
	WSBytes  int64
}

// VecArgs: dst[N] = src[N] (OpCopy) or dst[N] += src[N] (OpAdd).
type VecArgs struct {
	DType    DType
	Flags    uint32
	N        int64
	Src, Dst Ptr
}

// ConvGateArgs: causal conv, SiLU, q/k l2-norm and gates (model.md 3.4): p [T,C], a, b [T,NV], w [C,4] to q, k, v, beta, g.
type ConvGateArgs struct {
	DType                                                     DType
	Flags                                                     uint32
	T, NK, DK, NV, DV                                         int64
	Eps                                                       float64
	F                                                         ForestArgs
	P, A, B, W, ALog, DTBias, Q, K, V, Beta, G, ConvState, WS Ptr
	WSBytes                                                   int64
}

// ConvGateBwdArgs: dp, da, db written; dw, da_log, ddt_bias added to. Training forests only.
type ConvGateBwdArgs struct {
	DType                                                                                 DType
	Flags                                                                                 uint32
	T, NK, DK, NV, DV                                                                     int64
	Eps                                                                                   float64
	F                                                                                     ForestArgs
	P, A, B, W, ALog, DTBias, DQ, DK_, DV_, DBeta, DG, DP, DA, DB, DW, DALog, DDTBias, WS Ptr
	WSBytes                                                                               int64
}

// GDNArgs: gated delta rule over a forest (model.md 3.5-3.7). States [chunks+S, NV, DK, DV] may be 0 for inference.
type GDNArgs struct {
	DType                                     DType
	Flags                                     uint32
	T, NK, DK, NV, DV                         int64
	F                                         ForestArgs
	Q, K, V, Beta, G, O, States, RecState, WS Ptr
	WSBytes                                   int64
}

// GDNBwdArgs: dq, dk, dv, dbeta, dg written.
type GDNBwdArgs struct {
	DType                                                     DType
	Flags                                                     uint32
	T, NK, DK, NV, DV                                         int64
	F                                                         ForestArgs
	Q, K, V, Beta, G, States, DO, DQ, DK_, DV_, DBeta, DG, WS Ptr
	WSBytes                                                   int64
}

// ConvGateStepArgs: one row per sequence, Slot [B] distinct; B is the number of rows, B_ the beta projection.
type ConvGateStepArgs struct {
	DType                                                        DType
	Flags                                                        uint32
	B, NK, DK, NV, DV                                            int64
	Eps                                                          float64
	Slot, P, A, B_, W, ALog, DTBias, Q, K, V, Beta, G, ConvState Ptr
}

// GDNStepArgs: one row per sequence, Pos [B] its absolute position; RecState, slots of GDNSlotBytes, is updated in place.
type GDNStepArgs struct {
	DType                                    DType
	Flags                                    uint32
	B, NK, DK, NV, DV                        int64
	Slot, Pos, Q, K, V, Beta, G, O, RecState Ptr
}

// AttnPrepArgs: q/k norm and partial rotary embedding (model.md 3.9). QG [T, NH*2*HD], KIn [T, NKV*HD].
type AttnPrepArgs struct {
	DType                              DType
	Flags                              uint32
	T, NH, NKV, HD, Rot                int64
	Theta, Eps                         float64
	RopePos, QG, KIn, WQ, WK, Q, K, WS Ptr
	WSBytes                            int64
}

// AttnPrepBwdArgs: query half of dqg and dkin written, dwq and dwk added to.
type AttnPrepBwdArgs struct {
	DType                                                     DType
	Flags                                                     uint32
	T, NH, NKV, HD, Rot                                       int64
	Theta, Eps                                                float64
	RopePos, QG, KIn, WQ, WK, DQ, DK, DQG, DKIn, DWQ, DWK, WS Ptr
	WSBytes                                                   int64
}

// AttnArgs: causal softmax attention over a forest; o [T, NH*HD], lse [T, NH].
type AttnArgs struct {
	DType               DType
	Flags               uint32
	T, NH, NKV, HD      int64
	F                   ForestArgs
	Q, K, V, O, LSE, WS Ptr
	WSBytes             int64
}

// AttnBwdArgs: dq, dk, dv written.
type AttnBwdArgs struct {
	DType                               DType
	Flags                               uint32
	T, NH, NKV, HD                      int64
	F                                   ForestArgs
	Q, K, V, O, LSE, DO, DQ, DK, DV, WS Ptr
	WSBytes                             int64
}

// GateArgs: y[T, NH*HD] = o * sigmoid(gate half of qg).
type GateArgs struct {
	DType     DType
	Flags     uint32
	T, NH, HD int64
	O, QG, Y  Ptr
}

// GateBwdArgs: do and the gate half of dqg written.
type GateBwdArgs struct {
	DType              DType
	Flags              uint32
	T, NH, HD          int64
	O, QG, DY, DO, DQG Ptr
}

// KVWriteArgs: rows of k, v go to sequence seq[t], position pos[t] of the paged cache.
type KVWriteArgs struct {
	DType                                      DType
	Flags                                      uint32
	T, NKV, HD, PageSize, MaxPages             int64
	Seq, Pos, BlockTable, K, V, KCache, VCache Ptr
}

// AttnPagedArgs: row t of sequence seq[t] attends cache positions 0..pos[t].
type AttnPagedArgs struct {
	DType                                          DType
	Flags                                          uint32
	T, NH, NKV, HD, PageSize, MaxPages             int64
	Seq, Pos, BlockTable, Q, KCache, VCache, O, WS Ptr
	WSBytes                                        int64
}

// SlotCopyArgs: N copies of Bytes bytes, base+dst[i]*Bytes = base+src[i]*Bytes, i ascending; src -1 clears.
type SlotCopyArgs struct {
	N, Bytes       int64
	Src, Dst, Base Ptr
}

// SwiGLUArgs: h[N] = silu(gate)*up.
type SwiGLUArgs struct {
	DType       DType
	Flags       uint32
	N           int64
	Gate, Up, H Ptr
}

// SwiGLUBwdArgs: dgate, dup written.
type SwiGLUBwdArgs struct {
	DType                    DType
	Flags                    uint32
	N                        int64
	Gate, Up, DH, DGate, DUp Ptr
}

// GatherArgs: dst[i,:] = src[row[i],:] for N rows of D; backward dst[row[i],:] += src[i,:], i ascending. T is the number of indexed rows.
type GatherArgs struct {
	DType         DType
	Flags         uint32
	N, D, T       int64
	Row, Src, Dst Ptr
}

// LMHeadArgs: log-prob, entropy (nats) and log-sum-exp of N (row, target) pairs, rows ascending; Chunk rows of logits live in WS.
type LMHeadArgs struct {
	DType                                     DType
	Flags                                     uint32
	N, T, D, V, VocabValid, Chunk             int64
	Temperature                               float64
	Row, Target, X, W, LogP, Entropy, LSE, WS Ptr
	WSBytes                                   int64
}

// LMHeadBwdArgs: dx[T,D] and dw[V,D] added to; DEnt may be 0.
type LMHeadBwdArgs struct {
	DType                                                    DType
	Flags                                                    uint32
	N, T, D, V, VocabValid, Chunk                            int64
	Temperature                                              float64
	Row, Target, X, W, LSE, Entropy, DLogP, DEnt, DX, DW, WS Ptr
	WSBytes                                                  int64
}

// SampleRow is how one row is sampled: Philox key and counter, temperature (0 = argmax), and truncations (TopP 1, MinP 0, TopK 0 = off).
type SampleRow struct {
	KeyLo, KeyHi, Ctr       uint64 // Ctr < 2^32
	Temperature, TopP, MinP float32
	TopK                    int32
}

// SampleArgs: one token per row of logits [B,V] by Gumbel-max (abi.h); Rows [B] SampleRow, Token int32, LogP and Entropy (0 = not wanted) real.
type SampleArgs struct {
	DType                                  DType
	Flags                                  uint32
	B, V, VocabValid                       int64
	Logits, Rows, Token, LogP, Entropy, WS Ptr
	WSBytes                                int64
}

// LMHeadSampleArgs: SampleArgs on the logits X[B,D] W[V,D]^T, which a device stores only with the flag Truncated.
type LMHeadSampleArgs struct {
	DType                                DType
	Flags                                uint32
	B, D, V, VocabValid                  int64
	X, W, Rows, Token, LogP, Entropy, WS Ptr
	WSBytes                              int64
}

// State is how the moments of AdamW are stored.
type State int32

// Moments in the real type, in stochastically rounded bfloat16, or as 8-bit codes with a float32 scale per block of StateBlock elements.
const (
	StateF32 State = iota
	StateBF16
	StateU8
)

// StateBlock is the number of elements that share a scale in StateU8.
const StateBlock = 256

// AdamWArgs: decoupled AdamW over N elements; Step counts from 1, gradients are multiplied by GradScale. Lo 0: W is the master; else W
// holds its upper half and Lo the lower one (abi.h). First is the index of element 0 in its arena: with Seed and Step it keys the
// stochastic rounding.
type AdamWArgs struct {
	DType                                   DType
	Flags                                   uint32
	States                                  State
	_                                       int32
	N, First, Step                          int64
	Seed                                    uint64
	LR, Beta1, Beta2, Eps, Decay, GradScale float64
	W, Lo, M, V, MS, VS, Grad               Ptr
}

// SumSqArgs: out[0] (float64) = sum of squares of x[N], blocks of 4096 added in order.
type SumSqArgs struct {
	DType      DType
	Flags      uint32
	N          int64
	X, Out, WS Ptr
	WSBytes    int64
}

// SampleRowBytes is the size of a SampleRow on the device.
const SampleRowBytes = int64(unsafe.Sizeof(SampleRow{}))

// One method per op: each runs the op of its name, and does nothing when the stream has already failed.

// Embed runs OpEmbed: see EmbedArgs.
func (s *Stream) Embed(a *EmbedArgs) { s.Run(OpEmbed, unsafe.Pointer(a)) }

// EmbedBwd runs OpEmbedBwd: see EmbedBwdArgs.
func (s *Stream) EmbedBwd(a *EmbedBwdArgs) { s.Run(OpEmbedBwd, unsafe.Pointer(a)) }

// RMSNorm runs OpRMSNorm: see RMSNormArgs.
func (s *Stream) RMSNorm(a *RMSNormArgs) { s.Run(OpRMSNorm, unsafe.Pointer(a)) }

// RMSNormBwd runs OpRMSNormBwd: see RMSNormBwdArgs.
func (s *Stream) RMSNormBwd(a *RMSNormBwdArgs) { s.Run(OpRMSNormBwd, unsafe.Pointer(a)) }

// GatedNorm runs OpGatedNorm: see GatedNormArgs.
func (s *Stream) GatedNorm(a *GatedNormArgs) { s.Run(OpGatedNorm, unsafe.Pointer(a)) }

// GatedNormBwd runs OpGatedNormBwd: see GatedNormBwdArgs.
func (s *Stream) GatedNormBwd(a *GatedNormBwdArgs) { s.Run(OpGatedNormBwd, unsafe.Pointer(a)) }

// Gemm runs OpGemm: see GemmArgs.
func (s *Stream) Gemm(a *GemmArgs) { s.Run(OpGemm, unsafe.Pointer(a)) }

// GemmGroup runs OpGemmGroup: see GemmGroupArgs.
func (s *Stream) GemmGroup(a *GemmGroupArgs) { s.Run(OpGemmGroup, unsafe.Pointer(a)) }

// GemmSwiGLU runs OpGemmSwiGLU: see GemmSwiGLUArgs.
func (s *Stream) GemmSwiGLU(a *GemmSwiGLUArgs) { s.Run(OpGemmSwiGLU, unsafe.Pointer(a)) }

// Copy runs OpCopy: dst = src.
func (s *Stream) Copy(a *VecArgs) { s.Run(OpCopy, unsafe.Pointer(a)) }

// Add runs OpAdd: dst += src.
func (s *Stream) Add(a *VecArgs) { s.Run(OpAdd, unsafe.Pointer(a)) }

// ConvGate runs OpConvGate: see ConvGateArgs.
func (s *Stream) ConvGate(a *ConvGateArgs) { s.Run(OpConvGate, unsafe.Pointer(a)) }

// ConvGateBwd runs OpConvGateBwd: see ConvGateBwdArgs.
func (s *Stream) ConvGateBwd(a *ConvGateBwdArgs) { s.Run(OpConvGateBwd, unsafe.Pointer(a)) }

// GDN runs OpGDN: see GDNArgs.
func (s *Stream) GDN(a *GDNArgs) { s.Run(OpGDN, unsafe.Pointer(a)) }

// GDNBwd runs OpGDNBwd: see GDNBwdArgs.
func (s *Stream) GDNBwd(a *GDNBwdArgs) { s.Run(OpGDNBwd, unsafe.Pointer(a)) }

// ConvGateStep runs OpConvGateStep: see ConvGateStepArgs.
func (s *Stream) ConvGateStep(a *ConvGateStepArgs) { s.Run(OpConvGateStep, unsafe.Pointer(a)) }

// GDNStep runs OpGDNStep: see GDNStepArgs.
func (s *Stream) GDNStep(a *GDNStepArgs) { s.Run(OpGDNStep, unsafe.Pointer(a)) }

// AttnPrep runs OpAttnPrep: see AttnPrepArgs.
func (s *Stream) AttnPrep(a *AttnPrepArgs) { s.Run(OpAttnPrep, unsafe.Pointer(a)) }

// AttnPrepBwd runs OpAttnPrepBwd: see AttnPrepBwdArgs.
func (s *Stream) AttnPrepBwd(a *AttnPrepBwdArgs) { s.Run(OpAttnPrepBwd, unsafe.Pointer(a)) }

// Attn runs OpAttn: see AttnArgs.
func (s *Stream) Attn(a *AttnArgs) { s.Run(OpAttn, unsafe.Pointer(a)) }

// AttnBwd runs OpAttnBwd: see AttnBwdArgs.
func (s *Stream) AttnBwd(a *AttnBwdArgs) { s.Run(OpAttnBwd, unsafe.Pointer(a)) }

// Gate runs OpGate: see GateArgs.
func (s *Stream) Gate(a *GateArgs) { s.Run(OpGate, unsafe.Pointer(a)) }

// GateBwd runs OpGateBwd: see GateBwdArgs.
func (s *Stream) GateBwd(a *GateBwdArgs) { s.Run(OpGateBwd, unsafe.Pointer(a)) }

// KVWrite runs OpKVWrite: see KVWriteArgs.
func (s *Stream) KVWrite(a *KVWriteArgs) { s.Run(OpKVWrite, unsafe.Pointer(a)) }

// AttnPaged runs OpAttnPaged: see AttnPagedArgs.
func (s *Stream) AttnPaged(a *AttnPagedArgs) { s.Run(OpAttnPaged, unsafe.Pointer(a)) }

// SlotCopy runs OpSlotCopy: see SlotCopyArgs.
func (s *Stream) SlotCopy(a *SlotCopyArgs) { s.Run(OpSlotCopy, unsafe.Pointer(a)) }

// SwiGLU runs OpSwiGLU: see SwiGLUArgs.
func (s *Stream) SwiGLU(a *SwiGLUArgs) { s.Run(OpSwiGLU, unsafe.Pointer(a)) }

// SwiGLUBwd runs OpSwiGLUBwd: see SwiGLUBwdArgs.
func (s *Stream) SwiGLUBwd(a *SwiGLUBwdArgs) { s.Run(OpSwiGLUBwd, unsafe.Pointer(a)) }

// Gather runs OpGather: see GatherArgs.
func (s *Stream) Gather(a *GatherArgs) { s.Run(OpGather, unsafe.Pointer(a)) }

// GatherBwd runs OpGatherBwd: see GatherArgs.
func (s *Stream) GatherBwd(a *GatherArgs) { s.Run(OpGatherBwd, unsafe.Pointer(a)) }

// LMHead runs OpLMHead: see LMHeadArgs.
func (s *Stream) LMHead(a *LMHeadArgs) { s.Run(OpLMHead, unsafe.Pointer(a)) }

// LMHeadBwd runs OpLMHeadBwd: see LMHeadBwdArgs.
func (s *Stream) LMHeadBwd(a *LMHeadBwdArgs) { s.Run(OpLMHeadBwd, unsafe.Pointer(a)) }

// Sample runs OpSample: see SampleArgs.
func (s *Stream) Sample(a *SampleArgs) { s.Run(OpSample, unsafe.Pointer(a)) }

// AdamW runs OpAdamW: see AdamWArgs.
func (s *Stream) AdamW(a *AdamWArgs) { s.Run(OpAdamW, unsafe.Pointer(a)) }

// SumSq runs OpSumSq: see SumSqArgs.
func (s *Stream) SumSq(a *SumSqArgs) { s.Run(OpSumSq, unsafe.Pointer(a)) }

// LMHeadSample runs OpLMHeadSample: see LMHeadSampleArgs.
func (s *Stream) LMHeadSample(a *LMHeadSampleArgs) { s.Run(OpLMHeadSample, unsafe.Pointer(a)) }
