package model

import (
	"fmt"
	"unsafe"

	"harness-s/kernels"
)

// passIndex are the device addresses of the int32 arrays of one pass.
type passIndex struct {
	ids, seq, pos, table, slots kernels.Ptr // all rows; table [pieces, maxPages]; slots of decode rows
	sel, selSeq, selPos         kernels.Ptr // rows that sample
	forest                      kernels.ForestArgs
	rows, decode, sampled       int64
	maxPages                    int64
}

// pass runs one batch of pieces through the model: decode rows first (recurrent step kernels), then appends of several tokens (chunked kernels
// over a forest whose roots continue the sequences' states). The last layer computes K, V and states for all rows and the rest only
// for rows that sample.
func (r *Runner) pass(work []Work, batch []piece, out []Sampled) error {
	x, err := r.upload(batch)
	if err != nil {
		return err
	}
	a, c, st := &r.a, r.m.Config, r.st
	st.Embed(&kernels.EmbedArgs{DType: r.dt, T: x.rows, D: int64(c.Hidden), V: int64(c.VocabSize), IDs: x.ids, W: r.w.embed, Y: a.x})
	for i := range r.w.layers {
		last := i == len(r.w.layers)-1
		if c.LayerTypes[i] == FullAttention {
			r.attention(i, x, last)
		} else {
			r.deltaNet(i, x, last)
		}
		rows, h := x.rows, a.x
		if last {
			rows, h = x.sampled, a.xs
		}
		if rows > 0 {
			r.mlp(&r.w.layers[i], rows, h)
		}
	}
	if x.sampled > 0 {
		r.sample(work, batch, x)
	}
	if err := st.Sync(); err != nil {
		return fmt.Errorf("sampler pass of %d rows: %w", x.rows, err)
	}
	if x.sampled > 0 {
		r.collect(batch, x, out)
	}
	for _, p := range batch {
		r.cache.seqs[p.seq].len += len(p.ids)
	}
	return st.Err()
}

// upload lays out and uploads the index arrays of a pass.
func (r *Runner) upload(batch []piece) (*passIndex, error) {
	x := &passIndex{}
	var segs []kernels.Segment
	var slots []int32
	for _, p := range batch {
		x.rows += int64(len(p.ids))
		x.maxPages = max(x.maxPages, int64(r.cache.pagesFor(p.pos+len(p.ids))))
		if p.decode {
			x.decode++
		} else {
			segs = append(segs, kernels.Segment{Len: int32(len(p.ids)), Parent: -1, Pos: int32(p.pos)})
			slots = append(slots, int32(p.seq))
		}
		if p.sample {
			x.sampled++
		}
	}
	var f *kernels.Forest
	var forestBytes int64
	if len(segs) > 0 {
		var err error
		if f, err = kernels.NewForest(segs, slots); err != nil {
			return nil, fmt.Errorf("sampler pass: %w", err)
		}
		forestBytes = f.DeviceBytes()
	}
	t, n := int(x.rows), int(x.sampled)
	total := int(x.numInts(len(batch)))
	if err := r.need(&r.ibuf, indexRoom(x.numInts(len(batch)), forestBytes), "sampler indices"); err != nil {
		return nil, err
	}
	r.ints = append(r.ints[:0], make([]int32, total)...)
	ids, seq, pos := r.ints[:t], r.ints[t:2*t], r.ints[2*t:3*t]
	table := r.ints[3*t : 3*t+len(batch)*int(x.maxPages)]
	dslots := r.ints[3*t+len(table) : 3*t+len(table)+int(x.decode)]
	sel := r.ints[3*t+len(table)+len(dslots):]
	row, picked := 0, 0
	for b, p := range batch {
		copy(table[b*int(x.maxPages):], r.cache.seqs[p.seq].pages[:r.cache.pagesFor(p.pos+len(p.ids))])
		if p.decode {
			dslots[row] = int32(p.seq)
		}
		for j, id := range p.ids {
			ids[row], seq[row], pos[row] = id, int32(b), int32(p.pos+j)
			row++
		}
		if p.sample {
			sel[picked], sel[n+picked], sel[2*n+picked] = int32(row-1), int32(b), pos[row-1]
			picked++
		}
	}
	r.st.UploadI32(r.ibuf.Ptr(), r.ints)
	at := func(i int) kernels.Ptr { return r.ibuf.At(int64(i) * 4) }
	x.ids, x.seq, x.pos, x.table = at(0), at(t), at(2*t), at(3*t)
	x.slots = at(3*t + len(table))
	x.sel = at(3*t + len(table) + len(dslots))
	x.selSeq, x.selPos = at(3*t+len(table)+len(dslots)+n), at(3*t+len(table)+len(dslots)+2*n)
	if f != nil {
		x.forest = f.Upload(r.st, r.ibuf.At(alignUp(int64(total)*4)))
	}
	return x, r.need(&r.ws, passWorkspace(r.m.Dev, r.m.Config, r.dt, x, r.opt.PageSize), "sampler workspace")
}

// numInts is the number of indices of a pass over the given number of pieces.
func (x *passIndex) numInts(pieces int) int64 {
	return 3*x.rows + int64(pieces)*x.maxPages + x.decode + 3*x.sampled
}

// indexRoom is the bytes of a pass's indices with its forest behind them.
func indexRoom(ints, forestBytes int64) int64 { return 4*ints + align + forestBytes }

// room is what is allocated when a pass needs more than any before it: half as much again, since contexts grow.
func room(need int64) int64 { return alignUp(need + need/2) }

// need makes *b at least n bytes.
func (r *Runner) need(b **kernels.Buffer, n int64, label string) error {
	if n <= 0 || *b != nil && (*b).Bytes() >= n {
		return nil
	}
	(*b).Free()
	var err error
	*b, err = r.m.Dev.Alloc(room(n), label)
	return err
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
	for _, n := range []int64{int64(c.ConvChannels()), vd, nv, 2 * aq, nkv * hd, i} {
		gemm(x.rows, d, n, 0)
	}
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
	r.linear(a.p, a.n, w.qkv, x.rows, d, ch, 0)
	r.linear(a.b, a.n, w.b, x.rows, d, c.LinValueHeads, 0)
	r.linear(a.a, a.n, w.a, x.rows, d, c.LinValueHeads, 0)
	if n := x.decode; n > 0 {
		st.ConvGateStep(&kernels.ConvGateStepArgs{DType: r.dt, B: n, NK: nk, DK: dk, NV: nv, DV: dv, Eps: l2Eps, Slot: x.slots, P: a.p, A: a.a, B_: a.b,
			W: w.conv, ALog: w.aLog, DTBias: w.dtBias, Q: a.q, K: a.k, V: a.v, Beta: a.beta, G: a.g, ConvState: l.conv})
		st.GDNStep(&kernels.GDNStepArgs{DType: r.dt, B: n, NK: nk, DK: dk, NV: nv, DV: dv, Slot: x.slots, Pos: x.pos, Q: a.q, K: a.k, V: a.v,
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
	rows, n, o, h := x.rows, a.n, a.o, a.x
	if last {
		if x.sampled == 0 {
			return
		}
		rows, n, h = x.sampled, a.ns, a.xs
		r.pick(n, a.n, d, x)
		r.pick(h, a.x, d, x)
		r.pick(a.v, a.o, vd, x) // v is spent
		o = a.v
	}
	r.linear(a.z, n, w.z, rows, d, vd, 0)
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
	r.linear(a.kin, a.n, w.k, x.rows, d, akv, 0)
	r.linear(a.av, a.n, w.v, x.rows, d, akv, 0)
	rows, n, h, seq, pos := x.rows, a.n, a.x, x.seq, x.pos
	if last {
		rows, n, h, seq, pos = x.sampled, a.ns, a.xs, x.selSeq, x.selPos
		if rows > 0 {
			r.pick(n, a.n, d, x)
			r.pick(h, a.x, d, x)
		}
	}
	prep(x.rows, x.pos, 0, nkv)
	st.KVWrite(&kernels.KVWriteArgs{DType: r.dt, T: x.rows, NKV: nkv, HD: hd, PageSize: int64(r.opt.PageSize), MaxPages: x.maxPages,
		Seq: x.seq, Pos: x.pos, BlockTable: x.table, K: a.ak, V: a.av, KCache: l.k, VCache: l.v})
	if rows == 0 {
		return
	}
	r.linear(a.qg, n, w.q, rows, d, 2*aq, 0)
	prep(rows, pos, nh, 0)
	ap := kernels.AttnPagedArgs{DType: r.dt, T: rows, NH: nh, NKV: nkv, HD: hd, PageSize: int64(r.opt.PageSize), MaxPages: x.maxPages,
		Seq: seq, Pos: pos, BlockTable: x.table, Q: a.aq, KCache: l.k, VCache: l.v, O: a.ao}
	ap.WS, ap.WSBytes = r.scratch()
	st.AttnPaged(&ap)
	st.Gate(&kernels.GateArgs{DType: r.dt, T: rows, NH: nh, HD: hd, O: a.ao, QG: a.qg, Y: a.y})
	r.linear(h, a.y, w.out, rows, aq, d, kernels.Beta1)
}

// mlp is h += down(silu(gate(n)) * up(n)), n = norm2(h) (model.md 3.10).
func (r *Runner) mlp(w *layerWeights, rows int64, h kernels.Ptr) {
	a, c := &r.a, r.m.Config
	r.norm(a.n, h, w.norm2, rows)
	r.linear(a.gate, a.n, w.gate, rows, c.Hidden, c.Intermediate, 0)
	r.linear(a.up, a.n, w.up, rows, c.Hidden, c.Intermediate, 0)
	r.st.SwiGLU(&kernels.SwiGLUArgs{DType: r.dt, N: rows * int64(c.Intermediate), Gate: a.gate, Up: a.up, H: a.gate})
	r.linear(h, a.gate, w.down, rows, c.Intermediate, c.Hidden, kernels.Beta1)
}

// sample runs the head on the selected rows and draws their tokens.
func (r *Runner) sample(work []Work, batch []piece, x *passIndex) {
	a, c := &r.a, r.m.Config
	r.norm(a.ns, a.xs, r.w.norm, x.sampled)
	r.rows = r.rows[:0]
	var flags uint32
	for _, p := range batch {
		if p.sample {
			w := &work[p.work]
			topP := w.Sampling.TopP
			if topP == 0 {
				topP = 1
			}
			if topP < 1 || w.Sampling.MinP > 0 || w.Sampling.TopK > 0 {
				flags = kernels.Truncated
			}
			r.rows = append(r.rows, kernels.SampleRow{KeyLo: w.Key.Lo, KeyHi: w.Key.Hi, Ctr: w.Ctr,
				Temperature: w.Sampling.Temperature, TopP: topP, MinP: w.Sampling.MinP, TopK: int32(w.Sampling.TopK)})
		}
	}
	r.st.UploadSampleRows(r.rbuf.Ptr(), r.rows)
	tok, lp, ent := r.results(x.sampled)
	s := kernels.LMHeadSampleArgs{DType: r.dt, Flags: flags, B: x.sampled, D: int64(c.Hidden), V: int64(c.VocabSize), VocabValid: r.valid, X: a.ns, W: r.w.head,
		Rows: r.rbuf.Ptr(), Token: tok, LogP: lp, Entropy: ent}
	s.WS, s.WSBytes = r.scratch()
	r.st.LMHeadSample(&s)
}

// results are the addresses of log-probs, entropies and tokens behind the sample rows.
func (r *Runner) results(n int64) (tok, lp, ent kernels.Ptr) {
	base, elem := int64(r.opt.MaxSeqs)*kernels.SampleRowBytes, int64(r.dt.Wide().Size())
	return r.rbuf.At(base + 2*n*elem), r.rbuf.At(base), r.rbuf.At(base + n*elem)
}

func (r *Runner) collect(batch []piece, x *passIndex, out []Sampled) {
	n := int(x.sampled)
	tok, lp, ent := r.results(x.sampled)
	tokens, vals := make([]int32, n), make([]float32, 2*n)
	r.st.DownloadI32(tokens, tok)
	r.st.DownloadReal(vals[:n], lp, r.dt.Wide())
	r.st.DownloadReal(vals[n:], ent, r.dt.Wide())
	i := 0
	for _, p := range batch {
		if p.sample {
			if tokens[i] < 0 { // abi.h: the logits have no distribution
				r.st.Fail(fmt.Errorf("sample work %d: logits are not finite: %w", p.work, ErrNonFinite))
			}
			out[p.work] = Sampled{Token: tokens[i], LogProb: vals[i], Entropy: vals[n+i]}
			i++
		}
	}
}
