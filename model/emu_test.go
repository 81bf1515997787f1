package model

// Models on the emulated CUDA kernels (make emu), in float32 and bfloat16.

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"harness-s/kernels"
)

// emuDevice opens the emulated CUDA device, or skips the test when its library is missing or older than a kernel's source; one without a kernel for some op fails it.
func emuDevice(t testing.TB) *kernels.Device { return emuDeviceWith(t, kernels.Options{}) }

// gpuDevice is the GPU of HS_TEST_DEVICE, such as cuda:0, which stands in the emulator's place in a build with the tag gpu; "" = none.
func gpuDevice() string { return os.Getenv("HS_TEST_DEVICE") }

func emuDeviceWith(t testing.TB, o kernels.Options) *kernels.Device {
	t.Helper()
	dir := os.Getenv("HS_LIB_DIR")
	if dir == "" {
		dir = filepath.Join("..", "build")
	}
	o.LibDir = dir
	if gpu := gpuDevice(); gpu != "" {
		if o.ArenaBytes == 0 {
			o.ArenaBytes = 512 << 20
		}
		d := must[*kernels.Device](t)(kernels.Open(gpu, o))
		t.Cleanup(func() { check(t, d.Close()) })
		return d
	}
	d, err := kernels.Open("emu", o)
	if errors.Is(err, kernels.ErrNoDevice) {
		t.Skipf("%v: make emu", err)
	}
	check(t, err)
	t.Cleanup(func() { check(t, d.Close()) })
	built := must[os.FileInfo](t)(os.Stat(filepath.Join(dir, "libhs_emu.so")))
	for _, pattern := range []string{"abi.h", "cuda/*.cu", "cuda/*.cuh", "emu/*.cpp", "emu/*.h"} {
		for _, f := range must[[]string](t)(filepath.Glob("../kernels/" + pattern)) {
			if must[os.FileInfo](t)(os.Stat(f)).ModTime().After(built.ModTime()) {
				t.Skipf("libhs_emu.so is older than %s: make emu", f)
			}
		}
	}
	for op := range kernels.OpSumSq + 1 {
		st, args := d.NewStream(), [512]byte{} // no op does anything with these: most refuse them
		if st.Run(op, unsafe.Pointer(&args)); errors.Is(st.Err(), kernels.ErrUnsupported) {
			t.Fatalf("libhs_emu.so: %v", st.Err())
		}
		st.Close()
	}
	return d
}

// hilo is what trains bfloat16 weights.
var hilo = Recipe{HiLo: true, Seed: 3}

// TestBF16Weights: bfloat16 weights lie as bfloat16, but for A_log and the gated norm, and with their lower halves they are the float32 masters
// of a checkpoint, bit for bit, through load, state, save and load. One hash stands for a checkpoint in any type that holds all of it.
func TestBF16Weights(t *testing.T) {
	cpu, emu, cfg := execDevice(t, 2), emuDevice(t), execConfig()
	f := randomModel(t, cpu, cfg, kernels.F32)
	dir := filepath.Join(t.TempDir(), "m")
	check(t, f.Save(dir))
	want := must[string](t)(f.WeightsSHA256())
	m := must[*Model](t)(Load(dir, emu, LoadOptions{DType: kernels.BF16, Train: true, Optim: hilo}))
	t.Cleanup(m.Close)
	if got := must[string](t)(m.WeightsSHA256()); got != want || m.Params.rounded.Load() {
		t.Errorf("hash %s, in float32 %s", got, want)
	}
	bytes := map[StateKind]int64{}
	end := int64(0)
	for _, e := range m.Params.Entries() {
		kept := strings.HasSuffix(e.Name, "A_log") || strings.HasSuffix(e.Name, "linear_attn.norm.weight")
		size := map[bool]int64{true: 4, false: 2}[kept]
		at := int64(m.Params.Ptr(Weights, e.Name) - m.Params.Base(Weights))
		if at%64 != 0 || at < end {
			t.Errorf("%s lies at byte %d of the weights, the one before ends at %d", e.Name, at, end)
		}
		end = at + size*e.Len
		bytes[Weights], bytes[WeightsLo], bytes[Grads] = bytes[Weights]+size*e.Len, bytes[WeightsLo]+2*e.Len, bytes[Grads]+4*e.Len
		got, whole := must[[]float32](t)(m.Params.ReadF32(Weights, e.Name)), must[[]float32](t)(f.Params.ReadF32(Weights, e.Name))
		for i, x := range whole {
			hi, _ := kernels.SplitF32(x)
			if near := kernels.FromBF16(hi); !kept && got[i] != near || kept && got[i] != x {
				t.Fatalf("%s[%d] is %v, master %v, nearest bfloat16 %v", e.Name, i, got[i], x, near)
			}
		}
		if joined := must[[]float32](t)(m.Params.Master(e.Name)); !slices.Equal(joined, whole) {
			t.Errorf("%s: masters differ from the checkpoint", e.Name)
		}
	}
	for k, n := range bytes {
		if b := must[[]byte](t)(m.Params.State(k)); int64(len(b)) != n {
			t.Errorf("%s: %d bytes, want %d", k, len(b), n)
		}
	}
	padding(t, m, hilo)
	again := filepath.Join(t.TempDir(), "again")
	check(t, m.Save(again))
	back := must[*Model](t)(Load(again, cpu, LoadOptions{}))
	t.Cleanup(back.Close)
	if must[string](t)(back.WeightsSHA256()) != want {
		t.Error("a save changes masters")
	}
	copied := must[*Model](t)(NewRandom(cfg, emu, 1, LoadOptions{DType: kernels.BF16, Train: true, Optim: hilo}))
	t.Cleanup(copied.Close)
	for _, k := range []StateKind{Weights, WeightsLo} {
		check(t, copied.Params.SetState(k, must[[]byte](t)(m.Params.State(k))))
	}
	if must[string](t)(copied.WeightsSHA256()) != want {
		t.Error("State and SetState change masters")
	}
}

// TestBF16Checkpoint: without lower halves the hash of a bfloat16 checkpoint is the same in float32 and bfloat16, and that of a float32 one
// is marked as rounded.
func TestBF16Checkpoint(t *testing.T) {
	cpu, emu := execDevice(t, 2), emuDevice(t)
	f := randomModel(t, cpu, execConfig(), kernels.F32)
	stored, whole := filepath.Join(t.TempDir(), "s"), filepath.Join(t.TempDir(), "w")
	check(t, f.SaveAs(stored, SaveOptions{DType: SaveStored}))
	check(t, f.Save(whole))
	for dir, rounded := range map[string]bool{stored: false, whole: true} {
		a := must[*Model](t)(Load(dir, cpu, LoadOptions{}))
		t.Cleanup(a.Close)
		b := must[*Model](t)(Load(dir, emu, LoadOptions{DType: kernels.BF16}))
		t.Cleanup(b.Close)
		same := must[string](t)(a.WeightsSHA256()) == must[string](t)(b.WeightsSHA256())
		if same == rounded || b.Params.rounded.Load() != rounded || a.hashKey() != baseHashKey || (b.hashKey() == baseHashKey) == rounded {
			t.Errorf("rounded %t: equal hashes %t, marked %t, key %s", rounded, same, b.Params.rounded.Load(), b.hashKey())
		}
	}
}

func TestBF16Refusals(t *testing.T) {
	emu, cfg := emuDevice(t), execConfig()
	for want, c := range map[string]struct {
		dev *kernels.Device
		o   LoadOptions
	}{
		"device cpu does not compute in bf16":      {execDevice(t, 1), LoadOptions{DType: kernels.BF16}},
		"device emu does not compute in f64":       {emu, LoadOptions{DType: kernels.F64}},
		"the lower halves are not kept":            {emu, LoadOptions{DType: kernels.BF16, Train: true}},
		"dtype i32, want F32, F64 or BF16":         {emu, LoadOptions{DType: kernels.I32}},
		"dtype f64, but only float32 masters are ": {execDevice(t, 1), LoadOptions{DType: kernels.F64, Optim: hilo}},
	} {
		if _, err := NewRandom(cfg, c.dev, 1, c.o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
}

// TestScaleParts: in bfloat16 the scale of an adapter is the sum of two numbers, to float32's precision or as near as two allow.
func TestScaleParts(t *testing.T) {
	for _, s := range []float64{1, 2, 0.5, 1.0 / 3, 11.313708498984761, 0.001} {
		if p := scaleParts(s, kernels.F32); len(p) != 1 || p[0] != float32(s) {
			t.Errorf("float32: %g is %v", s, p)
		}
		var sum float64
		p := scaleParts(s, kernels.BF16)
		for _, x := range p {
			sum += float64(kernels.FromBF16(kernels.ToBF16(x)))
		}
		if d := (sum - s) / s; d > 0x1p-17 || d < -0x1p-17 || len(p) > 2 || len(p) == 2 && float64(kernels.FromBF16(kernels.ToBF16(float32(s)))) == s {
			t.Errorf("bfloat16: %g is %v, off by %s", s, p, fmt.Sprintf("%.2g", d))
		}
	}
}
