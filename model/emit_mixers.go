package model

import (
	"fmt"
	"unsafe"

	"harness-s/kernels"
)

// deltaNet emits the ops of the linear attention layer (model.md 3.4-3.7).
func (e emitter) deltaNet(o *op, in [][]valueID, out []valueID) *record {
	g := e.geo
	r := &record{label: o.label}
	switch o.kind {
	case kConvGate:
		a := &kernels.ConvGateArgs{DType: e.dtype, NK: g.NK, DK: g.DK, NV: g.NV, DV: g.DV, Eps: l2Eps}
		r.op, r.args, r.forest = kernels.OpConvGate, unsafe.Pointer(a), &a.F
		r.rows(&a.T)
		for i, at := range []*kernels.Ptr{&a.P, &a.A, &a.B, &a.W, &a.ALog, &a.DTBias} {
			r.in(at, in[i][0])
		}
		for i, at := range []*kernels.Ptr{&a.Q, &a.K, &a.V, &a.Beta, &a.G} {
			r.out(at, out[i])
		}
		r.scratch(&a.WS, &a.WSBytes)
	case kConvGateBwd:
		a := &kernels.ConvGateBwdArgs{DType: e.dtype, NK: g.NK, DK: g.DK, NV: g.NV, DV: g.DV, Eps: l2Eps}
		r.op, r.args, r.forest = kernels.OpConvGateBwd, unsafe.Pointer(a), &a.F
		r.rows(&a.T)
		for i, at := range []*kernels.Ptr{&a.P, &a.A, &a.B, &a.W, &a.ALog, &a.DTBias} {
			r.in(at, in[i][0])
		}
		for i, at := range []*kernels.Ptr{&a.DQ, &a.DK_, &a.DV_, &a.DBeta, &a.DG} {
			r.in(at, in[7][i])
		}
		for i, at := range []*kernels.Ptr{&a.DP, &a.DA, &a.DB} {
			r.out(at, out[i])
		}
		for i, at := range []*kernels.Ptr{&a.DW, &a.DALog, &a.DDTBias} {
			r.acc(at, out[3+i])
		}
		r.scratch(&a.WS, &a.WSBytes)
	case kGDN:
		a := &kernels.GDNArgs{DType: e.dtype, NK: g.NK, DK: g.DK, NV: g.NV, DV: g.DV}
		r.op, r.args, r.forest = kernels.OpGDN, unsafe.Pointer(a), &a.F
		r.rows(&a.T)
		for i, at := range []*kernels.Ptr{&a.Q, &a.K, &a.V, &a.Beta, &a.G} {
			r.in(at, in[0][i])
		}
		r.out(&a.O, out[0])
		r.out(&a.States, out[1])
		r.scratch(&a.WS, &a.WSBytes)
		r.flops = e.deltaFLOPs(1)
	case kGDNBwd:
		a := &kernels.GDNBwdArgs{DType: e.dtype, NK: g.NK, DK: g.DK, NV: g.NV, DV: g.DV}
		r.op, r.args, r.forest = kernels.OpGDNBwd, unsafe.Pointer(a), &a.F
		r.rows(&a.T)
		for i, at := range []*kernels.Ptr{&a.Q, &a.K, &a.V, &a.Beta, &a.G} {
			r.in(at, in[0][i])
		}
		r.in(&a.States, in[1][1])
		r.in(&a.DO, in[3][0])
		for i, at := range []*kernels.Ptr{&a.DQ, &a.DK_, &a.DV_, &a.DBeta, &a.DG} {
			r.out(at, out[i])
		}
		r.scratch(&a.WS, &a.WSBytes)
		r.flops = e.deltaFLOPs(2.5)
	case kGatedNorm:
		a := &kernels.GatedNormArgs{DType: e.dtype, NV: g.NV, DV: g.DV, Eps: g.Eps}
		r.op, r.args = kernels.OpGatedNorm, unsafe.Pointer(a)
		r.rows(&a.T)
		r.in(&a.O, in[0][0])
		r.in(&a.Z, in[1][0])
		r.in(&a.W, in[2][0])
		r.out(&a.Y, out[0])
		r.scratch(&a.WS, &a.WSBytes)
	case kGatedNormBwd:
		a := &kernels.GatedNormBwdArgs{DType: e.dtype, NV: g.NV, DV: g.DV, Eps: g.Eps}
		r.op, r.args = kernels.OpGatedNormBwd, unsafe.Pointer(a)
		r.rows(&a.T)
		r.in(&a.O, in[0][0])
		r.in(&a.Z, in[1][0])
		r.in(&a.W, in[2][0])
		r.in(&a.DY, in[3][0])
		r.out(&a.DO, out[0])
		r.out(&a.DZ, out[1])
		r.acc(&a.DW, out[2])
		r.scratch(&a.WS, &a.WSBytes)
	default:
		panic(buildError{fmt.Errorf("emit %s: no kernel", o.kind)})
	}
	return r
}

// deltaFLOPs of the chunked form per row and head (model.md 3.6): three products with the state, four with a triangle of the chunk.
func (e emitter) deltaFLOPs(scale float64) func(Shapes) float64 {
	g := e.geo
	per := scale * float64(g.NV) * (6*float64(g.DK*g.DV) + 2*kernels.GDNChunk*float64(g.DK+g.DV))
	return func(sh Shapes) float64 { return per * float64(sh.Rows) }
}

// attention emits the ops of the full attention layer (model.md 3.9).
func (e emitter) attention(o *op, in [][]valueID, out []valueID, acc []bool) *record {
	g := e.geo
	r := &record{label: o.label}
	pairs := func(scale float64) func(Shapes) float64 {
		return func(sh Shapes) float64 { return scale * float64(g.NH*g.HD) * float64(sh.Rows) * float64(sh.Rows) }
	}
	switch o.kind {
	case kAttnPrep:
		a := &kernels.AttnPrepArgs{DType: e.dtype, NH: g.NH, NKV: g.NKV, HD: g.HD, Rot: g.Rot, Theta: g.Theta, Eps: g.Eps}
		r.op, r.args = kernels.OpAttnPrep, unsafe.Pointer(a)
		r.rows(&a.T)
		for i, at := range []*kernels.Ptr{&a.QG, &a.KIn, &a.WQ, &a.WK, &a.RopePos} {
			r.in(at, in[i][0])
		}
		r.out(&a.Q, out[0])
		r.out(&a.K, out[1])
		r.scratch(&a.WS, &a.WSBytes)
	case kAttnPrepBwd:
		a := &kernels.AttnPrepBwdArgs{DType: e.dtype, NH: g.NH, NKV: g.NKV, HD: g.HD, Rot: g.Rot, Theta: g.Theta, Eps: g.Eps}
		r.op, r.args = kernels.OpAttnPrepBwd, unsafe.Pointer(a)
		r.rows(&a.T)
		for i, at := range []*kernels.Ptr{&a.QG, &a.KIn, &a.WQ, &a.WK, &a.RopePos} {
			r.in(at, in[i][0])
		}
		r.in(&a.DQ, in[5][0])
		r.in(&a.DK, in[5][1])
		if acc[0] { // beside the gate half
			r.acc(&a.DQG, out[0])
		} else {
			r.out(&a.DQG, out[0])
		}
		r.out(&a.DKIn, out[1])
		r.acc(&a.DWQ, out[2])
		r.acc(&a.DWK, out[3])
		r.scratch(&a.WS, &a.WSBytes)
	case kAttn:
		a := &kernels.AttnArgs{DType: e.dtype, NH: g.NH, NKV: g.NKV, HD: g.HD}
		r.op, r.args, r.forest = kernels.OpAttn, unsafe.Pointer(a), &a.F
		r.rows(&a.T)
		r.in(&a.Q, in[0][0])
		r.in(&a.K, in[0][1])
		r.in(&a.V, in[1][0])
		r.out(&a.O, out[0])
		r.out(&a.LSE, out[1])
		r.scratch(&a.WS, &a.WSBytes)
		r.flops = pairs(2)
	case kAttnBwd:
		a := &kernels.AttnBwdArgs{DType: e.dtype, NH: g.NH, NKV: g.NKV, HD: g.HD}
		r.op, r.args, r.forest = kernels.OpAttnBwd, unsafe.Pointer(a), &a.F
		r.rows(&a.T)
		r.in(&a.Q, in[0][0])
		r.in(&a.K, in[0][1])
		r.in(&a.V, in[1][0])
		r.in(&a.O, in[2][0])
		r.in(&a.LSE, in[2][1])
		r.in(&a.DO, in[4][0])
		for i, at := range []*kernels.Ptr{&a.DQ, &a.DK, &a.DV} {
			r.out(at, out[i])
		}
		r.scratch(&a.WS, &a.WSBytes)
		r.flops = pairs(5)
	case kGate:
		a := &kernels.GateArgs{DType: e.dtype, NH: g.NH, HD: g.HD}
		r.op, r.args = kernels.OpGate, unsafe.Pointer(a)
		r.rows(&a.T)
		r.in(&a.O, in[0][0])
		r.in(&a.QG, in[1][0])
		r.out(&a.Y, out[0])
	case kGateBwd:
		a := &kernels.GateBwdArgs{DType: e.dtype, NH: g.NH, HD: g.HD}
		r.op, r.args = kernels.OpGateBwd, unsafe.Pointer(a)
		r.rows(&a.T)
		r.in(&a.O, in[0][0])
		r.in(&a.QG, in[1][0])
		r.in(&a.DY, in[2][0])
		r.out(&a.DO, out[0])
		r.out(&a.DQG, out[1])
	default:
		panic(buildError{fmt.Errorf("emit %s: no kernel", o.kind)})
	}
	return r
}
