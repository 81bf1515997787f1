package kernels

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"
)

// gemm runs C = op(A) op(B) (+ C) on row-major slices with padded leading dimensions (pad extra columns) and returns all of C.
func (r *rig) gemm(flags uint32, m, n, k, pad int, a, b, c []float64) []float64 {
	r.t.Helper()
	lda, ldb := k, n
	if flags&TransA != 0 {
		lda = m
	}
	if flags&TransB != 0 {
		ldb = k
	}
	wide := func(x []float64, cols int) []float64 {
		var out []float64
		for row := range slices.Chunk(x, cols) {
			out = append(append(out, row...), make([]float64, pad)...)
			for i := range pad {
				out[len(out)-1-i] = 77
			}
		}
		return out
	}
	dt := r.dt
	if flags&CF32 != 0 {
		dt = r.wide()
	}
	cp := r.putAs(dt, wide(c, n))
	r.run(OpGemm, &GemmArgs{Flags: flags, M: int64(m), N: int64(n), K: int64(k), A: r.put(wide(a, lda)), LDA: int64(lda + pad),
		B: r.put(wide(b, ldb)), LDB: int64(ldb + pad), C: cp, LDC: int64(n + pad)})
	got := r.getAs(dt, cp, m*(n+pad))
	out := make([]float64, 0, m*n)
	for row := range slices.Chunk(got, n+pad) {
		out = append(out, row[:n]...)
		for _, x := range row[n:] {
			if x != 77 {
				r.t.Fatalf("gemm wrote %v between rows of C", x)
			}
		}
	}
	return out
}

func naiveGemm(flags uint32, m, n, k int, a, b, c []float64) []float64 {
	out := make([]float64, m*n)
	for i := range m {
		for j := range n {
			var s float64
			if flags&Beta1 != 0 {
				s = c[i*n+j]
			}
			for l := range k {
				x, y := i*k+l, l*n+j
				if flags&TransA != 0 {
					x = l*m + i
				}
				if flags&TransB != 0 {
					y = j*k + l
				}
				s += a[x] * b[y]
			}
			out[i*n+j] = s
		}
	}
	return out
}

func TestGemm(t *testing.T) {
	shapes := [][3]int{{1, 1, 1}, {1, 5, 3}, {2, 16, 17}, {3, 33, 15}, {5, 47, 64}, {6, 96, 31}, {7, 48, 255}, {8, 31, 256}, {9, 49, 257}, {13, 97, 600}, {520, 17, 5}, {1037, 40, 33}, {523, 200, 512}}
	for _, dt := range []DType{F32, F64} {
		for _, level := range levels() {
			if dt == F64 && level != "scalar" {
				continue
			}
			t.Run(fmt.Sprintf("%v/%s", dt, level), func(t *testing.T) {
				r := newRig(t, dt, Options{Threads: 2, SIMD: level})
				g := rand.New(rand.NewPCG(1, 2))
				tol := 1e-6
				if dt == F64 {
					tol = 1e-14
				}
				for i, s := range shapes {
					for flags := uint32(0); flags < 16; flags += 2 {
						m, n, k := s[0], s[1], s[2]
						a, b, c := randn(g, m*k, 1), randn(g, n*k, 1), randn(g, m*n, 1)
						if flags&Beta1 == 0 {
							c = slices.Repeat([]float64{math.NaN()}, m*n)
						}
						near(t, fmt.Sprintf("%v flags %d", s, flags), r.gemm(flags, m, n, k, i%3, a, b, c), naiveGemm(flags, m, n, k, a, b, c), tol)
					}
					r.free()
				}
			})
		}
	}
}

// TestGemmEmu: the CUDA kernels, and the loop that stands in for cuBLASLt, give every product within f32 rounding, and one rounding more
// where C is bf16. Rows of 16-byte multiples take the vector path, the others the scalar one.
func TestGemmEmu(t *testing.T) {
	shapes := [][3]int{{1, 1, 1}, {1, 64, 32}, {2, 16, 17}, {15, 33, 40}, {17, 65, 48}, {64, 64, 64}, {70, 100, 33}, {130, 136, 72}, {129, 131, 100}}
	for _, gemm := range []string{"own", "mma", "cublaslt"} {
		t.Run(gemm, func(t *testing.T) {
			eachEmu(t, func(t *testing.T, r *rig) {
				if err := r.dev.configure("gemm", gemm); err != nil {
					t.Fatal(err)
				}
				g := rand.New(rand.NewPCG(1, 2))
				for i, s := range shapes {
					for flags := uint32(0); flags < 32; flags += 2 {
						m, n, k := s[0], s[1], s[2]
						a, b, c := r.round(randn(g, m*k, 1)), r.round(randn(g, n*k, 1)), r.round(randn(g, m*n, 1))
						if flags&Beta1 == 0 {
							c = nans(m * n)
						}
						tol := tolOf(r.dt)
						if flags&CF32 != 0 {
							tol = r.tol32()
						}
						pad := []int{0, 8, 3}[i%3]
						near(t, fmt.Sprintf("%v flags %d", s, flags), r.gemm(flags, m, n, k, pad, a, b, c), naiveGemm(flags, m, n, k, a, b, c), tol)
						r.free()
					}
				}
			})
		})
	}
}

// TestGemmBitsEmu is TestGemmBits on the CUDA kernels, across the tiles of each form. With K 96 the form
// "own" is wgmma but for the product of two transposed matrices, whose bits are then compared with nothing.
func TestGemmBitsEmu(t *testing.T) {
	const rows, cols = 152, 520
	for _, k := range []int{1, 37, 96} {
		pad := 0
		if k%8 == 0 {
			pad = 8
		}
		eachForm(t, func(t *testing.T, r *rig) {
			g := rand.New(rand.NewPCG(3, 4))
			a, bt := randn(g, rows*k, 1), randn(g, cols*k, 1)
			b, at := transpose(bt, cols, k), transpose(a, rows, k)
			zero := make([]float64, rows*cols)
			want := r.gemm(TransB|CF32, rows, cols, k, 0, a, bt, zero)
			for _, m := range []int{1, 7, 16, 17, 64, 65, 127} {
				first := rows - m
				same(t, fmt.Sprintf("k=%d m=%d", k, m), r.gemm(TransB|CF32, m, cols, k, pad, a[first*k:], bt, zero[:m*cols]), want[first*cols:])
			}
			same(t, "plain", r.gemm(CF32, rows, cols, k, 0, a, b, zero), want)
			same(t, "transposed a", r.gemm(TransA|CF32, rows, cols, k, 0, at, b, zero), want)
			if !strings.Contains(t.Name(), "/own") || k%8 != 0 {
				same(t, "both transposed", r.gemm(TransA|TransB|CF32, rows, cols, k, 0, at, bt, zero), want)
			}
			same(t, "added to zero", r.gemm(TransB|Beta1|CF32, rows, cols, k, 0, a, bt, zero), want)
			for _, n := range []int{1, 17, 65, 300} {
				for _, m := range []int{40, rows} {
					got := r.gemm(TransB|CF32, m, n, k, 0, a, bt[(cols-n)*k:], zero[:m*n])
					for i := range m {
						same(t, fmt.Sprintf("k=%d m=%d n=%d", k, m, n), got[i*n:(i+1)*n], want[i*cols+cols-n:(i+1)*cols])
					}
				}
			}
			r.free()
		})
	}
}

// TestGemmBits: an element's bits depend on its row of A, its column of B and K alone: not on M, N, transposition or threads.
func TestGemmBits(t *testing.T) {
	const rows, cols = 700, 150
	for _, level := range levels() {
		for _, k := range []int{1, 37, 256, 512, 700} {
			g := rand.New(rand.NewPCG(3, 4))
			a, bt := randn(g, rows*k, 1), randn(g, cols*k, 1)
			b, at := transpose(bt, cols, k), transpose(a, rows, k)
			var want []float64
			for _, threads := range []int{1, 2, 3} {
				r := newRig(t, F32, Options{Threads: threads, SIMD: level})
				what := fmt.Sprintf("%s k=%d threads=%d", level, k, threads)
				zero := make([]float64, rows*cols)
				if want == nil {
					want = r.gemm(TransB, rows, cols, k, 0, a, bt, zero)
				}
				for _, m := range []int{1, 7, 64, 333, rows} {
					first := rows - m
					same(t, what+fmt.Sprintf(" m=%d", m), r.gemm(TransB, m, cols, k, 1, a[first*k:], bt, zero[:m*cols]), want[first*cols:])
				}
				same(t, what+" plain", r.gemm(0, rows, cols, k, 0, a, b, zero), want)
				same(t, what+" transposed a", r.gemm(TransA, rows, cols, k, 0, at, b, zero), want)
				same(t, what+" added to zero", r.gemm(TransB|Beta1, rows, cols, k, 0, a, bt, zero), want)
				for _, n := range []int{1, 17, 48, 65} {
					got := r.gemm(TransB, rows, n, k, 0, a, bt[(cols-n)*k:], zero[:rows*n])
					for i := range rows {
						same(t, what+fmt.Sprintf(" n=%d", n), got[i*n:(i+1)*n], want[i*cols+cols-n:(i+1)*cols])
					}
				}
				r.free()
			}
		}
	}
}

// TestGemmOpenBLAS: the optional library gives the same products, and where it is missing Open says what to install.
func TestGemmOpenBLAS(t *testing.T) {
	d, err := Open("cpu", Options{Gemm: "openblas"})
	defer func() {
		if _, err := Open("cpu", Options{}); err != nil {
			t.Error(err)
		}
	}()
	if err != nil {
		var e *Error
		if !errors.As(err, &e) || !strings.Contains(e.Hint, "libopenblas") {
			t.Errorf("Open without the library: %v", err)
		}
		return
	}
	if !strings.Contains(d.Info().Build, "gemm openblas") {
		t.Errorf("build %q", d.Info().Build)
	}
	for _, dt := range []DType{F32, F64} {
		r := newRig(t, dt, Options{Gemm: "openblas"})
		g := rand.New(rand.NewPCG(1, 9))
		for flags := uint32(0); flags < 16; flags += 2 {
			a, b, c := randn(g, 9*31, 1), randn(g, 33*31, 1), randn(g, 9*33, 1)
			near(t, fmt.Sprint("flags ", flags), r.gemm(flags, 9, 33, 31, 2, a, b, c), naiveGemm(flags, 9, 33, 31, a, b, c), 1e-6)
		}
		r.free()
	}
}

func transpose(x []float64, rows, cols int) []float64 {
	out := make([]float64, len(x))
	for i := range rows {
		for j := range cols {
			out[j*rows+i] = x[i*cols+j]
		}
	}
	return out
}

// BenchmarkGemm reports GFLOP/s at the shapes of the tiny model and at one square.
func BenchmarkGemm(b *testing.B) {
	for _, c := range []struct {
		name    string
		m, n, k int64
		flags   uint32
	}{
		{"train_8192x128x384", 8192, 128, 384, TransB},
		{"train_8192x384x128", 8192, 384, 128, TransB},
		{"decode_64x128x384", 64, 128, 384, TransB},
		{"decode_64x384x128", 64, 384, 128, TransB},
		{"decode_1x384x128", 1, 384, 128, TransB},
		{"head_64x1024x128", 64, 1024, 128, TransB},
		{"square_1024", 1024, 1024, 1024, TransB},
		{"dx_8192x128x384", 8192, 128, 384, 0},
		{"dw_384x128x8192", 384, 128, 8192, TransA | Beta1},
		{"dw_128x384x8192", 128, 384, 8192, TransA | Beta1},
	} {
		b.Run(c.name, func(b *testing.B) {
			r := newRig(b, F32, Options{})
			a := GemmArgs{Flags: c.flags, M: c.m, N: c.n, K: c.k, A: r.raw(int(4 * c.m * c.k)), LDA: c.k, B: r.raw(int(4 * c.n * c.k)), LDB: c.n,
				C: r.raw(int(4 * c.m * c.n)), LDC: c.n}
			if c.flags&TransA != 0 {
				a.LDA = c.m
			}
			if c.flags&TransB != 0 {
				a.LDB = c.k
			}
			for b.Loop() {
				r.st.Run(OpGemm, unsafe.Pointer(&a))
			}
			if err := r.st.Sync(); err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(2*float64(c.m*c.n*c.k)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
		})
	}
}
