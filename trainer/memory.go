package trainer

import (
	"harness-s/kernels"
	"harness-s/model"
)

// runnerOptions are the sizes of the sampler. Shared prompts hold sequences of their own next to the live ones.
func runnerOptions(cfg Config) model.RunnerOptions {
	live, kv := cfg.Rollout.Slots, cfg.Rollout.KVTokens
	if kv == 0 {
		kv = live * cfg.Model.MaxLen
	}
	seqs := live + max(live/4, 2)
	return model.RunnerOptions{MaxSeqs: seqs, MaxTokens: kv, MaxContext: cfg.Model.MaxLen, PageSize: 16, MaxRows: max(1024, seqs)}
}

// execOptions are the sizes of the executor.
func execOptions(cfg Config) model.ExecOptions {
	rows := cfg.Model.MicroRows
	if rows == 0 {
		rows = max(2048, cfg.Model.MaxLen)
	}
	return model.ExecOptions{Temperature: cfg.Rollout.Temperature, MaxRows: rows, MaxTargets: rows, Recompute: cfg.Model.Recompute == "layers", Entropy: true}
}

// Placement is where a configuration runs: sampler and executor side by side on the CPU, or by turns in one region on cuda and emu.
func (c Config) Placement() model.Placement {
	if onGPU(c.Model.Device) {
		return model.OnGPU
	}
	return model.OnCPU
}

// MemoryLayout is what a training run of the configuration holds.
func MemoryLayout(cfg Config, at model.Placement) model.Layout {
	cfg = cfg.placed(at)
	l := model.Layout{Placement: at, DType: cfg.DType(), Train: true, Recipe: cfg.Recipe(), Runner: runnerOptions(cfg), Context: cfg.Model.MaxLen, Exec: execOptions(cfg)}
	if a, on := cfg.LoRA.Adapter(); on {
		l.LoRA = &a
	}
	return l
}

// placed is the configuration as it would run there.
func (c Config) placed(at model.Placement) Config {
	if at == model.OnGPU && c.Placement() != at {
		c.Model.Device = "cuda"
	}
	return c
}

// MemoryBudget is the memory that a plan must fit into. Reserve is kept free for what the plan does not count.
type MemoryBudget struct {
	Placement      model.Placement
	Bytes, Reserve int64
}

// gpuReserve is for driver context, library workspaces, graphs and fragmentation: the upper end of gpu.md 3.7.
const gpuReserve = 5 << 30

// GPUBudget is the budget of a GPU with so many bytes of usable memory.
func GPUBudget(bytes int64) MemoryBudget {
	return MemoryBudget{Placement: model.OnGPU, Bytes: bytes, Reserve: gpuReserve}
}

// arenaSlack is what buffers in an arena take beyond their bytes, since each begins at a multiple of 256.
const arenaSlack = 64 << 10

// DeviceBudget is the budget of an open device that the configuration runs on; ram is the machine's memory, which is the device's where that
// has no arena.
func DeviceBudget(cfg Config, i kernels.Info, ram int64) MemoryBudget {
	b := CPUBudget(ram)
	b.Placement = cfg.Placement()
	if i.Arena > 0 {
		b.Bytes, b.Reserve = i.Arena, arenaSlack
	}
	return b
}

// CPUBudget is the budget of a machine with so many bytes of memory, a tenth of which belongs to the rest of the process and the system.
func CPUBudget(bytes int64) MemoryBudget {
	return MemoryBudget{Placement: model.OnCPU, Bytes: bytes, Reserve: bytes / 10}
}

// MemoryPlan is the memory of a configuration within a budget. Sizes are in bytes; the JSON keys are stable.
type MemoryPlan struct {
	Placement string       `json:"placement"` // cpu or gpu
	DType     string       `json:"dtype"`     // of weights and activations
	Kernels   string       `json:"kernels"`   // whose workspaces are counted: cpu, emu or cuda; on a gpu cpu stands for an estimate
	Params    int64        `json:"params"`
	Context   int          `json:"context"` // model.max_len
	Slots     int          `json:"slots"`
	MicroRows int          `json:"micro_rows"`
	Recompute string       `json:"recompute"`
	States    string       `json:"states"`
	Master    string       `json:"master"`
	LoRARank  int          `json:"lora_rank"`
	Lines     []model.Line `json:"lines"`
	Rollout   int64        `json:"rollout_bytes"` // in use while attempts are sampled
	Train     int64        `json:"train_bytes"`   // in use during an update
	Peak      int64        `json:"peak_bytes"`
	Budget    int64        `json:"budget_bytes"`
	Reserve   int64        `json:"reserve_bytes"`
	Headroom  int64        `json:"headroom_bytes"` // budget - reserve - peak; negative = shortfall
	Fits      bool         `json:"fits"`
	MaxSlots  int          `json:"max_slots"` // largest rollout.slots that fits
	MaxRows   MaxRows      `json:"max_rows"`  // largest model.micro_rows that fits, by model.recompute
	FLOPs     TokenFLOPs   `json:"flops_per_token"`
}

// MaxRows are rows per micro-batch that fit, 0 when not even 64 do.
type MaxRows struct {
	None   int `json:"none"`
	Layers int `json:"layers"`
}

// TokenFLOPs are floating-point operations per token of a sequence of the configured context. Train is forward, recomputation and backward.
type TokenFLOPs struct {
	Forward float64 `json:"forward"`
	Train   float64 `json:"train"`
}

// PlanMemory works out the memory of a configuration and what fits into the budget.
func PlanMemory(cfg Config, pl *model.MemoryPlanner, params int64, b MemoryBudget) (*MemoryPlan, error) {
	p, f, err := b.plan(cfg, pl, params)
	if err != nil {
		return nil, err
	}
	if p.MaxSlots, err = b.largestSlots(cfg, pl, f); err != nil {
		return nil, err
	}
	for mode, at := range map[string]*int{"none": &p.MaxRows.None, "layers": &p.MaxRows.Layers} {
		c := cfg
		c.Model.Recompute = mode
		if *at, err = b.largestRows(c, pl); err != nil {
			return nil, err
		}
	}
	prog, err := pl.Program(MemoryLayout(cfg, b.Placement))
	if err != nil {
		return nil, err
	}
	n := int64(cfg.Model.MaxLen)
	forward, backward := prog.FLOPs(model.Shapes{Rows: n, Targets: n})
	p.FLOPs = TokenFLOPs{Forward: forward / float64(n), Train: (forward + backward) / float64(n)}
	return p, nil
}

// plan is the plan without what is searched for and the operations.
func (b MemoryBudget) plan(cfg Config, pl *model.MemoryPlanner, params int64) (*MemoryPlan, *model.Footprint, error) {
	l := MemoryLayout(cfg, b.Placement)
	f, err := pl.Footprint(l)
	if err != nil {
		return nil, nil, err
	}
	p := &MemoryPlan{Placement: b.Placement.String(), DType: word(l.DType), Kernels: f.Table, Params: params, Context: cfg.Model.MaxLen, Slots: cfg.Rollout.Slots, MicroRows: l.Exec.MaxRows,
		Recompute: cfg.Model.Recompute, States: cfg.Optim.States, Master: cfg.placed(b.Placement).master(), Lines: f.Lines,
		Rollout: f.Phase(model.Rollout), Train: f.Phase(model.Training), Peak: f.Peak(), Budget: b.Bytes, Reserve: b.Reserve}
	if l.LoRA != nil {
		p.LoRARank = l.LoRA.Rank
	}
	p.Headroom = b.Bytes - b.Reserve - p.Peak
	p.Fits = p.Headroom >= 0
	return p, f, nil
}

// maxPlanSlots and maxPlanRows are the largest values the configuration accepts.
const maxPlanSlots, maxPlanRows = 65536, 1 << 20

// largestSlots varies the sampler of a plan; what is in use beside it stays: what is resident and, on the CPU, the executor.
func (b MemoryBudget) largestSlots(cfg Config, pl *model.MemoryPlanner, f *model.Footprint) (int, error) {
	sampler := func(n int) (*model.Footprint, error) {
		cfg.Rollout.Slots = n
		l := MemoryLayout(cfg, b.Placement)
		l.Train = false
		return pl.Footprint(l)
	}
	s, err := sampler(cfg.Rollout.Slots)
	if err != nil {
		return 0, err
	}
	beside := f.Phase(model.Resident) - s.Phase(model.Resident)
	if b.Placement == model.OnCPU {
		beside = f.Phase(model.Training) - s.Phase(model.Resident)
	}
	return largest(maxPlanSlots, func(n int) (bool, error) {
		s, err := sampler(n)
		return err == nil && beside+s.Phase(model.Rollout) <= b.Bytes-b.Reserve, err
	})
}

// largestRows varies the executor; rows are a multiple of 64, the chunk of the delta rule.
func (b MemoryBudget) largestRows(cfg Config, pl *model.MemoryPlanner) (int, error) {
	const unit = 64
	n, err := largest(maxPlanRows/unit, func(n int) (bool, error) {
		cfg.Model.MicroRows = n * unit
		f, err := pl.Footprint(MemoryLayout(cfg, b.Placement))
		if err != nil {
			return false, err
		}
		need := f.Peak()
		if b.Placement == model.OnGPU {
			need = f.Phase(model.Training)
		}
		return need <= b.Bytes-b.Reserve, nil
	})
	return n * unit, err
}

// largest is the largest n from 1 to most with ok(n), 0 when there is none; ok must not become true again above a value where it is false.
func largest(most int, ok func(int) (bool, error)) (int, error) {
	lo, hi := 0, 1 // ok(lo) or lo = 0; hi is to be tried
	for hi <= most {
		good, err := ok(hi)
		if err != nil {
			return 0, err
		}
		if !good {
			break
		}
		lo, hi = hi, 2*hi
	}
	hi = min(hi, most+1)
	for hi-lo > 1 {
		mid := lo + (hi-lo)/2
		good, err := ok(mid)
		if err != nil {
			return 0, err
		}
		if good {
			lo = mid
		} else {
			hi = mid
		}
	}
	return lo, nil
}
