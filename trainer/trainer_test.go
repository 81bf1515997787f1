package trainer

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"harness-s/env"
)

// mixedRates makes task 0, 3, 6, .. hopeless under the original and others mixed.
func mixedRates(x env.TaskRef) int {
	if x.Group == "family0" {
		return 0
	}
	return 40
}

func startRun(t *testing.T, w *world, o RunOptions) (*Summary, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	return Run(ctx, w.cfg, w.deps, o)
}

func newRunDir(t *testing.T) *RunDir {
	t.Helper()
	d, err := CreateRun(t.TempDir(), "r", []byte("# test\n"), Manifest{Created: time.Unix(1, 0)}, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func jsonl(t *testing.T, d *RunDir) []Sink {
	t.Helper()
	a, err := d.Appender("metrics.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	s := JSONLSink(a)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return []Sink{s}
}

// runFiles reads what must be equal when a run is repeated: metrics without machine
// dependent areas, rollouts, decisions, evidence.
func runFiles(t *testing.T, d *RunDir) map[string]string {
	t.Helper()
	out := map[string]string{}
	b, err := os.ReadFile(d.Path("metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		step, values, err := ParseRecord([]byte(line))
		if err != nil {
			t.Fatal(err)
		}
		for k := range values {
			if MachineDependent(k) {
				delete(values, k)
			}
		}
		out["metrics/"+stepName(step)] = digestJSON(t, values)
	}
	for _, glob := range []string{"rollouts/*", "router/decisions.jsonl", "evidence/*"} {
		names, err := filepath.Glob(d.Path(glob))
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range names {
			b, err := os.ReadFile(n)
			if err != nil {
				t.Fatal(err)
			}
			out[glob+"/"+filepath.Base(n)] = digestJSON(t, b)
		}
	}
	return out
}

func TestRunTrains(t *testing.T) {
	w := newWorld(t, mixedRates, byRate)
	d := newRunDir(t)
	var events []Event
	s, err := startRun(t, w, RunOptions{Dir: d, Sinks: jsonl(t, d), Event: func(e Event) { events = append(events, e) }})
	if err != nil {
		t.Fatal(err)
	}
	if s.Steps != 4 || s.Groups != 16 || s.RescuedGroups == 0 || s.RescueSuccesses == 0 || s.AllFailGroups < s.RescuedGroups {
		t.Errorf("summary %+v", s)
	}
	if s.Cost.Base != 16*8 || s.Cost.Rescue != 8*s.RescuedGroups || s.Cost.Profiling != 2*13 || s.Cost.Eval != 2*12 {
		t.Errorf("cost %+v for %d rescued groups", s.Cost, s.RescuedGroups)
	}
	if w.env.opens["test-0"] != 0 {
		t.Error("a test task was opened")
	}
	kinds := map[string]int{}
	for _, e := range events {
		kinds[e.Event]++
	}
	if kinds["start"] != 1 || kinds["eval"] != 2 || kinds["checkpoint"] != 2 || kinds["done"] != 1 {
		t.Errorf("events %v", kinds)
	}
	if len(w.runner.seqs) != 0 {
		t.Errorf("%d sequences left", len(w.runner.seqs))
	}
}

func TestRunTwiceIsEqual(t *testing.T) {
	var first map[string]string
	var sha string
	for i := range 2 {
		w := newWorld(t, mixedRates, byRate)
		if i == 1 { // other limits, other batches, same results
			w.cfg.Rollout.Live, w.runner.maxSeqs = 5, 7
		}
		d := newRunDir(t)
		s, err := startRun(t, w, RunOptions{Dir: d, Sinks: jsonl(t, d)})
		if err != nil {
			t.Fatal(err)
		}
		got := runFiles(t, d)
		if i == 0 {
			first, sha = got, s.WeightsSHA256
			continue
		}
		if s.WeightsSHA256 != sha {
			t.Errorf("weights %s, first run %s", s.WeightsSHA256, sha)
		}
		for k, v := range first {
			if got[k] != v {
				t.Errorf("%s differs", k)
			}
		}
	}
}

// P76: straight run = stop at step 2, then go on.
func TestResumeIsEqual(t *testing.T) {
	w := newWorld(t, mixedRates, byRate)
	w.cfg.Router.RecalibrateEvery, w.cfg.Router.RecalibrateTasks = 3, 2
	whole := newRunDir(t)
	want, err := startRun(t, w, RunOptions{Dir: whole, Sinks: jsonl(t, whole)})
	if err != nil {
		t.Fatal(err)
	}

	again := func() *world {
		x := newWorld(t, mixedRates, byRate)
		x.cfg = w.cfg
		return x
	}
	w1, d := again(), newRunDir(t)
	cut := errors.New("killed")
	ctx, cancel := context.WithCancelCause(t.Context())
	sinks := jsonl(t, d)
	_, err = Run(ctx, w1.cfg, w1.deps, RunOptions{Dir: d, Sinks: append(sinks, stopAfter{3, func() { cancel(cut) }})})
	if !errors.Is(err, cut) {
		t.Fatalf("error %v", err)
	}
	w2 := again()
	if err := d.BeginResume(2, time.Unix(2, 0), nil); err != nil {
		t.Fatal(err)
	}
	w2.model.load(t, filepath.Join(d.Checkpoints(w2.cfg.Save, nil).Path(2), "model"))
	got, err := startRun(t, w2, RunOptions{Dir: d, Resume: 2, Sinks: jsonl(t, d)})
	if err != nil {
		t.Fatal(err)
	}
	if got.WeightsSHA256 != want.WeightsSHA256 || got.RescuedGroups != want.RescuedGroups || got.Pass3After != want.Pass3After || got.Pass1Before != want.Pass1Before || got.Cost != want.Cost {
		t.Errorf("resumed %+v\nstraight %+v", got, want)
	}
	a, b := runFiles(t, whole), runFiles(t, d)
	for k, v := range a {
		if b[k] != v {
			t.Errorf("%s differs after resume", k)
		}
	}
	if w2.model.version != w.model.version {
		t.Errorf("policy version %d, want %d", w2.model.version, w.model.version)
	}
}

// stopAfter calls f when a step was written.
type stopAfter struct {
	step int
	f    func()
}

func (s stopAfter) Write(r *Record) error {
	if r.Step == s.step {
		s.f()
	}
	return nil
}
func (stopAfter) Close() error { return nil }

func TestResumeRefusesAnotherRun(t *testing.T) {
	w, d := newWorld(t, mixedRates, byRate), newRunDir(t)
	if _, err := startRun(t, w, RunOptions{Dir: d}); err != nil {
		t.Fatal(err)
	}
	x := newWorld(t, mixedRates, byRate)
	x.cfg.Run.Seed = 9
	x.cfg.Optim.States, x.cfg.Optim.Master = "8bit", "hilo"
	x.deps.Pool = testPool(t, 9)
	_, err := startRun(t, x, RunOptions{Dir: d, Resume: 2})
	for _, want := range []string{"pool is", "seed is", "model is", "optim.states is 8bit, the checkpoint was made with fp32", "optim.master is hilo, the checkpoint was made with fp32"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
}

// A kill right after a checkpoint must not lose the record of its step.
func TestRecordComesBeforeCheckpoint(t *testing.T) {
	w := newWorld(t, mixedRates, byRate)
	d := newRunDir(t)
	seen := 0
	check := sinkFunc(func(r *Record) error {
		seen++
		if _, err := os.Stat(d.Path("checkpoints", stepName(r.Step))); err == nil {
			t.Errorf("step %d: saved before it was recorded", r.Step)
		}
		return nil
	})
	if s, err := startRun(t, w, RunOptions{Dir: d, Sinks: []Sink{check}}); err != nil || seen != s.Steps {
		t.Errorf("%d records, %v", seen, err)
	}
}

type sinkFunc func(*Record) error

func (f sinkFunc) Write(r *Record) error { return f(r) }
func (sinkFunc) Close() error            { return nil }

func TestInterruptSavesAndStops(t *testing.T) {
	w, d := newWorld(t, mixedRates, byRate), newRunDir(t)
	w.cfg.Save.Every = 0
	stop := make(chan struct{})
	s, err := startRun(t, w, RunOptions{Dir: d, Interrupt: stop, Sinks: []Sink{stopAfter{2, func() { close(stop) }}}})
	if !errors.Is(err, ErrInterrupted) || s.Steps != 2 {
		t.Fatalf("steps %d, error %v", s.Steps, err)
	}
	if at, err := d.Checkpoints(w.cfg.Save, nil).Latest(); err != nil || at != 2 {
		t.Errorf("latest checkpoint %d, %v", at, err)
	}

	w, d = newWorld(t, mixedRates, byRate), newRunDir(t) // step 2 is saved by schedule already
	stop, saves := make(chan struct{}), 0
	_, err = startRun(t, w, RunOptions{Dir: d, Interrupt: stop, Event: func(e Event) {
		if e.Event == "checkpoint" {
			saves++
			close(stop)
		}
	}})
	if !errors.Is(err, ErrInterrupted) || saves != 1 {
		t.Errorf("%d checkpoints, error %v", saves, err)
	}
}

// There is no step to finish before step 1: the first evaluation and the evidence are not waited for.
func TestInterruptBeforeTheFirstStep(t *testing.T) {
	w, d := newWorld(t, mixedRates, byRate), newRunDir(t)
	stop := make(chan struct{})
	var once sync.Once
	w.env.on = func(ctx context.Context, _ env.TaskRef, _ string) error {
		once.Do(func() { close(stop) })
		<-ctx.Done()
		return ctx.Err()
	}
	s, err := startRun(t, w, RunOptions{Dir: d, Interrupt: stop})
	if !errors.Is(err, ErrInterrupted) || s.Steps != 0 {
		t.Fatalf("steps %d, error %v", s.Steps, err)
	}
	if at, err := d.Checkpoints(w.cfg.Save, nil).Latest(); !errors.Is(err, ErrNoCheckpoint) {
		t.Errorf("latest checkpoint %d, %v", at, err)
	}
}

// A stop between the update and the record of a step leaves no checkpoint of it: the step is made again.
func TestInterruptAfterTheUpdate(t *testing.T) {
	w, d := newWorld(t, mixedRates, byRate), newRunDir(t)
	w.cfg.Eval.Every = 3
	stop, down := make(chan struct{}), &env.InfraError{Phase: "step", Retryable: true, Err: errors.New("connection refused")}
	steps := 0
	var dead atomic.Bool
	w.env.on = func(_ context.Context, x env.TaskRef, _ string) error {
		if x.Split == env.Val && dead.Load() { // the evaluation after step 3
			return down
		}
		return nil
	}
	var once sync.Once
	w.env.health = func() error {
		if !dead.Load() {
			return nil
		}
		once.Do(func() { close(stop) })
		return down
	}
	count := sinkFunc(func(r *Record) error {
		steps = r.Step
		dead.Store(r.Step == 2)
		return nil
	})
	s, err := startRun(t, w, RunOptions{Dir: d, Interrupt: stop, Sinks: []Sink{count}})
	if !errors.Is(err, ErrInterrupted) || s.Steps != 3 || steps != 2 {
		t.Fatalf("steps %d, %d records, error %v", s.Steps, steps, err)
	}
	if at, err := d.Checkpoints(w.cfg.Save, nil).Latest(); err != nil || at != 2 {
		t.Errorf("latest checkpoint %d, %v", at, err)
	}
}

// A full disk pauses the run; the write is made again and nothing else is.
func TestFullDiskPausesTheRun(t *testing.T) {
	w := newWorld(t, mixedRates, byRate)
	want, err := startRun(t, w, RunOptions{})
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, mixedRates, byRate)
		w.cfg.Run.PauseLimit = Duration(time.Hour)
		full := diskError("append", "/nowhere/metrics.jsonl", 10, unix.ENOSPC)
		tries, texts := 0, []string{}
		sink := sinkFunc(func(r *Record) error {
			if r.Step == 2 {
				if tries++; tries < 9 {
					return full
				}
			}
			return nil
		})
		began := time.Now()
		note := func(e Event) {
			if e.Event == "warning" {
				texts = append(texts, e.Text)
			}
		}
		got, err := Run(t.Context(), w.cfg, w.deps, RunOptions{Sinks: []Sink{sink}, Event: note})
		if err != nil || tries != 9 || got.WeightsSHA256 != want.WeightsSHA256 || got.Cost != want.Cost {
			t.Fatalf("%d tries, %v", tries, err)
		}
		if len(texts) != 2 || !strings.Contains(texts[0], "10 B needed") || !strings.Contains(texts[0], "1h") || !strings.Contains(texts[1], "resumed") {
			t.Errorf("warnings %q", texts)
		}
		if time.Since(began) < time.Minute {
			t.Errorf("tried nine times in %s", time.Since(began))
		}
		always := sinkFunc(func(*Record) error { return full })
		w = newWorld(t, mixedRates, byRate)
		if _, err := Run(t.Context(), w.cfg, w.deps, RunOptions{Sinks: []Sink{always}}); !errors.Is(err, ErrNoSpace) || Hint(err) == "" {
			t.Errorf("after the limit: %v", err)
		}
		stop := make(chan struct{})
		w = newWorld(t, mixedRates, byRate)
		w.cfg.Run.PauseLimit = 0
		began = time.Now()
		asked := sinkFunc(func(*Record) error { close(stop); return full })
		if _, err := Run(t.Context(), w.cfg, w.deps, RunOptions{Sinks: []Sink{asked}, Interrupt: stop}); !errors.Is(err, ErrNoSpace) || errors.Is(err, ErrInterrupted) {
			t.Errorf("stopped on request: %v", err)
		}
		if time.Since(began) > time.Second {
			t.Errorf("a stop was waited for %s", time.Since(began))
		}
	})
}

func TestGapGateStopsTheRun(t *testing.T) {
	w := newWorld(t, rates(50), byRate)
	w.model.shift = func(v uint64) float32 {
		if v >= 2 {
			return 0.2
		}
		return 0
	}
	s, err := startRun(t, w, RunOptions{})
	if !errors.Is(err, ErrGate) || s.Steps != 2 || w.model.version != 2 {
		t.Errorf("error %v after %d steps, version %d", err, s.Steps, w.model.version)
	}
}

// P55: without live groups nothing is touched.
func TestEmptyStepTouchesNothing(t *testing.T) {
	for _, rate := range []int{0, 100} {
		w := newWorld(t, rates(rate), byRate)
		w.cfg.Rescue.Mode = "off"
		before := *w.model
		var texts []string
		s, err := startRun(t, w, RunOptions{Event: func(e Event) {
			if e.Event == "empty_step" {
				texts = append(texts, e.Text)
			}
		}})
		if err != nil {
			t.Fatal(err)
		}
		if w.model.w != before.w || w.model.version != 0 || w.model.backward != 0 || len(texts) != 4 || s.Steps != 4 {
			t.Errorf("rate %d: model %+v, events %q", rate, w.model, texts)
		}
	}
}

func TestGradientRules(t *testing.T) {
	w := newWorld(t, rates(50), byRate)
	w.model.nan = true
	s, err := startRun(t, w, RunOptions{})
	if !errors.Is(err, ErrGate) || w.model.w != 1 || s.Steps != 0 {
		t.Errorf("NaN gradient: error %v, weight %g", err, w.model.w)
	}
	if err := checkGradient(0, 3); !errors.Is(err, ErrGate) {
		t.Errorf("zero gradient with live trajectories: %v", err)
	}
	if err := checkGradient(0, 0); err != nil {
		t.Error(err)
	}
}

// P41: with a learning rate of 0 the weights stay bit for bit.
func TestLearningRateZero(t *testing.T) {
	w := newWorld(t, rates(50), byRate)
	w.cfg.Optim.LR = 0
	if _, err := startRun(t, w, RunOptions{}); err != nil || w.model.w != 1 || w.model.version != 4 {
		t.Errorf("weight %g, version %d, error %v", w.model.w, w.model.version, err)
	}
}

// P15: an engine failure ends the run with its own error.
func TestEngineErrorIsFatal(t *testing.T) {
	w := newWorld(t, rates(50), byRate)
	dead := errors.New("device lost")
	w.runner.fail = func(step int) error {
		if step == 300 {
			return dead
		}
		return nil
	}
	_, err := startRun(t, w, RunOptions{})
	var e *EngineError
	if !errors.Is(err, dead) || !errors.As(err, &e) {
		t.Errorf("error %v", err)
	}
}

func TestRunRefusesBadSetups(t *testing.T) {
	w := newWorld(t, rates(50), byRate)
	w.deps.Pool = testPool(t, 7)
	w.cfg.GRPO.KL = 0.1
	w.cfg.GRPO.LossContext = "stripped"
	w.deps.MaxRows = 100
	_, err := startRun(t, w, RunOptions{})
	for _, want := range []string{"7 auxiliaries", "grpo.kl", "grpo.loss_context", "100 rows"} {
		if err == nil || !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v lacks %q", err, want)
		}
	}
}

func TestLearningRateSchedule(t *testing.T) {
	o := OptimConfig{LR: 1, Warmup: 2, Schedule: "linear"}
	for step, want := range map[int]float64{1: 0.5, 2: 1, 3: 1, 7: 0.5, 10: 0.125} {
		if got := learningRate(o, step, 10); got != want {
			t.Errorf("linear step %d: %g, want %g", step, got, want)
		}
	}
	if got := learningRate(OptimConfig{LR: 1, Schedule: "cosine"}, 6, 10); got != 0.5 {
		t.Errorf("cosine in the middle: %g", got)
	}
	if got := learningRate(OptimConfig{LR: 1, Schedule: "constant"}, 9, 10); got != 1 {
		t.Errorf("constant: %g", got)
	}
}
