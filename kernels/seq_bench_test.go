package kernels

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"
)

// Benchmarks of the sequence ops at the shapes of the small models: one layer's op per iteration, float32, all threads.
//   go test ./kernels -run XXX -bench Seq

var benchLin, benchAtt = lin{2, 32, 4, 32}, att{4, 2, 32}

// bench runs an op b.N times; ns/row is time per row of the call.
func bench(b *testing.B, name string, r *rig, op Op, rows int, args any) {
	b.Run(name, func(b *testing.B) {
		r.run(op, args) // sets the workspace
		p := reflect.ValueOf(args).UnsafePointer()
		b.ResetTimer()
		for range b.N {
			r.st.Run(op, p)
		}
		if err := r.st.Sync(); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(rows), "ns/row")
	})
}

func trees(n, rows int) [][2]int {
	var lp [][2]int
	for range n {
		lp = append(lp, [2]int{rows, -1})
	}
	return lp
}

func BenchmarkSeqForest(b *testing.B) {
	var group [][2]int
	for range 2 {
		base := len(group)
		group = append(group, [2]int{256, -1})
		for range 8 {
			group = append(group, [2]int{384, base})
		}
	}
	for _, c := range []struct {
		name string
		lp   [][2]int
		l    lin
		h    att
	}{
		{"16x512", trees(16, 512), benchLin, benchAtt}, {"64x256", trees(64, 256), benchLin, benchAtt}, {"2 groups of 8", group, benchLin, benchAtt},
		{"1x2048 wide", trees(1, 2048), lin{4, 128, 8, 128}, att{8, 2, 256}},
	} {
		r := newRig(b, F32, Options{})
		f := mkForest(b, nil, c.lp...)
		T, l, h, g := f.NumRows, c.l, c.h, rand.New(rand.NewPCG(1, 1))
		rot := h.hd / 4
		pos := make([]int32, T)
		for s := range f.NumSeg {
			for i := range f.Len[s] {
				pos[f.Start[s]+i] = f.Pos[s] + i
			}
		}
		t, fa := int64(T), r.forest(f)
		nk, dk, nv, dv := int64(l.nk), int64(l.dk), int64(l.nv), int64(l.dv)
		nh, nkv, hd := int64(h.nh), int64(h.nkv), int64(h.hd)
		cx, x := randConv(g, l, T), randGDN(g, l, T)
		nq, nV, nb := T*l.nk*l.dk, T*l.nv*l.dv, T*l.nv
		cg := &ConvGateArgs{T: t, NK: nk, DK: dk, NV: nv, DV: dv, Eps: 1e-6, F: fa, P: r.put(cx.p), A: r.put(cx.a), B: r.put(cx.b), W: r.put(cx.w), ALog: r.put(cx.aLog), DTBias: r.put(cx.dt),
			Q: r.out(nq), K: r.out(nq), V: r.out(nV), Beta: r.out(nb), G: r.out(nb)}
		bench(b, c.name+"/convgate", r, OpConvGate, T, cg)
		gd := &GDNArgs{T: t, NK: nk, DK: dk, NV: nv, DV: dv, F: fa, Q: r.put(x.q), K: r.put(x.k), V: r.put(x.v), Beta: r.put(x.beta), G: r.put(x.g), O: r.out(nV),
			States: r.out((f.NumChunks + f.NumSeg) * l.nv * l.dk * l.dv)}
		bench(b, c.name+"/gdn", r, OpGDN, T, gd)
		gb := &GDNBwdArgs{T: t, NK: nk, DK: dk, NV: nv, DV: dv, F: fa, Q: gd.Q, K: gd.K, V: gd.V, Beta: gd.Beta, G: gd.G, States: gd.States, DO: r.put(randn(g, nV, 1)),
			DQ: r.out(nq), DK_: r.out(nq), DV_: r.out(nV), DBeta: r.out(nb), DG: r.out(nb)}
		bench(b, c.name+"/gdn_bwd", r, OpGDNBwd, T, gb)
		cb := &ConvGateBwdArgs{T: t, NK: nk, DK: dk, NV: nv, DV: dv, Eps: 1e-6, F: fa, P: cg.P, A: cg.A, B: cg.B, W: cg.W, ALog: cg.ALog, DTBias: cg.DTBias,
			DQ: gb.DQ, DK_: gb.DK_, DV_: gb.DV_, DBeta: gb.DBeta, DG: gb.DG, DP: r.out(T * l.conv()), DA: r.out(nb), DB: r.out(nb),
			DW: r.put(make([]float64, l.conv()*4)), DALog: r.put(make([]float64, l.nv)), DDTBias: r.put(make([]float64, l.nv))}
		bench(b, c.name+"/convgate_bwd", r, OpConvGateBwd, T, cb)
		aq, ak := T*h.nh*h.hd, T*h.nkv*h.hd
		ap := &AttnPrepArgs{T: t, NH: nh, NKV: nkv, HD: hd, Rot: int64(rot), Theta: 1e7, Eps: 1e-6, RopePos: r.ints(pos), QG: r.put(randn(g, 2*aq, 1)), KIn: r.put(randn(g, ak, 1)),
			WQ: r.put(make([]float64, h.hd)), WK: r.put(make([]float64, h.hd)), Q: r.out(aq), K: r.out(ak)}
		bench(b, c.name+"/attnprep", r, OpAttnPrep, T, ap)
		at := &AttnArgs{T: t, NH: nh, NKV: nkv, HD: hd, F: fa, Q: ap.Q, K: ap.K, V: r.put(randn(g, ak, 1)), O: r.out(aq), LSE: r.out(T * h.nh)}
		bench(b, c.name+"/attn", r, OpAttn, T, at)
		ab := &AttnBwdArgs{T: t, NH: nh, NKV: nkv, HD: hd, F: fa, Q: at.Q, K: at.K, V: at.V, O: at.O, LSE: at.LSE, DO: r.put(randn(g, aq, 1)), DQ: r.out(aq), DK: r.out(ak), DV: r.out(ak)}
		bench(b, c.name+"/attn_bwd", r, OpAttnBwd, T, ab)
		pb := &AttnPrepBwdArgs{T: t, NH: nh, NKV: nkv, HD: hd, Rot: int64(rot), Theta: 1e7, Eps: 1e-6, RopePos: ap.RopePos, QG: ap.QG, KIn: ap.KIn, WQ: ap.WQ, WK: ap.WK,
			DQ: ab.DQ, DK: ab.DK, DQG: r.out(2 * aq), DKIn: r.out(ak), DWQ: r.put(make([]float64, h.hd)), DWK: r.put(make([]float64, h.hd))}
		bench(b, c.name+"/attnprep_bwd", r, OpAttnPrepBwd, T, pb)
		bench(b, c.name+"/gate", r, OpGate, T, &GateArgs{T: t, NH: nh, HD: hd, O: at.O, QG: ap.QG, Y: r.out(aq)})
		bench(b, c.name+"/gate_bwd", r, OpGateBwd, T, &GateBwdArgs{T: t, NH: nh, HD: hd, O: at.O, QG: ap.QG, DY: ab.DO, DO: r.out(aq), DQG: pb.DQG})
	}
}

// BenchmarkSeqDecode: one step of 64 sequences, and prefill of 64x256 through the cache.
func BenchmarkSeqDecode(b *testing.B) {
	const B, size = 64, 16
	l, h, g := benchLin, benchAtt, rand.New(rand.NewPCG(1, 1))
	nk, dk, nv, dv := int64(l.nk), int64(l.dk), int64(l.nv), int64(l.dv)
	r := newRig(b, F32, Options{})
	slots := make([]int32, B)
	for i := range slots {
		slots[i] = int32(i)
	}
	cx, x := randConv(g, l, B), randGDN(g, l, B)
	bench(b, "convgate_step", r, OpConvGateStep, B, &ConvGateStepArgs{B: B, NK: nk, DK: dk, NV: nv, DV: dv, Eps: 1e-6, Slot: r.ints(slots), P: r.put(cx.p), A: r.put(cx.a), B_: r.put(cx.b), W: r.put(cx.w),
		ALog: r.put(cx.aLog), DTBias: r.put(cx.dt), Q: r.out(len(x.q)), K: r.out(len(x.k)), V: r.out(len(x.v)), Beta: r.out(len(x.beta)), G: r.out(len(x.g)), ConvState: r.put(randn(g, B*3*l.conv(), 1))})
	bench(b, "gdn_step", r, OpGDNStep, B, &GDNStepArgs{B: B, NK: nk, DK: dk, NV: nv, DV: dv, Slot: r.ints(slots), Q: r.put(x.q), K: r.put(x.k), V: r.put(x.v), Beta: r.put(x.beta), G: r.put(x.g),
		O: r.out(len(x.v)), RecState: r.put(make([]float64, B*l.nv*l.dk*l.dv))})
	p := newPaged(g, h, size, 384/size, B)
	run := func(name string, from, to func(s int) int) {
		var seq, pos []int32
		for s := range B {
			for i := from(s); i < to(s); i++ {
				seq, pos = append(seq, int32(s)), append(pos, int32(i))
			}
		}
		T, w := len(seq), h.nkv*h.hd
		kw := &KVWriteArgs{T: int64(T), NKV: int64(h.nkv), HD: int64(h.hd), PageSize: size, MaxPages: int64(p.maxPages), Seq: r.ints(seq), Pos: r.ints(pos), BlockTable: r.ints(p.table),
			K: r.put(randn(g, T*w, 1)), V: r.put(randn(g, T*w, 1)), KCache: r.put(p.kc), VCache: r.put(p.vc)}
		bench(b, name+"/kv_write", r, OpKVWrite, T, kw)
		bench(b, name+"/attn_paged", r, OpAttnPaged, T, &AttnPagedArgs{T: int64(T), NH: int64(h.nh), NKV: int64(h.nkv), HD: int64(h.hd), PageSize: size, MaxPages: int64(p.maxPages), Seq: kw.Seq, Pos: kw.Pos,
			BlockTable: kw.BlockTable, Q: r.put(randn(g, T*h.nh*h.hd, 1)), KCache: kw.KCache, VCache: kw.VCache, O: r.out(T * h.nh * h.hd)})
	}
	at := func(s int) int { return 256 + s*2 }
	run(fmt.Sprintf("decode %d", B), at, func(s int) int { return at(s) + 1 })
	run(fmt.Sprintf("prefill %dx256", B), func(int) int { return 0 }, func(int) int { return 256 })
}
