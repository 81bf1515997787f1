package main

import (
	"fmt"
	"math/rand/v2"
	"reflect"

	"harness-s/kernels"
)

// kernelRig makes the operands of one op: random values of the ranges that a model has, so that nothing overflows on the way.
type kernelRig struct {
	dev *kernels.Device
	st  *kernels.Stream
	dt  kernels.DType
	buf []*kernels.Buffer
	err error
}

func (r *kernelRig) free() {
	for _, b := range r.buf {
		b.Free()
	}
	r.buf = nil
}

func (r *kernelRig) alloc(bytes int64) kernels.Ptr {
	if r.err != nil {
		return 0
	}
	b, err := r.dev.Alloc(max(bytes, 64), "bench operand")
	if err != nil {
		r.err = err
		return 0
	}
	r.buf = append(r.buf, b)
	return b.Ptr()
}

// between makes n values of type t, uniform in [lo, hi).
func (r *kernelRig) between(t kernels.DType, n int64, lo, hi float32) kernels.Ptr {
	p := r.alloc(n * int64(t.Size()))
	if r.err == nil {
		r.err = fillRange(r.dev, r.st, p, n, t, lo, hi)
	}
	return p
}

// real makes activations or weights, wide what is never stored below float32.
func (r *kernelRig) real(n int64) kernels.Ptr { return r.between(r.dt, n, -0.15, 0.15) }
func (r *kernelRig) wide(n int64) kernels.Ptr { return r.between(r.dt.Wide(), n, -0.15, 0.15) }

func (r *kernelRig) ints(n int64, value func(i int64) int32) kernels.Ptr {
	v := make([]int32, n)
	for i := range v {
		v[i] = value(int64(i))
	}
	p := r.alloc(4 * n)
	if r.err == nil {
		r.st.UploadI32(p, v)
		r.err = r.st.Sync()
	}
	return p
}

// sampling makes n rows that draw at temperature 1.
func (r *kernelRig) sampling(n int64) kernels.Ptr {
	rows := make([]kernels.SampleRow, n)
	for i := range rows {
		rows[i] = kernels.SampleRow{KeyLo: uint64(i), Temperature: 1, TopP: 1}
	}
	p := r.alloc(n * kernels.SampleRowBytes)
	if r.err == nil {
		r.st.UploadSampleRows(p, rows)
		r.err = r.st.Sync()
	}
	return p
}

// forest is T rows in roots of seq rows each.
func (r *kernelRig) forest(T, seq int64) (args kernels.ForestArgs, states int64) {
	segs := make([]kernels.Segment, max(1, T/seq))
	for i := range segs {
		segs[i] = kernels.Segment{Len: int32(min(seq, T)), Parent: -1}
	}
	f, err := kernels.NewForest(segs, nil)
	if err != nil {
		r.err = err
		return args, 0
	}
	p := r.alloc(f.DeviceBytes())
	if r.err == nil {
		args = f.Upload(r.st, p)
		r.err = r.st.Sync()
	}
	return args, int64(f.NumChunks + f.NumSeg)
}

// finish sets an op's type and workspace.
func (r *kernelRig) finish(op kernels.Op, args any) {
	v := reflect.ValueOf(args).Elem()
	if f := v.FieldByName("DType"); f.IsValid() && op != kernels.OpAdamW && op != kernels.OpSumSq {
		f.Set(reflect.ValueOf(r.dt))
	}
	if ws := v.FieldByName("WS"); ws.IsValid() && r.err == nil {
		if n := r.dev.Workspace(op, v.Addr().UnsafePointer()); n > 0 {
			ws.Set(reflect.ValueOf(r.alloc(n)))
			v.FieldByName("WSBytes").SetInt(n)
		}
	}
}

// fillRange writes n values, uniform in [lo, hi), at dst: a block of them, uploaded once, again and again.
func fillRange(dev *kernels.Device, st *kernels.Stream, dst kernels.Ptr, n int64, dt kernels.DType, lo, hi float32) error {
	const block = 1<<20 - 3 // a prime: equal rows are far apart
	rng := rand.New(rand.NewPCG(5, 6))
	v := make([]float32, min(n, block))
	for i := range v {
		v[i] = lo + (hi-lo)*rng.Float32()
	}
	st.UploadReal(dst, v, dt)
	for at := int64(len(v)); at < n; at += int64(len(v)) {
		to, k := dst+kernels.Ptr(at*int64(dt.Size())), min(int64(len(v)), n-at)
		if dev.Stores(dt) {
			st.Copy(&kernels.VecArgs{DType: dt, N: k, Src: dst, Dst: to})
		} else { // storage of the optimiser alone
			st.UploadReal(to, v[:k], dt)
		}
	}
	if err := st.Sync(); err != nil {
		return fmt.Errorf("fill operands: %w", err)
	}
	return nil
}
