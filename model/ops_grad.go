package model

import (
	"fmt"

	G "gorgonia.org/gorgonia"
)

// DiffWRT says which inputs carry a gradient. Backward ops, picks and seeds carry none: the graph is differentiated once.
func (o *op) DiffWRT(n int) []bool {
	d := make([]bool, n)
	mark := func(is ...int) []bool {
		for _, i := range is {
			d[i] = true
		}
		return d
	}
	switch o.kind {
	case kEmbed:
		return mark(1)
	case kRMSNorm, kLinear, kSwiGLU, kLMHead, kAttn, kGate:
		return mark(0, 1)
	case kLinearAdd, kGatedNorm:
		return mark(0, 1, 2)
	case kConvGate:
		return mark(0, 1, 2, 3, 4, 5)
	case kGDN:
		return mark(0)
	case kAttnPrep:
		return mark(0, 1, 2, 3)
	}
	return d
}

// SymDiff builds the backward op and returns one gradient per input (nil where DiffWRT is false). A backward op with several results is one
// node with a packed handle and a pick per result, so that it lowers to one kernel call. The gradient of a handle (q k v beta g of the conv,
// q k of the attention) is a handle of the same layout.
func (o *op) SymDiff(in G.Nodes, out, grad *G.Node) (G.Nodes, error) {
	b := gradBuilder{o: o}
	switch o.kind {
	case kEmbed:
		return b.list(nil, b.apply(o.backward(kEmbedBwd), in[0], grad))
	case kLinear:
		return b.list(b.apply(o.backward(kLinearDX), grad, in[1]), b.apply(o.backward(kLinearDW), grad, in[0]))
	case kLinearAdd:
		return b.list(grad, b.apply(o.backward(kLinearDX), grad, in[2]), b.apply(o.backward(kLinearDW), grad, in[1]))
	case kRMSNorm:
		return b.split(kRMSNormBwd, 2, in[0], in[1], grad)
	case kConvGate:
		gs, err := b.split(kConvGateBwd, 6, append(append(G.Nodes{}, in...), grad)...)
		return append(gs, nil), err
	case kGDN:
		return b.list(b.apply(o.backward(kGDNBwd), in[0], out, in[1], grad), nil)
	case kGatedNorm:
		return b.split(kGatedNormBwd, 3, in[0], in[1], in[2], grad)
	case kAttnPrep:
		gs, err := b.split(kAttnPrepBwd, 4, append(append(G.Nodes{}, in...), grad)...)
		return append(gs, nil), err
	case kAttn:
		bwd := o.backward(kAttnBwd)
		h := b.apply(bwd, in[0], in[1], out, in[2], grad)
		return b.list(b.apply(bwd.pick(0, 2), h), b.apply(bwd.pick(2, 3), h), nil)
	case kGate:
		return b.split(kGateBwd, 2, in[0], in[1], grad)
	case kSwiGLU:
		return b.split(kSwiGLUBwd, 2, in[0], in[1], grad)
	case kLMHead:
		gs, err := b.split(kLMHeadBwd, 2, in[0], in[1], in[2], in[3], out, grad)
		return append(gs, nil, nil), err
	}
	return nil, fmt.Errorf("differentiate %s: not a forward op", o)
}

// gradBuilder applies ops with a sticky error.
type gradBuilder struct {
	o   *op
	err error
}

func (b *gradBuilder) apply(o *op, in ...*G.Node) *G.Node {
	if b.err != nil {
		return nil
	}
	n, err := G.ApplyOp(o, in...)
	if err != nil {
		b.err = fmt.Errorf("differentiate %s %s: %w", b.o.kind, b.o.label, err)
		return nil
	}
	return n
}

func (b *gradBuilder) list(ns ...*G.Node) (G.Nodes, error) { return ns, b.err }

func (b *gradBuilder) split(k kind, parts int, in ...*G.Node) (G.Nodes, error) {
	bwd := b.o.backward(k)
	h := b.apply(bwd, in...)
	gs := make(G.Nodes, parts)
	for i := range gs {
		gs[i] = b.apply(bwd.pick(i, i+1), h)
	}
	return gs, b.err
}
