package trainer

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"time"

	"harness-s/env"
	"harness-s/env/harness"
	"harness-s/model"
	"harness-s/model/chat"
)

// Phases of a random key (method.md R22).
const (
	phaseBase      = "base"
	phaseRescue    = "rescue"
	phaseRetry     = "retry" // rescue under the original harness
	phaseEval      = "eval"
	phaseCalibrate = "calibrate"
	phasePlay      = "play"
)

// graceAfterDeadline is how long a call may ignore its cancelled context before
// its goroutine is given up (pitfalls.md row 1).
const graceAfterDeadline = 5 * time.Second

// Attempt is one finished attempt. Immutable.
type Attempt struct {
	Task          env.TaskRef
	Text          string // task text as the policy saw it
	Spec          *harness.Spec
	Phase         string
	Index         int // within its group
	Outcome       env.Outcome
	Traj          harness.Trajectory
	PolicyVersion uint64
	Voids         []Void // runs of this attempt that did not count
	Seconds       float64
}

// Void is one run that did not count, and why.
type Void struct {
	Class string `json:"class"`
	Cause string `json:"cause"`
}

// Member is the attempt as the objective sees it: the reward is the verifier's
// boolean.
func (a *Attempt) Member() Member {
	m := Member{Valid: a.Outcome.Valid(), Success: a.Outcome.Success()}
	if m.Success {
		m.Reward = 1
	}
	return m
}

// Truncated reports whether a budget ended the attempt.
func (a *Attempt) Truncated() bool {
	return a.Outcome == env.StepLimit || a.Outcome == env.ContextLimit || a.Outcome == env.Timeout
}

func membersOf(as []Attempt) []Member {
	ms := make([]Member, len(as))
	for i := range as {
		ms[i] = as[i].Member()
	}
	return ms
}

// order is what an attempt is asked to be.
type order struct {
	task     env.TaskRef
	spec     *harness.Spec
	kind     Kind
	phase    string
	step     int
	index    int
	share    int // attempts of the group that open with the same prompt
	seed     uint64
	sampling model.Sampling
	unsealed env.Unsealed
	// faultOnce ends the attempt at its first harness fault: the caller
	// substitutes another harness.
	faultOnce bool
	observe   func(harness.Request, harness.Completion) // each turn, in order; may be nil
}

func (o order) key() harness.RNGKey {
	return harness.RNGKey{Seed: o.seed, Step: o.step, Task: o.task.ID, Phase: o.phase, Harness: o.spec.ID(), Attempt: o.index}
}

// rollouts turns orders into attempts. It owns the limits they share: live
// slots, the breaker and the watchdog.
type rollouts struct {
	cfg     Config
	d       *Deps
	sched   *Scheduler
	slots   *slots
	breaker *breaker
	watch   *watch
	salt    string // makes external names unique across processes; never part of a result
	log     *slog.Logger
}

func newRollouts(cfg Config, d *Deps, s *Scheduler) *rollouts {
	live := cfg.Rollout.Live
	if live == 0 {
		live = 2 * cfg.Rollout.Slots
	}
	log := d.logger()
	return &rollouts{
		cfg: cfg, d: d, sched: s, log: log,
		slots:   newSlots(live),
		breaker: newBreaker(cfg.Rollout, cfg.Run.PauseLimit.D(), d.Env.Health, log),
		watch:   newWatch(log, cfg.Rollout.StallAfter.D(), s.Beats),
		salt:    fmt.Sprintf("%d-%d", os.Getpid(), time.Now().UnixNano()),
	}
}

// run makes one attempt: void runs are made again from the initial state because
// of their class, never because of a result (R10). The error is fatal for the
// whole run: engine, cancelled context, environment down for good.
func (r *rollouts) run(ctx context.Context, o order) (Attempt, error) {
	var voids []Void
	start := time.Now()
	for reruns := 0; ; {
		if err := r.breaker.wait(ctx); err != nil {
			return Attempt{}, err
		}
		if err := r.slots.acquire(ctx, o.kind); err != nil {
			return Attempt{}, err
		}
		a, err := r.once(ctx, o, len(voids))
		r.slots.release()
		if err != nil {
			return Attempt{}, err
		}
		class := a.Outcome.Class()
		paused := r.breaker.record(class == env.ClassInfra)
		if class == env.ClassInfra && !paused {
			paused = r.breaker.doubt(ctx)
		}
		a.Voids, a.Seconds = voids, time.Since(start).Seconds()
		if a.Outcome.Valid() || class == env.ClassInvalid {
			return a, nil
		}
		r.log.Info("void attempt", "task", o.task.ID, "harness", o.spec.Name, "phase", o.phase, "attempt", o.index,
			"turn", a.Traj.Turns, "class", class.String(), "cause", a.Traj.FaultReason)
		if class == env.ClassHarnessFault && o.faultOnce || reruns >= r.cfg.Rescue.Retries && !paused {
			return a, nil
		}
		voids = append(voids, Void{Class: class.String(), Cause: a.Traj.FaultReason})
		if !paused { // runs lost to an outage do not use up the re-runs
			reruns++
		}
		if class == env.ClassInfra {
			if err := sleep(ctx, backoff(reruns)); err != nil {
				return Attempt{}, err
			}
		}
	}
}

// backoff doubles from 100 ms to 5 s.
func backoff(n int) time.Duration { return min(100*time.Millisecond<<min(n, 10), 5*time.Second) }

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// errAbandoned says that a call ignored its cancelled context.
var errAbandoned = errors.New("call did not return after its deadline")

// panicError is a recovered panic.
type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("panic: %v", e.value) }

// bounded runs f under a deadline. When f also ignores the cancellation its
// goroutine is given up and errAbandoned returned.
func bounded(ctx context.Context, limit time.Duration, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	res := make(chan error, 1)
	go func() {
		defer func() {
			if v := recover(); v != nil {
				res <- &panicError{v, debug.Stack()}
			}
		}()
		res <- f(ctx)
	}()
	select {
	case err := <-res:
		return err
	case <-ctx.Done():
	}
	t := time.NewTimer(graceAfterDeadline)
	defer t.Stop()
	select {
	case err := <-res:
		return err
	case <-t.C:
		return errAbandoned
	}
}

// episode is one run of an attempt in progress.
type episode struct {
	r      *rollouts
	o      order
	live   *live
	left   time.Duration // episode clock: time spent in environment and harness
	att    env.Attempt
	text   string // of the task
	ep     *harness.Episode
	gone   bool                    // a call was given up: att and ep must not be touched
	ledger []harness.LedgerSegment // own copy, for episodes that are given up
	turns  int
}

// once runs an attempt from the initial state to a verdict.
func (r *rollouts) once(ctx context.Context, o order, try int) (Attempt, error) {
	a := Attempt{Task: o.task, Spec: o.spec, Phase: o.phase, Index: o.index, PolicyVersion: r.d.Policy.Version()}
	e := &episode{r: r, o: o, live: r.watch.add(o), left: r.cfg.Rollout.EpisodeDeadline.D()}
	defer r.watch.remove(e.live)
	if err := e.open(ctx, try); err != nil {
		switch {
		case ctx.Err() != nil:
			err = context.Cause(ctx)
		case errors.Is(err, env.ErrSealed): // a test task outside Evaluate: our own mistake
		case errors.Is(err, env.ErrUnknownTask):
			a.Outcome, a.Traj.FaultReason, err = env.TaskInvalid, err.Error(), nil
		default:
			e.void(&a, err)
			err = nil
		}
		if e.att != nil {
			e.close(ctx)
		}
		return a, err
	}
	a.Text = e.text
	fatal := e.play(ctx, &a)
	e.close(ctx)
	return a, fatal
}

// call runs f on the episode clock.
func (e *episode) call(ctx context.Context, limit time.Duration, f func(context.Context) error) error {
	start := time.Now()
	err := bounded(ctx, min(limit, max(e.left, 0)), f)
	e.left -= time.Since(start)
	if errors.Is(err, errAbandoned) {
		e.gone = true
	}
	var p *panicError
	if errors.As(err, &p) {
		e.r.log.Error("panic in an attempt", "task", e.o.task.ID, "harness", e.o.spec.Name, "attempt", e.o.index,
			"turn", e.turns, "value", fmt.Sprint(p.value), "stack", string(p.stack))
	}
	return err
}

// open starts environment and episode. Any error but a cancelled context is a
// void run.
func (e *episode) open(ctx context.Context, try int) error {
	c, o := e.r.cfg.Rollout, e.o
	id := sha256.Sum256(fmt.Appendf(nil, "%s|%s|%d|%s|%s|%s|%d|%d", e.r.salt, e.r.cfg.Run.Name, o.step, o.phase, o.task.ID, o.spec.ID(), o.index, try))
	state := KeyOf(harness.RNGKey{Seed: o.seed, Task: o.task.ID, Phase: "state"})
	var att env.Attempt
	err := e.call(ctx, c.VerifierTimeout.D(), func(ctx context.Context) (err error) {
		att, err = e.r.d.Env.Open(ctx, o.task, env.OpenOptions{
			AttemptID: "hs" + hex.EncodeToString(id[:10]), MaxSteps: c.MaxTurns,
			StepTimeout: c.StepTimeout.D(), EpisodeTimeout: c.EpisodeDeadline.D(), Seed: state.Lo, Unsealed: o.unsealed,
		})
		if err == nil && ctx.Err() != nil { // too late: nobody takes it any more
			err = errors.Join(ctx.Err(), att.Close(context.WithoutCancel(ctx)))
		}
		return err
	})
	if err != nil {
		if errors.Is(err, env.ErrSealed) || errors.Is(err, env.ErrUnknownTask) || errors.Is(err, env.ErrInfra) {
			return err
		}
		return &env.InfraError{Phase: "open", Retryable: true, Err: err}
	}
	e.att = att
	e.live.set(stateHarness, 0)
	return e.call(ctx, c.StepTimeout.D(), func(context.Context) (err error) {
		e.text = att.Initial().Text
		e.ep, err = harness.NewEpisode(harness.Config{
			Spec: o.spec, Attempt: watched{att, e.live, c.VerifierTimeout.D()}, Task: o.task,
			Encoder: e.r.d.Tokens, Decode: e.r.d.Tokens.Decode, Renderer: e.r.d.Renderer, Stop: e.r.d.Stop,
			MaxTurns: c.MaxTurns, MaxNew: c.MaxNew, MaxContext: e.r.cfg.Model.MaxLen,
			Key: o.key(), StepTimeout: c.StepTimeout.D(), Demos: e.r.d.Demos,
		})
		return err
	})
}

// play drives the episode to its verdict and fills a. The error is fatal.
func (e *episode) play(ctx context.Context, a *Attempt) error {
	sess := e.r.sched.Open(e.o.kind, e.o.sampling, e.o.share)
	defer sess.Close()
	for {
		var req harness.Request
		var done bool
		e.live.set(stateHarness, e.turns)
		err := e.call(ctx, e.r.cfg.Rollout.EpisodeDeadline.D(), func(ctx context.Context) (err error) {
			req, done, err = e.ep.Next(ctx)
			return err
		})
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			e.void(a, err)
			return nil
		}
		if done {
			a.Traj = e.ep.Trajectory()
			a.Outcome = a.Traj.Outcome
			if err := a.Traj.Check(); err != nil {
				a.Outcome, a.Traj.FaultReason = env.HarnessFault, err.Error()
			}
			return nil
		}
		e.live.set(stateGenerate, e.turns+1)
		c, err := sess.Generate(ctx, req)
		if err != nil {
			return err
		}
		e.book(req, c)
		if e.o.observe != nil {
			e.o.observe(req, c)
		}
		if err := e.call(ctx, e.r.cfg.Rollout.StepTimeout.D(), func(context.Context) error { return e.ep.Deliver(c) }); err != nil {
			e.void(a, fmt.Errorf("deliver turn %d: %w", e.turns, err))
			return nil
		}
	}
}

// book keeps the episode's own copy of the ledger: only producer policy is told
// apart, which is all a loss needs.
func (e *episode) book(req harness.Request, c harness.Completion) {
	if req.Restart || len(e.ledger) == 0 {
		e.ledger = append(e.ledger, harness.LedgerSegment{})
	}
	s := &e.ledger[len(e.ledger)-1]
	add := func(ids []int32, k chat.Kind, lp func(int) float32) {
		for i, id := range ids {
			s.IDs, s.Kind, s.LogProb = append(s.IDs, id), append(s.Kind, k), append(s.LogProb, lp(i))
			s.Turn = append(s.Turn, int32(e.turns))
		}
	}
	add(req.Append, chat.KindTemplate, func(int) float32 { return 0 })
	e.turns++
	add(c.Tokens, chat.KindPolicy, func(i int) float32 { return c.LogProb[i] })
}

// void classifies an error of environment or harness (method.md 3.1): a deadline
// that expires in the policy's own tool call is a valid failure, any other
// expiry and every InfraError is infra, the rest is the harness's fault.
func (e *episode) void(a *Attempt, err error) {
	var p *panicError
	late := errors.Is(err, errAbandoned) || errors.Is(err, context.DeadlineExceeded) || e.left <= 0
	inEnv := e.live.state() != stateHarness
	switch {
	case !e.gone && e.ep != nil && !errors.As(err, &p):
		a.Traj = e.ep.Trajectory()
		a.Outcome = a.Traj.Outcome
	default:
		a.Traj = harness.Trajectory{TaskID: e.o.task.ID, HarnessID: e.o.spec.ID(), HarnessName: e.o.spec.Name, Segments: e.ledger, Turns: e.turns}
	}
	switch {
	case a.Outcome == env.InfraVoid || a.Outcome == env.HarnessFault || a.Outcome == env.TaskInvalid:
	case errors.Is(err, env.ErrInfra):
		a.Outcome = env.InfraVoid
	case late && e.live.state() == stateTool:
		a.Outcome = env.Timeout
		if e.gone || len(a.Traj.Segments) == 0 {
			a.Traj.Segments, a.Traj.Turns = e.ledger, e.turns
		}
	case late || inEnv:
		a.Outcome = env.InfraVoid
	default:
		a.Outcome = env.HarnessFault
	}
	a.Traj.Outcome = a.Outcome
	if a.Traj.FaultReason == "" {
		a.Traj.FaultReason = err.Error()
	}
}

// close releases the environment, also after a cancelled context.
func (e *episode) close(ctx context.Context) {
	e.live.set(stateClose, e.turns)
	err := bounded(context.WithoutCancel(ctx), e.r.cfg.Rollout.StepTimeout.D(), func(ctx context.Context) error {
		if !e.gone && e.ep != nil {
			return e.ep.Close(ctx)
		}
		return e.att.Close(ctx)
	})
	if err != nil { // the verdict stands; leftovers are reaped by name at the next start
		e.r.log.Warn("close attempt", "task", e.o.task.ID, "harness", e.o.spec.Name, "attempt", e.o.index, "err", err)
	}
}

// watched tells the watchdog, and the classification of deadlines, what an
// attempt is doing.
type watched struct {
	env.Attempt
	l       *live
	grading time.Duration
}

func (w watched) Step(ctx context.Context, a env.Action) (env.Step, error) {
	w.l.enter(stateTool)
	s, err := w.Attempt.Step(ctx, a)
	if err == nil {
		w.l.enter(stateHarness)
	}
	return s, err
}

func (w watched) Grade(ctx context.Context) (env.Verdict, error) {
	w.l.enter(stateGrade)
	ctx, cancel := context.WithTimeout(ctx, w.grading)
	defer cancel()
	v, err := w.Attempt.Grade(ctx)
	if err == nil {
		w.l.enter(stateHarness)
	}
	return v, err
}
