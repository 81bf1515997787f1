package kernels

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"
)

// TestGemmWgmmaEmu: every tile, major order, epilogue and tail of the wgmma form, within f32 rounding of float64, and one rounding more where C
// is bf16. The emulator has 4 SMs, which decides between the tiles.
func TestGemmWgmmaEmu(t *testing.T) {
	shapes := []struct {
		tile    string
		m, n, k int
	}{
		{"64x32", 1, 1, 8}, {"64x32", 64, 40, 136}, {"64x32", 3, 33, 64}, {"64x64", 5, 304, 72}, {"64x128", 17, 520, 40}, {"128x64", 72, 32, 200},
		{"128x64", 150, 96, 256}, {"128x256", 70, 1000, 24}, {"128x256", 200, 520, 72}, {"128x256, more tiles than blocks", 300, 776, 16},
		{"64x32, twice round its ring of 8", 3, 24, 1096}, {"64x64, 6", 8, 256, 712}, {"64x128, 4", 2, 512, 584}, {"128x64, 4", 72, 16, 584}, {"128x256, 4", 72, 776, 584},
	}
	for _, order := range fiberOrders() {
		t.Run(order, func(t *testing.T) {
			r := emuRig(t, BF16, order)
			g := rand.New(rand.NewPCG(1, 2))
			for i, s := range shapes {
				for flags := uint32(0); flags < 32; flags += 2 {
					if flags&(TransA|TransB) == TransA|TransB || flags&TransA != 0 && s.m%8 != 0 || flags&TransB == 0 && s.n%8 != 0 {
						continue // not multiplied by wgmma
					}
					a, b, c := r.round(randn(g, s.m*s.k, 1)), r.round(randn(g, s.n*s.k, 1)), r.round(randn(g, s.m*s.n, 1))
					if flags&Beta1 == 0 {
						c = nans(s.m * s.n)
					}
					tol := tolOf(BF16)
					if flags&CF32 != 0 {
						tol = r.tol32()
					}
					near(t, fmt.Sprintf("%v flags %d", s, flags), r.gemm(flags, s.m, s.n, s.k, 8*(i%2), a, b, c), naiveGemm(flags, s.m, s.n, s.k, a, b, c), tol)
					r.free()
				}
			}
		})
	}
}

// TestGemmForms: which kernel multiplies depends on flags, alignment and the configuration, not on M or N. The kernel is read from the fault of
// an A that is too short.
func TestGemmForms(t *testing.T) {
	needEmu(t, "libhs_emu.so")
	for _, c := range []struct {
		form, want string
		flags      uint32
		m, n, k    int64
		pad        int64 // of ldb
	}{
		{"own", "gemm_wgmma_kernel", TransB, 1, 64, 4096, 0}, {"own", "gemm_wgmma_kernel", TransB, 500, 64, 4096, 8},
		{"own", "gemm_wgmma_kernel", TransB, 1, 1, 4096, 0}, {"own", "gemm_mma_kernel", TransB, 1, 64, 4096, 3}, {"own", "gemm_mma_kernel", TransB, 500, 64, 4100, 0},
		{"own", "gemm_wgmma_kernel", 0, 500, 64, 4096, 0}, {"own", "gemm_mma_kernel", 0, 500, 63, 4096, 0},
		{"own", "gemm_wgmma_kernel", TransA | Beta1 | CF32, 64, 64, 4096, 0}, {"own", "gemm_mma_kernel", TransA | TransB, 64, 64, 4096, 0},
		{"mma", "gemm_mma_kernel", TransB, 1, 64, 4096, 0},
	} {
		r := emuRig(t, BF16, "forward")
		if err := r.dev.configure("gemm", c.form); err != nil {
			t.Fatal(err)
		}
		a := GemmArgs{Flags: c.flags, M: c.m, N: c.n, K: c.k, A: r.raw(64), LDA: c.k, B: r.raw(int(2 * c.n * (c.k + c.pad))), LDB: c.n + c.pad, C: r.raw(int(4 * c.m * c.n)), LDC: c.n}
		if c.flags&TransA != 0 {
			a.LDA = c.m
		}
		if c.flags&TransB != 0 {
			a.LDB = c.k + c.pad
		}
		if err := r.try(OpGemm, &a); err == nil || !strings.Contains(err.Error(), "kernel ("+c.want+"<") {
			t.Errorf("%+v: got %v, want a fault in %s", c, err, c.want)
		}
		r.close()
	}
}

// TestGemmGroup: a group has the bits of its products one by one, whether one launch does them all or a set is not aligned for it.
func TestGemmGroup(t *testing.T) {
	eachRig(t, func(t *testing.T, r *rig) {
		for i, c := range []struct {
			m, k  int
			flags uint32
			ns    []int
		}{
			{1, 64, TransB, []int{96, 40, 2, 1}}, {5, 40, TransB, []int{7}}, {70, 72, TransB | Beta1, []int{24, 200, 8}},
			{3, 24, 0, []int{16, 8}}, {9, 16, 0, []int{16, 3, 8}}, {40, 24, TransB | CF32, []int{600, 33}}, {6, 9, TransB, []int{5, 12}},
		} {
			g := rand.New(rand.NewPCG(17, uint64(i)))
			a := r.round(randn(g, c.m*c.k, 1))
			dt := r.dt
			if c.flags&CF32 != 0 {
				dt = r.wide()
			}
			args := GemmGroupArgs{Flags: c.flags, M: int64(c.m), K: int64(c.k), N: int64(len(c.ns)), A: r.put(a), LDA: int64(c.k)}
			var want [][]float64
			for j, n := range c.ns {
				b, old := r.round(randn(g, n*c.k, 1)), r.round(randn(g, c.m*n, 1))
				args.Set[j] = GemmSet{N: int64(n), B: r.put(b), LDB: int64(n), C: r.putAs(dt, old), LDC: int64(n)}
				if c.flags&TransB != 0 {
					args.Set[j].LDB = int64(c.k)
				}
				want = append(want, r.gemm(c.flags, c.m, n, c.k, 0, a, b, old))
			}
			r.run(OpGemmGroup, &args)
			for j, n := range c.ns {
				same(t, fmt.Sprintf("case %d, set %d", i, j), r.getAs(dt, args.Set[j].C, c.m*n), want[j])
			}
			r.free()
		}
		args := GemmGroupArgs{Flags: TransB, M: 1, K: 8, N: GemmSets + 1}
		if err := r.try(OpGemmGroup, &args); err == nil || !strings.Contains(err.Error(), "n 5, want 1..4") {
			t.Errorf("five sets: %v", err)
		}
	})
}

// TestGemmSwiGLU: the fused op has the bits of gemm, gemm, swiglu.
func TestGemmSwiGLU(t *testing.T) {
	eachRig(t, func(t *testing.T, r *rig) {
		for i, s := range [][3]int{{1, 64, 32}, {3, 33, 40}, {17, 160, 64}, {64, 300, 24}, {65, 40, 72}, {150, 264, 16}, {5, 16, 9}} {
			m, n, k := s[0], s[1], s[2]
			g := rand.New(rand.NewPCG(18, uint64(i)))
			x, gate, up := r.round(randn(g, m*k, 1)), r.round(randn(g, n*k, 1)), r.round(randn(g, n*k, 1))
			none := make([]float64, m*n)
			want := r.swiglu(r.gemm(TransB, m, n, k, 0, x, gate, none), r.gemm(TransB, m, n, k, 0, x, up, none))
			h := r.out(m * n)
			r.run(OpGemmSwiGLU, &GemmSwiGLUArgs{M: int64(m), N: int64(n), K: int64(k), X: r.put(x), LDX: int64(k), Gate: r.put(gate), Up: r.put(up), LDW: int64(k), H: h})
			same(t, fmt.Sprint(s), r.get(h, m*n), want)
			r.free()
		}
	})
}

// TestGemmSwiGLUNeeds: without wgmma the op asks for room for the second product, and says so when it is missing.
func TestGemmSwiGLUNeeds(t *testing.T) {
	needEmu(t, "libhs_emu.so")
	r := emuRig(t, BF16, "forward")
	a := GemmSwiGLUArgs{DType: BF16, M: 3, N: 40, K: 64, X: 1, LDX: 64, Gate: 1, Up: 1, LDW: 64, H: 1}
	var need []int64
	for _, form := range []string{"own", "mma"} {
		if err := r.dev.configure("gemm", form); err != nil {
			t.Fatal(err)
		}
		a.X, a.Gate, a.Up = 0, 0, 0
		need = append(need, r.dev.Workspace(OpGemmSwiGLU, unsafe.Pointer(&a)))
	}
	if !slices.Equal(need, []int64{0, 256}) {
		t.Errorf("workspace %v, want none by wgmma and 3 x 40 x 2 bytes rounded up by mma.sync", need)
	}
	a.X, a.Gate, a.Up, a.H = r.raw(384), r.raw(5120), r.raw(5120), r.raw(240)
	st := r.dev.NewStream()
	defer st.Close()
	st.GemmSwiGLU(&a)
	if err := st.Sync(); err == nil || !strings.Contains(err.Error(), "gemm_swiglu: ws_bytes 0 < 256 needed") {
		t.Errorf("without workspace: %v", err)
	}
}
