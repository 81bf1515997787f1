package trainer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"harness-s/env"
	"harness-s/model"
	"harness-s/router"
)

// run is a training run in progress.
type run struct {
	cfg      Config
	d        *Deps
	o        RunOptions
	r        *rollouts
	router   *router.Router
	evidence *router.Evidence
	updater  *updater
	tasks    *taskOrder
	val      []env.TaskRef
	st       runState
	start    time.Time
	unsaved  bool    // a due checkpoint could not be written yet
	saved    int     // step of the last checkpoint
	saving   float64 // seconds the last checkpoint took
	progress func(Progress)

	ckpts     *Checkpoints
	events    *Appender
	decisions *Appender
}

// runState is what a checkpoint stores besides weights and moments. Random
// numbers are keyed, so the step is their whole state; a checkpoint is made at a
// step boundary, so no group is pending.
type runState struct {
	Schema   int             `json:"schema"`
	Step     int             `json:"step"`
	Seed     uint64          `json:"seed"`
	Version  uint64          `json:"policy_version"`
	OptStep  int64           `json:"opt_step"`
	Weights  string          `json:"weights_sha256"`
	States   string          `json:"optim_states"` // "" in checkpoints of a program without the key = fp32
	Master   string          `json:"optim_master"` // likewise
	Pool     string          `json:"pool_digest"`
	Data     string          `json:"data_digest"`
	Evidence json.RawMessage `json:"evidence"`
	Gate     GapGate         `json:"gate"`
	Totals   totals          `json:"totals"`
	Before   *EvalReport     `json:"before"`
	After    *EvalReport     `json:"after"`
}

const stateSchema = 1

// newRun checks that the parts fit together before anything is spent.
func newRun(ctx context.Context, cfg Config, d *Deps, o RunOptions) (*run, error) {
	if d.Learner == nil {
		return nil, &Error{Op: "start run", Err: errors.New("no executor"), Hint: "assemble with Train"}
	}
	if err := checkRun(cfg, d); err != nil {
		return nil, err
	}
	t := &run{
		cfg: cfg, d: d, o: o, start: time.Now(), progress: serial(o.Progress), router: newRouter(cfg, d.Pool),
		evidence: router.NewEvidence(d.Pool.Digest(), d.Pool.Original().ID(), cfg.Router.TrainOutcomes),
		st: runState{Schema: stateSchema, Seed: cfg.Run.Seed, States: cfg.Optim.States, Master: cfg.master(),
			Pool: d.Pool.Digest(), Data: d.Env.Info().DataDigest},
	}
	t.updater = &updater{cfg: cfg, d: d, gate: &t.st.Gate}
	var err error
	if t.tasks, err = newTaskOrder(ctx, d.Env, cfg); err != nil {
		return nil, err
	}
	if t.val, err = d.Env.Tasks(ctx, env.Val); err != nil {
		return nil, fmt.Errorf("list validation tasks: %w", err)
	}
	if o.Dir == nil {
		if o.Resume > 0 {
			return nil, &Error{Op: "resume run", Err: errors.New("no run directory")}
		}
		return t, nil
	}
	t.ckpts = o.Dir.Checkpoints(cfg.Save, func(err error) { d.logger().Warn("clean up checkpoints", "err", err) })
	if t.events, err = o.Dir.Appender("events.jsonl"); err != nil {
		return nil, err
	}
	if t.decisions, err = o.Dir.Appender("router/decisions.jsonl"); err != nil {
		return nil, errors.Join(err, t.events.Close())
	}
	if o.Resume > 0 {
		err = t.restore(o.Resume)
	}
	if err == nil {
		err = t.writeInputs()
	}
	if err != nil {
		t.close()
		return nil, err
	}
	return t, nil
}

// checkRun lists everything in configuration and pool that this run cannot do.
func checkRun(cfg Config, d *Deps) error {
	var errs []error
	if n := len(d.Pool.Specs) - 1; cfg.Rescue.Mode == "siblings" && n < cfg.Rescue.Attempts {
		errs = append(errs, fmt.Errorf("rescue.attempts = %d: the pool has %d auxiliaries", cfg.Rescue.Attempts, n))
	}
	if cfg.GRPO.KL > 0 {
		errs = append(errs, fmt.Errorf("grpo.kl = %g: this version holds no reference policy, use 0", cfg.GRPO.KL))
	}
	if cfg.GRPO.LossContext != "own" {
		errs = append(errs, fmt.Errorf("grpo.loss_context = %q: this version trains in the own context only", cfg.GRPO.LossContext))
	}
	if d.MaxRows < cfg.Model.MaxLen {
		errs = append(errs, fmt.Errorf("model.max_len = %d: a microbatch has %d rows", cfg.Model.MaxLen, d.MaxRows))
	}
	if cfg.Rescue.MinGroup > cfg.Rollout.Group {
		errs = append(errs, fmt.Errorf("rescue.min_group = %d: a group has %d attempts", cfg.Rescue.MinGroup, cfg.Rollout.Group))
	}
	if len(errs) > 0 {
		return &Error{Op: "start run", Err: fmt.Errorf("%w: %w", ErrConfig, errors.Join(errs...))}
	}
	return nil
}

// begin brings the run to the state after step st.Step: a checkpoint's, or that of
// a fresh start with its evidence and first evaluation.
func (t *run) begin(ctx context.Context) error {
	if t.o.Resume > 0 {
		t.event(Event{Step: t.st.Step, Event: "resume"})
		return nil
	}
	t.event(Event{Event: "start"})
	if n := t.cfg.Router.EvidenceTasks; t.cfg.Rescue.Mode == "siblings" && t.cfg.Router.Kind == "rule" && n > 0 {
		if err := t.profile(ctx, spread(t.val, n, 0), t.cfg.Router.EvidenceAttempts, 0); err != nil {
			return fmt.Errorf("build evidence: %w", err)
		}
	}
	if err := t.publish(ctx, 0); err != nil {
		return err
	}
	return t.eval(ctx, 0, nil, nil)
}

// profile adds outcomes of validation tasks under the whole pool to the next
// evidence version. When most attempts were void the old version stays.
func (t *run) profile(ctx context.Context, tasks []env.TaskRef, attempts, step int) error {
	made, void, err := profile(ctx, t.r, t.evidence, tasks, attempts, step, t.progress)
	t.st.Totals.Cost.Profiling += made
	if err != nil {
		return err
	}
	if 2*void > made {
		t.evidence.Discard()
		t.event(Event{Step: step, Event: "warning", Text: fmt.Sprintf("evidence not updated: %d of %d attempts were void", void, made)})
	}
	_, err = t.r.sched.Stats(ctx) // not part of a step's sampling
	return err
}

// publish makes collected evidence visible and stores the new version.
func (t *run) publish(ctx context.Context, step int) error {
	before := t.evidence.View().Version()
	v := t.evidence.Publish(step)
	if t.o.Dir == nil || v.Version() == before && step > 0 {
		return nil
	}
	if v.Version() != before {
		t.event(Event{Step: step, Event: "evidence", Data: map[string]any{"version": v.Version(), "tasks": v.Tasks(), "digest": v.Digest()}})
	}
	return t.persist(ctx, func() error { return t.o.Dir.WriteJSON(fmt.Sprintf("evidence/v%03d.json", v.Version()), v) })
}

// CheckResume reports whether d, with the weights of l, can go on from l: pool, task data, seed, storage of the optimiser and weights must be
// those it was made with.
// It changes nothing, and is asked before later records of the run are dropped.
func CheckResume(cfg Config, d *Deps, l *Loaded) error {
	_, err := resumable(cfg, d, l)
	return err
}

func resumable(cfg Config, d *Deps, l *Loaded) (st runState, err error) {
	if err := l.State(&st); err != nil {
		return st, err
	}
	sum, err := d.Policy.SHA256()
	if err != nil {
		return st, err
	}
	var errs []error
	differs := func(what, now, then string) {
		if now != then {
			errs = append(errs, fmt.Errorf("%s is %.16s, the checkpoint was made with %.16s", what, now, then))
		}
	}
	differs("pool", d.Pool.Digest(), st.Pool)
	differs("task data", d.Env.Info().DataDigest, st.Data)
	differs("optim.states", cfg.Optim.States, cmp.Or(st.States, "fp32"))
	differs("optim.master", cfg.master(), cmp.Or(st.Master, "fp32"))
	differs("seed", fmt.Sprint(cfg.Run.Seed), fmt.Sprint(st.Seed))
	differs("model", sum, st.Weights)
	if st.Schema != stateSchema {
		errs = append(errs, fmt.Errorf("state has schema %d, this program reads %d", st.Schema, stateSchema))
	}
	if len(errs) > 0 {
		return st, &Error{Op: fmt.Sprintf("resume from step %d", l.Step), Err: errors.Join(errs...), Hint: "resume with the configuration of the run directory"}
	}
	return st, nil
}

// restore loads moments and state of a checkpoint into a model that was loaded
// from the same one.
func (t *run) restore(step int) error {
	l, err := t.ckpts.Load(step)
	if err != nil {
		return err
	}
	st, err := resumable(t.cfg, t.d, l)
	if err != nil {
		return err
	}
	for _, a := range t.cfg.Optim.arenas() {
		b, err := l.Arena(a.name)
		if err != nil {
			return err
		}
		if err := t.d.Policy.SetState(a.kind, b); err != nil {
			return fmt.Errorf("restore moments: %w", err)
		}
	}
	if err := t.evidence.UnmarshalJSON(st.Evidence); err != nil {
		return err
	}
	t.d.Policy.SetVersion(st.Version, st.OptStep)
	t.st, t.saved = st, st.Step
	return nil
}

// writeInputs stores the frozen pool and fills the manifest's digests.
func (t *run) writeInputs() error {
	info := t.d.Env.Info()
	sum, err := t.d.Policy.SHA256()
	if err != nil {
		return err
	}
	for i, s := range t.d.Pool.Specs {
		if err := WriteAtomic(t.o.Dir.Path("pool", fmt.Sprintf("%02d_%s.json", i, s.Name)), append(s.Canonical(), '\n')); err != nil {
			return err
		}
	}
	err = t.o.Dir.UpdateManifest(func(m *Manifest) {
		m.Seed, m.Env, m.Data, m.Pool = t.cfg.Run.Seed, &info, info.DataDigest, t.d.Pool.Digest()
		if m.Model == "" {
			m.Model = sum
		}
	})
	if err != nil || t.cfg.Save.Every == 0 {
		return err
	}
	w, err := t.d.Policy.State(model.Weights)
	if err != nil {
		return err
	}
	return t.o.Dir.Preflight(t.cfg.Optim.checkpointBytes(len(w)), t.cfg.Save)
}

// store writes the attempts and router decisions of a step.
func (t *run) store(ctx context.Context, groups []*Group, view *router.View) error {
	if t.o.Dir == nil {
		return nil
	}
	if err := t.o.Dir.Owned(); err != nil {
		return err
	}
	records := rolloutRecords(groups, t.cfg, t.st.Pool, view.Version())
	if err := t.persist(ctx, func() error { return t.o.Dir.WriteRollouts(t.st.Step, records) }); err != nil {
		return err
	}
	for _, g := range groups {
		if d := decisionOf(g); d != nil {
			if err := t.persist(ctx, func() error { return t.decisions.Write(d) }); err != nil {
				return err
			}
		}
	}
	return nil
}

// persist calls write until the disk has space for it (pitfalls.md row 74).
func (t *run) persist(ctx context.Context, write func() error) error {
	return persist(ctx, t.cfg.Run.PauseLimit, t.o.Interrupt, func(text string) {
		t.event(Event{Step: t.st.Step, Event: "warning", Text: text})
	}, write)
}

// event tells the caller and the run directory. An event that cannot be written
// does not end a run.
func (t *run) event(e Event) {
	if t.o.Event != nil {
		t.o.Event(e)
	}
	if t.events == nil {
		return
	}
	if err := t.events.Write(e); err != nil {
		t.d.logger().Warn("write event", "err", err)
	}
}

func (t *run) close() {
	for _, a := range []*Appender{t.events, t.decisions} {
		if a == nil {
			continue
		}
		if err := a.Close(); err != nil {
			t.d.logger().Warn("close run files", "err", err)
		}
	}
}

// tally counts finished attempts of a step for progress and for the time in which
// only rescue attempts were left.
type tally struct {
	mu       sync.Mutex
	base     int // base attempts to come
	total    int
	done     int
	lastBase time.Time
	progress func(Progress)
}

func newTally(tasks []env.TaskRef, group int, progress func(Progress)) *tally {
	n := len(tasks) * group
	return &tally{base: n, total: n, lastBase: time.Now(), progress: progress}
}

func (y *tally) note(o order, _ *Attempt) {
	y.mu.Lock()
	y.done++
	phase := "rescue"
	if o.phase == phaseBase {
		y.base--
		y.lastBase = time.Now()
		phase = "collect"
	}
	p := Progress{Phase: phase, Done: y.done, Total: y.total}
	y.mu.Unlock()
	report(y.progress, p)
}

// expect adds the attempts of a rescue that begins.
func (y *tally) expect(n int) {
	y.mu.Lock()
	defer y.mu.Unlock()
	y.total += n
}

// rescueOnly is the seconds since the last base attempt ended.
func (y *tally) rescueOnly() float64 {
	y.mu.Lock()
	defer y.mu.Unlock()
	return since(y.lastBase)
}
