package trainer

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"harness-s/env"
	"harness-s/env/harness"
)

// collectOnce runs one step's groups.
func collectOnce(t testing.TB, w *world, mode string, tasks []env.TaskRef) ([]*Group, error) {
	t.Helper()
	var groups []*Group
	err := withEngine(context.Background(), w.cfg, w.deps, func(ctx context.Context, r *rollouts) (err error) {
		c := &collector{r: r, mode: mode, step: 1, chooser: fixedChoice{w.deps.Pool}}
		groups, err = c.collect(ctx, tasks)
		return err
	})
	return groups, err
}

// fixedChoice ranks auxiliaries in pool order.
type fixedChoice struct{ pool *harness.Pool }

func (f fixedChoice) choose(context.Context, env.TaskRef, string, int) (*choice, error) {
	return &choice{order: f.pool.Auxiliaries()}, nil
}

// bySide answers one way under the original and another under siblings, which say
// BOOST.
func bySide(base, boosted string) func(string, uint64) string {
	return func(context string, u uint64) string {
		if strings.Contains(context, "BOOST") {
			return call(boosted)
		}
		return call(base)
	}
}

// The three arms on a task that fails as a whole (R1, R3, R5, R13, method 4.1).
func TestRescueArms(t *testing.T) {
	for _, c := range []struct {
		mode     string
		kind     GroupKind
		rescue   int
		distinct int
	}{{"off", AllFail, 0, 0}, {"retry", StillAllFail, 8, 1}, {"siblings", Rescued, 8, 8}} {
		t.Run(c.mode, func(t *testing.T) {
			w := newWorld(t, rates(0), bySide("bad", "good"))
			gs, err := collectOnce(t, w, c.mode, w.env.train[:1])
			if err != nil {
				t.Fatal(err)
			}
			g := gs[0]
			if g.Kind != c.kind || len(g.Base) != 8 || len(g.Rescue) != c.rescue {
				t.Fatalf("kind %s, %d base, %d rescue", g.Kind, len(g.Base), len(g.Rescue))
			}
			ids := map[string]bool{}
			for i := range g.Rescue {
				ids[g.Rescue[i].Spec.ID()] = true
				if g.Rescue[i].Traj.InitDigest != g.Base[0].Traj.InitDigest || g.Rescue[i].PolicyVersion != g.Base[0].PolicyVersion {
					t.Errorf("rescue attempt %d: state %s, version %d", i, g.Rescue[i].Traj.InitDigest, g.Rescue[i].PolicyVersion)
				}
			}
			if len(ids) != c.distinct || c.mode == "siblings" && ids[w.deps.Pool.Original().ID()] {
				t.Errorf("%d harnesses, want %d without the original", len(ids), c.distinct)
			}
			if c.rescue > 0 && &g.Members()[0] != &g.Rescue[0] {
				t.Error("the update does not see the replacement")
			}
			if got := w.env.opens["train-0"]; got != 8+c.rescue {
				t.Errorf("%d attempts opened", got)
			}
		})
	}
}

// R2, R12: one success keeps the group, and all attempts are still made.
func TestGroupWithASuccessIsKept(t *testing.T) {
	w := newWorld(t, rates(50), byRate)
	gs, err := collectOnce(t, w, "siblings", w.env.train)
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range gs {
		if g.Kind != Kept || len(g.Base) != 8 || g.Rescue != nil {
			t.Errorf("task %s: %s, %d, %d", g.Task.ID, g.Kind, len(g.Base), len(g.Rescue))
		}
	}
}

// byAttempt gives each attempt of a group its own answer: it counts distinct keys
// per context, in the order they are first seen, which tests keep deterministic by
// not looking at which attempt got which.
func byAttempt(answers ...string) func(string, uint64) string {
	var mu sync.Mutex
	seen := map[string]map[uint64]int{}
	return func(context string, u uint64) string {
		mu.Lock()
		defer mu.Unlock()
		if seen[context] == nil {
			seen[context] = map[uint64]int{}
		}
		i, ok := seen[context][u]
		if !ok {
			i = len(seen[context])
			seen[context][u] = i
		}
		return call(answers[min(i, len(answers)-1)])
	}
}

var errGone = &env.InfraError{Phase: "step", Retryable: true, Err: errors.New("connection lost")}

// P64, P65, R9-R11: void attempts are made again, never count as failures, never
// trigger a rescue; a group short of valid attempts trains only with contrast.
func TestOutcomeClasses(t *testing.T) {
	for _, c := range []struct {
		name    string
		answers []string // of the 8 attempts
		void    string   // answers that are infra, always
		kind    GroupKind
		valid   int
		drop    DropReason
	}{
		{"eight failures", []string{"bad"}, "", AllFail, 8, DropAllFail},
		{"seven failures and one lost", []string{"die", "bad"}, "die", Incomplete, 7, DropIncomplete},
		{"a success and two lost", []string{"die1", "die2", "good", "bad"}, "die", Kept, 6, DropNone},
		{"a success and three lost", []string{"die1", "die2", "die3", "good", "bad"}, "die", Kept, 5, DropIncomplete},
		{"all lost", []string{"die"}, "die", Incomplete, 0, DropIncomplete},
		{"no submission", []string{"look"}, "", AllFail, 8, DropAllFail},
		{"all solved", []string{"good"}, "", Kept, 8, DropAllPass},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, rates(0), byAttempt(c.answers...))
				w.env.on = func(_ context.Context, _ env.TaskRef, answer string) error {
					if c.void != "" && strings.HasPrefix(answer, c.void) {
						return errGone
					}
					return nil
				}
				gs, err := collectOnce(t, w, "off", w.env.train[:1])
				if err != nil {
					t.Fatal(err)
				}
				g := gs[0]
				valid := 0
				for i := range g.Base {
					a := &g.Base[i]
					if a.Outcome.Valid() {
						valid++
					} else if len(a.Voids) != 2 || a.Outcome != env.InfraVoid {
						t.Errorf("void attempt %d: %s after %d void runs, want 2", i, a.Outcome, len(a.Voids))
					}
				}
				if g.Kind != c.kind || valid != c.valid {
					t.Errorf("kind %s with %d valid, want %s with %d", g.Kind, valid, c.kind, c.valid)
				}
				if _, err := prepare(w.cfg, gs, packLimits{rows: 4096, pairs: 4096}); err != nil || g.Drop != c.drop {
					t.Errorf("drop %q, want %q (%v)", g.Drop, c.drop, err)
				}
			})
		})
	}
}

// P64: a group that lost attempts on the way equals the group that lost none.
func TestRerunsDoNotChangeAGroup(t *testing.T) {
	run := func(die bool) ([]*Group, int) {
		var groups []*Group
		lost := 0
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, rates(40), byRate)
			var mu sync.Mutex
			n := 0
			w.env.on = func(context.Context, env.TaskRef, string) error {
				mu.Lock()
				defer mu.Unlock()
				if n++; die && n%7 == 0 {
					lost++
					return errGone
				}
				return nil
			}
			var err error
			if groups, err = collectOnce(t, w, "siblings", w.env.train[:6]); err != nil {
				t.Fatal(err)
			}
		})
		return groups, lost
	}
	want, _ := run(false)
	got, lost := run(true)
	if lost == 0 {
		t.Fatal("nothing was lost")
	}
	for i := range want {
		if a, b := fingerprint(t, want[i]), fingerprint(t, got[i]); a != b {
			t.Errorf("group %d: %s, without losses %s", i, b, a)
		}
	}
}

// fingerprint is what a group means for the update.
func fingerprint(t testing.TB, g *Group) string {
	t.Helper()
	var parts []any
	for i := range g.Members() {
		a := &g.Members()[i]
		parts = append(parts, a.Spec.ID(), a.Outcome.String(), a.Traj.Segments)
	}
	return string(g.Kind) + "/" + digestJSON(t, parts)
}

// R22: delays of environments change nothing; every group gets its rescue.
func TestOrderOfCompletionDoesNotMatter(t *testing.T) {
	run := func(delay func(i int) time.Duration) []string {
		var out []string
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, rates(15), byRate)
			w.cfg.Rollout.Live = 20
			w.runner.delay = time.Millisecond
			var mu sync.Mutex
			n := 0
			w.env.on = func(ctx context.Context, _ env.TaskRef, _ string) error {
				mu.Lock()
				n++
				d := delay(n)
				mu.Unlock()
				return sleep(ctx, d)
			}
			gs, err := collectOnce(t, w, "siblings", w.env.train[:6])
			if err != nil {
				t.Fatal(err)
			}
			rescued := 0
			for _, g := range gs {
				out = append(out, fingerprint(t, g))
				if g.Rescue != nil {
					rescued++
				}
			}
			if rescued == 0 {
				t.Error("no group needed a rescue")
			}
		})
		return out
	}
	want := run(func(int) time.Duration { return 0 })
	for seed := range 4 {
		got := run(func(i int) time.Duration {
			return time.Duration(uniform(uint64(seed), "delay", i, "") * float64(2*time.Second))
		})
		for i := range want {
			if got[i] != want[i] {
				t.Errorf("seed %d, group %d differs", seed, i)
			}
		}
	}
}

// A rescue starts when its own group is classified, not when the step's last base
// attempt ends.
func TestRescueHasNoBarrier(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, rates(0), bySide("bad", "good"))
		slow := w.env.train[1].ID
		w.env.on = func(ctx context.Context, x env.TaskRef, answer string) error {
			if x.ID == slow && answer == "bad" {
				return sleep(ctx, 30*time.Second)
			}
			return nil
		}
		var mu sync.Mutex
		ended := map[string]time.Duration{}
		start := time.Now()
		err := withEngine(context.Background(), w.cfg, w.deps, func(ctx context.Context, r *rollouts) error {
			c := &collector{r: r, mode: "siblings", step: 1, chooser: fixedChoice{w.deps.Pool}, noted: func(o order, _ *Attempt) {
				mu.Lock()
				defer mu.Unlock()
				ended[o.task.ID+"/"+o.phase] = time.Since(start)
			}}
			_, err := c.collect(ctx, w.env.train[:2])
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if quick := ended[w.env.train[0].ID+"/rescue"]; quick >= 30*time.Second || ended[slow+"/base"] < 30*time.Second {
			t.Errorf("rescue of the quick group ended after %s, slow base after %s", quick, ended[slow+"/base"])
		}
	})
}

// Substitution (method.md 3.2): a harness that cannot run is replaced by the next
// of the ranking, twice per group at most, and never re-run.
func TestSubstitution(t *testing.T) {
	for _, c := range []struct {
		name    string
		broken  []string
		subs    int
		faults  int
		kind    GroupKind
		pattern string
	}{
		{"one", []string{"aux02"}, 1, 0, Rescued, "2:aux08"},
		{"two", []string{"aux02", "aux05"}, 2, 0, Rescued, "2:aux08 5:aux09"},
		{"the substitute too", []string{"aux02", "aux08"}, 2, 0, Rescued, "2:aux08 2:aux09"},
		{"three", []string{"aux01", "aux02", "aux03"}, 2, 1, Rescued, "1:aux08 2:aux09"},
		{"five", []string{"aux00", "aux01", "aux02", "aux03", "aux04"}, 2, 3, RescueIncomplete, "0:aux08 1:aux09"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, rates(0), bySide("bad", "good"))
			w.deps.Tokens = &faultyTokens{broken: c.broken}
			gs, err := collectOnce(t, w, "siblings", w.env.train[:1])
			if err != nil {
				t.Fatal(err)
			}
			g := gs[0]
			var got []string
			for _, s := range g.Substitutions {
				got = append(got, fmt.Sprintf("%d:%s", s.Index, w.deps.Pool.Get(s.To).Name))
			}
			faults := 0
			for i := range g.Rescue {
				if g.Rescue[i].Outcome == env.HarnessFault {
					faults++
				}
			}
			if g.Kind != c.kind || len(g.Substitutions) != c.subs || faults != c.faults || strings.Join(got, " ") != c.pattern {
				t.Errorf("kind %s, substitutions %v, %d faults", g.Kind, got, faults)
			}
		})
	}
}

// faultyTokens cannot encode the prompts of some harnesses.
type faultyTokens struct {
	byteTokens
	broken []string
}

func (f *faultyTokens) Encode(text string) []int32         { return f.check(text) }
func (f *faultyTokens) EncodeOrdinary(text string) []int32 { return f.check(text) }
func (f *faultyTokens) check(text string) []int32 {
	for _, b := range f.broken {
		var n int
		if _, err := fmt.Sscanf(b, "aux%d", &n); err == nil && strings.Contains(text+"\n", fmt.Sprintf("number %d\n", n)) {
			panic("cannot encode for " + b)
		}
	}
	return byteTokens{}.Encode(text)
}

// P68: an environment that leaks state between attempts ends the run.
func TestDifferentInitialStatesAreFatal(t *testing.T) {
	w := newWorld(t, rates(50), byRate)
	w.env.digest = func(_ env.TaskRef, open int) string { return fmt.Sprint("state", open/5) }
	_, err := collectOnce(t, w, "off", w.env.train[:1])
	if err == nil || !strings.Contains(err.Error(), "leaks state") {
		t.Errorf("error %v", err)
	}
}

func TestInvalidTaskIsIncomplete(t *testing.T) {
	w := newWorld(t, rates(0), byRate)
	w.env.openErr = func(env.TaskRef) error { return env.ErrUnknownTask }
	gs, err := collectOnce(t, w, "siblings", w.env.train[:1])
	if err != nil || gs[0].Kind != Incomplete || gs[0].Base[0].Outcome != env.TaskInvalid || len(gs[0].Base[0].Voids) != 0 {
		t.Errorf("%v, %+v", err, gs)
	}
}
