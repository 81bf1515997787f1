package model

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"harness-s/kernels"
)

// TestLikeTotals compares the four sizes with the published totals (model.md 1.4 and 1.5).
func TestLikeTotals(t *testing.T) {
	for _, c := range []struct {
		name            string
		params, bytes   int64
		tensors, linear int
		full            int
	}{
		{"0.8b", 752393024, 1504791232, 320, 18, 6},
		{"2b", 1881825088, 3763655360, 320, 18, 6},
		{"4b", 4205751296, 8411510272, 426, 24, 8},
		{"9b", 8953803264, 17907614208, 427, 24, 8},
	} {
		text, cfg, err := Like(c.name, 0, "BF16")
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if p, b, n := cfg.NumParams(), randomBytes(cfg, "BF16"), len(cfg.Tensors()); p != c.params || b != c.bytes || n != c.tensors {
			t.Errorf("%s: %d parameters, %d bytes, %d tensors; published %d, %d, %d", c.name, p, b, n, c.params, c.bytes, c.tensors)
		}
		if cfg.NumLinear() != c.linear || cfg.NumFull() != c.full || cfg.RotaryDim != 64 || cfg.TieEmbeddings != (c.name != "9b") {
			t.Errorf("%s: %d linear and %d full layers, rotary dim %d, tied %v", c.name, cfg.NumLinear(), cfg.NumFull(), cfg.RotaryDim, cfg.TieEmbeddings)
		}
		var top map[string]any
		if err := json.Unmarshal(text, &top); err != nil {
			t.Fatal(err)
		}
		_, hidden := top["hidden_size"]
		inner := top["text_config"].(map[string]any)
		if hidden || inner["dtype"] != "bfloat16" || top["model_type"] != "qwen3_5" {
			t.Errorf("%s: config.json is not in the published form: %s", c.name, text)
		}
	}
}

func TestLikeLayers(t *testing.T) {
	_, cfg, err := Like("4b", 8, "F32")
	if err != nil || cfg.NumLayers != 8 || cfg.NumFull() != 2 || cfg.LayerTypes[3] != FullAttention || cfg.LayerTypes[7] != FullAttention {
		t.Errorf("4b with 8 layers: %+v, %v", cfg, err)
	}
	for _, c := range []struct {
		name   string
		layers int
		dtype  string
		want   string
	}{
		{"4b", 33, "F32", "layers = 33"}, {"4b", 36, "F32", "from 4 to 32"}, {"2b", 6, "F32", "multiple of 4"}, {"2b", -4, "F32", "layers = -4"},
		{"3b", 4, "F32", `"3b"`}, {"2b", 4, "F16", `"F16"`},
	} {
		_, _, err := Like(c.name, c.layers, c.dtype)
		var e *Error
		if !errors.As(err, &e) || e.Hint == "" || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: error %v, want %q and a hint", c, err, c.want)
		}
	}
}

// TestWriteRandom checks that the streamed file holds the values of NewRandom and the announced number of bytes.
func TestWriteRandom(t *testing.T) {
	dev := openCPU(t)
	cfg := TinyConfig()
	cfg.TieEmbeddings, cfg.VocabSize = false, 3000 // more values than one run, and a separate head
	want, err := NewRandom(cfg, dev, 7, LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer want.Close()
	for _, dtype := range []string{"F32", "BF16"} {
		dir := filepath.Join(t.TempDir(), "new")
		var done, total int64
		o := RandomOptions{Seed: 7, DType: dtype, Progress: func(d, n int64) { done, total = d, n }}
		if err := WriteRandom(context.Background(), dir, cfg, cfg.JSON(), o); err != nil {
			t.Fatal(err)
		}
		size, err := RandomSize(cfg, cfg.JSON(), dtype)
		if err != nil {
			t.Fatal(err)
		}
		if onDisk := dirBytes(t, dir); onDisk != size || done != total || total != randomBytes(cfg, dtype) {
			t.Errorf("%s: %d bytes on disk, announced %d; progress ended at %d of %d", dtype, onDisk, size, done, total)
		}
		got, err := Load(dir, dev, LoadOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range cfg.Tensors() {
			a, err := want.Params.ReadF32(Weights, spec.Name)
			if err != nil {
				t.Fatal(err)
			}
			b, err := got.Params.ReadF32(Weights, spec.Name)
			if err != nil {
				t.Fatal(err)
			}
			for k := range a {
				if dtype == "BF16" && !spec.KeepF32 {
					a[k] = math.Float32frombits(uint32(kernels.ToBF16(a[k])) << 16)
				}
				if a[k] != b[k] {
					t.Fatalf("%s: %s[%d] = %v, want %v", dtype, spec.Name, k, b[k], a[k])
				}
			}
		}
		got.Close()
		if err := WriteRandom(context.Background(), dir, cfg, cfg.JSON(), o); err == nil || !strings.Contains(err.Error(), "not empty") {
			t.Errorf("a second write into the directory: %v", err)
		}
	}
}

// TestWriteRandomCancelled checks that an interrupted write leaves nothing.
func TestWriteRandomCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	dir := filepath.Join(t.TempDir(), "new")
	cfg := TinyConfig()
	err := WriteRandom(ctx, dir, cfg, cfg.JSON(), RandomOptions{Seed: 1, DType: "F32", Progress: func(d, n int64) {
		if d > n/2 {
			cancel()
		}
	}})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want canceled", err)
	}
	if entries, err := os.ReadDir(filepath.Dir(dir)); err != nil || len(entries) != 0 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

func dirBytes(t *testing.T, dir string) int64 {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var n int64
	for _, e := range entries {
		i, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		n += i.Size()
	}
	return n
}

// TestRandomSourcesAligned checks that every tensor starts at a multiple of its element size, with odd sizes too.
func TestRandomSourcesAligned(t *testing.T) {
	cfg := TinyConfig()
	cfg.Hidden, cfg.Intermediate, cfg.VocabSize = 129, 385, 1023
	_, ts, err := randomSources(cfg, "BF16")
	if err != nil {
		t.Fatal(err)
	}
	at := int64(0)
	for _, s := range ts {
		if size := int64(dtypeBytes(s.dtype)); at%size != 0 {
			t.Errorf("%s: %s at byte %d", s.name, s.dtype, at)
		}
		at += s.bytes
	}
	if len(ts) != len(cfg.Tensors()) {
		t.Errorf("%d tensors, want %d", len(ts), len(cfg.Tensors()))
	}
}
