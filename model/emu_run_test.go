package model

import (
	"context"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"harness-s/kernels"
)

// emuConfig is a model of hidden width 64 with both mixers, several value heads per key head and grouped keys.
func emuConfig() *Config {
	cfg := execConfig(LinearAttention, LinearAttention, FullAttention, LinearAttention)
	cfg.VocabSize, cfg.Hidden, cfg.Intermediate, cfg.InitRange = 256, 64, 96, 0.05
	cfg.HeadDim, cfg.RotaryDim, cfg.LinKeyDim, cfg.LinValueDim = 32, 8, 16, 32
	return cfg
}

// eachStorage runs a test in float32 and bfloat16 on the emulator.
func eachStorage(t *testing.T, f func(t *testing.T, dev *kernels.Device, o LoadOptions)) {
	for _, o := range []LoadOptions{{Train: true}, {DType: kernels.BF16, Train: true, Optim: hilo}} {
		t.Run(o.DType.String(), func(t *testing.T) { f(t, emuDevice(t), o) })
	}
}

// nearModel is a random model whose weights are all bfloat16 numbers, so that every type holds the same one.
func nearModel(t testing.TB, dev *kernels.Device, cfg *Config, o LoadOptions) *Model {
	t.Helper()
	m := must[*Model](t)(NewRandom(cfg, dev, 7, o))
	t.Cleanup(m.Close)
	for i, e := range m.Params.Entries() {
		v := must[[]float32](t)(m.Params.Master(e.Name))
		for j := range v {
			hi, _ := kernels.SplitF32(v[j])
			v[j] = kernels.FromBF16(kernels.ToBF16(kernels.FromBF16(hi) + 0.005*float32((i*31+j*17)%11-5)))
		}
		check(t, m.Params.WriteF32(Weights, e.Name, v))
	}
	return m
}

// results are the log-probs and gradients of a forest of two trees, as float64.
func results(t testing.TB, m *Model) (logp []float64, grads map[string][]float64) {
	t.Helper()
	e := newExec(t, m, ExecOptions{MaxRows: 256, Entropy: true})
	b := tree(3, m.Config.VocabSize, [2]int32{70, -1}, [2]int32{9, 0}, [2]int32{20, 0}, [2]int32{31, -1})
	check(t, e.ZeroGrad())
	out := must[*Output](t)(e.Forward(b))
	check(t, e.Backward(coefficients(1, len(b.Rows)), coefficients(2, len(b.Rows))))
	grads = map[string][]float64{}
	wide := func(v []float32) []float64 {
		w := make([]float64, len(v))
		for i, x := range v {
			w[i] = float64(x)
		}
		return w
	}
	for _, p := range m.Params.Entries() {
		grads[p.Name] = wide(must[[]float32](t)(m.Params.ReadF32(Grads, p.Name)))
	}
	return wide(out.LogProb), grads
}

// worstGrad is the largest relative difference of gradients and the name it belongs to: of those behind the decay's exponential, which sum
// what nearly cancels, and of all others.
func worstGrad(got, want map[string][]float64) (gate, other float64, names [2]string) {
	for name, w := range want {
		d, at, i := relDiff(got[name], w, 1e-6), &other, 1
		if strings.Contains(name, "A_log") || strings.Contains(name, "dt_bias") || strings.Contains(name, "in_proj_a") {
			at, i = &gate, 0
		}
		if !(d <= *at) {
			*at, names[i] = d, name
		}
	}
	return gate, other, names
}

// TestEmuNumerics holds log-probs and gradients on the emulated device against the float64 plan on the CPU. In float32 the difference is what
// sums in another order cost. In bfloat16 every stored value is off by up to 2^-9: some thirty of them lie one after the other on the way
// through four layers, and as many on the way back. Independent errors make 2^-9 sqrt(30) = 0.01 and 2^-9 sqrt(60) = 0.015 of it before
// layers amplify them; the bounds are twice what was measured.
func TestEmuNumerics(t *testing.T) {
	ref := nearModel(t, execDevice(t, 2), emuConfig(), LoadOptions{DType: kernels.F64, Train: true})
	wantLP, wantG := results(t, ref)
	eachStorage(t, func(t *testing.T, dev *kernels.Device, o LoadOptions) {
		lpBound, gateBound, gradBound := 1e-5, 2e-5, 1e-5
		if o.DType == kernels.BF16 {
			lpBound, gateBound, gradBound = 0.07, 0.25, 0.12
		} else if gpuDevice() != "" { // exponentials and reciprocal roots are approximations of 2 units in the last place
			lpBound, gateBound, gradBound = 4*lpBound, 4*gateBound, 4*gradBound
		}
		lp, grads := results(t, nearModel(t, dev, emuConfig(), o))
		var most float64
		for i := range lp {
			most = max(most, math.Abs(lp[i]-wantLP[i]))
		}
		gate, other, names := worstGrad(grads, wantG)
		t.Logf("log-probs differ by %.2g at most, gradients by %.2g (%s) and %.2g (%s)", most, gate, names[0], other, names[1])
		if !(most <= lpBound) || !(gate <= gateBound) || !(other <= gradBound) {
			t.Errorf("bounds %g, %g and %g", lpBound, gateBound, gradBound)
		}
	})
}

// episode is what a sampler does in a group of agents: a shared prompt, forks that sample turns, and tool results between the turns.
type episode struct {
	ids     []int32 // after the prompt
	rows    []int   // of ids that were sampled
	sampled []float32
}

func sampleGroup(t *testing.T, r *Runner, prompt []int32, attempts, turns, tokens int) []episode {
	t.Helper()
	root := acquire(t, r)
	ctx := context.Background()
	_ = must[[]Sampled](t)(r.Step(ctx, []Work{{Seq: root, Append: prompt[:len(prompt)-1]}}))
	forks := must[[]SeqID](t)(r.ForkN(root, attempts))
	eps, work := make([]episode, attempts), make([]Work, attempts)
	for i := range work {
		work[i] = Work{Seq: forks[i], Append: prompt[len(prompt)-1:], Sample: true, Sampling: Sampling{Temperature: 1}, Key: Key{Lo: uint64(i), Hi: 5}}
	}
	for turn := range turns {
		for n := range tokens + 3*turn {
			for i := range work {
				work[i].Ctr++
				if n == i && turn > 0 { // the tool's answer, at another time and of another length in each attempt: prefill beside decode
					answer := ids(uint64(100*i+turn), 2+7*i+60*(turn%2), r.m.Config.VocabSize)
					work[i].Append = append(slices.Clone(work[i].Append), answer...)
					eps[i].ids = append(eps[i].ids, answer...)
				}
			}
			got := must[[]Sampled](t)(r.Step(ctx, work))
			for i, s := range got {
				eps[i].rows = append(eps[i].rows, len(eps[i].ids))
				eps[i].ids, eps[i].sampled = append(eps[i].ids, s.Token), append(eps[i].sampled, s.LogProb)
				work[i].Append = []int32{s.Token}
			}
		}
	}
	return eps
}

// TestEmuSamplerEqualsTrainer: the log-probs of a group of agents, sampled by prefill, forks, decode and appends, are those that the
// executor computes for the packed forest, bit for bit (gpu.md 7.2, level 3).
func TestEmuSamplerEqualsTrainer(t *testing.T) {
	eachStorage(t, func(t *testing.T, dev *kernels.Device, o LoadOptions) {
		m := nearModel(t, dev, emuConfig(), o)
		r := must[*Runner](t)(NewRunner(m, RunnerOptions{MaxSeqs: 4, MaxTokens: 4096, MaxRows: 96}))
		t.Cleanup(r.Close)
		prompt := ids(1, 75, m.Config.VocabSize)
		eps := sampleGroup(t, r, prompt, 3, 3, 6)
		b := &Batch{IDs: slices.Clone(prompt), Segments: []Segment{{Len: int32(len(prompt)), Parent: -1}}}
		type target struct {
			row, id int32
			want    float32
		}
		var ts []target
		for _, e := range eps {
			base := len(b.IDs)
			b.Segments = append(b.Segments, Segment{Len: int32(len(e.ids)), Parent: 0, Pos: int32(len(prompt))})
			b.IDs = append(b.IDs, e.ids...)
			for i, at := range e.rows {
				row := base + at - 1
				if at == 0 {
					row = len(prompt) - 1
				}
				ts = append(ts, target{int32(row), e.ids[at], e.sampled[i]})
			}
		}
		slices.SortStableFunc(ts, func(a, b target) int { return int(a.row - b.row) })
		for _, x := range ts {
			b.Rows, b.Targets = append(b.Rows, x.row), append(b.Targets, x.id)
		}
		out := must[*Output](t)(newExec(t, m, ExecOptions{MaxRows: 1024}).Forward(b))
		other, most := 0, 0.0
		for i, x := range ts {
			if out.LogProb[i] != x.want {
				other, most = other+1, max(most, math.Abs(float64(out.LogProb[i]-x.want)))
			}
		}
		t.Logf("%d tokens in %d rows: %d log-probs differ, by %.2g at most", len(ts), len(b.IDs), other, most)
		if other > 0 {
			t.Error("want none")
		}
	})
}

// TestEmuResume: three steps are two steps, a save of the model and the moments, a load and one step, bit for bit; a save after that holds the
// same masters on the CPU.
func TestEmuResume(t *testing.T) {
	eachStorage(t, func(t *testing.T, dev *kernels.Device, o LoadOptions) {
		for _, states := range []kernels.State{kernels.StateF32, kernels.StateBF16, kernels.StateU8} {
			o.Optim.States = states
			start := func() *Model {
				m := must[*Model](t)(NewRandom(emuConfig(), dev, 7, o))
				t.Cleanup(m.Close)
				return m
			}
			whole, part := start(), start()
			learn(t, whole, 3)
			learn(t, part, 2)
			dir := filepath.Join(t.TempDir(), "m")
			check(t, part.Save(dir))
			again := must[*Model](t)(Load(dir, dev, o))
			t.Cleanup(again.Close)
			for _, k := range o.Optim.moments() {
				check(t, again.Params.SetState(k, must[[]byte](t)(part.Params.State(k))))
			}
			again.Params.OptStep = 2
			if !slices.Equal(everything(t, again, o.Optim), everything(t, part, o.Optim)) {
				t.Errorf("states %d: save and load change bits", states)
			}
			learn(t, again, 1)
			if !slices.Equal(everything(t, again, o.Optim), everything(t, whole, o.Optim)) {
				t.Errorf("states %d: a resumed run differs from one that was not interrupted", states)
			}
			padding(t, whole, o.Optim)
			check(t, whole.Save(dir))
			cpu := must[*Model](t)(Load(dir, execDevice(t, 1), LoadOptions{}))
			if must[string](t)(cpu.WeightsSHA256()) != must[string](t)(whole.WeightsSHA256()) {
				t.Errorf("states %d: the checkpoint has other masters", states)
			}
			cpu.Close()
		}
	})
}

// TestEmuForkEqualsFresh: a fork continues exactly as a sequence that was fed the same tokens, at lengths around a page and a chunk.
func TestEmuForkEqualsFresh(t *testing.T) {
	eachStorage(t, func(t *testing.T, dev *kernels.Device, o LoadOptions) {
		r := must[*Runner](t)(NewRunner(nearModel(t, dev, emuConfig(), o), RunnerOptions{MaxSeqs: 4, MaxTokens: 1024, MaxRows: 96}))
		t.Cleanup(r.Close)
		for _, n := range []int{1, 3, 16, 17, 63, 65} {
			check(t, r.Reset())
			prefix, tail := ids(uint64(n), n, 256), [][]int32{ids(7, 1, 256), ids(8, 1, 256), ids(9, 18, 256), ids(10, 1, 256)}
			fresh := acquire(t, r)
			talk(t, r, fresh, Key{}, prefix)
			want := talk(t, r, fresh, Key{5, 6}, tail...)
			root := acquire(t, r)
			talk(t, r, root, Key{}, prefix)
			fork := must[SeqID](t)(r.Fork(root))
			if got := talk(t, r, fork, Key{5, 6}, tail...); !slices.Equal(got, want) {
				t.Errorf("prefix %d: %v, fresh %v", n, got, want)
			}
			if want[0].LogProb == 0 || math.IsNaN(float64(want[0].LogProb)) {
				t.Errorf("prefix %d: log-prob %v", n, want[0].LogProb)
			}
		}
	})
}

// TestEmuParity runs the reference fixtures on the emulated device in float32. The bounds are those of the CPU, three times what float32 costs
// the reference. Sampler and executor agree in every bit.
func TestEmuParity(t *testing.T) {
	for _, name := range referenceNames() {
		t.Run(name, func(t *testing.T) {
			rep := must[*ParityReport](t)(RunParity(filepath.Join("testdata/reference", name), emuDevice(t)))
			for _, f := range rep.Failures {
				t.Error(f)
			}
			if rep.DecodeMaxAbs != 0 {
				t.Errorf("prefill and decode differ from the full forward pass by %g", rep.DecodeMaxAbs)
			}
		})
	}
}

func referenceNames() []string { return slices.Sorted(maps.Keys(bf16Noise)) }

// bf16Noise is by how much transformers 5.24 (torch 2.9) in bfloat16 misses the float64 logits of a fixture, relative to their norm.
var bf16Noise = map[string]float64{"bf16": 0.049, "bigrot": 0.058, "deep12": 0.337, "delta16": 0.093, "edges": 0.063, "linearlast": 0.066, "oddheads": 0.056, "threeper": 0.086, "untied": 0.135}

// TestEmuBF16Parity: in bfloat16 the logits of the reference fixtures are as near to float64 as those of transformers in bfloat16: within 1.5
// times its error, which is what another order of roundings can make of these large random weights. Gradients are finite, and prefill and
// decode give the logits of the full forward pass, bit for bit.
func TestEmuBF16Parity(t *testing.T) {
	for _, name := range referenceNames() {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join("testdata/reference", name)
			m := must[*Model](t)(Load(dir, emuDevice(t), LoadOptions{DType: kernels.BF16, Train: true, Optim: hilo}))
			t.Cleanup(m.Close)
			file := must[*Safetensors](t)(ReadSafetensors(filepath.Join(dir, "expect.safetensors")))
			t.Cleanup(func() { check(t, file.Close()) })
			p := &parity{m: m, file: file, rep: &ParityReport{}}
			check(t, p.full())
			got := RelNorm(p.logits, must[[]float32](t)(p.floats("logits", len(p.logits))))
			t.Logf("logits differ by %.3f of their norm (transformers %.3f), decode by %g", got, bf16Noise[name], p.rep.DecodeMaxAbs)
			if !(got <= 1.5*bf16Noise[name]) || p.rep.DecodeMaxAbs != 0 {
				t.Errorf("bounds %.3f and 0", 1.5*bf16Noise[name])
			}
			for name, g := range p.grads {
				check(t, checkFinite(name, []int{len(g)}, g, 0))
			}
		})
	}
}

// TestEmuAdapter: in bfloat16 an adapter's merged weights are W0 + s B A rounded once, and its gradients are those of float64.
func TestEmuAdapter(t *testing.T) {
	l := LoRA{Rank: 4, Alpha: 5, Targets: []string{AllLinear}}
	run := func(dev *kernels.Device, dt kernels.DType) (*Model, map[string][]float64) {
		m := nearModel(t, dev, emuConfig(), LoadOptions{DType: dt})
		check(t, m.Adapt(l, AdaptOptions{Train: true, Seed: 3, Optim: Recipe{HiLo: dt != kernels.F64}}))
		for i, e := range m.Adapter.Params.Entries() {
			v := must[[]float32](t)(m.Adapter.Params.Master(e.Name))
			for j := range v {
				v[j] = kernels.FromBF16(kernels.ToBF16(v[j] + 0.005*float32((i*13+j*7)%9-4)))
			}
			check(t, m.Adapter.Params.WriteF32(Weights, e.Name, v))
		}
		check(t, m.Adapter.merge())
		e := newExec(t, m, ExecOptions{MaxRows: 128})
		b := tree(5, m.Config.VocabSize, [2]int32{40, -1}, [2]int32{9, 0}, [2]int32{20, 0})
		must[*Output](t)(e.Forward(b))
		check(t, e.Backward(coefficients(1, len(b.Rows)), nil))
		grads := map[string][]float64{}
		for _, p := range m.Adapter.Params.Entries() {
			for _, x := range must[[]float32](t)(m.Adapter.Params.ReadF32(Grads, p.Name)) {
				grads[p.Name] = append(grads[p.Name], float64(x))
			}
		}
		return m, grads
	}
	ref, want := run(execDevice(t, 2), kernels.F64)
	m, got := run(emuDevice(t), kernels.BF16)
	// W' is rounded once, by up to 2^-9 of it. What s B was rounded by is small beside W0.
	for _, w := range ref.Adapter.matrices {
		d := RelNorm(must[[]float32](t)(m.Params.ReadF32(Weights, w.Name)), must[[]float32](t)(ref.Params.ReadF32(Weights, w.Name)))
		if !(d <= 0x1p-9) {
			t.Errorf("%s: merged weights are off by %.3g of their norm, one rounding makes at most %.3g", w.Name, d, 0x1p-9)
		}
	}
	gate, other, names := worstGrad(got, want)
	t.Logf("gradients differ by %.2g (%s) and %.2g (%s)", gate, names[0], other, names[1])
	if !(gate <= 0.16) || !(other <= 0.16) {
		t.Error("bound 0.16")
	}
	learnt := must[string](t)(m.WeightsSHA256())
	e := newExec(t, m, ExecOptions{MaxRows: 64})
	check(t, e.Step(Hyper{LR: 1e-2, Beta1: 0.9, Beta2: 0.98, Eps: 1e-8}))
	if must[string](t)(m.WeightsSHA256()) == learnt {
		t.Error("a step leaves the merged weights")
	}
	dir := filepath.Join(t.TempDir(), "adapter")
	check(t, m.SaveAdapter(dir, SaveAdapterOptions{}))
	again := nearModel(t, m.Dev, emuConfig(), LoadOptions{DType: kernels.BF16})
	check(t, again.LoadAdapter(dir, AdaptOptions{Train: true, Optim: hilo}))
	if must[string](t)(again.WeightsSHA256()) != must[string](t)(m.WeightsSHA256()) || !slices.Equal(must[[]byte](t)(again.Adapter.Params.State(WeightsLo)), must[[]byte](t)(m.Adapter.Params.State(WeightsLo))) {
		t.Error("a saved adapter loads as another one")
	}
	base := must[*Model](t)(NewRandom(emuConfig(), m.Dev, 8, LoadOptions{DType: kernels.BF16}))
	t.Cleanup(base.Close)
	if err := base.LoadAdapter(dir, AdaptOptions{}); err == nil || !strings.Contains(err.Error(), "stands beside base weights") {
		t.Errorf("beside another base: %v", err)
	}
}

// TestEmuFootprint: the memory planner's bytes for bfloat16 beside the CPU are those that the ledger shows, but for workspaces, which are the
// table's own.
func TestEmuFootprint(t *testing.T) {
	dev, cfg, o := emuDevice(t), emuConfig(), RunnerOptions{MaxSeqs: 3, MaxTokens: 500, MaxContext: 100, PageSize: 7, MaxRows: 63}
	m := must[*Model](t)(NewRandom(cfg, dev, 7, LoadOptions{DType: kernels.BF16, Train: true, Optim: hilo}))
	defer m.Close()
	r := must[*Runner](t)(NewRunner(m, o))
	defer r.Close()
	newExec(t, m, ExecOptions{MaxRows: 130, Recompute: true})
	pl := must[*MemoryPlanner](t)(NewMemoryPlanner(cfg, dev))
	defer pl.Close()
	f := must[*Footprint](t)(pl.Footprint(Layout{DType: kernels.BF16, Train: true, Recipe: hilo, Runner: o, Context: 100, Exec: ExecOptions{MaxRows: 130, Recompute: true}}))
	got := ledgerOf(dev)
	for label, lines := range map[string][]string{
		"weights": {LineWeights}, "weights_lo": {LineLow}, "grads": {LineGrads}, "activations": {LineActs}, "batch": {LineBatch},
		"kv cache and recurrent state": {LineKV, LineRecurrent, LineConv}, "sampler activations": {LineSampler}, "sampler indices": {LineIndices},
	} {
		var want int64
		for _, l := range lines {
			want += f.Bytes(l)
		}
		if got[label] != want || want == 0 {
			t.Errorf("%s: %d bytes are allocated, the plan says %d", label, got[label], want)
		}
	}
}
