package trainer

import (
	"path/filepath"
	"strings"
	"testing"

	"harness-s/model"
)

// TestLoRAStep: a whole step with an adapter samples what it trains on, changes the adapter alone, and the saved adapter is the policy again.
func TestLoRAStep(t *testing.T) {
	base := filepath.Join(t.TempDir(), "base")
	m := realModel(t, 2)
	if err := m.Save(base); err != nil {
		t.Fatal(err)
	}
	load := func(dir string, o model.LoadOptions) (*model.Model, error) { return model.Load(dir, m.Dev, o) }
	cfg := testConfig()
	cfg.Model.Path, cfg.Optim.LR = base, 1e-2
	cfg.LoRA = LoRAConfig{Rank: 4, Targets: []string{model.AllLinear}}
	p, err := LoadPolicy(cfg, "", load)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	policy := modelPolicy{p}
	sum := func(p Policy) string {
		s, err := p.SHA256()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	start := sum(policy)
	if start != p.Adapter.Base.SHA256 || p.Adapter.LoRA.Alpha != 8 || p.NumTrainable() >= m.NumTrainable()/2 {
		t.Errorf("weights %s, base %s, alpha %g, %d of %d parameters trained", start, p.Adapter.Base.SHA256, p.Adapter.LoRA.Alpha, p.NumTrainable(), m.NumTrainable())
	}
	rep, err := BenchStep(t.Context(), cfg, realDeps(t, p, 24, 4096), BenchStepOptions{Groups: 3, Attempts: 4, Prompt: 70, New: 20, Vocab: 160, Steps: 2})
	if err != nil {
		t.Fatal(err)
	}
	if rep.GapMax > 1e-4 || policy.Version() != 3 || policy.OptStep() != 3 || sum(policy) == start {
		t.Errorf("gap %g, version %d, step %d, changed %t", rep.GapMax, policy.Version(), policy.OptStep(), sum(policy) != start)
	}
	saved, out := filepath.Join(t.TempDir(), "model"), filepath.Join(t.TempDir(), "out")
	if err := policy.Save(saved); err != nil {
		t.Fatal(err)
	}
	again, err := LoadPolicy(cfg, saved, load)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if sum(modelPolicy{again}) != sum(policy) || !again.Trainable().Has(model.MomentV) {
		t.Error("the saved adapter is another policy, or cannot be trained on")
	}
	for range 2 { // the second takes the place of the first, folder adapter included
		if err := policy.Export(out, model.SaveOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	whole, err := load(out, model.LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer whole.Close()
	beside, err := load(base, model.LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer beside.Close()
	if err := beside.LoadAdapter(filepath.Join(out, "adapter"), model.AdaptOptions{}); err != nil {
		t.Fatal(err)
	}
	if sum(modelPolicy{whole}) != sum(policy) || sum(modelPolicy{beside}) != sum(policy) {
		t.Error("the exported checkpoint, or its adapter, is another policy")
	}
	for name, c := range map[string]LoRAConfig{"lora.rank is 5": {Rank: 5, Alpha: 8, Targets: cfg.LoRA.Targets}, "lora.alpha is 3": {Rank: 4, Alpha: 3, Targets: cfg.LoRA.Targets},
		"lora.targets are": {Rank: 4, Targets: []string{"up_proj"}}, "lora.rank = 0": {}} {
		other := cfg
		other.LoRA = c
		if _, err := LoadPolicy(other, saved, load); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("resume with %+v: %v, want %q", c, err, name)
		}
	}
	same := cfg
	same.LoRA.Targets = p.Config.LinearNames()
	if q, err := LoadPolicy(same, saved, load); err != nil {
		t.Errorf("the same targets by name: %v", err)
	} else {
		q.Close()
	}
}

func TestLoRACaution(t *testing.T) {
	for _, c := range []struct {
		rank int
		lr   float64
		warn bool
	}{{0, 1e-6, false}, {8, 1e-6, true}, {8, 5e-6, false}, {8, 0, false}} {
		if got := (LoRAConfig{Rank: c.rank}).Caution(c.lr); (got != "") != c.warn {
			t.Errorf("rank %d, rate %g: %q", c.rank, c.lr, got)
		}
	}
}
