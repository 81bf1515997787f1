package model

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

const runnerFixture = "testdata/reference/edges"

func newTestRunner(t *testing.T, o RunnerOptions) *Runner {
	t.Helper()
	dev := execDevice(t, 0)
	m, err := Load(runnerFixture, dev, LoadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	r, err := NewRunner(m, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); m.Close() })
	return r
}

func ids(seed uint64, n, vocab int) []int32 {
	r := rand.New(rand.NewPCG(seed, 1))
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(r.IntN(vocab))
	}
	return out
}

// talk feeds the appends of a conversation one by one, sampling after each, and returns what was sampled.
func talk(t *testing.T, r *Runner, id SeqID, key Key, appends ...[]int32) []Sampled {
	t.Helper()
	var out []Sampled
	for i, a := range appends {
		got, err := r.Step(context.Background(), []Work{{Seq: id, Append: a, Sample: true, Sampling: Sampling{Temperature: 1}, Key: key, Ctr: uint64(i)}})
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, got[0])
	}
	return out
}

func acquire(t *testing.T, r *Runner) SeqID {
	t.Helper()
	id, err := r.Acquire()
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// TestRunnerIgnoresCompany: what a sequence samples, bit for bit, does not depend on the other sequences of the steps.
func TestRunnerIgnoresCompany(t *testing.T) {
	appends := [][]int32{ids(1, 37, 97), ids(2, 1, 97), ids(3, 1, 97), ids(4, 20, 97), ids(5, 1, 97)}
	alone := newTestRunner(t, RunnerOptions{MaxSeqs: 8, MaxTokens: 4096, MaxRows: 64})
	want := talk(t, alone, acquire(t, alone), Key{3, 4}, appends...)
	for _, company := range []int{1, 3, 7} {
		r := newTestRunner(t, RunnerOptions{MaxSeqs: 8, MaxTokens: 4096, MaxRows: 64})
		var others []SeqID
		for range company {
			others = append(others, acquire(t, r))
		}
		me := acquire(t, r)
		for i, a := range appends {
			var work []Work
			for j, o := range others {
				work = append(work, Work{Seq: o, Append: ids(uint64(10*i+j), 1+(i*7+j*13)%70, 97), Sample: j%2 == 0, Sampling: Sampling{Temperature: 0.5}})
			}
			at := i % (len(work) + 1)
			work = slices.Insert(work, at, Work{Seq: me, Append: a, Sample: true, Sampling: Sampling{Temperature: 1}, Key: Key{3, 4}, Ctr: uint64(i)})
			got, err := r.Step(context.Background(), work)
			if err != nil {
				t.Fatal(err)
			}
			if got[at] != want[i] {
				t.Errorf("%d others, step %d: %v, alone %v", company, i, got[at], want[i])
			}
		}
	}
}

// TestForkEqualsFresh: a fork at any length continues exactly as a sequence that was fed the same appends.
func TestForkEqualsFresh(t *testing.T) {
	for _, n := range []int{1, 2, 3, 15, 16, 17, 63, 64, 65} {
		r := newTestRunner(t, RunnerOptions{MaxSeqs: 12, MaxTokens: 4096})
		prefix, tail := ids(uint64(n), n, 97), [][]int32{ids(7, 1, 97), ids(8, 1, 97), ids(9, 18, 97), ids(10, 1, 97)}
		fresh := acquire(t, r)
		talk(t, r, fresh, Key{}, prefix)
		want := talk(t, r, fresh, Key{5, 6}, tail...)
		root := acquire(t, r)
		talk(t, r, root, Key{}, prefix)
		forks, err := r.ForkN(root, 8)
		if err != nil {
			t.Fatal(err)
		}
		for i, f := range []SeqID{forks[0], forks[7], root} {
			if r.Len(f) != n {
				t.Errorf("prefix %d: fork has length %d", n, r.Len(f))
			}
			if got := talk(t, r, f, Key{5, 6}, tail...); !slices.Equal(got, want) {
				t.Errorf("prefix %d, fork %d: %v, fresh %v", n, i, got, want)
			}
		}
	}
}

// TestLongAppendIsSplit: an append longer than MaxRows gives what its pieces would.
func TestLongAppendIsSplit(t *testing.T) {
	long := ids(11, 200, 97)
	r := newTestRunner(t, RunnerOptions{MaxSeqs: 2, MaxTokens: 1024, MaxRows: 64})
	whole := talk(t, r, acquire(t, r), Key{1, 2}, long)
	parts := talk(t, r, acquire(t, r), Key{1, 2}, long[:64], long[64:128], long[128:192], long[192:])
	if whole[0].LogProb == 0 || whole[0].Entropy != parts[3].Entropy {
		t.Errorf("whole %v, in pieces %v", whole[0], parts[3])
	}
}

func TestRunnerRefusals(t *testing.T) {
	r := newTestRunner(t, RunnerOptions{MaxSeqs: 2, MaxTokens: 64, PageSize: 16, MaxRows: 64})
	ctx := context.Background()
	a, b := acquire(t, r), acquire(t, r)
	if _, err := r.Acquire(); !errors.Is(err, ErrNoSlot) {
		t.Errorf("third sequence: %v", err)
	}
	if _, err := r.Fork(a); !errors.Is(err, ErrNoSlot) {
		t.Errorf("fork without a slot: %v", err)
	}
	free := r.FreePages()
	if _, err := r.Step(ctx, []Work{{Seq: a, Append: ids(1, 40, 97)}, {Seq: b, Append: ids(2, 40, 97)}}); !errors.Is(err, ErrNoPages) {
		t.Errorf("too many tokens: %v", err)
	}
	if r.FreePages() != free || r.Len(a) != 0 {
		t.Errorf("a refused step took %d pages and left length %d", free-r.FreePages(), r.Len(a))
	}
	for name, w := range map[string][]Work{
		"no tokens":      {{Seq: a}},
		"twice":          {{Seq: a, Append: []int32{1}}, {Seq: a, Append: []int32{1}}},
		"not live":       {{Seq: 9, Append: []int32{1}}},
		"bad token":      {{Seq: a, Append: []int32{97}}},
		"negative token": {{Seq: a, Append: []int32{-1}}},
		"temperature":    {{Seq: a, Append: []int32{1}, Sample: true, Sampling: Sampling{Temperature: -1}}},
		"top_p":          {{Seq: a, Append: []int32{1}, Sample: true, Sampling: Sampling{Temperature: 1, TopP: 2}}},
	} {
		if _, err := r.Step(ctx, w); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if err := r.Release(a); err != nil {
		t.Error(err)
	}
	if err := r.Release(a); err == nil {
		t.Error("a sequence was released twice")
	}
}

// TestCacheNeverLeaks plays random acquires, forks, appends and releases: every page is in exactly one place and a full release gives
// everything back.
func TestCacheNeverLeaks(t *testing.T) {
	r := newTestRunner(t, RunnerOptions{MaxSeqs: 6, MaxTokens: 40 * 4, PageSize: 4, MaxRows: 32})
	pages := r.FreePages()
	rapid.Check(t, func(rt *rapid.T) {
		if err := r.Reset(); err != nil {
			rt.Fatal(err)
		}
		var live []SeqID
		for range rapid.IntRange(1, 30).Draw(rt, "steps") {
			switch op := rapid.IntRange(0, 3).Draw(rt, "op"); {
			case op == 0:
				if id, err := r.Acquire(); err == nil {
					live = append(live, id)
				} else if len(live) < 6 {
					rt.Fatalf("acquire with %d live: %v", len(live), err)
				}
			case len(live) == 0:
			case op == 1:
				src := live[rapid.IntRange(0, len(live)-1).Draw(rt, "src")]
				if id, err := r.Fork(src); err == nil {
					live = append(live, id)
				}
			case op == 2:
				id := live[rapid.IntRange(0, len(live)-1).Draw(rt, "seq")]
				before := r.Len(id)
				n := rapid.IntRange(1, 9).Draw(rt, "tokens")
				_, err := r.Step(context.Background(), []Work{{Seq: id, Append: ids(uint64(n), n, 97)}})
				if err == nil && r.Len(id) != before+n || err != nil && (r.Len(id) != before || !errors.Is(err, ErrNoPages)) {
					rt.Fatalf("append of %d: length %d to %d, %v", n, before, r.Len(id), err)
				}
			default:
				i := rapid.IntRange(0, len(live)-1).Draw(rt, "gone")
				if err := r.Release(live[i]); err != nil {
					rt.Fatal(err)
				}
				live = slices.Delete(live, i, i+1)
			}
			held := map[int32]int32{}
			for _, id := range live {
				for _, p := range r.cache.seqs[id].pages {
					held[p]++
				}
			}
			for p, n := range held {
				if r.cache.refs[p] != n {
					rt.Fatalf("page %d is held %d times and counted %d", p, n, r.cache.refs[p])
				}
			}
			if r.FreePages()+len(held) != pages {
				rt.Fatalf("%d free and %d held of %d pages", r.FreePages(), len(held), pages)
			}
		}
	})
	if err := r.Reset(); err != nil || r.FreePages() != pages || r.FreeSeqs() != 6 {
		t.Errorf("after reset: %v, %d of %d pages, %d sequences free", err, r.FreePages(), pages, r.FreeSeqs())
	}
}
