package kernels

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
)

const convEps = 1e-6

// convIn: p [T,C], a, b [T,nv], w [C,4], aLog, dt [nv].
type convIn struct{ p, a, b, w, aLog, dt []float64 }

func (x convIn) list() [][]float64 { return [][]float64{x.p, x.a, x.b, x.w, x.aLog, x.dt} }
func convOf(l [][]float64) convIn  { return convIn{l[0], l[1], l[2], l[3], l[4], l[5]} }

// rounded is x as the rig stores it.
func (x convIn) rounded(r *rig) convIn {
	return convIn{r.round(x.p), r.round(x.a), r.round(x.b), r.round(x.w), r.round32(x.aLog), r.round(x.dt)}
}

func (x convIn) rows(l lin, rows []int) convIn {
	return convIn{split(x.p, l.conv(), rows), split(x.a, l.nv, rows), split(x.b, l.nv, rows), x.w, x.aLog, x.dt}
}

func randConv(g *rand.Rand, l lin, T int) convIn {
	return convIn{randn(g, T*l.conv(), 1), randn(g, T*l.nv, 1), randn(g, T*l.nv, 1), randn(g, l.conv()*4, 0.5), randn(g, l.nv, 0.5), randn(g, l.nv, 0.5)}
}

// convgate returns q, k, v, beta, g and the conv state after the call (state nil = training forest).
func (r *rig) convgate(f *Forest, l lin, x convIn, state []float64) gdnConv {
	T := f.NumRows
	a := &ConvGateArgs{T: int64(T), NK: int64(l.nk), DK: int64(l.dk), NV: int64(l.nv), DV: int64(l.dv), Eps: convEps, F: r.forest(f),
		P: r.put(x.p), A: r.put(x.a), B: r.put(x.b), W: r.put(x.w), ALog: r.put32(x.aLog), DTBias: r.put(x.dt)}
	nq, nv, nb := T*l.nk*l.dk, T*l.nv*l.dv, T*l.nv
	a.Q, a.K, a.V, a.Beta, a.G = r.out(nq), r.out(nq), r.out(nv), r.out32(nb), r.out32(nb)
	if state != nil {
		a.ConvState = r.put(state)
	}
	r.run(OpConvGate, a)
	return gdnConv{gdnIn{r.get(a.Q, nq), r.get(a.K, nq), r.get(a.V, nv), r.get32(a.Beta, nb), r.get32(a.G, nb)}, r.get(a.ConvState, len(state))}
}

type gdnConv struct {
	gdnIn
	state []float64
}

func (r *rig) convgateStep(l lin, x convIn, slots []int32, state []float64) gdnConv {
	B := len(slots)
	nq, nv, nb := B*l.nk*l.dk, B*l.nv*l.dv, B*l.nv
	a := &ConvGateStepArgs{B: int64(B), NK: int64(l.nk), DK: int64(l.dk), NV: int64(l.nv), DV: int64(l.dv), Eps: convEps, Slot: r.ints(slots),
		P: r.put(x.p), A: r.put(x.a), B_: r.put(x.b), W: r.put(x.w), ALog: r.put32(x.aLog), DTBias: r.put(x.dt),
		Q: r.out(nq), K: r.out(nq), V: r.out(nv), Beta: r.out32(nb), G: r.out32(nb), ConvState: r.put(state)}
	r.run(OpConvGateStep, a)
	return gdnConv{gdnIn{r.get(a.Q, nq), r.get(a.K, nq), r.get(a.V, nv), r.get32(a.Beta, nb), r.get32(a.G, nb)}, r.get(a.ConvState, len(state))}
}

// convgateBwd returns the gradients of p, a, b, w, A_log, dt_bias; the weight gradients start from acc to see that they are added to.
func (r *rig) convgateBwd(f *Forest, l lin, x convIn, d gdnIn) [][]float64 {
	T, C := f.NumRows, l.conv()
	a := &ConvGateBwdArgs{T: int64(T), NK: int64(l.nk), DK: int64(l.dk), NV: int64(l.nv), DV: int64(l.dv), Eps: convEps, F: r.forest(f),
		P: r.put(x.p), A: r.put(x.a), B: r.put(x.b), W: r.put(x.w), ALog: r.put32(x.aLog), DTBias: r.put(x.dt),
		DQ: r.put(d.q), DK_: r.put(d.k), DV_: r.put(d.v), DBeta: r.put32(d.beta), DG: r.put32(d.g)}
	one := make([]float64, C*4)
	for i := range one {
		one[i] = 1
	}
	a.DP, a.DA, a.DB = r.out(T*C), r.out(T*l.nv), r.out(T*l.nv)
	a.DW, a.DALog, a.DDTBias = r.put32(one), r.put32(one[:l.nv]), r.put32(one[:l.nv])
	r.run(OpConvGateBwd, a)
	out := [][]float64{r.get(a.DP, T*C), r.get(a.DA, T*l.nv), r.get(a.DB, T*l.nv), r.get32(a.DW, C*4), r.get32(a.DALog, l.nv), r.get32(a.DDTBias, l.nv)}
	for _, w := range out[3:] {
		for i := range w {
			w[i]--
		}
	}
	return out
}

// naiveConv is model.md 3.4 over one sequence whose three inputs before the start are hist [3, C], oldest first (nil = zero).
func naiveConv(l lin, x convIn, T int, hist []float64) gdnIn {
	C := l.conv()
	if hist == nil {
		hist = make([]float64, 3*C)
	}
	p := append(append([]float64{}, hist...), x.p...)
	s := make([]float64, T*C)
	for t := range T {
		for c := range C {
			var u float64
			for j := range 4 {
				u += x.w[c*4+j] * p[(t+j)*C+c]
			}
			s[t*C+c] = u / (1 + math.Exp(-u))
		}
	}
	y := gdnIn{make([]float64, T*l.nk*l.dk), make([]float64, T*l.nk*l.dk), make([]float64, T*l.nv*l.dv), make([]float64, T*l.nv), make([]float64, T*l.nv)}
	kw, vw := l.nk*l.dk, l.nv*l.dv
	for t := range T {
		for part, dst := range [][]float64{y.q, y.k} {
			for h := range l.nk {
				src := s[t*C+part*kw+h*l.dk:][:l.dk]
				ss := convEps
				for _, v := range src {
					ss += v * v
				}
				f := 1 / math.Sqrt(ss)
				if part == 0 {
					f /= math.Sqrt(float64(l.dk))
				}
				for j, v := range src {
					dst[t*kw+h*l.dk+j] = v * f
				}
			}
		}
		copy(y.v[t*vw:(t+1)*vw], s[t*C+2*kw:])
		for h := range l.nv {
			y.beta[t*l.nv+h] = 1 / (1 + math.Exp(-x.b[t*l.nv+h]))
			y.g[t*l.nv+h] = -math.Exp(x.aLog[h]) * math.Log1p(math.Exp(x.a[t*l.nv+h]+x.dt[h]))
		}
	}
	return y
}

var convNames = []string{"p", "a", "b", "w", "A_log", "dt_bias"}

func TestConvGateForest(t *testing.T) {
	for name, lp := range forests() {
		for _, l := range []lin{{2, 16, 4, 16}, {1, 5, 3, 7}} {
			t.Run(fmt.Sprintf("%s/%v", name, l), func(t *testing.T) {
				f := mkForest(t, nil, lp...)
				T := f.NumRows
				g := rand.New(rand.NewPCG(5, 6))
				x := randConv(g, l, T)
				up := gdnIn{randn(g, T*l.nk*l.dk, 1), randn(g, T*l.nk*l.dk, 1), randn(g, T*l.nv*l.dv, 1), randn(g, T*l.nv, 1), randn(g, T*l.nv, 1)}
				var want [5][]float64
				for s := range f.NumSeg {
					rows := path(f, s)
					y := naiveConv(l, x.rows(l, rows), len(rows), nil).list()
					for i, w := range []int{l.nk * l.dk, l.nk * l.dk, l.nv * l.dv, l.nv, l.nv} {
						want[i] = append(want[i], y[i][len(y[i])-int(f.Len[s])*w:]...)
					}
				}
				r := newRig(t, F64, Options{Threads: 2})
				for i, got := range r.convgate(f, l, x, nil).list() {
					near(t, []string{"q", "k", "v", "beta", "g"}[i], got, want[i], 1e-12)
				}
				d := r.convgateBwd(f, l, x, up)
				sum := make([][]float64, 6)
				for i := range sum {
					sum[i] = make([]float64, len(d[i]))
				}
				for s := range f.NumSeg { // forest = separate sequences
					rows := path(f, s)
					lead := len(rows) - int(f.Len[s])
					ups := up.rows(l, rows)
					for i, w := range []int{l.nk * l.dk, l.nk * l.dk, l.nv * l.dv, l.nv, l.nv} {
						clear(ups.list()[i][:lead*w])
					}
					for i, gr := range r.convgateBwd(mkForest(t, nil, [2]int{len(rows), -1}), l, x.rows(l, rows), ups) {
						if i < 3 {
							scatterAdd(sum[i], []int{l.conv(), l.nv, l.nv}[i], rows, gr)
							continue
						}
						for j := range gr {
							sum[i][j] += gr[j]
						}
					}
				}
				for i := range d {
					near(t, "separate d"+convNames[i], d[i], sum[i], 1e-11)
				}
				if T < 120 {
					checkGrads(t, convNames, x.list(), up.list(), d, func(in [][]float64) [][]float64 {
						defer r.free()
						return r.convgate(f, l, convOf(in), nil).list()
					})
				}
				for _, lv := range levels() {
					r := newRig(t, F32, Options{Threads: 2, SIMD: lv})
					for i, got := range r.convgate(f, l, x, nil).list() {
						near(t, lv+" "+[]string{"q", "k", "v", "beta", "g"}[i], got, want[i], 2e-6)
					}
					for i, got := range r.convgateBwd(f, l, x, up) {
						near(t, lv+" d"+convNames[i], got, d[i], 1e-5)
					}
				}
				eachEmu(t, func(t *testing.T, r *rig) { checkConvEmu(t, r, f, l, x, up) })
			})
		}
	}
}

// checkConvEmu compares forward and backward with the CPU's in float64 on the inputs as the rig stores them. Float32 results carry a few
// roundings of sums over four taps and dk channels; what is stored as bfloat16 carries its half unit in the last place.
func checkConvEmu(t *testing.T, r *rig, f *Forest, l lin, x convIn, up gdnIn) {
	t.Helper()
	ref := newRig(t, F64, Options{Threads: 2})
	defer ref.close()
	x, up = x.rounded(r), up.rounded(r)
	want, wantD := ref.convgate(f, l, x, nil).list(), ref.convgateBwd(f, l, x, up)
	for i, got := range r.convgate(f, l, x, nil).list() {
		tol := 2e-6
		if i < 3 {
			tol = max(tol, tolOf(r.dt))
		}
		near(t, []string{"q", "k", "v", "beta", "g"}[i], got, want[i], tol)
	}
	for i, got := range r.convgateBwd(f, l, x, up) {
		tol := 1e-5
		if i < 3 {
			tol = max(tol, tolOf(r.dt))
		}
		near(t, "d"+convNames[i], got, wantD[i], tol)
	}
}

// TestConvGateWide: the widths of the real models, heads wider than a warp's 128 channels, and rows that cannot be read in packs.
func TestConvGateWide(t *testing.T) {
	for _, l := range []lin{{2, 128, 4, 128}, {1, 130, 2, 65}, {1, 256, 1, 264}, {1, 132, 1, 4}} {
		t.Run(fmt.Sprint(l), func(t *testing.T) {
			f := mkForest(t, nil, [2]int{37, -1}, [2]int{1, 0}, [2]int{2, 1}, [2]int{36, 0})
			g := rand.New(rand.NewPCG(9, 6))
			x, up := randConv(g, l, f.NumRows), randGDN(g, l, f.NumRows)
			eachEmu(t, func(t *testing.T, r *rig) { checkConvEmu(t, r, f, l, x, up) })
		})
	}
}

// TestConvGateSlots: any split of a sequence into calls and steps gives the bits of one call, because a row's window is the same.
func TestConvGateSlots(t *testing.T) {
	l := lin{2, 8, 2, 12}
	const T = 11
	g := rand.New(rand.NewPCG(1, 7))
	x := randConv(g, l, T)
	for _, dt := range []DType{F64, F32} {
		convSplits(t, newRig(t, dt, Options{Threads: 2}), l, T, x)
	}
	eachEmu(t, func(t *testing.T, r *rig) { convSplits(t, r, l, T, x) })
}

func convSplits(t *testing.T, r *rig, l lin, T int, x convIn) {
	t.Helper()
	x = x.rounded(r)
	C := l.conv()
	g := rand.New(rand.NewPCG(1, 8))
	state := r.round(randn(g, 2*C*3, 1))
	init := append([]float64{}, state[3*C:]...)
	whole := r.convgate(mkForest(t, []int32{1}, [2]int{T, -1}), l, x, state)
	want := naiveConv(l, x, T, init)
	for i, got := range whole.gdnIn.list() {
		tol := map[DType]float64{F64: 1e-12, F32: 2e-6, BF16: 2e-6}[r.dt]
		if i < 3 {
			tol = max(tol, tolOf(r.dt))
		}
		near(t, "from a slot", got, want.list()[i], tol)
	}
	same(t, "state", whole.state[3*C:], r.round(x.p[(T-3)*C:]))
	same(t, "other slot", whole.state[:3*C], r.round(state[:3*C]))
	for _, cuts := range [][]int{{1, 2, 3}, {2, 5}, {3, 4, 11}, {1}, {10, 11}, {4, 6}} {
		st := state
		var parts [5][]float64
		at := 0
		add := func(y gdnConv) {
			st = y.state
			for i, p := range y.gdnIn.list() {
				parts[i] = append(parts[i], p...)
			}
		}
		for _, c := range cuts {
			add(r.convgate(mkForest(t, []int32{1}, [2]int{c - at, -1}), l, x.rows(l, span(at, c)), st))
			at = c
		}
		for ; at < T; at++ {
			add(r.convgateStep(l, x.rows(l, []int{at}), []int32{1}, st))
		}
		for i := range parts {
			same(t, fmt.Sprintf("%v cuts %v output %d", r.dt, cuts, i), parts[i], whole.gdnIn.list()[i])
		}
		same(t, fmt.Sprintf("%v cuts %v state", r.dt, cuts), st, whole.state)
	}
}

// span lists the rows from a up to b.
func span(a, b int) []int {
	rows := make([]int, b-a)
	for i := range rows {
		rows[i] = a + i
	}
	return rows
}

// round gives xs the rounding that put and get would.
func (r *rig) round(xs []float64) []float64 { return r.get(r.put(xs), len(xs)) }

// round32 is round for what stays f32 with BF16.
func (r *rig) round32(xs []float64) []float64 { return r.get32(r.put32(xs), len(xs)) }

// TestConvGateBits: rows and input gradients of a tree have the same bits wherever the tree stands and however many threads run.
func TestConvGateBits(t *testing.T) {
	l := lin{1, 16, 2, 16}
	g := rand.New(rand.NewPCG(6, 1))
	tree := [][2]int{{2, -1}, {3, 0}, {40, 0}, {1, 1}}
	pad := [][2]int{{77, -1}}
	fa := mkForest(t, nil, tree...)
	x := randConv(g, l, fa.NumRows)
	y := randConv(g, l, 77)
	y.w, y.aLog, y.dt = x.w, x.aLog, x.dt
	up := randGDN(g, l, fa.NumRows)
	upY := randGDN(g, l, 77)
	both := append(append([][2]int{}, pad...), [2]int{2, -1}, [2]int{3, 1}, [2]int{40, 1}, [2]int{1, 2})
	cat := func(a, b [][]float64) [][]float64 {
		var out [][]float64
		for i := range a {
			out = append(out, append(append([]float64{}, a[i]...), b[i]...))
		}
		return out
	}
	z := convOf(append(cat(y.list()[:3], x.list()[:3]), x.w, x.aLog, x.dt))
	check := func(t *testing.T, alone, packed *rig) {
		o, d := alone.convgate(fa, l, x, nil), alone.convgateBwd(fa, l, x, up)
		fb := mkForest(t, nil, both...)
		ob, db := packed.convgate(fb, l, z, nil), packed.convgateBwd(fb, l, z, gdnOf(cat(upY.list(), up.list())))
		for i, got := range ob.gdnIn.list() {
			want := o.gdnIn.list()[i]
			same(t, fmt.Sprintf("output %d", i), got[len(got)-len(want):], want)
		}
		for i := range 3 {
			same(t, "d"+convNames[i], db[i][len(db[i])-len(d[i]):], d[i])
		}
	}
	r := newRig(t, F32, Options{Threads: 1})
	for _, threads := range []int{1, 2, 3} {
		check(t, r, newRig(t, F32, Options{Threads: threads}))
	}
	eachEmu(t, func(t *testing.T, r *rig) { check(t, r, r) })
}
