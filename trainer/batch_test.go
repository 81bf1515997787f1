package trainer

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"harness-s/env/harness"
	"harness-s/model"
	"harness-s/model/chat"
)

// segmentOf makes a ledger segment from runs: positive lengths are context,
// negative ones policy; ids continue from first.
func segmentOf(ids []int32, runs ...int) harness.LedgerSegment {
	var s harness.LedgerSegment
	for _, n := range runs {
		k := chat.KindTool
		if n < 0 {
			k, n = chat.KindPolicy, -n
		}
		for range n {
			i := len(s.IDs)
			s.IDs, s.Kind, s.Turn = append(s.IDs, ids[i]), append(s.Kind, k), append(s.Turn, 1)
			lp := float32(0)
			if k == chat.KindPolicy {
				lp = float32(-i)
			}
			s.LogProb = append(s.LogProb, lp)
		}
	}
	return s
}

func iota32(from, n int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(from + i)
	}
	return out
}

// contextOf rebuilds what row r of a forest sees: the ids of its ancestors and of
// its own segment up to itself.
func contextOf(b *model.Batch, row int) []int32 {
	start := make([]int, len(b.Segments))
	at, seg := 0, 0
	for i, s := range b.Segments {
		start[i] = at
		at += int(s.Len)
		if row >= start[i] {
			seg = i
		}
	}
	out := slices.Clone(b.IDs[start[seg] : row+1])
	for p := int(b.Segments[seg].Parent); p >= 0; p = int(b.Segments[p].Parent) {
		out = append(slices.Clone(b.IDs[start[p]:start[p]+int(b.Segments[p].Len)]), out...)
	}
	return out
}

// Every target is predicted from exactly the ids that came before it, whatever is
// shared and however the batch is cut (X2, X3).
func TestPackKeepsContexts(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		type key struct{ traj, tok int }
		want := map[key][]int32{}
		var units [][]sequence
		counts := []int{}
		longest := 0
		shared := iota32(1000, 60)
		for traj := range rapid.IntRange(1, 10).Draw(rt, "trajectories") {
			var segs []harness.LedgerSegment
			for range rapid.IntRange(1, 2).Draw(rt, "segments") {
				ids := slices.Clone(shared[:rapid.IntRange(0, 60).Draw(rt, "shared")])
				// A small alphabet makes long runs common beyond the prompt too.
				for range rapid.IntRange(3, 60).Draw(rt, "own") {
					ids = append(ids, int32(rapid.IntRange(0, 1).Draw(rt, "id")))
				}
				cut := rapid.IntRange(1, len(ids)-1).Draw(rt, "prompt")
				mid := rapid.IntRange(cut+1, len(ids)).Draw(rt, "policy")
				segs = append(segs, segmentOf(ids, cut, -(mid-cut), len(ids)-mid))
				longest = max(longest, len(ids))
			}
			seqs, cols := sequencesOf(segs, traj)
			n := 0
			for i := range segs {
				for j, k := range segs[i].Kind {
					if k == chat.KindPolicy && j > 0 {
						want[key{traj, n}] = segs[i].IDs[:j+1]
						if cols.logProb[n] != segs[i].LogProb[j] {
							rt.Fatalf("log-prob of token %d", n)
						}
						n++
					}
				}
			}
			counts = append(counts, n)
			units = append(units, seqs)
		}
		maxRows := rapid.IntRange(2*longest, 6*longest).Draw(rt, "rows")
		bs, err := pack(units, packLimits{rows: maxRows, pairs: maxRows})
		if err != nil {
			rt.Fatal(err)
		}
		if err := checkPacked(bs, counts); err != nil {
			rt.Fatal(err)
		}
		seen := 0
		for _, b := range bs {
			if len(b.IDs) > maxRows {
				rt.Fatalf("%d rows, at most %d", len(b.IDs), maxRows)
			}
			at := int32(0)
			for i, s := range b.Segments {
				pos := int32(0)
				if s.Parent >= 0 {
					pos = b.Segments[s.Parent].Pos + b.Segments[s.Parent].Len
				}
				if s.Len < 1 || int(s.Parent) >= i || s.Pos != pos {
					rt.Fatalf("segment %d: %+v", i, s)
				}
				at += s.Len
			}
			for i, a := range b.at {
				w := want[key(a)]
				got := append(contextOf(&b.Batch, int(b.Rows[i])), b.Targets[i])
				if !slices.Equal(got, w) {
					rt.Fatalf("token %d of trajectory %d: context\n%v, want\n%v", a.tok, a.traj, got, w)
				}
				seen++
			}
		}
		if seen != len(want) {
			rt.Fatalf("%d of %d targets", seen, len(want))
		}
	})
}

// A group of 8 with one prompt costs the prompt once.
func TestPackSharesThePrompt(t *testing.T) {
	var units [][]sequence
	for i := range 8 {
		ids := append(iota32(0, 100), iota32(500+50*i, 20)...)
		seqs, _ := sequencesOf([]harness.LedgerSegment{segmentOf(ids, 100, -20)}, i)
		units = append(units, seqs)
	}
	bs, err := pack(units, packLimits{rows: 1000, pairs: 1000})
	if err != nil || len(bs) != 1 {
		t.Fatalf("%d microbatches, %v", len(bs), err)
	}
	if n := len(bs[0].IDs); n != 100+8*19 {
		t.Errorf("%d rows, want 252", n)
	}
	if n := len(bs[0].Segments); n != 9 {
		t.Errorf("%d segments", n)
	}
	// The last row of the prompt has one target per child.
	if bs[0].Rows[7] != 99 || bs[0].Rows[8] == 99 {
		t.Errorf("rows %v", bs[0].Rows[:10])
	}
}

// X3: eight different prompts of different lengths give eight separate roots.
func TestPackOfARescueGroup(t *testing.T) {
	var units [][]sequence
	for i := range 8 {
		ids := iota32(1000*(i+1), 40+7*i)
		seqs, _ := sequencesOf([]harness.LedgerSegment{segmentOf(ids, 20+7*i, -20)}, i)
		units = append(units, seqs)
	}
	bs, err := pack(units, packLimits{rows: 10000, pairs: 1000})
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range bs[0].Segments {
		if s.Parent != -1 || s.Pos != 0 || int(s.Len) != 39+7*i {
			t.Errorf("segment %d: %+v", i, s)
		}
	}
}

func TestPackEdges(t *testing.T) {
	same := append(iota32(0, 50), 7, 8, 9)
	for _, c := range []struct {
		name  string
		segs  [][]harness.LedgerSegment
		rows  int
		pairs int
	}{
		{"equal attempts", [][]harness.LedgerSegment{{segmentOf(same, 50, -3)}, {segmentOf(same, 50, -3)}}, 52, 6},
		{"one is the other's beginning", [][]harness.LedgerSegment{{segmentOf(same, 50, -3)}, {segmentOf(same, 50, -1)}}, 52, 4},
		{"the beginning first", [][]harness.LedgerSegment{{segmentOf(same, 50, -1)}, {segmentOf(same, 50, -3)}}, 52, 4},
		{"short common start is not shared", [][]harness.LedgerSegment{{segmentOf(append(iota32(0, 10), 50, 51, 52), 11, -2)}, {segmentOf(append(iota32(0, 10), 60, 61, 62), 11, -2)}}, 24, 4},
		{"nothing sampled", [][]harness.LedgerSegment{{segmentOf(same, 53)}}, 0, 0},
		{"policy first token has no predictor", [][]harness.LedgerSegment{{segmentOf(same, -3)}}, 2, 2},
		{"restart", [][]harness.LedgerSegment{{segmentOf(same, 50, -3), segmentOf(iota32(200, 30), 25, -5)}}, 52 + 29, 8},
	} {
		t.Run(c.name, func(t *testing.T) {
			var units [][]sequence
			var counts []int
			for i, s := range c.segs {
				seqs, cols := sequencesOf(s, i)
				units, counts = append(units, seqs), append(counts, len(cols.logProb))
			}
			bs, err := pack(units, packLimits{rows: 1000, pairs: 1000})
			if err != nil {
				t.Fatal(err)
			}
			rows, pairs := 0, 0
			for _, b := range bs {
				rows, pairs = rows+len(b.IDs), pairs+len(b.Rows)
			}
			if rows != c.rows || pairs != c.pairs {
				t.Errorf("%d rows, %d pairs; want %d, %d", rows, pairs, c.rows, c.pairs)
			}
			if err := checkPacked(bs, counts); err != nil {
				t.Error(err)
			}
		})
	}
	seqs, _ := sequencesOf([]harness.LedgerSegment{segmentOf(same, 50, -3)}, 0)
	if _, err := pack([][]sequence{seqs}, packLimits{rows: 51, pairs: 100}); err == nil || Hint(err) == "" {
		t.Errorf("too long a trajectory: %v", err)
	}
	if err := checkPacked([]*microbatch{{at: []target{{0, 0}}, Batch: model.Batch{Rows: []int32{0}}}}, []int{2}); err == nil {
		t.Error("a missing token is not noticed")
	}
}

// Cutting a batch into more microbatches changes no coefficient (method.md 3.7).
func TestMicrobatchSplitKeepsCoefficients(t *testing.T) {
	w := newWorld(t, rates(40), byRate)
	groups, err := collectOnce(t, w, "siblings", w.env.train[:6])
	if err != nil {
		t.Fatal(err)
	}
	coefs := func(rows int) (map[string]float32, int) {
		rec := &recorder{fakeModel: &fakeModel{w: 1}, coef: map[string]float32{}}
		d := *w.deps
		d.Learner, d.Policy, d.MaxRows, d.MaxTargets = rec, rec.fakeModel, rows, rows
		u := &updater{cfg: w.cfg, d: &d, gate: &GapGate{}}
		st, err := u.update(t.Context(), 1, groups)
		if err != nil {
			t.Fatal(err)
		}
		return rec.coef, st.Micro
	}
	one, n1 := coefs(100000)
	many, n2 := coefs(700)
	if n1 != 1 || n2 < 3 {
		t.Fatalf("%d and %d microbatches", n1, n2)
	}
	if d := cmp.Diff(one, many); d != "" {
		t.Error(d)
	}
}

// recorder sums coefficients by context and target.
type recorder struct {
	*fakeModel
	b    *model.Batch
	coef map[string]float32
}

func (r *recorder) Forward(b *model.Batch) (*model.Output, error) {
	r.b = b
	return r.fakeModel.Forward(b)
}

func (r *recorder) Backward(d, e []float32) error {
	for i, c := range d {
		k := fmt.Sprint(hashIDs(contextOf(r.b, int(r.b.Rows[i]))), r.b.Targets[i], c)
		r.coef[k] += 1
	}
	return r.fakeModel.Backward(d, e)
}
