// Package envtest is the executable form of the environment rules (envs.md 1.2):
// one conformance suite that every adapter passes, embedded or real. It is
// imported by tests only.
//
// The suite knows an environment through package env alone; what it cannot know,
// how a task is solved and how a back-end dies, the adapter's test hands in. It
// must never look at gold by itself.
//
// Start with Run and Options.
package envtest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"testing"

	"harness-s/env"
	"harness-s/model/chat"
)

// Options are what the suite needs from the adapter.
type Options struct {
	// Gold are the actions that solve a task, submission included.
	Gold func(ref env.TaskRef) []env.Action
	// Mark is an action that changes the state of an attempt, Look one whose
	// observation shows whether it changed, Submit one that ends the episode
	// without solving anything.
	Mark, Look, Submit func(ref env.TaskRef) env.Action
	// Kill destroys the back-end of a running attempt. It runs last: the
	// environment may be unusable afterwards.
	Kill func(t *testing.T, a env.Attempt)
	// Tasks bounds the number of tasks tried per check (default 8).
	Tasks int
	// Parallel is the number of attempts open at once (default 8).
	Parallel int
}

// suite carries the common state of the checks.
type suite struct {
	e        env.Env
	o        Options
	refs     []env.TaskRef
	unsealed env.Unsealed

	mu sync.Mutex
	n  int
}

// Run checks e against every rule. The environment must offer at least one task
// in train, val or test.
func Run(t *testing.T, e env.Env, o Options) {
	if o.Tasks == 0 {
		o.Tasks = 8
	}
	if o.Parallel == 0 {
		o.Parallel = 8
	}
	s := &suite{e: e, o: o}
	t.Run("sealed", s.sealed)
	s.collect(t)
	for _, c := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"info", s.info}, {"tasks", s.tasks}, {"health", s.health}, {"tools", s.tools}, {"gold", s.gold}, {"no-op", s.noOp}, {"fresh start", s.fresh},
		{"parallel", s.parallel}, {"malformed", s.malformed}, {"step limit", s.stepLimit}, {"done", s.afterDone}, {"grade twice", s.gradeTwice},
		{"close", s.closeCancelled}, {"cancelled step", s.cancelledStep}, {"backend death", s.death},
	} {
		if !t.Run(c.name, c.run) && t.Failed() && c.name == "tasks" {
			return
		}
	}
}

type recorder struct {
	fail error
	got  []env.UnsealRecord
}

func (r *recorder) RecordUnseal(u env.UnsealRecord) error {
	r.got = append(r.got, u)
	return r.fail
}

func (s *suite) sealed(t *testing.T) {
	ctx := t.Context()
	if _, err := s.e.Tasks(ctx, env.Test); !errors.Is(err, env.ErrSealed) {
		t.Errorf("Tasks(test) = %v, want ErrSealed", err)
	}
	if _, err := s.e.TestTasks(ctx, env.Unsealed{}); !errors.Is(err, env.ErrSealed) {
		t.Errorf("TestTasks(zero value) = %v, want ErrSealed", err)
	}
	if u, err := env.Unseal("conformance", &recorder{fail: errors.New("disk full")}); err == nil || u.ID() != "" {
		t.Errorf("Unseal with a failing recorder = %v, %v", u, err)
	}
	var rec recorder
	u, err := env.Unseal("conformance", &rec, s.e.Info())
	if err != nil {
		t.Fatal(err)
	}
	if len(rec.got) != 1 || rec.got[0].ID != u.ID() || len(rec.got[0].Envs) != 1 || rec.got[0].Envs[0].DataDigest != s.e.Info().DataDigest {
		t.Errorf("unseal record %+v does not name the data", rec.got)
	}
	tests, err := s.e.TestTasks(ctx, u)
	if err != nil {
		t.Fatal(err)
	}
	if len(tests) > 0 {
		if a, err := s.e.Open(ctx, tests[0], env.OpenOptions{AttemptID: "sealed"}); !errors.Is(err, env.ErrSealed) {
			t.Errorf("Open of a test task without permission = %v, %v", a, err)
		}
		leak := tests[0]
		leak.Split = env.Train // relabelling a leaked reference must not help
		if a, err := s.e.Open(ctx, leak, env.OpenOptions{AttemptID: "sealed"}); !errors.Is(err, env.ErrSealed) {
			t.Errorf("Open of a relabelled test task = %v, %v", a, err)
		}
	}
	other, err := env.Unseal("conformance", &recorder{}, env.Info{Name: "other", DataDigest: "x"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.e.TestTasks(ctx, other); !errors.Is(err, env.ErrSealed) {
		t.Errorf("TestTasks with another environment's permission = %v, want ErrSealed", err)
	}
	s.unsealed = u
}

func (s *suite) collect(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	for _, sp := range []env.Split{env.Train, env.Val} {
		refs, err := s.e.Tasks(ctx, sp)
		if err != nil {
			t.Fatal(err)
		}
		s.refs = append(s.refs, refs...)
	}
	tests, err := s.e.TestTasks(ctx, s.unsealed)
	if err != nil {
		t.Fatal(err)
	}
	s.refs = append(s.refs, tests...)
	if len(s.refs) == 0 {
		t.Fatal("no tasks")
	}
}

// some spreads the checked tasks over the whole list.
func (s *suite) some() []env.TaskRef {
	n := min(s.o.Tasks, len(s.refs))
	out := make([]env.TaskRef, n)
	for i := range out {
		out[i] = s.refs[i*len(s.refs)/n]
	}
	return out
}

func (s *suite) open(t *testing.T, ref env.TaskRef, o env.OpenOptions) env.Attempt {
	t.Helper()
	s.mu.Lock()
	s.n++
	o.AttemptID = fmt.Sprintf("conformance/%s/%d", t.Name(), s.n)
	s.mu.Unlock()
	o.Unsealed = s.unsealed
	a, err := s.e.Open(t.Context(), ref, o)
	if err != nil {
		t.Fatalf("open %s: %v", ref.ID, err)
	}
	t.Cleanup(func() {
		if err := a.Close(context.Background()); err != nil && !errors.Is(err, env.ErrInfra) {
			t.Errorf("close %s: %v", ref.ID, err)
		}
	})
	return a
}

func step(t *testing.T, a env.Attempt, act env.Action) env.Step {
	t.Helper()
	st, err := a.Step(t.Context(), act)
	if err != nil {
		t.Fatalf("step %s %s: %v", act.Tool, act.Args, err)
	}
	return st
}

func grade(t *testing.T, a env.Attempt) env.Verdict {
	t.Helper()
	v, err := a.Grade(t.Context())
	if err != nil {
		t.Fatalf("grade: %v", err)
	}
	if v.Audit["init_digest"] == nil || v.Audit["init_digest"] == "" {
		t.Error("no init_digest in the audit")
	}
	if v.Success != v.Outcome.Success() || !v.Outcome.Valid() {
		t.Errorf("success %v with outcome %v", v.Success, v.Outcome)
	}
	return v
}

func (s *suite) info(t *testing.T) {
	i := s.e.Info()
	if i.Name == "" || i.Label == "" || i.Backend == "" || i.DataDigest == "" {
		t.Errorf("incomplete info: %+v", i)
	}
	total := 0
	for _, n := range i.Counts {
		total += n
	}
	if total != len(s.refs) {
		t.Errorf("counts %v, listed %d tasks", i.Counts, len(s.refs))
	}
}

func (s *suite) tasks(t *testing.T) {
	seen := map[string]env.Split{}
	for _, r := range s.refs {
		if r.ID == "" || r.Env == "" || r.Group == "" {
			t.Errorf("incomplete reference %+v", r)
		}
		if sp, dup := seen[r.ID]; dup {
			t.Errorf("task %s in %s and %s", r.ID, sp, r.Split)
		}
		seen[r.ID] = r.Split
	}
	if _, err := s.e.Open(t.Context(), env.TaskRef{ID: "no such task"}, env.OpenOptions{AttemptID: "x"}); !errors.Is(err, env.ErrUnknownTask) {
		t.Errorf("open of an unknown task = %v", err)
	}
}

func (s *suite) health(t *testing.T) {
	if err := s.e.Health(t.Context()); err != nil {
		t.Error(err)
	}
}

func (s *suite) tools(t *testing.T) {
	a := s.open(t, s.refs[0], env.OpenOptions{})
	if a.Initial().Text == "" {
		t.Error("no task text")
	}
	for _, tool := range a.Tools() {
		var obj map[string]any
		if err := json.Unmarshal(tool.Chat().JSON, &obj); err != nil || obj["type"] != "function" {
			t.Errorf("tool %s renders as %s (%v)", tool.Name, tool.Chat().JSON, err)
		}
	}
	call := chat.Call{Name: "t", Args: []chat.Arg{{Key: "b", Value: json.RawMessage(`"1"`)}, {Key: "a", Value: nil}}}
	if got := string(env.CallAction(call, "").Args); got != `{"b":"1","a":null}` {
		t.Errorf("arguments of a call: %s", got)
	}
}

func (s *suite) solve(t *testing.T, a env.Attempt, ref env.TaskRef) {
	t.Helper()
	for _, act := range s.o.Gold(ref) {
		st := step(t, a, act)
		if st.Kind != env.KindOK {
			t.Errorf("%s: gold action %s: %v %s", ref.ID, act.Args, st.Kind, st.Obs)
		}
	}
}

func (s *suite) gold(t *testing.T) {
	for _, ref := range s.some() {
		a := s.open(t, ref, env.OpenOptions{})
		s.solve(t, a, ref)
		if v := grade(t, a); !v.Success || v.Score != 1 {
			t.Errorf("%s: gold is graded %v", ref.ID, v.Outcome)
		}
	}
}

func (s *suite) noOp(t *testing.T) {
	for _, ref := range s.some() {
		a := s.open(t, ref, env.OpenOptions{})
		if v := grade(t, a); v.Success || v.Outcome != env.NoSubmission {
			t.Errorf("%s: doing nothing is graded %v", ref.ID, v.Outcome)
		}
		b := s.open(t, ref, env.OpenOptions{})
		if st := step(t, b, s.o.Submit(ref)); !st.Done {
			t.Errorf("%s: submission does not end the episode", ref.ID)
		}
		if v := grade(t, b); v.Success || v.Outcome != env.Failed {
			t.Errorf("%s: an empty submission is graded %v", ref.ID, v.Outcome)
		}
	}
}

func (s *suite) fresh(t *testing.T) {
	ref := s.refs[0]
	a := s.open(t, ref, env.OpenOptions{})
	before := step(t, a, s.o.Look(ref)).Obs
	if st := step(t, a, s.o.Mark(ref)); st.Kind != env.KindOK {
		t.Fatalf("mark: %s", st.Obs)
	}
	marked := step(t, a, s.o.Look(ref)).Obs
	if marked == before {
		t.Fatalf("the mark cannot be seen: %s", marked)
	}
	b := s.open(t, ref, env.OpenOptions{})
	if got := step(t, b, s.o.Look(ref)).Obs; got != before {
		t.Errorf("second attempt starts with %s, want %s", got, before)
	}
	da, db := grade(t, a).Audit["init_digest"], grade(t, b).Audit["init_digest"]
	if da != db {
		t.Errorf("initial digests differ: %v, %v", da, db)
	}
	if !reflect.DeepEqual(a.Initial(), b.Initial()) {
		t.Error("initial observations differ")
	}
}

// parallel opens many attempts at one task and runs them side by side: half
// solve it, half leave a mark and submit nothing useful.
func (s *suite) parallel(t *testing.T) {
	ref := s.refs[len(s.refs)/2]
	var wg sync.WaitGroup
	attempts := make([]env.Attempt, s.o.Parallel)
	for i := range attempts {
		attempts[i] = s.open(t, ref, env.OpenOptions{})
	}
	errs := make([]error, len(attempts))
	for i, a := range attempts {
		wg.Go(func() { errs[i] = s.half(a, ref, i%2 == 0) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}

func (s *suite) half(a env.Attempt, ref env.TaskRef, solve bool) error {
	ctx := context.Background()
	acts := []env.Action{s.o.Mark(ref), s.o.Submit(ref)}
	if solve {
		acts = s.o.Gold(ref)
	}
	for _, act := range acts {
		if _, err := a.Step(ctx, act); err != nil {
			return err
		}
	}
	v, err := a.Grade(ctx)
	if err == nil && v.Success != solve {
		err = fmt.Errorf("parallel attempt: success %v, want %v", v.Success, solve)
	}
	return err
}

// malformed actions are observations.
func (s *suite) malformed(t *testing.T) {
	ref := s.refs[0]
	deep := strings.Repeat("[", 2000) + strings.Repeat("]", 2000)
	a := s.open(t, ref, env.OpenOptions{MaxSteps: 200})
	tools := []string{"", "no_such_tool", "\x00", strings.Repeat("x", 1<<16)}
	for _, tool := range a.Tools() {
		tools = append(tools, tool.Name)
	}
	args := []string{"", "null", "[]", "{}", "3", `"x"`, `{"a":`, `{"a":{}}`, `{"a":1}{"b":2}`, "\x00\xff", `{"a":` + deep + `}`, deep}
	for _, tool := range tools {
		for _, arg := range args {
			if known(a, tool) && (arg == `{"a":{}}` || arg == `{"a":`+deep+`}`) {
				continue // well formed, and so a tool may accept it
			}
			st := step(t, a, env.Action{Tool: tool, Args: json.RawMessage(arg), Raw: arg})
			if st.Kind != env.KindFormatError || st.Done || st.Obs == "" {
				t.Fatalf("tool %.20q arguments %.40q: kind %v, done %v, observation %q", tool, arg, st.Kind, st.Done, st.Obs)
			}
		}
	}
	if v := grade(t, a); v.Outcome != env.NoSubmission {
		t.Errorf("malformed actions are graded %v", v.Outcome)
	}
}

func known(a env.Attempt, name string) bool {
	for _, tool := range a.Tools() {
		if tool.Name == name {
			return true
		}
	}
	return false
}

func (s *suite) stepLimit(t *testing.T) {
	ref := s.refs[0]
	a := s.open(t, ref, env.OpenOptions{MaxSteps: 2})
	step(t, a, s.o.Look(ref))
	step(t, a, env.Action{Tool: "no_such_tool"})
	if st := step(t, a, s.o.Submit(ref)); st.Kind != env.KindLimit || !st.Done {
		t.Errorf("step beyond the limit: %v, done %v", st.Kind, st.Done)
	}
	if v := grade(t, a); v.Outcome != env.StepLimit {
		t.Errorf("outcome %v, want step_limit", v.Outcome)
	}
}

func (s *suite) afterDone(t *testing.T) {
	ref := s.refs[0]
	a := s.open(t, ref, env.OpenOptions{})
	s.solve(t, a, ref)
	if _, err := a.Step(t.Context(), s.o.Mark(ref)); !errors.Is(err, env.ErrDone) {
		t.Errorf("step after done = %v, want ErrDone", err)
	}
	if v := grade(t, a); !v.Success {
		t.Error("a refused step changed the verdict")
	}
	if _, err := a.Step(t.Context(), s.o.Mark(ref)); !errors.Is(err, env.ErrDone) {
		t.Errorf("step after grading = %v, want ErrDone", err)
	}
}

func (s *suite) gradeTwice(t *testing.T) {
	for _, ref := range s.some()[:1] {
		a := s.open(t, ref, env.OpenOptions{})
		s.solve(t, a, ref)
		if v, w := grade(t, a), grade(t, a); !reflect.DeepEqual(v, w) {
			t.Errorf("verdicts differ: %+v, %+v", v, w)
		}
	}
}

func (s *suite) closeCancelled(t *testing.T) {
	a := s.open(t, s.refs[0], env.OpenOptions{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.Close(ctx); err != nil {
		t.Errorf("close after cancellation: %v", err)
	}
	if err := a.Close(ctx); err != nil {
		t.Errorf("second close: %v", err)
	}
	if _, err := a.Step(t.Context(), s.o.Look(s.refs[0])); !errors.Is(err, env.ErrDone) {
		t.Errorf("step after close = %v, want ErrDone", err)
	}
}

// cancelledStep: a cancelled run is no failure of the policy.
func (s *suite) cancelledStep(t *testing.T) {
	ref := s.refs[0]
	a := s.open(t, ref, env.OpenOptions{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := a.Step(ctx, s.o.Look(ref))
	if err == nil {
		return // fast enough to finish
	}
	if !errors.Is(err, env.ErrInfra) {
		t.Errorf("step under a cancelled context = %v", err)
	}
	if v, _ := a.Grade(t.Context()); v.Outcome != env.InfraVoid {
		t.Errorf("outcome %v, want infra_void", v.Outcome)
	}
}

func (s *suite) death(t *testing.T) {
	if s.o.Kill == nil {
		t.Skip("the adapter's test gives no way to kill its back-end (Options.Kill)")
	}
	ref := s.refs[0]
	idle, submitted := s.open(t, ref, env.OpenOptions{}), s.open(t, ref, env.OpenOptions{})
	step(t, idle, s.o.Look(ref))
	s.o.Kill(t, idle)
	_, err := idle.Step(t.Context(), s.o.Look(ref))
	var infra *env.InfraError
	if !errors.As(err, &infra) || !errors.Is(err, env.ErrInfra) || infra.Phase == "" {
		t.Errorf("step on a dead back-end = %v, want an InfraError", err)
	}
	for range 2 {
		v, err := idle.Grade(t.Context())
		if v.Outcome != env.InfraVoid || v.Success || !errors.Is(err, env.ErrInfra) {
			t.Errorf("grade on a dead back-end = %v, %v", v.Outcome, err)
		}
	}
	if v := env.InfraVoid; v.Valid() || v.Class() != env.ClassInfra {
		t.Error("infra_void counts as valid")
	}
	if err := submitted.Close(t.Context()); err != nil && !errors.Is(err, env.ErrInfra) {
		t.Errorf("close: %v", err)
	}
}
