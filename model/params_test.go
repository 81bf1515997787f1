package model

import (
	"bytes"
	"errors"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"harness-s/kernels"
)

func openCPU(t *testing.T) *kernels.Device {
	t.Helper()
	dev, err := kernels.Open("cpu", kernels.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	})
	return dev
}

func TestParamsLayout(t *testing.T) {
	dev := openCPU(t)
	cfg := smallConfig(false)
	m, err := NewRandom(cfg, dev, 1, LoadOptions{Train: true})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	specs := cfg.Tensors()
	end := int64(0)
	for i, e := range m.Params.Entries() {
		if e.Name != specs[i].Name || e.Offset%kernels.StateBlock != 0 || e.Offset < end || e.Len != specs[i].Elems() {
			t.Errorf("entry %+v", e)
		}
		if got := m.Params.Ptr(Grads, e.Name) - m.Params.Base(Grads); got != kernels.Ptr(4*e.Offset) {
			t.Errorf("%s lies at byte %d", e.Name, got)
		}
		end = e.Offset + e.Len
	}
	if m.Params.Elems() < end || m.Params.Elems()%kernels.StateBlock != 0 {
		t.Errorf("arena of %d elements for %d", m.Params.Elems(), end)
	}
}

func TestInitialValues(t *testing.T) {
	dev := openCPU(t)
	sums := map[uint64]string{}
	for _, seed := range []uint64{1, 1, 2} {
		m, err := NewRandom(smallConfig(true), dev, seed, LoadOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range m.Params.Entries() {
			v, err := m.Params.ReadF32(Weights, e.Name)
			if err != nil {
				t.Fatal(err)
			}
			lo, hi := slices.Min(v), slices.Max(v)
			switch {
			case strings.HasSuffix(e.Name, "A_log"):
				if hi > float32(math.Log(16)) {
					t.Errorf("%s up to %g", e.Name, hi)
				}
			case strings.HasSuffix(e.Name, "dt_bias"):
				if lo < float32(math.Log(math.Expm1(1e-3)))-1e-4 || hi > float32(math.Log(math.Expm1(0.1)))+1e-4 {
					t.Errorf("%s in %g..%g", e.Name, lo, hi)
				}
			case strings.HasSuffix(e.Name, "conv1d.weight"):
				if lo < -0.5 || hi > 0.5 || lo >= 0 || hi <= 0 {
					t.Errorf("%s in %g..%g, want within +-0.5", e.Name, lo, hi)
				}
			case strings.HasSuffix(e.Name, "linear_attn.norm.weight"):
				if lo != 1 || hi != 1 {
					t.Errorf("%s in %g..%g, want 1", e.Name, lo, hi)
				}
			case strings.Contains(e.Name, "norm"):
				if lo != 0 || hi != 0 {
					t.Errorf("%s in %g..%g, want 0", e.Name, lo, hi)
				}
			default:
				if lo >= 0 || hi <= 0 || hi > 0.2 || lo < -0.2 {
					t.Errorf("%s in %g..%g", e.Name, lo, hi)
				}
			}
		}
		sum, err := m.WeightsSHA256()
		if err != nil {
			t.Fatal(err)
		}
		if old := sums[seed]; old != "" && old != sum {
			t.Errorf("seed %d gave %s and %s", seed, old, sum)
		}
		sums[seed] = sum
		m.Close()
	}
	if sums[1] == sums[2] {
		t.Error("two seeds gave the same weights")
	}
}

func TestSaveLoad(t *testing.T) {
	dev := openCPU(t)
	cfg := smallConfig(true)
	cfg.VocabSize = 300
	m, err := NewRandom(cfg, dev, 7, LoadOptions{Train: true})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	tok, err := TrainBPE([]string{"some text, some more text"}, 280, QwenSpecials()[:3])
	if err != nil {
		t.Fatal(err)
	}
	m.Files["tokenizer.json"] = tok
	dir := filepath.Join(t.TempDir(), "a", "model")
	if err := m.Save(dir); err != nil {
		t.Fatal(err)
	}
	if err := m.Save(dir); err != nil { // over an existing directory
		t.Fatal(err)
	}
	want, err := m.WeightsSHA256()
	if err != nil {
		t.Fatal(err)
	}
	for _, load := range []func() (*Model, error){
		func() (*Model, error) { return Load(dir, dev, LoadOptions{}) },
		func() (*Model, error) { return LoadFS(os.DirFS(dir), dev, LoadOptions{}) },
	} {
		got, err := load()
		if err != nil {
			t.Fatal(err)
		}
		sum, err := got.WeightsSHA256()
		if err != nil || sum != want {
			t.Errorf("weights %s, want %s (%v)", sum, want, err)
		}
		if got.Tok == nil || !bytes.Equal(got.Tok.JSON(), tok) || got.Params.Has(Grads) || got.Params.Base(MomentM) != 0 {
			t.Errorf("loaded model: tokenizer %v, gradients %v", got.Tok != nil, got.Params.Has(Grads))
		}
		if _, err := got.Params.State(Grads); err == nil {
			t.Error("absent arena was read")
		}
		got.Close()
	}
	wide, err := Load(dir, dev, LoadOptions{DType: kernels.F64})
	if err != nil {
		t.Fatal(err)
	}
	defer wide.Close()
	a, err := m.Params.ReadF32(Weights, EmbedName)
	if err != nil {
		t.Fatal(err)
	}
	b, err := wide.Params.ReadF32(Weights, EmbedName)
	if err != nil || !slices.Equal(a, b) {
		t.Errorf("float64 copy differs (%v)", err)
	}
}

func TestState(t *testing.T) {
	dev := openCPU(t)
	var ms [2]*Model
	for i := range ms {
		m, err := NewRandom(smallConfig(true), dev, uint64(i), LoadOptions{Train: true})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		ms[i] = m
	}
	if err := ms[0].Params.WriteF32(MomentM, NormName, make([]float32, 8)); err != nil {
		t.Fatal(err)
	}
	for _, k := range []StateKind{Weights, MomentM, MomentV} {
		b, err := ms[0].Params.State(k)
		if err != nil {
			t.Fatal(err)
		}
		if int64(len(b)) != 4*ms[0].Config.NumParams() {
			t.Errorf("%s: %d bytes", k, len(b))
		}
		if err := ms[1].Params.SetState(k, b); err != nil {
			t.Fatal(err)
		}
		if err := ms[1].Params.SetState(k, b[1:]); err == nil {
			t.Errorf("%s: short state was accepted", k)
		}
	}
	a, aerr := ms[0].WeightsSHA256()
	b, berr := ms[1].WeightsSHA256()
	if a != b || aerr != nil || berr != nil {
		t.Errorf("restored weights differ: %s %s", a, b)
	}
	if err := ms[0].Params.WriteF32(Weights, "no", nil); err == nil {
		t.Error("unknown tensor was written")
	}
	if err := ms[0].Params.WriteF32(Weights, NormName, nil); err == nil {
		t.Error("wrong length was written")
	}
}

func TestNonFiniteWeightsAreNamed(t *testing.T) {
	dev := openCPU(t)
	cfg := smallConfig(true)
	ts := checkpointTensors(cfg, "")
	copy(ts[0].Data[4*(3*8+2):], f32Bytes(float32(math.NaN())))
	copy(ts[1].Data, f32Bytes(float32(math.Inf(-1))))
	dir := filepath.Join(t.TempDir(), "x")
	if err := WriteCheckpoint(dir, cfg.JSON(), ts); err != nil {
		t.Fatal(err)
	}
	_, err := Load(dir, dev, LoadOptions{})
	if !errors.Is(err, ErrNonFinite) || !strings.Contains(err.Error(), `"model.embed_tokens.weight"[3 2] = NaN`) || !strings.Contains(err.Error(), ts[1].Name) {
		t.Errorf("got %v", err)
	}
	m, err := Load(dir, dev, LoadOptions{SkipFiniteCheck: true})
	if err != nil {
		t.Fatal(err)
	}
	m.Close()
}
