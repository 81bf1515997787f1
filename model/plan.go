package model

import (
	"cmp"
	"fmt"
	"slices"

	G "gorgonia.org/gorgonia"

	"harness-s/kernels"
)

// valueID indexes Program.values.
type valueID int32

// region says where a value lives.
type region uint8

const (
	inArena  region = iota
	inPort          // uploaded per batch
	inWeight        // the weights arena
	inGrad          // the gradient arena of what is trained: always added to
	inScaled        // the adapter's scaled A or B
)

// none stands for an output that nobody wants: the gradient of a frozen weight.
const none valueID = -1

// value is one tensor of a program.
type value struct {
	name   string
	spec   spec
	region region
	slot   int // port, or index into the graph's Params (inWeight) or Trained (inGrad, inScaled)
	buf    int // arena buffer; values that alias share one
}

// buffer is a piece of the activation arena. It is live from the record that first touches it to the last one.
type buffer struct {
	spec        spec
	first, last int
	offset      int64
}

// port numbers the values uploaded per batch.
type port int

const (
	portIDs port = iota
	portPos
	portRows
	portTargets
	portDLogP
	portDEnt
	numPorts
)

// PlanOptions are the attributes of a plan that the graph does not have.
type PlanOptions struct {
	DType      kernels.DType // storage type of float values: F32, F64, or BF16, with which what spec.wide marks is float32
	Recompute  bool          // keep layer inputs only; run a layer's forward again before its backward
	ValidVocab int64         // columns of the head that take part in the softmax; 0 means all
}

// Program is a flat list of kernel calls: records[:numForward] are the forward pass, the rest the backward pass. Sizes are symbolic; Place
// fixes arena offsets for one bucket, and a batch of any smaller size runs in it.
type Program struct {
	gr      *Graph
	opt     PlanOptions
	records []*record
	values  []value
	buffers []buffer

	numForward int
	logp, ent  valueID
	finalNorm  valueID
	bucket     Shapes
	arenaBytes int64
	liveBytes  int64 // lower bound: the most that is live at once
}

// outKey names one output of a node.
type outKey struct {
	n *G.Node
	i int
}

type planner struct {
	p        *Program
	gr       *Graph
	em       emitter
	nodes    []*G.Node // those that the outputs depend on
	ops      []*G.Node // real ops in schedule order
	pos      map[*G.Node]int
	children map[*G.Node][]*G.Node
	readers  map[*G.Node][]*G.Node // picks and inner sums are looked through when asked for
	isGrad   map[*G.Node]int       // parameter gradient nodes
	vals     map[*G.Node][]valueID
	clones   map[*G.Node][]valueID // recomputed values of a layer
	target   map[outKey]sink
	after    map[int][]func()    // emissions due after the op at a position
	before   map[int][]func()    // and before it
	base     map[*G.Node]*G.Node // root sum -> the leaf whose buffer it continues
	fresh    map[*G.Node]bool    // root sums with a buffer of their own
	cloned   map[int]bool
}

// sink redirects an op's output into an existing value.
type sink struct {
	of   *G.Node // root sum whose value is added to; nil for a parameter gradient
	slot int     // parameter index
}

// Compile lowers a graph to a program: schedule, gradient joins, recompute, emission, aliasing, live ranges. Offsets come from Place.
func Compile(gr *Graph, o PlanOptions) (*Program, error) {
	if o.DType != kernels.F32 && o.DType != kernels.F64 && o.DType != kernels.BF16 {
		return nil, fmt.Errorf("plan %s graph: dtype %v, want f32, f64 or bf16", gr.Mode, o.DType)
	}
	pl := &planner{
		p: &Program{gr: gr, opt: o}, gr: gr, em: newEmitter(gr, o.DType, o.ValidVocab),
		pos: map[*G.Node]int{}, children: map[*G.Node][]*G.Node{}, readers: map[*G.Node][]*G.Node{}, isGrad: map[*G.Node]int{},
		vals: map[*G.Node][]valueID{}, clones: map[*G.Node][]valueID{}, target: map[outKey]sink{},
		after: map[int][]func(){}, before: map[int][]func(){}, base: map[*G.Node]*G.Node{}, fresh: map[*G.Node]bool{}, cloned: map[int]bool{},
	}
	pl.schedule()
	if err := pl.joins(); err != nil {
		return nil, fmt.Errorf("plan %s graph: %w", gr.Mode, err)
	}
	if err := pl.emit(); err != nil {
		return nil, fmt.Errorf("plan %s graph: %w", gr.Mode, err)
	}
	pl.p.coalesce()
	pl.p.liveness()
	return pl.p, nil
}

func opOf(n *G.Node) *op {
	o, _ := n.Op().(*op)
	return o
}

// virtual nodes emit nothing: leaves, picks, seeds and gradient joins.
func virtual(n *G.Node) bool {
	o := opOf(n)
	return o == nil || o.kind == kPick || o.kind == kSeed
}

// schedule orders the ops: forward in construction order, backward by falling order of the forward op. Both follow from the graph's
// dependencies, and they keep a weight gradient beside its input gradient, so that activations die early.
func (pl *planner) schedule() {
	alive := pl.alive()
	for _, n := range pl.gr.Nodes {
		if !alive[n] {
			continue
		}
		pl.nodes = append(pl.nodes, n)
		for _, c := range pl.children[n] {
			pl.readers[c] = append(pl.readers[c], n)
		}
		if !virtual(n) {
			pl.ops = append(pl.ops, n)
		}
	}
	slices.SortStableFunc(pl.ops, func(a, b *G.Node) int {
		x, y := opOf(a), opOf(b)
		if x.kind.backward() != y.kind.backward() {
			if x.kind.backward() {
				return 1
			}
			return -1
		}
		by := cmp.Compare(x.seq, y.seq)
		if x.kind.backward() {
			by = -by
		}
		return cmp.Or(by, cmp.Compare(x.kind, y.kind))
	})
	for i, n := range pl.ops {
		pl.pos[n] = i
		if !opOf(n).kind.backward() {
			pl.p.numForward = i + 1 // in ops; emission turns it into records
		}
	}
	for i, n := range pl.gr.grads {
		if n != nil {
			pl.isGrad[n] = i
		}
	}
}

// alive marks the nodes that outputs and wanted gradients depend on. With frozen weights differentiation leaves others behind: gradients of
// the weights themselves, and of inputs below which nothing is trained.
func (pl *planner) alive() map[*G.Node]bool {
	alive := map[*G.Node]bool{}
	var visit func(n *G.Node)
	visit = func(n *G.Node) {
		if n == nil || alive[n] {
			return
		}
		alive[n] = true
		pl.children[n] = pl.gr.children(n)
		for _, c := range pl.children[n] {
			visit(c)
		}
	}
	for _, n := range append(slices.Clone(pl.gr.grads), pl.gr.handle, pl.gr.finalNorm) {
		visit(n)
	}
	return alive
}

func (k kind) backward() bool {
	switch k {
	case kEmbedBwd, kRMSNormBwd, kLinearDX, kLinearDW, kConvGateBwd, kGDNBwd, kGatedNormBwd, kAttnPrepBwd, kAttnBwd, kGateBwd, kSwiGLUBwd, kLMHeadBwd:
		return true
	}
	return false
}

// accumulates says whether output i of the op can be added to (or, for the two halves of dqg, written beside the other half).
func (k kind) accumulates(i int) bool {
	switch k {
	case kLinearDX, kLinearDW, kEmbedBwd, kRMSNormBwd, kLMHeadBwd:
		return true
	case kConvGateBwd:
		return i >= 3
	case kGatedNormBwd:
		return i == 2
	case kAttnPrepBwd:
		return i != 1
	case kGateBwd:
		return i == 1
	}
	return false
}

// source looks through picks: the op node and output index behind a single-valued gradient node.
func (pl *planner) source(n *G.Node) outKey {
	if o := opOf(n); o != nil && o.kind == kPick && o.hi == o.lo+1 {
		return outKey{pl.children[n][0], o.lo}
	}
	return outKey{n, 0}
}

// inner sums have one reader, another sum, and are no parameter's gradient: they are flattened into it.
func (pl *planner) inner(n *G.Node) bool {
	_, grad := pl.isGrad[n]
	return isSum(n) && !grad && len(pl.readers[n]) == 1 && isSum(pl.readers[n][0])
}

func (pl *planner) leaves(n *G.Node) []*G.Node {
	if !isSum(n) {
		return []*G.Node{n}
	}
	var out []*G.Node
	for _, c := range pl.children[n] {
		if pl.inner(c) {
			out = append(out, pl.leaves(c)...)
		} else {
			out = append(out, c)
		}
	}
	return out
}

// avail is the position of the op after which a node's value is complete.
func (pl *planner) avail(n *G.Node) int {
	if isSum(n) {
		at := -1
		for _, l := range pl.leaves(n) {
			at = max(at, pl.avail(l))
		}
		return at
	}
	if o := opOf(n); o == nil || o.kind == kSeed {
		return -1
	}
	return pl.pos[pl.source(n).n]
}

// lastRead is the position of the last op that reads n, not counting except.
func (pl *planner) lastRead(n, except *G.Node) int {
	at := -1
	for _, r := range pl.readers[n] {
		switch {
		case r == except || pl.inner(r) && pl.root(r) == except:
		case isSum(r):
			at = max(at, pl.avail(r))
		case virtual(r):
			at = max(at, pl.lastRead(r, nil))
		default:
			at = max(at, pl.pos[r])
		}
	}
	return at
}

func (pl *planner) root(n *G.Node) *G.Node {
	for pl.inner(n) {
		n = pl.readers[n][0]
	}
	return n
}

// joins decides for every sum of gradients which term's buffer it continues and which ops add into it. Terms are taken in schedule order: the
// first one's buffer is kept if nobody reads it later, the others accumulate there (gemm BETA1, HS_ACC_DX, the other half of dqg). What cannot
// accumulate is added by an explicit record.
func (pl *planner) joins() error {
	for i, n := range pl.gr.grads {
		if n == nil {
			continue
		}
		for _, l := range pl.leaves(n) {
			k := pl.source(l)
			if o := opOf(k.n); o == nil || !o.kind.accumulates(k.i) {
				return fmt.Errorf("gradient of %s: %v cannot accumulate", pl.gr.Params[i].Name, l.Op())
			}
			pl.target[k] = sink{slot: i}
		}
	}
	for _, n := range pl.nodes {
		if _, grad := pl.isGrad[n]; !isSum(n) || pl.inner(n) || grad {
			continue
		}
		ls := pl.leaves(n)
		slices.SortStableFunc(ls, func(a, b *G.Node) int { return cmp.Compare(pl.avail(a), pl.avail(b)) })
		first := ls[0]
		pl.base[n] = first
		joinAt := pl.avail(ls[1])
		if pl.avail(first) < 0 || pl.lastRead(first, n) >= joinAt {
			pl.fresh[n] = true
			pl.before[joinAt] = append(pl.before[joinAt], func() {
				dst := pl.newValue("sum", opSpecOf(pl, first))
				pl.vals[n] = []valueID{dst}
				pl.add(pl.em.copy(pl.value(first)[0], dst, pl.p.values[dst].spec, "sum"))
			})
		}
		for _, l := range ls[1:] {
			k := pl.source(l)
			if o := opOf(k.n); o != nil && o.kind.accumulates(k.i) && len(pl.readers[l]) == 1 {
				pl.target[k] = sink{of: n}
				continue
			}
			at := pl.avail(l)
			pl.after[at] = append(pl.after[at], func() {
				dst := pl.value(n)[0]
				pl.add(pl.em.addTo(pl.value(l)[0], dst, pl.p.values[dst].spec, "sum"))
			})
		}
	}
	return nil
}

func opSpecOf(pl *planner, n *G.Node) spec { return pl.p.values[pl.value(n)[0]].spec }

func (pl *planner) newValue(name string, s spec) valueID {
	pl.p.values = append(pl.p.values, value{name: name, spec: s, region: inArena, buf: len(pl.p.buffers)})
	pl.p.buffers = append(pl.p.buffers, buffer{spec: s})
	return valueID(len(pl.p.values) - 1)
}

func (pl *planner) external(name string, s spec, r region, slot int) valueID {
	pl.p.values = append(pl.p.values, value{name: name, spec: s, region: r, slot: slot, buf: -1})
	return valueID(len(pl.p.values) - 1)
}

func (pl *planner) add(r *record) { pl.p.records = append(pl.p.records, r) }

// value resolves a node to its values: one, or the parts of a handle.
func (pl *planner) value(n *G.Node) []valueID {
	if v, ok := pl.vals[n]; ok {
		return v
	}
	o := opOf(n)
	switch {
	case o != nil && o.kind == kPick:
		return pl.value(pl.children[n][0])[o.lo:o.hi]
	case o != nil && o.kind == kSeed:
		return append(slices.Clone(pl.value(pl.children[n][0])), pl.value(pl.children[n][1])...)
	case isSum(n) && !pl.fresh[n]:
		return pl.value(pl.base[n])
	}
	panic(buildError{fmt.Errorf("node %s is read before it is computed", n.Name())})
}

// emit walks the schedule and appends records.
func (pl *planner) emit() (err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case buildError:
			err = r.err
		default:
			panic(r)
		}
	}()
	pl.leafValues()
	numForward := pl.p.numForward
	grads := make([]valueID, len(pl.gr.Trained))
	for i, t := range pl.gr.Trained {
		grads[i] = pl.external("d:"+t.Name, gradient(t.Name, dims64(t.Shape)...), inGrad, i)
	}
	for at, n := range pl.ops {
		if at == numForward {
			pl.p.numForward = len(pl.p.records)
		}
		o := opOf(n)
		back := o.kind.backward()
		if back && pl.p.opt.Recompute && o.layer >= 0 && !pl.cloned[o.layer] {
			pl.cloned[o.layer] = true
			pl.clone(o.layer)
		}
		for _, f := range pl.before[at] {
			f()
		}
		ins := make([][]valueID, 0, 8)
		for _, c := range pl.children[n] {
			ins = append(ins, pl.input(o, c, back && pl.p.opt.Recompute))
		}
		if o.kind == kLinearDW && pl.gr.rank > 0 {
			for _, r := range pl.em.lowRank(o, int64(pl.gr.rank), pl.lowRankValues(o, ins, grads)) {
				pl.add(r)
			}
			continue
		}
		outs := o.outs()
		vs, acc := make([]valueID, len(outs)), make([]bool, len(outs))
		for i, s := range outs {
			if o.kind.backward() && s.lead == leadNone {
				vs[i] = none
			}
			if t, ok := pl.target[outKey{n, i}]; ok {
				acc[i] = true
				if t.of == nil {
					vs[i] = grads[t.slot]
				} else {
					vs[i] = pl.value(t.of)[0]
				}
				continue
			}
			if vs[i] != none {
				vs[i] = pl.newValue(s.name, s)
			}
		}
		pl.vals[n] = vs
		for _, r := range pl.em.emit(o, ins, vs, acc) {
			pl.add(r)
		}
		for _, f := range pl.after[at] {
			f()
		}
	}
	if pl.gr.Mode != Train {
		pl.p.numForward = len(pl.p.records)
	}
	h := pl.vals[pl.gr.handle]
	pl.p.logp, pl.p.ent = h[0], h[1]
	pl.p.finalNorm = pl.vals[pl.gr.finalNorm][0]
	return nil
}

// input resolves a child of o; a backward op reads the recomputed values of its own layer.
func (pl *planner) input(o *op, c *G.Node, recomputed bool) []valueID {
	if recomputed {
		src, lo, hi := c, 0, -1
		if p := opOf(c); p != nil && p.kind == kPick {
			src, lo, hi = pl.children[c][0], p.lo, p.hi
		}
		if v, ok := pl.clones[src]; ok {
			if so := opOf(src); so.layer == o.layer {
				if hi < 0 {
					hi = len(v)
				}
				return v[lo:hi]
			}
		}
	}
	return pl.value(c)
}

// clone emits a layer's forward ops again, as far as its backward reads their results.
func (pl *planner) clone(layer int) {
	need := map[*G.Node]bool{}
	var visit func(n *G.Node)
	visit = func(n *G.Node) {
		if o := opOf(n); o == nil || o.kind.backward() || o.layer != layer || need[n] {
			return
		}
		need[n] = true
		for _, c := range pl.children[n] {
			visit(c)
		}
	}
	for _, n := range pl.ops {
		if o := opOf(n); o.kind.backward() && o.layer == layer {
			for _, c := range pl.children[n] {
				visit(c)
			}
		}
	}
	for _, n := range pl.ops {
		o := opOf(n)
		if !need[n] || o.kind.backward() {
			continue
		}
		var ins [][]valueID
		for _, c := range pl.children[n] {
			ins = append(ins, pl.input(o, c, true))
		}
		outs := o.outs()
		vs := make([]valueID, len(outs))
		for i, s := range outs {
			vs[i] = pl.newValue(s.name, s)
		}
		pl.clones[n] = vs
		for _, r := range pl.em.emit(o, ins, vs, make([]bool, len(outs))) {
			r.again = true
			pl.add(r)
		}
	}
}

// leafValues binds the graph's inputs to ports and weights.
func (pl *planner) leafValues() {
	p := pl.gr.Ports
	bind := func(n *G.Node, name string, s spec, at port) {
		if n != nil {
			pl.vals[n] = []valueID{pl.external(name, s, inPort, int(at))}
		}
	}
	bind(p.IDs, "ids", index("ids", leadRows), portIDs)
	bind(p.Pos, "pos", index("pos", leadRows), portPos)
	bind(p.Rows, "rows", index("rows", leadTargets), portRows)
	bind(p.Targets, "targets", index("targets", leadTargets), portTargets)
	bind(p.DLogP, "dlogp", targets("dlogp"), portDLogP)
	bind(p.DEnt, "dent", targets("dent"), portDEnt)
	pl.vals[p.Forest] = nil // travels by value in the argument structs
	for i, t := range pl.gr.Params {
		pl.vals[pl.gr.params[i]] = []valueID{pl.external(t.Name, fixed(t.Name, dims64(t.Shape)...), inWeight, i)}
	}
}
