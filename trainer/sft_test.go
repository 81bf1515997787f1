package trainer

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"harness-s/env"
	"harness-s/env/harness"
	"harness-s/model"
)

// demoEnv is a fake environment with demonstrations. Tasks of family0 are easy.
type demoEnv struct{ *fakeEnv }

func newDemoWorld(t *testing.T) *world {
	w := newWorld(t, rates(0), byRate)
	for i := range w.env.train {
		x := &w.env.train[i]
		x.Tags = map[string]string{"causes": ""}
		if x.Group != "family0" {
			x.Tags["causes"] = causeName(0) + "," + causeName(1)
		}
	}
	w.deps.Env = demoEnv{w.env}
	w.cfg.SFT.Tasks, w.cfg.SFT.Batch, w.cfg.SFT.Steps = 200, 16, 5
	return w
}

func (d demoEnv) Demos(t env.TaskRef, style string) ([]env.Demo, error) {
	turns := map[string][]string{
		"good": {call("good " + t.ID)}, "sloppy": {call("bad " + t.ID)}, "recover": {call("look"), call("good " + t.ID)},
	}[style]
	if turns == nil {
		return nil, fmt.Errorf("style %q", style)
	}
	out := env.Demo{Good: style != "sloppy"}
	for _, x := range turns {
		out.Turns = append(out.Turns, env.DemoTurn{Text: x})
	}
	return []env.Demo{out}, nil
}

func TestPlanDemos(t *testing.T) {
	w := newDemoWorld(t)
	c := w.cfg.SFT
	c.Tasks, c.Recover = 6000, 0.25
	plan := planDemos(c, w.env.train, w.deps.Pool)
	count := map[string]float64{}
	for _, d := range plan {
		easy := d.task.Tags["causes"] == ""
		if easy && d.style != styleGood {
			t.Fatalf("easy task shown %s", d.style)
		}
		if !easy {
			count[d.kind]++
			count[d.kind+"/"+d.style]++
			count["hard"]++
		}
		if d.kind == "matched" && (!meets(d.spec.Causes, causesOf(d.task)) || d.spec.Original()) {
			t.Fatalf("%s is not matched to %v", d.spec.Name, causesOf(d.task))
		}
	}
	near := func(what string, got, want float64) {
		if got < want-0.04 || got > want+0.04 {
			t.Errorf("%s: %.3f, want about %.3f", what, got, want)
		}
	}
	near("original", count["original"]/count["hard"], c.Original)
	near("matched", count["matched"]/(count["matched"]+count["other"]), c.Matched)
	near("good under the original", count["original/good"]/count["original"], c.GoodOriginal)
	near("good or recover when matched", 1-count["matched/sloppy"]/count["matched"], c.GoodMatched)
	near("recover when matched", count["matched/recover"]/count["matched"], c.GoodMatched*c.Recover)
	near("good under others", count["other/good"]/count["other"], c.GoodUnmatched)
	again := planDemos(c, w.env.train, w.deps.Pool)
	for i := range plan {
		if plan[i].style != again[i].style || plan[i].spec != again[i].spec {
			t.Fatal("the plan is not a function of its arguments")
		}
	}
}

func TestRemindsOnly(t *testing.T) {
	op := func(slot, place string) harness.Op { return harness.Op{Slot: slot, Place: place} }
	for _, c := range []struct {
		ops  []harness.Op
		want bool
	}{
		{[]harness.Op{op("reminder", "after_obs")}, true},
		{[]harness.Op{op("guard", "")}, true},
		{[]harness.Op{op("system", ""), op("reminder", "after_obs")}, false},
		{[]harness.Op{op("reminder", "initial")}, false},
		{[]harness.Op{op("memory", "")}, false},
	} {
		if got := remindsOnly(&harness.Spec{Edits: []harness.Edit{{Ops: c.ops}}}); got != c.want {
			t.Errorf("%v: %v", c.ops, got)
		}
	}
}

func TestRunSFT(t *testing.T) {
	var first *SFTReport
	for range 2 {
		w := newDemoWorld(t)
		steps := 0
		rep, err := RunSFT(t.Context(), w.cfg, w.deps, SFTOptions{HeldOut: 20, Step: func(s SFTStep) {
			steps++
			if s.Tokens == 0 || s.Rows == 0 || s.Loss <= 0 {
				t.Errorf("step %+v", s)
			}
		}})
		if err != nil {
			t.Fatal(err)
		}
		rep.Seconds = 0
		if rep.Demos != 200 || rep.DemosFailed != 0 || steps != 5 || w.model.version != 5 || rep.HeldOut <= 0 || w.env.closed != 200 {
			t.Errorf("%+v, %d steps, %d closed", rep, steps, w.env.closed)
		}
		if first == nil {
			first = rep
		} else if digestJSON(t, rep) != digestJSON(t, first) {
			t.Errorf("second run %+v, first %+v", rep, first)
		}
	}
}

func TestRunSFTRefusals(t *testing.T) {
	w := newDemoWorld(t)
	w.cfg.SFT.Tasks = 30
	if _, err := RunSFT(t.Context(), w.cfg, w.deps, SFTOptions{HeldOut: 20}); err == nil || Hint(err) == "" {
		t.Errorf("too few demonstrations: %v", err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	closed := w.env.closed
	if _, err := RunSFT(t.Context(), w.cfg, w.deps, SFTOptions{Out: filepath.Join(file, "out")}); err == nil || Hint(err) == "" || w.env.closed != closed {
		t.Errorf("output below a file: %v, after %d demonstrations", err, w.env.closed-closed)
	}
	w.deps.Env = w.env
	if _, err := RunSFT(t.Context(), w.cfg, w.deps, SFTOptions{}); err == nil || !strings.Contains(err.Error(), "no demonstrations") {
		t.Errorf("no demonstrator: %v", err)
	}
	w.deps.Learner = nil
	if _, err := RunSFT(t.Context(), w.cfg, w.deps, SFTOptions{}); err == nil {
		t.Error("no executor accepted")
	}
}

func TestCorpusHoldsPromptsAndTurns(t *testing.T) {
	w := newDemoWorld(t)
	texts, err := corpus(t.Context(), w.cfg, w.deps.Env, w.deps.Pool, nil)
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(texts, "\n")
	for _, want := range []string{"You work.", "BOOST", "task train-1", call("good train-1"), specials()[0]} {
		if !strings.Contains(all, want) {
			t.Errorf("corpus lacks %q", want)
		}
	}
}

func TestTaskOrder(t *testing.T) {
	w := newWorld(t, rates(0), byRate)
	w.cfg.Task.Families = map[string]float64{"family1": 0, "family2": 50}
	o, err := newTaskOrder(t.Context(), w.env, w.cfg)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	early := 0
	for step := 1; step <= 4; step++ { // 8 tasks left, 4 per step: two epochs
		for _, x := range o.step(step, 4) {
			seen[x.ID]++
			if step == 1 && x.Group == "family2" {
				early++
			}
		}
	}
	if len(seen) != 8 || early < 3 {
		t.Errorf("tasks %v, %d of the heavy family first", seen, early)
	}
	for id, n := range seen {
		if n != 2 {
			t.Errorf("task %s %d times in two epochs", id, n)
		}
	}
	late, err := newTaskOrder(t.Context(), w.env, w.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := late.step(3, 4), o.step(3, 4); a[0].ID != b[0].ID || a[3].ID != b[3].ID {
		t.Error("the order depends on the steps asked for before")
	}
	w.cfg.Task.PerStep = 100
	w.cfg.Task.Families["none"] = 1
	if _, err := newTaskOrder(t.Context(), w.env, w.cfg); err == nil || !strings.Contains(err.Error(), "task.families.none") || !strings.Contains(err.Error(), "task.per_step") {
		t.Errorf("error %v", err)
	}
}

func TestSpreadCoversFamilies(t *testing.T) {
	w := newWorld(t, rates(0), byRate)
	got := spread(w.env.train, 3, 0)
	if got[0].Group == got[1].Group || got[1].Group == got[2].Group {
		t.Errorf("%v", got)
	}
	if next := spread(w.env.train, 3, 3); next[0].ID == got[0].ID {
		t.Errorf("no rotation: %v", next)
	}
	if n := len(spread(w.env.train, 0, 0)); n != 12 {
		t.Errorf("%d tasks", n)
	}
}

// Adapter and interfaces fit the real types.
var (
	_ Sampler = (*model.Runner)(nil)
	_ Learner = (*model.Exec)(nil)
	_ Tokens  = (*model.Tokenizer)(nil)
	_ Policy  = modelPolicy{}
)
