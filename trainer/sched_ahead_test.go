package trainer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"harness-s/env/harness"
	"harness-s/kernels"
	"harness-s/model"
)

// One step behind the device, a run's attempts are those of a scheduler that waits for every step.
func TestAheadChangesNoAttempt(t *testing.T) {
	attempts := func(ahead bool) string {
		w := newWorld(t, rates(50), byRate)
		var a *aheadFake
		if ahead {
			a = &aheadFake{fakeRunner: w.runner}
			w.deps.Sampler = a
		}
		var groups []*Group
		err := withEngine(t.Context(), w.cfg, w.deps, func(ctx context.Context, r *rollouts) (err error) {
			groups, err = (&collector{r: r, mode: "off", step: 1}).collect(ctx, w.env.train[:5])
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if ahead && (a.most != 2 || a.fromLast == 0 || len(a.pending) != 0) {
			t.Errorf("%d steps at once, %d tokens fed unseen, %d steps left", a.most, a.fromLast, len(a.pending))
		}
		var all []any
		for _, g := range groups {
			for _, x := range g.Base {
				all = append(all, x.Outcome, x.Traj.Segments)
			}
		}
		return digestJSON(t, all)
	}
	if got, want := attempts(true), attempts(false); got != want {
		t.Errorf("digest %s, one by one %s", got, want)
	}
}

// What is under way when a session ends, closes or fails.
func TestAheadInFlight(t *testing.T) {
	never := func([]int32, model.Work) int32 { return 1 }
	ctx := context.Background()
	t.Run("no row behind the last", func(t *testing.T) {
		r := &aheadFake{fakeRunner: newFakeRunner(4, 4096, never)}
		if err := withSched(t, r, SchedOptions{MaxContext: 100}, func(s *Scheduler) {
			out, err := talk(ctx, s, 0, 0, 1, []schedTurn{{95, 50, false}})
			if err != nil || len(out[0].Tokens) != 5 || out[0].Finish != harness.Context {
				t.Errorf("%+v, %v", out, err)
			}
		}); err != nil {
			t.Fatal(err)
		}
		if r.rows != 99 || r.fromLast != 4 { // neither the last token of the context nor one that maxNew cuts off is fed
			t.Errorf("%d rows, %d fed unseen; want 99 and 4", r.rows, r.fromLast)
		}
	})
	t.Run("a stop token is fed once", func(t *testing.T) {
		stopAt2 := func(_ []int32, w model.Work) int32 {
			if w.Ctr == 2 {
				return schedStop
			}
			return 1
		}
		r := &aheadFake{fakeRunner: newFakeRunner(4, 4096, stopAt2)}
		if err := withSched(t, r, SchedOptions{Stop: []int32{schedStop}, MaxContext: 100, ChunkRows: 8}, func(s *Scheduler) {
			ses := s.Open(KindAttempt, model.Sampling{}, 1)
			defer ses.Close()
			for turn, add := range []int{10, 9, 0} {
				c, err := ses.Generate(ctx, harness.Request{Append: make([]int32, add), MaxNew: 20, Key: harness.RNGKey{Turn: turn}})
				if err != nil || len(c.Tokens) != 3 || c.Finish != harness.Stop {
					t.Errorf("turn %d: %+v, %v", turn, c, err)
				}
				if err := s.do(ctx, func() {
					for _, x := range r.seqs {
						if !slices.Equal(x.ids[:min(len(x.ids), len(ses.ids))], ses.ids[:min(len(x.ids), len(ses.ids))]) || ses.covered > len(ses.ids) {
							t.Errorf("turn %d: fed %v, context %v, %d in pieces", turn, x.ids, ses.ids, ses.covered)
						}
					}
				}); err != nil {
					t.Fatal(err)
				}
			}
		}); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("closed", func(t *testing.T) {
		r := &aheadFake{fakeRunner: newFakeRunner(4, 4096, never)}
		started := make(chan struct{}, 1)
		r.pick = func([]int32, model.Work) int32 {
			select {
			case started <- struct{}{}:
			default:
			}
			return 1
		}
		if err := withSched(t, r, SchedOptions{MaxContext: 4000}, func(s *Scheduler) {
			cut, cancel := context.WithCancel(ctx)
			go func() { <-started; cancel() }()
			c, err := s.Open(KindEval, model.Sampling{}, 1).Generate(cut, harness.Request{Append: []int32{1}, MaxNew: 3000})
			if c.Finish != harness.Aborted || !errors.Is(err, context.Canceled) {
				t.Errorf("finish %s, %v", c.Finish, err)
			}
			ran := false
			if err := s.Exclusive(ctx, func() error { ran = len(r.pending) == 0; return nil }); err != nil || !ran {
				t.Errorf("alone: %v, ran %v", err, ran)
			}
			if out, err := talk(ctx, s, 1, 0, 1, []schedTurn{{5, 4, false}}); err != nil || len(out[0].Tokens) != 4 {
				t.Errorf("after it: %+v, %v", out, err)
			}
		}); err != nil {
			t.Fatal(err)
		}
		if len(r.seqs) != 0 || len(r.pending) != 0 {
			t.Errorf("%d sequences, %d steps left", len(r.seqs), len(r.pending))
		}
	})
	for _, where := range []string{"submit", "wait"} {
		t.Run("fails at "+where, func(t *testing.T) {
			dead := errors.New("device lost")
			r := &aheadFake{fakeRunner: newFakeRunner(4, 4096, never)}
			at := func(n int) error {
				if n == 4 {
					return dead
				}
				return nil
			}
			if where == "submit" {
				r.fail = at
			} else {
				r.late = at
			}
			var e *EngineError
			if err := withSched(t, r, SchedOptions{MaxContext: 100}, func(s *Scheduler) {
				if _, err := talk(ctx, s, 0, 0, 1, []schedTurn{{5, 50, false}}); !errors.Is(err, dead) || !errors.As(err, &e) {
					t.Errorf("request: %v", err)
				}
			}); !errors.Is(err, dead) || !errors.As(err, &e) {
				t.Errorf("run: %v", err)
			}
			if len(r.pending) != 0 {
				t.Errorf("%d steps left", len(r.pending))
			}
		})
	}
}

// A weight that is no number ends the run of sessions one step behind with that error, whoever asks.
func TestAheadNotFinite(t *testing.T) {
	m := emuModel(t, kernels.Options{}, model.LoadOptions{DType: kernels.BF16})
	r, err := model.NewRunner(m, model.RunnerOptions{MaxSeqs: 6, MaxTokens: 2000, MaxContext: 300, MaxRows: 64})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	v, err := m.Params.Master(model.EmbedName)
	if err != nil {
		t.Fatal(err)
	}
	failed := func(err error) {
		t.Helper()
		var e *EngineError
		if !errors.Is(err, model.ErrNonFinite) || !errors.As(err, &e) {
			t.Errorf("got %v", err)
		}
	}
	failed(withSched(t, SamplerOf(r, m.Dev), SchedOptions{MaxContext: 300}, func(s *Scheduler) {
		if _, err := talk(t.Context(), s, 9, 0, 1, []schedTurn{{10, 5, false}}); err != nil {
			t.Fatal(err)
		}
		if err := s.Exclusive(t.Context(), func() error {
			v[7*m.Config.Hidden] = float32(math.NaN())
			return m.Params.WriteF32(model.Weights, model.EmbedName, v)
		}); err != nil {
			t.Fatal(err)
		}
		if err := each(t.Context(), 5, func(ctx context.Context, i int) error {
			_, err := talk(ctx, s, i, 0, 1, []schedTurn{{10, 200, false}})
			failed(err)
			return nil
		}); err != nil {
			t.Error(err)
		}
		failed(s.Exclusive(t.Context(), func() error { return nil }))
	}))
}

// A step that nobody's tokens come from any more fails while the device is handed over: that is the engine's failure.
func TestExclusiveAfterLostStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dead, lost := errors.New("device lost"), false
		r := &aheadFake{fakeRunner: newFakeRunner(4, 4096, func([]int32, model.Work) int32 { return 1 })}
		r.delay = time.Millisecond
		r.late = func(int) error {
			if lost {
				return dead
			}
			return nil
		}
		_ = withSched(t, r, SchedOptions{MaxContext: 4000}, func(s *Scheduler) {
			ctx, cancel := context.WithCancel(t.Context())
			ses, res := s.Open(KindEval, model.Sampling{}, 1), make(chan error)
			go func() { _, _ = ses.Generate(ctx, harness.Request{Append: []int32{1}, MaxNew: 3000}) }()
			time.Sleep(10 * time.Millisecond)
			if err := s.do(ctx, func() {
				lost = s.flight != nil
				s.drop(ses)
				go func() { res <- s.Exclusive(ctx, func() error { return nil }) }()
				synctest.Wait() // it is the next that Run does
			}); err != nil {
				t.Fatal(err)
			}
			var e *EngineError
			if err := <-res; !lost || !errors.Is(err, dead) || !errors.As(err, &e) {
				t.Errorf("lost %t: %v", lost, err)
			}
			cancel()
		})
	})
}

// On the emulated device with its graphs, sessions one step behind sample the tokens and log-probs of sessions whose every step is waited for, with
// room and without: shared prompts, several turns, preemption.
func TestAheadOnEmu(t *testing.T) {
	dev, err := kernels.Open("emu", kernels.Options{LibDir: filepath.Join("..", "build")})
	if errors.Is(err, kernels.ErrNoDevice) {
		t.Skipf("%v: make emu", err)
	} else if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	}()
	c := model.TinyConfig()
	c.VocabSize, c.Hidden, c.Intermediate, c.NumLayers = 160, 64, 96, 4
	c.LayerTypes = c.LayerTypes[:4]
	m, err := model.NewRandom(c, dev, 3, model.LoadOptions{DType: kernels.BF16})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	stop := []int32{3, 50, 90, 120} // often
	play := func(ahead bool, slots, tokens int) ([]string, SchedStats) {
		r, err := model.NewRunner(m, model.RunnerOptions{MaxSeqs: slots, MaxTokens: tokens, MaxContext: 160, PageSize: 16, MaxRows: 128})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		s := SamplerOf(r, dev)
		if _, ok := s.(AheadSampler); !ok {
			t.Fatal("the emulated device does not take steps ahead")
		}
		if !ahead {
			s = r
		}
		out := make([]string, 6)
		var st SchedStats
		err = withSched(t, s, SchedOptions{Stop: stop, MaxContext: 160, ChunkRows: 24}, func(s *Scheduler) {
			err := each(t.Context(), len(out), func(ctx context.Context, i int) error {
				c, err := talk(ctx, s, i, i%2, 3, []schedTurn{{30, 14, false}, {9 + i, 12, false}, {3, 8, i == 2}})
				out[i] = fmt.Sprint(c)
				return err
			})
			if err != nil {
				t.Error(err)
			}
			if st, err = s.Stats(t.Context()); err != nil {
				t.Error(err)
			}
			if err := s.Exclusive(t.Context(), func() error { return nil }); err != nil { // gives shared prompts back
				t.Error(err)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		if n := r.FreeSeqs(); n != slots {
			t.Errorf("%d of %d sequences free", n, slots)
		}
		return out, st
	}
	want, _ := play(false, 16, 16*160)
	if s := strings.Join(want, ""); !strings.Contains(s, harness.Stop.String()) || !strings.Contains(s, harness.Length.String()) {
		t.Errorf("turns do not end both ways: %s", s)
	}
	for _, ahead := range []bool{false, true} {
		for _, tight := range []bool{false, true} {
			slots, tokens := 16, 16*160
			if tight {
				slots, tokens = 4, 176
			}
			got, st := play(ahead, slots, tokens)
			if !slices.Equal(got, want) {
				t.Errorf("ahead %t, tight %t:\n%s\nwant\n%s", ahead, tight, got, want)
			}
			t.Logf("ahead %t, tight %t: %d steps, %d preempted", ahead, tight, st.Steps, st.Preempted)
		}
	}
}

// Three groups whose prompts do not fit together, nor some of them beside a fork: every session ends, with the tokens of prompts that nobody
// shares, and what others abandon half-way changes nothing.
func TestSchedulerSharesTightly(t *testing.T) {
	const n, group = 12, 3
	play := func(s Sampler, r *fakeRunner, share int) []string {
		out := make([]string, n)
		cuts := map[model.Key]context.CancelFunc{}
		r.fail = func(step int) error {
			if step > 5000 {
				return errors.New("no end")
			}
			return nil
		}
		mix := mixing(40)
		var mu sync.Mutex
		r.pick = func(ids []int32, w model.Work) int32 {
			mu.Lock()
			defer mu.Unlock()
			if cut := cuts[w.Key]; cut != nil && w.Ctr == 2 {
				cut()
			}
			return mix(ids, w)
		}
		err := withSched(t, s, SchedOptions{Stop: []int32{schedStop}, MaxContext: 100, ChunkRows: 16}, func(s *Scheduler) {
			err := each(t.Context(), n, func(ctx context.Context, i int) error {
				if i%4 == 3 { // begins, and leaves its prompt to the others
					cut, cancel := context.WithCancel(ctx)
					defer cancel()
					key := harness.RNGKey{Task: "left", Attempt: i}
					mu.Lock()
					cuts[KeyOf(key)] = cancel
					mu.Unlock()
					ses := s.Open(Kind(i)%numKinds, model.Sampling{Temperature: 1}, share)
					_, err := ses.Generate(cut, harness.Request{Append: make([]int32, 30), MaxNew: 30, Key: key})
					ses.Close()
					if err != nil && !errors.Is(err, context.Canceled) {
						return err
					}
				}
				c, err := talk(ctx, s, i, i%group, share, []schedTurn{{30 + 11*(i%group), 20, false}, {i % 3, 9, false}})
				out[i] = fmt.Sprint(c)
				return err
			})
			if err != nil {
				t.Errorf("%d slots, %d pages, %d share: %v", r.maxSeqs, len(r.refs), share, err)
			}
		})
		if err != nil {
			t.Error(err)
		}
		return out
	}
	for pages := 4; pages <= 9; pages++ {
		alone := newFakeRunner(64, 16*pages, nil)
		want := play(alone, alone, 1)
		for slots := 1; slots <= 5 && !t.Failed(); slots++ {
			a, b := newFakeRunner(slots, 16*pages, nil), newFakeRunner(slots, 16*pages, nil)
			if got := play(a, a, 4); !slices.Equal(got, want) {
				t.Errorf("%d slots, %d pages:\n%v\nwant\n%v", slots, pages, got, want)
			}
			if got := play(&aheadFake{fakeRunner: b}, b, 4); !slices.Equal(got, want) {
				t.Errorf("ahead, %d slots, %d pages:\n%v\nwant\n%v", slots, pages, got, want)
			}
		}
	}
}
