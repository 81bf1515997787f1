package model

import (
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// fixtures are the committed parity fixtures and, where a clone stands beside shared data, those too.
func fixtures(t *testing.T) []string {
	t.Helper()
	var dirs []string
	for _, pattern := range []string{"testdata/reference/*", "../../shared/data/parity/*"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		dirs = append(dirs, found...)
	}
	if len(dirs) < 6 {
		t.Fatalf("found %d fixtures, expected at least the 6 committed ones", len(dirs))
	}
	return dirs
}

func TestParityWithTheReference(t *testing.T) {
	for _, dir := range fixtures(t) {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			r, err := RunParity(dir, execDevice(t, 0))
			if err != nil {
				t.Fatal(err)
			}
			if !r.OK {
				t.Errorf("%s", strings.Join(r.Failures, "; "))
			}
		})
	}
}

// TestParityNoticesCorruption changes one weight, one expected gradient value and one greedy token.
func TestParityNoticesCorruption(t *testing.T) {
	const src = "testdata/reference/threeper"
	for _, c := range []struct {
		name, file, tensor string
		change             func(data []byte)
		want               string
	}{
		{"weight", "model.safetensors", "model.layers.1.mlp.up_proj.weight", addF32(0.05), "logits_max_abs"},
		{"gradient", "expect.safetensors", "grad.model.layers.3.self_attn.k_norm.weight", scaleF32(1.5), "grad_max_rel (model.layers.3.self_attn.k_norm.weight)"},
		{"token", "expect.safetensors", "greedy.tokens", func(b []byte) { b[8*20] ^= 1 }, "greedy token 20"},
		{"NaN", "expect.safetensors", "logits", func(b []byte) { binary.LittleEndian.PutUint32(b, math.Float32bits(float32(math.NaN()))) }, "logits_max_abs is NaN"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			for _, n := range []string{"config.json", "model.safetensors", "expect.safetensors"} {
				b, err := os.ReadFile(filepath.Join(src, n))
				if err != nil {
					t.Fatal(err)
				}
				if n == c.file {
					f, err := ParseSafetensors(b)
					if err != nil {
						t.Fatal(err)
					}
					x, err := f.Tensor(c.tensor) // a view of b
					if err != nil {
						t.Fatal(err)
					}
					c.change(x.Data)
				}
				if err := os.WriteFile(filepath.Join(dir, n), b, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			r, err := RunParity(dir, execDevice(t, 0))
			if err != nil {
				t.Fatal(err)
			}
			if r.OK || !slices.ContainsFunc(r.Failures, func(s string) bool { return strings.HasPrefix(s, c.want) }) {
				t.Errorf("ok %v, failures %q: want one that starts with %q", r.OK, r.Failures, c.want)
			}
		})
	}
}

// addF32 adds to the first value, scaleF32 multiplies it.
func addF32(d float32) func([]byte) {
	return func(b []byte) {
		v := math.Float32frombits(binary.LittleEndian.Uint32(b))
		binary.LittleEndian.PutUint32(b, math.Float32bits(v+d))
	}
}

func scaleF32(k float32) func([]byte) {
	return func(b []byte) {
		v := math.Float32frombits(binary.LittleEndian.Uint32(b))
		binary.LittleEndian.PutUint32(b, math.Float32bits(v*k))
	}
}

// A NaN is never hidden by a finite element after it, nor a missing vector by an empty loop.
func TestDifferencesKeepNaN(t *testing.T) {
	nan := float32(math.NaN())
	for _, v := range []float64{MaxAbsDiff([]float32{nan, 1}, []float32{0, 0}), MaxAbsDiff(nil, []float32{1}),
		RelNorm([]float32{nan, 1}, []float32{1, 1}), RelNorm([]float32{1}, nil)} {
		if !math.IsNaN(v) {
			t.Errorf("%g, want NaN", v)
		}
	}
	if d := MaxAbsDiff([]float32{1, 5}, []float32{3, 4}); d != 2 {
		t.Errorf("largest difference %g, want 2", d)
	}
}
