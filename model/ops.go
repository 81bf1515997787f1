package model

import (
	"fmt"
	"hash"
	"hash/fnv"

	"github.com/chewxy/hm"
	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"harness-s/kernels"
)

// Shape legend of the graph files: T packed rows, N targets, S recurrent states of a forest (chunks + segments), D hidden, I intermediate,
// V vocabulary, C conv channels; nk/dk, nv/dv linear heads and widths, nh, nkv, hd attention heads and width.

// geometry is what the ops need to know of a Config. It takes part in every op's hash.
type geometry struct {
	D, I, V, C, NK, DK, NV, DV, NH, NKV, HD, Rot int64
	Theta, Eps                                   float64
}

func geometryOf(c *Config) geometry {
	nk, dk, nv, dv := int64(c.LinKeyHeads), int64(c.LinKeyDim), int64(c.LinValueHeads), int64(c.LinValueDim)
	return geometry{
		D: int64(c.Hidden), I: int64(c.Intermediate), V: int64(c.VocabSize), C: 2*nk*dk + nv*dv,
		NK: nk, DK: dk, NV: nv, DV: dv, NH: int64(c.NumHeads), NKV: int64(c.NumKVHeads), HD: int64(c.HeadDim),
		Rot: int64(c.RotaryDim), Theta: c.RopeTheta, Eps: c.RMSEps,
	}
}

// Shapes are the sizes of one batch that a program's sizes depend on.
type Shapes struct {
	Rows, Targets int64 // T, N
	States        int64 // GDN chunks of the forest + its segments
}

// lead names the symbolic first dimension of a value.
type lead uint8

const (
	leadNone lead = iota // a fixed shape: a parameter or its gradient
	leadRows
	leadTargets
	leadStates
)

func (l lead) of(sh Shapes) int64 {
	switch l {
	case leadRows:
		return sh.Rows
	case leadTargets:
		return sh.Targets
	case leadStates:
		return sh.States
	}
	return 1
}

// spec describes one value: its symbolic shape, or the parts of a packed handle. Gorgonia ops have one output, so an op with several
// returns a handle: the parts one after the other in one vector.
type spec struct {
	name  string
	lead  lead
	dims  []int64
	index bool   // int32
	wide  bool   // never below float32 (abi.h, HS_BF16)
	parts []spec // non-nil: a packed handle
}

func rows(name string, dims ...int64) spec  { return spec{name: name, lead: leadRows, dims: dims} }
func fixed(name string, dims ...int64) spec { return spec{name: name, dims: dims} }
func gradient(name string, dims ...int64) spec {
	return spec{name: name, dims: dims, wide: true}
}
func wideRows(name string, dims ...int64) spec {
	return spec{name: name, lead: leadRows, dims: dims, wide: true}
}
func index(name string, l lead, dims ...int64) spec {
	return spec{name: name, lead: l, dims: dims, index: true}
}

// width is the number of elements per unit of the leading dimension.
func (s spec) width() int64 {
	n := int64(1)
	for _, d := range s.dims {
		n *= d
	}
	return n
}

// storage is the value's type in a plan of type t. Planner, executor and memory planner all go by it.
func (s spec) storage(t kernels.DType) kernels.DType {
	switch {
	case s.index:
		return kernels.I32
	case s.wide:
		return t.Wide()
	}
	return t
}

func (s spec) elems(sh Shapes) int64 {
	if s.parts == nil {
		return s.lead.of(sh) * s.width()
	}
	var n int64
	for _, p := range s.parts {
		n += p.elems(sh)
	}
	return n
}

func (s spec) shape(sh Shapes) tensor.Shape {
	if s.parts != nil {
		return tensor.Shape{int(s.elems(sh))}
	}
	var out tensor.Shape
	if s.lead != leadNone {
		out = append(out, int(s.lead.of(sh)))
	}
	for _, d := range s.dims {
		out = append(out, int(d))
	}
	return out
}

func (s spec) values() []spec {
	if s.parts != nil {
		return s.parts
	}
	return []spec{s}
}

// kind is the type of a coarse op. The comment gives inputs -> outputs; several outputs travel as one packed handle.
type kind uint8

const (
	kEmbed        kind = iota // ids, W -> y
	kEmbedBwd                 // ids, dy -> dW
	kRMSNorm                  // x, w -> y
	kRMSNormBwd               // x, w, dy -> dx dw
	kLinear                   // x, W -> y = x W^T
	kLinearAdd                // h, x, W -> h + x W^T
	kLinearDX                 // dy, W -> dx
	kLinearDW                 // dy, x -> dW
	kConvGate                 // p, a, b, w, A_log, dt_bias, forest -> q k v beta g
	kConvGateBwd              // p, a, b, w, A_log, dt_bias, forest, d(q k v beta g) -> dp da db dw dA_log ddt_bias
	kGDN                      // q k v beta g, forest -> o states
	kGDNBwd                   // q k v beta g, o states, forest, do -> d(q k v beta g)
	kGatedNorm                // o states, z, w -> y
	kGatedNormBwd             // o states, z, w, dy -> do dz dw
	kAttnPrep                 // qg, kin, wq, wk, pos -> q k
	kAttnPrepBwd              // qg, kin, wq, wk, pos, d(q k) -> dqg(query half) dkin dwq dwk
	kAttn                     // q k, v, forest -> o lse
	kAttnBwd                  // q k, v, o lse, forest, do -> dq dk dv
	kGate                     // o lse, qg -> y
	kGateBwd                  // o lse, qg, dy -> do dqg(gate half)
	kSwiGLU                   // gate, up -> h
	kSwiGLUBwd                // gate, up, dh -> dgate dup
	kLMHead                   // x, W, rows, targets -> logp entropy lse
	kSeed                     // dlogp, dent -> the gradient of the head's handle
	kLMHeadBwd                // x, W, rows, targets, logp entropy lse, seed -> dx dW
	kPick                     // handle -> parts lo..hi of it
)

var kindNames = [...]string{
	"embed", "embed_bwd", "rmsnorm", "rmsnorm_bwd", "linear", "linear_add", "linear_dx", "linear_dw", "convgate", "convgate_bwd", "gdn", "gdn_bwd",
	"gatednorm", "gatednorm_bwd", "attnprep", "attnprep_bwd", "attn", "attn_bwd", "gate", "gate_bwd", "swiglu", "swiglu_bwd", "lmhead", "seed",
	"lmhead_bwd", "pick",
}

func (k kind) String() string { return kindNames[k] }

// environment is shared by the ops of one graph: geometry, nominal shapes for shape inference, and the interpreter when the graph is to run
// on a TapeMachine.
type environment struct {
	geo    geometry
	shapes Shapes
	temp   float64 // softmax temperature of the head
	tape   *interpreter
	seq    int
}

// op is one coarse operation as Gorgonia sees it. It implements G.Op and G.SDOp and is immutable.
type op struct {
	env   *environment
	kind  kind
	seq   int    // order of the forward op in the graph; a backward op carries its forward op's
	layer int    // decoder layer, -1 for embedding, final norm and head
	label string // parameter stem, for listings
	n, k  int64  // Linear family: output and input features
	from  *op    // kPick: the op whose handle is read
	lo    int    // kPick: first part
	hi    int    // kPick: one past the last part
}

var (
	_ G.Op   = (*op)(nil)
	_ G.SDOp = (*op)(nil)
)

func convOuts(g geometry) []spec {
	return []spec{rows("q", g.NK*g.DK), rows("k", g.NK*g.DK), rows("v", g.NV*g.DV), wideRows("beta", g.NV), wideRows("g", g.NV)}
}

func gdnOuts(g geometry) []spec {
	return []spec{rows("o", g.NV*g.DV), {name: "states", lead: leadStates, dims: []int64{g.NV, g.DK, g.DV}, wide: true}}
}

func prepOuts(g geometry) []spec { return []spec{rows("q", g.NH*g.HD), rows("k", g.NKV*g.HD)} }

func attnOuts(g geometry) []spec { return []spec{rows("o", g.NH*g.HD), wideRows("lse", g.NH)} }

func targets(name string) spec { return spec{name: name, lead: leadTargets, wide: true} }

func packed(parts []spec) spec { return spec{name: "handle", parts: parts} }

// ins lists the inputs in child order.
func (o *op) ins() []spec {
	g := o.env.geo
	vd := g.NV * g.DV
	conv := []spec{rows("p", g.C), rows("a", g.NV), rows("b", g.NV), fixed("w", g.C, 1, kernels.ConvTaps), fixed("a_log", g.NV), fixed("dt_bias", g.NV), index("forest", leadNone, 1)}
	head := []spec{rows("x", g.D), fixed("w", g.V, g.D), index("rows", leadTargets), index("targets", leadTargets)}
	prep := []spec{rows("qg", g.NH*2*g.HD), rows("kin", g.NKV*g.HD), fixed("wq", g.HD), fixed("wk", g.HD), index("pos", leadRows)}
	forest := index("forest", leadNone, 1)
	switch o.kind {
	case kEmbed:
		return []spec{index("ids", leadRows), fixed("w", g.V, g.D)}
	case kEmbedBwd:
		return []spec{index("ids", leadRows), rows("dy", g.D)}
	case kRMSNorm:
		return []spec{rows("x", g.D), fixed("w", g.D)}
	case kRMSNormBwd:
		return []spec{rows("x", g.D), fixed("w", g.D), rows("dy", g.D)}
	case kLinear:
		return []spec{rows("x", o.k), fixed("w", o.n, o.k)}
	case kLinearAdd:
		return []spec{rows("h", o.n), rows("x", o.k), fixed("w", o.n, o.k)}
	case kLinearDX:
		return []spec{rows("dy", o.n), fixed("w", o.n, o.k)}
	case kLinearDW:
		return []spec{rows("dy", o.n), rows("x", o.k)}
	case kConvGate:
		return conv
	case kConvGateBwd:
		return append(conv, packed(convOuts(g)))
	case kGDN:
		return []spec{packed(convOuts(g)), forest}
	case kGDNBwd:
		return []spec{packed(convOuts(g)), packed(gdnOuts(g)), forest, rows("do", vd)}
	case kGatedNorm:
		return []spec{packed(gdnOuts(g)), rows("z", vd), fixed("w", g.DV)}
	case kGatedNormBwd:
		return []spec{packed(gdnOuts(g)), rows("z", vd), fixed("w", g.DV), rows("dy", vd)}
	case kAttnPrep:
		return prep
	case kAttnPrepBwd:
		return append(prep, packed(prepOuts(g)))
	case kAttn:
		return []spec{packed(prepOuts(g)), rows("v", g.NKV*g.HD), forest}
	case kAttnBwd:
		return []spec{packed(prepOuts(g)), rows("v", g.NKV*g.HD), packed(attnOuts(g)), forest, rows("do", g.NH*g.HD)}
	case kGate:
		return []spec{packed(attnOuts(g)), rows("qg", g.NH*2*g.HD)}
	case kGateBwd:
		return []spec{packed(attnOuts(g)), rows("qg", g.NH*2*g.HD), rows("dy", g.NH*g.HD)}
	case kSwiGLU:
		return []spec{rows("gate", g.I), rows("up", g.I)}
	case kSwiGLUBwd:
		return []spec{rows("gate", g.I), rows("up", g.I), rows("dh", g.I)}
	case kLMHead:
		return head
	case kSeed:
		return []spec{targets("dlogp"), targets("dent")}
	case kLMHeadBwd:
		return append(head, packed([]spec{targets("logp"), targets("entropy"), targets("lse")}), packed([]spec{targets("dlogp"), targets("dent")}))
	case kPick:
		return []spec{packed(o.from.outs())}
	}
	panic(fmt.Sprintf("op kind %d has no inputs", o.kind))
}

// outs lists the outputs; more than one means that the node's value is a packed handle.
func (o *op) outs() []spec {
	g := o.env.geo
	switch o.kind {
	case kEmbed, kRMSNorm:
		return []spec{rows("y", g.D)}
	case kEmbedBwd:
		return []spec{gradient("dw", g.V, g.D)}
	case kRMSNormBwd:
		return []spec{rows("dx", g.D), gradient("dw", g.D)}
	case kLinear, kLinearAdd:
		return []spec{rows("y", o.n)}
	case kLinearDX:
		return []spec{rows("dx", o.k)}
	case kLinearDW:
		return []spec{gradient("dw", o.n, o.k)}
	case kConvGate, kGDNBwd:
		return convOuts(g)
	case kConvGateBwd:
		return []spec{rows("dp", g.C), rows("da", g.NV), rows("db", g.NV), gradient("dw", g.C, 1, kernels.ConvTaps), gradient("da_log", g.NV), gradient("ddt_bias", g.NV)}
	case kGDN:
		return gdnOuts(g)
	case kGatedNorm:
		return []spec{rows("y", g.NV*g.DV)}
	case kGatedNormBwd:
		return []spec{rows("do", g.NV*g.DV), rows("dz", g.NV*g.DV), gradient("dw", g.DV)}
	case kAttnPrep:
		return prepOuts(g)
	case kAttnPrepBwd:
		return []spec{rows("dqg", g.NH*2*g.HD), rows("dkin", g.NKV*g.HD), gradient("dwq", g.HD), gradient("dwk", g.HD)}
	case kAttn:
		return attnOuts(g)
	case kAttnBwd:
		return []spec{rows("dq", g.NH*g.HD), rows("dk", g.NKV*g.HD), rows("dv", g.NKV*g.HD)}
	case kGate:
		return []spec{rows("y", g.NH*g.HD)}
	case kGateBwd:
		return []spec{rows("do", g.NH*g.HD), rows("dqg", g.NH*2*g.HD)}
	case kSwiGLU:
		return []spec{rows("h", g.I)}
	case kSwiGLUBwd:
		return []spec{rows("dgate", g.I), rows("dup", g.I)}
	case kLMHead:
		return []spec{targets("logp"), targets("entropy"), targets("lse")}
	case kSeed:
		return []spec{targets("dlogp"), targets("dent")}
	case kLMHeadBwd:
		return []spec{rows("dx", g.D), gradient("dw", g.V, g.D)}
	case kPick:
		return o.from.outs()[o.lo:o.hi]
	}
	panic(fmt.Sprintf("op kind %d has no outputs", o.kind))
}

// out is the node's value: the only output, or the handle.
func (o *op) out() spec {
	if outs := o.outs(); len(outs) > 1 {
		return packed(outs)
	} else {
		return outs[0]
	}
}

// Arity is the number of inputs.
func (o *op) Arity() int { return len(o.ins()) }

// Type is in_0 -> in_1 -> ... -> out over one float type; indices are int32.
func (o *op) Type() hm.Type {
	a := hm.TypeVariable('a')
	of := func(s spec) hm.Type {
		t := G.TensorType{Dims: len(s.shape(o.env.shapes)), Of: a}
		if s.index {
			t.Of = tensor.Int32
		}
		return t
	}
	var ts []hm.Type
	for _, s := range o.ins() {
		ts = append(ts, of(s))
	}
	return hm.NewFnType(append(ts, of(o.out()))...)
}

// InferShape checks every input against the op's shape rule and returns the output's shape.
func (o *op) InferShape(in ...G.DimSizer) (tensor.Shape, error) {
	for i, want := range o.ins() {
		got, ok := in[i].(tensor.Shape)
		if !ok {
			continue
		}
		if w := want.shape(o.env.shapes); !got.Eq(w) {
			return nil, fmt.Errorf("infer shape of %s %s: input %s is %v, want %v", o.kind, o.label, want.name, got, w)
		}
	}
	return o.out().shape(o.env.shapes), nil
}

// Do computes the op on host tensors through the kernel table; only graphs built for a TapeMachine can.
func (o *op) Do(vs ...G.Value) (G.Value, error) {
	if o.env.tape == nil {
		return nil, fmt.Errorf("run %s: graph was built for planning, not for a tape machine", o)
	}
	return o.env.tape.do(o, vs)
}

// ReturnsPtr is false: Do returns a fresh tensor.
func (o *op) ReturnsPtr() bool { return false }

// CallsExtern is false: calls finish before Do returns, there is no batch to flush.
func (o *op) CallsExtern() bool { return false }

// OverwritesInput is -1: inputs are never written.
func (o *op) OverwritesInput() int { return -1 }

// WriteHash writes every attribute. The forward op's sequence number keeps equal ops apart: Gorgonia merges nodes whose hashes are equal.
func (o *op) WriteHash(h hash.Hash) {
	fmt.Fprintf(h, "hs/%s/%d/%d/%s/%dx%d/%d:%d/%v/%+v", o.kind, o.seq, o.layer, o.label, o.n, o.k, o.lo, o.hi, o.env.temp, o.env.geo)
	if o.from != nil {
		o.from.WriteHash(h)
	}
}

// Hashcode is the FNV-1a sum of WriteHash.
func (o *op) Hashcode() uint32 {
	h := fnv.New32a()
	o.WriteHash(h)
	return h.Sum32()
}

func (o *op) String() string {
	if o.kind == kPick {
		return fmt.Sprintf("pick[%d:%d]", o.lo, o.hi)
	}
	return o.kind.String()
}

// forward appends a new forward op.
func (e *environment) forward(k kind, layer int, label string) *op {
	e.seq++
	return &op{env: e, kind: k, seq: e.seq, layer: layer, label: label}
}

// backward is an op of o's gradient.
func (o *op) backward(k kind) *op {
	return &op{env: o.env, kind: k, seq: o.seq, layer: o.layer, label: o.label, n: o.n, k: o.k}
}

func (o *op) pick(lo, hi int) *op {
	return &op{env: o.env, kind: kPick, seq: o.seq, layer: o.layer, label: o.label, from: o, lo: lo, hi: hi}
}
