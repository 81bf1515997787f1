package kernels

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

// att is the geometry of an attention layer.
type att struct{ nh, nkv, hd int }

func (r *rig) attn(f *Forest, h att, q, k, v []float64) (o, lse []float64) {
	T := f.NumRows
	a := &AttnArgs{T: int64(T), NH: int64(h.nh), NKV: int64(h.nkv), HD: int64(h.hd), F: r.forest(f), Q: r.put(q), K: r.put(k), V: r.put(v),
		O: r.out(T * h.nh * h.hd), LSE: r.out32(T * h.nh)}
	r.run(OpAttn, a)
	return r.get(a.O, T*h.nh*h.hd), r.get32(a.LSE, T*h.nh)
}

func (r *rig) attnBwd(f *Forest, h att, q, k, v, o, lse, do []float64) [][]float64 {
	T := f.NumRows
	nq, nk := T*h.nh*h.hd, T*h.nkv*h.hd
	a := &AttnBwdArgs{T: int64(T), NH: int64(h.nh), NKV: int64(h.nkv), HD: int64(h.hd), F: r.forest(f), Q: r.put(q), K: r.put(k), V: r.put(v),
		O: r.put(o), LSE: r.put32(lse), DO: r.put(do), DQ: r.out(nq), DK: r.out(nk), DV: r.out(nk)}
	r.run(OpAttnBwd, a)
	return [][]float64{r.get(a.DQ, nq), r.get(a.DK, nk), r.get(a.DV, nk)}
}

// naiveAttn: the query rows q (all heads) over the key rows listed for each of them.
func naiveAttn(h att, q, k, v []float64, qrow int, keys []int) (o, lse []float64) {
	rep := h.nh / h.nkv
	for head := range h.nh {
		at := func(x []float64, row int) []float64 { return x[(row*h.nkv+head/rep)*h.hd:][:h.hd] }
		qv := q[(qrow*h.nh+head)*h.hd:][:h.hd]
		s := make([]float64, len(keys))
		top := math.Inf(-1)
		for i, row := range keys {
			for j, x := range at(k, row) {
				s[i] += x * qv[j]
			}
			s[i] /= math.Sqrt(float64(h.hd))
			top = max(top, s[i])
		}
		var sum float64
		out := make([]float64, h.hd)
		for i, row := range keys {
			p := math.Exp(s[i] - top)
			sum += p
			for j, x := range at(v, row) {
				out[j] += p * x
			}
		}
		for j := range out {
			out[j] /= sum
		}
		o, lse = append(o, out...), append(lse, top+math.Log(sum))
	}
	return o, lse
}

// naiveForest: every row of f over the rows before it on its path.
func naiveForest(f *Forest, h att, q, k, v []float64) (o, lse []float64) {
	for s := range f.NumSeg {
		rows := path(f, s)
		lead := len(rows) - int(f.Len[s])
		for i := range int(f.Len[s]) {
			x, l := naiveAttn(h, q, k, v, rows[lead+i], rows[:lead+i+1])
			o, lse = append(o, x...), append(lse, l...)
		}
	}
	return o, lse
}

// checkAttn compares both directions with the naive forward and the cpu's float64 backward. With BF16 a probability, or its gradient, is
// rounded before it meets V, K or Q, and so is the result: two half units in the last place forward, four backward (P and dS, o in
// sum(do o), the result). F32 sums some hundred products per element.
func checkAttn(t *testing.T, r *rig, f *Forest, h att, q, k, v, do []float64) {
	q, k, v, do = r.round(q), r.round(k), r.round(v), r.round(do)
	wantO, wantLSE := naiveForest(f, h, q, k, v)
	o, lse := r.attn(f, h, q, k, v)
	near(t, "o", o, wantO, 2*tolOf(r.dt))
	near(t, "lse", lse, wantLSE, r.tol32())
	want := newRig(t, F64, Options{Threads: 2}).attnBwd(f, h, q, k, v, wantO, wantLSE, do)
	for i, gr := range r.attnBwd(f, h, q, k, v, o, lse, do) {
		near(t, "d"+[]string{"q", "k", "v"}[i], gr, want[i], 4*tolOf(r.dt))
	}
	r.free()
}

func TestAttnForest(t *testing.T) {
	for name, lp := range forests() {
		for _, h := range []att{{4, 2, 32}, {3, 1, 10}, {2, 2, 16}} {
			t.Run(fmt.Sprintf("%s/%v", name, h), func(t *testing.T) {
				f := mkForest(t, nil, lp...)
				T := f.NumRows
				g := rand.New(rand.NewPCG(9, 2))
				q, k, v := randn(g, T*h.nh*h.hd, 1.5), randn(g, T*h.nkv*h.hd, 1.5), randn(g, T*h.nkv*h.hd, 1)
				do := randn(g, T*h.nh*h.hd, 1)
				want, wantLSE := naiveForest(f, h, q, k, v)
				r := newRig(t, F64, Options{Threads: 2})
				o, lse := r.attn(f, h, q, k, v)
				near(t, "o", o, want, 1e-12)
				near(t, "lse", lse, wantLSE, 1e-12)
				d := r.attnBwd(f, h, q, k, v, o, lse, do)
				sum := [][]float64{make([]float64, len(q)), make([]float64, len(k)), make([]float64, len(v))}
				for s := range f.NumSeg { // forest = separate sequences
					rows := path(f, s)
					one := mkForest(t, nil, [2]int{len(rows), -1})
					qs, ks, vs := split(q, h.nh*h.hd, rows), split(k, h.nkv*h.hd, rows), split(v, h.nkv*h.hd, rows)
					ds := split(do, h.nh*h.hd, rows)
					clear(ds[:(len(rows)-int(f.Len[s]))*h.nh*h.hd])
					os, ls := r.attn(one, h, qs, ks, vs)
					for i, gr := range r.attnBwd(one, h, qs, ks, vs, os, ls, ds) {
						scatterAdd(sum[i], len(gr)/len(rows), rows, gr)
					}
				}
				for i := range d {
					near(t, "separate d"+[]string{"q", "k", "v"}[i], d[i], sum[i], 1e-11)
				}
				if T < 120 {
					checkGrads(t, []string{"q", "k", "v"}, [][]float64{q, k, v}, [][]float64{do}, d, func(in [][]float64) [][]float64 {
						defer r.free()
						o, _ := r.attn(f, h, in[0], in[1], in[2])
						return [][]float64{o}
					})
				}
				for _, lv := range levels() {
					r := newRig(t, F32, Options{Threads: 2, SIMD: lv})
					o, lse := r.attn(f, h, q, k, v)
					near(t, lv+" o", o, want, 2e-6)
					near(t, lv+" lse", lse, wantLSE, 1e-6)
					for i, gr := range r.attnBwd(f, h, q, k, v, o, lse, do) {
						near(t, lv+" d"+[]string{"q", "k", "v"}[i], gr, d[i], 1e-5)
					}
				}
				eachEmu(t, func(t *testing.T, r *rig) { checkAttn(t, r, f, h, q, k, v, do) })
			})
		}
	}
}

// TestAttnBits: outputs and gradients of a tree have the same bits alone, behind another tree, with segments of another tree between its
// own, and with any thread count.
func TestAttnBits(t *testing.T) {
	h := att{4, 2, 24}
	g := rand.New(rand.NewPCG(4, 4))
	alone := mkForest(t, nil, [2]int{65, -1}, [2]int{3, 0}, [2]int{70, 0})
	T := alone.NumRows
	own := [][]float64{randn(g, T*h.nh*h.hd, 1), randn(g, T*h.nkv*h.hd, 1), randn(g, T*h.nkv*h.hd, 1), randn(g, T*h.nh*h.hd, 1)}
	run := func(r *rig, f *Forest, x [][]float64) [][]float64 {
		o, lse := r.attn(f, h, x[0], x[1], x[2])
		return append([][]float64{o, lse}, r.attnBwd(f, h, x[0], x[1], x[2], o, lse, x[3])...)
	}
	check := func(t *testing.T, want [][]float64, r *rig) {
		for _, c := range []struct {
			lp   [][2]int
			segs []int // the tree's
		}{{[][2]int{{37, -1}, {65, -1}, {3, 1}, {70, 1}}, []int{1, 2, 3}}, {[][2]int{{65, -1}, {20, -1}, {3, 0}, {66, 1}, {70, 0}}, []int{0, 2, 4}}} {
			f := mkForest(t, nil, c.lp...)
			var rows []int
			for _, s := range c.segs {
				for i := range int(f.Len[s]) {
					rows = append(rows, int(f.Start[s])+i)
				}
			}
			x := make([][]float64, len(own))
			for i := range own {
				w := len(own[i]) / T
				x[i] = randn(g, f.NumRows*w, 1)
				for j, row := range rows {
					copy(x[i][row*w:][:w], own[i][j*w:])
				}
			}
			for i, y := range run(r, f, x) {
				same(t, []string{"o", "lse", "dq", "dk", "dv"}[i], split(y, len(y)/f.NumRows, rows), want[i])
			}
		}
		r.free()
	}
	want := run(newRig(t, F32, Options{Threads: 1}), alone, own)
	for _, threads := range []int{1, 2, 3} {
		check(t, want, newRig(t, F32, Options{Threads: threads}))
	}
	eachEmu(t, func(t *testing.T, r *rig) {
		g = rand.New(rand.NewPCG(4, 5)) // the same other rows under every fiber order
		check(t, run(r, alone, own), r)
	})
}

func (r *rig) prep(h att, rot int, theta float64, pos []int32, qg, kin, wq, wk []float64) (q, k []float64) {
	T := len(pos)
	a := &AttnPrepArgs{T: int64(T), NH: int64(h.nh), NKV: int64(h.nkv), HD: int64(h.hd), Rot: int64(rot), Theta: theta, Eps: 1e-6, RopePos: r.ints(pos),
		QG: r.put(qg), KIn: r.put(kin), WQ: r.put(wq), WK: r.put(wk), Q: r.out(T * h.nh * h.hd), K: r.out(T * h.nkv * h.hd)}
	r.run(OpAttnPrep, a)
	return r.get(a.Q, T*h.nh*h.hd), r.get(a.K, T*h.nkv*h.hd)
}

// naivePrep: model.md 3.9 steps 1-3 for one head.
func naivePrep(x, w []float64, rot int, theta float64, pos int32) []float64 {
	ss := 0.0
	for _, v := range x {
		ss += v * v
	}
	r := 1 / math.Sqrt(ss/float64(len(x))+1e-6)
	y := make([]float64, len(x))
	for i := range x {
		y[i] = x[i] * r * (1 + w[i])
	}
	for j := range rot / 2 {
		s, c := math.Sincos(float64(pos) * math.Pow(theta, -2*float64(j)/float64(rot)))
		a, b := y[j], y[j+rot/2]
		y[j], y[j+rot/2] = a*c-b*s, b*c+a*s
	}
	return y
}

func TestAttnPrep(t *testing.T) {
	for _, c := range []struct {
		att
		rot int
	}{{att{4, 2, 32}, 8}, {att{2, 1, 10}, 6}, {att{2, 2, 16}, 16}, {att{1, 1, 64}, 40}, {att{2, 1, 8}, 0}, {att{16, 4, 256}, 64}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			h, T := c.att, 300
			if h.hd > 32 {
				T = 9
			}
			g := rand.New(rand.NewPCG(1, 3))
			pos := make([]int32, T)
			for i := range pos {
				pos[i] = int32(i * i % 40000)
			}
			in := prepIn{randn(g, T*h.nh*2*h.hd, 1), randn(g, h.hd, 0.3), randn(g, T*h.nkv*h.hd, 1), randn(g, h.hd, 0.3), randn(g, T*h.nh*h.hd, 1), randn(g, T*h.nkv*h.hd, 1)}
			naive := func(in prepIn) (q, k []float64) {
				for i := range T {
					for j := range h.nh {
						q = append(q, naivePrep(in.qg[(i*h.nh+j)*2*h.hd:][:h.hd], in.wq, c.rot, 1e7, pos[i])...)
					}
					for j := range h.nkv {
						k = append(k, naivePrep(in.kin[(i*h.nkv+j)*h.hd:][:h.hd], in.wk, c.rot, 1e7, pos[i])...)
					}
				}
				return q, k
			}
			wantQ, wantK := naive(in)
			f64 := newRig(t, F64, Options{Threads: 2})
			q, k := f64.prep(h, c.rot, 1e7, pos, in.qg, in.kin, in.wq, in.wk)
			near(t, "q", q, wantQ, 1e-12)
			near(t, "k", k, wantK, 1e-12)
			d := f64.prepBwd(h, c.rot, 1e7, pos, in, true, true)
			same(t, "query part alone", f64.prepBwd(h, c.rot, 1e7, pos, in, true, false)[0], d[0])
			same(t, "key part alone", f64.prepBwd(h, c.rot, 1e7, pos, in, false, true)[0], d[2])
			checkGrads(t, []string{"qg", "wq", "kin", "wk"}, [][]float64{in.qg, in.wq, in.kin, in.wk}, [][]float64{in.dq, in.dk}, d, func(x [][]float64) [][]float64 {
				defer f64.free()
				q, k := f64.prep(h, c.rot, 1e7, pos, x[0], x[2], x[1], x[3])
				return [][]float64{q, k}
			})
			for _, lv := range levels() {
				r := newRig(t, F32, Options{Threads: 2, SIMD: lv})
				q, k := r.prep(h, c.rot, 1e7, pos, in.qg, in.kin, in.wq, in.wk)
				near(t, lv+" q", q, wantQ, 1e-6)
				near(t, lv+" k", k, wantK, 1e-6)
				for i, gr := range r.prepBwd(h, c.rot, 1e7, pos, in, true, true) {
					near(t, lv+" d"+[]string{"qg", "wq", "kin", "wk"}[i], gr, d[i], 3e-6)
				}
			}
			eachEmu(t, func(t *testing.T, r *rig) {
				x := prepIn{r.round(in.qg), r.round(in.wq), r.round(in.kin), r.round(in.wk), r.round(in.dq), r.round(in.dk)}
				wantQ, wantK := naive(x)
				q, k := r.prep(h, c.rot, 1e7, pos, x.qg, x.kin, x.wq, x.wk)
				near(t, "q", q, wantQ, tolOf(r.dt))
				near(t, "k", k, wantK, tolOf(r.dt))
				want, got := f64.prepBwd(h, c.rot, 1e7, pos, x, true, true), r.prepBwd(h, c.rot, 1e7, pos, x, true, true)
				for i, tol := range []float64{tolOf(r.dt), r.tol32(), tolOf(r.dt), r.tol32()} { // f32 sums of up to T*nh terms for the weights
					near(t, "d"+[]string{"qg", "wq", "kin", "wk"}[i], got[i], want[i], 3*tol)
				}
				same(t, "query part alone", r.prepBwd(h, c.rot, 1e7, pos, x, true, false)[0], got[0])
				same(t, "key part alone", r.prepBwd(h, c.rot, 1e7, pos, x, false, true)[0], got[2])
			})
		})
	}
}

// prepIn is what attnprep and its backward read.
type prepIn struct{ qg, wq, kin, wk, dq, dk []float64 }

// prepBwd runs the query part, the key part or both and returns dqg (gate half 0) and dwq, then dkin and dwk.
func (r *rig) prepBwd(h att, rot int, theta float64, pos []int32, in prepIn, query, key bool) [][]float64 {
	mark := make([]float64, len(in.qg)) // the gate half must stay
	for i := range mark {
		mark[i] = 7
	}
	a := &AttnPrepBwdArgs{T: int64(len(pos)), HD: int64(h.hd), Rot: int64(rot), Theta: theta, Eps: 1e-6, RopePos: r.ints(pos)}
	if query {
		a.NH, a.QG, a.WQ, a.DQ, a.DQG, a.DWQ = int64(h.nh), r.put(in.qg), r.put(in.wq), r.put(in.dq), r.put(mark), r.put32(make([]float64, h.hd))
	}
	if key {
		a.NKV, a.KIn, a.WK, a.DK, a.DKIn, a.DWK = int64(h.nkv), r.put(in.kin), r.put(in.wk), r.put(in.dk), r.out(len(in.kin)), r.put32(make([]float64, h.hd))
	}
	r.run(OpAttnPrepBwd, a)
	var out [][]float64
	if query {
		dqg := r.get(a.DQG, len(in.qg))
		for i, x := range dqg {
			if i/h.hd%2 == 1 {
				if x != 7 {
					r.t.Fatal("the gate half of dqg was written")
				}
				dqg[i] = 0
			}
		}
		out = append(out, dqg, r.get32(a.DWQ, h.hd))
	}
	if key {
		out = append(out, r.get(a.DKIn, len(in.kin)), r.get32(a.DWK, h.hd))
	}
	return out
}

func TestGate(t *testing.T) {
	for _, h := range []att{{4, 1, 32}, {3, 1, 5}, {2, 1, 256}} {
		const T = 70
		g := rand.New(rand.NewPCG(2, 2))
		n := T * h.nh * h.hd
		in := [][]float64{randn(g, n, 1), randn(g, 2*n, 2), randn(g, n, 1)} // o, qg, dy
		run := func(r *rig, in [][]float64) []float64 {
			a := &GateArgs{T: T, NH: int64(h.nh), HD: int64(h.hd), O: r.put(in[0]), QG: r.put(in[1]), Y: r.out(n)}
			r.run(OpGate, a)
			return r.get(a.Y, n)
		}
		bwd := func(r *rig, in [][]float64) [][]float64 {
			a := &GateBwdArgs{T: T, NH: int64(h.nh), HD: int64(h.hd), O: r.put(in[0]), QG: r.put(in[1]), DY: r.put(in[2]), DO: r.out(n), DQG: r.put(make([]float64, 2*n))}
			r.run(OpGateBwd, a)
			return [][]float64{r.get(a.DO, n), r.get(a.DQG, 2*n)}
		}
		f64 := newRig(t, F64, Options{Threads: 2})
		checkGrads(t, []string{"o", "qg"}, in[:2], in[2:], bwd(f64, in), func(in [][]float64) [][]float64 { return [][]float64{run(f64, in)} })
		eachRig(t, func(t *testing.T, r *rig) {
			x := [][]float64{r.round(in[0]), r.round(in[1]), r.round(in[2])}
			want := make([]float64, n)
			for i := range want {
				want[i] = x[0][i] * sigmoid(x[1][i/h.hd*2*h.hd+h.hd+i%h.hd])
			}
			near(t, "y", run(r, x), want, tolOf(r.dt))
			d := bwd(f64, x)
			for i, gr := range bwd(r, x) {
				near(t, "d"+[]string{"o", "qg"}[i], gr, d[i], tolOf(r.dt))
			}
		})
	}
}
