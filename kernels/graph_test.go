package kernels

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"unsafe"
)

// emuDevice opens the emulator without its fault finding, or the GPU in its place.
func emuDevice(t *testing.T, o Options) *Device {
	t.Helper()
	return testDevice(t, o)
}

func alloc(t *testing.T, d *Device, bytes int64) *Buffer {
	t.Helper()
	b, err := d.Alloc(bytes, t.Name())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Free)
	return b
}

// TestGraph: a recording runs nothing; each launch runs it on what the memory then holds, with the arguments of the recording.
func TestGraph(t *testing.T) {
	for _, gemm := range []string{"own", "cublaslt"} {
		t.Run(gemm, func(t *testing.T) {
			d := emuDevice(t, Options{Gemm: gemm})
			t.Cleanup(func() { emuDevice(t, Options{}) }) // the setting is the process's
			if !d.CanCapture() {
				t.Fatal("no graphs")
			}
			b, st := alloc(t, d, 256), d.NewStream()
			defer st.Close()
			x, y, z, w := b.At(0), b.At(64), b.At(128), b.At(192)
			st.UploadF32(x, []float32{1, 2, 3, 4})
			st.UploadF32(w, []float32{1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 3, 0, 0, 0, 0, 4})
			add := VecArgs{N: 4, Src: x, Dst: y}
			g, err := st.Capture(func() {
				st.Add(&add)
				st.Gemm(&GemmArgs{Flags: TransB, M: 1, N: 4, K: 4, A: y, LDA: 4, B: w, LDB: 4, C: z, LDC: 4})
			})
			if err != nil {
				t.Fatal(err)
			}
			defer g.Free()
			if g.Nodes() != 2 {
				t.Errorf("%d nodes, want 2", g.Nodes())
			}
			add = VecArgs{}
			want := func(what string, y0, z0 []float32) {
				t.Helper()
				got, gotZ := make([]float32, 4), make([]float32, 4)
				st.DownloadF32(got, y)
				st.DownloadF32(gotZ, z)
				if err := st.Sync(); err != nil || !slices.Equal(got, y0) || !slices.Equal(gotZ, z0) {
					t.Errorf("%s: %v and %v, %v; want %v and %v", what, got, gotZ, err, y0, z0)
				}
			}
			want("recorded", make([]float32, 4), make([]float32, 4))
			st.Launch(g)
			want("launched", []float32{1, 2, 3, 4}, []float32{1, 4, 9, 16})
			st.UploadF32(x, []float32{10, 10, 10, 10})
			st.Launch(g)
			st.Launch(g)
			want("launched with other values", []float32{21, 22, 23, 24}, []float32{21, 44, 69, 96})
		})
	}
}

// TestGraphRefusals: what a graph cannot hold fails the stream, an op's failure ends the recording, and the cpu says that it has none.
func TestGraphRefusals(t *testing.T) {
	d := emuDevice(t, Options{})
	b := alloc(t, d, 64)
	h, err := d.AllocHost(64, "h")
	if err != nil {
		t.Fatal(err)
	}
	defer h.Free()
	e, err := d.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	defer e.Free()
	for want, f := range map[string]func(*Stream){
		"upload: not possible while":             func(s *Stream) { s.UploadF32(b.Ptr(), []float32{1}) },
		"download: not possible while":           func(s *Stream) { s.DownloadAsync(h, 0, b.Ptr(), 4) },
		"fill: not possible while":               func(s *Stream) { s.Fill(b.Ptr(), 4, 0) },
		"record an event: not possible while":    func(s *Stream) { s.Record(e) },
		"wait for the stream: not possible":      func(s *Stream) { _ = s.Sync() },
		"capture a graph: not possible while":    func(s *Stream) { _, _ = s.Capture(func() {}) },
		"stream: waited for while it records":    func(s *Stream) { s.Fail(s.drv.sync(s.h)) },
		"graph: the stream records one already":  func(s *Stream) { s.Fail(s.drv.graphBegin(s.h)) },
		"add: n -1":                              func(s *Stream) { s.Add(&VecArgs{N: -1, Src: b.Ptr(), Dst: b.Ptr()}) },
		"launch a graph: not possible while the": func(s *Stream) { s.Launch(&Graph{drv: s.drv}) },
	} {
		st := d.NewStream()
		if _, err := st.Capture(func() { f(st) }); err == nil || !strings.Contains(err.Error(), want) || !errors.Is(err, st.Err()) {
			t.Errorf("got %v, want %q", err, want)
		}
		st.Close()
	}
	after := d.NewStream()
	defer after.Close()
	if g, err := after.Capture(func() { after.Add(&VecArgs{N: 1, Src: b.Ptr(), Dst: b.Ptr()}) }); err != nil || g.Nodes() != 1 {
		t.Errorf("after refusals: %v", err)
	} else {
		g.Free()
	}
	cpu, err := Open("cpu", Options{})
	if err != nil {
		t.Fatal(err)
	}
	st := cpu.NewStream()
	defer st.Close()
	if _, err := st.Capture(func() {}); !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), "graphs exist on cuda and emu") || cpu.CanCapture() || st.Err() != nil {
		t.Errorf("cpu: %v", err)
	}
}

// TestGraphReportsFaults: a fault of a kernel in a graph names the kernel and fails the stream.
func TestGraphReportsFaults(t *testing.T) {
	needEmu(t, "libhs_emu_test.so")
	r := newRigOn(t, "emu", F32, Options{LibDir: emuDir(), Emu: EmuOptions{Guard: true, TestLib: true}})
	defer r.close()
	a := &VecArgs{N: 64, Src: r.put(make([]float64, 64)), Dst: r.out(64)}
	st := r.dev.NewStream()
	defer st.Close()
	g, err := st.Capture(func() { st.Run(numOps+Op(slices.Index(broken, "out_of_bounds")), unsafe.Pointer(a)) })
	if err != nil {
		t.Fatal(err)
	}
	defer g.Free()
	st.Launch(g)
	if err := st.Sync(); err == nil || !strings.Contains(err.Error(), "kernel out_of_bounds") {
		t.Errorf("got %v", err)
	}
	_ = r.get(a.Dst, 64)
}

// TestNullGraph: "null" counts the ops of a graph.
func TestNullGraph(t *testing.T) {
	d, err := Open("null", Options{})
	if err != nil {
		t.Fatal(err)
	}
	a, b := d.NewStream(), d.NewStream()
	g, err := a.Capture(func() {
		a.Add(&VecArgs{})
		b.Add(&VecArgs{})
		a.Copy(&VecArgs{})
	})
	if err != nil || g.Nodes() != 2 || !d.CanCapture() {
		t.Errorf("%+v, %v", g, err)
	}
	a.Launch(g)
	if err := a.Sync(); err != nil {
		t.Error(err)
	}
}

// TestHostMemory: copies between host buffers and the device, and the events behind them.
func TestHostMemory(t *testing.T) {
	for _, name := range []string{"cpu", "emu"} {
		t.Run(name, func(t *testing.T) {
			var d *Device
			if name == "emu" {
				d = emuDevice(t, Options{})
			} else {
				var err error
				if d, err = Open(name, Options{}); err != nil {
					t.Fatal(err)
				}
			}
			hostRoundTrip(t, d)
			h, err := d.AllocHost(100, "pinned")
			if err != nil {
				t.Fatal(err)
			}
			if err := d.Close(); err == nil || !strings.Contains(err.Error(), `host memory "pinned" (100 bytes)`) {
				t.Errorf("leak report: %v", err)
			}
			for what, f := range map[string]func(){
				"past the end": func() { HostSlice[int32](h, 96, 2) },
				"unaligned":    func() { HostSlice[int32](h, 2, 1) },
				"copy outside": func() { d.NewStream().UploadAsync(1, h, 99, 2) },
			} {
				func() {
					defer func() {
						if recover() == nil {
							t.Errorf("%s: accepted", what)
						}
					}()
					f()
				}()
			}
			h.Free()
			h.Free()
			if _, err := d.AllocHost(0, "none"); err == nil {
				t.Error("allocated 0 bytes")
			}
		})
	}
}

func hostRoundTrip(t *testing.T, d *Device) {
	t.Helper()
	h, err := d.AllocHost(64, "pinned")
	if err != nil {
		t.Fatal(err)
	}
	defer h.Free()
	start, err := d.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	defer start.Free()
	end, err := d.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	defer end.Free()
	b, err := d.Alloc(64, "device")
	if err != nil {
		t.Fatal(err)
	}
	defer b.Free()
	st := d.NewStream()
	defer st.Close()
	if v := HostSlice[int32](h, 0, 16); slices.Max(v) != 0 || uintptr(unsafe.Pointer(&v[0]))%64 != 0 {
		t.Errorf("fresh host memory: %v at %p", v, v)
	}
	copy(HostSlice[int32](h, 0, 2), []int32{7, 8})
	st.Record(start)
	st.UploadAsync(b.At(8), h, 0, 8)
	st.DownloadAsync(h, 32, b.At(8), 8)
	st.Record(end)
	if err := end.Wait(); err != nil {
		t.Fatal(err)
	}
	done := false
	for range 3 {
		if done, err = end.Done(); err != nil {
			t.Fatal(err)
		}
	}
	if got := HostSlice[int32](h, 32, 2); !slices.Equal(got, []int32{7, 8}) || !done || st.Err() != nil {
		t.Errorf("%v, done %v, %v", got, done, st.Err())
	}
	if ms, err := end.Since(start); err != nil || ms < 0 || ms > 1e4 {
		t.Errorf("%v ms, %v", ms, err)
	}
	fresh, err := d.NewEvent()
	if err != nil {
		t.Fatal(err)
	}
	defer fresh.Free()
	if done, err := fresh.Done(); err != nil || !done {
		t.Errorf("an event that nothing recorded: %v, %v", done, err)
	}
	if _, err := end.Since(fresh); err == nil {
		t.Error("time since an event that nothing recorded")
	}
}
