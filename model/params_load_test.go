package model

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"harness-s/kernels"
)

// sparseCheckpoint writes a bfloat16 checkpoint of cfg whose weights are zero and take no room on the disk; bits overwrites elements of the
// embedding. It returns the path of the weights.
func sparseCheckpoint(t *testing.T, dir string, cfg *Config, bits map[int64]uint16) string {
	t.Helper()
	var ts []source
	total := int64(0)
	for _, spec := range cfg.Tensors() {
		ts = append(ts, source{name: spec.Name, dtype: "BF16", shape: spec.Shape, bytes: 2 * spec.Elems()})
		total += 2 * spec.Elems()
	}
	head, err := encodeHeader(ts, nil)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, weightsFile)
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	_, err = f.Write(head)
	err = errors.Join(err, f.Truncate(int64(len(head))+total), os.WriteFile(filepath.Join(dir, configFile), cfg.JSON(), 0o644))
	for at, b := range bits { // the embedding is the first tensor
		_, e := f.WriteAt([]byte{byte(b), byte(b >> 8)}, int64(len(head))+2*at)
		err = errors.Join(err, e)
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// TestLoadInBoundedMemory loads, hashes and saves a checkpoint of 67 million parameters on the device without memory: everything that
// is allocated on the way, freed or not, stays below half the bound of Load's comment, and next to no page of the mapping stays
// resident. Whole tensors would take 134 MB in bfloat16 and 268 MB in float32.
func TestLoadInBoundedMemory(t *testing.T) {
	const bound = 64 << 20
	cfg := smallConfig(true)
	cfg.VocabSize, cfg.Hidden = 1<<20, 64
	dir := t.TempDir()
	path := sparseCheckpoint(t, dir, cfg, map[int64]uint16{1: 0x3f80})
	dev, err := kernels.Open("null", kernels.Options{})
	if err != nil {
		t.Fatal(err)
	}
	allocated := func(what string, do func()) {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		do()
		runtime.ReadMemStats(&after)
		if n := after.TotalAlloc - before.TotalAlloc; n > bound {
			t.Errorf("%s allocates %d MiB, bound %d", what, n>>20, bound>>20)
		}
	}
	c, err := OpenCheckpoint(dir)
	if err != nil {
		t.Fatal(err)
	}
	p, err := newParams(cfg.Tensors(), dev, LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.free()
	allocated("load", func() { err = p.load(c, true) })
	if err != nil {
		t.Fatal(err)
	}
	if n := residentKiB(t, path); n > 1024 {
		t.Errorf("%d KiB of the file stay resident", n)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	allocated("sha256", func() { _, err = p.sha256() })
	if err != nil {
		t.Fatal(err)
	}
	allocated("save", func() {
		err = p.source(p.entries[0], "x", "BF16", true).write(io.Discard)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// residentKiB is how much of a mapped file counts as this process's memory.
func residentKiB(t *testing.T, path string) (kib int) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	found, inside := false, false
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) >= 5 && strings.Contains(f[0], "-") {
			inside = len(f) == 6 && f[5] == path
			found = found || inside
		}
		var n int
		if _, err := fmt.Sscanf(line, "Rss: %d kB", &n); err == nil && inside {
			kib += n
		}
	}
	if !found {
		t.Fatalf("%s is not mapped", path)
	}
	return kib
}

// TestPiecesOfATensor checks the elements at the borders of pieces, and that the first of several bad elements is named with its place in
// the tensor whichever worker meets it.
func TestPiecesOfATensor(t *testing.T) {
	dev := openCPU(t)
	cfg := smallConfig(true)
	cfg.VocabSize = 1 << 18 // times 8: two pieces
	const inf, one, two = 0x7f80, 0x3f80, 0x4000
	m, err := loadDir(t, dev, cfg, map[int64]uint16{0: one, loadPiece - 1: two, loadPiece: one, 2*loadPiece - 1: two})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	v, err := m.Params.ReadF32(Weights, EmbedName)
	if err != nil {
		t.Fatal(err)
	}
	want := make([]float32, len(v))
	want[0], want[loadPiece-1], want[loadPiece], want[2*loadPiece-1] = 1, 2, 1, 2
	if !slices.Equal(v, want) {
		t.Error("values moved")
	}
	_, err = loadDir(t, dev, cfg, map[int64]uint16{loadPiece + 11: inf, 2*loadPiece - 1: inf})
	if !errors.Is(err, ErrNonFinite) || !strings.Contains(err.Error(), fmt.Sprintf("%q[%d 3] = +Inf", EmbedName, (loadPiece+11)/8)) {
		t.Errorf("error %v", err)
	}
}

func loadDir(t *testing.T, dev *kernels.Device, cfg *Config, bits map[int64]uint16) (*Model, error) {
	t.Helper()
	dir := t.TempDir()
	sparseCheckpoint(t, dir, cfg, bits)
	return Load(dir, dev, LoadOptions{})
}

// TestDrawIsSequential checks that drawing in pieces and side by side gives the numbers that one pass over each tensor gives.
func TestDrawIsSequential(t *testing.T) {
	dev := openCPU(t)
	cfg := smallConfig(false)
	cfg.VocabSize = 3<<17 + 5 // times 8: three pieces and a rest
	m, err := NewRandom(cfg, dev, 7, LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for _, e := range m.Params.Entries() {
		want := make([]float32, e.Len)
		initial(e, 7, cfg.InitRange)(want)
		if got, err := m.Params.ReadF32(Weights, e.Name); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s differs (%v)", e.Name, err)
		}
	}
}
