package model

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"harness-s/kernels"
)

var updateProgram = flag.Bool("update-program", false, "write the golden program text again")

// execConfig is a small model with every op and odd sizes: 3 value heads per key head when wide, GQA, both layer types.
func execConfig(layers ...LayerType) *Config {
	if len(layers) == 0 {
		layers = []LayerType{LinearAttention, FullAttention, LinearAttention}
	}
	return &Config{
		VocabSize: 61, Hidden: 24, Intermediate: 40, NumLayers: len(layers), NumHeads: 4, NumKVHeads: 2, HeadDim: 12, RotaryDim: 4,
		RopeTheta: 1e4, RMSEps: 1e-6, LinKeyHeads: 2, LinKeyDim: 8, LinValueHeads: 4, LinValueDim: 10, ConvKernel: 4,
		LayerTypes: layers, TieEmbeddings: true, MaxPositions: 4096, EOS: []int32{0}, InitRange: 0.2,
	}
}

func execDevice(t testing.TB, threads int) *kernels.Device {
	t.Helper()
	d, err := kernels.Open("cpu", kernels.Options{Threads: threads})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// randomModel has random values in every tensor, the norms too, so that no gradient vanishes by accident.
func randomModel(t testing.TB, d *kernels.Device, cfg *Config, dt kernels.DType) *Model {
	t.Helper()
	m, err := NewRandom(cfg, d, 7, LoadOptions{DType: dt, Train: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	rng := rand.New(rand.NewPCG(11, 13))
	for _, e := range m.Params.Entries() {
		v, err := m.Params.ReadF32(Weights, e.Name)
		if err != nil {
			t.Fatal(err)
		}
		for i := range v {
			v[i] += float32(0.1 * rng.NormFloat64())
		}
		if err := m.Params.WriteF32(Weights, e.Name, v); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

func newExec(t testing.TB, m *Model, o ExecOptions) *Exec {
	t.Helper()
	if o.MaxRows == 0 {
		o.MaxRows = 512
	}
	e, err := NewExec(m, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// tree describes segments as (length, parent) and fills in positions and random tokens. Every row but a sequence's very first is a target of
// the row before it; the last row of a segment with children predicts each child's first token.
func tree(seed uint64, vocab int, segs ...[2]int32) *Batch {
	rng := rand.New(rand.NewPCG(seed, 99))
	b := &Batch{}
	start := []int32{}
	for _, s := range segs {
		pos := int32(0)
		if s[1] >= 0 {
			p := b.Segments[s[1]]
			pos = p.Pos + p.Len
		}
		start = append(start, int32(len(b.IDs)))
		b.Segments = append(b.Segments, Segment{Len: s[0], Parent: s[1], Pos: pos})
		for range s[0] {
			b.IDs = append(b.IDs, int32(rng.IntN(vocab)))
		}
	}
	for s, seg := range b.Segments {
		for i := int32(1); i < seg.Len; i++ {
			b.Rows = append(b.Rows, start[s]+i-1)
			b.Targets = append(b.Targets, b.IDs[start[s]+i])
		}
		last := start[s] + seg.Len - 1
		for c, child := range b.Segments {
			if child.Parent == int32(s) {
				b.Rows = append(b.Rows, last)
				b.Targets = append(b.Targets, b.IDs[start[c]])
			}
		}
	}
	if len(b.Rows) == 0 {
		b.Rows, b.Targets = []int32{0}, []int32{1}
	}
	return b
}

// coefficients are exact in float32.
func coefficients(seed uint64, n int) []float32 {
	rng := rand.New(rand.NewPCG(seed, 5))
	v := make([]float32, n)
	for i := range v {
		v[i] = float32(rng.IntN(129)-64) / 64
	}
	return v
}

func must[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// reals downloads n values at p in the program's dtype.
func (e *Exec) reals(t testing.TB, p kernels.Ptr, n int64) []float64 {
	t.Helper()
	out := make([]float64, n)
	if e.m.Params.DType == kernels.F64 {
		e.stream.Download(bytesOf(out), p)
	} else {
		v := make([]float32, n)
		e.stream.Download(bytesOf(v), p)
		for i, x := range v {
			out[i] = float64(x)
		}
	}
	check(t, e.stream.Sync())
	return out
}

// gradients of all parameters by name.
func (e *Exec) gradients(t testing.TB) map[string][]float64 {
	t.Helper()
	out := map[string][]float64{}
	for _, p := range e.m.Params.Entries() {
		out[p.Name] = e.reals(t, e.m.Params.Ptr(Grads, p.Name), p.Len)
	}
	return out
}

// train runs forward and backward from cleared gradients.
func (e *Exec) train(t testing.TB, b *Batch, dLogP, dEnt []float32) (logp []float64, grads map[string][]float64) {
	t.Helper()
	check(t, e.ZeroGrad())
	_, err := e.Forward(b)
	check(t, err)
	logp = e.reals(t, e.address(e.prog.logp), int64(len(b.Rows)))
	check(t, e.Backward(dLogP, dEnt))
	return logp, e.gradients(t)
}

// relDiff is |a-b| / max(|b|, floor) in the Euclidean norm.
func relDiff(a, b []float64, floor float64) float64 {
	var d, n float64
	for i := range b {
		d += (a[i] - b[i]) * (a[i] - b[i])
		n += b[i] * b[i]
	}
	return math.Sqrt(d) / max(math.Sqrt(n), floor)
}

func compareGrads(t testing.TB, what string, got, want map[string][]float64, tol float64) {
	t.Helper()
	for name, w := range want {
		if d := relDiff(got[name], w, 1e-6); !(d <= tol) {
			t.Errorf("%s: gradient of %s differs by %.3g (relative), want <= %g", what, name, d, tol)
		}
	}
}

func sameBits(t testing.TB, what string, got, want map[string][]float64) {
	t.Helper()
	for name, w := range want {
		for i := range w {
			if math.Float64bits(got[name][i]) != math.Float64bits(w[i]) {
				t.Errorf("%s: gradient of %s[%d] = %v, want the same bits as %v", what, name, i, got[name][i], w[i])
				break
			}
		}
	}
}

func golden(t testing.TB, path, got string, update bool) {
	t.Helper()
	if update {
		check(t, os.WriteFile(path, []byte(got), 0o644))
		return
	}
	want, err := os.ReadFile(path)
	check(t, err)
	if string(want) != got {
		t.Errorf("%s differs; run the test with -update-program and review the change\n%s", path, firstDiff(string(want), got))
	}
}

func firstDiff(a, b string) string {
	i := 0
	for i < len(a) && i < len(b) && a[i] == b[i] {
		i++
	}
	from := max(0, i-80)
	return fmt.Sprintf("want ...%.200q\ngot  ...%.200q", a[from:], b[from:])
}
