package trainer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"harness-s/env"
	"harness-s/router"
)

// ErrInterrupted says that a run stopped on request after a clean checkpoint
// (exit code 130).
var ErrInterrupted = errors.New("interrupted after a checkpoint")

// Progress is a report from a long phase.
type Progress struct {
	Phase string // evidence, eval, collect, rescue, update, demos, sft, corpus, bench
	Done  int
	Total int // 0 = unknown
	Note  string
}

// Event is one line of events.jsonl: what happened beside the metrics.
type Event struct {
	Step  int            `json:"step"`
	Event string         `json:"event"` // start, resume, evidence, eval, checkpoint, warning, gate, empty_step, breaker, interrupted, done
	Text  string         `json:"text,omitempty"`
	Data  map[string]any `json:"data,omitempty"`
}

// RunOptions are where a run writes and how it is stopped.
type RunOptions struct {
	Dir      *RunDir        // nil keeps nothing on disk
	Resume   int            // step of the checkpoint the model was loaded from, 0 = fresh start
	Sinks    []Sink         // one record per step; closed by the caller
	Progress func(Progress) // called by one goroutine at a time
	Event    func(Event)
	// Interrupt, when closed, lets the step finish, saves a checkpoint and ends
	// with ErrInterrupted. Cancelling the context stops at once, without one.
	Interrupt <-chan struct{}
}

// Summary is the result of a run; the JSON keys are stable.
type Summary struct {
	Pass1Before     float64 `json:"pass1_before"`
	Pass1After      float64 `json:"pass1_after"`
	Pass3Before     float64 `json:"pass3_before"`
	Pass3After      float64 `json:"pass3_after"`
	Groups          int     `json:"groups"`
	AllFailGroups   int     `json:"all_fail_groups"`
	RescuedGroups   int     `json:"rescued_groups"`   // groups that got rescue attempts
	RescueSuccesses int     `json:"rescue_successes"` // of these, with at least one success
	Steps           int     `json:"steps"`
	TrainSeconds    float64 `json:"train_seconds"`
	TotalSeconds    float64 `json:"total_seconds"`
	PeakRSSMiB      float64 `json:"peak_rss_mib"`
	WeightsSHA256   string  `json:"weights_sha256"`

	Before *EvalReport `json:"before,omitempty"` // first evaluation, with intervals
	After  *EvalReport `json:"after,omitempty"`  // last one
	Cost   Cost        `json:"cost"`
}

// Cost counts attempts by ledger line (method.md 7.5). Routing and profiling
// never mix with training rollouts.
type Cost struct {
	Base      int `json:"base_attempts"`
	Rescue    int `json:"rescue_attempts"`
	Reruns    int `json:"void_reruns"`
	Profiling int `json:"profiling_attempts"`
	Eval      int `json:"eval_attempts"`
	Routing   int `json:"routing_decisions"`
}

// Run trains. It returns the summary also with ErrInterrupted; an error wrapping
// ErrGate says that a gate stopped the run with the weights of the last full step.
func Run(ctx context.Context, cfg Config, d *Deps, o RunOptions) (*Summary, error) {
	t, err := newRun(ctx, cfg, d, o)
	if err != nil {
		return nil, err
	}
	defer t.close()
	err = withEngine(ctx, cfg, d, func(ctx context.Context, r *rollouts) error {
		t.r, r.breaker.stop = r, o.Interrupt
		if err := t.prepare(ctx); err != nil {
			return t.leave(0, err)
		}
		for step := t.st.Step + 1; step <= cfg.Run.Steps; step++ {
			if t.interrupted() {
				return t.leave(step-1, ErrInterrupted)
			}
			if err := t.step(ctx, step); err != nil {
				return t.leave(step-1, fmt.Errorf("step %d: %w", step, err))
			}
		}
		return t.end(ctx)
	})
	s, sumErr := t.summary()
	return s, errors.Join(err, sumErr)
}

// step is the algorithm (method.md 3.2). Weights, evidence and pool are frozen
// until the optimiser step; after it everything sampled is dropped.
func (t *run) step(ctx context.Context, step int) error {
	start := time.Now()
	var p phases
	rec := NewRecord(step, t.cfg.Run.Steps)
	view := t.evidence.View()
	rec.Router.Version, rec.Router.EvidenceAge = float64(view.Version()), float64(step-1-view.Step())

	// Attempts under the original harness; groups that failed as a whole are
	// rescued as soon as their own last attempt is classified.
	groups, err := t.collect(ctx, step, view, &p)
	if err != nil {
		return err
	}

	// One update on the groups that are left with contrast, inside which every
	// token is trained in the context it was generated in.
	began := time.Now()
	var u updateStats
	err = t.r.sched.Exclusive(ctx, func() error {
		return t.d.training(func() (err error) {
			u, err = t.updater.update(ctx, step, groups)
			return err
		})
	})
	p.update = since(began)
	if u.Gate.Warn || u.Gate.Stop {
		t.event(Event{Step: step, Event: "gate", Text: fmt.Sprint(u.Gate.Why), Data: map[string]any{"gap_mean": u.Gap.Mean, "gap_max": u.Gap.Max}})
	}
	if err != nil {
		return err
	}
	t.st.Step, t.st.Version, t.st.OptStep = step, t.d.Policy.Version(), t.d.Policy.OptStep()

	// The record, complete with what was dropped and why.
	fill(rec, &t.st.Totals, groups, u, t.cfg)
	if u.Empty {
		t.event(Event{Step: step, Event: "empty_step", Text: fmt.Sprintf("0 live groups: %.0f all-pass, %.0f all-fail, %.0f incomplete",
			rec.Group.AllPass, rec.Group.AllFail, rec.Group.Incomplete)})
	}
	if err := t.store(ctx, groups, view); err != nil {
		return err
	}

	// Evidence changes version at the step boundary only (R24).
	if err := t.refresh(ctx, step, groups); err != nil {
		return err
	}
	p.total = since(start)
	t.st.Totals.TrainSeconds += p.total
	if every := t.cfg.Eval.Every; step == t.cfg.Run.Steps || every > 0 && step%every == 0 {
		if err := t.eval(ctx, step, rec, &p); err != nil {
			return err
		}
	}
	fillTimes(rec, p, u.TrainTotal)
	rec.Time.Ckpt = t.saving
	if m, ok := t.d.Learner.(interface{ PeakBytes() int64 }); ok {
		rec.Mem.Peak = float64(m.PeakBytes())
	}
	// The record comes before the checkpoint: a run that goes on from a step has the records of that step and of all before it.
	for _, s := range t.o.Sinks {
		if err := t.persist(ctx, func() error { return s.Write(rec) }); err != nil {
			return fmt.Errorf("write metrics: %w", err)
		}
	}
	if every := t.cfg.Save.Every; t.unsaved || step == t.cfg.Run.Steps || every > 0 && step%every == 0 {
		return t.save(ctx, step == t.cfg.Run.Steps)
	}
	return nil
}

// collect runs the attempts of a step.
func (t *run) collect(ctx context.Context, step int, view *router.View, p *phases) ([]*Group, error) {
	start := time.Now()
	tasks := t.tasks.step(step, t.cfg.Task.PerStep)
	seen := newTally(tasks, t.cfg.Rollout.Group, t.progress)
	c := &collector{
		r: t.r, mode: t.cfg.Rescue.Mode, step: step, noted: seen.note, rescues: seen.expect,
		chooser: &routing{router: t.router, view: view, pool: t.d.Pool, run: t.cfg.Run.Name, version: t.d.Policy.Version(), k: t.cfg.Rescue.Attempts},
	}
	groups, err := c.collect(ctx, tasks)
	if err != nil {
		return nil, err
	}
	p.collect, p.rescue = since(start), seen.rescueOnly()
	p.sched, err = t.r.sched.Stats(ctx)
	return groups, err
}

// refresh adds evidence after a step: train outcomes when asked for, and a
// recalibration on rotating validation tasks (method.md 6.6).
func (t *run) refresh(ctx context.Context, step int, groups []*Group) error {
	c := t.cfg.Router
	if c.TrainOutcomes {
		for _, g := range groups {
			for _, as := range [][]Attempt{g.Base, g.Rescue} {
				if err := t.recordTrain(g, as); err != nil {
					return err
				}
			}
		}
	}
	if c.RecalibrateEvery > 0 && step%c.RecalibrateEvery == 0 && step < t.cfg.Run.Steps {
		if err := t.evidence.Decay(c.Decay); err != nil {
			return err
		}
		turn := step/c.RecalibrateEvery - 1
		if err := t.profile(ctx, spread(t.val, c.RecalibrateTasks, turn*c.RecalibrateTasks), c.RecalibrateAttempts, step); err != nil {
			return err
		}
	}
	return t.publish(ctx, step)
}

// recordTrain adds one row per harness of a group's attempts.
func (t *run) recordTrain(g *Group, as []Attempt) error {
	for i := range as {
		if i > 0 && as[i].Spec == as[i-1].Spec {
			continue
		}
		n := i
		for n < len(as) && as[n].Spec == as[i].Spec {
			n++
		}
		row := evidenceRow(g.Task, as[i].Spec, as[i:n])
		row.TaskText = taskText(g.Base)
		if row.Valid == 0 {
			continue
		}
		if err := t.evidence.Record(row); err != nil {
			return err
		}
	}
	return nil
}

// eval scores the policy under the original harness, without auxiliaries.
func (t *run) eval(ctx context.Context, step int, rec *Record, p *phases) error {
	rep, err := evaluate(ctx, t.r, t.evalOptions(step))
	if err != nil {
		return fmt.Errorf("evaluate: %w", err)
	}
	if _, err := t.r.sched.Stats(ctx); err != nil { // not part of the step's sampling
		return err
	}
	t.st.Totals.Cost.Eval += rep.Tasks * rep.Attempts
	if t.st.Before == nil {
		t.st.Before = rep.brief()
	}
	t.st.After = rep.brief()
	if rec != nil {
		rec.Eval.Pass1, rec.Eval.PassK = rep.Pass1.Strict.Mean, rep.PassK.Strict.Mean
		p.eval = rep.Seconds
	}
	t.event(Event{Step: step, Event: "eval", Data: map[string]any{"pass1": rep.Pass1.Strict, "passk": rep.PassK.Strict, "k": rep.K, "tasks": rep.Tasks}})
	if t.o.Dir == nil {
		return nil
	}
	return t.persist(ctx, func() error { return t.o.Dir.WriteJSON(fmt.Sprintf("evals/%s.json", stepName(step)), rep) })
}

func (t *run) evalOptions(step int) EvalOptions {
	c := t.cfg.Eval
	o := EvalOptions{
		Split: env.Split(c.Split), Mode: ModeOriginal, K: c.K, Attempts: c.Attempts, Tasks: c.Tasks, Step: step,
		Temperature: c.Temperature, Resamples: c.Resamples, Seed: t.cfg.Run.Seed, Progress: t.progress,
		Reason: fmt.Sprintf("scheduled evaluation of run %s", t.cfg.Run.Name),
	}
	if t.o.Dir != nil {
		o.Recorder = t.o.Dir
	}
	return o
}

// save publishes a checkpoint. A full disk does not end the run: training goes on
// and every following step tries again; only the last step waits for space
// (pitfalls.md row 74).
func (t *run) save(ctx context.Context, last bool) error {
	if t.o.Dir == nil {
		return nil
	}
	write := func() error {
		if err := t.o.Dir.Owned(); err != nil {
			return err
		}
		began := time.Now()
		snap, err := t.snapshot()
		if err != nil {
			return err
		}
		// What the checkpoint stands on is on the disk before it.
		if err := errors.Join(t.events.Sync(), t.decisions.Sync()); err != nil {
			return err
		}
		if _, err := t.ckpts.Save(snap); err != nil {
			return err
		}
		t.unsaved, t.saving, t.saved = false, since(began), snap.Step
		return nil
	}
	t.unsaved = true
	if last {
		if err := t.persist(ctx, write); err != nil {
			return err
		}
	} else if err := write(); errors.Is(err, ErrNoSpace) {
		t.event(Event{Step: t.st.Step, Event: "warning", Text: err.Error() + "; the run goes on and tries again after the next step"})
		return nil
	} else if err != nil {
		return err
	}
	t.event(Event{Step: t.st.Step, Event: "checkpoint"})
	return nil
}

func (t *run) snapshot() (Snapshot, error) {
	s := Snapshot{Step: t.st.Step, Model: t.d.Policy.Save}
	for _, a := range t.cfg.Optim.arenas() {
		b, err := t.d.Policy.State(a.kind)
		if err != nil {
			return s, fmt.Errorf("read moments: %w", err)
		}
		s.Optim = append(s.Optim, Arena{Name: a.name, Data: b})
	}
	s.Bytes = t.cfg.Optim.checkpointBytes(len(s.Optim[0].Data) * 4 / t.cfg.Optim.momentSize())
	ev, err := t.evidence.MarshalJSON()
	if err != nil {
		return s, fmt.Errorf("encode evidence: %w", err)
	}
	t.st.Evidence = ev
	if t.st.Weights, err = t.d.Policy.SHA256(); err != nil {
		return s, err
	}
	st := t.st
	s.State = &st
	return s, nil
}

// prepare is begin, given up at once when the run shall stop: there is no step to finish.
func (t *run) prepare(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-t.o.Interrupt:
			cancel(ErrInterrupted)
		case <-ctx.Done():
		}
	}()
	err := t.begin(ctx)
	if err != nil && errors.Is(context.Cause(ctx), ErrInterrupted) {
		err = ErrInterrupted
	}
	return err
}

// leave ends the run because of why. On request, or when the environment stays down, step is the last full one and gets a checkpoint first;
// there is none when the weights are already those of a step whose record is not complete: that step is made again from the last checkpoint.
func (t *run) leave(step int, why error) error {
	e := Event{Step: step, Event: "breaker", Text: why.Error()}
	switch {
	case errors.Is(why, ErrInterrupted):
		e, why = Event{Step: step, Event: "interrupted"}, ErrInterrupted
	case !errors.Is(why, ErrEnvDown):
		return why
	}
	if step > t.saved && t.st.Step == step {
		if err := t.save(context.Background(), true); err != nil {
			return fmt.Errorf("stopped (%v) without a checkpoint: %w", why, err)
		}
	}
	t.event(e)
	return why
}

func (t *run) interrupted() bool {
	select {
	case <-t.o.Interrupt:
		return true
	default:
		return false
	}
}

// end closes the books.
func (t *run) end(ctx context.Context) error {
	if t.st.After == nil || t.st.After.Step != t.cfg.Run.Steps {
		if err := t.eval(ctx, t.st.Step, nil, nil); err != nil {
			return err
		}
	}
	if t.o.Dir != nil {
		err := t.persist(ctx, func() error { return t.o.Dir.UpdateManifest(func(m *Manifest) { m.Completed = true }) })
		if err != nil {
			return err
		}
	}
	t.event(Event{Step: t.st.Step, Event: "done"})
	return nil
}

func (t *run) summary() (*Summary, error) {
	c := t.st.Totals
	sum, err := t.d.Policy.SHA256()
	s := &Summary{
		Groups: c.Groups, AllFailGroups: c.AllFail, RescuedGroups: c.RescuedGroups, RescueSuccesses: c.RescueSuccesses,
		Steps: t.st.Step, TrainSeconds: c.TrainSeconds, TotalSeconds: since(t.start), PeakRSSMiB: math.Round(peakRSS()/(1<<20)*10) / 10,
		WeightsSHA256: sum, Before: t.st.Before, After: t.st.After, Cost: c.Cost,
	}
	if b := t.st.Before; b != nil {
		s.Pass1Before, s.Pass3Before = b.Pass1.Strict.Mean, b.PassK.Strict.Mean
	}
	if a := t.st.After; a != nil {
		s.Pass1After, s.Pass3After = a.Pass1.Strict.Mean, a.PassK.Strict.Mean
	}
	return s, err
}
