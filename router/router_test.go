package router

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"harness-s/env"
	"harness-s/env/harness"
)

func pool(n int) []Candidate {
	cs := []Candidate{{ID: "h0", Name: "original", Original: true}}
	for i := range n {
		cs = append(cs, Candidate{ID: fmt.Sprintf("h%02d", i+1)})
	}
	return cs
}

func TestFromPool(t *testing.T) {
	p, err := harness.StarterPool("dbbench")
	if err != nil {
		t.Fatal(err)
	}
	cs := FromPool(p)
	if len(cs) != 20 || !cs[0].Original || cs[0].ID != p.Original().ID() {
		t.Fatalf("%d candidates, first %+v", len(cs), cs[0])
	}
	r := Router{PoolDigest: p.Digest(), Pool: cs}
	d, err := r.Select(context.Background(), Query{TaskID: "x", Purpose: Rescue}, NewEvidence(p.Digest(), cs[0].ID, false).View(), 8)
	if err != nil || slices.Contains(d.Chosen, cs[0].ID) {
		t.Errorf("%v %v", d.Chosen, err)
	}
	for _, id := range d.Chosen {
		if p.Get(id) == nil {
			t.Errorf("chose %s, which the pool does not have", id)
		}
	}
}

// TestRuleByHand recomputes method.md 6.3 on two tasks with exactly known
// similarities: task 1 has the query's words, task 2 shares no character 3-gram.
func TestRuleByHand(t *testing.T) {
	e := NewEvidence("p", "h0", false)
	record(t, e,
		Row{TaskID: "1", TaskText: "aaaa bbbb", HarnessID: "h0", Valid: 2},
		Row{TaskID: "1", TaskText: "aaaa bbbb", HarnessID: "a", Success: 2, Valid: 2},
		Row{TaskID: "1", TaskText: "aaaa bbbb", HarnessID: "b", Success: 0, Valid: 2},
		Row{TaskID: "2", TaskText: "xxxx yyyy", HarnessID: "h0", Valid: 2},
		Row{TaskID: "2", TaskText: "xxxx yyyy", HarnessID: "a", Success: 0, Valid: 2},
		Row{TaskID: "2", TaskText: "xxxx yyyy", HarnessID: "b", Success: 1, Valid: 2},
		Row{TaskID: "3", TaskText: "solved by the original", HarnessID: "h0", Success: 1, Valid: 2},
		Row{TaskID: "3", TaskText: "solved by the original", HarnessID: "b", Success: 2, Valid: 2},
	)
	v := e.Publish(1)
	cs := []Candidate{{ID: "a"}, {ID: "b"}}
	got, err := RuleRanker{}.Rank(context.Background(), Query{TaskID: "q", TaskText: "bbbb AAAA", Purpose: Rescue}, cs, v)
	if err != nil {
		t.Fatal(err)
	}
	// F = {1, 2}; pooled p = 3/8. Words of the query equal those of task 1; their
	// character grams differ only across the word border, so k is below 1; it is
	// taken from the index and the rest is arithmetic.
	k := v.index.nearest(Query{TaskID: "q", TaskText: "bbbb AAAA"}, 1)[0].k
	if k < 0.5 || k >= 1 {
		t.Fatalf("similarity %v", k)
	}
	p := 3.0 / 8
	ca, cb := (2+4*p)/(4+4), (1+4*p)/(4+4)
	la, lb := (k*2+4*ca)/(k*2+4), (4*cb)/(k*2+4)
	for _, r := range got {
		want := map[string]float64{"a": la * ca, "b": lb * cb}[r.ID]
		if math.Abs(r.Score-want) > 1e-15 {
			t.Errorf("%s: %v, want %v", r.ID, r.Score, want)
		}
	}
	if !slices.Equal(ids(got), []string{"a", "b"}) {
		t.Errorf("order %v", ids(got))
	}
	// Test-time routing looks at all tasks and h0 is a candidate: p = 6/16 and
	// C(b) = (3 + 4p)/(6 + 4); nothing is similar to zzzz, so L(b) = C(b).
	test, err := RuleRanker{}.Rank(context.Background(), Query{TaskID: "q", TaskText: "zzzz", Purpose: Test}, append(cs, Candidate{ID: "h0", Original: true}), v)
	if err != nil {
		t.Fatal(err)
	}
	p = 6.0 / 16
	cb = (3 + 4*p) / (6 + 4)
	for _, r := range test {
		if r.ID == "b" && math.Abs(r.Score-cb*cb) > 1e-15 {
			t.Errorf("test-time score of b %v, want %v", r.Score, cb*cb)
		}
	}
}

func TestRuleEdgeCases(t *testing.T) {
	ctx := context.Background()
	cs := pool(9)[1:]
	empty := NewEvidence("p", "h0", false).View()
	got, err := RuleRanker{}.Rank(ctx, Query{TaskID: "q", Purpose: Rescue}, cs, empty)
	if err != nil || got[0].ID != "h01" || got[8].ID != "h09" || got[0].Score != 0 {
		t.Errorf("without evidence: %v %v", got, err)
	}
	e := NewEvidence("p", "h0", false)
	record(t, e, Row{TaskID: "q", TaskText: "same task", HarnessID: "h03", Success: 3, Valid: 3},
		Row{TaskID: "q", TaskText: "same task", HarnessID: "h02", Valid: 3},
		Row{TaskID: "q", TaskText: "same task", HarnessID: "h0", Success: 1, Valid: 3})
	v := e.Publish(1)
	if n := v.index.nearest(Query{TaskID: "q", TaskText: "same task"}, 16); len(n) != 0 {
		t.Errorf("the task itself is its neighbour: %v", n)
	}
	if n := v.index.nearest(Query{TaskID: "r", TaskText: "same task"}, 16); len(n) != 1 || math.Abs(n[0].k-1) > 1e-12 {
		t.Errorf("equal text: %v", n)
	}
	got, err = RuleRanker{}.Rank(ctx, Query{TaskID: "r", TaskText: "same task", Purpose: Rescue}, cs, v)
	if err != nil || got[0].ID != "h03" {
		t.Errorf("F empty uses all tasks: %v %v", got, err)
	}
}

// evidence builds a view from keyed pseudo-outcomes.
func evidence(t interface{ Fatal(...any) }, tasks int) *View {
	e := NewEvidence("p", "h0", false)
	for i := range tasks {
		for j, c := range pool(19) {
			n := (i*31+j*17)%5 - 1
			if c.Original {
				n = 0
			}
			if err := e.Record(Row{Split: env.Val, TaskID: fmt.Sprintf("v%02d", i), TaskText: fmt.Sprintf("count rows of table %d where city is %d", i%5, i), Group: fmt.Sprint("g", i%3),
				HarnessID: c.ID, Success: max(n, 0), Valid: 3}); err != nil {
				t.Fatal(err)
			}
		}
	}
	return e.Publish(1)
}

func TestSelect(t *testing.T) {
	ctx, v := context.Background(), evidence(t, 12)
	r := Router{PoolDigest: "p", Pool: pool(19)}
	q := Query{Run: "r", TaskID: "train-1", TaskText: "count rows of table 2", Group: "g1", Purpose: Rescue, Step: 4, PolicyVersion: 9}
	d, err := r.Select(ctx, q, v, 8)
	if err != nil {
		t.Fatal(err)
	}
	if len(d.Chosen) != 8 || slices.Contains(d.Chosen, "h0") || len(d.Final) != 19 || d.Fallback || d.KendallW != 1 || d.BordaOverlap != 8 {
		t.Errorf("decision %+v", d)
	}
	used := map[string]bool{}
	for _, id := range d.Chosen {
		used[id] = true
	}
	if next, ok := d.Next(used); !ok || next != d.Final[8] {
		t.Errorf("substitute %q, want %q", next, d.Final[8])
	}
	for _, id := range d.Final {
		used[id] = true
	}
	if _, ok := d.Next(used); ok {
		t.Error("a substitute out of nothing")
	}
	q.Purpose = Test
	if d, err := r.Select(ctx, q, v, 1); err != nil || len(d.Final) != 20 || !slices.Contains(d.Final, "h0") {
		t.Errorf("test-time routing: %v %v", d.Final, err)
	}
	q.Purpose = "other"
	if _, err := r.Select(ctx, q, v, 1); err == nil {
		t.Error("unknown purpose accepted")
	}
	q.Purpose = Rescue
	if _, err := r.Select(ctx, q, v, 20); !errors.Is(err, ErrTooFew) {
		t.Errorf("20 of 19: %v", err)
	}
	r.PoolDigest = "other"
	if _, err := r.Select(ctx, q, v, 8); err == nil {
		t.Error("evidence of another pool accepted")
	}
}

// fixed is a voter with a canned answer.
type fixed Vote

func (f fixed) Vote(context.Context, Query, []Candidate, *View) Vote { return Vote(f) }

func reversed(cs []Candidate) []string {
	var out []string
	for _, c := range cs {
		out = append([]string{c.ID}, out...)
	}
	return out
}

func TestVotesQuorumAndFallback(t *testing.T) {
	ctx, v := context.Background(), evidence(t, 6)
	q := Query{TaskID: "x", TaskText: "count", Purpose: Rescue}
	all := reversed(pool(19)[1:])
	good := fixed{Voter: "m1", IDs: append([]string{"nonsense", all[0]}, all[:12]...), Status: VoteOK}
	short := fixed{Voter: "m2", IDs: all[:7], Status: VoteOK}
	late := fixed{Voter: "m3", Status: "timeout"}
	r := Router{PoolDigest: "p", Pool: pool(19), Voters: []Voter{good, short, late}}
	d, err := r.Select(ctx, q, v, 8)
	if err != nil {
		t.Fatal(err)
	}
	if !d.Fallback || !slices.Equal(d.Final, ids(d.Rule)) || d.Votes[1].Status != VoteShort || d.Votes[2].Status != "timeout" {
		t.Errorf("one valid vote of three: fallback %v, votes %+v", d.Fallback, d.Votes)
	}
	if d.Votes[0].Unknown != 1 || d.Votes[0].Duplicate != 1 || d.Votes[0].Missing != 7 {
		t.Errorf("repair counts %+v", d.Votes[0])
	}
	r.Voters = []Voter{good, good, late}
	d, err = r.Select(ctx, q, v, 8)
	if err != nil {
		t.Fatal(err)
	}
	if d.Fallback || d.KendallW < 0.999 || !slices.Equal(d.Chosen, all[:8]) {
		t.Errorf("two equal votes: fallback %v W %v chosen %v", d.Fallback, d.KendallW, d.Chosen)
	}
	if _, err := Replay(d, v); err != nil {
		t.Error(err)
	}
}

func TestReplayBitForBit(t *testing.T) {
	v := evidence(t, 10)
	stored, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	back, err := ParseView(stored)
	if err != nil {
		t.Fatal(err)
	}
	all := reversed(pool(19)[1:])
	rapid.Check(t, func(t *rapid.T) {
		r := Router{PoolDigest: "p", Pool: pool(19)}
		switch rapid.IntRange(0, 2).Draw(t, "base") {
		case 1:
			r.Base = RandomRanker{Seed: rapid.Uint64Max(1<<53).Draw(t, "seed")}
		case 2:
			r.Base = RuleRanker{A: rapid.Float64Range(0.1, 9).Draw(t, "a"), M: rapid.IntRange(1, 20).Draw(t, "m")}
		}
		for range rapid.IntRange(0, 3).Draw(t, "voters") {
			r.Voters = append(r.Voters, fixed{IDs: rapid.SliceOfN(rapid.SampledFrom(append(all, "zz")), 0, 30).Draw(t, "vote"), Status: VoteOK})
		}
		if rapid.Bool().Draw(t, "borda") {
			r.Fusion = "borda"
		}
		q := Query{TaskID: rapid.StringN(1, 5, 20).Draw(t, "task"), TaskText: rapid.String().Draw(t, "text"), Purpose: Rescue, Step: rapid.IntRange(0, 99).Draw(t, "step")}
		k := rapid.IntRange(1, 19).Draw(t, "k")
		d, err := r.Select(context.Background(), q, v, k)
		if err != nil {
			t.Fatal(err)
		}
		line, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		var logged Decision
		if err := json.Unmarshal(line, &logged); err != nil {
			t.Fatal(err)
		}
		got, err := Replay(logged, back)
		if err != nil || !slices.Equal(got, d.Chosen) {
			t.Fatalf("replay %v %v, want %v", got, err, d.Chosen)
		}
		if again, err := json.Marshal(logged); err != nil || string(again) != string(line) {
			t.Fatal("record does not round-trip", err)
		}
	})
}

func TestReplayFindsTampering(t *testing.T) {
	v := evidence(t, 10)
	r := Router{PoolDigest: "p", Pool: pool(19)}
	d, err := r.Select(context.Background(), Query{TaskID: "x", TaskText: "count", Purpose: Rescue}, v, 8)
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Decision){
		"choice":   func(d *Decision) { d.Chosen[0], d.Chosen[1] = d.Chosen[1], d.Chosen[0] },
		"score":    func(d *Decision) { d.Rule[3].Score = math.Nextafter(d.Rule[3].Score, 2) },
		"text":     func(d *Decision) { d.TaskText += " " },
		"evidence": func(d *Decision) { d.EvidenceDigest = "00" },
		"pool":     func(d *Decision) { d.PoolDigest = "q" },
		"ranking":  func(d *Decision) { d.Final[17], d.Final[18] = d.Final[18], d.Final[17] },
		"empty":    func(d *Decision) { d.Chosen = nil },
	} {
		bad := d
		bad.Chosen, bad.Rule, bad.Final = slices.Clone(d.Chosen), slices.Clone(d.Rule), slices.Clone(d.Final)
		change(&bad)
		if _, err := Replay(bad, v); !errors.Is(err, ErrReplay) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCompare(t *testing.T) {
	ctx, v := context.Background(), evidence(t, 10)
	r := Router{PoolDigest: "p", Pool: pool(19)}
	d, err := r.Select(ctx, Query{TaskID: "x", TaskText: "count", Purpose: Rescue}, v, 8)
	if err != nil {
		t.Fatal(err)
	}
	for i, id := range d.Chosen {
		d.Outcomes = append(d.Outcomes, Outcome{ID: id, Valid: i != 7, Success: i == 2})
	}
	unrun := d
	unrun.Outcomes = nil
	view := func(int) (*View, error) { return v, nil }
	got, err := Compare(ctx, []Decision{d, unrun}, view, "rule", 1)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Counterfactual{With: "rule", Decisions: 1, Skipped: 1, Coverage: 1, Known: 7, Successes: 1, Rescued: 1, Logged: 1}, got); diff != "" {
		t.Error(diff)
	}
	random, err := Compare(ctx, []Decision{d}, view, "random", 1)
	if err != nil || random.Coverage >= 1 || random.Coverage <= 0 {
		t.Errorf("random: %+v %v", random, err)
	}
	if c, err := Compare(ctx, []Decision{d}, view, "rrf", 1); err != nil || c.Skipped != 1 {
		t.Errorf("rrf without votes: %+v %v", c, err)
	}
	if _, err := Compare(ctx, []Decision{d}, view, "psychic", 1); err == nil {
		t.Error("unknown router accepted")
	}
	if rate := got.Rate(); rate != 1.0/7 {
		t.Errorf("rate %v", rate)
	}
}

func TestRandomIsKeyed(t *testing.T) {
	rank := func(seed uint64, step int, task string) []string {
		got, err := RandomRanker{Seed: seed}.Rank(context.Background(), Query{TaskID: task, Step: step}, pool(19), nil)
		if err != nil {
			t.Fatal(err)
		}
		return ids(got)
	}
	base := rank(1, 1, "a")
	if !slices.Equal(base, rank(1, 1, "a")) {
		t.Error("not repeatable")
	}
	for _, other := range [][]string{rank(2, 1, "a"), rank(1, 2, "a"), rank(1, 1, "b")} {
		if slices.Equal(base, other) {
			t.Error("a key part does not matter")
		}
	}
}
