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

// CheckMemory refuses a configuration that does not fit into a budget: the error wraps ErrNoFit, has the shortfall in numbers, and its hint says
// what to change.
func CheckMemory(cfg Config, pl *model.MemoryPlanner, params int64, b MemoryBudget) error {
	p, _, err := b.plan(cfg, pl, params)
	if err != nil || p.Fits {
		return err
	}
	if p, err = PlanMemory(cfg, pl, params, b); err != nil {
		return err
	}
	return &Error{Op: "plan memory", Err: fmt.Errorf("%w: %s", ErrNoFit, shortfall(p)), Hint: p.Hint()}
}

// Hint says which settings would make a plan fit that does not.
func (p *MemoryPlan) Hint() string {
	var parts []string
	if p.MaxSlots > 0 && p.MaxSlots < p.Slots {
		parts = append(parts, fmt.Sprintf("--set rollout.slots=%d", p.MaxSlots))
	}
	switch {
	case p.MaxRows.Layers == 0:
		less := "--set lora.rank=32, "
		if p.LoRARank > 0 {
			less = ""
		} else if p.States != "8bit" {
			less = "--set optim.states=8bit, " + less
		}
		parts = append(parts, fmt.Sprintf("weights and optimiser leave no room for an update of 64 rows: less per weight, %sa smaller model, or more than %s", less, gibText(p.Budget)))
	case p.Recompute == "none" && p.MaxRows.None < p.MicroRows && p.MaxRows.Layers >= p.MicroRows:
		parts = append(parts, "--set model.recompute=layers")
	case max(p.MaxRows.None, p.MaxRows.Layers) < p.MicroRows && p.MicroRows > p.Context:
		parts = append(parts, fmt.Sprintf("--set model.micro_rows=%d", max(p.MaxRows.None, p.MaxRows.Layers, p.Context)))
	case max(p.MaxRows.None, p.MaxRows.Layers) < p.MicroRows:
		parts = append(parts, "a smaller model.max_len")
	}
	if parts == nil {
		parts = []string{"fewer slots or rows per micro-batch"}
	}
	return strings.Join(parts, " and ") + "; hs init --model DIR --gpu-gib N writes a configuration that fits, or says what would"
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
func gibText(n int64) string {
	if n < 1<<30 {
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
}
