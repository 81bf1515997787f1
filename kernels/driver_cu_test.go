//go:build gpu

package kernels

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"
)

// fakeDevice opens device 0 of the stand-in driver (emu/libcuda.c) with the emulated kernels: its device memory is host memory.
func fakeDevice(t *testing.T) *Device {
	t.Helper()
	needEmu(t, "libhs_emu.so")
	path, err := filepath.Abs(filepath.Join(emuDir(), "libhs_emu.so"))
	if err != nil {
		t.Fatal(err)
	}
	tab, err := loadTable(path)
	if err != nil {
		t.Fatal(err)
	}
	drv, err := newCUDADriver("cuda:0", 0, tab)
	if err != nil {
		if os.Getenv("HS_FAKE_DRIVER") != "" {
			t.Fatal(err)
		}
		t.Skipf("no stand-in driver (%v): make gpu-test", err)
	}
	if !strings.Contains(drv.desc.Build, "fake device") {
		t.Skip("a true GPU cannot run emulated kernels; make gpu-test puts the stand-in driver first")
	}
	return newDevice(drv)
}

func TestCUDADriver(t *testing.T) {
	d := fakeDevice(t)
	if i := d.Info(); i.Name != "cuda:0" || i.MemTotal != 1<<30 {
		t.Errorf("info %+v", i)
	}
	b, err := d.Alloc(3*16, "x")
	if err != nil {
		t.Fatal(err)
	}
	st := d.NewStream()
	got := make([]float32, 4)
	st.DownloadF32(got, b.At(32))
	if got[0] != 0 || got[3] != 0 {
		t.Errorf("fresh memory holds %v", got)
	}
	st.UploadF32(b.At(0), []float32{1, 2, 3, 4})
	st.UploadF32(b.At(16), []float32{10, 20, 30, 40})
	st.Run(OpAdd, unsafe.Pointer(&VecArgs{N: 4, Src: b.At(0), Dst: b.At(16)}))
	st.Fill(b.At(0), 8, 0)
	st.DownloadF32(got, b.At(16))
	if err := st.Sync(); err != nil || got[0] != 11 || got[3] != 44 {
		t.Errorf("%v, %v", got, err)
	}
	st.DownloadF32(got, b.At(0))
	if got[1] != 0 || got[2] != 3 {
		t.Errorf("after a fill of 8 bytes: %v", got)
	}
	g, err := st.Capture(func() { st.Add(&VecArgs{N: 4, Src: b.At(0), Dst: b.At(16)}) })
	if err != nil || g.Nodes() != 1 {
		t.Fatalf("capture: %v", err)
	}
	st.Launch(g)
	st.DownloadF32(got, b.At(16))
	if err := st.Sync(); err != nil || got[0] != 11 || got[3] != 48 {
		t.Errorf("after the graph: %v, %v", got, err)
	}
	g.Free()
	st.Close()
	hostRoundTrip(t, d)
	if _, err := d.Alloc(2<<30, "big"); err == nil || !strings.Contains(err.Error(), "of 1073741824 free") {
		t.Errorf("more than the device has: %v", err)
	}
	b.Free()
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// TestCUDAArena: by default one allocation takes the free memory but the reserve, and buffers are cut from it.
func TestCUDAArena(t *testing.T) {
	d := fakeDevice(t)
	if err := d.reserve("cuda:0", 0); err != nil {
		t.Fatal(err)
	}
	if n := d.Info().Arena; n > 7<<27 || n < 7<<27-2*BufferAlign || d.NumAlloc() != 1 { // 7/8 of 1 GiB
		t.Errorf("arena of %d bytes, %d allocations", n, d.NumAlloc())
	}
	o, err := d.NewOverlay(1<<20, "shared", "a", "b")
	if err != nil {
		t.Fatal(err)
	}
	b, err := d.Alloc(1<<20, "x")
	if err != nil || o.Enter(o.Phase(1)) != nil || b.Ptr()%BufferAlign != 0 || d.NumAlloc() != 1 {
		t.Errorf("%v, %d allocations", err, d.NumAlloc())
	}
	if _, err := d.Alloc(1<<30, "big"); !errors.Is(err, ErrNoMemory) {
		t.Errorf("more than the arena has: %v", err)
	}
	b.Free()
	o.Free()
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// TestCUDAAuto: auto is the GPU when its library is there, and otherwise the cpu with the reason.
func TestCUDAAuto(t *testing.T) {
	if err := fakeDevice(t).Close(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	t.Chdir(dir)
	if name, why := Auto(Options{LibDir: dir}); name != "cpu" || !strings.Contains(why, "libhs_cuda.so") || !strings.Contains(why, "make cuda") {
		t.Errorf("without the library: %s, %s", name, why)
	}
	if err := os.WriteFile(filepath.Join(dir, "libhs_cuda.so"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if name, why := Auto(Options{LibDir: dir}); name != "cuda:0" {
		t.Errorf("with the library: %s, %s", name, why)
	}
	if _, err := Open("cuda:0", Options{LibDir: dir}); !errors.Is(err, ErrNoDevice) {
		t.Errorf("a library that cannot be loaded: %v", err)
	}
}

func TestCUDAOpen(t *testing.T) {
	for _, name := range []string{"cuda:7", "cuda:x", "cudaX"} {
		if _, err := Open(name, Options{}); !errors.Is(err, ErrNoDevice) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
