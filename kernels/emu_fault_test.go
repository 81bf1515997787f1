package kernels

import (
	"math"
	"slices"
	"strings"
	"testing"
	"unsafe"
)

// broken lists the kernels of emu/broken.cu in their order.
var broken = []string{"correct", "two_barriers", "early_return", "lonely_barrier", "half_shuffle", "out_of_bounds", "shared_overrun", "unwritten",
	"missing_barrier", "racing_sum", "missing_wait", "stack_overflow", "tma_correct", "tma_late_wait", "tma_wrong_parity", "tma_many_bytes",
	"tma_few_bytes", "tma_no_fence", "wgmma_correct", "wgmma_late_wait", "wgmma_no_wait", "wgmma_wild_descriptor"}

// runBroken runs one of them on 0.1, 1.1, ... and returns what it wrote into a buffer of NaN, and its error.
func runBroken(t *testing.T, name, order string, n int) ([]float64, error) {
	t.Helper()
	needEmu(t, "libhs_emu_test.so")
	r := newRigOn(t, "emu", F32, Options{LibDir: emuDir(), Emu: EmuOptions{FiberOrder: order, Poison: true, Guard: true, TestLib: true}})
	defer r.close()
	src := make([]float64, n)
	for i := range src {
		src[i] = float64(i) + 0.1
	}
	a := &VecArgs{N: int64(n), Src: r.put(src), Dst: r.out(n)}
	st := r.dev.NewStream()
	st.Run(numOps+Op(slices.Index(broken, name)), unsafe.Pointer(a))
	return r.get(a.Dst, n), st.Sync()
}

// TestEmuReports: the emulator names the kernel, the place and the fault.
func TestEmuReports(t *testing.T) {
	for _, c := range []struct {
		name string
		n    int
		want []string
	}{
		{"two_barriers", 64, []string{"kernel two_barriers, block (0,0,0), thread (", "divergence: __syncthreads at broken.cu:1", "threads wait in __syncthreads at broken.cu:1"}},
		{"early_return", 40, []string{"kernel early_return", "__syncthreads at broken.cu:"}},
		{"lonely_barrier", 64, []string{"kernel lonely_barrier", "deadlock: 32 threads from (", "in bar.sync at broken.cu:", "32 of 64 threads have left"}},
		{"half_shuffle", 64, []string{"kernel half_shuffle", "divergence: __shfl_xor_sync at broken.cu:", "of its warp wait in __shfl_xor_sync"}},
		{"out_of_bounds", 64, []string{"kernel out_of_bounds", "access outside every buffer, address 0x"}},
		{"shared_overrun", 64, []string{"kernel shared_overrun", "shared memory written 0 bytes past the end of an array of 256 bytes"}},
		{"stack_overflow", 64, []string{"kernel stack_overflow", "stack overflow: a thread has 128 KB"}},
		{"tma_wrong_parity", 64, []string{"kernel tma_wrong_parity", "TMA copies are in flight at the end of the block"}},
		{"tma_many_bytes", 64, []string{"deadlock: 128 threads from (", "in mbarrier.try_wait at broken.cu:", "mbarrier 0 lacks 0 of 1 arrivals and 256 of 512 bytes"}},
		{"tma_few_bytes", 64, []string{"kernel tma_few_bytes", "mbarrier 0: copies bring 256 bytes, 128 were expected"}},
		{"tma_no_fence", 64, []string{"kernel tma_no_fence", "cp.async.bulk.tensor at broken.cu:", "no fence.proxy.async since its mbarrier was made"}},
		{"wgmma_no_wait", 64, []string{"kernel wgmma_no_wait", "leaves the kernel with 1 wgmma in flight"}},
		{"wgmma_wild_descriptor", 64, []string{"kernel wgmma_wild_descriptor", "bytes before the block's dynamic shared memory"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, order := range fiberOrders() {
				_, err := runBroken(t, c.name, order, c.n)
				for _, want := range c.want {
					if err == nil || !strings.Contains(err.Error(), want) {
						t.Errorf("%s: got %v, want an error with %q", order, err, want)
					}
				}
			}
		})
	}
}

// TestEmuFiberOrders: faults that a single run can survive show as an output that is not written or as bits that depend on the order.
func TestEmuFiberOrders(t *testing.T) {
	for _, name := range []string{"correct", "unwritten", "missing_barrier", "racing_sum", "missing_wait", "tma_correct", "tma_late_wait",
		"wgmma_correct", "wgmma_late_wait"} {
		t.Run(name, func(t *testing.T) {
			caught := false
			var first []float64
			for _, order := range fiberOrders() {
				got, err := runBroken(t, name, order, 64)
				if err != nil {
					t.Fatal(err)
				}
				if first == nil {
					first = got
				}
				bits := func(a, b float64) bool { return math.Float64bits(a) == math.Float64bits(b) }
				caught = caught || slices.ContainsFunc(got, math.IsNaN) || !slices.EqualFunc(got, first, bits)
			}
			if caught != !strings.HasSuffix(name, "correct") {
				t.Errorf("caught: %v", caught)
			}
		})
	}
}

// TestEmuHopper: a box copied by TMA, and register 0 of a product of two swizzled tiles against the sum in order of K.
func TestEmuHopper(t *testing.T) {
	src := make([]float64, 64)
	for i := range src {
		src[i] = float64(float32(float64(i) + 0.1))
	}
	got, err := runBroken(t, "tma_correct", "forward", 64)
	if err != nil {
		t.Fatal(err)
	}
	same(t, "the box", got, src)
	got, err = runBroken(t, "wgmma_correct", "forward", 64)
	if err != nil {
		t.Fatal(err)
	}
	r := emuRig(t, BF16, "forward")
	b := r.round(src)
	r.close()
	for i, x := range got {
		row, col := i/32*16+i%32/4, 2*(i%4)
		var want float32
		for k := range 16 {
			want += float32(b[(row+k)%64]) * float32(b[(col+k)%64])
		}
		if float32(x) != want {
			t.Errorf("thread %d, row %d, column %d: %v, want %v", i, row, col, x, want)
		}
	}
}

// TestEmuSurvivesFaults: after a fault the next launch works.
func TestEmuSurvivesFaults(t *testing.T) {
	for range 3 {
		if _, err := runBroken(t, "out_of_bounds", "forward", 64); err == nil {
			t.Fatal("no fault")
		}
		if got, err := runBroken(t, "correct", "forward", 64); err != nil || float32(got[0]) != 63.1 {
			t.Fatalf("%v, %v", got, err)
		}
	}
}

// TestEmuGuard: a write into the few bytes between a buffer's end and its guard page comes back from Close.
func TestEmuGuard(t *testing.T) {
	needEmu(t, "libhs_emu.so")
	for at, want := range map[int]string{13: "byte 13 was written of a buffer of 13 bytes", -1: "byte -1 was written"} {
		d, err := Open("emu", Options{LibDir: emuDir(), Emu: EmuOptions{Guard: true}})
		if err != nil {
			t.Fatal(err)
		}
		b, err := d.Alloc(13, "x")
		if err != nil {
			t.Fatal(err)
		}
		st := d.NewStream()
		st.Fill(b.Ptr()+Ptr(at), 1, 1)
		b.Free()
		if err := d.Close(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// TestEmuOpen: what is missing or wrong is named with the command that helps.
func TestEmuOpen(t *testing.T) {
	_, err := Open("emu", Options{LibDir: t.TempDir()})
	if err == nil || !strings.Contains(err.Error(), "libhs_emu.so: no such device") {
		t.Errorf("no library: %v", err)
	}
	needEmu(t, "libhs_emu.so")
	_, err = Open("emu", Options{LibDir: emuDir(), Emu: EmuOptions{FiberOrder: "sideways"}})
	if err == nil || !strings.Contains(err.Error(), `configure fiber_order: "sideways"`) {
		t.Errorf("bad order: %v", err)
	}
}
