package model

import (
	"fmt"
	"slices"
	"strings"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"

	"harness-s/kernels"
)

// l2Eps is the epsilon of the q/k l2norm in the linear layers (model.md 3.4); the configuration does not name it.
const l2Eps = 1e-6

// Mode says which graph Build makes.
type Mode uint8

const (
	Train Mode = iota // log-probs and the gradient of every parameter
	Score             // log-probs only
)

func (m Mode) String() string {
	if m == Score {
		return "score"
	}
	return "train"
}

// Ports are the graph's named ends. The RL algorithm stays outside: it reads LogP and Entropy and feeds their gradients.
type Ports struct {
	IDs, Pos, Forest, Rows, Targets *G.Node // int32: ids[T], pos[T], forest, rows[N], targets[N]
	LogP, Entropy                   *G.Node // [N], natural log
	DLogP, DEnt                     *G.Node // [N], dLoss/dLogP and dLoss/dEntropy; nil in Score mode
}

// Graph is Qwen3.5 (model.md 3.1) as a Gorgonia expression graph of coarse ops, with its symbolic gradient in Train mode. Shapes are nominal:
// only the planner's symbolic sizes and the tape interpreter's real ones matter.
type Graph struct {
	Ports  Ports
	Mode   Mode
	Params []TensorSpec // in table order
	Nodes  G.Nodes      // all nodes, children before parents
	// Trained lists the tensors whose gradient is computed: Params, or A and B of every adapted matrix.
	Trained []TensorSpec

	expr      *G.ExprGraph
	env       *environment
	params    []*G.Node // leaf per entry of Params
	grads     []*G.Node // gradient per entry of Params; nil in Score mode, and nil entries for frozen weights
	rank      int       // of the adapter beside each adapted matrix, whose gradient stands for those of A and B; 0 = full training
	handle    *G.Node   // the head's packed logp entropy lse
	finalNorm *G.Node   // input of the head, [T, D]
}

// Build makes the graph of cfg in the given mode.
func Build(cfg *Config, mode Mode) (*Graph, error) {
	return build(cfg, mode, graphOptions{temperature: 1})
}

// BuildLoRA makes the training graph of cfg with an adapter: the gradients are those of A and B alone.
func BuildLoRA(cfg *Config, l LoRA) (*Graph, error) {
	ms, err := l.Matrices(cfg)
	if err != nil {
		return nil, err
	}
	return build(cfg, Train, graphOptions{temperature: 1, adapt: &adapting{l.Rank, ms}})
}

type graphOptions struct {
	temperature float64
	shapes      Shapes       // zero: nominal
	dtype       tensor.Dtype // zero: float32
	tape        *interpreter
	adapt       *adapting // nil: every parameter is trained
}

// buildError carries an error out of graph construction, which panics (one return per op would hide the model).
type buildError struct{ err error }

func build(cfg *Config, mode Mode, o graphOptions) (gr *Graph, err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case buildError:
			gr, err = nil, fmt.Errorf("build %s graph: %w", mode, r.err)
		default:
			gr, err = nil, fmt.Errorf("build %s graph: %v", mode, r)
		}
	}()
	if mode > Score {
		return nil, fmt.Errorf("build graph: unknown mode %d", mode)
	}
	if o.shapes == (Shapes{}) {
		o.shapes = Shapes{Rows: 192, Targets: 48, States: 7}
	}
	if o.dtype == (tensor.Dtype{}) {
		o.dtype = tensor.Float32
	}
	if cfg.ConvKernel != kernels.ConvTaps {
		return nil, fmt.Errorf("build graph: conv kernel width %d, kernels implement %d", cfg.ConvKernel, kernels.ConvTaps)
	}
	b := &graphBuilder{
		cfg: cfg, dtype: o.dtype, byName: map[string]*G.Node{},
		gr:  &Graph{Mode: mode, Params: cfg.Tensors(), expr: G.NewGraph()},
		env: &environment{geo: geometryOf(cfg), shapes: o.shapes, temp: o.temperature, tape: o.tape},
	}
	b.gr.env = b.env
	b.ports()
	b.body()
	if mode == Train {
		b.gradient(o.adapt)
	}
	sorted, err := G.Sort(b.gr.expr)
	if err != nil {
		return nil, fmt.Errorf("sort %s graph: %w", mode, err)
	}
	slices.Reverse(sorted)
	for _, n := range sorted {
		if foreign(n) {
			return nil, fmt.Errorf("build %s graph: foreign op %v", mode, n.Op())
		}
	}
	b.gr.Nodes = sorted
	return b.gr, nil
}

type graphBuilder struct {
	cfg    *Config
	dtype  tensor.Dtype
	gr     *Graph
	env    *environment
	byName map[string]*G.Node
	layer  int
}

func (b *graphBuilder) leaf(name string, s spec) *G.Node {
	dt := b.dtype
	if s.index {
		dt = tensor.Int32
	}
	sh := s.shape(b.env.shapes)
	return G.NewTensor(b.gr.expr, dt, len(sh), G.WithName(name), G.WithShape(sh...))
}

func (b *graphBuilder) ports() {
	p := &b.gr.Ports
	p.IDs = b.leaf("ids", index("ids", leadRows))
	p.Pos = b.leaf("pos", index("pos", leadRows))
	p.Forest = b.leaf("forest", index("forest", leadNone, 1))
	p.Rows = b.leaf("rows", index("rows", leadTargets))
	p.Targets = b.leaf("targets", index("targets", leadTargets))
	for _, t := range b.gr.Params {
		n := b.leaf(t.Name, fixed(t.Name, dims64(t.Shape)...))
		b.gr.params = append(b.gr.params, n)
		b.byName[t.Name] = n
	}
}

func (b *graphBuilder) apply(o *op, in ...*G.Node) *G.Node {
	n, err := G.ApplyOp(o, in...)
	if err != nil {
		panic(buildError{fmt.Errorf("apply %s %s: %w", o.kind, o.label, err)})
	}
	return n
}

func (b *graphBuilder) op(k kind, label string, in ...*G.Node) *G.Node {
	return b.apply(b.env.forward(k, b.layer, label), in...)
}

// linear is y = x W^T for the parameter name.weight.
func (b *graphBuilder) linear(name string, x *G.Node) *G.Node {
	w := b.param(name + ".weight")
	o := b.env.forward(kLinear, b.layer, name)
	o.n, o.k = int64(w.Shape()[0]), int64(w.Shape()[1])
	return b.apply(o, x, w)
}

// linearAdd is h + x W^T.
func (b *graphBuilder) linearAdd(name string, h, x *G.Node) *G.Node {
	w := b.param(name + ".weight")
	o := b.env.forward(kLinearAdd, b.layer, name)
	o.n, o.k = int64(w.Shape()[0]), int64(w.Shape()[1])
	return b.apply(o, h, x, w)
}

func (b *graphBuilder) param(name string) *G.Node {
	n, ok := b.byName[name]
	if !ok {
		panic(buildError{fmt.Errorf("parameter %s is not in the table", name)})
	}
	return n
}

func (b *graphBuilder) body() {
	p := &b.gr.Ports
	b.layer = -1
	embed := b.param("model.embed_tokens.weight")
	h := b.op(kEmbed, "model.embed_tokens", p.IDs, embed)
	for l, t := range b.cfg.LayerTypes {
		b.layer = l
		at := fmt.Sprintf("model.layers.%d.", l)
		x := b.op(kRMSNorm, at+"input_layernorm", h, b.param(at+"input_layernorm.weight"))
		if t == FullAttention {
			h = b.attention(at+"self_attn.", h, x)
		} else {
			h = b.deltaNet(at+"linear_attn.", h, x)
		}
		x = b.op(kRMSNorm, at+"post_attention_layernorm", h, b.param(at+"post_attention_layernorm.weight"))
		gate, up := b.linear(at+"mlp.gate_proj", x), b.linear(at+"mlp.up_proj", x)
		h = b.linearAdd(at+"mlp.down_proj", h, b.op(kSwiGLU, at+"mlp", gate, up))
	}
	b.layer = -1
	x := b.op(kRMSNorm, "model.norm", h, b.param("model.norm.weight"))
	head := embed
	if !b.cfg.TieEmbeddings {
		head = b.param("lm_head.weight")
	}
	o := b.env.forward(kLMHead, -1, "lm_head")
	b.gr.finalNorm = x
	b.gr.handle = b.apply(o, x, head, p.Rows, p.Targets)
	p.LogP = b.apply(o.pick(0, 1), b.gr.handle)
	p.Entropy = b.apply(o.pick(1, 2), b.gr.handle)
}

// deltaNet is the gated delta rule layer, model.md 3.4.
func (b *graphBuilder) deltaNet(at string, h, x *G.Node) *G.Node {
	p, z := b.linear(at+"in_proj_qkv", x), b.linear(at+"in_proj_z", x)
	beta, a := b.linear(at+"in_proj_b", x), b.linear(at+"in_proj_a", x)
	forest := b.gr.Ports.Forest
	qkvbg := b.op(kConvGate, at+"conv1d", p, a, beta, b.param(at+"conv1d.weight"), b.param(at+"A_log"), b.param(at+"dt_bias"), forest)
	o := b.op(kGDN, at+"gdn", qkvbg, forest)
	y := b.op(kGatedNorm, at+"norm", o, z, b.param(at+"norm.weight"))
	return b.linearAdd(at+"out_proj", h, y)
}

// attention is the gated full attention layer, model.md 3.9.
func (b *graphBuilder) attention(at string, h, x *G.Node) *G.Node {
	qg, k, v := b.linear(at+"q_proj", x), b.linear(at+"k_proj", x), b.linear(at+"v_proj", x)
	qk := b.op(kAttnPrep, at+"qk_norm", qg, k, b.param(at+"q_norm.weight"), b.param(at+"k_norm.weight"), b.gr.Ports.Pos)
	o := b.op(kAttn, at+"attn", qk, v, b.gr.Ports.Forest)
	return b.linearAdd(at+"o_proj", h, b.op(kGate, at+"gate", o, qg))
}

// gradient seeds the head's handle with dlogp and dent and differentiates with respect to every parameter, or to the adapted matrices: nothing
// below the first of them then has a gradient.
func (b *graphBuilder) gradient(adapt *adapting) {
	gr, p := b.gr, &b.gr.Ports
	wrt := gr.params
	gr.Trained = gr.Params
	if adapt != nil {
		wrt, gr.rank, gr.Trained = nil, adapt.rank, adapterTensors(adapt.matrices, adapt.rank)
		for _, t := range adapt.matrices {
			wrt = append(wrt, b.param(t.Name))
		}
	}
	p.DLogP = b.leaf("dlogp", targets("dlogp"))
	p.DEnt = b.leaf("dent", targets("dent"))
	seed := b.op(kSeed, "lm_head", p.DLogP, p.DEnt)
	grads, err := G.Backpropagate(G.Nodes{gr.handle}, G.Nodes{seed}, wrt)
	if err != nil {
		panic(buildError{fmt.Errorf("differentiate: %w", err)})
	}
	gr.grads = make([]*G.Node, len(gr.params))
	for i, n := range grads {
		gr.grads[slices.Index(gr.params, wrt[i])] = n
	}
}

// children of a node, in order.
func (gr *Graph) children(n *G.Node) []*G.Node {
	var out []*G.Node
	for it := gr.expr.From(n.ID()); it.Next(); {
		out = append(out, it.Node().(*G.Node))
	}
	return out
}

// isSum says whether n is one of Gorgonia's own elementwise additions: a join of gradients.
func isSum(n *G.Node) bool {
	o := n.Op()
	if o == nil {
		return false
	}
	_, ours := o.(*op)
	return !ours && strings.HasPrefix(o.String(), "+")
}

// foreign nodes are neither leaves, nor our ops, nor sums: nothing could lower them.
func foreign(n *G.Node) bool { return n.Op() != nil && opOf(n) == nil && !isSum(n) }

func dims64(shape []int) []int64 {
	dims := make([]int64, len(shape))
	for i, d := range shape {
		dims[i] = int64(d)
	}
	return dims
}
