package router

import (
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// The golden example of method.md 6.5.
func golden() [][]string {
	return [][]string{{"a", "b", "c", "d"}, {"b", "a", "d", "c"}, {"b", "c", "a", "d"}}
}

func TestFuseGolden(t *testing.T) {
	rule := []string{"a", "b", "c", "d"}
	rrf, err := Fuse("rrf", golden(), rule, 60)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]float64{"a": 0.0483955, "b": 0.0489159, "c": 0.0476270, "d": 0.0471230}
	for _, r := range rrf {
		if math.Abs(r.Score-want[r.ID]) > 5e-8 {
			t.Errorf("rrf %s: %.7f, want %.7f", r.ID, r.Score, want[r.ID])
		}
	}
	if got := ids(rrf); !slices.Equal(got, []string{"b", "a", "c", "d"}) {
		t.Errorf("rrf order %v", got)
	}
	borda, err := Fuse("borda", golden(), rule, 0)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Ranked{{"b", 8}, {"a", 6}, {"c", 3}, {"d", 1}}, borda); diff != "" {
		t.Error(diff)
	}
	// S = 29, V = 3, n = 4: W = 12 * 29 / (9 * 60) = 0.6444.
	if w := KendallW(golden()); math.Abs(w-0.6444) > 5e-5 {
		t.Errorf("W = %v", w)
	}
}

func TestFuseTies(t *testing.T) {
	// x and y swap places, so scores and rank sums tie; rule order decides.
	votes := [][]string{{"x", "y"}, {"y", "x"}}
	for _, rule := range [][]string{{"x", "y"}, {"y", "x"}} {
		got, err := Fuse("rrf", votes, rule, 60)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(ids(got), rule) {
			t.Errorf("rule %v: %v", rule, got)
		}
	}
}

func TestFuseRefuses(t *testing.T) {
	rule := []string{"a", "b"}
	for name, c := range map[string]struct {
		method string
		votes  [][]string
		rule   []string
	}{
		"method":      {"mean", [][]string{{"a", "b"}}, rule},
		"unknown id":  {"rrf", [][]string{{"a", "z"}}, rule},
		"duplicate":   {"rrf", [][]string{{"a", "a"}}, rule},
		"short":       {"borda", [][]string{{"a"}}, rule},
		"rule repeat": {"rrf", [][]string{{"a", "b"}}, []string{"a", "a"}},
	} {
		if _, err := Fuse(c.method, c.votes, c.rule, 60); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestRepair(t *testing.T) {
	got := Repair([]string{"c", "zz", "a", "c", "a"}, []string{"a", "b", "c", "d"})
	want := Repaired{Order: []string{"c", "a", "b", "d"}, Unknown: 1, Duplicate: 2, Missing: 2}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestRepairIsAlwaysAPermutation(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rule := rapid.Permutation([]string{"a", "b", "c", "d", "e", "f"}).Draw(t, "rule")
		reply := rapid.SliceOf(rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f", "g", ""})).Draw(t, "reply")
		got := Repair(reply, rule)
		sorted := slices.Sorted(slices.Values(got.Order))
		if !slices.Equal(sorted, []string{"a", "b", "c", "d", "e", "f"}) {
			t.Fatalf("%v", got)
		}
		again := Repair(got.Order, rule)
		if !slices.Equal(again.Order, got.Order) || again.Missing+again.Unknown+again.Duplicate != 0 {
			t.Fatalf("repairing %v again gave %+v", got.Order, again)
		}
	})
}

func TestUnanimousVotesFuseToThemselves(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rule := []string{"a", "b", "c", "d", "e"}
		vote := rapid.Permutation(rule).Draw(t, "vote")
		n := rapid.IntRange(2, 5).Draw(t, "voters")
		votes := slices.Repeat([][]string{vote}, n)
		for _, m := range []string{"rrf", "borda"} {
			got, err := Fuse(m, votes, rule, 60)
			if err != nil || !slices.Equal(ids(got), vote) {
				t.Fatalf("%s: %v %v, want %v", m, got, err, vote)
			}
		}
		if w := KendallW(votes); math.Abs(w-1) > 1e-12 {
			t.Fatalf("W = %v", w)
		}
	})
}
