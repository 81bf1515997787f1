package model

import (
	"fmt"
	"slices"
	"unsafe"

	"harness-s/kernels"
)

// Placement says where and in which types a model lies in memory.
type Placement uint8

const (
	// OnCPU is sampler and executor allocated side by side.
	OnCPU Placement = iota
	// OnGPU is the plan of gpu.md 3.7 and 7.3 for cuda and emu: a Region that the sampler and the executor use in turn, float32 gradients, and
	// all memory allocated before the first step.
	OnGPU
)

func (p Placement) String() string {
	if p == OnGPU {
		return "gpu"
	}
	return "cpu"
}

// Phase says when the bytes of a line are in use.
type Phase uint8

// Phases. Resident bytes are in use in both others.
const (
	Resident Phase = iota
	Rollout
	Training
)

func (p Phase) String() string { return [...]string{"resident", "rollout", "train"}[p] }

// MarshalText writes the phase's name.
func (p Phase) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// Layout is what memory is planned for.
type Layout struct {
	Placement Placement
	DType     kernels.DType // of weights and activations, F32 or BF16
	Train     bool          // with gradients, optimiser and executor
	Recipe    Recipe        // storage of moments and master weights
	LoRA      *LoRA         // the adapter that is trained; nil trains every weight
	Runner    RunnerOptions // sampler; the zero value takes the defaults
	Context   int           // tokens of the longest sequence that is sampled, when Runner.MaxContext does not say
	Exec      ExecOptions   // MaxRows, MaxTargets, MaxStates and Recompute count; on a GPU MaxStates 0 is PlannedStates
	Segments  []Segment     // of the largest micro-batch on the CPU; nil = planSegments roots of equal length
	// ValidVocab is the number of vocabulary entries that exist, 0 = all (Model.ValidVocab).
	ValidVocab int64
}

// planSegments is the number of sequences that a planned micro-batch is made of: what the arena has room for without growing.
const planSegments = 32

// Line is one item of a footprint.
type Line struct {
	Name  string `json:"name"`
	Phase Phase  `json:"phase"`
	Bytes int64  `json:"bytes"`
}

// Names of the lines. They stand for the labels of the device's ledger, of which the caches are split in three; on a GPU the ledger has one
// entry for all that lies in the Region. LineLogitsWave is an estimate of the executor's workspace where the CUDA kernels' is not known.
const (
	LineWeights    = "weights"
	LineLow        = "low halves of the weights"
	LineMaster     = "float32 master weights"
	LineAdapter    = "adapter"
	LineFrozen     = "frozen copy of adapted weights"
	LineScale      = "adapter scale"
	LineMerge      = "adapter workspace"
	LineMoments    = "moments"
	LineGrads      = "gradients"
	LineActs       = "activations"
	LineBatch      = "batch"
	LineForest     = "forest"
	LineWorkspace  = "workspace"
	LineNorms      = "gradient norms"
	LineLogitsWave = "logits of one wave"
	LineKV         = "key-value pages"
	LineRecurrent  = "recurrent states"
	LineConv       = "convolution states"
	LineSlots      = "slot copy indices"
	LineSampler    = "sampler activations"
	LineIndices    = "sampler indices"
	LineScratch    = "sampler workspace"
	LinePadding    = "gaps between buffers"
)

// Footprint is the memory of a layout, line by line.
type Footprint struct {
	Placement Placement
	Table     string // whose workspaces are in it: "cpu", "emu" or "cuda"
	Lines     []Line

	end, gaps [Training + 1]int64 // of each phase's buffers in the region, on a GPU
}

// Bytes of a line, 0 when there is none of that name.
func (f *Footprint) Bytes(name string) int64 {
	for _, l := range f.Lines {
		if l.Name == name {
			return l.Bytes
		}
	}
	return 0
}

// Phase is what is in use in a phase, the resident lines included; Resident gives those alone.
func (f *Footprint) Phase(p Phase) int64 {
	var n int64
	for _, l := range f.Lines {
		if l.Phase == p || l.Phase == Resident {
			n += l.Bytes
		}
	}
	return n
}

// Peak is what must be there: on the CPU every line at once, on a GPU the larger phase.
func (f *Footprint) Peak() int64 {
	if f.Placement == OnGPU {
		return max(f.Phase(Rollout), f.Phase(Training))
	}
	return f.Phase(Rollout) + f.Phase(Training) - f.Phase(Resident)
}

// Overlay is the size of the Region on a GPU.
func (f *Footprint) Overlay() int64 { return max(f.end[Rollout], f.end[Training]) }

// buffer adds the lines of one buffer of a phase. In the Region it begins at a multiple of kernels.BufferAlign.
func (f *Footprint) buffer(p Phase, lines ...Line) {
	var n int64
	for _, l := range lines {
		f.add(p, l.Name, l.Bytes)
		n += l.Bytes
	}
	if f.Placement != OnGPU || p == Resident || n == 0 {
		return
	}
	at := (f.end[p] + kernels.BufferAlign - 1) / kernels.BufferAlign * kernels.BufferAlign
	f.gaps[p] += at - f.end[p]
	f.end[p] = at + n
}

func (f *Footprint) add(p Phase, name string, bytes int64) {
	if bytes > 0 {
		f.Lines = append(f.Lines, Line{name, p, bytes})
	}
}

// MemoryPlanner computes footprints of one configuration without allocating any of it. It keeps the compiled programs, so that many layouts
// can be tried; one goroutine at a time may use it.
type MemoryPlanner struct {
	cfg   *Config
	dev   *kernels.Device // answers for workspaces
	own   *kernels.Device // to close
	progs map[string]*Program
}

// NewMemoryPlanner makes a planner with the workspaces of dev's table; with nil those of the cpu. Close it before dev.
func NewMemoryPlanner(cfg *Config, dev *kernels.Device) (*MemoryPlanner, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	pl := &MemoryPlanner{cfg: cfg, dev: dev, progs: map[string]*Program{}}
	if dev == nil {
		null, err := kernels.Open("null", kernels.Options{})
		if err != nil {
			return nil, fmt.Errorf("plan memory: %w", err)
		}
		pl.dev, pl.own = null, null
	}
	return pl, nil
}

// Close releases the planner.
func (pl *MemoryPlanner) Close() error {
	if pl.own == nil {
		return nil
	}
	return pl.own.Close()
}

// native reports whether the workspaces are those of the CUDA kernels.
func (pl *MemoryPlanner) native() bool { return pl.dev.Info().Table != "cpu" }

// Program is the compiled training program that the layout's executor runs.
func (pl *MemoryPlanner) Program(l Layout) (*Program, error) {
	o := PlanOptions{DType: l.DType, Recompute: l.Exec.Recompute, ValidVocab: l.ValidVocab}
	key := fmt.Sprintf("%+v", o)
	if l.LoRA != nil {
		key += fmt.Sprintf("%+v", *l.LoRA)
	}
	if p := pl.progs[key]; p != nil {
		return p, nil
	}
	gr, err := pl.graph(l.LoRA)
	if err != nil {
		return nil, err
	}
	p, err := Compile(gr, o)
	if err == nil {
		pl.progs[key] = p
	}
	return p, err
}

func (pl *MemoryPlanner) graph(l *LoRA) (*Graph, error) {
	if l != nil {
		return BuildLoRA(pl.cfg, *l)
	}
	return Build(pl.cfg, Train)
}

// Footprint lists the memory of a layout. On the CPU it is what the ledger of the device shows after the sampler's largest pass and a
// micro-batch of the layout's segments; on a GPU what it shows once sampler and executor are made, with the Region of Share as one entry.
// Both byte for byte when the planner's device has the table of that device: without the CUDA kernels the workspaces of a GPU are left out but
// for an estimate of the largest. The driver's context and what graphs take is never in it: gpu.md 3.7 keeps 3-5 GiB free for those.
func (pl *MemoryPlanner) Footprint(l Layout) (*Footprint, error) {
	f := &Footprint{Placement: l.Placement, Table: pl.dev.Info().Table}
	if err := pl.parameters(f, &l); err != nil {
		return nil, fmt.Errorf("plan memory: %w", err)
	}
	if err := pl.sampler(f, &l); err != nil {
		return nil, fmt.Errorf("plan memory: %w", err)
	}
	if l.Train {
		if err := pl.executor(f, &l); err != nil {
			return nil, fmt.Errorf("plan memory: %w", err)
		}
	}
	for _, p := range []Phase{Rollout, Training} {
		f.add(p, LinePadding, f.gaps[p])
	}
	return f, nil
}

// padElems is the length of an arena of tensors.
func padElems(ts ...TensorSpec) (n int64) {
	for _, t := range ts {
		n += (t.Elems() + alignElems - 1) / alignElems * alignElems
	}
	return n
}

// adapter adds the low-rank matrices, W0 beside W', and what they are merged with (Adapter); it returns the trained elements.
func (pl *MemoryPlanner) adapter(f *Footprint, l *LoRA, dt kernels.DType) (trained int64, err error) {
	elem := int64(dt.Size())
	ms, err := l.Matrices(pl.cfg)
	if err != nil {
		return 0, err
	}
	trained = padElems(adapterTensors(ms, l.Rank)...)
	f.add(Resident, LineFrozen, padElems(ms...)*elem)
	f.add(Resident, LineAdapter, 2*trained*elem) // A, B and the scaled ones
	f.add(Resident, LineScale, int64(len(scaleParts(l.Scale(), dt)))*int64(l.Rank)*int64(l.Rank)*elem)
	f.add(Resident, LineMerge, mergeWorkspace(pl.dev, dt, ms, int64(l.Rank)))
	return trained, nil
}

// parameters adds weights, gradients and optimiser.
func (pl *MemoryPlanner) parameters(f *Footprint, l *Layout) error {
	if err := l.Recipe.check(l.DType, l.Train && l.Placement == OnCPU); err != nil {
		return err
	}
	var weights int64
	for _, t := range pl.cfg.Tensors() {
		weights += padElems(t) * int64(weightDType(l.DType, t.KeepF32).Size())
	}
	f.add(Resident, LineWeights, weights)
	trained := padElems(pl.cfg.Tensors()...)
	if l.LoRA != nil {
		var err error
		if trained, err = pl.adapter(f, l.LoRA, l.DType); err != nil {
			return err
		}
	}
	if !l.Train {
		return nil
	}
	switch {
	case l.Recipe.HiLo:
		f.add(Resident, LineLow, 2*trained)
	case l.DType == kernels.BF16:
		f.add(Resident, LineMaster, 4*trained)
	}
	f.add(Resident, LineMoments, 2*l.Recipe.momentBytes(trained))
	f.buffer(Training, Line{Name: LineGrads, Bytes: 4 * trained})
	return nil
}

// momentBytes is the size of one moment of n elements: values and, for 8-bit codes, a float32 scale per block (abi.h, AdamW).
func (r Recipe) momentBytes(n int64) int64 {
	switch r.States {
	case kernels.StateBF16:
		return 2 * n
	case kernels.StateU8:
		return n + 4*((n+kernels.StateBlock-1)/kernels.StateBlock)
	}
	return 4 * n
}

// sampler adds a Runner. What it uploads to and its workspace are not in a GPU's region.
func (pl *MemoryPlanner) sampler(f *Footprint, l *Layout) error {
	c, o, dt, fixed := pl.cfg, l.Runner, l.DType, Rollout
	if l.Placement == OnGPU {
		fixed = Resident
	}
	if o.MaxContext == 0 {
		o.MaxContext = l.Context
	}
	o.setDefaults()
	kv, rec, conv := cacheBytes(c, dt, o.MaxSeqs, o.numPages(), o.PageSize)
	f.buffer(Rollout, Line{Name: LineKV, Bytes: int64(2*c.NumFull()) * kv}, Line{Name: LineRecurrent, Bytes: int64(c.NumLinear()) * rec},
		Line{Name: LineConv, Bytes: int64(c.NumLinear()) * conv})
	f.add(fixed, LineSlots, 8*int64(o.MaxSeqs))
	var a activations
	var acts int64
	for _, x := range a.fields(c, dt, o.MaxRows) {
		acts += x.bytes
	}
	f.buffer(Rollout, Line{Name: LineSampler, Bytes: acts})
	indices, err := o.indexBytes(dt)
	if err != nil {
		return err
	}
	f.add(fixed, LineIndices, indices)
	if l.Placement == OnCPU || pl.native() {
		ws, err := samplerWorkspace(pl.dev, c, dt, o)
		if err != nil {
			return err
		}
		f.add(fixed, LineScratch, ws)
	}
	return nil
}

// executor adds an Exec that has run a micro-batch and a gradient norm.
func (pl *MemoryPlanner) executor(f *Footprint, l *Layout) error {
	o, dt := l.Exec, l.DType
	if o.MaxTargets == 0 {
		o.MaxTargets = o.MaxRows
	}
	if o.MaxRows < 1 {
		return fmt.Errorf("%d rows per micro-batch, want at least 1", o.MaxRows)
	}
	prog, err := pl.Program(*l)
	if err != nil {
		return err
	}
	if l.Placement == OnGPU {
		pl.planned(f, prog, o)
		return nil
	}
	forest, err := planForest(int64(o.MaxRows), planSegments)
	if l.Segments != nil {
		forest, err = kernels.NewForest(l.Segments, nil)
	}
	if err != nil {
		return err
	}
	sh := Shapes{Rows: int64(o.MaxRows), Targets: int64(o.MaxTargets), States: firstStates(o.MaxRows)}
	acts := prog.ArenaBytes(sh, dt)
	if need := statesOf(forest); need > sh.States {
		sh.States = moreStates(need, sh.States, o.MaxRows)
		acts = max(acts, prog.ArenaBytes(sh, dt))
	}
	f.add(Training, LineActs, acts)
	f.add(Training, LineBatch, batchBytes(o.MaxRows, o.MaxTargets, dt))
	f.add(Training, LineForest, forest.DeviceBytes())
	f.add(Training, LineNorms, 8*int64(len(prog.gr.Trained)))
	args := argsOf(forest)
	targets := min(o.MaxTargets, forest.NumRows)
	sh = Shapes{Rows: int64(forest.NumRows), Targets: int64(targets), States: statesOf(forest)}
	f.add(Training, LineWorkspace, max(prog.bind(pl.dev, sh, &args), normWorkspace(pl.dev, prog.gr.Trained), align))
	return nil
}

// planned adds the buffers of an Exec with MaxStates in the order that it allocates them in.
func (pl *MemoryPlanner) planned(f *Footprint, prog *Program, o ExecOptions) {
	if o.MaxStates == 0 {
		o.MaxStates = PlannedStates(o.MaxRows)
	}
	r := prog.room(pl.dev, o)
	ws := Line{Name: LineWorkspace, Bytes: r.ws}
	if !pl.native() {
		ws = Line{Name: LineLogitsWave, Bytes: waveRows * int64(pl.cfg.VocabSize) * 4}
	}
	for _, l := range []Line{{Name: LineBatch, Bytes: r.batch}, {Name: LineNorms, Bytes: r.norms}, {Name: LineActs, Bytes: r.acts}, {Name: LineForest, Bytes: r.forest}, ws} {
		f.buffer(Training, l)
	}
}

// execRoom is the memory of an Exec with MaxStates, for the largest batch.
type execRoom struct {
	shapes                         Shapes
	batch, norms, acts, forest, ws int64
}

// room sizes an Exec for every batch of up to MaxRows rows, MaxTargets targets and MaxStates states. Workspaces grow with each of the numbers
// they depend on, so that those of the largest are enough for all: a segment has two states at least.
func (p *Program) room(dev *kernels.Device, o ExecOptions) execRoom {
	sh := Shapes{Rows: int64(o.MaxRows), Targets: int64(o.MaxTargets), States: int64(o.MaxStates)}
	segs := max(min(o.MaxStates/2, o.MaxRows), 1)
	args := kernels.ForestArgs{NumSeg: int32(segs), NumRows: int32(o.MaxRows), NumChunks: int32(o.MaxStates), MaxLen: int32(o.MaxRows)}
	return execRoom{shapes: sh, batch: batchBytes(o.MaxRows, o.MaxTargets, p.opt.DType), norms: 8 * int64(len(p.gr.Trained)), acts: p.ArenaBytes(sh, p.opt.DType),
		forest: kernels.ForestBytes(o.MaxRows, segs), ws: max(p.widest(dev, sh, &args), normWorkspace(dev, p.gr.Trained), align)}
}

// widest is the workspace that the records share, with the whole vocabulary at the head, whichever of its entries exist.
func (p *Program) widest(dev *kernels.Device, sh Shapes, f *kernels.ForestArgs) int64 {
	ws := p.bind(dev, sh, f)
	for _, r := range p.records {
		switch r.op {
		case kernels.OpLMHead:
			a := *(*kernels.LMHeadArgs)(r.args)
			a.VocabValid = a.V
			ws = max(ws, dev.Workspace(r.op, unsafe.Pointer(&a)))
		case kernels.OpLMHeadBwd:
			a := *(*kernels.LMHeadBwdArgs)(r.args)
			a.VocabValid = a.V
			ws = max(ws, dev.Workspace(r.op, unsafe.Pointer(&a)))
		}
	}
	return ws
}

// normWorkspace is what the norm of the gradients needs.
func normWorkspace(dev *kernels.Device, ts []TensorSpec) (most int64) {
	for _, t := range ts {
		most = max(most, sumSqWorkspace(dev, kernels.F32, t.Elems()))
	}
	return most
}

// waveRows is how many rows of logits a GPU's head holds at a time (gpu.md 3.7).
const waveRows = 1024

// planForest is rows split over as many roots as asked for, at most one a row.
func planForest(rows int64, roots int) (*kernels.Forest, error) {
	n := max(min(int64(roots), rows), 1)
	segs := make([]Segment, n)
	for i := range segs {
		segs[i] = Segment{Len: int32(rows / n), Parent: -1}
		if int64(i) < rows%n {
			segs[i].Len++
		}
	}
	return kernels.NewForest(segs, nil)
}

// argsOf has the numbers of a forest without its arrays, which workspaces do not depend on.
func argsOf(f *kernels.Forest) kernels.ForestArgs {
	return kernels.ForestArgs{NumSeg: int32(f.NumSeg), NumRows: int32(f.NumRows), NumChunks: int32(f.NumChunks), MaxLen: slices.Max(f.Len)}
}
