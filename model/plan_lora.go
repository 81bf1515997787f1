package model

import (
	"slices"

	"harness-s/kernels"
)

// adapting is what the graph needs to know of an adapter; nil is full training.
type adapting struct {
	rank     int
	matrices []TensorSpec
}

func (m *Model) adapting() *adapting {
	if m.Adapter == nil {
		return nil
	}
	return &adapting{m.Adapter.LoRA.Rank, m.Adapter.matrices}
}

// lowRank is the gradient of an adapter beside the frozen weight of a linear layer (gpu.md 3.8), from products with one side of the rank:
// dB += dy^T u with u = x (sA)^T, and dA += v^T x with v = dy (sB). W' is not read and its gradient never exists.
func (e emitter) lowRank(o *op, rank int64, v lowRankValues) []*record {
	thin := func(flags uint32, k, lda, ldb int64, a, b, c valueID) *record {
		g, r := e.gemm(flags, 'm', 0, rank, k, o.label)
		g.LDA, g.LDB = lda, ldb
		r.in(&g.A, a)
		r.in(&g.B, b)
		r.out(&g.C, c)
		return r
	}
	return []*record{
		thin(kernels.TransB, o.k, o.k, o.k, v.x, v.sA, v.u),
		e.weightGradient(o.n, rank, v.dy, v.u, v.dB, o.label),
		thin(0, o.n, o.n, rank, v.dy, v.sB, v.v),
		e.weightGradient(rank, o.k, v.v, v.x, v.dA, o.label),
	}
}

// lowRankValues are the operands of lowRank: dy [T, out], x [T, in], sA [rank, in], sB [out, rank]; u, v [T, rank]; dA, dB as A, B.
type lowRankValues struct{ dy, x, sA, sB, u, v, dA, dB valueID }

// lowRankValues are the operands of an adapter's gradient. grads are the gradients of the graph's Trained, in which A and B of a module are
// neighbours.
func (pl *planner) lowRankValues(o *op, ins [][]valueID, grads []valueID) lowRankValues {
	a := slices.IndexFunc(pl.gr.Trained, func(t TensorSpec) bool { return t.Name == o.label+loraA })
	scaled := func(i int) valueID {
		t := pl.gr.Trained[i]
		return pl.external("s:"+t.Name, fixed(t.Name, dims64(t.Shape)...), inScaled, i)
	}
	thin := rows("lowrank", int64(pl.gr.rank))
	return lowRankValues{dy: ins[0][0], x: ins[1][0], sA: scaled(a), sB: scaled(a + 1),
		u: pl.newValue("xa", thin), v: pl.newValue("dyb", thin), dA: grads[a], dB: grads[a+1]}
}
