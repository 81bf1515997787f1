package trainer

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"harness-s/kernels"
	"harness-s/model"
)

// watchedPhases is a Phases that notes every change, and fakes that fail in the wrong one.
type watchedPhases struct {
	now     model.Phase
	changes int
	fail    error
}

func (p *watchedPhases) Enter(to model.Phase) error {
	if p.fail != nil {
		return p.fail
	}
	if to != p.now {
		p.now, p.changes = to, p.changes+1
	}
	return nil
}

type phasedRunner struct {
	*fakeRunner
	p *watchedPhases
}

func (r phasedRunner) Step(ctx context.Context, work []model.Work) ([]model.Sampled, error) {
	if r.p.now != model.Rollout {
		return nil, errors.New("sampled while training")
	}
	return r.fakeRunner.Step(ctx, work)
}

type phasedModel struct {
	*fakeModel
	r *fakeRunner
	p *watchedPhases
}

func (m phasedModel) check() error {
	if m.p.now != model.Training || len(m.r.seqs) > 0 {
		return fmt.Errorf("trained in phase %v with %d live sequences", m.p.now, len(m.r.seqs))
	}
	return nil
}

func (m phasedModel) ZeroGrad() error { return errors.Join(m.check(), m.fakeModel.ZeroGrad()) }

func (m phasedModel) Forward(b *model.Batch) (*model.Output, error) {
	if err := m.check(); err != nil {
		return nil, err
	}
	return m.fakeModel.Forward(b)
}

func (m phasedModel) Step(h model.Hyper) error { return errors.Join(m.check(), m.fakeModel.Step(h)) }

func phased(w *world) *watchedPhases {
	p := &watchedPhases{now: model.Rollout}
	w.deps.Sampler, w.deps.Learner, w.deps.Phases = phasedRunner{w.runner, p}, phasedModel{w.model, w.runner, p}, p
	return p
}

// TestRunPhases: a run samples in one phase and trains in the other, and its results are those of a run without phases.
func TestRunPhases(t *testing.T) {
	w, x := newWorld(t, mixedRates, byRate), newWorld(t, mixedRates, byRate)
	p := phased(w)
	a, b := newRunDir(t), newRunDir(t)
	s, err := startRun(t, w, RunOptions{Dir: a, Sinks: jsonl(t, a)})
	if err != nil {
		t.Fatal(err)
	}
	if p.now != model.Rollout || p.changes != 2*s.Steps {
		t.Errorf("%d changes of phase in %d steps, ends in %v", p.changes, s.Steps, p.now)
	}
	want, err := startRun(t, x, RunOptions{Dir: b, Sinks: jsonl(t, b)})
	if err != nil || s.WeightsSHA256 != want.WeightsSHA256 {
		t.Errorf("weights %s, without phases %s (%v)", s.WeightsSHA256, want.WeightsSHA256, err)
	}
	got := runFiles(t, a)
	for k, v := range runFiles(t, b) {
		if got[k] != v {
			t.Errorf("%s differs", k)
		}
	}
}

// TestRunPhasesAfterFaults: a gate that stops an update leaves the sampler's phase, and a switch that fails is a fault of the engine.
func TestRunPhasesAfterFaults(t *testing.T) {
	w := newWorld(t, mixedRates, byRate)
	p := phased(w)
	w.model.nan = true
	if _, err := startRun(t, w, RunOptions{}); !errors.Is(err, ErrGate) || p.now != model.Rollout || p.changes != 2 {
		t.Errorf("%v, phase %v after %d changes", err, p.now, p.changes)
	}
	w = newWorld(t, mixedRates, byRate)
	p = phased(w)
	p.fail = errors.New("no memory")
	var e *EngineError
	if _, err := startRun(t, w, RunOptions{}); !errors.As(err, &e) || !errors.Is(err, p.fail) {
		t.Errorf("%v", err)
	}
}

// emuModel is realModel on the emulated device.
func emuModel(t *testing.T, o kernels.Options, lo model.LoadOptions) *model.Model {
	t.Helper()
	if o.LibDir = os.Getenv("HS_LIB_DIR"); o.LibDir == "" {
		o.LibDir = filepath.Join("..", "build")
	}
	dev, err := kernels.Open("emu", o)
	if errors.Is(err, kernels.ErrNoDevice) {
		t.Skipf("%v: make emu", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	c := model.TinyConfig()
	c.VocabSize, c.Hidden, c.Intermediate, c.NumLayers = 160, 64, 96, 4
	c.LayerTypes = c.LayerTypes[:4]
	m, err := model.NewRandom(c, dev, 3, lo)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		m.Close()
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// emuConfig are the sizes of a step on the emulated device.
func emuConfig() Config {
	cfg := testConfig()
	cfg.Model.Device, cfg.Model.DType = "emu", "float32"
	cfg.Model.MaxLen, cfg.Model.MicroRows, cfg.Rollout.Slots, cfg.Optim.LR = 64, 128, 8, 1e-3
	return cfg
}

// TestEmuSteps: steps of scheduler and executor in one region, poisoned at every change of phase, give the bits of both side by side; the
// second and third step allocate nothing, neither from the driver nor from the arena.
func TestEmuSteps(t *testing.T) {
	cfg := emuConfig()
	run := func(o kernels.Options, shared bool) (string, float64) {
		lo := cfg.training()
		lo.Shared = shared
		m := emuModel(t, o, lo)
		d, err := AssembleBench(cfg, m, AssembleOptions{Train: true})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		if shared != (d.Phases != nil) || d.MaxStates == 0 {
			t.Errorf("phases %v, %d states", d.Phases, d.MaxStates)
		}
		var gap float64
		var allocs [2]int
		for i := range allocs {
			rep, err := BenchStep(t.Context(), cfg, d, BenchStepOptions{Groups: 2, Attempts: 3, Prompt: 20, New: 8, Vocab: 160, Steps: 1, Seed: uint64(i)})
			if err != nil {
				t.Fatal(err)
			}
			l := m.Dev.Ledger()
			gap, allocs[i] = max(gap, rep.GapMax), m.Dev.NumAlloc()+l[len(l)-1].NumAlloc
		}
		if allocs[0] != allocs[1] || o.ArenaBytes > 0 && m.Dev.NumAlloc() != 1 {
			t.Errorf("%v allocations, %d of the driver", allocs, m.Dev.NumAlloc())
		}
		sum, err := m.WeightsSHA256()
		if err != nil {
			t.Fatal(err)
		}
		return sum, gap
	}
	apart, _ := run(kernels.Options{}, false)
	grown, _ := run(kernels.Options{Poison: true}, true)
	arena, gap := run(kernels.Options{Poison: true, ArenaBytes: 64 << 20}, true)
	if apart != grown || apart != arena || gap != 0 {
		t.Errorf("weights %s apart, %s in a region, %s in an arena; gap %g", apart, grown, arena, gap)
	}
}

// TestEmuMemoryPlan: what hs doctor plans for the emulated device is what its ledger shows once everything is assembled, but for what the sampler
// allocates in its first passes, which the plan says too.
func TestEmuMemoryPlan(t *testing.T) {
	cfg := emuConfig()
	for _, c := range []struct {
		name  string
		dtype string
		lora  int
	}{{"f32", "float32", 0}, {"bf16", "auto", 0}, {"adapter", "auto", 3}} {
		t.Run(c.name, func(t *testing.T) {
			cfg.Model.DType = c.dtype
			cfg.LoRA = LoRAConfig{Rank: c.lora, Targets: []string{model.AllLinear}}
			base := emuModel(t, kernels.Options{ArenaBytes: 64 << 20}, model.LoadOptions{DType: cfg.DType()})
			dir := filepath.Join(t.TempDir(), "base")
			if err := base.Save(dir); err != nil {
				t.Fatal(err)
			}
			base.Close()
			cfg.Model.Path = dir
			m, err := LoadPolicy(cfg, "", func(dir string, o model.LoadOptions) (*model.Model, error) { return model.Load(dir, base.Dev, o) })
			if err != nil {
				t.Fatal(err)
			}
			defer m.Close()
			d, err := AssembleBench(cfg, m, AssembleOptions{Train: true})
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			pl, err := model.NewMemoryPlanner(m.Config, m.Dev)
			if err != nil {
				t.Fatal(err)
			}
			defer pl.Close()
			p, err := PlanMemory(cfg, pl, m.Config.NumParams(), DeviceBudget(cfg, m.Dev.Info(), 0))
			if err != nil {
				t.Fatal(err)
			}
			held := map[string]int64{}
			for _, l := range m.Dev.Ledger() {
				held[l.Label] = l.Bytes
			}
			late := int64(0) // allocated by the sampler's passes, as large as the plan or smaller
			for _, l := range p.Lines {
				if label := map[string]string{model.LineIndices: "sampler indices", model.LineScratch: "sampler workspace"}[l.Name]; label != "" {
					if held[label] > l.Bytes {
						t.Errorf("%s: %d bytes, planned %d", label, held[label], l.Bytes)
					}
					late += l.Bytes - held[label]
				}
			}
			if held["total"]+late != p.Peak || !p.Fits || p.Kernels != "emu" || p.Placement != "gpu" || p.Budget != m.Dev.Info().Arena {
				t.Errorf("%d bytes are held and %d to come, the plan says %d: %+v", held["total"], late, p.Peak, p)
			}
		})
	}
}

// TestPackStates: no microbatch has more states of the delta rule than asked for, and a trajectory that alone has more is an error that says so.
func TestPackStates(t *testing.T) {
	var units [][]sequence
	for i := range 40 {
		q := sequence{traj: i, ids: iota32(1000*i, 20+i), pos: []int{5, 19 + i}}
		units = append(units, []sequence{q})
	}
	for _, most := range []int{2, 7, 30, 1000} {
		bs, err := pack(units, packLimits{rows: 4096, pairs: 4096, states: most})
		if err != nil {
			t.Fatal(err)
		}
		sizes := make([]int, len(bs))
		for i, b := range bs {
			for _, s := range b.Segments {
				sizes[i] += model.NumStates(int(s.Len))
			}
		}
		if slices.Max(sizes) > most || most > 2 && len(bs) > 1 && slices.Max(sizes) < most-1 {
			t.Errorf("at most %d: %v", most, sizes)
		}
	}
	if _, err := pack(units, packLimits{rows: 4096, pairs: 4096, states: 1}); err == nil || Hint(err) == "" {
		t.Errorf("a trajectory with too many: %v", err)
	}
}
