package kernels

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
)

func sigmoid(x float64) float64 { return 1 / (1 + math.Exp(-x)) }

// tolOf is the bound on the relative error of what a kernel computes from given inputs and stores as dt. BF16 has 8
// significant bits: half a unit in the last place is at most 2^-8 of the value. On a GPU float32 exponentials and reciprocal roots are
// approximations of 2 units in the last place, whose errors sums add up: ten times the bound.
func tolOf(dt DType) float64 {
	switch dt {
	case F64:
		return 1e-13
	case BF16:
		return 1.0 / 256
	}
	if gpuDevice() != "" {
		return 1e-5
	}
	return 1e-6
}

// tol32 is tolOf for what stays f32 with BF16.
func (r *rig) tol32() float64 { return tolOf(r.wide()) }

// eachRig runs fn on the cpu in f64 and in f32 at every instruction-set level, and on the emulated CUDA kernels (emu_test.go).
// With a GPU named it is all there is: the cpu's runs are those of every other machine.
func eachRig(t *testing.T, fn func(t *testing.T, r *rig)) {
	if gpuDevice() != "" {
		eachEmu(t, fn)
		return
	}
	t.Run("f64", func(t *testing.T) { fn(t, newRig(t, F64, Options{Threads: 2})) })
	for _, level := range levels() {
		t.Run("f32/"+level, func(t *testing.T) { fn(t, newRig(t, F32, Options{Threads: 2, SIMD: level})) })
	}
	eachEmu(t, fn)
}

// eachThreads checks that fn gives the same bits with 1, 2 and 3 threads.
func eachThreads(t *testing.T, fn func(r *rig) [][]float64) {
	t.Helper()
	for _, level := range levels() {
		var want [][]float64
		for _, threads := range []int{1, 2, 3} {
			r := newRig(t, F32, Options{Threads: threads, SIMD: level})
			got := fn(r)
			r.free()
			if want == nil {
				want = got
			}
			for i := range want {
				same(t, fmt.Sprintf("%s, %d threads, output %d", level, threads, i), got[i], want[i])
			}
		}
	}
}

func (r *rig) rmsnorm(T, D int, x, w []float64) (y, rstd []float64) {
	yp, rp := r.out(T*D), r.out32(T)
	r.run(OpRMSNorm, &RMSNormArgs{T: int64(T), D: int64(D), Eps: 1e-6, X: r.put(x), W: r.put(w), Y: yp, Rstd: rp})
	return r.get(yp, T*D), r.get32(rp, T)
}

func (r *rig) rmsnormBwd(T, D int, flags uint32, x, w, rstd, dy, dx, dw []float64) [][]float64 {
	dxp, dwp, rp := r.put(dx), r.put32(dw), Ptr(0)
	if rstd != nil {
		rp = r.put32(rstd)
	}
	r.run(OpRMSNormBwd, &RMSNormBwdArgs{Flags: flags, T: int64(T), D: int64(D), Eps: 1e-6, X: r.put(x), W: r.put(w), Rstd: rp, DY: r.put(dy), DX: dxp, DW: dwp})
	return [][]float64{r.get(dxp, T*D), r.get32(dwp, D)}
}

func TestRMSNorm(t *testing.T) {
	eachRig(t, func(t *testing.T, r *rig) {
		g := rand.New(rand.NewPCG(1, 1))
		for _, s := range [][2]int{{1, 1}, {3, 5}, {65, 16}, {130, 33}, {200, 128}} {
			T, D := s[0], s[1]
			x, w, dy := r.round(randn(g, T*D, 2)), r.round(randn(g, D, 0.3)), r.round(randn(g, T*D, 1))
			y, rstd := r.rmsnorm(T, D, x, w)
			want, wantDX, wantDW, seed := make([]float64, T*D), make([]float64, T*D), make([]float64, D), randn(g, D, 1)
			copy(wantDW, seed)
			for i := range T {
				var ss, c float64
				for j := range D {
					ss += x[i*D+j] * x[i*D+j]
				}
				q := 1 / math.Sqrt(ss/float64(D)+1e-6)
				for j := range D {
					n := x[i*D+j] * q
					want[i*D+j] = n * (1 + w[j])
					wantDW[j] += dy[i*D+j] * n
					c += n * dy[i*D+j] * (1 + w[j]) / float64(D)
				}
				for j := range D {
					wantDX[i*D+j] = q * (dy[i*D+j]*(1+w[j]) - x[i*D+j]*q*c)
				}
			}
			near(t, fmt.Sprint("y ", s), y, want, tolOf(r.dt))
			grads := r.rmsnormBwd(T, D, 0, x, w, rstd, dy, make([]float64, T*D), seed)
			near(t, fmt.Sprint("dx ", s), grads[0], wantDX, 4*tolOf(r.dt))
			near(t, fmt.Sprint("dw ", s), grads[1], wantDW, 4*r.tol32())
			again := r.rmsnormBwd(T, D, AccDX, x, w, nil, dy, wantDX, seed)
			for i := range wantDX {
				wantDX[i] *= 2
			}
			near(t, fmt.Sprint("added dx ", s), again[0], wantDX, 4*tolOf(r.dt))
			same(t, "dw with recomputed rstd", again[1], grads[1])
			r.free()
		}
	})
	r := newRig(t, F64, Options{})
	g := rand.New(rand.NewPCG(2, 2))
	x, w, c := randn(g, 5*7, 1), randn(g, 7, 1), randn(g, 5*7, 1)
	grads := r.rmsnormBwd(5, 7, 0, x, w, nil, c, make([]float64, 35), make([]float64, 7))
	checkGrads(t, []string{"x", "w"}, [][]float64{x, w}, [][]float64{c}, grads, func(in [][]float64) [][]float64 {
		y, _ := r.rmsnorm(5, 7, in[0], in[1])
		return [][]float64{y}
	})
}

func (r *rig) gatednorm(T, nv, dv int, o, z, w []float64) []float64 {
	y := r.out(T * nv * dv)
	r.run(OpGatedNorm, &GatedNormArgs{T: int64(T), NV: int64(nv), DV: int64(dv), Eps: 1e-6, O: r.put(o), Z: r.put(z), W: r.put32(w), Y: y})
	return r.get(y, T*nv*dv)
}

func (r *rig) gatednormBwd(T, nv, dv int, o, z, w, dy, dw []float64) [][]float64 {
	n := T * nv * dv
	do, dz, dwp := r.out(n), r.out(n), r.put32(dw)
	r.run(OpGatedNormBwd, &GatedNormBwdArgs{T: int64(T), NV: int64(nv), DV: int64(dv), Eps: 1e-6, O: r.put(o), Z: r.put(z), W: r.put32(w), DY: r.put(dy), DO: do, DZ: dz, DW: dwp})
	return [][]float64{r.get(do, n), r.get(dz, n), r.get32(dwp, dv)}
}

func TestGatedNorm(t *testing.T) {
	f64 := newRig(t, F64, Options{})
	eachRig(t, func(t *testing.T, r *rig) {
		g := rand.New(rand.NewPCG(3, 1))
		for _, s := range [][3]int{{1, 1, 1}, {3, 2, 5}, {70, 4, 32}, {130, 1, 17}, {9, 2, 128}, {3, 2, 260}} {
			T, nv, dv := s[0], s[1], s[2]
			o, z, w, dy := r.round(randn(g, T*nv*dv, 2)), r.round(randn(g, T*nv*dv, 2)), r.round32(randn(g, dv, 1)), r.round(randn(g, T*nv*dv, 1))
			want := make([]float64, T*nv*dv)
			for i := range T * nv {
				var ss float64
				for j := range dv {
					ss += o[i*dv+j] * o[i*dv+j]
				}
				q := 1 / math.Sqrt(ss/float64(dv)+1e-6)
				for j := range dv {
					want[i*dv+j] = w[j] * o[i*dv+j] * q * z[i*dv+j] * sigmoid(z[i*dv+j])
				}
			}
			near(t, fmt.Sprint("y ", s), r.gatednorm(T, nv, dv, o, z, w), want, tolOf(r.dt))
			dw := r.round32(randn(g, dv, 1))
			got, ref := r.gatednormBwd(T, nv, dv, o, z, w, dy, dw), f64.gatednormBwd(T, nv, dv, o, z, w, dy, dw)
			near(t, fmt.Sprint("do ", s), got[0], ref[0], 4*tolOf(r.dt))
			near(t, fmt.Sprint("dz ", s), got[1], ref[1], 4*tolOf(r.dt))
			near(t, fmt.Sprint("dw ", s), got[2], ref[2], 4*r.tol32())
			r.free()
			f64.free()
		}
	})
	g := rand.New(rand.NewPCG(4, 2))
	o, z, w, c := randn(g, 5*2*7, 1), randn(g, 5*2*7, 1), randn(g, 7, 1), randn(g, 5*2*7, 1)
	grads := f64.gatednormBwd(5, 2, 7, o, z, w, c, make([]float64, 7))
	checkGrads(t, []string{"o", "z", "w"}, [][]float64{o, z, w}, [][]float64{c}, grads, func(in [][]float64) [][]float64 {
		return [][]float64{f64.gatednorm(5, 2, 7, in[0], in[1], in[2])}
	})
}

func (r *rig) swiglu(gate, up []float64) []float64 {
	h := r.out(len(gate))
	r.run(OpSwiGLU, &SwiGLUArgs{N: int64(len(gate)), Gate: r.put(gate), Up: r.put(up), H: h})
	return r.get(h, len(gate))
}

func (r *rig) swigluBwd(gate, up, dh []float64) [][]float64 {
	dg, du := r.out(len(gate)), r.out(len(gate))
	r.run(OpSwiGLUBwd, &SwiGLUBwdArgs{N: int64(len(gate)), Gate: r.put(gate), Up: r.put(up), DH: r.put(dh), DGate: dg, DUp: du})
	return [][]float64{r.get(dg, len(gate)), r.get(du, len(gate))}
}

func TestPointwise(t *testing.T) {
	eachRig(t, func(t *testing.T, r *rig) {
		g := rand.New(rand.NewPCG(5, 1))
		for _, n := range []int{1, 3, 16, 31, 16384, 16385 + 17} {
			a, b, d := r.round(randn(g, n, 4)), r.round(randn(g, n, 1)), r.round(randn(g, n, 1))
			a[0] = -90 // exp overflows on the way
			want, dg, du, sum := make([]float64, n), make([]float64, n), make([]float64, n), make([]float64, n)
			for i := range n {
				s := sigmoid(a[i])
				want[i] = a[i] * s * b[i]
				dg[i], du[i] = d[i]*b[i]*s*(1+a[i]*(1-s)), d[i]*a[i]*s
				sum[i] = a[i] + b[i]
			}
			near(t, "swiglu", r.swiglu(a, b), want, tolOf(r.dt))
			back := r.swigluBwd(a, b, d)
			near(t, "dgate", back[0], dg, tolOf(r.dt))
			near(t, "dup", back[1], du, tolOf(r.dt))
			dst := r.put(a)
			r.run(OpAdd, &VecArgs{N: int64(n), Src: r.put(b), Dst: dst})
			near(t, "add", r.get(dst, n), sum, tolOf(r.dt))
			dst = r.out(n)
			r.run(OpCopy, &VecArgs{N: int64(n), Src: r.put(b), Dst: dst})
			same(t, "copy", r.get(dst, n), b)
			sq := r.raw(8)
			r.run(OpSumSq, &SumSqArgs{N: int64(n), X: r.put(a), Out: sq})
			var ss float64
			for _, x := range a {
				ss += x * x
			}
			got := make([]float64, 1)
			r.st.DownloadF64(got, sq)
			near(t, "sumsq", got, []float64{ss}, 1e-13)
			r.free()
		}
	})
	r := newRig(t, F64, Options{})
	g := rand.New(rand.NewPCG(6, 2))
	a, b, c := randn(g, 9, 2), randn(g, 9, 1), randn(g, 9, 1)
	checkGrads(t, []string{"gate", "up"}, [][]float64{a, b}, [][]float64{c}, r.swigluBwd(a, b, c), func(in [][]float64) [][]float64 {
		return [][]float64{r.swiglu(in[0], in[1])}
	})
}

func TestEmbedGather(t *testing.T) {
	eachRig(t, func(t *testing.T, r *rig) {
		g := rand.New(rand.NewPCG(7, 1))
		for _, s := range [][3]int{{1, 1, 1}, {9, 5, 4}, {300, 33, 50}, {40, 600, 7}, {1100, 4, 300}} {
			T, D, V := s[0], s[1], s[2]
			w, dy, dw := r.round(randn(g, V*D, 1)), r.round(randn(g, T*D, 1)), r.round(randn(g, V*D, 1))
			ids, rows := make([]int32, T), make([]int, T)
			for i := range ids {
				ids[i] = g.Int32N(int32(V))
				rows[i] = int(ids[i])
			}
			y, p := r.out(T*D), r.put32(dw)
			r.run(OpEmbed, &EmbedArgs{T: int64(T), D: int64(D), V: int64(V), IDs: r.ints(ids), W: r.put(w), Y: y})
			same(t, "embed", r.get(y, T*D), split(w, D, rows))
			r.run(OpEmbedBwd, &EmbedBwdArgs{T: int64(T), D: int64(D), V: int64(V), IDs: r.ints(ids), DY: r.put(dy), DW: p})
			want := append([]float64{}, dw...)
			scatterAdd(want, D, rows, dy)
			summed := r.get32(p, V*D)
			near(t, "embed_bwd", summed, want, r.tol32())
			y, q := r.out(T*D), r.put(dw)
			r.run(OpGather, &GatherArgs{N: int64(T), D: int64(D), T: int64(V), Row: r.ints(ids), Src: r.put(w), Dst: y})
			same(t, "gather", r.get(y, T*D), split(w, D, rows))
			r.run(OpGatherBwd, &GatherArgs{N: int64(T), D: int64(D), T: int64(V), Row: r.ints(ids), Src: r.put(dy), Dst: q})
			same(t, "gather_bwd", r.get(q, V*D), r.round(summed)) // the same sums, rounded once
			r.free()
		}
	})
}

func TestSlotCopy(t *testing.T) {
	eachRig(t, func(t *testing.T, r *rig) {
		for _, bytes := range []int{4096, 40004, 7} { // 16 bytes at a time, or one by one
			slotCopy(t, r, bytes)
		}
	})
}

func slotCopy(t *testing.T, r *rig, bytes int) {
	t.Helper()
	const slots = 6
	data := make([]byte, slots*bytes)
	for i := range data {
		data[i] = byte(i * 7 / 5)
	}
	base := r.raw(len(data))
	r.st.Upload(base, data)
	src, dst := []int32{0, 3, -1, 4, 5}, []int32{3, 2, 0, 4, 1}
	r.st.SlotCopy(&SlotCopyArgs{N: 5, Bytes: int64(bytes), Src: r.ints(src), Dst: r.ints(dst), Base: base})
	at := func(b []byte, i int32) []byte { return b[int(i)*bytes : int(i+1)*bytes] }
	for i := range src { // in order: slot 3 is written first, then read
		if src[i] < 0 {
			clear(at(data, dst[i]))
		} else {
			copy(at(data, dst[i]), at(data, src[i]))
		}
	}
	got := make([]byte, len(data))
	r.st.Download(got, base)
	if err := r.st.Sync(); err != nil {
		t.Fatal(err)
	}
	if string(got) != string(data) {
		t.Errorf("slots of %d bytes differ from copying one by one", bytes)
	}
}

func TestAdamW(t *testing.T) {
	eachRig(t, func(t *testing.T, r *rig) {
		r.dt = r.wide() // bf16 weights are split: TestAdamWDeviceBits
		g := rand.New(rand.NewPCG(8, 1))
		for _, n := range []int{1, 17, 40000} {
			w, m, v := r.round(randn(g, n, 1)), make([]float64, n), make([]float64, n)
			wp, mp, vp := r.put(w), r.put(m), r.put(v)
			const lr, b1, b2, eps, decay, scale = 0.01, 0.9, 0.99, 1e-8, 0.1, 0.5
			for step := 1; step <= 3; step++ {
				grad := r.round(randn(g, n, 1))
				r.run(OpAdamW, &AdamWArgs{N: int64(n), Step: int64(step), LR: lr, Beta1: b1, Beta2: b2, Eps: eps, Decay: decay, GradScale: scale, W: wp, M: mp, V: vp, Grad: r.put(grad)})
				for i := range n {
					x := grad[i] * scale
					m[i] = b1*m[i] + (1-b1)*x
					v[i] = b2*v[i] + (1-b2)*x*x
					mh, vh := m[i]/(1-math.Pow(b1, float64(step))), v[i]/(1-math.Pow(b2, float64(step)))
					w[i] -= lr * (mh/(math.Sqrt(vh)+eps) + decay*w[i])
				}
			}
			near(t, "w", r.get(wp, n), w, 2*tolOf(r.dt))
			near(t, "m", r.get(mp, n), m, 2*tolOf(r.dt))
			near(t, "v", r.get(vp, n), v, 2*tolOf(r.dt))
			r.free()
		}
	})
}

// TestPointBits: the same bits for any number of threads, and for a row alone as in a batch.
func TestPointBits(t *testing.T) {
	g := rand.New(rand.NewPCG(9, 1))
	const T, D = 333, 37
	x, w, z, dy := randn(g, T*D, 2), randn(g, D, 1), randn(g, T*D, 2), randn(g, T*D, 1)
	zero := make([]float64, D)
	eachThreads(t, func(r *rig) [][]float64 {
		y, rstd := r.rmsnorm(T, D, x, w)
		gn, sw := r.gatednorm(T, 1, D, x, z, w), r.swiglu(x, z)
		out := append(r.rmsnormBwd(T, D, 0, x, w, rstd, dy, make([]float64, T*D), zero), y, gn, sw)
		out = append(out, r.gatednormBwd(T, 1, D, x, z, w, dy, zero)...)
		row := func(v []float64, i int) []float64 { return v[i*D : (i+1)*D] }
		for _, i := range []int{0, 5, T - 1} {
			one, _ := r.rmsnorm(1, D, row(x, i), w)
			same(t, "rmsnorm row alone", one, row(y, i))
			same(t, "gatednorm row alone", r.gatednorm(1, 1, D, row(x, i), row(z, i), w), row(gn, i))
			same(t, "swiglu row alone", r.swiglu(row(x, i), row(z, i)), row(sw, i))
		}
		return out
	})
}

func TestRefusals(t *testing.T) {
	r := newRig(t, F32, Options{Threads: 1})
	z, i0, i9 := r.put(make([]float64, 4096)), r.ints([]int32{0, 0}), r.ints([]int32{0, 9})
	down := r.ints([]int32{1, 0})
	head := LMHeadArgs{N: 2, T: 2, D: 4, V: 8, VocabValid: 8, Chunk: 2, Temperature: 1, Row: i0, Target: i0, X: z, W: z, LogP: z, Entropy: z, LSE: z}
	with := func(f func(*LMHeadArgs)) *LMHeadArgs {
		a := head
		f(&a)
		return &a
	}
	rows := r.raw(int(SampleRowBytes))
	r.st.UploadSampleRows(rows, []SampleRow{{Temperature: 1, TopP: 0}})
	for _, c := range []struct {
		name, want string
		op         Op
		args       any
	}{
		{"no rows", "rmsnorm: T 0, D 4: need both > 0", OpRMSNorm, &RMSNormArgs{T: 0, D: 4, X: z, W: z, Y: z}},
		{"no pointer", "rmsnorm: w is required", OpRMSNorm, &RMSNormArgs{T: 1, D: 4, X: z, Y: z}},
		{"id", "embed: ids[1] 9, want 0..7", OpEmbed, &EmbedArgs{T: 2, D: 4, V: 8, IDs: i9, W: z, Y: z}},
		{"lda", "gemm: lda 3 < 4 columns of A", OpGemm, &GemmArgs{M: 2, N: 2, K: 4, A: z, LDA: 3, B: z, LDB: 4, C: z, LDC: 2}},
		{"k", "gemm: M 2, N 2, K 0: need all > 0", OpGemm, &GemmArgs{M: 2, N: 2, A: z, LDA: 3, B: z, LDB: 4, C: z, LDC: 2}},
		{"temperature", "lmhead: temperature 0, need > 0", OpLMHead, with(func(a *LMHeadArgs) { a.Temperature = 0 })},
		{"row order", "lmhead: row[1] 0 after 1: rows must ascend", OpLMHead, with(func(a *LMHeadArgs) { a.Row = down })},
		{"target", "lmhead: target[1] 9, want 0..7", OpLMHead, with(func(a *LMHeadArgs) { a.Target = i9 })},
		{"vocabulary", "lmhead: vocab_valid 9, want 1..V (8)", OpLMHead, with(func(a *LMHeadArgs) { a.VocabValid = 9 })},
		{"top_p", "sample: row 0: top_p 0, need > 0 (1 = off)", OpSample, &SampleArgs{B: 1, V: 8, VocabValid: 8, Logits: z, Rows: rows, Token: z, LogP: z}},
		{"step", "adamw: step 0, need >= 1", OpAdamW, &AdamWArgs{N: 1, Beta1: 0.9, Beta2: 0.9, W: z, M: z, V: z, Grad: z}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := r.try(c.op, c.args); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
	st := r.dev.NewStream()
	st.SumSq(&SumSqArgs{N: 9000, X: z, Out: z, WS: z, WSBytes: 8})
	st.RMSNorm(&RMSNormArgs{})
	if err := st.Sync(); err == nil || err.Error() != "sumsq: ws_bytes 8 < 24 needed" {
		t.Errorf("the first failure should stick, got %v", err)
	}
	st = r.dev.NewStream()
	st.Run(Op(99), nil)
	if st.Sync() == nil {
		t.Error("an unknown op ran")
	}
	st = r.dev.NewStream()
	st.RMSNorm(&RMSNormArgs{DType: BF16, T: 1, D: 1})
	if err := st.Sync(); err == nil || !strings.Contains(err.Error(), "rmsnorm: dtype 2") {
		t.Errorf("bf16 on the cpu: %v", err)
	}
}
