package model

import (
	"errors"
	"fmt"

	"harness-s/kernels"
)

// Region is the device memory that sampler and executor use in turn (gpu.md 7.3): caches and activations of a Runner while Rollout is the
// phase, gradients and everything of an Exec while it is Training. Weights, moments, and what the sampler uploads per pass lie outside. It
// holds at most one Runner and one Exec at a time, of the sizes that it was made for. It belongs to the goroutine that owns the device.
type Region struct {
	m      *Model
	ov     *kernels.Overlay
	phases map[Phase]*kernels.Phase
	grads  *kernels.Buffer
	runner *Runner
	exec   *Exec
}

// Shared reports whether the model was loaded to Share memory and does not yet.
func (m *Model) Shared() bool { return m.Trainable().shared && m.region == nil }

// Share makes the Region of a model that was loaded with Shared, for a sampler and an executor of the given sizes and sequences of up to context
// tokens. NewRunner and NewExec take their memory from it from then on, each in its phase; Rollout is entered. What does not fit is an error
// with the bytes of both phases.
func (m *Model) Share(r RunnerOptions, x ExecOptions, context int) (*Region, error) {
	p := m.Trainable()
	switch {
	case m.region != nil:
		return nil, errors.New("share memory: sampler and executor share some already")
	case !p.shared:
		return nil, &Error{Op: "share memory", Err: errors.New("the gradients have memory of their own, or there are none"), Hint: "load the model with LoadOptions.Train and Shared"}
	}
	f, err := m.footprint(r, x, context)
	if err != nil {
		return nil, fmt.Errorf("share memory: %w", err)
	}
	ov, err := m.Dev.NewOverlay(f.Overlay(), "rollout and training", Rollout.String(), Training.String())
	if err != nil {
		return nil, &Error{Op: "share memory", Err: fmt.Errorf("%w; sampling takes %d bytes, an update %d", err, f.end[Rollout], f.end[Training]),
			Hint: "lower rollout.slots or model.micro_rows, or set model.recompute = \"layers\"; hs doctor shows the plan"}
	}
	g := &Region{m: m, ov: ov, phases: map[Phase]*kernels.Phase{Rollout: ov.Phase(0), Training: ov.Phase(1)}}
	if g.grads, err = g.phases[Training].Alloc(p.arenaBytes(Grads), Grads.String()); err != nil {
		ov.Free()
		return nil, fmt.Errorf("share memory: %w", err)
	}
	p.arena[Grads] = g.grads
	m.region = g
	return g, g.Enter(Rollout)
}

// footprint is the plan of a Region, with the workspaces of the model's device.
func (m *Model) footprint(r RunnerOptions, x ExecOptions, context int) (f *Footprint, err error) {
	pl, err := NewMemoryPlanner(m.Config, m.Dev)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, pl.Close()) }()
	l := Layout{Placement: OnGPU, DType: m.Params.DType, Train: true, Recipe: m.Trainable().recipe, Runner: r, Context: context, Exec: x}
	if m.Adapter != nil {
		l.LoRA = &m.Adapter.LoRA
	}
	return pl.Footprint(l)
}

// Enter makes p, Rollout or Training, the phase. Training needs a sampler without live sequences, whose state would be lost, and starts with
// gradients of zero; Rollout drops gradients and what the executor kept for Backward. To enter the current phase again does nothing.
func (g *Region) Enter(p Phase) error {
	to := g.phases[p]
	if to == nil {
		return fmt.Errorf("enter phase %v: want %v or %v", p, Rollout, Training)
	}
	if to.Entered() {
		return nil
	}
	if n := g.live(); p == Training && n > 0 {
		return &Error{Op: "enter phase train", Err: fmt.Errorf("%d sequences are live, and their states lie in the memory of an update", n), Hint: "Reset the sampler first"}
	}
	if g.runner != nil { // a step may be under way that nobody waits for
		if err := g.runner.st.Sync(); err != nil {
			return fmt.Errorf("enter phase %v: %w", p, err)
		}
	}
	if err := g.ov.Enter(to); err != nil {
		return err
	}
	if g.exec != nil {
		g.exec.ready = false
	}
	if p == Rollout {
		return nil
	}
	st := g.m.Trainable().stream
	st.Fill(g.grads.Ptr(), g.grads.Bytes(), 0)
	if err := st.Sync(); err != nil {
		return fmt.Errorf("clear gradients: %w", err)
	}
	return nil
}

// Bytes is the size of the region.
func (g *Region) Bytes() int64 { return g.ov.Bytes() }

// Buffers lists what lies in the region in a phase: label and bytes, by address.
func (g *Region) Buffers(p Phase) []kernels.LedgerLine { return g.phases[p].Buffers() }

// Close gives the memory back; Runner and Exec must be closed before. Gradients are gone. A nil region may be closed.
func (g *Region) Close() {
	if g == nil || g.m.region != g {
		return
	}
	g.m.Trainable().arena[Grads] = nil
	g.m.region = nil
	g.ov.Free()
}

func (g *Region) live() int {
	if g.runner == nil {
		return 0
	}
	return g.runner.live()
}

// memory is where a Runner (Rollout) or an Exec (Training) takes its memory from.
func (m *Model) memory(p Phase) (kernels.Allocator, error) {
	g := m.region
	if g == nil {
		return m.Dev, nil
	}
	if p == Rollout && g.runner != nil || p == Training && g.exec != nil {
		return nil, fmt.Errorf("the memory of phase %v is in use: close the one that was made before", p)
	}
	return g.phases[p], g.check(p, "allocate")
}

// check refuses an operation that belongs to the other phase; without a region all goes.
func (g *Region) check(p Phase, what string) error {
	if g == nil || g.phases[p].Entered() {
		return nil
	}
	now, why := Rollout, "until Region.Enter(Training)"
	if p == Rollout {
		now, why = Training, "sequences of before are gone; enter Rollout first"
	}
	return fmt.Errorf("%s: the phase is %v, not %v: the memory holds the other's data (%s)", what, now, p, why)
}

// join and leave register the users of the region.
func (g *Region) join(r *Runner, e *Exec) {
	if g == nil {
		return
	}
	if r != nil {
		g.runner = r
	}
	if e != nil {
		g.exec = e
	}
}

func (g *Region) leave(r *Runner, e *Exec) {
	if g == nil {
		return
	}
	if r != nil && g.runner == r {
		g.runner = nil
	}
	if e != nil && g.exec == e {
		g.exec = nil
	}
}
