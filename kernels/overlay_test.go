package kernels

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
)

// panicOf is the text that f panics with, "" when it does not.
func panicOf(f func()) (text string) {
	defer func() {
		if r := recover(); r != nil {
			text = fmt.Sprint(r)
		}
	}()
	f()
	return ""
}

// TestOverlay: both phases lie at the same addresses, which never change; only the entered one can be used; entering poisons; the device sees
// one buffer.
func TestOverlay(t *testing.T) {
	d := arenaDevice(t, Options{ArenaBytes: 1 << 16, Poison: true})
	o, err := d.NewOverlay(4000, "shared", "sample", "train")
	if err != nil {
		t.Fatal(err)
	}
	sample, train := o.Phase(0), o.Phase(1)
	alloc := func(p *Phase, n int64) *Buffer {
		t.Helper()
		b, err := p.Alloc(n, fmt.Sprintf("%s %d", p.Name(), n))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	a, b, c := alloc(sample, 1000), alloc(sample, 2000), alloc(train, 4000)
	if text := panicOf(func() { a.Ptr() }); !strings.Contains(text, `"sample 1000" of phase sample used in phase none`) {
		t.Errorf("before a phase is entered: %q", text)
	}
	enter := func(p *Phase) {
		t.Helper()
		if err := o.Enter(p); err != nil || o.Current() != p || !p.Entered() {
			t.Fatal(err)
		}
	}
	enter(sample)
	first, second := a.Ptr(), b.At(4)
	if second != first+1024+4 || first%BufferAlign != 0 {
		t.Errorf("buffers at %#x and %#x", uint64(first), uint64(second))
	}
	st := d.NewStream()
	x := make([]float32, 3)
	for _, t2 := range []DType{F32, BF16} {
		st.DownloadReal(x, first+256, t2)
		if x[0] == x[0] || !math.IsNaN(float64(x[2])) {
			t.Errorf("%v of a fresh phase is %v", t2, x)
		}
	}
	st.UploadF32(first, []float32{1, 2, 3})
	enter(sample) // the current one: nothing changes
	if st.DownloadF32(x, first); x[2] != 3 || st.Sync() != nil {
		t.Errorf("%v, %v", x, st.Sync())
	}
	enter(train)
	if c.Ptr() != first {
		t.Errorf("the other phase begins at %#x", uint64(c.Ptr()))
	}
	for name, f := range map[string]func(){"Ptr": func() { a.Ptr() }, "At": func() { b.At(0) }} {
		if text := panicOf(f); !strings.Contains(text, "of phase sample used in phase train") {
			t.Errorf("%s in another phase: %q", name, text)
		}
	}
	if st.DownloadF32(x, c.Ptr()); x[2] == 3 {
		t.Error("contents outlive their phase")
	}
	if _, err := train.Alloc(1, "more"); !errors.Is(err, ErrNoMemory) || !strings.Contains(err.Error(), `"more" in phase train: out of device memory: 1 bytes asked for, 0 of the 4000`) {
		t.Errorf("beyond the block: %v", err)
	}
	if _, err := train.Alloc(0, "none"); err == nil {
		t.Error("allocated 0 bytes")
	}
	if l := sample.Buffers(); len(l) != 2 || l[0].Label != "sample 1000" || l[1].Bytes != 2000 {
		t.Errorf("%+v", l)
	}
	a.Free()
	if _, err := sample.Alloc(2000, "early"); err == nil {
		t.Error("space came back before the buffer behind it was free")
	}
	b.Free()
	again := alloc(sample, 4000)
	enter(sample)
	if again.Ptr() != first {
		t.Errorf("the phase begins at %#x, began at %#x", uint64(again.Ptr()), uint64(first))
	}
	other, err := d.NewOverlay(256, "other", "x")
	if err != nil {
		t.Fatal(err)
	}
	if err := o.Enter(other.Phase(0)); err == nil {
		t.Error("entered a phase of another overlay")
	}
	if l := d.Ledger(); l[0].Label != "shared" || l[0].Bytes != 4000 || l[2].Bytes != 4256 || d.NumAlloc() != 1 {
		t.Errorf("%+v", l)
	}
	o.Free()
	other.Free()
	if text := panicOf(func() { again.Ptr() }); text == "" {
		t.Error("a buffer outlives its overlay")
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if _, err := d.NewOverlay(1<<20, "too large"); !errors.Is(err, ErrNoMemory) {
		t.Errorf("%v", err)
	}
}
