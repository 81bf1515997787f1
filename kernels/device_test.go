package kernels

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
)

func TestOpen(t *testing.T) {
	for _, name := range []string{"cuda:0", "emu", "tpu"} {
		_, err := Open(name, Options{})
		var e *Error
		if !errors.Is(err, ErrNoDevice) || !errors.As(err, &e) || e.Hint == "" || !strings.Contains(err.Error(), name) {
			t.Errorf("Open(%q) = %v, want ErrNoDevice with a hint", name, err)
		}
	}
	for _, o := range []Options{{Threads: -1}, {Threads: 65}, {SIMD: "mmx"}, {Gemm: "magic"}} {
		if _, err := Open("cpu", o); err == nil {
			t.Errorf("Open accepted %+v", o)
		}
	}
	d, err := Open("cpu", Options{Threads: 2, SIMD: "scalar"})
	if err != nil {
		t.Fatal(err)
	}
	if i := d.Info(); i.Name != "cpu" || i.Threads != 2 || !strings.Contains(i.Build, "simd baseline, gemm own") || i.MemTotal <= 0 {
		t.Errorf("info %+v", i)
	}
	if _, err = Open("cpu", Options{SIMD: "auto"}); err != nil {
		t.Fatal(err)
	}
}

func TestMemory(t *testing.T) {
	for _, name := range []string{"cpu", "null"} {
		t.Run(name, func(t *testing.T) {
			d, err := Open(name, Options{})
			if err != nil {
				t.Fatal(err)
			}
			var bufs []*Buffer
			for _, n := range []int64{1, 64, 1000, 4 << 20, 9<<20 + 5} {
				b, err := d.Alloc(n, fmt.Sprint("odd ", n%2))
				if err != nil {
					t.Fatal(err)
				}
				if b.Ptr() == 0 || b.Ptr()%64 != 0 || b.Bytes() != n || b.At(n) != b.Ptr()+Ptr(n) {
					t.Errorf("buffer of %d bytes at %#x", n, uint64(b.Ptr()))
				}
				got := slices.Repeat([]byte{1}, int(n))
				s := d.NewStream()
				s.Download(got, b.Ptr())
				if slices.Max(got) != 0 || s.Sync() != nil {
					t.Errorf("fresh memory of %d bytes is not zero (%v)", n, s.Sync())
				}
				bufs = append(bufs, b)
			}
			l := d.Ledger()
			if len(l) != 3 || l[0].Label != "odd 1" || l[0].Bytes != 9<<20+6 || l[1].Bytes != 4<<20+1064 || l[2].Label != "total" || l[2].Bytes != 13<<20+1070 {
				t.Errorf("ledger %+v", l)
			}
			if err := d.Close(); err == nil || !strings.Contains(err.Error(), `3 x "odd 0"`) {
				t.Errorf("leak report: %v", err)
			}
			for _, b := range bufs {
				b.Free()
				b.Free()
			}
			if l := d.Ledger(); l[2].Bytes != 0 || l[2].PeakBytes != 13<<20+1070 {
				t.Errorf("ledger after Free %+v", l)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
			if _, err := d.Alloc(0, "none"); err == nil {
				t.Error("allocated 0 bytes")
			}
		})
	}
}

func TestStreamCopies(t *testing.T) {
	r := newRig(t, F32, Options{})
	p := r.raw(256)
	r.st.Fill(p, 256, 0xab)
	r.st.UploadReal(p, []float32{1.5, -2, 3}, BF16)
	r.st.UploadReal(p+64, []float32{1.5, -2, 3}, F64)
	bf, wide, rest := make([]float32, 3), make([]float32, 3), make([]byte, 2)
	r.st.DownloadReal(bf, p, BF16)
	r.st.DownloadReal(wide, p+64, F64)
	r.st.Download(rest, p+6)
	if !slices.Equal(bf, []float32{1.5, -2, 3}) || !slices.Equal(wide, bf) || rest[0] != 0xab || r.st.Sync() != nil {
		t.Errorf("%v %v %v %v", bf, wide, rest, r.st.Sync())
	}
	s := r.dev.NewStream()
	s.UploadF32(0, []float32{1})
	s.Fail(errors.New("later"))
	if s.Err() == nil || !strings.Contains(s.Err().Error(), "upload: 4 bytes at address 0x0") {
		t.Errorf("copy to nowhere: %v", s.Err())
	}
}

// TestConcurrentStreams runs ops from several goroutines at once: whoever does not get the thread pool computes alone, with the same bits.
func TestConcurrentStreams(t *testing.T) {
	r := newRig(t, F32, Options{Threads: 3})
	const n = 50000
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(i%97) / 50
	}
	in := r.raw(4 * n)
	r.st.UploadF32(in, x)
	outs := make([]Ptr, 8)
	for i := range outs {
		outs[i] = r.raw(4 * n)
	}
	var wg sync.WaitGroup
	for _, out := range outs {
		wg.Go(func() {
			s := r.dev.NewStream()
			for range 20 {
				s.SwiGLU(&SwiGLUArgs{N: n, Gate: in, Up: in, H: out})
			}
			if err := s.Sync(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	want := r.get(outs[0], n)
	for _, o := range outs[1:] {
		same(t, "concurrent swiglu", r.get(o, n), want)
	}
}

func TestBF16(t *testing.T) {
	for _, c := range []struct {
		x    float32
		want uint16
	}{{0, 0}, {float32(math.Copysign(0, -1)), 0x8000}, {1, 0x3f80}, {1.00390625, 0x3f80}, {1.01171875, 0x3f82}, {1.0039063692, 0x3f81}, {3.4e38, 0x7f80}, {float32(math.Inf(-1)), 0xff80}} {
		if got := ToBF16(c.x); got != c.want {
			t.Errorf("ToBF16(%v) = %#x, want %#x", c.x, got, c.want)
		}
	}
	if x := FromBF16(ToBF16(float32(math.NaN()))); x == x {
		t.Errorf("NaN became %v", x)
	}
	for b := range 1 << 16 {
		if x := FromBF16(uint16(b)); x == x && ToBF16(x) != uint16(b) {
			t.Fatalf("%#x does not survive the round trip", b)
		}
	}
}

// TestStores: which types a device computes in, and what stays wide beside them.
func TestStores(t *testing.T) {
	for name, want := range map[string][3]bool{"cpu": {true, true, false}, "null": {true, true, true}} {
		d, err := Open(name, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if got := [3]bool{d.Stores(F32), d.Stores(F64), d.Stores(BF16)}; got != want || d.Stores(I32) {
			t.Errorf("%s stores f32, f64, bf16: %v, want %v", name, got, want)
		}
	}
	if w := [3]DType{F32.Wide(), F64.Wide(), BF16.Wide()}; w != [3]DType{F32, F64, F32} {
		t.Errorf("wide types are %v", w)
	}
}
