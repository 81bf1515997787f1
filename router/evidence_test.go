package router

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"harness-s/env"
)

func record(t *testing.T, e *Evidence, rows ...Row) {
	t.Helper()
	for _, r := range rows {
		if r.Split == "" {
			r.Split = env.Val
		}
		if err := e.Record(r); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRecordRefuses(t *testing.T) {
	e := NewEvidence("pool", "h0", false)
	for name, r := range map[string]Row{
		"train":      {Split: env.Train, TaskID: "t", HarnessID: "h"},
		"no split":   {TaskID: "t", HarnessID: "h"},
		"no task":    {Split: env.Val, HarnessID: "h"},
		"no harness": {Split: env.Val, TaskID: "t"},
		"too many":   {Split: env.Val, TaskID: "t", HarnessID: "h", Success: 2, Valid: 1},
		"negative":   {Split: env.Val, TaskID: "t", HarnessID: "h", Success: -1},
	} {
		if err := e.Record(r); err == nil || errors.Is(err, ErrTestOutcome) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := e.Record(Row{Split: env.Test, TaskID: "t", HarnessID: "h", Valid: 1}); !errors.Is(err, ErrTestOutcome) {
		t.Errorf("test row: %v", err)
	}
	if v := e.Publish(3); v.Version() != 0 || v.Tasks() != 0 {
		t.Errorf("refused rows made version %d with %d tasks", v.Version(), v.Tasks())
	}
	if err := NewEvidence("pool", "h0", true).Record(Row{Split: env.Train, TaskID: "t", HarnessID: "h"}); err != nil {
		t.Errorf("train row with the option: %v", err)
	}
}

func TestVersionsAreImmutable(t *testing.T) {
	e := NewEvidence("pool", "h0", false)
	record(t, e, Row{TaskID: "t1", TaskText: "x", HarnessID: "a", Success: 1, Valid: 2, Causes: map[string]int{"C": 1}})
	if s, n := e.View().Counts("t1", "a"); s != 0 || n != 0 || e.View().Version() != 0 {
		t.Fatal("a row is visible before it is published")
	}
	v1 := e.Publish(5)
	before, err := json.Marshal(v1)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Decay(0.5); err != nil {
		t.Fatal(err)
	}
	record(t, e, Row{TaskID: "t1", TaskText: "x", HarnessID: "a", Success: 1, Valid: 1, Causes: map[string]int{"C": 4}},
		Row{TaskID: "t0", TaskText: "y", HarnessID: "a", Success: 0, Valid: 1})
	v2 := e.Publish(9)
	after, err := json.Marshal(v1)
	if err != nil {
		t.Fatal(err)
	}
	if string(before) != string(after) {
		t.Error("an old version changed")
	}
	if s, n := v2.Counts("t1", "a"); s != 1.5 || n != 2 {
		t.Errorf("after decay and a new row: %v of %v, want 1.5 of 2", s, n)
	}
	if v2.Version() != 2 || v2.Step() != 9 || v2.Digest() == v1.Digest() {
		t.Errorf("version %d step %d", v2.Version(), v2.Step())
	}
	if e.Publish(10) != v2 {
		t.Error("publishing without changes made a new version")
	}
	record(t, e, Row{TaskID: "t1", TaskText: "x", HarnessID: "b", Valid: 1})
	e.Discard()
	if e.Publish(11) != v2 {
		t.Error("discarded rows were published")
	}
	if err := e.Decay(1.5); err == nil {
		t.Error("decay above 1 accepted")
	}
	if err := e.Record(Row{Split: env.Val, TaskID: "t1", TaskText: "other", HarnessID: "a"}); err == nil {
		t.Error("another text for a known task accepted")
	}
}

func TestEvidenceRoundTrip(t *testing.T) {
	e := NewEvidence("pool", "h0", true)
	record(t, e, Row{TaskID: "t1", TaskText: "x", Group: "g", HarnessID: "a", Success: 1, Valid: 3, Turns: 9, Tokens: 70, Causes: map[string]int{"C": 2}, PolicyVersion: 4})
	e.Publish(2)
	if err := e.Decay(0.3); err != nil {
		t.Fatal(err)
	}
	record(t, e, Row{TaskID: "t2", TaskText: "z", HarnessID: "a", Success: 1, Valid: 1})
	for _, dirty := range []bool{true, false} {
		if !dirty {
			e.Publish(3)
		}
		b, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		var f Evidence
		if err := json.Unmarshal(b, &f); err != nil {
			t.Fatal(err)
		}
		if f.View().Digest() != e.View().Digest() {
			t.Error("view digest changed")
		}
		record(t, &f, Row{TaskID: "t2", TaskText: "z", HarnessID: "b", Valid: 1})
		record(t, e, Row{TaskID: "t2", TaskText: "z", HarnessID: "b", Valid: 1})
		a, err := json.Marshal(e.Publish(7))
		if err != nil {
			t.Fatal(err)
		}
		c, err := json.Marshal(f.Publish(7))
		if err != nil {
			t.Fatal(err)
		}
		if string(a) != string(c) {
			t.Errorf("dirty %v: continuation differs\n%s\n%s", dirty, a, c)
		}
		v, err := ParseView(c)
		if err != nil || v.Digest() != e.View().Digest() {
			t.Errorf("stored view: %v", err)
		}
	}
}

func TestParseViewRefuses(t *testing.T) {
	for name, text := range map[string]string{
		"not json":     `{`,
		"schema":       `{"schema":9}`,
		"test split":   `{"schema":1,"tasks":[{"task":"a","split":"test","text":"","cells":[]}]}`,
		"order":        `{"schema":1,"tasks":[{"task":"b","split":"val"},{"task":"a","split":"val"}]}`,
		"cell order":   `{"schema":1,"tasks":[{"task":"b","split":"val","cells":[{"harness":"z"},{"harness":"a"}]}]}`,
		"counts":       `{"schema":1,"tasks":[{"task":"b","split":"val","cells":[{"harness":"z","success":2,"valid":1}]}]}`,
		"same task id": `{"schema":1,"tasks":[{"task":"a","split":"val"},{"task":"a","split":"val"}]}`,
	} {
		if _, err := ParseView([]byte(text)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestEvidenceOrderOfRowsDoesNotMatter(t *testing.T) {
	build := func(reverse, parallel bool) string {
		e := NewEvidence("p", "h0", false)
		var wg sync.WaitGroup
		for i := range 40 {
			if reverse {
				i = 39 - i
			}
			r := Row{TaskID: fmt.Sprint("t", i%7), TaskText: fmt.Sprint("text ", i%7), HarnessID: fmt.Sprint("h", i%5), Success: i % 2, Valid: 1, Split: env.Val}
			add := func() {
				defer wg.Done()
				if err := e.Record(r); err != nil {
					t.Error(err)
				}
			}
			if wg.Add(1); parallel {
				go add()
			} else {
				add()
			}
		}
		wg.Wait()
		return e.Publish(1).Digest()
	}
	if a, b, c := build(false, false), build(true, false), build(false, true); a != b || a != c {
		t.Error("the order of rows changed the version")
	}
}

func TestProfile(t *testing.T) {
	e := NewEvidence("p", "h0", false)
	record(t, e,
		Row{TaskID: "1", Group: "paged", HarnessID: "h0", Valid: 2, Turns: 4, Tokens: 20, Causes: map[string]int{"D-PAGE": 2}},
		Row{TaskID: "1", Group: "paged", HarnessID: "a", Success: 1, Valid: 2, Turns: 8, Tokens: 40, PolicyVersion: 3},
		Row{TaskID: "2", Group: "lookup", HarnessID: "h0", Success: 2, Valid: 2, Turns: 4, Tokens: 20},
		Row{TaskID: "2", Group: "lookup", HarnessID: "a", Valid: 2, Turns: 4, Tokens: 20, Causes: map[string]int{"D-FORM": 2}},
		Row{TaskID: "3", Group: "lookup", HarnessID: "h0", Valid: 0},
		Row{TaskID: "3", Group: "lookup", HarnessID: "a", Valid: 0},
	)
	v := e.Publish(1)
	p := v.Profiles([]Candidate{{ID: "a"}})[0]
	want := Profile{Harness: "a", Tasks: 2, Success: 0.25, GivenFail: 0.5, Fixes: 1, Breaks: 1, Alone: 1,
		HelpByCause: map[string]int{"D-PAGE": 1}, HarmByCause: map[string]int{"D-FORM": 1},
		HelpByGroup: map[string]int{"paged": 1}, HarmByGroup: map[string]int{"lookup": 1},
		Causes: map[string]float64{"D-FORM": 2}, TurnRatio: 1.5, TokenRatio: 1.5, Policy: 3, Version: 1}
	if diff := cmp.Diff(want, p); diff != "" {
		t.Error(diff)
	}
	s := p.Summary()
	if len(strings.Fields(s)) > 120 || !strings.Contains(s, "D-PAGE (1)") {
		t.Errorf("summary %q", s)
	}
	if got := v.Profiles([]Candidate{{ID: "unknown"}})[0].Summary(); got != "No validation outcomes yet." {
		t.Errorf("unknown harness: %q", got)
	}
}
