package kernels

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// Storage of the weights in a form of AdamW.
const (
	plain     = iota // the rig's real type
	wideHalf         // upper half widened to float32, and lo
	bf16Halfs        // upper half as bfloat16, and lo
)

// adam is AdamW on the device in one storage form.
type adam struct {
	r       *rig
	n       int
	weights int
	args    AdamWArgs
}

func newAdam(r *rig, weights int, states State, w []float64, o AdamWArgs) *adam {
	a := &adam{r: r, n: len(w), weights: weights, args: o}
	size := map[State]int{StateF32: r.dt.Size(), StateBF16: 2, StateU8: 1}[states]
	blocks := (len(w) + StateBlock - 1) / StateBlock
	a.args.DType, a.args.States, a.args.N = r.dt, states, int64(len(w))
	a.args.M, a.args.V, a.args.MS, a.args.VS = r.raw(size*len(w)), r.raw(size*len(w)), r.raw(4*blocks), r.raw(4*blocks)
	switch hi, lo := make([]uint16, len(w)), make([]uint16, len(w)); weights {
	case plain:
		a.args.W = r.put(w)
	default:
		wide := make([]float64, len(w))
		for i, x := range w {
			h, l := SplitF32(float32(x))
			hi[i], lo[i], wide[i] = h, uint16(l), float64(FromBF16(h))
		}
		a.args.Lo, a.args.W = r.words(lo), r.put(wide)
		if weights == bf16Halfs {
			a.args.DType, a.args.W = BF16, r.words(hi)
		}
	}
	return a
}

func (r *rig) words(v []uint16) Ptr {
	b := make([]byte, 2*len(v))
	for i, x := range v {
		b[2*i], b[2*i+1] = byte(x), byte(x>>8)
	}
	p := r.raw(len(b))
	r.st.Upload(p, b)
	return p
}

func (r *rig) bytes(p Ptr, n int) []byte {
	b := make([]byte, n)
	r.st.Download(b, p)
	if err := r.st.Sync(); err != nil {
		r.t.Fatal(err)
	}
	return b
}

func (r *rig) getWords(p Ptr, n int) []uint16 {
	b, out := r.bytes(p, 2*n), make([]uint16, n)
	for i := range out {
		out[i] = uint16(b[2*i]) | uint16(b[2*i+1])<<8
	}
	return out
}

// step runs one step on gradients that are on the device, in pieces that end at the given elements.
func (a *adam) step(step int, grad Ptr, cuts ...int) {
	from := 0
	real := a.r.dt.Size()
	moment := map[State]int{StateF32: real, StateBF16: 2, StateU8: 1}[a.args.States]
	weight := map[int]int{plain: real, wideHalf: 4, bf16Halfs: 2}[a.weights]
	for _, to := range append(cuts, a.n) {
		c := a.args
		c.Step, c.First, c.N, c.Grad = int64(step), int64(from), int64(to-from), grad+Ptr(from*real)
		c.W += Ptr(from * weight)
		c.M += Ptr(from * moment)
		c.V += Ptr(from * moment)
		c.MS += Ptr(from / StateBlock * 4)
		c.VS += Ptr(from / StateBlock * 4)
		if c.Lo != 0 {
			c.Lo += Ptr(2 * from)
		}
		a.r.st.AdamW(&c)
		from = to
	}
	if err := a.r.st.Sync(); err != nil {
		a.r.t.Fatal(err)
	}
}

// master downloads the weights, halves joined.
func (a *adam) master() []float64 {
	if a.weights == plain {
		return a.r.get(a.args.W, a.n)
	}
	lo, out := a.r.getWords(a.args.Lo, a.n), make([]float64, a.n)
	var hi []uint16
	if a.weights == bf16Halfs {
		hi = a.r.getWords(a.args.W, a.n)
	} else {
		for _, x := range a.r.get(a.args.W, a.n) {
			hi = append(hi, uint16(math.Float32bits(float32(x))>>16))
		}
	}
	for i := range out {
		out[i] = float64(JoinF32(hi[i], int16(lo[i])))
	}
	return out
}

// stored is everything the form keeps between steps.
func (a *adam) stored() []byte {
	size := map[State]int{StateF32: a.r.dt.Size(), StateBF16: 2, StateU8: 1}[a.args.States]
	blocks := (a.n + StateBlock - 1) / StateBlock
	out := slices.Concat(a.r.bytes(a.args.M, size*a.n), a.r.bytes(a.args.V, size*a.n), a.r.bytes(a.args.MS, 4*blocks), a.r.bytes(a.args.VS, 4*blocks))
	for _, x := range a.master() {
		out = fmt.Appendf(out, "%x", x)
	}
	return out
}

// refAdam is AdamW in float64.
type refAdam struct {
	w, m, v []float64
	o       AdamWArgs
}

func newRef(w []float64, o AdamWArgs) *refAdam {
	return &refAdam{slices.Clone(w), make([]float64, len(w)), make([]float64, len(w)), o}
}

func (a *refAdam) step(step int, grad []float64) {
	o := a.o
	c1, c2 := 1-math.Pow(o.Beta1, float64(step)), 1-math.Pow(o.Beta2, float64(step))
	for i, g := range grad {
		g *= o.GradScale
		a.m[i] = o.Beta1*a.m[i] + (1-o.Beta1)*g
		a.v[i] = o.Beta2*a.v[i] + (1-o.Beta2)*g*g
		a.w[i] -= o.LR * (a.m[i]/c1/(math.Sqrt(a.v[i]/c2)+o.Eps) + o.Decay*a.w[i])
	}
}

// gradients are noise plus a constant signal of a block's size: block b has size 10^-(b mod 6) and elements from 1 down to 1e-3 of it, so
// v goes down to about 1e-16; the signal is 0, 0.1, 0.3 or 1 times the noise, of either sign.
type gradients struct {
	rng          *rand.Rand
	size, signal []float64
}

func newGradients(seed uint64, n int) *gradients {
	g := &gradients{rng: rand.New(rand.NewPCG(seed, 77)), size: make([]float64, n), signal: make([]float64, n)}
	for i := range n {
		g.size[i] = math.Pow(10, -float64(i/StateBlock%6)-3*float64(i%7)/6)
		g.signal[i] = []float64{0, 0.1, -0.3, 1}[i/7%4]
	}
	return g
}

func (g *gradients) next() []float64 {
	x := make([]float64, len(g.size))
	for i := range x {
		x[i] = g.size[i] * (g.signal[i] + g.rng.NormFloat64())
	}
	return x
}

var stateNames = map[State]string{StateF32: "f32", StateBF16: "bf16", StateU8: "8bit"}

// TestAdamWAgainstFloat64 compares the displacement of 1000 steps with AdamW in float64, per storage of the moments.
//
// Bound. Rounding v by its relative spacing s moves it by up to one spacing only where the step (1-b2)(g^2-v) crosses it, so a step adds a
// relative variance of at most s*(1-b2)*E|g^2/v-1| < s*(1-b2), and the average over 1/(2(1-b2)) steps gives sigma^2 <= s/2: spacing 2^-7 for
// bfloat16, 2^-3 for the codes. An update changes by half of that, correlated over tau = 1/(1-b2) steps, so the displacement of T steps by
// sqrt(2 tau/T)*sigma/2 at random, and upwards by 3/8*sigma^2 because 1/sqrt is convex. m is rounded too, without bias and forgotten within
// ten steps: its noise of at most s*|m|*sqrt(1/6/(1-b1^2)) per step averages below the first term. The error is a mean over 3072 elements,
// so the sum of both terms bounds it, with room because s is the widest spacing; for real moments 1e-4, the rounding of a float32 weight
// near 1 (2^-25 each step, T steps of lr).
func TestAdamWAgainstFloat64(t *testing.T) {
	const n, T = 12 * StateBlock, 1000
	for _, beta2 := range []float64{0.98, 0.999} {
		o := AdamWArgs{LR: 1e-4, Beta1: 0.9, Beta2: beta2, Eps: 1e-12, Decay: 0.01, GradScale: 0.5, Seed: 5}
		for _, dt := range []DType{F32, F64} {
			r := newRig(t, dt, Options{Threads: 2})
			w := r.round(randn(rand.New(rand.NewPCG(3, 3)), n, 0.5))
			forms := map[State]*adam{}
			for s := range stateNames {
				forms[s] = newAdam(r, plain, s, w, o)
			}
			g, ref, grad := newGradients(11, n), newRef(w, o), r.raw(n*dt.Size())
			for step := 1; step <= T; step++ {
				x := g.next()
				r.upload(grad, x)
				ref.step(step, r.get(grad, n))
				for _, a := range forms {
					a.step(step, grad)
				}
			}
			for s, a := range forms {
				spacing := map[State]float64{StateBF16: 0x1p-7, StateU8: 0x1p-3}[s]
				sigma := math.Sqrt(spacing / 2)
				bias := 3.0 / 8 * sigma * sigma
				bound := math.Sqrt(2/(1-beta2)/T)*sigma/2 + bias
				if s == StateF32 {
					bound = map[DType]float64{F32: 1e-4, F64: 1e-12}[dt]
				}
				got := a.master()
				var d, norm, along, signal float64
				for i := range w {
					want, have := ref.w[i]-w[i], got[i]-w[i]
					d += (have - want) * (have - want)
					norm += want * want
					if g.signal[i] != 0 {
						along += have / want
						signal++
					}
				}
				rel, mean := math.Sqrt(d/norm), along/signal-1
				t.Logf("beta2 %g, %s, moments %s: relative error of the displacement %.2e (bound %.1e), mean ratio - 1 %+.2e", beta2, dt, stateNames[s], rel, bound, mean)
				if !(rel <= bound) {
					t.Errorf("beta2 %g, %s, moments %s: relative error %.3g > %.3g", beta2, dt, stateNames[s], rel, bound)
				}
				// Over all elements with a signal the random part averages out and the convexity term stays.
				if !(math.Abs(mean) <= bias+bound/10) {
					t.Errorf("beta2 %g, %s, moments %s: mean displacement is off by %.3g > %.3g", beta2, dt, stateNames[s], mean, bias+bound/10)
				}
			}
			r.free()
		}
	}
}

func (r *rig) upload(p Ptr, x []float64) {
	v := make([]float32, len(x))
	for i := range x {
		v[i] = float32(x[i])
	}
	r.st.UploadReal(p, v, r.dt)
}

// TestSplitWeightsAreTheMaster: for every storage of the moments, split weights hold the float32 master bit for bit, in both forms of the
// upper half, which is its nearest bfloat16.
func TestSplitWeightsAreTheMaster(t *testing.T) {
	const n = 3*StateBlock + 19
	for s, name := range stateNames {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, F32, Options{Threads: 2})
			o := AdamWArgs{LR: 1e-3, Beta1: 0.9, Beta2: 0.98, Eps: 1e-8, Decay: 0.1, GradScale: 1, Seed: 9}
			w := r.round(randn(rand.New(rand.NewPCG(3, 3)), n, 0.1))
			whole, wide, half := newAdam(r, plain, s, w, o), newAdam(r, wideHalf, s, w, o), newAdam(r, bf16Halfs, s, w, o)
			g, grad := newGradients(2, n), r.raw(4*n)
			for step := 1; step <= 60; step++ {
				r.upload(grad, g.next())
				for _, a := range []*adam{whole, wide, half} {
					a.step(step, grad)
				}
			}
			want := whole.master()
			same(t, "widened halves", wide.master(), want)
			same(t, "bfloat16 halves", half.master(), want)
			for i, x := range r.get(wide.args.W, n) {
				if hi, _ := SplitF32(float32(want[i])); x != float64(FromBF16(hi)) {
					t.Fatalf("element %d: weights hold %g, the nearest bfloat16 of %g is %g", i, x, want[i], FromBF16(hi))
				}
			}
		})
	}
}

// TestAdamWBits: what is stored does not depend on the number of threads, on how the arena is cut, or on the instruction set; it does
// depend on the seed and on the step where rounding is stochastic.
func TestAdamWBits(t *testing.T) {
	const n = 40*StateBlock*2 + 77
	for s, name := range stateNames {
		for _, weights := range []int{plain, wideHalf, bf16Halfs} {
			t.Run(fmt.Sprintf("%s/%d", name, weights), func(t *testing.T) {
				run := func(level string, threads int, seed uint64, cuts ...int) []byte {
					r := newRig(t, F32, Options{Threads: threads, SIMD: level})
					defer r.free()
					o := AdamWArgs{LR: 1e-3, Beta1: 0.9, Beta2: 0.98, Eps: 1e-8, Decay: 0.1, GradScale: 1, Seed: seed}
					a := newAdam(r, weights, s, r.round(randn(rand.New(rand.NewPCG(3, 3)), n, 0.1)), o)
					g, grad := newGradients(2, n), r.raw(4*n)
					for step := 1; step <= 3; step++ {
						r.upload(grad, g.next())
						a.step(step, grad, cuts...)
					}
					return a.stored()
				}
				want := run("auto", 1, 1)
				for _, c := range []struct {
					what string
					got  []byte
				}{
					{"3 threads", run("auto", 3, 1)},
					{"cut", run("auto", 2, 1, StateBlock, 5*StateBlock, 70*StateBlock)},
				} {
					if !slices.Equal(c.got, want) {
						t.Errorf("%s: other bits", c.what)
					}
				}
				for _, level := range levels() {
					if !slices.Equal(run(level, 2, 1), want) {
						t.Errorf("%s: other bits", level)
					}
				}
				if differs := !slices.Equal(run("auto", 2, 2), want); differs != (s != StateF32) {
					t.Errorf("another seed changes the bits: %t", differs)
				}
			})
		}
	}
}

// TestNarrowMomentsDoNotExplode: in one block, gradients from 1 down to 1e-12 of the largest, some of them stopping half way. No update is
// much larger than the largest that AdamW makes: |m|/sqrt(v) <= (1-b1)/sqrt((1-b2)(1-b1^2/b2)) = 1.7 (Cauchy-Schwarz), and one step of m
// beside the smallest code of v adds at most 1.7 * 2^-17/sqrt(1.125*2^-31) * sqrt(1.875)/0.9375 = 0.8, in units of lr. v stays positive beside m.
func TestNarrowMomentsDoNotExplode(t *testing.T) {
	const n, T = 2 * StateBlock, 400
	for _, s := range []State{StateBF16, StateU8} {
		r := newRig(t, F32, Options{Threads: 1})
		o := AdamWArgs{LR: 1e-3, Beta1: 0.9, Beta2: 0.98, Eps: 1e-30, GradScale: 1, Seed: 1}
		a := newAdam(r, plain, s, make([]float64, n), o)
		rng, grad, last, most := rand.New(rand.NewPCG(4, 4)), r.raw(4*n), make([]float64, n), 0.0
		for step := 1; step <= T; step++ {
			x := make([]float64, n)
			for i := range x {
				x[i] = math.Pow(10, -12*float64(i%StateBlock)/StateBlock) * rng.NormFloat64()
				if i%3 == 0 && step > T/2 {
					x[i] = 0
				}
			}
			r.upload(grad, x)
			a.step(step, grad)
			w := a.master()
			c := math.Sqrt(1-math.Pow(0.98, float64(step))) / (1 - math.Pow(0.9, float64(step)))
			for i := range w {
				most = max(most, math.Abs(w[i]-last[i])/o.LR/c)
			}
			last = w
		}
		t.Logf("moments %s: largest update %.2f lr", stateNames[s], most)
		if !(most < 2.5) {
			t.Errorf("moments %s: an update of %g lr", stateNames[s], most)
		}
		if s == StateU8 {
			m, v := r.bytes(a.args.M, n), r.bytes(a.args.V, n)
			for i := range m {
				if v[i] == 0 && m[i] != 0 {
					t.Errorf("element %d: v is 0 beside m code %d", i, m[i])
				}
			}
		}
	}
}

// TestNotFiniteMomentsStay: a NaN gradient is in the weight at once, and in what is stored of the moments: of its element in bfloat16,
// of its whole block in 8 bits, whose scale it takes.
func TestNotFiniteMomentsStay(t *testing.T) {
	const n, bad = 3 * StateBlock, StateBlock + 7
	for _, s := range []State{StateBF16, StateU8} {
		r := newRig(t, F32, Options{Threads: 1})
		a := newAdam(r, wideHalf, s, make([]float64, n), AdamWArgs{LR: 1e-3, Beta1: 0.9, Beta2: 0.98, Eps: 1e-8, GradScale: 1})
		grad, x := r.raw(4*n), make([]float64, n)
		for i := range x {
			x[i] = 1
		}
		x[bad] = math.NaN()
		r.upload(grad, x)
		a.step(1, grad)
		if w := a.master(); !math.IsNaN(w[bad]) || math.IsNaN(w[bad-1]) {
			t.Errorf("moments %s: weights %g and %g after a NaN gradient", stateNames[s], w[bad], w[bad-1])
		}
		x[bad] = 1
		r.upload(grad, x)
		a.step(2, grad)
		for i, w := range a.master() {
			if want := i == bad || s == StateU8 && i/StateBlock == bad/StateBlock; math.IsNaN(w) != want {
				t.Fatalf("moments %s: weight %d is %g a step later", stateNames[s], i, w)
			}
		}
	}
}

// TestPlainBF16LosesUpdates is why there is lo: at a learning rate of 1e-6, bfloat16 weights that are rounded to nearest after each step do
// not move in 1000 steps (half a step of a bfloat16 of at least 0.01 is 2^-15), while split ones move as float64 does, but for the rounding
// of the float32 master: at most 2^-25 each step against lr.
func TestPlainBF16LosesUpdates(t *testing.T) {
	const n, T = StateBlock, 1000
	r := newRig(t, F32, Options{Threads: 1})
	o := AdamWArgs{LR: 1e-6, Beta1: 0.9, Beta2: 0.98, Eps: 1e-8, GradScale: 1}
	rng := rand.New(rand.NewPCG(6, 6))
	w := make([]float64, n)
	for i := range w {
		w[i] = float64(FromBF16(ToBF16(float32(math.Copysign(0.01+0.9*rng.Float64(), rng.NormFloat64())))))
	}
	lossy, split, ref := newAdam(r, plain, StateF32, w, o), newAdam(r, wideHalf, StateF32, w, o), newRef(w, o)
	grad := r.raw(4 * n)
	for step := 1; step <= T; step++ {
		x := make([]float64, n)
		for i := range x {
			x[i] = 1 + 0.3*rng.NormFloat64()
		}
		r.upload(grad, x)
		ref.step(step, r.get(grad, n))
		lossy.step(step, grad)
		rounded := lossy.master()
		for i := range rounded {
			rounded[i] = float64(FromBF16(ToBF16(float32(rounded[i]))))
		}
		r.upload(lossy.args.W, rounded)
		split.step(step, grad)
	}
	same(t, "bfloat16 weights", lossy.master(), w)
	got := split.master()
	for i := range w {
		want := ref.w[i] - w[i]
		if have := got[i] - w[i]; math.Abs(want) < 5e-4 || math.Abs(have-want) > T*0x1p-25 {
			t.Fatalf("element %d moved by %g, in float64 by %g", i, have, want)
		}
	}
}

func TestAdamWRefusals(t *testing.T) {
	r := newRig(t, F32, Options{Threads: 1})
	z := r.raw(4096)
	ok := AdamWArgs{DType: F32, N: 8, Step: 1, Beta1: 0.9, Beta2: 0.9, W: z, Lo: z, M: z, V: z, MS: z, VS: z, Grad: z, States: StateU8}
	for _, c := range []struct {
		want   string
		change func(*AdamWArgs)
	}{
		{"w is required", func(a *AdamWArgs) { a.W = 0 }},
		{"m is required", func(a *AdamWArgs) { a.M = 0 }},
		{"v is required", func(a *AdamWArgs) { a.V = 0 }},
		{"grad is required", func(a *AdamWArgs) { a.Grad = 0 }},
		{"ms and vs are required", func(a *AdamWArgs) { a.MS = 0 }},
		{"ms and vs are required", func(a *AdamWArgs) { a.VS = 0 }},
		{"n 0, need > 0", func(a *AdamWArgs) { a.N = 0 }},
		{"step 0, need >= 1", func(a *AdamWArgs) { a.Step = 0 }},
		{"first 128, want a multiple of 256", func(a *AdamWArgs) { a.First = 128 }},
		{"first -256, want a multiple of 256", func(a *AdamWArgs) { a.First, a.States = -256, StateBF16 }},
		{"states 3, want 0 (f32), 1 (bf16) or 2 (8-bit)", func(a *AdamWArgs) { a.States = 3 }},
		{"lo is set with f64 weights", func(a *AdamWArgs) { a.DType = F64 }},
		{"bf16 weights need lo", func(a *AdamWArgs) { a.DType, a.Lo = BF16, 0 }},
		{"dtype 3: weights are f32 (0), f64 (1) or bf16 (2)", func(a *AdamWArgs) { a.DType = I32 }},
	} {
		a := ok
		c.change(&a)
		st := r.dev.NewStream()
		st.AdamW(&a)
		if err := st.Sync(); err == nil || !strings.Contains(err.Error(), "adamw: ") || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want an error with %q", err, c.want)
		}
	}
	r.st.AdamW(&ok)
	if err := r.st.Sync(); err != nil {
		t.Error(err)
	}
}

// BenchmarkAdamW measures a step over 4 Mi parameters in every storage form.
func BenchmarkAdamW(b *testing.B) {
	const n = 4 << 20
	for _, s := range []State{StateF32, StateBF16, StateU8} {
		for _, weights := range []int{plain, wideHalf, bf16Halfs} {
			b.Run(fmt.Sprintf("%s/%s", stateNames[s], []string{"plain", "hilo", "bf16hilo"}[weights]), func(b *testing.B) {
				r := newRig(b, F32, Options{})
				o := AdamWArgs{LR: 1e-3, Beta1: 0.9, Beta2: 0.98, Eps: 1e-8, Decay: 0.1, GradScale: 1}
				a := newAdam(r, weights, s, make([]float64, n), o)
				grad := r.put(randn(rand.New(rand.NewPCG(1, 1)), n, 1))
				for b.Loop() {
					a.step(1, grad)
				}
				b.ReportMetric(float64(n)*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mparam/s")
			})
		}
	}
}
