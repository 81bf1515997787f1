package trainer

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"harness-s/model"
)

// Sizes that FitMemory does not go beyond: decode gains nothing past 256 slots, where the matrix products are bound by arithmetic (gpu.md
// 3.3), and neither does training past 16k rows.
const (
	fitSlots = 256
	fitRows  = 16384
)

// ErrNoFit says that a configuration cannot be made to fit into a memory budget.
var ErrNoFit = errors.New("does not fit")

// FitMemory resolves layers and sets, and sizes what they leave to it for a budget: optimiser storage (recipe H of gpu.md 3.7), recompute only
// where needed, rows per micro-batch, decode slots, tasks per step. Keys in sets are never changed. When nothing fits, the error wraps
// ErrNoFit, has the shortfall in numbers, and its hint lists what would fit.
func FitMemory(layers []Layer, sets []string, pl *model.MemoryPlanner, params int64, b MemoryBudget) (*Resolved, *MemoryPlan, error) {
	fit := &memoryFit{layers: layers, sets: sets, pl: pl, params: params, budget: b}
	r, p, err := fit.size()
	if err != nil || p.Fits {
		return r, p, err
	}
	return nil, nil, &Error{Op: "size configuration", Err: fmt.Errorf("%w: %s", ErrNoFit, shortfall(p)), Hint: fit.alternatives(r.Config)}
}

type memoryFit struct {
	layers []Layer
	sets   []string
	pl     *model.MemoryPlanner
	params int64
	budget MemoryBudget
}

// load resolves with sized keys below the caller's.
func (m *memoryFit) load(sized []string, further ...string) (*Resolved, error) {
	var known []string
	for _, s := range sized {
		key, _, _ := strings.Cut(s, "=")
		if _, ok := findLeaf(key); ok {
			known = append(known, s)
		}
	}
	return Load(m.layers, append(append(known, m.sets...), further...))
}

// size is the best that fits, or the plan that misses by least.
func (m *memoryFit) size(further ...string) (*Resolved, *MemoryPlan, error) {
	sized := []string{"optim.states=bf16", "optim.master=hilo", "rollout.slots=1", "model.micro_rows=0"}
	var r *Resolved
	var p *MemoryPlan
	for _, mode := range []string{"none", "layers"} {
		var err error
		if r, err = m.load(append(sized, "model.recompute="+mode), further...); err != nil {
			return nil, nil, err
		}
		if p, _, err = m.budget.plan(r.Config, m.pl, m.params); err != nil {
			return nil, nil, err
		}
		if p.Fits {
			break
		}
	}
	if !p.Fits {
		return r, p, nil
	}
	rows, err := m.budget.largestRows(r.Config, m.pl)
	if err != nil {
		return nil, nil, err
	}
	most, err := m.mostSlots(r.Config)
	if err != nil {
		return nil, nil, err
	}
	slots := min(most, fitSlots)
	sized = append(sized[:2], "model.recompute="+r.Config.Model.Recompute, "model.micro_rows="+strconv.Itoa(max(p.MicroRows, min(rows, fitRows))),
		"rollout.slots="+strconv.Itoa(slots))
	if g := r.Config.Rollout.Group; slots > r.Config.Task.PerStep*g {
		sized = append(sized, "task.per_step="+strconv.Itoa((slots+g-1)/g))
	}
	if r, err = m.load(sized, further...); err != nil {
		return nil, nil, err
	}
	p, err = PlanMemory(r.Config, m.pl, m.params, m.budget)
	return r, p, err
}

func (m *memoryFit) mostSlots(cfg Config) (int, error) {
	f, err := m.pl.Footprint(MemoryLayout(cfg, m.budget.Placement))
	if err != nil {
		return 0, err
	}
	return m.budget.largestSlots(cfg, m.pl, f)
}

// shortfall says what a plan lacks.
func shortfall(p *MemoryPlan) string {
	have := p.Budget - p.Reserve
	var parts []string
	for _, ph := range []struct {
		name string
		need int64
	}{{fmt.Sprintf("an update of %d rows, recompute %s,", p.MicroRows, p.Recompute), p.Train}, {fmt.Sprintf("sampling with %d slots", p.Slots), p.Rollout}} {
		if ph.need > have {
			parts = append(parts, fmt.Sprintf("%s needs %s, %s too much", ph.name, gibText(ph.need), gibText(ph.need-have)))
		}
	}
	if parts == nil { // on the CPU both phases lie side by side
		parts = append(parts, fmt.Sprintf("sampler and executor need %s together, %s too much", gibText(p.Peak), gibText(p.Peak-have)))
	}
	adapter := ""
	if p.LoRARank > 0 {
		adapter = fmt.Sprintf(", adapter of rank %d", p.LoRARank)
	}
	return fmt.Sprintf("%.2f billion parameters at a context of %d tokens, optimiser states %s%s, in %s of which %s stay free: %s",
		float64(p.Params)/1e9, p.Context, p.States, adapter, gibText(p.Budget), gibText(p.Reserve), strings.Join(parts, "; "))
}

// alternatives are settings that would fit, as text to type.
func (m *memoryFit) alternatives(cfg Config) string {
	var fits, tried []string
	try := func(sets ...string) bool {
		for _, s := range sets {
			key, _, _ := strings.Cut(s, "=")
			if _, ok := findLeaf(key); !ok {
				return false
			}
		}
		tried = append(tried, sets[0])
		_, p, err := m.size(sets...)
		if err != nil || !p.Fits {
			return false
		}
		fits = append(fits, fmt.Sprintf("--set %s (%s of %s in use)", strings.Join(sets, " --set "), gibText(p.Peak), gibText(p.Budget)))
		return true
	}
	try("optim.states=8bit")
	try("lora.rank=32")
	for n := 1 << 20; n >= 512; n /= 2 {
		if n < cfg.Model.MaxLen && try(fmt.Sprintf("model.max_len=%d", n), fmt.Sprintf("rollout.max_new=%d", min(cfg.Rollout.MaxNew, n/2))) {
			break
		}
	}
	if fits == nil {
		return "none of " + strings.Join(tried, ", ") + " makes it fit: take a smaller model or a larger GPU"
	}
	return "what fits: " + strings.Join(fits, ", or ")
}

// gibText is a size for people.
func gibText(n int64) string { return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30)) }
