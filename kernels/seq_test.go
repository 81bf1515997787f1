package kernels

// Tests of the sequence ops. This file: a rig that runs one op on float64 slices in a chosen dtype and thread count, and forests.
// T rows, S segments; a "path" is the list of rows from a tree's root down to the end of a segment.

import (
	"hash/fnv"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"unsafe"
)

type rig struct {
	t   testing.TB
	dev *Device
	st  *Stream
	dt  DType
	buf []*Buffer
	log []uint64 // hash of every download, in order: what must not depend on the fiber order

	closed bool
}

func newRig(t testing.TB, dt DType, o Options) *rig {
	t.Helper()
	return newRigOn(t, "cpu", dt, o)
}

func newRigOn(t testing.TB, device string, dt DType, o Options) *rig {
	t.Helper()
	dev, err := Open(device, o)
	if err != nil {
		t.Fatal(err)
	}
	return rigOn(t, dev, dt)
}

func rigOn(t testing.TB, dev *Device, dt DType) *rig {
	r := &rig{t: t, dev: dev, st: dev.NewStream(), dt: dt}
	t.Cleanup(r.close)
	return r
}

func (r *rig) close() {
	if r.closed {
		return
	}
	r.closed = true
	r.free()
	r.st.Close()
	if err := r.dev.Close(); err != nil {
		r.t.Error(err)
	}
}

// free drops every buffer made so far.
func (r *rig) free() {
	for _, b := range r.buf {
		b.Free()
	}
	r.buf = nil
}

func (r *rig) raw(bytes int) Ptr {
	b, err := r.dev.Alloc(int64(max(bytes, 1)), "test")
	if err != nil {
		r.t.Fatal(err)
	}
	r.buf = append(r.buf, b)
	return b.Ptr()
}

// put uploads xs as the rig's dtype.
func (r *rig) put(xs []float64) Ptr { return r.putAs(r.dt, xs) }

// put32 uploads what stays f32 when the dtype is BF16 (abi.h, "With HS_BF16 these stay f32").
func (r *rig) put32(xs []float64) Ptr { return r.putAs(r.wide(), xs) }

// wide is the dtype of what stays f32 with BF16: the rig's dtype, or F32.
func (r *rig) wide() DType {
	if r.dt == BF16 {
		return F32
	}
	return r.dt
}

func (r *rig) putAs(dt DType, xs []float64) Ptr {
	p := r.raw(len(xs) * dt.Size())
	if len(xs) == 0 {
		return p
	}
	if dt == F64 {
		r.st.Upload(p, unsafe.Slice((*byte)(unsafe.Pointer(&xs[0])), len(xs)*8))
		return p
	}
	f := make([]float32, len(xs))
	for i, x := range xs {
		f[i] = float32(x)
	}
	r.st.UploadReal(p, f, dt)
	return p
}

func (r *rig) ints(xs []int32) Ptr {
	p := r.raw(len(xs) * 4)
	r.st.UploadI32(p, xs)
	return p
}

// out allocates n elements full of NaN, so that an element an op forgets to write shows.
func (r *rig) out(n int) Ptr { return r.put(nans(n)) }

// out32 is out for what stays f32 with BF16.
func (r *rig) out32(n int) Ptr { return r.put32(nans(n)) }

// putBytes and getBytes move what is no array of numbers, as slots with rings.
func (r *rig) putBytes(b []byte) Ptr {
	p := r.raw(len(b))
	r.st.Upload(p, b)
	return p
}

func (r *rig) getBytes(p Ptr, n int) []byte {
	b := make([]byte, n)
	if n > 0 {
		r.st.Download(b, p)
	}
	if err := r.st.Sync(); err != nil {
		r.t.Fatal(err)
	}
	h := fnv.New64a()
	h.Write(b)
	r.log = append(r.log, h.Sum64())
	return b
}

func nans(n int) []float64 {
	xs := make([]float64, n)
	for i := range xs {
		xs[i] = math.NaN()
	}
	return xs
}

func (r *rig) get(p Ptr, n int) []float64 { return r.getAs(r.dt, p, n) }

// get32 is get for what stays f32 with BF16.
func (r *rig) get32(p Ptr, n int) []float64 { return r.getAs(r.wide(), p, n) }

func (r *rig) getAs(dt DType, p Ptr, n int) []float64 {
	xs := make([]float64, n)
	if n == 0 {
		return xs
	}
	if dt == F64 {
		r.st.Download(unsafe.Slice((*byte)(unsafe.Pointer(&xs[0])), n*8), p)
	} else {
		f := make([]float32, n)
		r.st.DownloadReal(f, p, dt)
		for i, x := range f {
			xs[i] = float64(x)
		}
	}
	if err := r.st.Sync(); err != nil {
		r.t.Fatal(err)
	}
	h := fnv.New64a()
	h.Write(unsafe.Slice((*byte)(unsafe.Pointer(&xs[0])), n*8))
	r.log = append(r.log, h.Sum64())
	return xs
}

// run gives the op its dtype and a workspace full of 0xff, runs it and fails the test on an error.
func (r *rig) run(op Op, args any) {
	r.t.Helper()
	if err := r.try(op, args); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) try(op Op, args any) error {
	v := reflect.ValueOf(args).Elem()
	v.FieldByName("DType").Set(reflect.ValueOf(r.dt))
	p := v.Addr().UnsafePointer()
	if ws := v.FieldByName("WS"); ws.IsValid() {
		n := r.dev.Workspace(op, p)
		at := r.raw(int(n))
		r.st.Fill(at, n, 0xff)
		ws.Set(reflect.ValueOf(at))
		v.FieldByName("WSBytes").SetInt(n)
	}
	st := r.dev.NewStream()
	defer st.Close()
	st.Run(op, p)
	return st.Sync()
}

func (r *rig) forest(f *Forest) ForestArgs {
	return f.Upload(r.st, r.raw(int(f.DeviceBytes())))
}

// mkForest builds a forest from (length, parent) pairs; slots may be nil.
func mkForest(t testing.TB, slots []int32, lp ...[2]int) *Forest {
	t.Helper()
	segs := make([]Segment, len(lp))
	for i, x := range lp {
		segs[i] = Segment{Len: int32(x[0]), Parent: int32(x[1])}
		if x[1] >= 0 {
			segs[i].Pos = segs[x[1]].Pos + segs[x[1]].Len
		}
	}
	f, err := NewForest(segs, slots)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// path lists the rows a segment continues, root first, and its own rows.
func path(f *Forest, s int) []int {
	var rows []int
	if f.Parent[s] >= 0 {
		rows = path(f, int(f.Parent[s]))
	}
	for i := range int(f.Len[s]) {
		rows = append(rows, int(f.Start[s])+i)
	}
	return rows
}

// forests are the shapes most tests run: plain sequences, short parents, chunk-edge parents, chains of one-token segments, depth 3.
func forests() map[string][][2]int {
	return map[string][][2]int{
		"one row":     {{1, -1}},
		"sequences":   {{5, -1}, {64, -1}, {1, -1}, {65, -1}, {130, -1}},
		"group":       {{63, -1}, {9, 0}, {70, 0}, {1, 0}},
		"parent 64":   {{64, -1}, {3, 0}, {65, 0}},
		"parent 65":   {{65, -1}, {2, 0}, {33, 0}},
		"short":       {{1, -1}, {1, 0}, {2, 0}, {2, 1}, {3, 2}, {1, 2}},
		"chain":       {{1, -1}, {1, 0}, {1, 1}, {1, 2}, {1, 3}, {1, 4}, {1, 5}},
		"depth 3":     {{3, -1}, {2, 0}, {7, -1}, {4, 1}, {6, 0}, {1, 2}, {70, 3}, {5, 3}, {2, 6}},
		"two parents": {{2, -1}, {3, -1}, {4, 0}, {4, 1}, {66, 0}},
	}
}

func randn(g *rand.Rand, n int, scale float64) []float64 {
	xs := make([]float64, n)
	for i := range xs {
		xs[i] = g.NormFloat64() * scale
	}
	return xs
}

// relErr is the norm of the difference over the norm of want; the floor of 0.1 per element serves gradients that vanish exactly.
func relErr(got, want []float64) float64 {
	var d, w float64
	for i := range want {
		e := got[i] - want[i]
		d += e * e
		w += want[i] * want[i]
	}
	if math.IsNaN(d) {
		return math.Inf(1)
	}
	return math.Sqrt(d) / (math.Sqrt(w) + 0.1*math.Sqrt(float64(len(want))) + 1e-300)
}

func near(t testing.TB, what string, got, want []float64, tol float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d values, want %d", what, len(got), len(want))
	}
	if e := relErr(got, want); e > tol {
		t.Errorf("%s: relative error %.3g > %.1g", what, e, tol)
	}
}

func same(t testing.TB, what string, got, want []float64) {
	t.Helper()
	for i := range want {
		if math.Float64bits(got[i]) != math.Float64bits(want[i]) {
			t.Errorf("%s: element %d is %v, want the bits of %v", what, i, got[i], want[i])
			return
		}
	}
}

// checkGrads compares gradients with central differences of sum(c*out) along random directions of each input.
// fn maps inputs to outputs; grads[i] belongs to ins[i] (nil = not checked).
func checkGrads(t testing.TB, names []string, ins [][]float64, cs [][]float64, grads [][]float64, fn func(ins [][]float64) [][]float64) {
	t.Helper()
	loss := func(ins [][]float64) float64 {
		var s float64
		for i, o := range fn(ins) {
			for j, x := range o {
				s += x * cs[i][j]
			}
		}
		return s
	}
	const h = 1e-5
	g := rand.New(rand.NewPCG(11, 13))
	for i := range ins {
		if grads[i] == nil {
			continue
		}
		for range 2 {
			d := randn(g, len(ins[i]), 1)
			at := func(step float64) float64 {
				x := append([][]float64{}, ins...)
				y := make([]float64, len(ins[i]))
				for j := range y {
					y[j] = ins[i][j] + step*d[j]
				}
				x[i] = y
				return loss(x)
			}
			num := (8*(at(h)-at(-h)) - (at(2*h) - at(-2*h))) / (12 * h)
			var ana, scale float64
			for j := range d {
				ana += d[j] * grads[i][j]
				scale += grads[i][j] * grads[i][j]
			}
			if e := math.Abs(num-ana) / (math.Sqrt(scale) + 1e-3); e > 1e-6 || math.IsNaN(e) {
				t.Errorf("d%s: along a direction %.9g, finite difference %.9g (%.2g of the norm)", names[i], ana, num, e)
			}
		}
	}
}

// levels are the instruction-set levels of this machine, which the float32 tests run at.
func levels() []string {
	var have []string
	for _, l := range []string{"avx512", "avx2", "scalar"} {
		if _, err := Open("cpu", Options{SIMD: l}); err == nil {
			have = append(have, l)
		}
	}
	return have
}

func split(xs []float64, width int, rows []int) []float64 {
	out := make([]float64, 0, len(rows)*width)
	for _, r := range rows {
		out = append(out, xs[r*width:(r+1)*width]...)
	}
	return out
}

func scatterAdd(dst []float64, width int, rows []int, src []float64) {
	for i, r := range rows {
		for j := range width {
			dst[r*width+j] += src[i*width+j]
		}
	}
}

func TestSeqRefusals(t *testing.T) {
	r := newRig(t, F32, Options{Threads: 1})
	f := r.forest(mkForest(t, nil, [2]int{2, -1}))
	z := r.put(make([]float64, 4096))
	empty := f
	empty.Len = r.ints([]int32{0})
	for _, c := range []struct {
		name, want string
		op         Op
		args       any
	}{
		{"value heads", "nv 3 is not a multiple of nk 2", OpGDN, &GDNArgs{T: 2, NK: 2, DK: 4, NV: 3, DV: 4, F: f, Q: z, K: z, V: z, Beta: z, G: z, O: z}},
		{"query heads", "nh 3 is not a multiple of nkv 2", OpAttn, &AttnArgs{T: 2, NH: 3, NKV: 2, HD: 4, F: f, Q: z, K: z, V: z, O: z, LSE: z}},
		{"odd rotary", "rot 3 must be even", OpAttnPrep, &AttnPrepArgs{T: 2, NH: 2, NKV: 2, HD: 4, Rot: 3, Theta: 1e4, RopePos: z, QG: z, KIn: z, WQ: z, WK: z, Q: z, K: z}},
		{"wide rotary", "rot 6 must be even and at most hd 4", OpAttnPrep, &AttnPrepArgs{T: 2, NH: 2, NKV: 2, HD: 4, Rot: 6, Theta: 1e4, RopePos: z, QG: z, KIn: z, WQ: z, WK: z, Q: z, K: z}},
		{"rows", "forest of 2 rows, T is 3", OpGDN, &GDNArgs{T: 3, NK: 2, DK: 4, NV: 2, DV: 4, F: f, Q: z, K: z, V: z, Beta: z, G: z, O: z}},
		{"empty segment", "segment 0 is empty", OpGDN, &GDNArgs{T: 2, NK: 2, DK: 4, NV: 2, DV: 4, F: empty, Q: z, K: z, V: z, Beta: z, G: z, O: z}},
		{"missing pointer", "a->k is 0", OpGDN, &GDNArgs{T: 2, NK: 2, DK: 4, NV: 2, DV: 4, F: f, Q: z, V: z, Beta: z, G: z, O: z}},
		{"page", "no page for position 16", OpKVWrite, &KVWriteArgs{T: 1, NKV: 1, HD: 4, PageSize: 16, MaxPages: 2, Seq: r.ints([]int32{0}), Pos: r.ints([]int32{16}), BlockTable: r.ints([]int32{0, -1}), K: z, V: z, KCache: z, VCache: z}},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := r.try(c.op, c.args)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
	r.st.Sync()
}
