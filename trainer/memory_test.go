package trainer

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"harness-s/model"
)

func TestLargest(t *testing.T) {
	for _, limit := range []int{0, 1, 2, 3, 7, 8, 64, 99, 100, 1000} {
		calls := 0
		got, err := largest(100, func(n int) (bool, error) { calls++; return n <= limit, nil })
		if want := min(limit, 100); err != nil || got != want || calls > 16 {
			t.Errorf("limit %d: %d in %d calls, want %d (%v)", limit, got, calls, want, err)
		}
	}
	bad := errors.New("no")
	for at := range 3 {
		if _, err := largest(100, func(n int) (bool, error) { at--; return n < 50, map[bool]error{true: bad}[at < 0] }); !errors.Is(err, bad) {
			t.Errorf("error %v", err)
		}
	}
}

// TestMemoryPlanIsWhatRunsHold: a run's sampler and executor take what the plan for the CPU says, whatever sizes the configuration has.
func TestMemoryPlanIsWhatRunsHold(t *testing.T) {
	for _, sets := range [][]string{
		{"model.max_len=256", "rollout.max_new=64", "rollout.slots=5"},
		{"model.max_len=100", "rollout.max_new=64", "rollout.slots=1", "model.micro_rows=333", "model.recompute=layers", "rollout.kv_tokens=1000"},
	} {
		t.Run(sets[2], func(t *testing.T) {
			res, err := Load(nil, sets)
			if err != nil {
				t.Fatal(err)
			}
			m := realModel(t, 2)
			d, err := AssembleBench(res.Config, m, AssembleOptions{Train: true})
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			pl, err := model.NewMemoryPlanner(m.Config, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer pl.Close()
			f, err := pl.Footprint(MemoryLayout(res.Config, model.OnCPU))
			if err != nil {
				t.Fatal(err)
			}
			held := map[string]int64{}
			for _, l := range m.Dev.Ledger() {
				held[l.Label] = l.Bytes
			}
			for label, want := range map[string]int64{
				"weights": f.Bytes(model.LineWeights), "kv cache and recurrent state": f.Bytes(model.LineKV) + f.Bytes(model.LineRecurrent) + f.Bytes(model.LineConv),
				"sampler activations": f.Bytes(model.LineSampler), "sampler indices": f.Bytes(model.LineIndices),
				"activations": f.Bytes(model.LineActs), "batch": f.Bytes(model.LineBatch),
			} {
				if held[label] != want || want == 0 {
					t.Errorf("%s: %d bytes are held, the plan says %d", label, held[label], want)
				}
			}
		})
	}
}

// TestMemoryPlanLimits: the largest slots and rows of a plan fit, and the next ones do not, in either placement.
func TestMemoryPlanLimits(t *testing.T) {
	_, mc, err := model.Like("0.8b", 4, "BF16")
	if err != nil {
		t.Fatal(err)
	}
	pl, err := model.NewMemoryPlanner(mc, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer pl.Close()
	cfg := Defaults()
	cfg.Model.MaxLen, cfg.Rollout.Slots, cfg.Model.MicroRows = 2048, 16, 4096
	for _, b := range []MemoryBudget{GPUBudget(24 << 30), CPUBudget(40 << 30)} {
		t.Run(b.Placement.String(), func(t *testing.T) {
			plan := func(c Config) *MemoryPlan {
				p, err := PlanMemory(c, pl, mc.NumParams(), b)
				if err != nil {
					t.Fatal(err)
				}
				return p
			}
			p := plan(cfg)
			if !p.Fits || p.Headroom != p.Budget-p.Reserve-p.Peak || p.MaxSlots <= cfg.Rollout.Slots || p.MaxRows.Layers < p.MaxRows.None || p.MaxRows.None < cfg.Model.MicroRows {
				t.Fatalf("%+v", p)
			}
			for more, want := range map[int]bool{0: true, 1: false} {
				c := cfg
				c.Rollout.Slots = p.MaxSlots + more
				if got := plan(c).Fits; got != want {
					t.Errorf("%d slots, %d more than the largest: fits %t", c.Rollout.Slots, more, got)
				}
				for _, mode := range []string{"none", "layers"} {
					c = cfg
					c.Model.Recompute = mode
					c.Model.MicroRows = map[string]int{"none": p.MaxRows.None, "layers": p.MaxRows.Layers}[mode] + 64*more
					if got := plan(c).Fits; got != want {
						t.Errorf("recompute %s, %d rows: fits %t", mode, c.Model.MicroRows, got)
					}
				}
			}
		})
	}
}

// TestFitMemory: sizing leaves what is set alone, uses the budget, and refuses with numbers and with settings that do fit.
func TestFitMemory(t *testing.T) {
	_, mc, err := model.Like("4b", 0, "BF16")
	if err != nil {
		t.Fatal(err)
	}
	pl, err := model.NewMemoryPlanner(mc, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer pl.Close()
	fit := func(gib int64, sets ...string) (*Resolved, *MemoryPlan, error) {
		return FitMemory(nil, sets, pl, mc.NumParams(), GPUBudget(gib<<30))
	}
	r, p, err := fit(139)
	if err != nil {
		t.Fatal(err)
	}
	if c := r.Config; !p.Fits || c.Rollout.Slots != min(p.MaxSlots, fitSlots) || c.Model.MicroRows < c.Model.MaxLen || p.MicroRows != c.Model.MicroRows || c.Rollout.Slots < 32 {
		t.Errorf("sized %d slots and %d rows: %+v", c.Rollout.Slots, c.Model.MicroRows, p)
	}
	if r, p, err = fit(139, "model.max_len=4096", "rollout.slots=7", "model.recompute=layers", "model.micro_rows=5000"); err != nil {
		t.Fatal(err)
	}
	if c := r.Config; c.Rollout.Slots != 7 || c.Model.MicroRows != 5000 || c.Model.Recompute != "layers" || !p.Fits {
		t.Errorf("changed what was set: %d slots, %d rows, recompute %s", c.Rollout.Slots, c.Model.MicroRows, c.Model.Recompute)
	}
	if r, _, err = fit(139, "model.max_len=4096"); err != nil {
		t.Fatal(err)
	}
	if c := r.Config; c.Rollout.Slots != fitSlots || c.Task.PerStep*c.Rollout.Group < c.Rollout.Slots {
		t.Errorf("%d tasks of %d attempts for %d slots", c.Task.PerStep, c.Rollout.Group, c.Rollout.Slots)
	}
	_, _, err = fit(8)
	if !errors.Is(err, ErrNoFit) || !strings.Contains(err.Error(), "4.21 billion") || !strings.Contains(err.Error(), "too much") {
		t.Errorf("8 GiB: %v", err)
	}
	// What an error proposes must fit.
	low, high := int64(8), int64(139)
	for high-low > 1 { // the smallest GPU on which the default fits
		mid := (low + high) / 2
		if _, _, err := fit(mid); err == nil {
			high = mid
		} else {
			low = mid
		}
	}
	_, _, err = fit(low)
	var e *Error
	if !errors.As(err, &e) || !strings.Contains(e.Hint, "--set model.max_len=") {
		t.Fatalf("%d GiB: %v", low, err)
	}
	for _, way := range strings.Split(strings.TrimPrefix(e.Hint, "what fits: "), ", or ") {
		way, _, _ = strings.Cut(way, " (")
		sets := strings.Split(strings.TrimPrefix(way, "--set "), " --set ")
		if _, p, err := fit(low, sets...); err != nil || !p.Fits {
			t.Errorf("%d GiB with %v, as proposed: %v", low, sets, err)
		}
	}
}

func TestMicroRows(t *testing.T) {
	_, err := Load(nil, []string{"model.micro_rows=4096"})
	if !errors.Is(err, ErrConfig) || !strings.Contains(fmt.Sprint(err), "model.micro_rows = 4096") || !strings.Contains(fmt.Sprint(err), "max_len (32768)") {
		t.Errorf("%v", err)
	}
	if n := execOptions(Defaults()).MaxRows; n != 32768 {
		t.Errorf("%d rows by default", n)
	}
}

// TestCheckMemory: a configuration that does not fit is refused with both phases' shortfall and settings to change; each that the hint
// proposes alone makes the plan fit.
func TestCheckMemory(t *testing.T) {
	_, mc, err := model.Like("4b", 0, "BF16")
	if err != nil {
		t.Fatal(err)
	}
	pl, err := model.NewMemoryPlanner(mc, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer pl.Close()
	base := []string{"model.max_len=4096", "rollout.slots=64", "model.recompute=layers", "optim.states=bf16", "model.dtype=bfloat16"}
	for _, c := range []struct {
		name string
		gib  int64
		sets []string
		want []string // of error and hint; none = fits
	}{
		{"fits", 80, nil, nil},
		{"slots", 80, []string{"rollout.slots=300"}, []string{"sampling with 300 slots needs ", "--set rollout.slots="}},
		{"recompute", 80, []string{"model.recompute=none", "model.micro_rows=8192"}, []string{"an update of 8192 rows, recompute none, needs ", "--set model.recompute=layers"}},
		{"rows", 80, []string{"model.micro_rows=262144"}, []string{"an update of 262144 rows, recompute layers, needs ", "--set model.micro_rows="}},
		{"moments", 46, []string{"optim.states=fp32"}, []string{"leave no room for an update of 64 rows", "--set optim.states=8bit", "--set lora.rank=32"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			check := func(sets ...string) error {
				r, err := Load(nil, append(append(append([]string{}, base...), c.sets...), sets...))
				if err != nil {
					t.Fatal(err)
				}
				return CheckMemory(r.Config, pl, mc.NumParams(), GPUBudget(c.gib<<30))
			}
			err := check()
			if c.want == nil {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if !errors.Is(err, ErrNoFit) {
				t.Fatal(err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error()+"\n"+Hint(err), w) {
					t.Errorf("no %q in %v\n%s", w, err, Hint(err))
				}
			}
			if set, ok := strings.CutPrefix(Hint(err), "--set "); ok {
				set, _, _ = strings.Cut(set, ";")
				if err := check(set); err != nil {
					t.Errorf("with %s, as proposed: %v", set, err)
				}
			}
		})
	}
}
