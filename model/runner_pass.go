package model

import (
	"unsafe"

	"harness-s/kernels"
)

// pass runs one batch of pieces through the model, the rows that sample counted from base on among those of the step.
func (r *Runner) pass(work []Work, batch []piece, base int) (sampled int, err error) {
	graph := r.graphs != nil && work[batch[0].work].pure()
	pad := 0
	if graph {
		pad = bucket(len(batch), r.opt.MaxSeqs)
	}
	x, err := r.index(work, batch, base, pad)
	if err != nil {
		return 0, err
	}
	if graph {
		err = r.decode(x)
	} else {
		r.forward(x)
	}
	for _, p := range batch {
		s := &r.cache.seqs[p.seq]
		s.len += len(p.ids)
		if p.sample {
			s.drawn, s.drawnIn = int32(base+sampled), r.steps
			sampled++
		}
	}
	return sampled, err
}

// forward issues the ops of a pass: decode rows first (recurrent step kernels), then appends of several tokens (chunked kernels over a forest whose
// roots continue the sequences' states). The last layer computes K, V and states for all rows and the rest only for rows that sample.
func (r *Runner) forward(x *passIndex) {
	a, c, st := &r.a, r.m.Config, r.st
	if x.last {
		// Tokens are moved as the float32 of their bits.
		n := int64(x.fed-r.ix.token)/4 + x.decode
		st.Gather(&kernels.GatherArgs{DType: kernels.F32, N: x.decode, D: 1, T: n, Row: x.from, Src: r.ix.token, Dst: x.ids})
	}
	st.Embed(&kernels.EmbedArgs{DType: r.dt, T: x.rows, D: int64(c.Hidden), V: int64(c.VocabSize), IDs: x.ids, W: r.w.embed, Y: a.x})
	h := a.x
	for i := range r.w.layers {
		last := i == len(r.w.layers)-1 && !x.all
		if c.LayerTypes[i] == FullAttention {
			r.attention(i, x, last)
		} else {
			r.deltaNet(i, x, last)
		}
		rows := x.rows
		if last {
			rows, h = x.sampled, a.xs
		}
		if rows > 0 {
			r.mlp(&r.w.layers[i], rows, h)
		}
	}
	if x.sampled > 0 {
		r.draw(x, h)
	}
}

// passWorkspace is the most workspace that an op of the pass needs.
func passWorkspace(dev *kernels.Device, c *Config, dt kernels.DType, x *passIndex, pageSize int) (most int64) {
	need := func(op kernels.Op, args unsafe.Pointer) { most = max(most, dev.Workspace(op, args)) }
	nk, dk, nv, dv := int64(c.LinKeyHeads), int64(c.LinKeyDim), int64(c.LinValueHeads), int64(c.LinValueDim)
	nh, nkv, hd := int64(c.NumHeads), int64(c.NumKVHeads), int64(c.HeadDim)
	gemm := func(m, k, n int64, flags uint32) {
		if m > 0 {
			need(kernels.OpGemm, unsafe.Pointer(&kernels.GemmArgs{DType: dt, Flags: kernels.TransB | flags, M: m, N: n, K: k, LDA: k, LDB: k, LDC: n}))
		}
	}
	d, i, vd, aq := int64(c.Hidden), int64(c.Intermediate), int64(c.ValueDim()), nh*hd
	for _, n := range []int64{int64(c.ConvChannels()), vd, nv, 2 * aq, nkv * hd} {
		gemm(x.rows, d, n, 0)
	}
	need(kernels.OpGemmSwiGLU, unsafe.Pointer(&kernels.GemmSwiGLUArgs{DType: dt, M: x.rows, N: i, K: d, LDX: d, LDW: d}))
	for _, k := range []int64{vd, aq, i} {
		gemm(x.rows, k, d, kernels.Beta1)
	}
	if n := x.rows - x.decode; n > 0 {
		need(kernels.OpConvGate, unsafe.Pointer(&kernels.ConvGateArgs{DType: dt, T: n, NK: nk, DK: dk, NV: nv, DV: dv, F: x.forest}))
		need(kernels.OpGDN, unsafe.Pointer(&kernels.GDNArgs{DType: dt, T: n, NK: nk, DK: dk, NV: nv, DV: dv, F: x.forest}))
	}
	need(kernels.OpAttnPrep, unsafe.Pointer(&kernels.AttnPrepArgs{DType: dt, T: x.rows, NH: nh, NKV: nkv, HD: hd, Rot: int64(c.RotaryDim)}))
	need(kernels.OpAttnPaged, unsafe.Pointer(&kernels.AttnPagedArgs{DType: dt, T: x.rows, NH: nh, NKV: nkv, HD: hd, PageSize: int64(pageSize), MaxPages: x.maxPages}))
	if n := x.sampled; n > 0 {
		// Room for the logits of rows that truncate, also while none does.
		need(kernels.OpLMHeadSample, unsafe.Pointer(&kernels.LMHeadSampleArgs{DType: dt, Flags: kernels.Truncated, B: n, D: d, V: int64(c.VocabSize), VocabValid: int64(c.VocabSize)}))
	}
	return most
}

// scratch is the workspace of the pass, which upload has sized.
func (r *Runner) scratch() (kernels.Ptr, int64) {
	if r.ws == nil {
		return 0, 0
	}
	return r.ws.Ptr(), r.ws.Bytes()
}

// linear is y[m, n] = x[m, k] W[n, k]^T; flags may add it to y (kernels.Beta1).
func (r *Runner) linear(y, x, w kernels.Ptr, m int64, k, n int, flags uint32) {
	if m == 0 {
		return
	}
	g := kernels.GemmArgs{DType: r.dt, Flags: kernels.TransB | flags, M: m, N: int64(n), K: int64(k), A: x, LDA: int64(k), B: w, LDB: int64(k), C: y, LDC: int64(n)}
	g.WS, g.WSBytes = r.scratch()
	r.st.Gemm(&g)
}

// projection is y[m, n] = x W[n, k]^T, one of several products with the same x.
type projection struct {
	y, w kernels.Ptr
	n    int
}

// linears computes up to kernels.GemmSets projections of x[m, k] in one op.
func (r *Runner) linears(x kernels.Ptr, m int64, k int, outs ...projection) {
	if m == 0 {
		return
	}
	g := kernels.GemmGroupArgs{DType: r.dt, Flags: kernels.TransB, M: m, K: int64(k), N: int64(len(outs)), A: x, LDA: int64(k)}
	for i, o := range outs {
		g.Set[i] = kernels.GemmSet{N: int64(o.n), B: o.w, LDB: int64(k), C: o.y, LDC: int64(o.n)}
	}
	g.WS, g.WSBytes = r.scratch()
	r.st.GemmGroup(&g)
}

func (r *Runner) norm(y, x, w kernels.Ptr, rows int64) {
	r.st.RMSNorm(&kernels.RMSNormArgs{DType: r.dt, T: rows, D: int64(r.m.Config.Hidden), Eps: r.m.Config.RMSEps, X: x, W: w, Y: y})
}

func (r *Runner) pick(dst, src kernels.Ptr, width int, x *passIndex) {
	r.st.Gather(&kernels.GatherArgs{DType: r.dt, N: x.sampled, D: int64(width), T: x.rows, Row: x.sel, Src: src, Dst: dst})
}

// off is the address so many rows after p, of values of type dt.
func off(p kernels.Ptr, rows int64, width int, dt kernels.DType) kernels.Ptr {
	return p + kernels.Ptr(rows*int64(width)*int64(dt.Size()))
}

// deltaNet is a linear-attention mixer (model.md 3.4) with its residual: h += out_proj(gated_norm(delta_rule(...))).
func (r *Runner) deltaNet(layer int, x *passIndex, last bool) {
	a, c, w, l, st := &r.a, r.m.Config, &r.w.layers[layer], &r.cache.layers[layer], r.st
	nk, dk, nv, dv := int64(c.LinKeyHeads), int64(c.LinKeyDim), int64(c.LinValueHeads), int64(c.LinValueDim)
	ch, vd, qk, d := c.ConvChannels(), c.LinValueHeads*c.LinValueDim, c.LinKeyHeads*c.LinKeyDim, c.Hidden
	r.norm(a.n, a.x, w.norm1, x.rows)
	in := []projection{{a.p, w.qkv, ch}, {a.b, w.b, c.LinValueHeads}, {a.a, w.a, c.LinValueHeads}}
	if !last {
		in = append(in, projection{a.z, w.z, vd})
	}
	r.linears(a.n, x.rows, d, in...)
	if n := x.decode; n > 0 {
		st.ConvGateStep(&kernels.ConvGateStepArgs{DType: r.dt, B: n, NK: nk, DK: dk, NV: nv, DV: dv, Eps: l2Eps, Slot: x.seq, P: a.p, A: a.a, B_: a.b,
			W: w.conv, ALog: w.aLog, DTBias: w.dtBias, Q: a.q, K: a.k, V: a.v, Beta: a.beta, G: a.g, ConvState: l.conv})
		st.GDNStep(&kernels.GDNStepArgs{DType: r.dt, B: n, NK: nk, DK: dk, NV: nv, DV: dv, Slot: x.seq, Pos: x.pos, Q: a.q, K: a.k, V: a.v,
			Beta: a.beta, G: a.g, O: a.o, RecState: l.rec})
	}
	if n := x.rows - x.decode; n > 0 {
		rest := func(p kernels.Ptr, width int) kernels.Ptr { return off(p, x.decode, width, r.dt) }
		gate := func(p kernels.Ptr) kernels.Ptr { return off(p, x.decode, c.LinValueHeads, r.dt.Wide()) }
		q, k, v, beta, g := rest(a.q, qk), rest(a.k, qk), rest(a.v, vd), gate(a.beta), gate(a.g)
		cg := kernels.ConvGateArgs{DType: r.dt, T: n, NK: nk, DK: dk, NV: nv, DV: dv, Eps: l2Eps, F: x.forest,
			P: rest(a.p, ch), A: rest(a.a, c.LinValueHeads), B: rest(a.b, c.LinValueHeads), W: w.conv, ALog: w.aLog, DTBias: w.dtBias,
			Q: q, K: k, V: v, Beta: beta, G: g, ConvState: l.conv}
		cg.WS, cg.WSBytes = r.scratch()
		st.ConvGate(&cg)
		gd := kernels.GDNArgs{DType: r.dt, T: n, NK: nk, DK: dk, NV: nv, DV: dv, F: x.forest, Q: q, K: k, V: v, Beta: beta, G: g, O: rest(a.o, vd), RecState: l.rec}
		gd.WS, gd.WSBytes = r.scratch()
		st.GDN(&gd)
	}
	rows, o, h := x.rows, a.o, a.x
	if last {
		if x.sampled == 0 {
			return
		}
		rows, h = x.sampled, a.xs
		r.pick(a.ns, a.n, d, x)
		r.pick(h, a.x, d, x)
		r.pick(a.v, a.o, vd, x) // v is spent
		o = a.v
		r.linear(a.z, a.ns, w.z, rows, d, vd, 0)
	}
	st.GatedNorm(&kernels.GatedNormArgs{DType: r.dt, T: rows, NV: nv, DV: dv, Eps: c.RMSEps, O: o, Z: a.z, W: w.gnorm, Y: a.y})
	r.linear(h, a.y, w.out, rows, vd, d, kernels.Beta1)
}

// attention is a full-attention mixer (model.md 3.9) with its residual, over the paged cache.
func (r *Runner) attention(layer int, x *passIndex, last bool) {
	a, c, w, l, st := &r.a, r.m.Config, &r.w.layers[layer], &r.cache.layers[layer], r.st
	nh, nkv, hd, d := int64(c.NumHeads), int64(c.NumKVHeads), int64(c.HeadDim), c.Hidden
	aq, akv := c.NumHeads*c.HeadDim, c.NumKVHeads*c.HeadDim
	prep := func(rows int64, pos kernels.Ptr, nh, nkv int64) {
		p := kernels.AttnPrepArgs{DType: r.dt, T: rows, NH: nh, NKV: nkv, HD: hd, Rot: int64(c.RotaryDim), Theta: c.RopeTheta, Eps: c.RMSEps, RopePos: pos}
		if nh > 0 {
			p.QG, p.WQ, p.Q = a.qg, w.qNorm, a.aq
		}
		if nkv > 0 {
			p.KIn, p.WK, p.K = a.kin, w.kNorm, a.ak
		}
		p.WS, p.WSBytes = r.scratch()
		st.AttnPrep(&p)
	}
	r.norm(a.n, a.x, w.norm1, x.rows)
	in := []projection{{a.kin, w.k, akv}, {a.av, w.v, akv}}
	if !last {
		in = append(in, projection{a.qg, w.q, 2 * aq})
	}
	r.linears(a.n, x.rows, d, in...)
	rows, h, seq, pos := x.rows, a.x, x.seq, x.pos
	if !last {
		prep(rows, pos, nh, nkv)
	} else {
		rows, h, seq, pos = x.sampled, a.xs, x.selSeq, x.selPos
		prep(x.rows, x.pos, 0, nkv)
		if rows > 0 {
			r.pick(a.ns, a.n, d, x)
			r.pick(h, a.x, d, x)
			r.linear(a.qg, a.ns, w.q, rows, d, 2*aq, 0)
			prep(rows, pos, nh, 0)
		}
	}
	st.KVWrite(&kernels.KVWriteArgs{DType: r.dt, T: x.rows, NKV: nkv, HD: hd, PageSize: int64(r.opt.PageSize), MaxPages: x.maxPages,
		Seq: x.seq, Pos: x.pos, BlockTable: r.ix.table, K: a.ak, V: a.av, KCache: l.k, VCache: l.v})
	if rows == 0 {
		return
	}
	ap := kernels.AttnPagedArgs{DType: r.dt, T: rows, NH: nh, NKV: nkv, HD: hd, PageSize: int64(r.opt.PageSize), MaxPages: x.maxPages,
		Seq: seq, Pos: pos, BlockTable: r.ix.table, Q: a.aq, KCache: l.k, VCache: l.v, O: a.ao}
	ap.WS, ap.WSBytes = r.scratch()
	st.AttnPaged(&ap)
	st.Gate(&kernels.GateArgs{DType: r.dt, T: rows, NH: nh, HD: hd, O: a.ao, QG: a.qg, Y: a.y})
	r.linear(h, a.y, w.out, rows, aq, d, kernels.Beta1)
}

// mlp is h += down(silu(gate(n)) * up(n)), n = norm2(h) (model.md 3.10).
func (r *Runner) mlp(w *layerWeights, rows int64, h kernels.Ptr) {
	a, c := &r.a, r.m.Config
	r.norm(a.n, h, w.norm2, rows)
	g := kernels.GemmSwiGLUArgs{DType: r.dt, M: rows, N: int64(c.Intermediate), K: int64(c.Hidden), X: a.n, LDX: int64(c.Hidden),
		Gate: w.gate, Up: w.up, LDW: int64(c.Hidden), H: a.mlp}
	g.WS, g.WSBytes = r.scratch()
	r.st.GemmSwiGLU(&g)
	r.linear(h, a.mlp, w.down, rows, c.Intermediate, c.Hidden, kernels.Beta1)
}

// draw runs the head on the rows that sample, whose states are h, and draws their tokens.
func (r *Runner) draw(x *passIndex, h kernels.Ptr) {
	a, c, n := &r.a, r.m.Config, &r.ix
	r.norm(a.ns, h, r.w.norm, x.sampled)
	real := func(p kernels.Ptr) kernels.Ptr { return off(p, x.base, 1, r.dt.Wide()) }
	s := kernels.LMHeadSampleArgs{DType: r.dt, B: x.sampled, D: int64(c.Hidden), V: int64(c.VocabSize), VocabValid: r.valid, X: a.ns, W: r.w.head,
		Rows: x.samples, Token: off(n.token, x.base, 1, kernels.I32), LogP: real(n.logp), Entropy: real(n.entropy)}
	if x.truncated {
		s.Flags = kernels.Truncated
	}
	s.WS, s.WSBytes = r.scratch()
	r.st.LMHeadSample(&s)
}
