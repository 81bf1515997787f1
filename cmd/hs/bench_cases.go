package main

import (
	"fmt"

	"harness-s/kernels"
	"harness-s/model"
)

// mmaShare is the part of a large product's rate that small tensor-core tiles reach: gpu.md 6.4 counts the delta rule at 400 of 790 TFLOP/s.
const mmaShare = 400.0 / 790

// caseShape are a model's sizes: hidden h, intermediate f, conv channels ch, values vd, attention width aq and akv, vocabulary v.
type caseShape struct {
	kernelScale
	h, f, ch, vd, qk, aq, akv, v int64
	nk, nv, dk, dv, nh, nkv, hd  int64
	rot                          int64
}

// kernelCases are the rows of gpu.md 6 for a model at a scale, bfloat16 bytes: floors on a CPU in float32 are half of what they should be.
// Bytes are what the op itself must move; gpu.md 6.2 counts a norm fused with its residual, 8 bytes an element, where the op here has 4.
func kernelCases(c *model.Config, scale kernelScale) []kernelCase {
	s := caseShape{kernelScale: scale, h: int64(c.Hidden), f: int64(c.Intermediate), ch: int64(c.ConvChannels()), vd: int64(c.ValueDim()), qk: int64(c.KeyDim()),
		aq: int64(c.NumHeads * c.HeadDim), akv: int64(c.NumKVHeads * c.HeadDim), v: int64(c.VocabSize), nk: int64(c.LinKeyHeads), nv: int64(c.LinValueHeads),
		dk: int64(c.LinKeyDim), dv: int64(c.LinValueDim), nh: int64(c.NumHeads), nkv: int64(c.NumKVHeads), hd: int64(c.HeadDim), rot: int64(c.RotaryDim)}
	var ks []kernelCase
	ks = append(ks, s.products()...)
	ks = append(ks, s.pointwise()...)
	ks = append(ks, s.delta()...)
	ks = append(ks, s.attention()...)
	return append(ks, s.ends()...)
}

func product(name string, M, N, K int64, flags uint32) kernelCase {
	out := 2.0
	if flags&kernels.CF32 != 0 {
		out = 4
	}
	k := kernelCase{name: fmt.Sprintf("gemm_%s/M=%d", name, M), op: kernels.OpGemm, flops: 2 * float64(M) * float64(N) * float64(K),
		bytes: 2 * float64(N) * float64(K)}
	if M > 256 { // decode is counted as the weight stream alone
		k.bytes += 2*float64(M*K) + out*float64(M*N)
	}
	k.args = func(r *kernelRig) any {
		c := r.alloc(M * N * 4)
		return &kernels.GemmArgs{Flags: kernels.TransB | flags, M: M, N: N, K: K, A: r.real(M * K), LDA: K, B: r.real(N * K), LDB: K, C: c, LDC: N}
	}
	return k
}

// products are those of 6.1: fused projections, at training and decode heights.
func (s caseShape) products() (ks []kernelCase) {
	shapes := []struct {
		name string
		n, k int64
	}{{"gdn_in", s.ch + s.vd + 2*s.nv, s.h}, {"out", s.h, s.vd}, {"attn_in", 2*s.aq + 2*s.akv, s.h}, {"gate_up", 2 * s.f, s.h}, {"down", s.h, s.f}}
	for _, x := range shapes {
		ks = append(ks, product(x.name, s.T, x.n, x.k, 0))
	}
	ks = append(ks, product("square", s.T/2, s.T/2, s.T/2, 0))
	for _, B := range s.B {
		for _, x := range shapes {
			ks = append(ks, product(x.name, B, x.n, x.k, 0))
		}
		ks = append(ks, product("head", B, s.v, s.h, kernels.CF32))
	}
	return ks
}

// pointwise are those of 6.2 and 6.9: bytes alone.
func (s caseShape) pointwise() []kernelCase {
	T, n := float64(s.T), s.T*s.f
	at := func(name string) string { return fmt.Sprintf("%s/T=%d", name, s.T) }
	return []kernelCase{
		{name: at("rmsnorm"), op: kernels.OpRMSNorm, bytes: 4 * T * float64(s.h), args: func(r *kernelRig) any {
			return &kernels.RMSNormArgs{T: s.T, D: s.h, Eps: 1e-6, X: r.real(s.T * s.h), W: r.real(s.h), Y: r.real(s.T * s.h), Rstd: r.wide(s.T)}
		}},
		{name: at("rmsnorm_bwd"), op: kernels.OpRMSNormBwd, bytes: 6 * T * float64(s.h), args: func(r *kernelRig) any {
			return &kernels.RMSNormBwdArgs{T: s.T, D: s.h, Eps: 1e-6, X: r.real(s.T * s.h), W: r.real(s.h), DY: r.real(s.T * s.h), DX: r.real(s.T * s.h), DW: r.wide(s.h)}
		}},
		{name: at("swiglu"), op: kernels.OpSwiGLU, bytes: 6 * float64(n), args: func(r *kernelRig) any {
			return &kernels.SwiGLUArgs{N: n, Gate: r.real(n), Up: r.real(n), H: r.real(n)}
		}},
		{name: at("swiglu_bwd"), op: kernels.OpSwiGLUBwd, bytes: 10 * float64(n), args: func(r *kernelRig) any {
			return &kernels.SwiGLUBwdArgs{N: n, Gate: r.real(n), Up: r.real(n), DH: r.real(n), DGate: r.real(n), DUp: r.real(n)}
		}},
		{name: at("gatednorm"), op: kernels.OpGatedNorm, bytes: 6 * T * float64(s.vd), args: func(r *kernelRig) any {
			return &kernels.GatedNormArgs{T: s.T, NV: s.nv, DV: s.dv, Eps: 1e-6, O: r.real(s.T * s.vd), Z: r.real(s.T * s.vd), W: r.wide(s.dv), Y: r.real(s.T * s.vd)}
		}},
		{name: at("gatednorm_bwd"), op: kernels.OpGatedNormBwd, bytes: 10 * T * float64(s.vd), args: func(r *kernelRig) any {
			x := func() kernels.Ptr { return r.real(s.T * s.vd) }
			return &kernels.GatedNormBwdArgs{T: s.T, NV: s.nv, DV: s.dv, Eps: 1e-6, O: x(), Z: x(), W: r.wide(s.dv), DY: x(), DO: x(), DZ: x(), DW: r.wide(s.dv)}
		}},
		{name: fmt.Sprintf("adamw/N=%d", s.optim), op: kernels.OpAdamW, bytes: 20 * float64(s.optim), args: func(r *kernelRig) any {
			return &kernels.AdamWArgs{DType: r.dt, States: kernels.StateBF16, N: s.optim, Step: 1, LR: 1e-6, Beta1: 0.9, Beta2: 0.98, Eps: 1e-8, Decay: 0.01, GradScale: 1,
				W: r.between(r.dt, s.optim, -0.15, 0.15), Lo: r.between(kernels.BF16, s.optim, 0, 1), M: r.between(kernels.BF16, s.optim, 0, 1), V: r.between(kernels.BF16, s.optim, 0, 1), Grad: r.between(kernels.F32, s.optim, -1, 1)}
		}},
		{name: fmt.Sprintf("sumsq/N=%d", s.optim), op: kernels.OpSumSq, bytes: 4 * float64(s.optim), args: func(r *kernelRig) any {
			return &kernels.SumSqArgs{DType: kernels.F32, N: s.optim, X: r.between(kernels.F32, s.optim, -1, 1), Out: r.alloc(64)}
		}},
	}
}

// delta are those of 6.3 to 6.5: convolution, gates, and the delta rule chunked and step by step.
func (s caseShape) delta() []kernelCase {
	per := gdnFLOPs * float64(s.nv*s.dk*s.dv) / (32 * 128 * 128)
	row := 4*float64(s.qk+s.vd) + 8*float64(s.nv) // q, k, v, o in bfloat16, gates in float32
	step := 8 * float64(s.nv*s.dk*s.dv)           // of a sequence in decode
	if kernels.GDNRing(kernels.BF16, int(s.dk), int(s.dv)) {
		step *= replayTraffic / 2
	}
	type gates struct{ q, k, v, beta, g kernels.Ptr }
	in := func(r *kernelRig, T int64) gates {
		return gates{r.real(T * s.qk), r.real(T * s.qk), r.real(T * s.vd), r.between(r.dt.Wide(), T*s.nv, 0.1, 0.9), r.between(r.dt.Wide(), T*s.nv, -0.1, -0.001)}
	}
	ks := []kernelCase{
		{name: fmt.Sprintf("convgate/T=%d", s.T), op: kernels.OpConvGate, bytes: 4 * float64(s.T*s.ch), args: func(r *kernelRig) any {
			f, _ := r.forest(s.T, s.seq)
			y := in(r, s.T)
			return &kernels.ConvGateArgs{T: s.T, NK: s.nk, DK: s.dk, NV: s.nv, DV: s.dv, Eps: 1e-6, F: f, P: r.real(s.T * s.ch), A: r.real(s.T * s.nv), B: r.real(s.T * s.nv), W: r.real(s.ch * 4),
				ALog: r.between(r.dt.Wide(), s.nv, 0, 1), DTBias: r.real(s.nv), Q: y.q, K: y.k, V: y.v, Beta: y.beta, G: y.g}
		}},
		{name: fmt.Sprintf("convgate_bwd/T=%d", s.T), op: kernels.OpConvGateBwd, bytes: 6 * float64(s.T*s.ch), args: func(r *kernelRig) any {
			f, _ := r.forest(s.T, s.seq)
			y := in(r, s.T)
			return &kernels.ConvGateBwdArgs{T: s.T, NK: s.nk, DK: s.dk, NV: s.nv, DV: s.dv, Eps: 1e-6, F: f, P: r.real(s.T * s.ch), A: r.real(s.T * s.nv), B: r.real(s.T * s.nv), W: r.real(s.ch * 4),
				ALog: r.between(r.dt.Wide(), s.nv, 0, 1), DTBias: r.real(s.nv), DQ: y.q, DK_: y.k, DV_: y.v, DBeta: y.beta, DG: y.g, DP: r.real(s.T * s.ch), DA: r.real(s.T * s.nv), DB: r.real(s.T * s.nv),
				DW: r.wide(s.ch * 4), DALog: r.wide(s.nv), DDTBias: r.wide(s.nv)}
		}},
	}
	for _, T := range []int64{s.T, s.long} {
		ks = append(ks, kernelCase{name: fmt.Sprintf("gdn/T=%d", T), op: kernels.OpGDN, bytes: row * float64(T), flops: per * float64(T), share: mmaShare, args: func(r *kernelRig) any {
			f, n := r.forest(T, s.seq)
			y := in(r, T)
			return &kernels.GDNArgs{T: T, NK: s.nk, DK: s.dk, NV: s.nv, DV: s.dv, F: f, Q: y.q, K: y.k, V: y.v, Beta: y.beta, G: y.g, O: r.real(T * s.vd), States: r.wide(n * s.nv * s.dk * s.dv)}
		}}, kernelCase{name: fmt.Sprintf("gdn_bwd/T=%d", T), op: kernels.OpGDNBwd, bytes: 2 * row * float64(T), flops: 20.0 / 5.85 * per * float64(T), share: mmaShare, args: func(r *kernelRig) any {
			f, n := r.forest(T, s.seq)
			y, d := in(r, T), in(r, T)
			return &kernels.GDNBwdArgs{T: T, NK: s.nk, DK: s.dk, NV: s.nv, DV: s.dv, F: f, Q: y.q, K: y.k, V: y.v, Beta: y.beta, G: y.g, States: r.wide(n * s.nv * s.dk * s.dv), DO: r.real(T * s.vd),
				DQ: d.q, DK_: d.k, DV_: d.v, DBeta: d.beta, DG: d.g}
		}})
	}
	for _, B := range s.B {
		slots := func(r *kernelRig) kernels.Ptr { return r.ints(B, func(i int64) int32 { return int32(i) }) }
		ks = append(ks, kernelCase{name: fmt.Sprintf("convgate_step/B=%d", B), op: kernels.OpConvGateStep, bytes: float64(B*s.ch) * (2*2 + 4*2), args: func(r *kernelRig) any {
			y := in(r, B)
			return &kernels.ConvGateStepArgs{B: B, NK: s.nk, DK: s.dk, NV: s.nv, DV: s.dv, Eps: 1e-6, Slot: slots(r), P: r.real(B * s.ch), A: r.real(B * s.nv), B_: r.real(B * s.nv), W: r.real(s.ch * 4),
				ALog: r.between(r.dt.Wide(), s.nv, 0, 1), DTBias: r.real(s.nv), Q: y.q, K: y.k, V: y.v, Beta: y.beta, G: y.g, ConvState: r.real(B * 3 * s.ch)}
		}}, kernelCase{name: fmt.Sprintf("gdn_step/B=%d", B), op: kernels.OpGDNStep, bytes: step * float64(B), args: func(r *kernelRig) any {
			y := in(r, B)
			return &kernels.GDNStepArgs{B: B, NK: s.nk, DK: s.dk, NV: s.nv, DV: s.dv, Slot: slots(r), Pos: r.ints(B, func(i int64) int32 { return 64 + int32(i) }), Q: y.q, K: y.k, V: y.v, Beta: y.beta, G: y.g, O: r.real(B * s.vd), RecState: r.wide(B * kernels.GDNSlotBytes(r.dt, int(s.nv), int(s.dk), int(s.dv)) / int64(r.dt.Wide().Size()))}
		}})
	}
	return ks
}
