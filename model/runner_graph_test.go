package model

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"harness-s/kernels"
)

// chatter is one live sequence of play.
type chatter struct {
	id   SeqID
	key  Key
	ctr  uint64
	next []int32 // to feed; nil: the token that the last step sampled
}

// play makes random steps: sequences begin, fork, end and give their slots to others; each step feeds some of them, at positions of their own, most
// of them one token. It returns all that was sampled, and calls step for every step.
func play(t *testing.T, r *Runner, seed uint64, steps int, step func([]Work) []Sampled) (all []Sampled) {
	t.Helper()
	rng, vocab := rand.New(rand.NewPCG(seed, 2)), r.m.Config.VocabSize
	var live []*chatter
	for n := range steps {
		for len(live) == 0 || len(live) < r.opt.MaxSeqs && rng.IntN(3) > 0 {
			c := &chatter{key: Key{Lo: rng.Uint64(), Hi: seed}}
			if len(live) > 0 && rng.IntN(3) > 0 {
				src := live[rng.IntN(len(live))]
				c.id, c.ctr, c.next = must[SeqID](t)(r.Fork(src.id)), src.ctr, []int32{int32(rng.IntN(vocab))}
			} else {
				c.id, c.next = acquire(t, r), ids(rng.Uint64(), 1+rng.IntN(40), vocab)
			}
			live = append(live, c)
		}
		if len(live) > 1 && rng.IntN(6) == 0 {
			i := rng.IntN(len(live))
			check(t, r.Release(live[i].id))
			live = slices.Delete(live, i, i+1)
		}
		rng.Shuffle(len(live), func(i, j int) { live[i], live[j] = live[j], live[i] })
		fed := live[:1+n%len(live)]
		var work []Work
		for _, c := range fed {
			if c.next != nil && c.ctr > 0 && rng.IntN(8) == 0 { // a tool's answer
				c.next = ids(rng.Uint64(), 2+rng.IntN(20), vocab)
			}
			work = append(work, Work{Seq: c.id, Append: c.next, Sample: true, Sampling: Sampling{Temperature: 0.7, TopP: []float32{1, 0.9, 0}[n/3%3]}, Key: c.key, Ctr: c.ctr})
			c.ctr++
		}
		got := step(work)
		for i, c := range fed {
			c.next = []int32{got[i].Token}
		}
		all = append(all, got...)
	}
	return all
}

// graphRunners are runners on the emulator over the same weights, with graphs and without.
func graphRunners(t *testing.T, dev *kernels.Device, o LoadOptions, opt RunnerOptions) (with, without *Runner) {
	t.Helper()
	m := nearModel(t, dev, emuConfig(), o)
	for _, r := range []**Runner{&with, &without} {
		*r = must[*Runner](t)(NewRunner(m, opt))
		t.Cleanup((*r).Close)
	}
	without.graphs = nil
	return with, without
}

func stepper(t *testing.T, r *Runner) func([]Work) []Sampled {
	return func(w []Work) []Sampled { return must[[]Sampled](t)(r.Step(context.Background(), w)) }
}

// TestDecodeGraphs: replayed graphs give the bits of launches one by one, whatever their bucket, the company and the positions of rows, what
// the spare rows compute, and who had a slot before. Nothing is allocated after NewRunner.
func TestDecodeGraphs(t *testing.T) {
	eachStorage(t, func(t *testing.T, dev *kernels.Device, o LoadOptions) {
		with, without := graphRunners(t, dev, o, RunnerOptions{MaxSeqs: 9, MaxTokens: 2048, MaxContext: 500, MaxRows: 64})
		for i, typ := range with.m.Config.LayerTypes { // states of NaN in the spare slot
			if l := with.cache.layers[i]; typ == LinearAttention {
				n := recBytes(with.m.Config, with.dt)
				with.st.Fill(l.rec+kernels.Ptr(9*n), n, 0xff)
			}
		}
		allocated := dev.Ledger()
		want := play(t, without, 5, 60, stepper(t, without))
		got := play(t, with, 5, 60, stepper(t, with))
		if !slices.Equal(got, want) {
			t.Errorf("graphs change what is sampled:\n%v\nwant\n%v", got, want)
		}
		rows := map[bool][]int64{}
		for k := range with.graphs {
			rows[k.truncated] = append(rows[k.truncated], k.rows)
		}
		slices.Sort(rows[false])
		if want := []int64{1, 2, 4, 8, 9}; !slices.Equal(rows[false], want) || len(rows[true]) < 3 {
			t.Errorf("graphs of %v rows, with truncations %v; want %v", rows[false], rows[true], want)
		}
		if after := dev.Ledger(); !slices.Equal(after, allocated) {
			t.Errorf("memory before %+v\nand after %+v", allocated, after)
		}
		check(t, with.Reset())
		if n := with.FreePages(); n != with.opt.numPages() || with.FreeSeqs() != 9 {
			t.Errorf("%d pages and %d sequences free after a reset", n, with.FreeSeqs())
		}
	})
}

// TestDecodeSurvivesNaN: a row without a distribution fails its own step, by number of its work, and not the spare rows, nor what was submitted
// with its token before anyone saw it.
func TestDecodeSurvivesNaN(t *testing.T) {
	dev := emuDevice(t)
	cfg := emuConfig()
	cfg.TieEmbeddings = false // the head's weights are numbers
	m := nearModel(t, dev, cfg, LoadOptions{DType: kernels.BF16})
	r := must[*Runner](t)(NewRunner(m, RunnerOptions{MaxSeqs: 6, MaxTokens: 512, MaxRows: 64}))
	t.Cleanup(r.Close)
	var work []Work
	for range 3 {
		work = append(work, Work{Seq: acquire(t, r), Append: []int32{3}, Sample: true, Sampling: Sampling{Temperature: 1}})
	}
	step := stepper(t, r)
	step(work)
	step(work)
	m.Dev.NewStream().UploadReal(m.Params.Ptr(Weights, EmbedName)+kernels.Ptr(7*m.Config.Hidden*2), []float32{float32(math.NaN())}, kernels.BF16)
	work[1].Append = []int32{7}
	p := must[*Pending](t)(r.Submit(work))
	for i := range work {
		work[i].Append, work[i].FromLast = nil, true
	}
	q, err := r.Submit(work)
	check(t, err)
	if _, err := p.Wait(); !errors.Is(err, ErrNonFinite) || !strings.Contains(err.Error(), "sample work 1") {
		t.Errorf("got %v", err)
	}
	if _, err := q.Wait(); !errors.Is(err, ErrNonFinite) {
		t.Errorf("the step after: %v", err)
	}
}

// TestSubmit: steps that are submitted before the one before was waited for, with tokens that only the device has seen, sample what steps one
// by one do: decode alone, beside appends, after forks, and with some of the sequences left out.
func TestSubmit(t *testing.T) {
	run := func(t *testing.T, one, two *Runner) {
		const n, rounds = 5, 12
		start := func(r *Runner) (work []Work) {
			root := acquire(t, r)
			_ = must[[]Sampled](t)(r.Step(context.Background(), []Work{{Seq: root, Append: ids(4, 19, r.m.Config.VocabSize)}}))
			for i, id := range must[[]SeqID](t)(r.ForkN(root, n)) {
				work = append(work, Work{Seq: id, Append: []int32{int32(i)}, Sample: true, Sampling: Sampling{Temperature: 1}, Key: Key{Lo: uint64(i), Hi: 9}})
			}
			return work
		}
		// What round k feeds to sequence i: nothing, an append, or the last token.
		skips := func(k, i int) bool { return k > 0 && (k+i)%7 == 3 }
		appends := func(k, i int) bool { return k > 0 && (k*3+i)%11 == 5 }
		var want, got []Sampled
		work := start(one)
		for k := range rounds {
			var batch []Work
			for i := range work {
				if w := work[i]; !skips(k, i) {
					if appends(k, i) || skips(k-1, i) && k > 0 {
						w.Append = ids(uint64(31*k+i), 1+(k+i)%9, one.m.Config.VocabSize)
					}
					w.Ctr = uint64(k)
					batch = append(batch, w)
				}
			}
			res := must[[]Sampled](t)(one.Step(context.Background(), batch))
			want = append(want, res...)
			for j, w := range batch {
				work[slices.IndexFunc(work, func(x Work) bool { return x.Seq == w.Seq })].Append = []int32{res[j].Token}
			}
		}
		work = start(two)
		var before *Pending
		for k := range rounds {
			var batch []Work
			for i := range work {
				if w := work[i]; !skips(k, i) {
					if appends(k, i) || skips(k-1, i) && k > 0 {
						w.Append = ids(uint64(31*k+i), 1+(k+i)%9, two.m.Config.VocabSize)
					} else if k > 0 {
						w.Append, w.FromLast = nil, true
					}
					w.Ctr = uint64(k)
					batch = append(batch, w)
				}
			}
			p := must[*Pending](t)(two.Submit(batch))
			if before != nil {
				got = append(got, must[[]Sampled](t)(before.Wait())...)
			}
			before = p
		}
		got = append(got, must[[]Sampled](t)(before.Wait())...)
		if again := must[[]Sampled](t)(before.Wait()); !slices.Equal(again, got[len(got)-len(again):]) {
			t.Error("a second Wait gives other results")
		}
		if !slices.Equal(got, want) {
			t.Errorf("one behind:\n%v\nwant\n%v", got, want)
		}
	}
	o := RunnerOptions{MaxSeqs: 8, MaxTokens: 1024, MaxRows: 32}
	t.Run("cpu", func(t *testing.T) { run(t, newTestRunner(t, o), newTestRunner(t, o)) })
	eachStorage(t, func(t *testing.T, dev *kernels.Device, l LoadOptions) {
		with, without := graphRunners(t, dev, l, o)
		run(t, without, with)
		check(t, with.Reset())
		check(t, without.Reset())
		run(t, with, without)
	})
}

// TestSubmitFeedsUnsampled: a row that feeds the last token and samples nothing reads it before rows of the same step draw theirs.
func TestSubmitFeedsUnsampled(t *testing.T) {
	run := func(t *testing.T, r *Runner, fromLast bool) Sampled {
		ctx, work := context.Background(), []Work{}
		for i := range 3 {
			work = append(work, Work{Seq: acquire(t, r), Append: ids(uint64(i), 5, 97), Sample: true, Sampling: Sampling{Temperature: 1}, Key: Key{Lo: uint64(i)}})
		}
		first := must[[]Sampled](t)(r.Step(ctx, work))
		for i := range work {
			work[i].Append, work[i].FromLast, work[i].Sample, work[i].Ctr = nil, true, i != 1, 1
			if !fromLast {
				work[i].Append, work[i].FromLast = []int32{first[i].Token}, false
			}
		}
		next := must[[]Sampled](t)(r.Step(ctx, work))
		if next[0].Token == first[1].Token || next[1] != (Sampled{}) {
			t.Fatalf("tokens %v, then %v: the test needs others", first, next)
		}
		return must[[]Sampled](t)(r.Step(ctx, []Work{{Seq: work[1].Seq, Append: []int32{4}, Sample: true, Sampling: Sampling{Temperature: 1}}}))[0]
	}
	both := func(t *testing.T, r *Runner) {
		want := run(t, r, false)
		check(t, r.Reset())
		if got := run(t, r, true); got != want {
			t.Errorf("%v, with tokens that the host sends %v", got, want)
		}
	}
	o := RunnerOptions{MaxSeqs: 4, MaxTokens: 256, MaxRows: 32}
	t.Run("cpu", func(t *testing.T) { both(t, newTestRunner(t, o)) })
	eachStorage(t, func(t *testing.T, dev *kernels.Device, l LoadOptions) {
		r := must[*Runner](t)(NewRunner(nearModel(t, dev, emuConfig(), l), o))
		t.Cleanup(r.Close)
		both(t, r)
	})
}

func TestSubmitRefusals(t *testing.T) {
	r := newTestRunner(t, RunnerOptions{MaxSeqs: 3, MaxTokens: 256, MaxContext: 20, MaxRows: 64})
	a := acquire(t, r)
	one := Work{Seq: a, Append: []int32{1}, Sample: true}
	last := Work{Seq: a, FromLast: true, Sample: true}
	refuse := func(want string, w Work) {
		t.Helper()
		if _, err := r.Submit([]Work{w}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q", err, want)
		}
	}
	refuse("the step before sampled no token for sequence 0", last)
	p := must[*Pending](t)(r.Submit([]Work{one}))
	both := last
	both.Append = []int32{1}
	refuse("1 tokens to feed beside the last one", both)
	q := must[*Pending](t)(r.Submit([]Work{last}))
	const late = "nobody has waited for the step before the last"
	refuse(late, last)
	_ = must[[]Sampled](t)(q.Wait())
	refuse(late, last) // p's results are still to be read
	_ = must[[]Sampled](t)(p.Wait())
	_ = must[[]Sampled](t)(r.Step(context.Background(), []Work{{Seq: a, Append: []int32{1, 2}}}))
	refuse("sampled no token for sequence 0", last)
	_ = must[[]Sampled](t)(r.Step(context.Background(), []Work{one}))
	check(t, r.Release(a))
	if a = acquire(t, r); a != last.Seq {
		t.Fatal("another slot")
	}
	refuse("sampled no token for sequence 0", last)
	refuse("21 tokens in sequence 0, at most 20 fit", Work{Seq: a, Append: make([]int32, 21)})
	if _, err := r.DecodeLaunches(1); !errors.Is(err, kernels.ErrUnsupported) {
		t.Errorf("launches on the cpu: %v", err)
	}
}

// TestDecodeLaunches: a decode step of this model's three linear and one full layers is so many launches, of any number of rows.
func TestDecodeLaunches(t *testing.T) {
	r := must[*Runner](t)(NewRunner(nearModel(t, emuDevice(t), emuConfig(), LoadOptions{DType: kernels.BF16}), RunnerOptions{MaxSeqs: 9, MaxTokens: 512, MaxRows: 16}))
	t.Cleanup(r.Close)
	// Tokens, embedding; final norm, head with its draw (two).
	// Linear: norm, projections, conv, delta rule, gated norm, out. Full: norm, projections, prep, write, attention, gate, out.
	// Each with the three of its MLP: norm, gate and up with their product, down.
	const want = 2 + 3 + 3*(6+3) + 1*(7+3)
	for _, n := range []int{1, 2, 9} {
		if got := must[int](t)(r.DecodeLaunches(n)); got != want {
			t.Errorf("%d rows: %d launches, want %d", n, got, want)
		}
	}
	if len(r.graphs) != 3 {
		t.Errorf("%d graphs", len(r.graphs))
	}
}

func TestBucket(t *testing.T) {
	var got []int
	for n := 1; n <= 500; n++ {
		if b := bucket(n, 450); len(got) == 0 || b != got[len(got)-1] {
			got = append(got, b)
		}
		if b := bucket(n, 450); b < min(n, 450) {
			t.Fatalf("%d rows in a bucket of %d", n, b)
		}
	}
	want := []int{1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256, 320, 384, 448, 450}
	if !slices.Equal(got, want) {
		t.Errorf("buckets %v", got)
	}
}

// TestSamplerWorkspace: no pass needs more than NewRunner allocates.
func TestSamplerWorkspace(t *testing.T) {
	for _, on := range []struct {
		dev *kernels.Device
		dt  kernels.DType
	}{{execDevice(t, 2), kernels.F32}, {emuDevice(t), kernels.F32}, {emuDevice(t), kernels.BF16}} {
		dev, dt := on.dev, on.dt
		for seed := range uint64(40) {
			rng := rand.New(rand.NewPCG(seed, 3))
			o := RunnerOptions{MaxSeqs: 1 + rng.IntN(40), MaxTokens: 16 + rng.IntN(20000)}
			o.MaxRows = o.MaxSeqs + rng.IntN(700)
			o.setDefaults()
			most, err := samplerWorkspace(dev, emuConfig(), dt, o)
			check(t, err)
			for range 20 {
				x := &passIndex{maxPages: int64(o.stride())}
				var segs []Segment
				for range 1 + rng.IntN(o.MaxSeqs) {
					n := 1 + rng.IntN(max(1, (o.MaxRows-int(x.rows))/(1+rng.IntN(9))))
					if int(x.rows)+n > o.MaxRows {
						break
					}
					x.rows += int64(n)
					if n == 1 {
						x.decode++
					} else {
						segs = append(segs, Segment{Len: int32(n), Parent: -1})
					}
					x.sampled += int64(rng.IntN(2))
				}
				if segs != nil {
					f, err := kernels.NewForest(segs, nil)
					check(t, err)
					x.forest = argsOf(f)
				}
				if n := passWorkspace(dev, emuConfig(), dt, x, o.PageSize); n > most {
					t.Fatalf("%s, %+v: a pass of %d rows, %d segments needs %d bytes, %d are there", dev.Info().Name, o, x.rows, len(segs), n, most)
				}
			}
		}
	}
}
