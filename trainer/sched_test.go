package trainer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"harness-s/env/harness"
	"harness-s/model"
)

// mixing draws a token that depends on the whole context and how it was fed, the
// key and the counter, as real sampling does.
func mixing(vocab int32) func([]int32, model.Work) int32 {
	return func(ids []int32, w model.Work) int32 {
		h := mix64(hashIDs(ids) ^ w.Key.Lo + w.Ctr*0x9e37)
		return int32(h % uint64(vocab))
	}
}

const schedStop = int32(7)

// withSched runs f with a scheduler and waits for it.
func withSched(t testing.TB, r Sampler, o SchedOptions, f func(*Scheduler)) error {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s := NewScheduler(r, o)
	var wg sync.WaitGroup
	var err error
	wg.Go(func() { err = s.Run(ctx) })
	f(s)
	cancel()
	wg.Wait()
	return err
}

// turn is one request of a scripted session.
type schedTurn struct {
	add, maxNew int
	restart     bool
}

// talk plays turns through a session and returns everything sampled.
func talk(ctx context.Context, s *Scheduler, id, group, share int, turns []schedTurn) ([]harness.Completion, error) {
	ses := s.Open(Kind(id)%numKinds, model.Sampling{Temperature: 1}, share)
	defer ses.Close()
	var out []harness.Completion
	for n, x := range turns {
		ids := make([]int32, x.add)
		for i := range ids {
			ids[i] = int32(100 + group + i + 13*n)
		}
		c, err := ses.Generate(ctx, harness.Request{Append: ids, Restart: x.restart, MaxNew: x.maxNew,
			Key: harness.RNGKey{Task: fmt.Sprint(group), Attempt: id, Turn: n + 1}})
		if err != nil {
			return out, err
		}
		out = append(out, c)
	}
	return out, nil
}

// Whatever the slots, pages, chunk sizes of a step and company: the same tokens.
// Little memory forces preemption and eviction of shared prompts.
func TestSchedulerResultsDoNotDependOnResources(t *testing.T) {
	preempted, fromLast := map[bool]int{}, 0
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 12).Draw(rt, "sessions")
		script := make([][]schedTurn, n)
		groups := make([]int, n)
		for i := range script {
			groups[i] = rapid.IntRange(0, 2).Draw(rt, "group")
			for j := range rapid.IntRange(1, 3).Draw(rt, "turns") {
				add := rapid.IntRange(1, 40).Draw(rt, "add")
				if j == 0 {
					add = 30 + 11*groups[i]
				}
				script[i] = append(script[i], schedTurn{add, rapid.IntRange(1, 30).Draw(rt, "new"), j > 0 && rapid.IntRange(0, 4).Draw(rt, "restart") == 0})
			}
		}
		run := func(s Sampler, r *fakeRunner, o SchedOptions, share int) ([][]harness.Completion, SchedStats) {
			out := make([][]harness.Completion, n)
			var st SchedStats
			err := withSched(t, s, o, func(s *Scheduler) {
				err := each(context.Background(), n, func(ctx context.Context, i int) (err error) {
					out[i], err = talk(ctx, s, i, groups[i], share, script[i])
					return err
				})
				if err != nil {
					rt.Fatal(err)
				}
				if st, err = s.Stats(context.Background()); err != nil {
					rt.Fatal(err)
				}
				if err := s.Exclusive(context.Background(), func() error { return nil }); err != nil {
					rt.Fatal(err)
				}
			})
			if err != nil {
				rt.Fatal(err)
			}
			if len(r.seqs) != 0 || len(r.free) != len(r.refs) {
				rt.Fatalf("%d sequences and %d of %d pages left", len(r.seqs), len(r.free), len(r.refs))
			}
			return out, st
		}
		o := SchedOptions{Stop: []int32{schedStop}, MaxContext: 200, ChunkRows: 16}
		roomy := newFakeRunner(64, 64*256, mixing(40))
		want, _ := run(roomy, roomy, o, 1)
		tight := o
		tight.StepRows = rapid.IntRange(16, 64).Draw(rt, "rows")
		slots, tokens := rapid.IntRange(2, 5).Draw(rt, "slots"), rapid.IntRange(208, 420).Draw(rt, "tokens")
		for _, ahead := range []bool{false, true} {
			r := newFakeRunner(slots, tokens, mixing(40))
			s := Sampler(r)
			if ahead {
				s = &aheadFake{fakeRunner: r}
			}
			got, st := run(s, r, tight, 3)
			preempted[ahead] += st.Preempted
			for i := range want {
				for j := range want[i] {
					if !slices.Equal(want[i][j].Tokens, got[i][j].Tokens) || !slices.Equal(want[i][j].LogProb, got[i][j].LogProb) || want[i][j].Finish != got[i][j].Finish {
						rt.Fatalf("ahead %t, session %d turn %d: %v %s, want %v %s", ahead, i, j, got[i][j].Tokens, got[i][j].Finish, want[i][j].Tokens, want[i][j].Finish)
					}
				}
			}
			if a, ok := s.(*aheadFake); ok {
				fromLast += a.fromLast
			}
		}
	})
	if preempted[false] == 0 || preempted[true] == 0 || fromLast == 0 {
		t.Errorf("no case forced a preemption (%v), or fed a token unseen (%d)", preempted, fromLast)
	}
}

// The pieces a context was fed in are part of what a runner computes; sharing,
// preemption and company must not change them.
func TestSchedulerPiecesDoNotDependOnResources(t *testing.T) {
	pieces := func(slots, tokens, share int) [][]int {
		var mu sync.Mutex
		seen := map[string][]int{}
		r := newFakeRunner(slots, tokens, nil)
		mix := mixing(40)
		r.pick = func(ids []int32, w model.Work) int32 {
			for _, s := range r.seqs {
				if len(s.ids) == len(ids) && &s.ids[0] == &ids[0] {
					mu.Lock()
					seen[fmt.Sprint(w.Key, w.Ctr)] = slices.Clone(s.pieces)
					mu.Unlock()
				}
			}
			return mix(ids, w)
		}
		err := withSched(t, r, SchedOptions{MaxContext: 150, ChunkRows: 16}, func(s *Scheduler) {
			err := each(context.Background(), 6, func(ctx context.Context, i int) error {
				_, err := talk(ctx, s, i, 0, share, []schedTurn{{50, 20, false}, {20, 9, false}})
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		var out [][]int
		for _, k := range slices.Sorted(func(yield func(string) bool) {
			for k := range seen {
				if !yield(k) {
					return
				}
			}
		}) {
			out = append(out, seen[k])
		}
		return out
	}
	want := pieces(32, 4096, 1)
	got := pieces(3, 320, 6)
	if len(want) == 0 || !slices.EqualFunc(want, got, slices.Equal[[]int]) {
		t.Errorf("pieces differ:\n%v\n%v", got, want)
	}
}

func TestSchedulerSharesPrompts(t *testing.T) {
	r := newFakeRunner(16, 4096, mixing(40))
	var st SchedStats
	err := withSched(t, r, SchedOptions{MaxContext: 512}, func(s *Scheduler) {
		err := each(context.Background(), 8, func(ctx context.Context, i int) error {
			_, err := talk(ctx, s, i, 0, 8, []schedTurn{{100, 1, false}})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if st, err = s.Stats(context.Background()); err != nil {
			t.Fatal(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if r.rows != 99+8 || st.SharedTokens != 8*99 || st.DecodeTokens != 8 {
		t.Errorf("%d rows computed, want 107; stats %+v", r.rows, st)
	}
	if len(r.seqs) != 0 {
		t.Errorf("%d sequences left; the prompt goes with its last fork", len(r.seqs))
	}
}

func TestSchedulerLimits(t *testing.T) {
	never := func([]int32, model.Work) int32 { return 1 }
	for _, c := range []struct {
		name                string
		tokens, prompt, max int
		want                int
		finish              harness.Finish
		pick                func([]int32, model.Work) int32
	}{
		{"max new", 4096, 10, 5, 5, harness.Length, never},
		{"context", 4096, 95, 50, 5, harness.Context, never},
		{"context full", 4096, 100, 50, 0, harness.Context, never},
		{"more than all pages", 64, 50, 50, 14, harness.Context, never},
		{"stop", 4096, 10, 50, 3, harness.Stop, func(_ []int32, w model.Work) int32 {
			if w.Ctr == 2 {
				return schedStop
			}
			return 1
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := withSched(t, newFakeRunner(4, c.tokens, c.pick), SchedOptions{Stop: []int32{schedStop}, MaxContext: 100}, func(s *Scheduler) {
				out, err := talk(context.Background(), s, 0, 0, 1, []schedTurn{{c.prompt, c.max, false}})
				if err != nil {
					t.Fatal(err)
				}
				if len(out[0].Tokens) != c.want || out[0].Finish != c.finish || len(out[0].LogProb) != c.want {
					t.Errorf("%d tokens, %s; want %d, %s", len(out[0].Tokens), out[0].Finish, c.want, c.finish)
				}
			})
			if err != nil {
				t.Fatal(err)
			}
		})
	}
}

// P18: the device is used alone only when nothing is open.
func TestExclusiveNeedsAnIdleRunner(t *testing.T) {
	err := withSched(t, newFakeRunner(4, 4096, mixing(40)), SchedOptions{MaxContext: 100}, func(s *Scheduler) {
		ctx := context.Background()
		ses := s.Open(KindAttempt, model.Sampling{}, 1)
		if _, err := ses.Generate(ctx, harness.Request{Append: []int32{1, 2}, MaxNew: 2}); err != nil {
			t.Fatal(err)
		}
		ran := false
		if err := s.Exclusive(ctx, func() error { ran = true; return nil }); !errors.Is(err, ErrBusy) || ran {
			t.Errorf("with an open sequence: %v, ran %v", err, ran)
		}
		ses.Close()
		ses.Close()
		if err := s.Exclusive(ctx, func() error { ran = true; return nil }); err != nil || !ran {
			t.Errorf("idle: %v, ran %v", err, ran)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestSchedulerEngineErrors(t *testing.T) {
	dead := errors.New("device lost")
	r := newFakeRunner(4, 4096, mixing(40))
	r.fail = func(n int) error {
		if n == 3 {
			return dead
		}
		return nil
	}
	err := withSched(t, r, SchedOptions{MaxContext: 100}, func(s *Scheduler) {
		_, err := talk(context.Background(), s, 0, 0, 1, []schedTurn{{5, 50, false}})
		if !errors.Is(err, dead) {
			t.Errorf("request: %v", err)
		}
		if _, err := talk(context.Background(), s, 1, 0, 1, []schedTurn{{5, 50, false}}); !errors.Is(err, dead) {
			t.Errorf("later request: %v", err)
		}
	})
	var e *EngineError
	if !errors.As(err, &e) {
		t.Errorf("run: %v", err)
	}
	nan := nanRunner{newFakeRunner(4, 4096, mixing(40))}
	if err := withSched(t, nan, SchedOptions{MaxContext: 100}, func(s *Scheduler) {
		if _, err := talk(context.Background(), s, 0, 0, 1, []schedTurn{{5, 50, false}}); !errors.As(err, &e) {
			t.Errorf("NaN: %v", err)
		}
	}); !errors.As(err, &e) {
		t.Errorf("run with NaN: %v", err)
	}
}

// nanRunner answers with log-probs that are not numbers.
type nanRunner struct{ *fakeRunner }

func (r nanRunner) Step(ctx context.Context, w []model.Work) ([]model.Sampled, error) {
	out, err := r.fakeRunner.Step(ctx, w)
	for i := range out {
		out[i].LogProb = float32(math.NaN())
	}
	return out, err
}

// Without work the scheduler sleeps; a cancelled request gives its pages back.
func TestSchedulerSleepsAndAborts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newFakeRunner(4, 4096, func([]int32, model.Work) int32 { return 1 })
		r.delay = time.Second
		err := withSched(t, r, SchedOptions{MaxContext: 4000}, func(s *Scheduler) {
			time.Sleep(time.Hour)
			synctest.Wait()
			if r.steps != 0 {
				t.Errorf("%d steps without a request", r.steps)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			c, err := s.Open(KindEval, model.Sampling{}, 1).Generate(ctx, harness.Request{Append: []int32{1}, MaxNew: 1000})
			if c.Finish != harness.Aborted || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("finish %s, error %v", c.Finish, err)
			}
			if err := s.Exclusive(t.Context(), func() error { return nil }); err != nil {
				t.Error(err)
			}
			st, err := s.Stats(t.Context())
			if err != nil || st.Idle < time.Hour || st.Busy < 10*time.Second || st.Busy > 13*time.Second {
				t.Errorf("stats %+v, %v", st, err)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
	})
}

func TestKeyOf(t *testing.T) {
	seen := map[model.Key]harness.RNGKey{}
	for _, k := range []harness.RNGKey{{}, {Seed: 1}, {Step: 1}, {Task: "a"}, {Phase: "a"}, {Harness: "a"}, {Attempt: 1}, {Turn: 1}, {Task: "a|1"}, {Task: "a", Phase: "1"}} {
		if old, ok := seen[KeyOf(k)]; ok {
			t.Errorf("%+v and %+v have one key", k, old)
		}
		seen[KeyOf(k)] = k
	}
	// Fixed values: the tokens of every stored run depend on them.
	if got, want := KeyOf(harness.RNGKey{Seed: 1, Task: "t", Phase: "base", Turn: 1}), (model.Key{Lo: 0xe169b73780ff161c, Hi: 0xc114fbb456ea8892}); got != want {
		t.Errorf("key %#x, %#x", got.Lo, got.Hi)
	}
}

func TestSchedulerLeaksNoGoroutine(t *testing.T) {
	defer goleak.VerifyNone(t)
	w := newWorld(t, rates(50), byRate)
	err := withEngine(t.Context(), w.cfg, w.deps, func(ctx context.Context, r *rollouts) error {
		_, err := (&collector{r: r, mode: "off", step: 1}).collect(ctx, w.env.train[:3])
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if n := w.env.closed; n != 24 {
		t.Errorf("%d of 24 attempts closed", n)
	}
}
