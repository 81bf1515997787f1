package model

import (
	"errors"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"harness-s/kernels"
)

// recipes are all storage forms of an optimiser in float32.
func recipes() map[string]Recipe {
	out := map[string]Recipe{}
	for name, s := range map[string]kernels.State{"f32": kernels.StateF32, "bf16": kernels.StateBF16, "8bit": kernels.StateU8} {
		out[name] = Recipe{States: s, Seed: 3}
		out[name+"+hilo"] = Recipe{States: s, Seed: 3, HiLo: true}
	}
	return out
}

// moments are the arenas that a checkpoint stores beside the weights.
func (r Recipe) moments() []StateKind {
	return slices.DeleteFunc(r.kinds(true), func(k StateKind) bool { return k == Weights || k == Grads || k == WeightsLo })
}

// learn makes n steps on batches that depend on the step alone.
func learn(t *testing.T, m *Model, n int) {
	t.Helper()
	e := newExec(t, m, ExecOptions{MaxRows: 64})
	for range n {
		b := tree(uint64(m.Params.OptStep), m.Config.VocabSize, [2]int32{20, -1}, [2]int32{9, 0}, [2]int32{11, 0})
		check(t, e.ZeroGrad())
		must[*Output](t)(e.Forward(b))
		check(t, e.Backward(coefficients(uint64(m.Params.OptStep), len(b.Rows)), nil))
		norm := must[float64](t)(e.GradNorm())
		check(t, e.Step(Hyper{LR: 1e-3, Beta1: 0.9, Beta2: 0.98, Eps: 1e-8, Decay: 0.1, ClipNorm: 1, GradNorm: norm}))
	}
}

// everything is all that a run with a recipe holds between steps.
func everything(t *testing.T, m *Model, r Recipe) []byte {
	t.Helper()
	var out []byte
	for _, k := range r.kinds(true) {
		if k != Grads {
			out = append(out, must[[]byte](t)(m.Params.State(k))...)
		}
	}
	return out
}

// TestRecipesResume: six steps are four steps, a save of the model and the moments, a load and two steps, bit for bit, for every recipe
// and on any number of threads.
func TestRecipesResume(t *testing.T) {
	for name, r := range recipes() {
		t.Run(name, func(t *testing.T) {
			start := func(threads int) *Model {
				m := must[*Model](t)(NewRandom(execConfig(), execDevice(t, threads), 7, LoadOptions{Train: true, Optim: r}))
				t.Cleanup(m.Close)
				return m
			}
			whole, part := start(2), start(1)
			learn(t, whole, 6)
			learn(t, part, 4)
			dir := filepath.Join(t.TempDir(), "m")
			check(t, part.Save(dir))
			again := must[*Model](t)(Load(dir, execDevice(t, 2), LoadOptions{Train: true, Optim: r}))
			t.Cleanup(again.Close)
			for _, k := range r.moments() {
				check(t, again.Params.SetState(k, must[[]byte](t)(part.Params.State(k))))
			}
			again.Params.OptStep = 4
			if !slices.Equal(everything(t, again, r), everything(t, part, r)) {
				t.Error("save and load change bits")
			}
			learn(t, again, 2)
			if !slices.Equal(everything(t, again, r), everything(t, whole, r)) {
				t.Error("a resumed run differs from one that was not interrupted")
			}
			if a, b := must[string](t)(whole.WeightsSHA256()), must[string](t)(again.WeightsSHA256()); a != b {
				t.Errorf("weights %s and %s", a, b)
			}
			padding(t, whole, r)
		})
	}
}

// padding checks that what lies between the tensors of an arena stays zero.
func padding(t *testing.T, m *Model, r Recipe) {
	t.Helper()
	p := m.Params
	for _, k := range r.kinds(true) {
		b := make([]byte, p.arenaBytes(k))
		p.stream.Download(b, p.Base(k))
		check(t, p.stream.Sync())
		for _, e := range p.entries {
			at := p.offset(k, e)
			clear(b[at : at+p.bytes(k, e, e.Len)])
		}
		if i := slices.IndexFunc(b, func(x byte) bool { return x != 0 }); i >= 0 {
			t.Errorf("%s: byte %d of the padding is %d", k, i, b[i])
		}
	}
}

// TestHiLoIsTheFloat32Master: on the same gradients, split weights hold what float32 weights hold, bit for bit; the arena that the forward
// pass reads has their nearest bfloat16, but for A_log and the gated norm, which stay whole.
func TestHiLoIsTheFloat32Master(t *testing.T) {
	dev, rng := execDevice(t, 2), rand.New(rand.NewPCG(5, 6))
	var ms [2]*Model
	for i := range ms {
		ms[i] = must[*Model](t)(NewRandom(execConfig(), dev, 7, LoadOptions{Train: true, Optim: Recipe{HiLo: i == 1}}))
		t.Cleanup(ms[i].Close)
	}
	es := [2]*Exec{newExec(t, ms[0], ExecOptions{}), newExec(t, ms[1], ExecOptions{})}
	for range 5 {
		for _, e := range ms[0].Params.Entries() {
			g := make([]float32, e.Len)
			for i := range g {
				g[i] = float32(rng.NormFloat64())
			}
			for _, m := range ms {
				check(t, m.Params.WriteF32(Grads, e.Name, g))
			}
		}
		for _, e := range es {
			check(t, e.Step(Hyper{LR: 1e-4, Beta1: 0.9, Beta2: 0.98, Eps: 1e-8, Decay: 0.1}))
		}
	}
	for _, e := range ms[0].Params.Entries() {
		want := must[[]float32](t)(ms[0].Params.ReadF32(Weights, e.Name))
		if got := must[[]float32](t)(ms[1].Params.Master(e.Name)); !slices.Equal(got, want) {
			t.Errorf("%s: the joined master differs from float32 weights", e.Name)
		}
		whole := strings.HasSuffix(e.Name, "A_log") || strings.HasSuffix(e.Name, "linear_attn.norm.weight")
		for i, x := range must[[]float32](t)(ms[1].Params.ReadF32(Weights, e.Name)) {
			hi, _ := kernels.SplitF32(want[i])
			if near := kernels.FromBF16(hi); !whole && x != near || whole && x != want[i] {
				t.Errorf("%s[%d]: the arena holds %v, master %v, nearest bfloat16 %v", e.Name, i, x, want[i], near)
				break
			}
		}
	}
	if a, b := must[string](t)(ms[0].WeightsSHA256()), must[string](t)(ms[1].WeightsSHA256()); a != b {
		t.Errorf("hash of split weights is %s, of their masters %s", b, a)
	}
}

// TestHiLoLoads: a float32 checkpoint loses nothing when its weights are split, one in bfloat16 leaves the lower halves zero, and without
// Train only the upper halves are held. Values that no bfloat16 is near, subnormals and the largest float32 come through load, save and load.
func TestHiLoLoads(t *testing.T) {
	dev, dir := execDevice(t, 2), t.TempDir()
	m := randomModel(t, dev, execConfig(), kernels.F32)
	odd := []float32{math.MaxFloat32, -math.MaxFloat32, math.SmallestNonzeroFloat32, -0x1p-140, float32(math.Copysign(0, -1)), 1 + 0x1p-8, -1 - 0x1p-8, 0.1}
	norm := make([]float32, 24)
	copy(norm, odd)
	check(t, m.Params.WriteF32(Weights, NormName, norm))
	want := must[string](t)(m.WeightsSHA256())
	a, b, c := filepath.Join(dir, "a"), filepath.Join(dir, "b"), filepath.Join(dir, "c")
	check(t, m.Save(a))
	split := must[*Model](t)(Load(a, dev, LoadOptions{Train: true, Optim: Recipe{HiLo: true}}))
	t.Cleanup(split.Close)
	if got := must[string](t)(split.WeightsSHA256()); got != want {
		t.Errorf("split weights are %s, the checkpoint's %s", got, want)
	}
	if v := must[[]float32](t)(split.Params.Master(NormName)); !slices.Equal(v, norm) || !math.Signbit(float64(v[4])) {
		t.Errorf("norm %v, want %v", v, norm)
	}
	check(t, split.Save(b))
	again := must[*Model](t)(Load(b, dev, LoadOptions{}))
	t.Cleanup(again.Close)
	if must[string](t)(again.WeightsSHA256()) != want {
		t.Error("saved masters differ")
	}
	upper := must[*Model](t)(Load(a, dev, LoadOptions{Optim: Recipe{HiLo: true}}))
	t.Cleanup(upper.Close)
	for _, e := range split.Params.Entries() {
		if !slices.Equal(must[[]float32](t)(upper.Params.ReadF32(Weights, e.Name)), must[[]float32](t)(split.Params.ReadF32(Weights, e.Name))) {
			t.Errorf("%s: upper halves without Train differ from those with it", e.Name)
		}
	}
	check(t, m.Params.WriteF32(Weights, NormName, make([]float32, 24)))
	check(t, m.SaveAs(c, SaveOptions{DType: SaveStored}))
	bf := must[*Model](t)(Load(c, dev, LoadOptions{Train: true, Optim: Recipe{HiLo: true}}))
	t.Cleanup(bf.Close)
	if lo := must[[]byte](t)(bf.Params.State(WeightsLo)); slices.ContainsFunc(lo, func(x byte) bool { return x != 0 }) {
		t.Error("a bfloat16 checkpoint leaves lower halves")
	}
}

// TestRecipeBytes: each arena has the bytes per parameter that the recipe promises, scales one float32 per begun block of a tensor.
func TestRecipeBytes(t *testing.T) {
	dev, cfg := execDevice(t, 1), execConfig()
	n, blocks := cfg.NumParams(), int64(0)
	for _, s := range cfg.Tensors() {
		blocks += (s.Elems() + kernels.StateBlock - 1) / kernels.StateBlock
	}
	for name, r := range recipes() {
		m := must[*Model](t)(NewRandom(cfg, dev, 7, LoadOptions{Train: true, Optim: r}))
		moment := map[kernels.State]int64{kernels.StateF32: 4 * n, kernels.StateBF16: 2 * n, kernels.StateU8: n}[r.States]
		want := map[StateKind]int64{Weights: 4 * n, Grads: 4 * n, MomentM: moment, MomentV: moment}
		if r.HiLo {
			want[WeightsLo] = 2 * n
		}
		if r.States == kernels.StateU8 {
			want[ScaleM], want[ScaleV] = 4*blocks, 4*blocks
		}
		for k := range numKinds {
			b, err := m.Params.State(k)
			if m.Params.Has(k) != (want[k] > 0) || int64(len(b)) != want[k] || (err == nil) != (want[k] > 0) {
				t.Errorf("%s: %s has %d bytes (%v), want %d", name, k, len(b), err, want[k])
			}
			if err == nil && m.Params.SetState(k, b[1:]) == nil {
				t.Errorf("%s: %s was restored from too few bytes", name, k)
			}
		}
		m.Close()
	}
}

func TestRecipeRefusals(t *testing.T) {
	dev, cfg := execDevice(t, 1), execConfig()
	for want, o := range map[string]LoadOptions{
		"dtype f64, but only float32 masters are split": {DType: kernels.F64, Optim: Recipe{HiLo: true}},
		"states 7, want StateF32, StateBF16 or StateU8": {Optim: Recipe{States: 7}},
	} {
		if _, err := NewRandom(cfg, dev, 1, o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	m := must[*Model](t)(NewRandom(cfg, dev, 1, LoadOptions{Train: true, Optim: Recipe{States: kernels.StateU8}}))
	t.Cleanup(m.Close)
	_, err := m.Params.ReadF32(MomentV, NormName)
	if err = errors.Join(err, m.Params.WriteF32(MomentM, NormName, make([]float32, 24))); err == nil || !strings.Contains(err.Error(), "State gives the bytes") ||
		!strings.Contains(err.Error(), "SetState takes the bytes") {
		t.Errorf("moments in codes were read or written as reals: %v", err)
	}
}

// TestNarrowMomentsInFloat64: a float64 reference run can store its moments narrow too.
func TestNarrowMomentsInFloat64(t *testing.T) {
	for _, s := range []kernels.State{kernels.StateBF16, kernels.StateU8} {
		var w [2][]float64
		for i, r := range []Recipe{{}, {States: s}} {
			m := must[*Model](t)(NewRandom(execConfig(), execDevice(t, 2), 7, LoadOptions{DType: kernels.F64, Train: true, Optim: r}))
			t.Cleanup(m.Close)
			learn(t, m, 10)
			e := newExec(t, m, ExecOptions{})
			w[i] = e.reals(t, m.Params.Ptr(Weights, EmbedName), 61*24)
		}
		// Ten steps move each weight by at most about 10 lr; rounding moments changes a step by a few per cent of that.
		var most float64
		for i := range w[0] {
			most = max(most, math.Abs(w[0][i]-w[1][i]))
		}
		if most == 0 || most > 5e-3 {
			t.Errorf("states %d: weights differ by %g from those with float64 moments", s, most)
		}
		t.Logf("states %d: largest difference %.2g", s, most)
	}
}
