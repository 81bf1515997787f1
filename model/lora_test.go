package model

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"harness-s/kernels"
)

// frozen is a copy of m without gradients.
func frozen(t testing.TB, m *Model) *Model {
	t.Helper()
	f := must[*Model](t)(NewRandom(m.Config, m.Dev, 7, LoadOptions{DType: m.Params.DType}))
	t.Cleanup(f.Close)
	check(t, f.Params.SetState(Weights, must[[]byte](t)(m.Params.State(Weights))))
	return f
}

// adapted is a frozen copy of m with a trainable adapter in which B is not zero.
func adapted(t testing.TB, m *Model, l LoRA) *Model {
	t.Helper()
	f := frozen(t, m)
	check(t, f.Adapt(l, AdaptOptions{Train: true, Seed: 3}))
	rng := rand.New(rand.NewPCG(23, 29))
	for _, e := range f.Adapter.Params.Entries() {
		v := must[[]float32](t)(f.Adapter.Params.ReadF32(Weights, e.Name))
		for i := range v {
			v[i] += float32(0.1 * rng.NormFloat64())
		}
		check(t, f.Adapter.Params.WriteF32(Weights, e.Name, v))
	}
	check(t, f.Adapter.merge())
	return f
}

func all(rank int) LoRA {
	return LoRA{Rank: rank, Alpha: 1.5 * float64(rank), Targets: []string{AllLinear}}
}

// adapterGrads of all parameters that are trained, by name.
func adapterGrads(t testing.TB, e *Exec) map[string][]float64 {
	t.Helper()
	out := map[string][]float64{}
	for _, p := range e.m.Trainable().Entries() {
		out[p.Name] = e.reals(t, e.m.Trainable().Ptr(Grads, p.Name), p.Len)
	}
	return out
}

// loraCases are adapters of all shapes: rank 1, rank above every dimension, targets that leave whole layers out.
func loraCases() map[string]LoRA {
	return map[string]LoRA{
		"rank 1":      all(1),
		"all":         all(4),
		"above dims":  {Rank: 50, Alpha: 10, Targets: []string{"q_proj", "in_proj_a", "down_proj"}},
		"rslora":      {Rank: 4, Alpha: 3, Targets: []string{"v_proj", "up_proj", "out_proj", "in_proj_qkv"}, RSLoRA: true},
		"last layers": {Rank: 3, Alpha: 6, Targets: []string{"layers.1.self_attn.k_proj", "layers.2.mlp.gate_proj"}},
	}
}

// TestLoRAFiniteDifferences checks the gradient of A and B through the whole model along random directions in float64.
func TestLoRAFiniteDifferences(t *testing.T) {
	d := execDevice(t, 0)
	for name, l := range loraCases() {
		t.Run(name, func(t *testing.T) {
			m := adapted(t, randomModel(t, d, execConfig(), kernels.F64), l)
			e := newExec(t, m, ExecOptions{MaxRows: 96, Entropy: true, Temperature: 1.25, Recompute: name == "all"})
			b := tree(3, 61, [2]int32{5, -1}, [2]int32{7, 0}, [2]int32{3, 0}, [2]int32{66, -1}, [2]int32{4, 3})
			dl, de := coefficients(1, len(b.Rows)), coefficients(2, len(b.Rows))
			loss := func() (s float64) {
				must[*Output](t)(e.Forward(b))
				n := int64(len(b.Rows))
				lp, ent := e.reals(t, e.address(e.prog.logp), n), e.reals(t, e.address(e.prog.ent), n)
				for i := range lp {
					s += float64(dl[i])*lp[i] + float64(de[i])*ent[i]
				}
				return s
			}
			check(t, e.ZeroGrad())
			loss()
			check(t, e.Backward(dl, de))
			grads := adapterGrads(t, e)
			rng := rand.New(rand.NewPCG(17, 19))
			const h = 1e-6
			p := m.Adapter.Params
			for _, x := range p.Entries() {
				at := p.Ptr(Weights, x.Name)
				w := e.reals(t, at, x.Len)
				dir, moved := make([]float64, x.Len), make([]float64, x.Len)
				var want, norm float64
				for i := range dir {
					dir[i] = rng.NormFloat64()
					want += dir[i] * grads[x.Name][i]
					norm += grads[x.Name][i] * grads[x.Name][i]
				}
				move := func(s float64) float64 {
					for i := range w {
						moved[i] = w[i] + s*dir[i]
					}
					p.stream.Upload(at, bytesOf(moved))
					check(t, m.Adapter.merge())
					return loss()
				}
				wide, narrow := (move(2*h)-move(-2*h))/(4*h), (move(h)-move(-h))/(2*h) // as in TestFiniteDifferences
				got := (4*narrow - wide) / 3
				p.stream.Upload(at, bytesOf(w))
				check(t, m.Adapter.merge())
				if tol := 2e-6 * max(math.Sqrt(norm), 1); math.Abs(got-want) > tol || norm == 0 {
					t.Errorf("%s: finite difference %.9g, gradient %.9g (norm %.3g), tolerance %.2g", x.Name, got, want, math.Sqrt(norm), tol)
				}
			}
		})
	}
}

// TestLoRAGradientIsTheProjection: with the gradient dW of a full model that has the merged weights, dB = s dW A^T and dA = s B^T dW. The
// two sides add the same products in another order: in float64 a relative difference of some units of 2^-53 times the square root of the
// number of terms, far below 1e-12.
func TestLoRAGradientIsTheProjection(t *testing.T) {
	d := execDevice(t, 0)
	b := tree(5, 61, [2]int32{20, -1}, [2]int32{9, 0}, [2]int32{66, 0})
	dl := coefficients(1, len(b.Rows))
	for name, l := range loraCases() {
		t.Run(name, func(t *testing.T) {
			full := randomModel(t, d, execConfig(), kernels.F64)
			m := adapted(t, full, l)
			check(t, full.Params.SetState(Weights, must[[]byte](t)(m.Params.State(Weights))))
			e := newExec(t, m, ExecOptions{})
			check(t, e.ZeroGrad())
			got := must[*Output](t)(e.Forward(b))
			check(t, e.Backward(dl, nil))
			grads := adapterGrads(t, e)
			fe := newExec(t, full, ExecOptions{})
			check(t, fe.ZeroGrad())
			want := must[*Output](t)(fe.Forward(b))
			check(t, fe.Backward(dl, nil))
			if !slices.Equal(got.LogProb, want.LogProb) {
				t.Error("the merged weights give other log-probs than a model that has them as its own")
			}
			s := float64(float32(l.Scale()))
			for _, w := range m.Adapter.matrices {
				mod, n, k, r := moduleOf(w.Name), w.Shape[0], w.Shape[1], l.Rank
				dW := fe.reals(t, full.Params.Ptr(Grads, w.Name), w.Elems())
				read := func(name string) []float64 {
					e2, _ := m.Adapter.Params.Lookup(name)
					return e.reals(t, m.Adapter.Params.Ptr(Weights, name), e2.Len)
				}
				a, bb := read(mod+loraA), read(mod+loraB)
				dA, dB := make([]float64, r*k), make([]float64, n*r)
				for i := range n {
					for j := range k {
						for q := range r {
							dB[i*r+q] += s * dW[i*k+j] * a[q*k+j]
							dA[q*k+j] += s * bb[i*r+q] * dW[i*k+j]
						}
					}
				}
				compareGrads(t, "projection", map[string][]float64{"A": grads[mod+loraA], "B": grads[mod+loraB]}, map[string][]float64{"A": dA, "B": dB}, 1e-12)
			}
		})
	}
}

// TestFreshAdapterChangesNothing: B is zero, so that every weight keeps its bits, and A is uniform in +-1/sqrt(in), keyed by seed and name.
func TestFreshAdapterChangesNothing(t *testing.T) {
	m := frozen(t, randomModel(t, execDevice(t, 0), execConfig(), kernels.F32))
	before := must[string](t)(m.WeightsSHA256())
	check(t, m.Adapt(all(8), AdaptOptions{Seed: 3}))
	if after := must[string](t)(m.WeightsSHA256()); after != before || m.Adapter.Base.SHA256 != before {
		t.Errorf("weights %s, with a fresh adapter %s, which names its base %s", before, after, m.Adapter.Base.SHA256)
	}
	for _, e := range m.Adapter.Params.Entries() {
		v := must[[]float32](t)(m.Adapter.Params.ReadF32(Weights, e.Name))
		lo, hi := float64(slices.Min(v)), float64(slices.Max(v))
		if strings.HasSuffix(e.Name, loraB) {
			if lo != 0 || hi != 0 {
				t.Errorf("%s starts in [%g, %g], want 0", e.Name, lo, hi)
			}
		} else if bound := 1 / math.Sqrt(float64(e.Shape[1])); lo < -bound || hi > bound || lo > -0.9*bound || hi < 0.9*bound {
			t.Errorf("%s starts in [%g, %g], want uniform in +-%g", e.Name, lo, hi, bound)
		}
	}
}

// TestLoRAStep: training an adapter reaches what full training of the same task reaches (TestStepLearns), leaves all other weights alone,
// and W' after many steps has the bits of a merge from scratch.
func TestLoRAStep(t *testing.T) {
	full := randomModel(t, execDevice(t, 0), execConfig(), kernels.F32)
	m := frozen(t, full)
	check(t, m.Adapt(all(4), AdaptOptions{Train: true, Seed: 3}))
	e := newExec(t, m, ExecOptions{})
	b := tree(4, 61, [2]int32{20, -1}, [2]int32{9, 0})
	ones := make([]float32, len(b.Rows))
	for i := range ones {
		ones[i] = -1 / float32(len(ones))
	}
	mean := func() (s float64) {
		for _, x := range must[*Output](t)(e.Forward(b)).LogProb {
			s += float64(x) / float64(len(b.Rows))
		}
		return s
	}
	before, start := mean(), must[string](t)(m.WeightsSHA256())
	for i := range 30 {
		check(t, e.ZeroGrad())
		must[*Output](t)(e.Forward(b))
		check(t, e.Backward(ones, nil))
		g := must[float64](t)(e.GradNorm())
		check(t, e.Step(Hyper{LR: 2e-2, Beta1: 0.9, Beta2: 0.98, Eps: 1e-8, ClipNorm: 1, GradNorm: g}))
		if i == 0 && must[string](t)(m.WeightsSHA256()) == start {
			t.Error("the first step changed no weight")
		}
	}
	if after := mean(); after < before+1 {
		t.Errorf("mean log-prob %.3f, after 30 steps %.3f", before, after)
	}
	if p := m.Trainable(); p.Version != 30 || p.OptStep != 30 {
		t.Errorf("version %d, optimiser step %d after 30 steps", p.Version, p.OptStep)
	}
	fresh := frozen(t, full)
	check(t, fresh.newAdapter(all(4), AdaptOptions{}))
	check(t, fresh.Adapter.Params.SetState(Weights, must[[]byte](t)(m.Adapter.Params.State(Weights))))
	check(t, fresh.Adapter.merge())
	if a, b := must[string](t)(m.WeightsSHA256()), must[string](t)(fresh.WeightsSHA256()); a != b {
		t.Errorf("weights after 30 steps %s, merged from scratch %s", a, b)
	}
	for _, x := range full.Params.Entries() {
		was, is := must[[]float32](t)(full.Params.ReadF32(Weights, x.Name)), must[[]float32](t)(m.Params.ReadF32(Weights, x.Name))
		target := slices.ContainsFunc(m.Adapter.matrices, func(s TensorSpec) bool { return s.Name == x.Name })
		if slices.Equal(was, is) == target {
			t.Errorf("%s: adapted %t, changed %t", x.Name, target, !target)
		}
	}
}

// TestLoRASampler: the sampler's log-probs are the executor's, with an adapter that matters. The bound is that of prefill and decode against
// one forward pass without one (rounding of float32 through three layers).
func TestLoRASampler(t *testing.T) {
	full := randomModel(t, execDevice(t, 0), execConfig(), kernels.F32)
	m := adapted(t, full, all(4))
	r := must[*Runner](t)(NewRunner(m, RunnerOptions{MaxSeqs: 2, MaxTokens: 256, MaxRows: 64}))
	t.Cleanup(r.Close)
	id := acquire(t, r)
	prompt := ids(9, 70, 61)
	seq := slices.Clone(prompt)
	var sampled []Sampled
	for i, next := 0, prompt; i < 20; i++ {
		got := must[[]Sampled](t)(r.Step(context.Background(), []Work{{Seq: id, Append: next, Sample: true, Sampling: Sampling{Temperature: 1}, Key: Key{1, 2}, Ctr: uint64(i)}}))
		sampled, next = append(sampled, got[0]), []int32{got[0].Token}
		seq = append(seq, got[0].Token)
	}
	b := &Batch{IDs: seq, Segments: []Segment{{Len: int32(len(seq)), Parent: -1}}}
	for i := range sampled {
		b.Rows, b.Targets = append(b.Rows, int32(len(prompt)+i-1)), append(b.Targets, sampled[i].Token)
	}
	with := must[*Output](t)(newExec(t, m, ExecOptions{}).Forward(b)).LogProb
	without := must[*Output](t)(newExec(t, full, ExecOptions{}).Forward(b)).LogProb
	moved := 0.0
	for i, s := range sampled {
		if d := math.Abs(float64(s.LogProb - with[i])); d > 2e-5 {
			t.Errorf("token %d: sampler %v, executor %v", i, s.LogProb, with[i])
		}
		moved = max(moved, math.Abs(float64(with[i]-without[i])))
	}
	if moved < 0.1 {
		t.Errorf("the adapter moves log-probs by at most %g: the comparison says nothing", moved)
	}
}

// TestLoRAPlan: no gradient of a frozen weight is computed or held, nothing happens below the first adapted layer, and cost and memory show it.
func TestLoRAPlan(t *testing.T) {
	sh := Shapes{Rows: 128, Targets: 32, States: 6}
	cfg := execConfig()
	for name, l := range loraCases() {
		t.Run(name, func(t *testing.T) {
			p := must[*Program](t)(Compile(must[*Graph](t)(BuildLoRA(cfg, l)), PlanOptions{}))
			p.Place(sh)
			if err := checkMemory(p); err != nil {
				t.Error(err)
			}
			want := map[string]bool{}
			for _, s := range must[[]TensorSpec](t)(l.Tensors(cfg)) {
				want["d:"+s.Name] = true
			}
			for i, r := range p.records {
				for _, v := range r.writes {
					if x := p.values[v]; x.region == inGrad {
						delete(want, x.name)
					} else if x.spec.lead == leadNone {
						t.Errorf("record %d (%v %s) writes %s %v", i, r.op, r.label, x.name, x.spec.dims)
					}
				}
				if i >= p.numForward && name == "last layers" && strings.Contains(r.label, "layers.0.") {
					t.Errorf("record %d works on layer 0: %v %s", i, r.op, r.label)
				}
			}
			if len(want) > 0 {
				t.Errorf("not computed: %v", want)
			}
		})
	}
	full := compile(t, cfg, Train, PlanOptions{})
	low := must[*Program](t)(Compile(must[*Graph](t)(BuildLoRA(cfg, all(1))), PlanOptions{}))
	full.Place(sh)
	low.Place(sh)
	// A linear layer's backward pass costs two products of the weight's size; an adapter leaves one, and adds four of n or k times the rank.
	var dense, thin float64
	for _, s := range cfg.linears() {
		dense += 2 * float64(s.Elems()) * float64(sh.Rows)
		thin += 4 * float64(s.Shape[0]+s.Shape[1]) * float64(sh.Rows)
	}
	head := 2 * float64(cfg.VocabSize*cfg.Hidden) * float64(sh.Targets)
	ff, fb := full.FLOPs(sh)
	lf, lb := low.FLOPs(sh)
	// Layer 0 needs no gradient of its input: the products of its four first matrices with W' are not made.
	var first float64
	for _, s := range cfg.linears()[:4] {
		first += 2 * float64(s.Elems()) * float64(sh.Rows)
	}
	if want := fb - dense - head - first + thin; lf != ff || math.Abs(lb-want) > 1 {
		t.Errorf("FLOPs %g + %g, want %g + %g", lf, lb, ff, want)
	}
	if low.PeakBytes() > full.PeakBytes() {
		t.Errorf("activations %d bytes, full training needs %d", low.PeakBytes(), full.PeakBytes())
	}
}

// TestLoRAMemory: full training holds four arenas of all parameters; with an adapter one of all, one of the adapted matrices (W0), and five
// of the adapter (weights, gradient, two moments, scaled copies).
func TestLoRAMemory(t *testing.T) {
	cfg := execConfig()
	held := func(f func(d *kernels.Device) *Model) int64 {
		d := execDevice(t, 1)
		m := f(d)
		t.Cleanup(m.Close)
		var n int64
		for _, l := range d.Ledger() {
			if strings.HasPrefix(l.Label, "weights") || strings.HasPrefix(l.Label, "grads") || strings.HasPrefix(l.Label, "moment") {
				n += l.Bytes
			}
		}
		return n
	}
	bytes := func(ts []TensorSpec) (n int64) {
		for _, s := range ts {
			n += 4 * ((s.Elems() + alignElems - 1) / alignElems * alignElems)
		}
		return n
	}
	full := held(func(d *kernels.Device) *Model { return must[*Model](t)(NewRandom(cfg, d, 1, LoadOptions{Train: true})) })
	low := held(func(d *kernels.Device) *Model {
		m := must[*Model](t)(NewRandom(cfg, d, 1, LoadOptions{}))
		check(t, m.Adapt(all(2), AdaptOptions{Train: true}))
		return m
	})
	if want := 4 * bytes(cfg.Tensors()); full != want {
		t.Errorf("full training holds %d bytes, want %d", full, want)
	}
	if want := bytes(cfg.Tensors()) + bytes(cfg.linears()) + 5*bytes(must[[]TensorSpec](t)(all(2).Tensors(cfg))); low != want {
		t.Errorf("LoRA training holds %d bytes, want %d", low, want)
	}
}

func TestLoRARefuses(t *testing.T) {
	m := randomModel(t, execDevice(t, 0), execConfig(), kernels.F32)
	if err := m.Adapt(all(2), AdaptOptions{}); err == nil || !strings.Contains(err.Error(), "gradients") {
		t.Errorf("adapting a model with gradients: %v", err)
	}
	f := frozen(t, m)
	err := f.Adapt(LoRA{Rank: 0, Alpha: math.Inf(1), Targets: []string{"q_proj", "w1", "lm_head", "proj"}}, AdaptOptions{})
	for _, want := range []string{"rank 0", "alpha +Inf", `"w1"`, `"lm_head"`, `"proj"`, "in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, out_proj", AllLinear} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q in it", err, want)
		}
	}
	if err != nil && strings.Contains(err.Error(), `"q_proj"`) {
		t.Errorf("q_proj was refused: %v", err)
	}
	if err := f.Adapt(LoRA{Rank: 1, Alpha: 1}, AdaptOptions{}); err == nil || !strings.Contains(err.Error(), "no targets") {
		t.Errorf("no targets: %v", err)
	}
	linear := must[*Model](t)(NewRandom(execConfig(LinearAttention), f.Dev, 1, LoadOptions{}))
	t.Cleanup(linear.Close)
	if err := linear.Adapt(LoRA{Rank: 1, Alpha: 1, Targets: []string{"q_proj"}}, AdaptOptions{}); err == nil {
		t.Error("q_proj of a model without attention layers was accepted")
	}
	check(t, f.Adapt(all(2), AdaptOptions{}))
	if err := f.Adapt(all(2), AdaptOptions{}); err == nil {
		t.Error("a second adapter was accepted")
	}
	e := newExec(t, f, ExecOptions{})
	must[*Output](t)(e.Forward(tree(1, 61, [2]int32{5, -1})))
	for name, err := range map[string]error{"backward": e.Backward(make([]float32, 4), nil), "clear": e.ZeroGrad(), "step": e.Step(Hyper{})} {
		if err == nil {
			t.Errorf("%s without gradients of the adapter was accepted", name)
		}
	}
	if got := fmt.Sprint(execConfig().LinearNames()); got != "[in_proj_qkv in_proj_z in_proj_b in_proj_a out_proj gate_proj up_proj down_proj q_proj k_proj v_proj o_proj]" {
		t.Errorf("linear layers %s", got)
	}
}
