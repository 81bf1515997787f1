package kernels

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"unsafe"
)

// rowShape is a product y = x W^T of a model: N columns, K summed.
type rowShape struct {
	name  string
	n, k  int64
	flags uint32
}

// rowShapes are the products of the 4B and 9B models, and small ones for the emulator; heights are those of gpu.md 7.2.
func rowShapes() (shapes []rowShape, heights []int64) {
	if gpuDevice() == "" || testing.Short() {
		return []rowShape{{"small", 72, 48, 0}, {"small, f32 result", 64, 80, CF32}, {"odd", 33, 19, 0}}, []int64{1, 7, 64, 70, 133}
	}
	for _, m := range []struct {
		name string
		h, f int64
	}{{"4b", 2560, 9216}, {"9b", 4096, 12288}} {
		shapes = append(shapes, rowShape{m.name + " qkv", 8192, m.h, 0}, rowShape{m.name + " z", 4096, m.h, 0}, rowShape{m.name + " a, b", 32, m.h, 0},
			rowShape{m.name + " kv", 1024, m.h, 0}, rowShape{m.name + " out", m.h, 4096, 0}, rowShape{m.name + " gate, up", m.f, m.h, 0}, rowShape{m.name + " down", m.h, m.f, 0},
			rowShape{m.name + " head", 32768, m.h, CF32})
	}
	return shapes, []int64{1, 7, 64, 333, 4096, 16384}
}

// rowBits runs a product at every height on the same rows and returns the first height whose rows have other bits than the tallest's.
func rowBits(r *rig, s rowShape, heights []int64) (bad []string) {
	r.t.Helper()
	top, e := slices.Max(heights), int64(r.dt.Size())
	ce := e
	if s.flags&CF32 != 0 {
		ce = 4
	}
	x, w, c := r.raw(int(top*s.k*e)), r.raw(int(s.n*s.k*e)), r.raw(int(top*s.n*ce))
	r.random(x, top*s.k)
	r.random(w, s.n*s.k)
	rows := []int64{0, 6, 63, 332, 4095}
	run := func(m int64) map[int64][]byte {
		r.st.Fill(c, m*s.n*ce, 0xff)
		a := &GemmArgs{DType: r.dt, Flags: TransB | s.flags, M: m, N: s.n, K: s.k, A: x, LDA: s.k, B: w, LDB: s.k, C: c, LDC: s.n}
		if n := r.dev.Workspace(OpGemm, unsafe.Pointer(a)); n > 0 {
			a.WS, a.WSBytes = r.raw(int(n)), n
		}
		r.st.Gemm(a)
		out := map[int64][]byte{}
		for _, row := range rows {
			if row < m {
				out[row] = make([]byte, s.n*ce)
				r.st.Download(out[row], c+Ptr(row*s.n*ce))
			}
		}
		if err := r.st.Sync(); err != nil {
			if errors.Is(err, ErrUnsupported) {
				r.t.Skipf("%v: on a GPU type HS_TEST_DEVICE=cuda:0 go test -tags gpu ./kernels -run TestRowBits", err)
			}
			r.t.Fatal(err)
		}
		return out
	}
	want := run(top)
	for _, m := range heights {
		for row, got := range run(m) {
			if !slices.Equal(got, want[row]) {
				bad = append(bad, fmt.Sprintf("row %d of %d", row, m))
			}
		}
	}
	return bad
}

// random fills n elements of the rig's type with values of one block, whose length is a prime so that rows differ.
func (r *rig) random(p Ptr, n int64) {
	const block = 1<<16 - 15
	v := make([]float32, min(n, block))
	for i := range v {
		v[i] = float32((i*7919)%2003-1001) / 1024
	}
	r.st.UploadReal(p, v, r.dt)
	for at := int64(len(v)); at < n; at += int64(len(v)) {
		r.st.Copy(&VecArgs{DType: r.dt, N: min(int64(len(v)), n-at), Src: p, Dst: p + Ptr(at*int64(r.dt.Size()))})
	}
}

// rowRig is a rig with the product gemm and room for the tallest of them.
func rowRig(t *testing.T, gemm string) *rig {
	t.Helper()
	o := Options{Gemm: gemm}
	if gpuDevice() != "" && !testing.Short() {
		o.ArenaBytes = 8 << 30
	}
	return rigOn(t, testDevice(t, o), BF16)
}

// TestRowBits: a row of a product has the same bits whatever the number of rows beside it (gpu.md 7.2, gate L2).
func TestRowBits(t *testing.T) {
	shapes, heights := rowShapes()
	r := rowRig(t, "own")
	for _, s := range shapes {
		if bad := rowBits(r, s, heights); bad != nil {
			t.Errorf("%s, N %d, K %d: other bits in %v", s.name, s.n, s.k, bad)
		}
		r.free()
	}
}

// TestRowBitsLt asks the same of the algorithms that cuBLASLt chooses; it promises nothing (gpu.md 7.2), so the product is not the default, and
// weights where this fails cannot use it.
func TestRowBitsLt(t *testing.T) {
	shapes, heights := rowShapes()
	r := rowRig(t, "cublaslt")
	t.Cleanup(func() { rowRig(t, "own") }) // the setting is the process's
	for _, s := range shapes {
		if bad := rowBits(r, s, heights); bad != nil {
			t.Errorf("%s, N %d, K %d: other bits in %v", s.name, s.n, s.k, bad)
		} else {
			t.Logf("%s, N %d, K %d: the same bits at M %v", s.name, s.n, s.k, heights)
		}
		r.free()
	}
}
