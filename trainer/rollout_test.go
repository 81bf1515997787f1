package trainer

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"harness-s/env"
)

// P1, P5, P65: a call of the policy that never returns costs that attempt its
// deadline and is its failure; one that even ignores the cancellation is given up.
func TestToolDeadline(t *testing.T) {
	for _, deaf := range []bool{false, true} {
		t.Run(map[bool]string{false: "cancelled", true: "given up"}[deaf], func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, rates(0), byAttempt("hang", "good", "bad"))
				w.cfg.Rollout.StepTimeout, w.cfg.Rollout.EpisodeDeadline = Duration(60*time.Second), Duration(100*time.Second)
				release := make(chan struct{})
				w.env.on = func(ctx context.Context, _ env.TaskRef, answer string) error {
					if answer != "hang" {
						return nil
					}
					if deaf {
						<-release
						return nil
					}
					<-ctx.Done()
					return ctx.Err()
				}
				start := time.Now()
				gs, err := collectOnce(t, w, "off", w.env.train[:1])
				close(release)
				if err != nil {
					t.Fatal(err)
				}
				timeouts := 0
				for i := range gs[0].Base {
					a := &gs[0].Base[i]
					if a.Outcome == env.Timeout {
						timeouts++
						if len(a.Voids) != 0 || len(a.Traj.Segments) != 1 || a.Traj.Segments[0].PolicyTokens() == 0 {
							t.Errorf("timed-out attempt: %d void runs, %d segments", len(a.Voids), len(a.Traj.Segments))
						}
					}
				}
				limit := 60 * time.Second
				if deaf {
					limit = 105 * time.Second
				}
				if took := time.Since(start); timeouts != 1 || took > limit || gs[0].Kind != Kept {
					t.Errorf("%d time-outs in %s, kind %s", timeouts, took, gs[0].Kind)
				}
			})
		})
	}
}

// P21: a panic in environment or harness is void, with its stack in the log.
func TestPanicIsVoid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, rates(50), byRate)
		var log bytes.Buffer
		w.deps.Log = slog.New(slog.NewTextHandler(&lockedWriter{w: &log}, nil))
		var n atomic.Int64
		w.env.initial = func() {
			if n.Add(1) == 4 {
				panic("broken adapter")
			}
		}
		gs, err := collectOnce(t, w, "off", w.env.train[:1])
		if err != nil {
			t.Fatal(err)
		}
		voids := 0
		for i := range gs[0].Base {
			voids += len(gs[0].Base[i].Voids)
		}
		if voids != 1 || gs[0].Kind != Kept || !strings.Contains(log.String(), "broken adapter") {
			t.Errorf("%d void runs, kind %s, log %s", voids, gs[0].Kind, log.String())
		}
	})
}

type lockedWriter struct {
	mu sync.Mutex
	w  *bytes.Buffer
}

func (l *lockedWriter) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(b)
}

// P13: during an outage nothing is issued; it goes on by itself, and nothing that
// was lost counts.
func TestBreakerPausesAndResumes(t *testing.T) {
	for _, tasks := range []int{1, 6} { // also when fewer attempts are open than the window holds
		testOutage(t, tasks)
	}
}

func testOutage(t *testing.T, tasks int) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, rates(50), byRate)
		start := time.Now()
		down := func() bool { d := time.Since(start); return d > 100*time.Millisecond && d < 10*time.Minute }
		w.runner.delay = 10 * time.Millisecond
		w.env.on = func(context.Context, env.TaskRef, string) error {
			if down() {
				return errGone
			}
			return nil
		}
		var probes int
		w.env.health = func() error {
			if probes++; down() {
				return errors.New("refused")
			}
			return nil
		}
		gs, err := collectOnce(t, w, "siblings", w.env.train[:tasks])
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range gs {
			for i := range g.Base {
				if !g.Base[i].Outcome.Valid() {
					t.Errorf("attempt %d of %s: %s", i, g.Task.ID, g.Base[i].Outcome)
				}
			}
		}
		opens := 0
		for _, n := range w.env.opens {
			opens += n
		}
		if took := time.Since(start); took < 10*time.Minute || probes > 20+8*tasks || opens > 4*8*tasks {
			t.Errorf("took %s, %d probes, %d attempts opened", took, probes, opens)
		}
	})
}

// A run that is told to stop while it waits for the environment does not wait for it.
func TestInterruptDuringOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, mixedRates, byRate)
		var down atomic.Bool
		stop := make(chan struct{})
		w.env.on = func(context.Context, env.TaskRef, string) error {
			if down.Load() {
				return errGone
			}
			return nil
		}
		w.env.health = func() error {
			if down.Load() {
				return errors.New("refused")
			}
			return nil
		}
		start := time.Now()
		s, err := startRun(t, w, RunOptions{Interrupt: stop, Event: func(e Event) {
			if e.Event == "eval" {
				down.Store(true)
				time.AfterFunc(10*time.Second, func() { close(stop) })
			}
		}})
		if !errors.Is(err, ErrInterrupted) || s.Steps != 0 || time.Since(start) > 20*time.Second {
			t.Errorf("%v after %s, %d steps", err, time.Since(start), s.Steps)
		}
	})
}

// An environment whose probe passes while every attempt fails ends the run.
// An environment that stays down ends the run after run.pause_limit, with a checkpoint of the last full step.
func TestPauseLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, d := newWorld(t, rates(50), byRate), newRunDir(t)
		w.cfg.Run.PauseLimit, w.cfg.Save.Every = Duration(10*time.Minute), 0
		down := &env.InfraError{Phase: "step", Retryable: true, Err: errors.New("connection refused")}
		var dead atomic.Bool
		w.env.on = func(context.Context, env.TaskRef, string) error {
			if dead.Load() {
				return down
			}
			return nil
		}
		w.env.health = func() error {
			if dead.Load() {
				return down
			}
			return nil
		}
		began := time.Now()
		s, err := Run(t.Context(), w.cfg, w.deps, RunOptions{Dir: d, Sinks: []Sink{stopAfter{2, func() { dead.Store(true) }}}})
		if !errors.Is(err, ErrEnvDown) || !errors.Is(err, env.ErrInfra) || Hint(err) == "" || s.Steps != 2 {
			t.Fatalf("step %d, error %v", s.Steps, err)
		}
		if waited := time.Since(began); waited < 10*time.Minute || waited > 11*time.Minute {
			t.Errorf("waited %s", waited)
		}
		if last, err := d.Checkpoints(w.cfg.Save, nil).Latest(); err != nil || last != 2 {
			t.Errorf("latest checkpoint %d %v", last, err)
		}
	})
}

func TestEnvironmentDownForGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, rates(50), byRate)
		w.env.on = func(context.Context, env.TaskRef, string) error { return errGone }
		_, err := collectOnce(t, w, "siblings", w.env.train[:12])
		if !errors.Is(err, ErrEnvDown) {
			t.Errorf("error %v", err)
		}
	})
}

// P4: the watchdog names who holds the step.
func TestWatchdogNamesTheAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, rates(0), byAttempt("hang", "good"))
		w.cfg.Rollout.StallAfter = Duration(2 * time.Minute)
		w.cfg.Rollout.StepTimeout = Duration(10 * time.Minute)
		var log bytes.Buffer
		w.deps.Log = slog.New(slog.NewTextHandler(&lockedWriter{w: &log}, nil))
		w.env.on = func(ctx context.Context, _ env.TaskRef, answer string) error {
			if answer == "hang" {
				return sleep(ctx, 5*time.Minute)
			}
			return nil
		}
		if _, err := collectOnce(t, w, "off", w.env.train[:1]); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"no progress", "task train-0", "harness original", "base attempt", "turn 1", "in tool"} {
			if !strings.Contains(log.String(), want) {
				t.Errorf("log lacks %q:\n%s", want, log.String())
			}
		}
	})
}

// P19: an engine that stalls ends the run and says so.
func TestStalledEngineEndsTheRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, rates(50), byRate)
		w.cfg.Rollout.StallAfter = Duration(2 * time.Minute)
		hold := make(chan struct{})
		w.runner.fail = func(n int) error {
			if n == 50 {
				<-hold
			}
			return nil
		}
		start := time.Now()
		_, err := collectOnce(t, w, "off", w.env.train[:2])
		var e *EngineError
		if !errors.As(err, &e) || time.Since(start) > 4*time.Minute {
			t.Errorf("error %v after %s", err, time.Since(start))
		}
		close(hold)
	})
}

func TestSlotsServeByKind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSlots(1)
		if err := s.acquire(t.Context(), KindEval); err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		var got []Kind
		var wg sync.WaitGroup
		for _, k := range []Kind{KindCalibrate, KindEval, KindAttempt, KindRescue} {
			wg.Go(func() {
				if err := s.acquire(context.Background(), k); err != nil {
					t.Error(err)
				}
				mu.Lock()
				got = append(got, k)
				mu.Unlock()
				s.release()
			})
			synctest.Wait()
		}
		ctx, cancel := context.WithCancel(context.Background())
		wg.Go(func() {
			if err := s.acquire(ctx, KindRescue); !errors.Is(err, context.Canceled) {
				t.Errorf("cancelled: %v", err)
			}
		})
		synctest.Wait()
		cancel()
		synctest.Wait()
		s.release()
		wg.Wait()
		for i, k := range []Kind{KindRescue, KindAttempt, KindEval, KindCalibrate} {
			if got[i] != k {
				t.Fatalf("order %v", got)
			}
		}
		if s.free != 1 {
			t.Errorf("%d slots free", s.free)
		}
	})
}
