package trainer

import (
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func members(valid, wins int) []Member {
	ms := make([]Member, valid)
	for i := range ms {
		ms[i] = Member{Valid: true, Success: i < wins}
		if ms[i].Success {
			ms[i].Reward = 1
		}
	}
	return ms
}

func void(n int) []Member { return make([]Member, n) }

func TestClassify(t *testing.T) {
	for _, c := range []struct {
		name string
		ms   []Member
		want GroupKind
		drop DropReason
	}{
		{"mixed", members(8, 3), Kept, DropNone},
		{"all pass", members(8, 8), Kept, DropAllPass},
		{"all fail", members(8, 0), AllFail, DropAllFail},
		{"seven failures and an infra fault", append(members(7, 0), void(1)...), Incomplete, DropAllFail},
		{"one success, seven void", append(members(1, 1), void(7)...), Kept, DropIncomplete},
		{"six valid with contrast", append(members(6, 1), void(2)...), Kept, DropNone},
		{"five valid with contrast", append(members(5, 1), void(3)...), Kept, DropIncomplete},
		{"all void", void(8), Incomplete, DropIncomplete},
	} {
		if got := Classify(c.ms, 8); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
		if got := DropOf(c.ms, 6); got != c.drop {
			t.Errorf("%s: drop %q, want %q", c.name, got, c.drop)
		}
	}
	for _, c := range []struct {
		ms   []Member
		want GroupKind
	}{{members(8, 1), Rescued}, {members(8, 8), Rescued}, {members(8, 0), StillAllFail}, {members(6, 0), StillAllFail},
		{append(members(5, 2), void(3)...), RescueIncomplete}} {
		if got := ClassifyRescue(c.ms, 6); got != c.want {
			t.Errorf("%v: %s, want %s", c.ms, got, c.want)
		}
	}
}

// Golden values of method.md 3.4: n = 8, binary rewards, sample deviation.
func TestAdvantagesGolden(t *testing.T) {
	want := map[int][2]float64{1: {2.47487, -0.35355}, 2: {1.62018, -0.54006}, 3: {1.20761, -0.72457}, 4: {0.93541, -0.93541},
		5: {0.72457, -1.20761}, 6: {0.54006, -1.62018}, 7: {0.35355, -2.47487}, 0: {0, 0}, 8: {0, 0}}
	for wins, w := range want {
		a := Advantages(members(8, wins), "group_std")
		for i, v := range a {
			x := w[1]
			if i < wins {
				x = w[0]
			}
			if math.Abs(v-x) > 6e-6 {
				t.Errorf("%d successes, member %d: %.6f, want %.5f", wins, i, v, x)
			}
		}
	}
	if a := Advantages(members(8, 2), "none"); a[0] != 0.75 || a[7] != -0.25 {
		t.Errorf("without division: %v", a)
	}
	// Population deviation of 4 of 8 is 0.5.
	if a := Advantages(members(8, 4), "group_pop_std"); math.Abs(a[0]-0.5/(0.5+1e-6)) > 1e-15 {
		t.Errorf("population deviation: %v", a)
	}
}

func TestAdvantagesIgnoreVoidMembers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var ms, valid []Member
		for range rapid.IntRange(2, 12).Draw(t, "n") {
			m := Member{Valid: rapid.Bool().Draw(t, "valid"), Reward: float64(rapid.IntRange(0, 2).Draw(t, "reward"))}
			if ms = append(ms, m); m.Valid {
				valid = append(valid, m)
			}
		}
		mode := rapid.SampledFrom([]string{"group_std", "group_pop_std", "none"}).Draw(t, "mode")
		a, b := Advantages(ms, mode), Advantages(valid, mode)
		sum, j := 0.0, 0
		for i, m := range ms {
			sum += a[i]
			if !m.Valid {
				if a[i] != 0 {
					t.Fatalf("void member has advantage %v", a[i])
				}
				continue
			}
			if a[i] != b[j] {
				t.Fatalf("void members changed an advantage: %v, %v", a[i], b[j])
			}
			j++
		}
		if math.Abs(sum) > 1e-6*float64(len(ms)) {
			t.Fatalf("advantages sum to %v", sum)
		}
	})
}

// Golden values of method.md 3.6.
func TestClipLossGolden(t *testing.T) {
	clip := [2]float64{0.2, 0.28}
	for _, c := range []struct{ adv, ratio, dual, want float64 }{
		{1, 1.5, 3, -1.28}, {1, 0.5, 3, -0.5}, {-1, 0.5, 3, 0.8}, {-1, 5, 0, 5}, {-1, 5, 3, 3},
	} {
		if v, _, _ := clipLoss(math.Log(c.ratio), c.adv, clip, c.dual); math.Abs(v-c.want) > 1e-12 {
			t.Errorf("A %v ratio %v dual %v: %v, want %v", c.adv, c.ratio, c.dual, v, c.want)
		}
	}
	// GSPO: mean log-ratio 0.001 gives s = 1.0010005, clipped at 1.0004.
	if v, _, _ := clipLoss(0.001, 1, [2]float64{3e-4, 4e-4}, 0); math.Abs(v+1.0004) > 1e-12 {
		t.Errorf("gspo: %v, want -1.0004", v)
	}
	if s := math.Exp(0.001); math.Abs(s-1.0010005) > 1e-7 {
		t.Errorf("s = %v", s)
	}
}

// The log-ratio is clamped at 20 before exp, so nothing flows back beyond it.
func TestClampedRatioHasNoGradient(t *testing.T) {
	c := Defaults().GRPO
	c.OldLogProbs, c.DualClip = "trainer", 0
	l, err := NewLoss(c, []LossSeq{{Advantage: -1, Sampler: []float32{-30, -30}, Old: []float32{-30, -30}}, {Reward: 1, Advantage: 1, Sampler: []float32{-1}, Old: []float32{-1}}})
	if err != nil {
		t.Fatal(err)
	}
	g, err := l.Coefficients(0, 0, []float32{-1, -29}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if g.DLogP[0] != 0 || math.Abs(float64(g.DLogP[1])-math.E/3) > 1e-6 {
		t.Errorf("%v", g.DLogP)
	}
}

// Golden value of method.md 3.7: two live tokens of loss 1, eight of loss -1.
// With ratio 1 the loss of a token is minus its advantage.
func TestAggregationGolden(t *testing.T) {
	for agg, want := range map[string]float64{"token_mean": -0.6, "seq_mean": 0, "dr_grpo": -0.3} {
		c := Defaults().GRPO
		c.Agg, c.LMax = agg, 10
		seqs := []LossSeq{{Group: 0, Reward: 0, Advantage: -1, Sampler: make([]float32, 2)}, {Group: 0, Reward: 1, Advantage: 1, Sampler: make([]float32, 8)}}
		if got := value(t, c, seqs, lpOf(seqs)); math.Abs(got-want) > 1e-12 {
			t.Errorf("%s: %v, want %v", agg, got, want)
		}
	}
}

func lpOf(seqs []LossSeq) [][]float32 {
	out := make([][]float32, len(seqs))
	for i, s := range seqs {
		out[i] = append([]float32(nil), s.Sampler...)
	}
	return out
}

func value(t testing.TB, c GRPOConfig, seqs []LossSeq, lp [][]float32) float64 {
	t.Helper()
	l, err := NewLoss(c, seqs)
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for i := range seqs {
		g, err := l.Coefficients(i, 0, lp[i], nil)
		if err != nil {
			t.Fatal(err)
		}
		sum += g.Stats.Loss
	}
	return sum
}

// batch draws two groups with old and sampler log-probs that differ a little.
// Values are multiples of 1/1024, so that a finite difference in float32 is exact.
func batch(t *rapid.T) ([]LossSeq, [][]float32) {
	lp := func(name string, lo, hi int) float32 {
		return float32(rapid.IntRange(lo, hi).Draw(t, name)) / 1024
	}
	var seqs []LossSeq
	var cur [][]float32
	for g := range 2 {
		for m := range 3 {
			s := LossSeq{Group: g, Reward: float64(m % 2), Advantage: rapid.SampledFrom([]float64{-1.5, -0.5, 0.75, 2}).Draw(t, "adv")}
			var now []float32
			for range rapid.IntRange(1, 5).Draw(t, "len") {
				old := lp("old", -3000, -100)
				s.Old = append(s.Old, old)
				s.Sampler = append(s.Sampler, old+lp("gap", -60, 60))
				now = append(now, old+lp("move", -900, 900))
			}
			seqs, cur = append(seqs, s), append(cur, now)
		}
	}
	return seqs, cur
}

func settings(t *rapid.T) GRPOConfig {
	c := Defaults().GRPO
	c.Loss = rapid.SampledFrom([]string{"clip", "gspo"}).Draw(t, "loss")
	c.Agg = rapid.SampledFrom([]string{"token_mean", "seq_mean", "dr_grpo"}).Draw(t, "agg")
	c.OldLogProbs = rapid.SampledFrom([]string{"trainer", "sampler"}).Draw(t, "old")
	if c.OldLogProbs == "trainer" {
		modes := []string{"off", "tis_seq", "mask_seq", "mask_geo", "tis_token", "mask_token"}
		if c.Loss == "gspo" {
			modes = modes[:4] // a weight per token of a sequence ratio has no loss value it is the gradient of
		}
		c.Mismatch = rapid.SampledFrom(modes).Draw(t, "mismatch")
	}
	c.DualClip = rapid.SampledFrom([]float64{0, 1.5, 3}).Draw(t, "dual")
	c.GSPOClip = [2]float64{0.3, 0.4} // wide enough for both sides to be reached
	c.LMax = 64
	return c
}

// TestCoefficientsAreTheGradient compares every coefficient with the central
// difference of the summed loss. Next to a kink the two sides disagree by design,
// so such points are skipped.
func TestCoefficientsAreTheGradient(t *testing.T) {
	const h = 1.0 / 4096
	rapid.Check(t, func(t *rapid.T) {
		c := settings(t)
		seqs, cur := batch(t)
		l, err := NewLoss(c, seqs)
		if err != nil {
			t.Fatal(err)
		}
		at := func(i, k int, d float32) float64 {
			moved := append([]float32(nil), cur[i]...)
			moved[k] += d
			g, err := l.Coefficients(i, 0, moved, nil)
			if err != nil {
				t.Fatal(err)
			}
			return g.Stats.Loss
		}
		for i := range seqs {
			g, err := l.Coefficients(i, 0, cur[i], nil)
			if err != nil {
				t.Fatal(err)
			}
			for k := range cur[i] {
				mid, up, down := at(i, k, 0), at(i, k, h), at(i, k, -h)
				right, left := (up-mid)/h, (mid-down)/h
				if math.Abs(right-left) > 0.02*(math.Abs(right)+math.Abs(left))+1e-9 {
					continue
				}
				numeric, got := (up-down)/(2*h), float64(g.DLogP[k])
				if math.Abs(numeric-got) > 2e-5*math.Abs(numeric)+1e-7 {
					t.Fatalf("%s %s %s dual %v, sequence %d token %d: coefficient %v, difference %v", c.Loss, c.Agg, c.Mismatch, c.DualClip, i, k, got, numeric)
				}
			}
		}
	})
}

// Pitfalls row 57: a dead group, masked tokens or another cut into micro-batches
// must not change a coefficient by one bit.
func TestDeadGroupsAndMicroBatchesChangeNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := settings(t)
		c.Mismatch = "off"
		seqs, cur := batch(t)
		l, err := NewLoss(c, seqs)
		if err != nil {
			t.Fatal(err)
		}
		c2 := c
		c2.MaskTruncated = true
		dead := append(append([]LossSeq(nil), seqs...), LossSeq{Group: 2, Reward: 1, Advantage: 1, Truncated: true, Sampler: make([]float32, 9), Old: make([]float32, 9)})
		l2, err := NewLoss(c2, dead)
		if err != nil {
			t.Fatal(err)
		}
		if l.Tokens() != l2.Tokens() || l.Seqs() != l2.Seqs() || l2.Dropped(2) != DropNoTokens {
			t.Fatalf("a dead group changed the denominators: %d %d, %d %d", l.Tokens(), l.Seqs(), l2.Tokens(), l2.Seqs())
		}
		for i := range seqs {
			a, err := l.Coefficients(i, 0, cur[i], nil)
			if err != nil {
				t.Fatal(err)
			}
			b, err := l2.Coefficients(i, 0, cur[i], nil)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(a, b); diff != "" {
				t.Fatal(diff)
			}
			if c.Loss == "gspo" {
				continue // needs whole trajectories
			}
			cut := rapid.IntRange(0, len(cur[i])).Draw(t, "cut")
			head, err := l.Coefficients(i, 0, cur[i][:cut], nil)
			if err != nil {
				t.Fatal(err)
			}
			tail, err := l.Coefficients(i, cut, cur[i][cut:], nil)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(a.DLogP, append(head.DLogP, tail.DLogP...)); diff != "" {
				t.Fatal(diff)
			}
		}
	})
}

func TestOnPolicyRatioIsOne(t *testing.T) {
	c := Defaults().GRPO
	if PlanOld(c) != OldSelf {
		t.Fatal("a single update needs no extra pass")
	}
	seqs := []LossSeq{{Advantage: 2, Reward: 1, Sampler: []float32{-1, -2}}, {Advantage: -1, Sampler: []float32{-3}}}
	l, err := NewLoss(c, seqs)
	if err != nil {
		t.Fatal(err)
	}
	g, err := l.Coefficients(0, 0, []float32{-1.5, -0.25}, []float32{0.5, 0.25})
	if err != nil {
		t.Fatal(err)
	}
	if g.DLogP[0] != float32(-2.0/3) || g.DLogP[1] != g.DLogP[0] || g.DEnt != nil || g.Stats.ClipHigh+g.Stats.ClipLow+g.Stats.Dual != 0 {
		t.Errorf("%+v", g)
	}
	if g.Stats.Entropy != 0.75 || g.Stats.KLOld != 0 || g.Stats.Tokens != 2 {
		t.Errorf("stats %+v", g.Stats)
	}
	for change, want := range map[string]OldPolicy{"updates": OldTrainer, "mismatch": OldTrainer, "veto": OldTrainer, "sampler": OldSampler} {
		c := Defaults().GRPO
		switch change {
		case "updates":
			c.Updates = 2
		case "mismatch":
			c.Mismatch = "tis_token"
		case "veto":
			c.Veto = 1e-4
		case "sampler":
			c.OldLogProbs = "sampler"
		}
		if got := PlanOld(c); got != want {
			t.Errorf("%s: %v, want %v", change, got, want)
		}
	}
}

func TestEntropyBonus(t *testing.T) {
	c := Defaults().GRPO
	c.Entropy = 0.1
	l, err := NewLoss(c, []LossSeq{{Advantage: 1, Reward: 1, Sampler: make([]float32, 3)}, {Advantage: -1, Sampler: make([]float32, 1)}})
	if err != nil {
		t.Fatal(err)
	}
	g, err := l.Coefficients(0, 1, []float32{0, 0}, []float32{2, 4})
	if err != nil {
		t.Fatal(err)
	}
	if g.DEnt[0] != float32(-0.1/4) || math.Abs(g.Stats.Loss-(-2.0/4-0.1*6/4)) > 1e-12 {
		t.Errorf("%+v", g)
	}
}

func TestMismatchMasks(t *testing.T) {
	// Three trajectories with log weights: {0, ln 4}, {0, 0}, {ln 0.1, 0}.
	ln := func(x float64) float32 { return float32(math.Log(x)) }
	seqs := func() []LossSeq {
		return []LossSeq{
			{Group: 0, Reward: 1, Advantage: 1, Old: []float32{-1, -1}, Sampler: []float32{-1, -1 - ln(4)}},
			{Group: 0, Reward: 0, Advantage: -1, Old: []float32{-1, -1}, Sampler: []float32{-1, -1}},
			{Group: 0, Reward: 1, Advantage: 1, Old: []float32{-1, -1}, Sampler: []float32{-1 - ln(0.1), -1}},
		}
	}
	for _, c := range []struct {
		mode      string
		veto      float64
		weights   [3][2]float64
		T, N      int
		lostToken int
	}{
		{"tis_token", 0, [3][2]float64{{1, 2}, {1, 1}, {0.1, 1}}, 6, 3, 0},
		{"mask_token", 0, [3][2]float64{{1, 4}, {1, 1}, {0, 1}}, 5, 3, 1},
		{"tis_seq", 0, [3][2]float64{{2, 2}, {1, 1}, {0.1, 0.1}}, 6, 3, 0},
		{"mask_seq", 0, [3][2]float64{{0, 0}, {1, 1}, {0.1, 0.1}}, 4, 2, 2},
		{"mask_geo", 0, [3][2]float64{{0, 0}, {0, 0}, {0, 0}}, 0, 0, 4}, // only the loser stays: contrast lost
		{"off", 0.5, [3][2]float64{{1, 1}, {1, 1}, {0, 0}}, 4, 2, 2},
	} {
		cfg := Defaults().GRPO
		cfg.Mismatch, cfg.Veto = c.mode, c.veto
		l, err := NewLoss(cfg, seqs())
		if err != nil {
			t.Fatal(err)
		}
		for i := range c.weights {
			for k := range c.weights[i] {
				if math.Abs(l.weight[i][k]-c.weights[i][k]) > 1e-6 {
					t.Errorf("%s: weight %d,%d is %v, want %v", c.mode, i, k, l.weight[i][k], c.weights[i][k])
				}
			}
		}
		lost := 0
		for m, n := range l.Masks().Tokens {
			if m != "contrast_lost" {
				lost += n
			}
		}
		if l.Tokens() != c.T || l.Seqs() != c.N || lost != c.lostToken {
			t.Errorf("%s: T %d N %d lost %d, want %d %d %d", c.mode, l.Tokens(), l.Seqs(), lost, c.T, c.N, c.lostToken)
		}
		if want := map[bool]DropReason{true: DropContrastLost, false: DropNone}[c.mode == "mask_geo"]; l.Dropped(0) != want {
			t.Errorf("%s: drop %q, want %q", c.mode, l.Dropped(0), want)
		}
	}
}

func TestMaskTruncatedKeepsTheGroup(t *testing.T) {
	c := Defaults().GRPO
	c.MaskTruncated = true
	l, err := NewLoss(c, []LossSeq{{Reward: 1, Advantage: 1, Sampler: make([]float32, 2)}, {Advantage: -1, Truncated: true, Sampler: make([]float32, 5)}})
	if err != nil {
		t.Fatal(err)
	}
	if l.Tokens() != 2 || l.Seqs() != 1 || l.Dropped(0) != DropNone || l.Masks().Truncated != 1 || l.LiveTokens(1) != 0 {
		t.Errorf("T %d N %d drop %q", l.Tokens(), l.Seqs(), l.Dropped(0))
	}
}

func TestLossRefuses(t *testing.T) {
	c := Defaults().GRPO
	for name, s := range map[string]LossSeq{
		"turn column": {Sampler: make([]float32, 2), Turn: make([]int32, 1)},
		"old column":  {Sampler: make([]float32, 2), Old: make([]float32, 3)},
		"advantage":   {Sampler: make([]float32, 2), Advantage: math.NaN()},
	} {
		if _, err := NewLoss(c, []LossSeq{s}); err == nil {
			t.Errorf("%s accepted", name)
		}
	}
	c.OldLogProbs = "trainer"
	if _, err := NewLoss(c, []LossSeq{{Sampler: make([]float32, 2)}}); err == nil {
		t.Error("missing old log-probs accepted")
	}
	l, err := NewLoss(Defaults().GRPO, []LossSeq{{Advantage: 1, Reward: 1, Sampler: make([]float32, 2)}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Coefficients(0, 1, make([]float32, 2), nil); err == nil {
		t.Error("range past the end accepted")
	}
	if _, err := l.Coefficients(0, 0, []float32{float32(math.NaN()), 0}, nil); err == nil {
		t.Error("NaN accepted")
	}
}

func TestGap(t *testing.T) {
	c := Defaults().GRPO
	var g Gap
	sampler, trained := []float32{-1, -2, -3, -4}, []float32{-1, -2.5, -3, -4}
	if err := g.Add(sampler, trained, []int32{1, 1, 2, 2}); err != nil {
		t.Fatal(err)
	}
	s := g.Stats()
	w := math.Exp(-0.5)
	if s.Mean != 0.125 || s.Max != 0.5 || s.P99 != 0.5 || s.Tokens != 4 || math.Abs(s.ESS-(3+w)*(3+w)/(4*(3+w*w))) > 1e-12 {
		t.Errorf("%+v", s)
	}
	if diff := cmp.Diff([]float64{0, 0.25, 0}, s.ByTurn); diff != "" {
		t.Error(diff)
	}
	// x = 1,2,3,4 and y = 1,2.5,3,4 about their means: 4.75 / sqrt(5 * 4.6875).
	if math.Abs(s.Pearson-4.75/math.Sqrt(5*4.6875)) > 1e-12 {
		t.Errorf("pearson %v", s.Pearson)
	}
	if err := g.Add(sampler, trained[:3], nil); err == nil {
		t.Error("unequal columns accepted")
	}
	var gate GapGate
	if d := gate.Judge(s, c); !d.Stop || d.Err() == nil || !strings.Contains(d.Why[0], "gap_stop") {
		t.Errorf("%+v", d)
	}
	if d := (&GapGate{}).Judge(GapStats{Tokens: 9, Mean: 0.03, Pearson: 1}, c); d.Stop || !d.Warn || d.Err() != nil {
		t.Errorf("warning: %+v", d)
	}
	if d := (&GapGate{}).Judge(GapStats{Tokens: 9, Mean: 0.001, Pearson: 0.97}, c); !d.Stop {
		t.Errorf("correlation: %+v", d)
	}
	var nan Gap
	if err := nan.Add([]float32{-1}, []float32{float32(math.NaN())}, nil); err != nil {
		t.Fatal(err)
	}
	if d := (&GapGate{}).Judge(nan.Stats(), c); !d.Stop {
		t.Errorf("not finite: %+v", d)
	}
}

func TestGapTrend(t *testing.T) {
	c := Defaults().GRPO
	run := func(late float64) int {
		var g GapGate
		for step := 1; step <= 80; step++ {
			gap := 0.002
			if step > 40 {
				gap = late
			}
			if g.Judge(GapStats{Tokens: 1, Mean: gap, Pearson: 1}, c).Stop {
				return step
			}
		}
		return 0
	}
	// The window mean passes 0.004 when n late steps satisfy n*0.01 + (20-n)*0.002 > 20*0.004, n > 5.
	if got := run(0.01); got != 46 {
		t.Errorf("stopped at step %d, want 46", got)
	}
	if got := run(0.0039); got != 0 {
		t.Errorf("less than twice stopped at step %d", got)
	}
	var g GapGate
	for range 60 {
		g.First = append(g.First[:0:0], make([]float64, 20)...)
		if g.Judge(GapStats{Tokens: 1, Mean: 1e-6, Pearson: 1}, c).Stop {
			t.Fatal("rounding noise below the floor stopped the run")
		}
	}
}
