package model

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"harness-s/kernels"
)

// sharing are sizes that several tests use.
var sharing = struct {
	runner RunnerOptions
	exec   ExecOptions
}{RunnerOptions{MaxSeqs: 3, MaxTokens: 500, MaxContext: 100, PageSize: 7, MaxRows: 63}, ExecOptions{MaxRows: 130, Recompute: true, Entropy: true}}

// shared is a random model on a device, with a Region when o.Shared asks for one, and its sampler and executor.
type shared struct {
	m *Model
	g *Region // nil without
	r *Runner
	e *Exec
}

func newShared(t *testing.T, dev *kernels.Device, lora *LoRA, o LoadOptions) *shared {
	t.Helper()
	full := o
	if lora != nil {
		full = LoadOptions{DType: o.DType}
	}
	s := &shared{m: must[*Model](t)(NewRandom(emuConfig(), dev, 7, full))}
	if lora != nil {
		check(t, s.m.Adapt(*lora, AdaptOptions{Train: true, Optim: o.Optim, Shared: o.Shared}))
	}
	if o.Shared {
		s.g = must[*Region](t)(s.m.Share(sharing.runner, sharing.exec, 100))
	}
	s.r = must[*Runner](t)(NewRunner(s.m, sharing.runner))
	s.enter(t, Training)
	x := sharing.exec
	x.MaxStates = PlannedStates(x.MaxRows)
	s.e = must[*Exec](t)(NewExec(s.m, x))
	s.enter(t, Rollout)
	return s
}

func (s *shared) enter(t *testing.T, p Phase) {
	t.Helper()
	if s.g != nil {
		check(t, s.g.Enter(p))
	}
}

func (s *shared) close() {
	s.e.Close()
	s.r.Close()
	s.m.Close()
}

// sample draws two tokens in each of three sequences, the last of which was forked.
func (s *shared) sample(t *testing.T, key uint64) []Sampled {
	t.Helper()
	a, b := acquire(t, s.r), acquire(t, s.r)
	out := talk(t, s.r, a, Key{key, 1}, ids(key, 11, 256), []int32{5})
	out = append(out, talk(t, s.r, b, Key{key, 2}, ids(key+1, 18, 256), []int32{6})...)
	c := must[SeqID](t)(s.r.Fork(a))
	out = append(out, talk(t, s.r, c, Key{key, 3}, []int32{7}, ids(key+2, 5, 256))...)
	check(t, s.r.Reset())
	return out
}

// update makes an optimiser step on two micro-batches and returns the log-probs of the first.
func (s *shared) update(t *testing.T, seed uint64) []float32 {
	t.Helper()
	b := tree(seed, 256, [2]int32{17, -1}, [2]int32{5, 0}, [2]int32{9, 0})
	c := tree(seed+1, 256, [2]int32{19, -1}, [2]int32{1, 0})
	check(t, s.e.ZeroGrad())
	out := must[*Output](t)(s.e.Forward(b))
	check(t, s.e.Backward(coefficients(seed, len(b.Rows)), coefficients(seed+1, len(b.Rows))))
	must[*Output](t)(s.e.Forward(c))
	check(t, s.e.Backward(coefficients(seed+2, len(c.Rows)), nil))
	norm := must[float64](t)(s.e.GradNorm())
	check(t, s.e.Step(Hyper{LR: 1e-3, Beta1: 0.9, Beta2: 0.98, Eps: 1e-8, Decay: 0.1, ClipNorm: 1, GradNorm: norm}))
	return out.LogProb
}

// TestRegionEqualsApart: sampling and training by turns in one region, which every switch fills with NaN, gives the bits of sampler and executor
// side by side, in either storage and with an adapter; and no step after the first allocates.
func TestRegionEqualsApart(t *testing.T) {
	lora := &LoRA{Rank: 4, Alpha: 8, Targets: []string{AllLinear}}
	for _, c := range []struct {
		name string
		lora *LoRA
		o    LoadOptions
	}{
		{"f32", nil, LoadOptions{Train: true}},
		{"bf16", nil, LoadOptions{DType: kernels.BF16, Train: true, Optim: hilo}},
		{"adapter", lora, LoadOptions{DType: kernels.BF16, Train: true, Optim: hilo}},
	} {
		t.Run(c.name, func(t *testing.T) {
			type trace struct {
				tokens []Sampled
				lp     []float32
				sha    string
			}
			run := func(dev *kernels.Device, o LoadOptions) (out []trace) {
				s := newShared(t, dev, c.lora, o)
				defer s.close()
				allocs := 0
				for step := range uint64(3) {
					tr := trace{tokens: s.sample(t, 10*step)}
					s.enter(t, Training)
					tr.lp = s.update(t, step)
					s.enter(t, Rollout)
					tr.sha = must[string](t)(s.m.WeightsSHA256())
					out = append(out, tr)
					l := dev.Ledger()
					if n := l[len(l)-1].NumAlloc; step > 0 && n != allocs {
						t.Errorf("step %d: %d allocations, %d after the first", step, n, allocs)
					} else {
						allocs = n
					}
				}
				return out
			}
			apart := run(emuDevice(t), c.o)
			o := c.o
			o.Shared = true
			dev := emuDeviceWith(t, kernels.Options{ArenaBytes: 16 << 20, Poison: true})
			shared := run(dev, o)
			if n := dev.NumAlloc(); n != 1 {
				t.Errorf("%d allocations of the driver", n)
			}
			for i, want := range apart {
				if got := shared[i]; !slices.Equal(got.tokens, want.tokens) || !slices.Equal(got.lp, want.lp) || got.sha != want.sha {
					t.Errorf("step %d: %v and %v\n%v\n%v", i, got, want, got.lp, want.lp)
				}
			}
			if apart[0].sha == apart[1].sha {
				t.Error("weights do not change")
			}
		})
	}
}

// TestRegionIsTheFootprint: the plan for a GPU is what the ledger of the emulated device shows once the sampler has made its largest pass, and
// the region's buffers are its lines, byte for byte.
func TestRegionIsTheFootprint(t *testing.T) {
	for _, c := range []struct {
		name string
		lora *LoRA
		o    LoadOptions
	}{
		{"f32", nil, LoadOptions{Train: true}},
		{"f32 split, 8-bit states", nil, LoadOptions{Train: true, Optim: Recipe{HiLo: true, States: kernels.StateU8}}},
		{"bf16", nil, LoadOptions{DType: kernels.BF16, Train: true, Optim: hilo}},
		{"adapter", &LoRA{Rank: 3, Alpha: 5, Targets: []string{AllLinear}}, LoadOptions{DType: kernels.BF16, Train: true, Optim: hilo}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dev := emuDevice(t)
			c.o.Shared = true
			s := newShared(t, dev, c.lora, c.o)
			defer s.close()
			var work []Work
			for i := range sharing.runner.MaxSeqs {
				work = append(work, Work{Seq: acquire(t, s.r), Append: make([]int32, 21), Sample: true, Sampling: Sampling{Temperature: 1}, Key: Key{Lo: uint64(i)}})
			}
			_ = must[[]Sampled](t)(s.r.Step(context.Background(), work))
			pl := must[*MemoryPlanner](t)(NewMemoryPlanner(emuConfig(), dev))
			defer pl.Close()
			f := must[*Footprint](t)(pl.Footprint(Layout{Placement: OnGPU, DType: c.o.DType, Train: true, Recipe: c.o.Optim, LoRA: c.lora, Runner: sharing.runner, Context: 21, Exec: sharing.exec}))
			sum := func(lines ...string) (n int64) {
				for _, l := range lines {
					n += f.Bytes(l)
				}
				return n
			}
			got := ledgerOf(dev)
			for label, lines := range map[string][]string{
				"weights": {LineWeights, LineFrozen, LineAdapter}, "adapter scale": {LineScale}, "adapter workspace": {LineMerge}, "weights_lo": {LineLow},
				"slot copy indices": {LineSlots}, "sampler indices": {LineIndices}, "sampler workspace": {LineScratch},
			} {
				if got[label] != sum(lines...) {
					t.Errorf("%s: %d bytes are allocated, the plan says %d", label, got[label], sum(lines...))
				}
			}
			if got["rollout and training"] != f.Overlay() || f.Overlay() != s.g.Bytes() || f.Table != "emu" {
				t.Errorf("region of %d bytes, the plan says %d with workspaces of %s", got["rollout and training"], f.Overlay(), f.Table)
			}
			if got["total"] != f.Peak() {
				t.Errorf("in all: %d bytes are allocated, the plan says %d", got["total"], f.Peak())
			}
			phase := func(p Phase) map[string]int64 {
				held := map[string]int64{}
				for _, l := range s.g.Buffers(p) {
					held[l.Label] += l.Bytes
				}
				return held
			}
			for p, want := range map[Phase]map[string]int64{
				Rollout:  {"kv cache and recurrent state": sum(LineKV, LineRecurrent, LineConv), "sampler activations": sum(LineSampler)},
				Training: {"grads": sum(LineGrads), "batch": sum(LineBatch), "gradient norms": sum(LineNorms), "activations": sum(LineActs), "forest": sum(LineForest), "workspace": sum(LineWorkspace)},
			} {
				if held := phase(p); fmt.Sprint(held) != fmt.Sprint(want) {
					t.Errorf("%v holds %v, the plan says %v", p, held, want)
				}
			}
			if f.Phase(Rollout) <= 0 || f.Peak() != max(f.Phase(Rollout), f.Phase(Training)) || f.Bytes(LineWorkspace) < 1000 {
				t.Errorf("phases %d and %d, peak %d, workspace %d", f.Phase(Rollout), f.Phase(Training), f.Peak(), f.Bytes(LineWorkspace))
			}
		})
	}
}

// TestRegionMisuse: each half refuses to work in the other's phase, and says so; live sequences keep the sampler's phase; gradients are not
// there to be read; sizes beyond the plan are errors of the batch.
func TestRegionMisuse(t *testing.T) {
	dev := emuDeviceWith(t, kernels.Options{Poison: true})
	s := newShared(t, dev, nil, LoadOptions{DType: kernels.BF16, Train: true, Optim: hilo, Shared: true})
	defer s.close()
	refused := func(what string, err error, want string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", what, err, want)
		}
	}
	b := tree(1, 256, [2]int32{40, -1})
	exec := func(phase string) {
		t.Helper()
		_, err := s.e.Forward(b)
		refused("forward", err, phase)
		refused("clear", s.e.ZeroGrad(), phase)
		_, err = s.e.GradNorm()
		refused("norm", err, phase)
		refused("step", s.e.Step(Hyper{LR: 1}), phase)
		_, err = s.m.Params.State(Grads)
		refused("read", err, "the sampler's now")
		_, err = s.m.Params.ReadF32(Grads, EmbedName)
		refused("read", err, "the sampler's now")
		refused("write", s.m.Params.SetState(Grads, nil), "the sampler's now")
	}
	exec("the phase is rollout, not train")
	seq := acquire(t, s.r)
	refused("switch", s.g.Enter(Training), "1 sequences are live")
	check(t, s.r.Reset())
	s.enter(t, Training)
	_, err := s.r.Acquire()
	refused("acquire", err, "the phase is train, not rollout: the memory holds the other's data (sequences of before are gone; enter Rollout first)")
	_, err = s.r.Step(t.Context(), []Work{{Seq: seq, Append: []int32{1}}})
	refused("sampler step", err, "the phase is train")
	_, err = s.r.Fork(seq)
	refused("fork", err, "the phase is train")
	for _, e := range s.m.Params.Entries() {
		if g := must[[]float32](t)(s.m.Params.ReadF32(Grads, e.Name)); slices.Max(g) != 0 || slices.Min(g) != 0 {
			t.Fatalf("a fresh gradient of %s is not zero", e.Name)
		}
	}
	out := must[*Output](t)(s.e.Forward(b))
	s.enter(t, Rollout)
	s.enter(t, Training)
	refused("backward over a switch", s.e.Backward(out.LogProb, nil), "no forward pass")
	var segs [][2]int32
	for range 40 {
		segs = append(segs, [2]int32{2, -1})
	}
	_, err = s.e.Forward(tree(1, 256, segs...))
	refused("many segments", err, "40 segments with 80 states of the delta rule, at most 67 fit")
	if PlannedStates(130) != 67 || NumStates(2) != 2 || NumStates(65) != 3 {
		t.Errorf("%d states planned, %d and %d of a segment", PlannedStates(130), NumStates(2), NumStates(65))
	}
	_, err = NewExec(s.m, sharing.exec)
	refused("a second exec", err, "in use")
	_, err = NewRunner(s.m, sharing.runner)
	refused("a second runner", err, "in use")
	_, err = s.m.Share(sharing.runner, sharing.exec, 100)
	refused("a second region", err, "share some already")
	refused("no phase", s.g.Enter(Resident), "want rollout or train")
	apart := must[*Model](t)(NewRandom(emuConfig(), dev, 7, LoadOptions{Train: true}))
	defer apart.Close()
	_, err = apart.Share(sharing.runner, sharing.exec, 100)
	refused("gradients of its own", err, "memory of their own")
	early := must[*Model](t)(NewRandom(emuConfig(), dev, 7, LoadOptions{Train: true, Shared: true}))
	defer early.Close()
	_, err = NewExec(early, sharing.exec)
	refused("before Share", err, "Model.Share")
	tight := emuDeviceWith(t, kernels.Options{ArenaBytes: 3 << 20})
	small := must[*Model](t)(NewRandom(emuConfig(), tight, 7, LoadOptions{Train: true, Shared: true}))
	defer small.Close()
	_, err = small.Share(sharing.runner, sharing.exec, 100)
	refused("no room", err, "out of device memory")
	refused("no room", err, "an update ")
}

// TestRegionReopens: sampler, executor and region of other sizes take the place of closed ones.
func TestRegionReopens(t *testing.T) {
	dev := emuDeviceWith(t, kernels.Options{ArenaBytes: 16 << 20})
	s := newShared(t, dev, nil, LoadOptions{Train: true, Shared: true})
	defer s.close()
	want := s.sample(t, 1)
	for range 2 {
		s.r.Close()
		s.r = must[*Runner](t)(NewRunner(s.m, sharing.runner))
		if !slices.Equal(s.sample(t, 1), want) {
			t.Error("another sampler in the same region gives other tokens")
		}
		s.enter(t, Training)
		s.e.Close()
		s.e = must[*Exec](t)(NewExec(s.m, sharing.exec))
		s.enter(t, Rollout)
	}
	s.e.Close()
	s.r.Close()
	s.g.Close()
	s.g = must[*Region](t)(s.m.Share(RunnerOptions{MaxSeqs: 4, MaxTokens: 100, MaxRows: 64}, sharing.exec, 100))
	s.r = must[*Runner](t)(NewRunner(s.m, RunnerOptions{MaxSeqs: 4, MaxTokens: 100, MaxRows: 64}))
	if !slices.Equal(s.sample(t, 1), want) {
		t.Error("a sampler of another size gives other tokens")
	}
}

// TestRegionSpareRows: after a switch, which leaves NaN in every cache, page and state, batches that fill no bucket sample what their sequences
// do one by one, without graphs and in memory of their own.
func TestRegionSpareRows(t *testing.T) {
	for _, o := range []LoadOptions{{Train: true}, {DType: kernels.BF16, Train: true, Optim: hilo}} {
		t.Run(o.DType.String(), func(t *testing.T) {
			opt, ex := RunnerOptions{MaxSeqs: 20, MaxTokens: 20 * 64, MaxContext: 64, MaxRows: 200}, sharing.exec
			apart := must[*Model](t)(NewRandom(emuConfig(), emuDevice(t), 7, o))
			defer apart.Close()
			one := must[*Runner](t)(NewRunner(apart, opt))
			defer one.Close()
			one.graphs = nil
			o.Shared = true
			m := must[*Model](t)(NewRandom(emuConfig(), emuDeviceWith(t, kernels.Options{Poison: true}), 7, o))
			defer m.Close()
			g := must[*Region](t)(m.Share(opt, ex, 64))
			r := must[*Runner](t)(NewRunner(m, opt))
			defer r.Close()
			for _, n := range []int{3, 5, 9, 17} {
				check(t, r.Reset())
				check(t, g.Enter(Training))
				check(t, g.Enter(Rollout))
				play := func(r *Runner, first, n int) (all []Sampled) {
					var work []Work
					for i := first; i < first+n; i++ {
						work = append(work, Work{Seq: acquire(t, r), Append: ids(uint64(i), []int{1, 17, 15}[i%3], 256), Sample: true, Sampling: Sampling{Temperature: 1}, Key: Key{Lo: uint64(i)}})
					}
					for range 4 {
						got := must[[]Sampled](t)(r.Step(context.Background(), work))
						for i, s := range got {
							work[i].Append, work[i].Ctr = []int32{s.Token}, work[i].Ctr+1
						}
						all = append(all, got...)
					}
					return all
				}
				got := play(r, 0, n)
				for i := range n {
					check(t, one.Reset())
					for k, want := range play(one, i, 1) {
						if got[k*n+i] != want {
							t.Fatalf("token %d of sequence %d of %d: %v, alone %v", k, i, n, got[k*n+i], want)
						}
					}
				}
			}
		})
	}
}
