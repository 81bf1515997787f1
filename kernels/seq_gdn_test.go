package kernels

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// lin is the geometry of a linear layer; gdnIn the inputs of the delta rule over T rows.
type lin struct{ nk, dk, nv, dv int }

func (l lin) conv() int { return 2*l.nk*l.dk + l.nv*l.dv }

type gdnIn struct{ q, k, v, beta, g []float64 }

func (x gdnIn) list() [][]float64 { return [][]float64{x.q, x.k, x.v, x.beta, x.g} }
func gdnOf(l [][]float64) gdnIn   { return gdnIn{l[0], l[1], l[2], l[3], l[4]} }

// rounded is x as the rig stores it.
func (x gdnIn) rounded(r *rig) gdnIn {
	return gdnIn{r.round(x.q), r.round(x.k), r.round(x.v), r.round32(x.beta), r.round32(x.g)}
}

func randGDN(g *rand.Rand, l lin, T int) gdnIn {
	x := gdnIn{q: randn(g, T*l.nk*l.dk, 0.3), k: randn(g, T*l.nk*l.dk, 1), v: randn(g, T*l.nv*l.dv, 1), beta: make([]float64, T*l.nv), g: make([]float64, T*l.nv)}
	for i := range T * l.nk { // unit keys, as the conv op makes them
		var s float64
		for _, k := range x.k[i*l.dk : (i+1)*l.dk] {
			s += k * k
		}
		for j := range l.dk {
			x.k[i*l.dk+j] /= math.Sqrt(s)
		}
	}
	for i := range x.beta {
		x.beta[i] = 1 / (1 + math.Exp(-g.NormFloat64()))
		x.g[i] = -math.Exp(g.NormFloat64() - 2)
	}
	return x
}

// gdn runs the forward; rec are slots as bytes, nil for none.
func (r *rig) gdn(f *Forest, l lin, x gdnIn, rec []byte) (o, states []float64, recOut []byte) {
	a := &GDNArgs{T: int64(f.NumRows), NK: int64(l.nk), DK: int64(l.dk), NV: int64(l.nv), DV: int64(l.dv), F: r.forest(f),
		Q: r.put(x.q), K: r.put(x.k), V: r.put(x.v), Beta: r.put32(x.beta), G: r.put32(x.g)}
	no, ns := f.NumRows*l.nv*l.dv, (f.NumChunks+f.NumSeg)*l.nv*l.dk*l.dv
	a.O, a.States = r.out(no), r.out32(ns)
	if rec != nil {
		a.RecState = r.putBytes(rec)
	}
	r.run(OpGDN, a)
	return r.get(a.O, no), r.get32(a.States, ns), r.getBytes(a.RecState, len(rec))
}

func (r *rig) gdnBwd(f *Forest, l lin, x gdnIn, states, do []float64) gdnIn {
	T := f.NumRows
	a := &GDNBwdArgs{T: int64(T), NK: int64(l.nk), DK: int64(l.dk), NV: int64(l.nv), DV: int64(l.dv), F: r.forest(f),
		Q: r.put(x.q), K: r.put(x.k), V: r.put(x.v), Beta: r.put32(x.beta), G: r.put32(x.g), States: r.put32(states), DO: r.put(do)}
	nq, nv, nb := T*l.nk*l.dk, T*l.nv*l.dv, T*l.nv
	a.DQ, a.DK_, a.DV_, a.DBeta, a.DG = r.out(nq), r.out(nq), r.out(nv), r.out32(nb), r.out32(nb)
	r.run(OpGDNBwd, a)
	return gdnIn{r.get(a.DQ, nq), r.get(a.DK_, nq), r.get(a.DV_, nv), r.get32(a.DBeta, nb), r.get32(a.DG, nb)}
}

// naiveGDN is the recurrent form (model.md 3.5) over one sequence; S0 [nv, dk, dv] is updated in place.
func naiveGDN(l lin, x gdnIn, T int, S []float64) []float64 {
	o := make([]float64, T*l.nv*l.dv)
	rep := l.nv / l.nk
	for t := range T {
		for h := range l.nv {
			q, k := x.q[(t*l.nk+h/rep)*l.dk:], x.k[(t*l.nk+h/rep)*l.dk:]
			St := S[h*l.dk*l.dv:]
			al, be := math.Exp(x.g[t*l.nv+h]), x.beta[t*l.nv+h]
			for j := range l.dv {
				var r float64
				for i := range l.dk {
					St[i*l.dv+j] *= al
					r += St[i*l.dv+j] * k[i]
				}
				d := be * (x.v[(t*l.nv+h)*l.dv+j] - r)
				for i := range l.dk {
					St[i*l.dv+j] += k[i] * d
					o[(t*l.nv+h)*l.dv+j] += St[i*l.dv+j] * q[i]
				}
			}
		}
	}
	return o
}

func (x gdnIn) rows(l lin, rows []int) gdnIn {
	return gdnIn{split(x.q, l.nk*l.dk, rows), split(x.k, l.nk*l.dk, rows), split(x.v, l.nv*l.dv, rows), split(x.beta, l.nv, rows), split(x.g, l.nv, rows)}
}

// naiveForestGDN runs each segment's whole path as a sequence of its own.
func naiveForestGDN(f *Forest, l lin, x gdnIn) []float64 {
	o := make([]float64, f.NumRows*l.nv*l.dv)
	for s := range f.NumSeg {
		rows := path(f, s)
		y := naiveGDN(l, x.rows(l, rows), len(rows), make([]float64, l.nv*l.dk*l.dv))
		n := int(f.Len[s]) * l.nv * l.dv
		copy(o[int(f.Start[s])*l.nv*l.dv:], y[len(y)-n:])
	}
	return o
}

// TestGDNMicro reproduces the vector of model.md 3.8 through the public op, for chunks of 1, 2 and 3 rows: the initial state is written
// by two leading rows with orthonormal keys, the gradient of the final state enters through two trailing rows that only read.
func TestGDNMicro(t *testing.T) {
	l := lin{1, 2, 1, 2}
	x := gdnIn{
		q:    []float64{0, 0, 0, 0, .5, -.25, .1, .6, -.3, .2, 1, 0, 0, 1},
		k:    []float64{1, 0, 0, 1, .6, .8, .8, -.6, .28, .96, 0, 0, 0, 0},
		v:    []float64{.2, -.1, 0, .3, 1, 2, -1, .5, .25, -2, 0, 0, 0, 0},
		beta: []float64{1, 1, .9, .5, .25, 0, 0},
		g:    []float64{0, 0, -.1, -.5, -.05, 0, 0},
	}
	do := []float64{0, 0, 0, 0, 1, -1, .5, .25, -2, 1, .1, 0, -.2, .3}
	rigs := []func(t *testing.T) *rig{}
	for _, dt := range []DType{F64, F32} {
		rigs = append(rigs, func(t *testing.T) *rig { return newRig(t, dt, Options{Threads: 1}) })
	}
	for _, order := range fiberOrders() { // not in BF16, which cannot hold the vector's inputs
		rigs = append(rigs, func(t *testing.T) *rig { return emuRig(t, F32, order) })
	}
	for i, rig := range rigs {
		for name, lp := range map[string][][2]int{
			"chunks of 3": {{2, -1}, {3, 0}, {2, 1}},
			"chunks of 2": {{2, -1}, {2, 0}, {1, 1}, {2, 2}},
			"chunks of 1": {{2, -1}, {1, 0}, {1, 1}, {1, 2}, {2, 3}},
			"one chunk":   {{7, -1}},
		} {
			t.Run(fmt.Sprintf("%s/%s", []string{"f64", "f32", "emu/forward", "emu/reverse", "emu/random"}[i], name), func(t *testing.T) {
				const tol = 4e-7 // the vector has eight decimals
				r := rig(t)
				f := mkForest(t, nil, lp...)
				o, states, _ := r.gdn(f, l, x, nil)
				near(t, "O", o[4:10], []float64{.17071150, .05223696, .42603682, .54485899, .13502174, -.16100461}, tol)
				near(t, "S_T", states[len(states)-4:], []float64{-.05939133, .56022554, .58602172, .03531528}, tol)
				d := r.gdnBwd(f, l, x, states, do)
				near(t, "dq", d.q[4:10], []float64{-.23923204, -.95236225, .18427694, .55134244, .67900820, -1.13672817}, tol)
				near(t, "dk", d.k[4:10], []float64{-.30970096, .58351559, -.48601683, .40131432, .07129820, -.31416807}, tol)
				near(t, "dv", d.v[4:10], []float64{.25240380, .04981331, .35166098, -.27525772, -.095, .099}, tol)
				near(t, "dg", d.g[2:5], []float64{.28312014, .51667601, -.32184699}, tol)
				near(t, "dbeta", d.beta[2:5], []float64{.35167906, -1.11889190, -1.00677570}, tol)
				near(t, "dS0", d.v[:4], []float64{.56775060, -.51597531, -.39409289, .39324162}, tol)
			})
		}
	}
}

// TestGDNChunked compares the chunked form with the recurrent one at lengths around the chunk and at extreme gates.
func TestGDNChunked(t *testing.T) {
	l := lin{2, 8, 4, 6}
	for _, dt := range []DType{F64, F32} {
		gdnHard(t, newRig(t, dt, Options{Threads: 2}), l, []int{1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129})
	}
	eachEmu(t, func(t *testing.T, r *rig) {
		gdnHard(t, r, l, []int{1, 17, 64, 65})
		gdnHard(t, r, lin{1, 16, 2, 16}, []int{63, 130})
	})
	eachEmu(t, func(t *testing.T, r *rig) {
		for _, T := range []int{1, 17, 63, 64, 65, 130} {
			for _, kind := range hardKinds {
				do := randn(rand.New(rand.NewPCG(uint64(T), 6)), T*l.nv*l.dv, 1)
				checkGDNBwdEmu(t, r, fmt.Sprintf("T=%d %s", T, kind), mkForest(t, nil, [2]int{T, -1}), l, hardGDN(kind, l, T), do)
			}
		}
	})
}

// hardGDN lists gates and keys at the edges of their ranges.
func hardGDN(kind string, l lin, T int) gdnIn {
	x := randGDN(rand.New(rand.NewPCG(uint64(T), 5)), l, T)
	for i := range x.g {
		switch {
		case kind == "strong decay" || kind == "mixed decay" && i/l.nv%7 == 3:
			x.g[i] = -20
		case kind == "weak decay" || kind == "mixed decay":
			x.g[i] = -1e-4
		case kind == "beta 0":
			x.beta[i] = 1e-6
		case kind == "beta 1":
			x.beta[i] = 1 - 1e-6
		case kind == "same key":
			copy(x.k[i/l.nv*l.nk*l.dk:(i/l.nv+1)*l.nk*l.dk], x.k[:l.nk*l.dk])
		}
	}
	return x
}

var hardKinds = []string{"random", "strong decay", "weak decay", "beta 0", "beta 1", "same key", "mixed decay"}

func gdnHard(t *testing.T, r *rig, l lin, lengths []int) {
	t.Helper()
	tol := map[DType]float64{F64: 1e-12, F32: 2e-5, BF16: 2e-5}[r.dt] // float32 sums over 129 rows with keys that repeat
	for _, T := range lengths {
		for _, kind := range hardKinds {
			x := hardGDN(kind, l, T).rounded(r)
			o, states, _ := r.gdn(mkForest(t, nil, [2]int{T, -1}), l, x, nil)
			S := make([]float64, l.nv*l.dk*l.dv)
			want := naiveGDN(l, x, T, S)
			near(t, fmt.Sprintf("%v T=%d %s: o", r.dt, T, kind), o, want, max(tol, map[DType]float64{BF16: tolOf(BF16)}[r.dt]))
			if GDNRing(r.dt, l.dk, l.dv) { // the last state is that of the last multiple of 16 rows
				S = make([]float64, len(S))
				naiveGDN(l, x, T-T%GDNRingRows, S)
			}
			near(t, fmt.Sprintf("%v T=%d %s: state", r.dt, T, kind), states[len(states)-len(S):], S, tol)
			r.free()
		}
	}
}

// TestGDNWide: the real head width, several blocks of columns, and more than four strips of rows of the state.
func TestGDNWide(t *testing.T) {
	for _, l := range []lin{{1, 128, 2, 128}, {1, 40, 1, 90}} {
		t.Run(fmt.Sprint(l), func(t *testing.T) {
			f := mkForest(t, nil, [2]int{66, -1}, [2]int{3, 0}, [2]int{1, 1})
			g := rand.New(rand.NewPCG(12, 1))
			x, do := randGDN(g, l, f.NumRows), randn(g, f.NumRows*l.nv*l.dv, 1)
			eachEmu(t, func(t *testing.T, r *rig) {
				checkGDNEmu(t, r, f, l, x)
				checkGDNBwdEmu(t, r, "wide", f, l, x, do)
			})
		})
	}
}

func TestGDNForest(t *testing.T) {
	for name, lp := range forests() {
		for _, l := range []lin{{2, 16, 4, 32}, {1, 5, 3, 7}, {1, 2, 1, 18}} {
			t.Run(fmt.Sprintf("%s/%v", name, l), func(t *testing.T) {
				f := mkForest(t, nil, lp...)
				g := rand.New(rand.NewPCG(3, 4))
				x, do := randGDN(g, l, f.NumRows), randn(g, f.NumRows*l.nv*l.dv, 1)
				want := naiveForestGDN(f, l, x)
				r := newRig(t, F64, Options{Threads: 2})
				o, states, _ := r.gdn(f, l, x, nil)
				near(t, "o", o, want, 1e-12)
				d := r.gdnBwd(f, l, x, states, do)
				checkSeparateGDN(t, r, f, l, x, do, d)
				if f.NumRows < 120 {
					checkGrads(t, []string{"q", "k", "v", "beta", "g"}, x.list(), [][]float64{do}, d.list(), func(in [][]float64) [][]float64 {
						defer r.free()
						o, _, _ := r.gdn(f, l, gdnOf(in), nil)
						return [][]float64{o}
					})
				}
				for _, lv := range levels() {
					r := newRig(t, F32, Options{Threads: 2, SIMD: lv})
					o, st, _ := r.gdn(f, l, x, nil)
					near(t, lv+" o", o, want, 2e-5)
					for i, got := range r.gdnBwd(f, l, x, st, do).list() {
						near(t, lv+" d"+[]string{"q", "k", "v", "beta", "g"}[i], got, d.list()[i], 1e-4)
					}
				}
				eachEmu(t, func(t *testing.T, r *rig) { checkGDNEmu(t, r, f, l, x) })
				eachEmu(t, func(t *testing.T, r *rig) { checkGDNBwdEmu(t, r, name, f, l, x, do) })
			})
		}
	}
}

// checkGDNEmu compares the forward on the inputs as the rig stores them with the recurrent form in float64: the bounds of the CPU's float32,
// and the half unit in the last place of what is stored as bfloat16.
func checkGDNEmu(t *testing.T, r *rig, f *Forest, l lin, x gdnIn) {
	t.Helper()
	x = x.rounded(r)
	o, states, _ := r.gdn(f, l, x, nil)
	near(t, "o", o, naiveForestGDN(f, l, x), max(2e-5, tolOf(r.dt)))
	ss, ring := l.nv*l.dk*l.dv, GDNRing(r.dt, l.dk, l.dv)
	check := func(what string, at int, rows []int) {
		S := make([]float64, ss)
		naiveGDN(l, x.rows(l, rows), len(rows), S)
		near(t, what, states[at*ss:(at+1)*ss], S, 2e-5)
	}
	for s := range f.NumSeg {
		rows := path(f, s)
		before := len(rows) - int(f.Len[s])
		for c := range int(f.ChunkOff[s+1] - f.ChunkOff[s]) {
			check(fmt.Sprintf("state before chunk %d of segment %d", c, s), int(f.ChunkOff[s])+c, rows[:before+c*GDNChunk])
		}
		n := len(rows)
		if ring {
			n -= n % GDNRingRows
		}
		check(fmt.Sprintf("state of segment %d", s), f.NumChunks+s, rows[:n])
		if f.Parent[s] >= 0 && (!ring || before%GDNRingRows == 0) { // a chunk's first state is what came before it, bit for bit
			at := int(f.ChunkOff[s])
			same(t, fmt.Sprintf("first state of segment %d", s), states[at*ss:(at+1)*ss], states[(f.NumChunks+int(f.Parent[s]))*ss:][:ss])
		}
	}
}

// checkGDNBwdEmu compares the backward with the CPU's in float64, on the inputs as the rig stores them and the rig's own chunk states, whose
// error it carries. Products of split bfloat16 lose about 2^-16 each; the bounds are those of the CPU's float32, and the half unit in the
// last place of what is stored as bfloat16.
func checkGDNBwdEmu(t *testing.T, r *rig, what string, f *Forest, l lin, x gdnIn, do []float64) {
	t.Helper()
	ref := newRig(t, F64, Options{Threads: 2})
	defer ref.close()
	x, do = x.rounded(r), r.round(do)
	_, want, _ := ref.gdn(f, l, x, nil)
	_, states, _ := r.gdn(f, l, x, nil)
	d := ref.gdnBwd(f, l, x, want, do).list()
	for i, got := range r.gdnBwd(f, l, x, states, do).list() {
		tol := 1e-4
		if i < 3 {
			tol = max(tol, tolOf(r.dt))
		}
		near(t, fmt.Sprintf("%s %v d%s", what, r.dt, []string{"q", "k", "v", "beta", "g"}[i]), got, d[i], tol)
	}
	r.free()
}

// checkSeparateGDN: every gradient of the forest is the sum over its segments of the gradient of that segment's path run alone, with
// the output gradient on the segment's own rows.
func checkSeparateGDN(t *testing.T, r *rig, f *Forest, l lin, x gdnIn, do []float64, d gdnIn) {
	t.Helper()
	sum := [][]float64{make([]float64, len(x.q)), make([]float64, len(x.k)), make([]float64, len(x.v)), make([]float64, len(x.beta)), make([]float64, len(x.g))}
	widths := []int{l.nk * l.dk, l.nk * l.dk, l.nv * l.dv, l.nv, l.nv}
	for s := range f.NumSeg {
		rows := path(f, s)
		one := mkForest(t, nil, [2]int{len(rows), -1})
		xs, ds := x.rows(l, rows), split(do, l.nv*l.dv, rows)
		clear(ds[:(len(rows)-int(f.Len[s]))*l.nv*l.dv])
		_, st, _ := r.gdn(one, l, xs, nil)
		for i, g := range r.gdnBwd(one, l, xs, st, ds).list() {
			scatterAdd(sum[i], widths[i], rows, g)
		}
	}
	for i, got := range d.list() {
		near(t, "separate d"+[]string{"q", "k", "v", "beta", "g"}[i], got, sum[i], 1e-11)
	}
}

// TestGDNBits: a tree's bits do not depend on the other trees, on its place among them, or on the thread count.
func TestGDNBits(t *testing.T) {
	l := lin{2, 16, 4, 16}
	trees := [][][2]int{{{65, -1}, {3, 0}, {70, 0}}, {{2, -1}, {1, 0}, {5, 1}}, {{130, -1}}}
	g := rand.New(rand.NewPCG(8, 8))
	type item struct {
		x  gdnIn
		do []float64
	}
	var items []item
	for _, tr := range trees {
		f := mkForest(t, nil, tr...)
		items = append(items, item{randGDN(g, l, f.NumRows), randn(g, f.NumRows*l.nv*l.dv, 1)})
	}
	check := func(t *testing.T, one *rig, packed func() *rig) {
		var alone [][][]float64
		for i, tr := range trees {
			f := mkForest(t, nil, tr...)
			o, st, _ := one.gdn(f, l, items[i].x, nil)
			alone = append(alone, append([][]float64{o}, one.gdnBwd(f, l, items[i].x, st, items[i].do).list()...))
		}
		for _, order := range [][]int{{0, 1, 2}, {2, 0, 1}, {1, 2, 0}, {1}} {
			r := packed()
			var lp [][2]int
			in := make([][]float64, 6)
			for _, i := range order {
				base := len(lp)
				for _, x := range trees[i] {
					if x[1] >= 0 {
						x[1] += base
					}
					lp = append(lp, x)
				}
				for j, s := range append(items[i].x.list(), items[i].do) {
					in[j] = append(in[j], s...)
				}
			}
			f := mkForest(t, nil, lp...)
			o, st, _ := r.gdn(f, l, gdnOf(in), nil)
			all := append([][]float64{o}, r.gdnBwd(f, l, gdnOf(in), st, in[5]).list()...)
			for j := range all {
				at := 0
				for _, i := range order {
					n := len(alone[i][j])
					same(t, fmt.Sprintf("%v order %v output %d tree %d", r.dt, order, j, i), all[j][at:at+n], alone[i][j])
					at += n
				}
			}
		}
	}
	for _, dt := range []DType{F32, F64} {
		for _, threads := range []int{1, 2, 3} {
			check(t, newRig(t, dt, Options{Threads: 1}), func() *rig { return newRig(t, dt, Options{Threads: threads}) })
		}
	}
	eachEmu(t, func(t *testing.T, r *rig) { check(t, r, func() *rig { return r }) })
}

// gdnStep runs one row per slot, at position pos[i].
func (r *rig) gdnStep(l lin, x gdnIn, slots, pos []int32, rec []byte) (o []float64, recOut []byte) {
	B := len(slots)
	a := &GDNStepArgs{NK: int64(l.nk), DK: int64(l.dk), NV: int64(l.nv), DV: int64(l.dv), Slot: r.ints(slots), Pos: r.ints(pos),
		Q: r.put(x.q), K: r.put(x.k), V: r.put(x.v), Beta: r.put32(x.beta), G: r.put32(x.g), O: r.out(B * l.nv * l.dv), RecState: r.putBytes(rec)}
	a.B = int64(B)
	r.run(OpGDNStep, a)
	return r.get(a.O, B*l.nv*l.dv), r.getBytes(a.RecState, len(rec))
}

// slots are n cleared slots of recurrent state.
func (r *rig) slots(l lin, n int) []byte { return make([]byte, n*r.slotBytes(l)) }

func (r *rig) slotBytes(l lin) int { return int(GDNSlotBytes(r.dt, l.nv, l.dk, l.dv)) }

// slotState is what slot i of a sequence of n rows holds: the states [nv, dk, dv] and, where there are rings, the rows since the last multiple
// of 16 as numbers: d, k (its bits) and g of each head.
func (r *rig) slotState(l lin, rec []byte, i, n int) (states, ring []float64) {
	size := r.slotBytes(l)
	at, word := rec[i*size:(i+1)*size], func(b []byte) float64 { return float64(math.Float32frombits(binary.LittleEndian.Uint32(b))) }
	if r.dt == F64 {
		word = func(b []byte) float64 { return math.Float64frombits(binary.LittleEndian.Uint64(b)) }
	}
	take := func(n int) (xs []float64) {
		for range n {
			xs = append(xs, word(at))
			at = at[r.wide().Size():]
		}
		return xs
	}
	for range l.nv {
		states = append(states, take(l.dk*l.dv)...)
		if rows := n % GDNRingRows; GDNRing(r.dt, l.dk, l.dv) {
			ring = append(ring, take(GDNRingRows * l.dv)[:rows*l.dv]...)
			for j := range rows * l.dk {
				ring = append(ring, float64(binary.LittleEndian.Uint16(at[2*j:])))
			}
			at = at[2*GDNRingRows*l.dk:]
			ring = append(ring, take(GDNRingRows)[:rows]...)
		}
	}
	return states, ring
}

// mkPiece is a sequence's rows at..end as a forest of one segment that continues from a slot.
func mkPiece(t testing.TB, slot, at, end int) *Forest {
	t.Helper()
	f, err := NewForest([]Segment{{Len: int32(end - at), Parent: -1, Pos: int32(at)}}, []int32{int32(slot)})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestGDNSlots: a prefill split at any points, then steps, equals the full forward; states move through slots.
func TestGDNSlots(t *testing.T) {
	l := lin{2, 16, 4, 20}
	const T = 150
	ss := l.nv * l.dk * l.dv
	g := rand.New(rand.NewPCG(21, 2))
	x := randGDN(g, l, T)
	for _, dt := range []DType{F64, F32} {
		tol := map[DType]float64{F64: 1e-12, F32: 2e-5}[dt]
		S := make([]float64, ss)
		want := naiveGDN(l, x, T, S)
		for _, cuts := range [][]int{{T}, {1, T}, {64, 65, T}, {63, 100, 140}, {2, 3, 120}} {
			r := newRig(t, dt, Options{Threads: 2})
			rec := r.slots(l, 3)
			var o []float64
			at := 0
			for _, c := range cuts {
				part, _, out := r.gdn(mkPiece(t, 1, at, c), l, x.rows(l, span(at, c)), rec)
				o, rec, at = append(o, part...), out, c
			}
			for ; at < T; at++ {
				part, out := r.gdnStep(l, x.rows(l, []int{at}), []int32{1}, []int32{int32(at)}, rec)
				o, rec = append(o, part...), out
			}
			near(t, fmt.Sprintf("%v cuts %v: o", dt, cuts), o, want, tol)
			got, _ := r.slotState(l, rec, 1, T)
			near(t, fmt.Sprintf("%v cuts %v: state", dt, cuts), got, S, tol)
			n := r.slotBytes(l)
			if !bytes.Equal(slices.Concat(rec[:n], rec[2*n:]), make([]byte, 2*n)) {
				t.Fatalf("cuts %v: a slot of another sequence was written", cuts)
			}
		}
	}
}

// TestGDNStepBatch: rows of sequences of different lengths have the same bits alone and in a batch, in any order of slots.
func TestGDNStepBatch(t *testing.T) {
	const B = 9
	slots := []int32{3, 1, 4, 0, 5, 8, 2, 6, 7}
	for _, l := range []lin{{2, 8, 4, 8}, {2, 16, 4, 16}, {1, 32, 2, 48}} {
		check := func(t *testing.T, r *rig) {
			g := rand.New(rand.NewPCG(2, 9))
			rec, pos, n := r.slots(l, B), make([]int32, B), r.slotBytes(l)
			segs, order := make([]Segment, B), make([]int32, B)
			rows := 0
			for i := range segs { // lengths 1, 8, 15, .. 57: slot i holds the sequence of length pos[b], slots[b] = i
				segs[i], order[i] = Segment{Len: int32(1 + 7*i), Parent: -1}, int32(i)
				rows += 1 + 7*i
				pos[slices.Index(slots, int32(i))] = segs[i].Len
			}
			f, err := NewForest(segs, order)
			if err != nil {
				t.Fatal(err)
			}
			_, _, rec = r.gdn(f, l, randGDN(g, l, rows), rec)
			x := randGDN(g, l, B)
			o, out := r.gdnStep(l, x, slots, pos, rec)
			for b, s := range slots {
				one, st := r.gdnStep(l, x.rows(l, []int{b}), []int32{0}, pos[b:b+1], rec[int(s)*n:int(s+1)*n])
				same(t, fmt.Sprintf("row %d", b), o[b*l.nv*l.dv:(b+1)*l.nv*l.dv], one)
				if !bytes.Equal(out[int(s)*n:int(s+1)*n], st) {
					t.Errorf("%v, row %d at position %d: the slot holds other bytes than alone", r.dt, b, pos[b])
				}
			}
		}
		t.Run(fmt.Sprint(l), func(t *testing.T) {
			check(t, newRig(t, F32, Options{Threads: 2}))
			eachEmu(t, check)
		})
	}
}
