package trainer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"harness-s/env"
	"harness-s/env/harness"
	"harness-s/kernels"
	"harness-s/model"
	"harness-s/model/chat"
)

// Sequences is the bookkeeping half of a runner: sequences that hold context.
type Sequences interface {
	Acquire() (model.SeqID, error)
	Fork(src model.SeqID) (model.SeqID, error)
	Release(id model.SeqID) error
	Len(id model.SeqID) int
	Reset() error
}

// Sampler is what the scheduler needs of a runner; *model.Runner is one. Step
// feeds and samples one piece per sequence; what a row computes never depends on
// the other rows.
type Sampler interface {
	Sequences
	FreePages() int
	PagesFor(tokens int) int
	Step(ctx context.Context, work []model.Work) ([]model.Sampled, error)
}

// AheadSampler is a Sampler whose device computes by itself: a step can be
// submitted before the one before has been waited for, with Work.FromLast for
// tokens that nobody has seen yet. At most two steps are under way.
type AheadSampler interface {
	Sampler
	Submit(work []model.Work) (Pending, error)
}

// Pending is a submitted step; Wait returns what Step would.
type Pending interface {
	Wait() ([]model.Sampled, error)
}

// aheadRunner is a Runner as an AheadSampler.
type aheadRunner struct{ *model.Runner }

func (r aheadRunner) Submit(work []model.Work) (Pending, error) {
	p, err := r.Runner.Submit(work)
	if err != nil {
		return nil, err
	}
	return p, nil
}

// SamplerOf is the Sampler of a runner on a device: one step ahead where the
// device has graphs, which are for those that compute by themselves.
func SamplerOf(r *model.Runner, dev *kernels.Device) Sampler {
	if dev.CanCapture() {
		return aheadRunner{r}
	}
	return r
}

// Learner is what an update needs of an executor; *model.Exec is one.
type Learner interface {
	Forward(b *model.Batch) (*model.Output, error)
	Backward(dLogP, dEnt []float32) error
	ZeroGrad() error
	GradNorm() (float64, error)
	Step(h model.Hyper) error
}

// Policy is the weights seen as a whole: what a checkpoint stores. The loop
// never looks inside.
type Policy interface {
	// Version counts optimiser steps since the weights were made; strictly increasing.
	Version() uint64
	// State and SetState move the trained weights, their gradients and moments for checkpoints.
	State(kind model.StateKind) ([]byte, error)
	SetState(kind model.StateKind, b []byte) error
	// SetVersion restores Version and the optimiser's step after a resume.
	SetVersion(v uint64, optStep int64)
	OptStep() int64
	// Save writes what a checkpoint of the run holds: a Hugging Face directory, or a PEFT one with an adapter.
	Save(dir string) error
	// Export writes a whole Hugging Face directory as o asks for, with the adapter, if there is one, in its folder adapter.
	Export(dir string, o model.SaveOptions) error
	// ExportBytes is about what Export writes.
	ExportBytes() int64
	SHA256() (string, error)
}

// Phases hands device memory over between sampling (model.Rollout) and training (model.Training); *model.Region is one. Sequences must be
// released before Training is entered, which clears the gradients; Rollout drops gradients and activations.
type Phases interface {
	Enter(p model.Phase) error
}

// Tokens is the text side of a tokenizer; *model.Tokenizer is one.
type Tokens interface {
	chat.Encoder
	Decode(ids []int32) string
}

// Deps are the parts a run is made of. All are required but Log and Demos.
type Deps struct {
	Env      env.Env
	Pool     *harness.Pool // original first
	Tokens   Tokens
	Renderer chat.Renderer
	Stop     []int32 // ids that end a turn, the template's first
	Sampler  Sampler
	Learner  Learner
	Policy   Policy
	Phases   Phases            // nil: sampler and learner lie side by side
	Demos    map[string]string // demonstrations named by harness `demo` ops

	MaxRows    int // rows of one microbatch
	MaxTargets int // (row, target) pairs of one microbatch
	MaxStates  int // states of the delta rule of one microbatch (model.NumStates), 0 = any number
	Log        *slog.Logger

	closers []func() error
}

// Options of Assemble beyond the configuration.
type AssembleOptions struct {
	Train   bool // build the executor too; the model must have been loaded with LoadOptions.Train
	MaxRows int  // rows per microbatch, 0 = what the configuration says
	Log     *slog.Logger
}

// Assemble builds runner and executor on a loaded model and joins them with an
// environment and a pool. Close the result.
func Assemble(cfg Config, m *model.Model, e env.Env, pool *harness.Pool, o AssembleOptions) (*Deps, error) {
	if m.Tok == nil {
		return nil, &Error{Op: "assemble trainer", Err: errors.New("the model directory has no tokenizer.json"),
			Hint: "copy tokenizer.json next to config.json"}
	}
	if _, ok := m.Tok.ID(chat.IMEnd); !ok {
		return nil, &Error{Op: "assemble trainer", Err: errors.New("the tokenizer has no <|im_end|> token"), Hint: "use a chat model's tokenizer"}
	}
	renderer, err := RendererOf(m, cfg.Model.Thinking)
	if err != nil {
		return nil, err
	}
	stop, err := StopSet(m, cfg.Model.Stop)
	if err != nil {
		return nil, err
	}
	d := &Deps{Env: e, Pool: pool, Tokens: m.Tok, Renderer: renderer, Stop: StopIDs(stop)}
	return d, d.build(cfg, m, o)
}

// AssembleBench builds runner and executor alone, for BenchStep: no environment, no tokenizer. Close the result.
func AssembleBench(cfg Config, m *model.Model, o AssembleOptions) (*Deps, error) {
	d := &Deps{Env: benchEnv{}}
	return d, d.build(cfg, m, o)
}

// build makes runner and executor for the configured budgets, on a GPU in one region by turns when the model was loaded for that; after an
// error nothing stays allocated.
func (d *Deps) build(cfg Config, m *model.Model, o AssembleOptions) error {
	exec := execOptions(cfg)
	if o.MaxRows > 0 {
		exec.MaxRows, exec.MaxTargets = o.MaxRows, o.MaxRows
	}
	if table := m.Dev.Info().Table; table != "cpu" { // memory does not grow there
		exec.MaxStates = model.PlannedStates(exec.MaxRows)
	}
	d.MaxStates = exec.MaxStates
	d.Policy, d.MaxRows, d.MaxTargets, d.Log = modelPolicy{m}, exec.MaxRows, exec.MaxTargets, o.Log
	if d.Log == nil {
		d.Log = slog.New(slog.DiscardHandler)
	}
	if o.Train && m.Shared() {
		g, err := m.Share(runnerOptions(cfg), exec, cfg.Model.MaxLen)
		if err != nil {
			return fmt.Errorf("assemble trainer: %w", err)
		}
		d.Phases = g
		d.closers = append(d.closers, func() error { g.Close(); return nil })
	}
	r, err := model.NewRunner(m, runnerOptions(cfg))
	if err != nil {
		return errors.Join(fmt.Errorf("assemble trainer: make runner: %w", err), d.Close())
	}
	d.Sampler = SamplerOf(r, m.Dev)
	d.closers = append(d.closers, func() error { r.Close(); return nil })
	if !o.Train {
		return nil
	}
	err = d.training(func() error {
		x, err := model.NewExec(m, exec)
		if err != nil {
			return fmt.Errorf("make executor: %w", err)
		}
		d.Learner = x
		d.closers = append(d.closers, func() error { x.Close(); return nil })
		return nil
	})
	if err != nil {
		return errors.Join(fmt.Errorf("assemble trainer: %w", err), d.Close())
	}
	return nil
}

// training runs f with the memory in the training phase and hands it back to the sampler, whatever f returns. No sequence may be live.
func (d *Deps) training(f func() error) error {
	if d.Phases == nil {
		return f()
	}
	if err := d.Phases.Enter(model.Training); err != nil {
		return &EngineError{err}
	}
	err := f()
	if back := d.Phases.Enter(model.Rollout); back != nil {
		err = errors.Join(err, &EngineError{back})
	}
	return err
}

// Close releases what Assemble built. The model stays open.
func (d *Deps) Close() error {
	var errs []error
	for i := len(d.closers) - 1; i >= 0; i-- {
		errs = append(errs, d.closers[i]())
	}
	d.closers = nil
	return errors.Join(errs...)
}

func (d *Deps) logger() *slog.Logger {
	if d.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return d.Log
}

// modelPolicy adapts *model.Model to Policy.
type modelPolicy struct{ m *model.Model }

func (p modelPolicy) Version() uint64                         { return p.m.Trainable().Version }
func (p modelPolicy) OptStep() int64                          { return p.m.Trainable().OptStep }
func (p modelPolicy) State(k model.StateKind) ([]byte, error) { return p.m.Trainable().State(k) }
func (p modelPolicy) SetState(k model.StateKind, b []byte) error {
	return p.m.Trainable().SetState(k, b)
}
func (p modelPolicy) Export(dir string, o model.SaveOptions) error { return exportModel(p.m, dir, o) }
func (p modelPolicy) SHA256() (string, error)                      { return p.m.WeightsSHA256() }

func (p modelPolicy) Save(dir string) error {
	if p.m.Adapter != nil {
		return p.m.SaveAdapter(dir, model.SaveAdapterOptions{})
	}
	return p.m.Save(dir)
}

func (p modelPolicy) ExportBytes() int64 {
	n := p.m.Config.NumParams()
	if p.m.Adapter != nil {
		n += p.m.NumTrainable()
	}
	return 4 * n // float32
}

func (p modelPolicy) SetVersion(v uint64, optStep int64) {
	p.m.Trainable().Version, p.m.Trainable().OptStep = v, optStep
}
