package kernels

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// TestFrozenWeights: without pointers for weight gradients, backward ops give the same bits of every input gradient.
func TestFrozenWeights(t *testing.T) {
	eachRig(t, func(t *testing.T, r *rig) {
		const T, nv, dv, nk, dk, nh, nkv, hd, D, V = 21, 4, 10, 2, 6, 3, 1, 8, 12, 17
		g := rand.New(rand.NewPCG(5, 6))
		in := func(n int) Ptr { return r.put(randn(g, n, 1)) }
		in32 := func(n int) Ptr { return r.put32(randn(g, n, 1)) }
		acc := func(want bool, n int) Ptr {
			if !want {
				return 0
			}
			return r.put32(make([]float64, n))
		}
		forest := r.forest(mkForest(t, nil, [2]int{9, -1}, [2]int{7, 0}, [2]int{5, 0}))
		x, w, dy := in(T*D), in(D), in(T*D)
		o, z, wg, dyg := in(T*nv*dv), in(T*nv*dv), in32(dv), in(T*nv*dv)
		C := lin{nk, dk, nv, dv}.conv()
		p, a, b, wc, aLog, dt := in(T*C), in(T*nv), in(T*nv), in(4*C), in32(nv), in(nv)
		dq, dkk, dvv, dbeta, dg := in(T*nk*dk), in(T*nk*dk), in(T*nv*dv), in32(T*nv), in32(T*nv)
		qg, kin, wq, wk, daq, dak := in(T*nh*2*hd), in(T*nkv*hd), in(hd), in(hd), in(T*nh*hd), in(T*nkv*hd)
		row, target, wh := r.ints([]int32{0, 4, 4, 20}), r.ints([]int32{1, 0, 16, 3}), in(V*D)
		lse, ent, dlogp := in32(4), in32(4), in32(4)
		pos := make([]int32, T)
		for i := range pos {
			pos[i] = int32(i)
		}
		type read struct {
			p Ptr
			n int
		}
		for _, op := range []struct {
			op  Op
			run func(weights bool) (args any, dx []read)
		}{
			{OpRMSNormBwd, func(on bool) (any, []read) {
				dx := r.out(T * D)
				return &RMSNormBwdArgs{T: T, D: D, Eps: 1e-6, X: x, W: w, DY: dy, DX: dx, DW: acc(on, D)}, []read{{dx, T * D}}
			}},
			{OpGatedNormBwd, func(on bool) (any, []read) {
				do, dz := r.out(T*nv*dv), r.out(T*nv*dv)
				return &GatedNormBwdArgs{T: T, NV: nv, DV: dv, Eps: 1e-6, O: o, Z: z, W: wg, DY: dyg, DO: do, DZ: dz, DW: acc(on, dv)},
					[]read{{do, T * nv * dv}, {dz, T * nv * dv}}
			}},
			{OpConvGateBwd, func(on bool) (any, []read) {
				dp, da, db := r.out(T*C), r.out(T*nv), r.out(T*nv)
				return &ConvGateBwdArgs{T: T, NK: nk, DK: dk, NV: nv, DV: dv, Eps: 1e-6, F: forest, P: p, A: a, B: b, W: wc, ALog: aLog, DTBias: dt, DQ: dq, DK_: dkk, DV_: dvv,
					DBeta: dbeta, DG: dg, DP: dp, DA: da, DB: db, DW: acc(on, 4*C), DALog: acc(on, nv), DDTBias: acc(on, nv)}, []read{{dp, T * C}, {da, T * nv}, {db, T * nv}}
			}},
			{OpAttnPrepBwd, func(on bool) (any, []read) {
				dqg, dkin := r.out(T*nh*2*hd), r.out(T*nkv*hd)
				return &AttnPrepBwdArgs{T: T, NH: nh, NKV: nkv, HD: hd, Rot: 4, Theta: 1e4, Eps: 1e-6, RopePos: r.ints(pos), QG: qg, KIn: kin, WQ: wq, WK: wk, DQ: daq, DK: dak,
					DQG: dqg, DKIn: dkin, DWQ: acc(on, hd), DWK: acc(on, hd)}, []read{{dkin, T * nkv * hd}, {dqg, T * nh * 2 * hd}}
			}},
			{OpLMHeadBwd, func(on bool) (any, []read) {
				dx := r.put(make([]float64, T*D))
				return &LMHeadBwdArgs{N: 4, T: T, D: D, V: V, VocabValid: V, Chunk: 2, Temperature: 0.8, Row: row, Target: target, X: x, W: wh, LSE: lse, Entropy: ent,
					DLogP: dlogp, DX: dx, DW: acc(on, V*D)}, []read{{dx, T * D}}
			}},
		} {
			var got [2][][]float64
			for i, on := range []bool{true, false} {
				args, dx := op.run(on)
				r.run(op.op, args)
				for _, d := range dx {
					got[i] = append(got[i], r.get(d.p, d.n))
				}
			}
			for i := range got[0] {
				same(t, fmt.Sprintf("%v input gradient %d without weight gradients", op.op, i), got[1][i], got[0][i])
			}
		}
	})
}
