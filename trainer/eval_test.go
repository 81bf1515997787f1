package trainer

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"harness-s/env"
	"harness-s/model/chat"
	"harness-s/router"
)

func evalOpts() EvalOptions {
	return EvalOptions{Split: env.Val, Mode: ModeOriginal, K: 3, Attempts: 3, Temperature: 1, Resamples: 100, Seed: 1}
}

func TestEvaluate(t *testing.T) {
	w := newWorld(t, func(x env.TaskRef) int {
		if x.Group == "family0" {
			return 0
		}
		return 100
	}, byRate)
	var calls int
	o := evalOpts()
	o.Progress = func(Progress) { calls++ }
	rep, err := Evaluate(t.Context(), w.cfg, w.deps, o)
	if err != nil {
		t.Fatal(err)
	}
	// 6 tasks in 3 families, one of them hopeless.
	if rep.Tasks != 6 || calls != 6 || rep.Pass1.Strict.Mean != 4.0/6 || rep.PassK.Strict.Mean != 4.0/6 || rep.Turns != 1 {
		t.Errorf("%+v", rep)
	}
	want := []GroupScore{{"family0", 2, 0, 0}, {"family1", 2, 1, 1}, {"family2", 2, 1, 1}}
	if !slices.Equal(rep.ByGroup, want) {
		t.Errorf("by group %v", rep.ByGroup)
	}
	if rep.brief().Results != nil || len(rep.Results) != 6 {
		t.Error("results")
	}
	o.Attempts = 2
	if _, err := Evaluate(t.Context(), w.cfg, w.deps, o); err == nil || !strings.Contains(err.Error(), "pass@3 of 2") {
		t.Errorf("too few attempts: %v", err)
	}
}

// A lost attempt is missing: a failure in the strict score, left out of the other.
func TestEvaluateMissing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, rates(100), byRate)
		lost := w.env.val[2].ID
		w.env.on = func(_ context.Context, x env.TaskRef, _ string) error {
			if x.ID == lost {
				return errGone
			}
			return nil
		}
		rep, err := Evaluate(context.Background(), w.cfg, w.deps, evalOpts())
		if err != nil {
			t.Fatal(err)
		}
		if rep.Pass1.Strict.Mean != 5.0/6 || rep.Pass1.Complete.Mean != 1 || rep.Pass1.Missing != 3 || rep.Pass1.Kept != 5 {
			t.Errorf("%+v", rep.Pass1)
		}
	})
}

type unsealLog struct {
	records []env.UnsealRecord
	err     error
}

func (u *unsealLog) RecordUnseal(r env.UnsealRecord) error {
	u.records = append(u.records, r)
	return u.err
}

func TestEvaluateTestSplitIsRecorded(t *testing.T) {
	w := newWorld(t, rates(100), byRate)
	o := evalOpts()
	o.Split, o.Reason = env.Test, "final"
	if _, err := Evaluate(t.Context(), w.cfg, w.deps, o); err == nil || w.env.opens["test-0"] > 0 {
		t.Errorf("without a recorder: %v", err)
	}
	full := errors.New("disk full")
	o.Recorder = &unsealLog{err: full}
	if _, err := Evaluate(t.Context(), w.cfg, w.deps, o); !errors.Is(err, full) || w.env.opens["test-0"] > 0 {
		t.Errorf("with a recorder that fails: %v", err)
	}
	log := &unsealLog{}
	o.Recorder = log
	rep, err := Evaluate(t.Context(), w.cfg, w.deps, o)
	if err != nil || len(log.records) != 1 || rep.Unseal != log.records[0].ID || rep.Unseal == "" || rep.Tasks != 4 {
		t.Errorf("%+v, %v", rep, err)
	}
}

func TestEvaluateRouted(t *testing.T) {
	w := newWorld(t, rates(0), bySide("bad", "good"))
	o := evalOpts()
	o.Mode = ModeRouted
	if _, err := Evaluate(t.Context(), w.cfg, w.deps, o); err == nil || Hint(err) == "" {
		t.Errorf("without evidence: %v", err)
	}
	ev := router.NewEvidence(w.deps.Pool.Digest(), w.deps.Pool.Original().ID(), false)
	for i, s := range w.deps.Pool.Specs {
		row := router.Row{Split: env.Val, TaskID: "val-0", TaskText: "task", HarnessID: s.ID(), Valid: 4}
		if i == 5 {
			row.Success = 4
		}
		if err := ev.Record(row); err != nil {
			t.Fatal(err)
		}
	}
	o.Evidence = ev.Publish(0)
	rep, err := Evaluate(t.Context(), w.cfg, w.deps, o)
	if err != nil || rep.PassK.Strict.Mean != 1 {
		t.Fatalf("%+v, %v", rep, err)
	}
	for _, r := range rep.Results {
		if r.Harness != w.deps.Pool.Specs[5].Name {
			t.Errorf("task %s under %s", r.Task, r.Harness)
		}
	}
}

func TestPlay(t *testing.T) {
	w := newWorld(t, rates(0), func(context string, _ uint64) string {
		if strings.Contains(context, "nothing new") {
			return call("good")
		}
		return call("look")
	})
	var live []PlaySpan
	rep, err := Play(t.Context(), w.cfg, w.deps, PlayOptions{Task: "val-1", Harness: "aux03", Temperature: 1, Span: func(s PlaySpan) { live = append(live, s) }})
	if err != nil {
		t.Fatal(err)
	}
	if !rep.Success || rep.Turns != 2 || rep.Harness != "aux03" || len(live) != 4 {
		t.Errorf("%+v, %d live spans", rep, len(live))
	}
	var all, policy strings.Builder
	for _, s := range rep.Spans {
		all.WriteString(s.Text)
		if s.Kind == chat.KindPolicy {
			policy.WriteString(s.Text)
		}
	}
	if policy.String() != call("look")+chat.IMEnd+call("good")+chat.IMEnd || !strings.Contains(all.String(), "nothing new") {
		t.Errorf("policy %q\nall %q", policy.String(), all.String())
	}
	for _, o := range []PlayOptions{{Task: "test-0"}, {Task: "val-0", Harness: "none"}} {
		if _, err := Play(t.Context(), w.cfg, w.deps, o); err == nil || Hint(err) == "" {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

func TestBenchStep(t *testing.T) {
	w := newWorld(t, rates(0), byRate)
	w.runner.pick = mixing(200)
	rep, err := BenchStep(t.Context(), w.cfg, w.deps, BenchStepOptions{Groups: 3, Attempts: 4, Prompt: 40, New: 10, Vocab: 200, Steps: 2})
	if err != nil {
		t.Fatal(err)
	}
	// Prompt once per group; the last token of an attempt needs no row. Attempts may
	// share sampled tokens too, never more rows than this.
	if rep.TrainRows > 3*(40+4*9) || rep.TrainRows < 3*40 || rep.RolloutsPerS <= 0 || rep.GapMax > 1e-6 || w.model.version != 3 {
		t.Errorf("%+v, version %d", rep, w.model.version)
	}
	// 3 steps of 3 groups: prompt once, then the last prompt token and 9 fed tokens per attempt.
	if want := 3 * 3 * (39 + 4*10); w.runner.rows != want {
		t.Errorf("%d rows sampled, want %d", w.runner.rows, want)
	}
	if _, err := BenchStep(t.Context(), w.cfg, w.deps, BenchStepOptions{}); err == nil {
		t.Error("empty options accepted")
	}
}
