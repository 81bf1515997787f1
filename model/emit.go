package model

import (
	"fmt"
	"unsafe"

	"harness-s/kernels"
)

// opFill marks a record that zeroes a value; it is a stream method, not an op of the table.
const opFill kernels.Op = -1

type fillArgs struct {
	dst   kernels.Ptr
	bytes int64
}

// record is one kernel call with its argument struct made once: the fields that depend on a batch or on the arena are listed and patched.
type record struct {
	op    kernels.Op
	label string
	again bool // recomputed forward
	args  unsafe.Pointer

	ptrs    []ptrField
	sizes   []sizeField
	forest  *kernels.ForestArgs
	ws      *kernels.Ptr
	wsBytes *int64

	reads, writes, adds []valueID // adds: the writes that are added to
	flops               func(Shapes) float64
}

type ptrField struct {
	at *kernels.Ptr
	v  valueID
}

// sizeField is *at = lead * width.
type sizeField struct {
	at    *int64
	lead  lead
	width int64
}

func (r *record) in(at *kernels.Ptr, v valueID) {
	r.ptrs = append(r.ptrs, ptrField{at, v})
	r.reads = append(r.reads, v)
}

func (r *record) out(at *kernels.Ptr, v valueID) {
	r.ptrs = append(r.ptrs, ptrField{at, v})
	r.writes = append(r.writes, v)
}

// acc adds to v; none leaves the address 0.
func (r *record) acc(at *kernels.Ptr, v valueID) {
	if v == none {
		return
	}
	r.out(at, v)
	r.adds = append(r.adds, v)
}

// outOrAcc sets flag when the value is added to.
func (r *record) outOrAcc(at *kernels.Ptr, v valueID, acc bool, flags *uint32, flag uint32) {
	if acc {
		*flags |= flag
		r.acc(at, v)
		return
	}
	r.out(at, v)
}

func (r *record) rows(at *int64) { r.size(at, leadRows, 1) }

func (r *record) size(at *int64, l lead, width int64) {
	r.sizes = append(r.sizes, sizeField{at, l, width})
}

func (r *record) scratch(ws *kernels.Ptr, bytes *int64) { r.ws, r.wsBytes = ws, bytes }

// bind sets everything that depends on a batch's shapes. The workspace field keeps its address.
func (r *record) bind(sh Shapes, f *kernels.ForestArgs) {
	for _, s := range r.sizes {
		*s.at = s.lead.of(sh) * s.width
	}
	if r.forest != nil {
		*r.forest = *f
	}
}

// emitter turns ops into records of type dtype; the products that make gradients of weights write them in dtype.Wide. The planner gives it arena values; the tape interpreter gives it buffers of its own.
type emitter struct {
	geo   geometry
	temp  float64
	valid int64 // vocabulary columns that exist
	dtype kernels.DType
}

// newEmitter makes an emitter for a graph; valid 0 means the whole vocabulary.
func newEmitter(gr *Graph, dt kernels.DType, valid int64) emitter {
	if valid == 0 {
		valid = gr.env.geo.V
	}
	return emitter{geo: gr.env.geo, temp: gr.env.temp, valid: valid, dtype: dt}
}

func (e emitter) copy(src, dst valueID, s spec, label string) *record {
	return e.vec(kernels.OpCopy, src, dst, s, label)
}

func (e emitter) addTo(src, dst valueID, s spec, label string) *record {
	return e.vec(kernels.OpAdd, src, dst, s, label)
}

func (e emitter) vec(op kernels.Op, src, dst valueID, s spec, label string) *record {
	a := &kernels.VecArgs{DType: e.dtype}
	r := &record{op: op, label: label, args: unsafe.Pointer(a)}
	r.size(&a.N, s.lead, s.width())
	r.in(&a.Src, src)
	if op == kernels.OpAdd {
		r.acc(&a.Dst, dst)
	} else {
		r.out(&a.Dst, dst)
	}
	return r
}

func (e emitter) zero(dst valueID, s spec, label string) *record {
	a := &fillArgs{}
	r := &record{op: opFill, label: label, args: unsafe.Pointer(a)}
	r.size(&a.bytes, s.lead, s.width()*int64(s.storage(e.dtype).Size()))
	r.out(&a.dst, dst)
	return r
}

// gemm is C[m,n] = op(A) op(B); one of m, n, k is T as lead says: 'm' or 'k'.
func (e emitter) gemm(flags uint32, tDim byte, m, n, k int64, label string) (*kernels.GemmArgs, *record) {
	a := &kernels.GemmArgs{DType: e.dtype, Flags: flags, M: m, N: n, K: k, LDC: n}
	r := &record{op: kernels.OpGemm, label: label, args: unsafe.Pointer(a)}
	per := 2 * float64(n) * float64(k)
	if tDim == 'm' {
		r.rows(&a.M)
	} else {
		r.rows(&a.K)
		per = 2 * float64(m) * float64(n)
	}
	r.flops = func(sh Shapes) float64 { return per * float64(sh.Rows) }
	r.scratch(&a.WS, &a.WSBytes)
	return a, r
}

// emit gives the records of one op. in and out are the values behind its children and outputs; acc[i] says that output i is added to. Outputs
// of parameter gradients are always added to and the head's dx only can be: where acc is false the value is zeroed first.
func (e emitter) emit(o *op, in [][]valueID, out []valueID, acc []bool) []*record {
	var pre []*record
	for i, s := range o.outs() {
		onlyAdds := o.kind.backward() && s.lead == leadNone || o.kind == kLMHeadBwd
		if onlyAdds && !acc[i] && out[i] != none {
			pre = append(pre, e.zero(out[i], s, o.label))
		}
	}
	switch o.kind {
	case kLinear, kLinearAdd, kLinearDX, kLinearDW:
		return append(pre, e.linear(o, in, out[0], acc[0])...)
	case kConvGate, kConvGateBwd, kGDN, kGDNBwd, kGatedNorm, kGatedNormBwd:
		return append(pre, e.deltaNet(o, in, out))
	case kAttnPrep, kAttnPrepBwd, kAttn, kAttnBwd, kGate, kGateBwd:
		return append(pre, e.attention(o, in, out, acc))
	case kLMHead, kLMHeadBwd:
		return append(pre, e.head(o, in, out))
	}
	return append(pre, e.pointwise(o, in, out, acc))
}

func (e emitter) linear(o *op, in [][]valueID, out valueID, acc bool) []*record {
	switch o.kind {
	case kLinear, kLinearAdd:
		a, r := e.gemm(kernels.TransB, 'm', 0, o.n, o.k, o.label)
		a.LDA, a.LDB = o.k, o.k
		if o.kind == kLinear {
			r.in(&a.A, in[0][0])
			r.in(&a.B, in[1][0])
			r.out(&a.C, out)
			return []*record{r}
		}
		a.Flags |= kernels.Beta1
		r.in(&a.A, in[1][0])
		r.in(&a.B, in[2][0])
		r.acc(&a.C, out)
		return []*record{e.copy(in[0][0], out, rows("y", o.n), o.label), r}
	case kLinearDX:
		a, r := e.gemm(0, 'm', 0, o.k, o.n, o.label)
		a.LDA, a.LDB = o.n, o.k
		r.in(&a.A, in[0][0])
		r.in(&a.B, in[1][0])
		r.outOrAcc(&a.C, out, acc, &a.Flags, kernels.Beta1)
		return []*record{r}
	}
	return []*record{e.weightGradient(o.n, o.k, in[0][0], in[1][0], out, o.label)}
}

// weightGradient is C[m,n] += A[T,m]^T B[T,n] into a gradient of weights.
func (e emitter) weightGradient(m, n int64, a, b, c valueID, label string) *record {
	g, r := e.gemm(kernels.TransA|kernels.Beta1|wideC(e.dtype), 'k', m, n, 0, label)
	g.LDA, g.LDB = m, n
	r.in(&g.A, a)
	r.in(&g.B, b)
	r.acc(&g.C, c)
	return r
}

// wideC is the flag of a product of type t whose result is of type t.Wide.
func wideC(t kernels.DType) uint32 {
	if t == kernels.BF16 {
		return kernels.CF32
	}
	return 0
}

func (e emitter) pointwise(o *op, in [][]valueID, out []valueID, acc []bool) *record {
	g := e.geo
	r := &record{label: o.label}
	switch o.kind {
	case kEmbed:
		a := &kernels.EmbedArgs{DType: e.dtype, D: g.D, V: g.V}
		r.op, r.args = kernels.OpEmbed, unsafe.Pointer(a)
		r.rows(&a.T)
		r.in(&a.IDs, in[0][0])
		r.in(&a.W, in[1][0])
		r.out(&a.Y, out[0])
		r.scratch(&a.WS, &a.WSBytes)
	case kEmbedBwd:
		a := &kernels.EmbedBwdArgs{DType: e.dtype, D: g.D, V: g.V}
		r.op, r.args = kernels.OpEmbedBwd, unsafe.Pointer(a)
		r.rows(&a.T)
		r.in(&a.IDs, in[0][0])
		r.in(&a.DY, in[1][0])
		r.acc(&a.DW, out[0])
		r.scratch(&a.WS, &a.WSBytes)
	case kRMSNorm:
		a := &kernels.RMSNormArgs{DType: e.dtype, D: g.D, Eps: g.Eps}
		r.op, r.args = kernels.OpRMSNorm, unsafe.Pointer(a)
		r.rows(&a.T)
		r.in(&a.X, in[0][0])
		r.in(&a.W, in[1][0])
		r.out(&a.Y, out[0])
		r.scratch(&a.WS, &a.WSBytes)
	case kRMSNormBwd:
		a := &kernels.RMSNormBwdArgs{DType: e.dtype, D: g.D, Eps: g.Eps}
		r.op, r.args = kernels.OpRMSNormBwd, unsafe.Pointer(a)
		r.rows(&a.T)
		r.in(&a.X, in[0][0])
		r.in(&a.W, in[1][0])
		r.in(&a.DY, in[2][0])
		r.outOrAcc(&a.DX, out[0], acc[0], &a.Flags, kernels.AccDX)
		r.acc(&a.DW, out[1])
		r.scratch(&a.WS, &a.WSBytes)
	case kSwiGLU:
		a := &kernels.SwiGLUArgs{DType: e.dtype}
		r.op, r.args = kernels.OpSwiGLU, unsafe.Pointer(a)
		r.size(&a.N, leadRows, g.I)
		r.in(&a.Gate, in[0][0])
		r.in(&a.Up, in[1][0])
		r.out(&a.H, out[0])
	case kSwiGLUBwd:
		a := &kernels.SwiGLUBwdArgs{DType: e.dtype}
		r.op, r.args = kernels.OpSwiGLUBwd, unsafe.Pointer(a)
		r.size(&a.N, leadRows, g.I)
		r.in(&a.Gate, in[0][0])
		r.in(&a.Up, in[1][0])
		r.in(&a.DH, in[2][0])
		r.out(&a.DGate, out[0])
		r.out(&a.DUp, out[1])
	default:
		panic(buildError{fmt.Errorf("emit %s: no kernel", o.kind)})
	}
	return r
}

// headChunk is how many rows of logits the head holds at a time: in bfloat16, on a GPU, enough for its products to be bound by arithmetic (gpu.md
// 6.7); else 2 MiB of float32 for a small vocabulary, at least 64 rows for a large one so that the weights are not streamed for a handful of rows.
func headChunk(vocab int64, dt kernels.DType) int64 {
	if dt == kernels.BF16 {
		return waveRows
	}
	return min(max(8<<20/vocab, 64), 512)
}

func (e emitter) head(o *op, in [][]valueID, out []valueID) *record {
	g := e.geo
	r := &record{label: o.label}
	mul := 2.0
	if o.kind == kLMHead {
		a := &kernels.LMHeadArgs{DType: e.dtype, D: g.D, V: g.V, VocabValid: e.valid, Chunk: headChunk(g.V, e.dtype), Temperature: e.temp}
		r.op, r.args = kernels.OpLMHead, unsafe.Pointer(a)
		r.rows(&a.T)
		r.size(&a.N, leadTargets, 1)
		r.in(&a.X, in[0][0])
		r.in(&a.W, in[1][0])
		r.in(&a.Row, in[2][0])
		r.in(&a.Target, in[3][0])
		r.out(&a.LogP, out[0])
		r.out(&a.Entropy, out[1])
		r.out(&a.LSE, out[2])
		r.scratch(&a.WS, &a.WSBytes)
	} else {
		if mul = 6; out[1] == none {
			mul = 4
		}
		a := &kernels.LMHeadBwdArgs{DType: e.dtype, D: g.D, V: g.V, VocabValid: e.valid, Chunk: headChunk(g.V, e.dtype), Temperature: e.temp}
		r.op, r.args = kernels.OpLMHeadBwd, unsafe.Pointer(a)
		r.rows(&a.T)
		r.size(&a.N, leadTargets, 1)
		r.in(&a.X, in[0][0])
		r.in(&a.W, in[1][0])
		r.in(&a.Row, in[2][0])
		r.in(&a.Target, in[3][0])
		r.in(&a.Entropy, in[4][1])
		r.in(&a.LSE, in[4][2])
		r.in(&a.DLogP, in[5][0])
		r.in(&a.DEnt, in[5][1])
		r.acc(&a.DX, out[0])
		r.acc(&a.DW, out[1])
		r.scratch(&a.WS, &a.WSBytes)
	}
	r.flops = func(sh Shapes) float64 { return mul * float64(sh.Targets) * float64(g.D) * float64(g.V) }
	return r
}
