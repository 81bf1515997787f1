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
	"missing_barrier", "racing_sum", "missing_wait", "stack_overflow"}

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
	for _, name := range []string{"correct", "unwritten", "missing_barrier", "racing_sum", "missing_wait"} {
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
			if caught != (name != "correct") {
				t.Errorf("caught: %v", caught)
			}
		})
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
