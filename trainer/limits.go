package trainer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"
)

// ErrEnvDown says that the environment stayed down for longer than run.pause_limit, or for the attempts although its probe passed (exit
// code 3).
var ErrEnvDown = errors.New("environment is down")

// maxTrips is how often the breaker may open without one valid attempt in
// between before the run ends.
const maxTrips = 5

// slots bounds the attempts that are open at once; waiting ones are served by
// kind, then in order of arrival.
type slots struct {
	mu   sync.Mutex
	free int
	wait [numKinds][]chan struct{}
}

func newSlots(n int) *slots { return &slots{free: n} }

func (s *slots) acquire(ctx context.Context, k Kind) error {
	s.mu.Lock()
	if s.free > 0 {
		s.free--
		s.mu.Unlock()
		return nil
	}
	ch := make(chan struct{})
	s.wait[k] = append(s.wait[k], ch)
	s.mu.Unlock()
	select {
	case <-ch:
		return nil
	case <-ctx.Done():
	}
	s.mu.Lock()
	i := slices.Index(s.wait[k], ch)
	if i >= 0 {
		s.wait[k] = slices.Delete(s.wait[k], i, i+1)
	}
	s.mu.Unlock()
	if i < 0 { // granted in between
		s.release()
	}
	return context.Cause(ctx)
}

func (s *slots) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k := range s.wait {
		if len(s.wait[k]) > 0 {
			close(s.wait[k][0])
			s.wait[k] = s.wait[k][1:]
			return
		}
	}
	s.free++
}

// breaker pauses new attempts while the environment is down (pitfalls.md row 13):
// it opens when more than share of the window is infra and closes when a probe
// passes. Its probe is run by whoever waits.
type breaker struct {
	health  func(context.Context) error
	limit   time.Duration   // of one probe
	pause   time.Duration   // longest one, 0 = any
	stop    <-chan struct{} // closed when the run shall end: a pause is not waited for; may be nil
	log     *slog.Logger
	mu      sync.Mutex
	ring    []bool
	at      int
	infra   int
	allowed int
	trips   int           // without a valid attempt in between
	shut    chan struct{} // non-nil while open; closed when attempts may go on
	since   time.Time     // when it opened
	probing bool
}

func newBreaker(c RolloutConfig, pause time.Duration, health func(context.Context) error, log *slog.Logger) *breaker {
	return &breaker{health: health, limit: c.StepTimeout.D(), pause: pause, log: log,
		ring: make([]bool, c.InfraWindow), allowed: int(c.InfraShare * float64(c.InfraWindow))}
}

// record books one attempt and reports whether the breaker is open.
func (b *breaker) record(infra bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !infra {
		b.trips = 0
	}
	if b.shut != nil { // what was still running says nothing about recovery
		return true
	}
	if b.ring[b.at] {
		b.infra--
	}
	if b.ring[b.at] = infra; infra {
		b.infra++
	}
	b.at = (b.at + 1) % len(b.ring)
	if b.infra > b.allowed {
		b.open(fmt.Errorf("%d of the last %d attempts void", b.infra, len(b.ring)))
	}
	return b.shut != nil
}

func (b *breaker) open(why error) {
	b.shut = make(chan struct{})
	b.trips++
	b.since = time.Now()
	b.log.Error("paused: environment down; the run goes on by itself when it answers", "err", why, "trips", b.trips, "stops_after", Duration(b.pause))
}

// doubt probes after an infra fault and opens the breaker at once when nothing answers, so that an outage costs no attempt its
// re-runs. It reports whether the breaker is open.
func (b *breaker) doubt(ctx context.Context) bool {
	err := bounded(ctx, b.limit, b.health)
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil && ctx.Err() == nil && b.shut == nil {
		b.open(err)
	}
	return b.shut != nil
}

// wait blocks while the breaker is open.
func (b *breaker) wait(ctx context.Context) error {
	b.mu.Lock()
	if b.shut == nil {
		b.mu.Unlock()
		return nil
	}
	if b.trips >= maxTrips {
		b.mu.Unlock()
		return fmt.Errorf("%w: paused %d times without a valid attempt in between", ErrEnvDown, maxTrips)
	}
	shut, mine := b.shut, !b.probing
	b.probing = true
	b.mu.Unlock()
	if !mine {
		select {
		case <-shut:
			return b.wait(ctx)
		case <-b.stop:
			return ErrInterrupted
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return b.probe(ctx)
}

// probe asks the environment until it answers, then lets attempts go on.
func (b *breaker) probe(ctx context.Context) error {
	for pause := time.Second; ; pause = min(2*pause, time.Minute) {
		wait := pause
		if b.pause > 0 {
			wait = min(wait, max(b.pause-time.Since(b.since), 0))
		}
		t := time.NewTimer(wait)
		var end error
		select {
		case <-t.C:
		case <-b.stop:
			end = ErrInterrupted
		case <-ctx.Done():
			end = context.Cause(ctx)
		}
		t.Stop()
		if end != nil {
			b.mu.Lock()
			b.probing = false
			b.mu.Unlock()
			return end
		}
		err := bounded(ctx, b.limit, b.health)
		if err == nil {
			b.mu.Lock()
			defer b.mu.Unlock()
			clear(b.ring)
			b.infra, b.at, b.probing = 0, 0, false
			close(b.shut)
			b.shut = nil
			b.log.Warn("resumed: environment answers")
			return nil
		}
		if b.pause > 0 && time.Since(b.since) >= b.pause {
			b.mu.Lock()
			b.probing = false
			b.mu.Unlock()
			return &Error{Op: "wait for the environment", Err: fmt.Errorf("%w: no answer for %s (run.pause_limit): %w", ErrEnvDown, Duration(b.pause), err),
				Hint: "start the environment's server again; the run waits longer with --set run.pause_limit=DURATION"}
		}
		b.log.Warn("environment still down", "err", err, "next_probe", min(2*pause, time.Minute))
	}
}

// state of a live attempt.
type state string

const (
	stateOpen     state = "open"
	stateHarness  state = "harness"
	stateGenerate state = "generate"
	stateTool     state = "tool"
	stateGrade    state = "grade"
	stateClose    state = "close"
)

// live is an attempt in progress, for the watchdog.
type live struct {
	o     order
	mu    sync.Mutex
	st    state
	turn  int
	since time.Time
}

func (l *live) set(s state, turn int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.st, l.turn, l.since = s, turn, time.Now()
}

func (l *live) enter(s state) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.st, l.since = s, time.Now()
}

func (l *live) state() state {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.st
}

// watch knows every live attempt. It logs a heartbeat, and when nothing moves it
// names who holds the step.
type watch struct {
	log   *slog.Logger
	stall time.Duration
	beats func() int64 // steps of the scheduler
	mu    sync.Mutex
	live  []*live
}

func newWatch(log *slog.Logger, stall time.Duration, beats func() int64) *watch {
	return &watch{log: log, stall: stall, beats: beats}
}

func (w *watch) add(o order) *live {
	l := &live{o: o, st: stateOpen, since: time.Now()}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.live = append(w.live, l)
	return l
}

func (w *watch) remove(l *live) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if i := slices.Index(w.live, l); i >= 0 {
		w.live = slices.Delete(w.live, i, i+1)
	}
}

// heartbeat is how often the state of all attempts is logged and checked.
const heartbeat = 30 * time.Second

// run reports until ctx ends. It returns an error when attempts wait for tokens
// and the engine has not moved for the stall time (pitfalls.md row 19).
func (w *watch) run(ctx context.Context) error {
	tick := time.NewTicker(min(heartbeat, w.stall))
	defer tick.Stop()
	lastBeat, lastMove := w.beats(), time.Now()
	warned := time.Time{}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		counts, oldest, moved := w.look()
		if b := w.beats(); b != lastBeat || counts[stateGenerate] == 0 {
			lastBeat, lastMove = b, time.Now()
		}
		w.log.Debug("heartbeat", "states", counts)
		if len(counts) == 0 {
			continue
		}
		if time.Since(moved) >= w.stall && time.Since(warned) >= w.stall {
			warned = time.Now()
			w.log.Warn("no progress", "held_by", w.Describe(oldest), "states", counts)
		}
		if time.Since(lastMove) >= w.stall {
			err := fmt.Errorf("engine has not finished a step for %s while %d attempts wait for tokens; longest: %s",
				w.stall, counts[stateGenerate], w.Describe(oldest))
			return &EngineError{Err: err}
		}
	}
}

// look counts states and finds the attempt that has not moved for longest, and
// the time of the latest move of any.
func (w *watch) look() (counts map[state]int, oldest *live, moved time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	counts = map[state]int{}
	var since time.Time
	for _, l := range w.live {
		l.mu.Lock()
		counts[l.st]++
		if oldest == nil || l.since.Before(since) {
			oldest, since = l, l.since
		}
		if l.since.After(moved) {
			moved = l.since
		}
		l.mu.Unlock()
	}
	return counts, oldest, moved
}

// Describe names task, harness, attempt, turn, state and age of l.
func (w *watch) Describe(l *live) string {
	if l == nil {
		return "nobody"
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return fmt.Sprintf("task %s, harness %s, %s attempt %d, turn %d, in %s for %s",
		l.o.task.ID, l.o.spec.Name, l.o.phase, l.o.index, l.turn, l.st, time.Since(l.since).Round(time.Millisecond))
}
