package trainer

import (
	"fmt"
	"math"
)

// Member is what the objective needs to know of one attempt of a group.
type Member struct {
	Valid   bool    // infra, harness-fault and task-invalid attempts are not valid
	Success bool    // the verifier's boolean; gates keeping and rescue
	Reward  float64 // default 0/1, equal to Success; ignored when not valid
}

// GroupKind is the fate of one task's group in a step (method.md 3.2).
type GroupKind string

// Kinds of phase A, then those a rescue turns AllFail into.
const (
	Kept             GroupKind = "kept"              // at least one success
	AllFail          GroupKind = "all_fail"          // want valid attempts, all failed
	Incomplete       GroupKind = "incomplete"        // no success, too few valid attempts: never rescued, never trained
	Rescued          GroupKind = "rescued"           // the replacement group has a success
	StillAllFail     GroupKind = "still_all_fail"    // complete replacement group without success
	RescueIncomplete GroupKind = "rescue_incomplete" // replacement group below min_group valid attempts
)

// Classify returns the kind of a base group of which want attempts were asked.
// All-fail needs want valid failures: an infra fault is not a failure (R9).
func Classify(ms []Member, want int) GroupKind {
	valid, wins := count(ms)
	switch {
	case wins > 0:
		return Kept
	case valid >= want:
		return AllFail
	}
	return Incomplete
}

// ClassifyRescue returns the kind of a replacement group.
func ClassifyRescue(ms []Member, minGroup int) GroupKind {
	valid, wins := count(ms)
	switch {
	case valid < minGroup:
		return RescueIncomplete
	case wins > 0:
		return Rescued
	}
	return StillAllFail
}

func count(ms []Member) (valid, wins int) {
	for _, m := range ms {
		if m.Valid {
			valid++
			if m.Success {
				wins++
			}
		}
	}
	return valid, wins
}

// Contrast reports whether two valid members have different rewards, by exact
// comparison (R21).
func Contrast(ms []Member) bool {
	first, seen := 0.0, false
	for _, m := range ms {
		if !m.Valid {
			continue
		}
		if seen && m.Reward != first {
			return true
		}
		first, seen = m.Reward, true
	}
	return false
}

// DropReason says why a group does not enter the update; empty = it is live.
type DropReason string

// Reasons, counted per step.
const (
	DropNone         DropReason = ""
	DropAllPass      DropReason = "all_pass"
	DropAllFail      DropReason = "all_fail"
	DropIncomplete   DropReason = "incomplete"
	DropContrastLost DropReason = "contrast_lost" // a trajectory mask removed the contrast (method.md 3.9)
	DropNoTokens     DropReason = "no_tokens"     // a mask left no live token at all
)

// DropOf decides whether the group of attempts that would be trained on is live:
// it needs minGroup valid members (R11) and contrast (R18).
func DropOf(ms []Member, minGroup int) DropReason {
	valid, wins := count(ms)
	switch {
	case valid < minGroup:
		return DropIncomplete
	case Contrast(ms):
		return DropNone
	case wins > 0:
		return DropAllPass
	}
	return DropAllFail
}

// advEps keeps the division defined; method.md 3.4.
const advEps = 1e-6

// Advantages returns one number per member, 0 for members that are not valid and
// for every member of a group without contrast (method.md 3.4). normalize is
// group_std (sample standard deviation, n-1), group_pop_std (n) or none.
func Advantages(ms []Member, normalize string) []float64 {
	dst := make([]float64, len(ms))
	if !Contrast(ms) {
		return dst
	}
	n, sum := 0.0, 0.0
	for _, m := range ms {
		if m.Valid {
			n++
			sum += m.Reward
		}
	}
	mean, sq := sum/n, 0.0
	for _, m := range ms {
		if m.Valid {
			sq += (m.Reward - mean) * (m.Reward - mean)
		}
	}
	scale := 1.0
	switch normalize {
	case "group_std":
		scale = math.Sqrt(sq/(n-1)) + advEps
	case "group_pop_std":
		scale = math.Sqrt(sq/n) + advEps
	}
	for i, m := range ms {
		if m.Valid {
			dst[i] = (m.Reward - mean) / scale
		}
	}
	return dst
}

// logClamp bounds log-ratios before exp, method.md 3.6.
const logClamp = 20

func clampLog(x float64) float64 { return math.Max(-logClamp, math.Min(logClamp, x)) }

// LossSeq is one trajectory of the optimiser batch: its policy tokens over all
// its segments, in order. Columns have equal length.
type LossSeq struct {
	Group     int       // index of its group within the batch
	Reward    float64   // verifier reward, for the contrast_lost test
	Advantage float64   // from Advantages
	Sampler   []float32 // log-prob when sampled, nats
	Old       []float32 // trainer's log-prob before the first update; nil when PlanOld says OldSelf
	Turn      []int32   // turn of each token; nil = no breakdown
	Truncated bool      // a budget ran out; its tokens are removed under mask_truncated
}

// OldPolicy says where lp_old comes from (method.md 3.6).
type OldPolicy uint8

// The three sources.
const (
	OldSelf    OldPolicy = iota // the current value without gradient: ratio 1 exactly, no extra pass
	OldTrainer                  // one forward pass before the first update
	OldSampler                  // the logged sampler log-prob
)

// PlanOld resolves old_logprobs: auto needs no extra pass for a single update
// without mismatch correction.
func PlanOld(c GRPOConfig) OldPolicy {
	switch {
	case c.OldLogProbs == "sampler":
		return OldSampler
	case c.OldLogProbs == "trainer" || c.Updates > 1 || c.Mismatch != "off" || c.Veto > 0:
		return OldTrainer
	}
	return OldSelf
}

// Loss holds what must be known of a whole optimiser batch before its first
// micro-batch: masks, mismatch weights and denominators (method.md 3.5-3.9).
// It is immutable after NewLoss except for the counters of Coefficients.
type Loss struct {
	cfg    GRPOConfig
	old    OldPolicy
	seqs   []LossSeq
	weight [][]float64 // per token; 0 = not live; nil row = whole trajectory dead
	live   []int       // T_i
	scale  []float64   // factor of each token's loss: agg/denominator
	T, N   int
	drop   map[int]DropReason
	stats  MaskStats
}

// MaskStats counts what the configured masks removed.
type MaskStats struct {
	Tokens    map[string]int // removed tokens by mask name
	Seqs      map[string]int // removed trajectories by mask name
	Lost      []int          // groups dropped because of masks, ascending
	Truncated int            // trajectories without tokens because of mask_truncated
}

// NewLoss prepares the batch. Every sequence belongs to a live group; an error
// means the inputs contradict each other.
func NewLoss(c GRPOConfig, seqs []LossSeq) (*Loss, error) {
	l := &Loss{cfg: c, old: PlanOld(c), seqs: seqs, drop: map[int]DropReason{},
		stats: MaskStats{Tokens: map[string]int{}, Seqs: map[string]int{}}}
	for i, s := range seqs {
		n := len(s.Sampler)
		if s.Turn != nil && len(s.Turn) != n || s.Old != nil && len(s.Old) != n {
			return nil, fmt.Errorf("prepare loss: sequence %d has %d sampler log-probs, %d old, %d turns", i, n, len(s.Old), len(s.Turn))
		}
		if l.old == OldTrainer && s.Old == nil && n > 0 {
			return nil, fmt.Errorf("prepare loss: sequence %d has no old log-probs, which this configuration needs", i)
		}
		if math.IsNaN(s.Advantage) || math.IsInf(s.Advantage, 0) {
			return nil, fmt.Errorf("prepare loss: sequence %d has advantage %v", i, s.Advantage)
		}
	}
	l.weigh()
	l.dropLost()
	l.denominators()
	return l, nil
}

// Tokens is T, the live tokens of the batch.
func (l *Loss) Tokens() int { return l.T }

// Seqs is N, the trajectories with at least one live token.
func (l *Loss) Seqs() int { return l.N }

// LiveTokens is T_i of sequence i.
func (l *Loss) LiveTokens(i int) int { return l.live[i] }

// Masks reports what the masks removed.
func (l *Loss) Masks() MaskStats { return l.stats }

// Dropped returns the reason group g lost its place in the update, or DropNone.
func (l *Loss) Dropped(g int) DropReason { return l.drop[g] }

// weigh fills the per-token weights: 1, a mismatch weight, or 0 for a masked token.
func (l *Loss) weigh() {
	l.weight = make([][]float64, len(l.seqs))
	for i, s := range l.seqs {
		w := make([]float64, len(s.Sampler))
		for t := range w {
			w[t] = 1
		}
		l.weight[i] = w
		if len(w) == 0 {
			continue
		}
		if l.cfg.MaskTruncated && s.Truncated {
			l.stats.Truncated++
			l.remove("mask_truncated", i)
			continue
		}
		if l.old == OldTrainer {
			l.mismatch(i)
		}
	}
}

// mismatch applies method.md 3.9 to sequence i.
func (l *Loss) mismatch(i int) {
	s, w, c := l.seqs[i], l.weight[i], l.cfg
	sum, low := 0.0, math.Inf(1)
	ratio := make([]float64, len(w))
	for t := range w {
		d := float64(s.Old[t]) - float64(s.Sampler[t])
		sum += d
		ratio[t] = math.Exp(clampLog(d))
		low = math.Min(low, ratio[t])
	}
	seq := math.Exp(clampLog(sum))
	switch c.Mismatch {
	case "tis_token":
		for t := range w {
			w[t] = math.Min(ratio[t], c.TISCap)
		}
	case "mask_token":
		for t := range w {
			if w[t] = ratio[t]; ratio[t] < c.MaskToken[0] || ratio[t] > c.MaskToken[1] {
				w[t] = 0
				l.stats.Tokens["mask_token"]++
			}
		}
	case "tis_seq":
		for t := range w {
			w[t] = math.Min(seq, c.TISCap)
		}
	case "mask_seq":
		if seq > c.MaskSeqCap {
			l.remove("mask_seq", i)
			return
		}
		for t := range w {
			w[t] = seq
		}
	case "mask_geo":
		if g := math.Exp(sum / float64(len(w))); g < c.MaskGeo[0] || g > c.MaskGeo[1] {
			l.remove("mask_geo", i)
			return
		}
	}
	if c.Veto > 0 && low < c.Veto {
		l.remove("veto", i)
	}
}

func (l *Loss) remove(mask string, i int) {
	for t, w := range l.weight[i] {
		if w != 0 {
			l.stats.Tokens[mask]++
		}
		l.weight[i][t] = 0
	}
	l.stats.Seqs[mask]++
}

// dropLost drops groups whose members with live tokens all have the same reward
// because a trajectory mask removed the others. Contrast that mask_truncated
// hides stays: its members keep their reward in the group statistics (3.5).
func (l *Loss) dropLost() {
	type state struct {
		first, masked, any bool
		reward             float64
		contrast           bool
	}
	groups := map[int]*state{}
	for i, s := range l.seqs {
		g := groups[s.Group]
		if g == nil {
			g = &state{}
			groups[s.Group] = g
		}
		alive := false
		for _, w := range l.weight[i] {
			alive = alive || w != 0
		}
		truncated := l.cfg.MaskTruncated && s.Truncated
		g.any = g.any || alive
		if !alive && !truncated && len(s.Sampler) > 0 {
			g.masked = true
			continue
		}
		if g.first && s.Reward != g.reward {
			g.contrast = true
		}
		g.first, g.reward = true, s.Reward
	}
	maxGroup := -1
	for g := range groups {
		maxGroup = max(maxGroup, g)
	}
	for g := 0; g <= maxGroup; g++ {
		st := groups[g]
		switch {
		case st == nil:
			continue
		case !st.any:
			l.drop[g] = DropNoTokens
		case st.masked && !st.contrast:
			l.drop[g] = DropContrastLost
		default:
			continue
		}
		l.stats.Lost = append(l.stats.Lost, g)
	}
	for i, s := range l.seqs {
		if l.drop[s.Group] == DropContrastLost {
			l.remove("contrast_lost", i)
		}
	}
}

// denominators computes T_i, T, N and each sequence's token factor, method.md 3.7.
func (l *Loss) denominators() {
	l.live, l.scale = make([]int, len(l.seqs)), make([]float64, len(l.seqs))
	for i := range l.seqs {
		for _, w := range l.weight[i] {
			if w != 0 {
				l.live[i]++
			}
		}
		l.T += l.live[i]
		if l.live[i] > 0 {
			l.N++
		}
	}
	agg := l.cfg.Agg
	if l.cfg.Loss == "gspo" {
		agg = "seq_mean"
	}
	for i := range l.seqs {
		if l.live[i] == 0 {
			continue
		}
		switch agg {
		case "token_mean":
			l.scale[i] = 1 / float64(l.T)
		case "seq_mean":
			l.scale[i] = 1 / (float64(l.N) * float64(l.live[i]))
		case "dr_grpo":
			l.scale[i] = 1 / (float64(l.N) * float64(l.cfg.LMax))
		}
	}
}

// TokenGrad is the result of Coefficients for a range of one trajectory's tokens.
type TokenGrad struct {
	DLogP []float32 // dLoss/dlogp, 0 for tokens that are not live
	DEnt  []float32 // dLoss/dentropy; nil when the bonus is off
	Stats LossStats
}

// LossStats are sums over live tokens; add them over micro-batches with Add.
type LossStats struct {
	Loss     float64 // this part's share of the policy loss, already divided
	Entropy  float64 // sum of entropies, nats
	Tokens   int
	ClipLow  int // tokens whose gradient the lower bound cut
	ClipHigh int
	Dual     int     // tokens bounded by the dual clip
	KLOld    float64 // sum of k3 against lp_old
}

// Add accumulates o.
func (s *LossStats) Add(o LossStats) {
	s.Loss += o.Loss
	s.Entropy += o.Entropy
	s.Tokens += o.Tokens
	s.ClipLow += o.ClipLow
	s.ClipHigh += o.ClipHigh
	s.Dual += o.Dual
	s.KLOld += o.KLOld
}

// Coefficients returns dLoss/dlogp for tokens from..from+len(lp) of sequence i,
// given their current log-probs and (when the entropy bonus or the entropy
// metric is wanted) entropies, both in nats. The result does not depend on how
// the batch is cut into micro-batches. gspo with separate old log-probs needs the
// whole trajectory in one call.
func (l *Loss) Coefficients(i, from int, lp, ent []float32) (TokenGrad, error) {
	s := l.seqs[i]
	if from < 0 || from+len(lp) > len(s.Sampler) || ent != nil && len(ent) != len(lp) {
		return TokenGrad{}, fmt.Errorf("compute coefficients: tokens %d..%d of sequence %d with %d tokens and %d entropies", from, from+len(lp), i, len(s.Sampler), len(ent))
	}
	g := TokenGrad{DLogP: make([]float32, len(lp))}
	bonus := l.cfg.Entropy > 0 && ent != nil
	if bonus {
		g.DEnt = make([]float32, len(lp))
	}
	if l.live[i] == 0 {
		return g, nil
	}
	seqLog := 0.0
	if l.cfg.Loss == "gspo" && l.old != OldSelf {
		if from != 0 || len(lp) != len(s.Sampler) {
			return TokenGrad{}, fmt.Errorf("compute coefficients: gspo needs all %d tokens of sequence %d, got %d", len(s.Sampler), i, len(lp))
		}
		for t := range lp {
			if l.weight[i][t] != 0 {
				seqLog += clampLog(float64(lp[t]) - l.oldAt(i, t, lp[t]))
			}
		}
		seqLog /= float64(l.live[i])
	}
	for t := range lp {
		w := l.weight[i][from+t]
		if w == 0 {
			continue
		}
		d := clampLog(float64(lp[t]) - l.oldAt(i, from+t, lp[t]))
		if math.IsNaN(d) {
			return TokenGrad{}, fmt.Errorf("compute coefficients: log-prob %v at token %d of sequence %d: %w", lp[t], from+t, i, ErrGate)
		}
		var v, dv float64
		var hit clipHit
		if l.cfg.Loss == "gspo" {
			v, dv, hit = clipLoss(seqLog, s.Advantage, l.cfg.GSPOClip, 0)
		} else {
			v, dv, hit = clipLoss(d, s.Advantage, l.cfg.Clip, l.cfg.DualClip)
		}
		g.DLogP[t] = float32(w * dv * l.scale[i])
		g.Stats.Loss += w * v * l.scale[i]
		g.Stats.Tokens++
		g.Stats.KLOld += math.Exp(-d) - 1 + d
		switch hit {
		case hitLow:
			g.Stats.ClipLow++
		case hitHigh:
			g.Stats.ClipHigh++
		case hitDual:
			g.Stats.Dual++
		}
		if ent != nil {
			g.Stats.Entropy += float64(ent[t])
		}
		if bonus {
			g.DEnt[t] = float32(-l.cfg.Entropy / float64(l.T))
			g.Stats.Loss -= l.cfg.Entropy * float64(ent[t]) / float64(l.T)
		}
	}
	return g, nil
}

func (l *Loss) oldAt(i, t int, lp float32) float64 {
	switch {
	case l.old == OldSampler:
		return float64(l.seqs[i].Sampler[t])
	case l.old == OldTrainer:
		return float64(l.seqs[i].Old[t])
	}
	return float64(lp)
}

type clipHit uint8

const (
	hitNone clipHit = iota
	hitLow
	hitHigh
	hitDual
)

// clipLoss is one token's loss and its derivative by lp, method.md 3.6: x is the
// log-ratio, dual 0 = off. The clamp of x at +-20 has derivative 0 beyond.
func clipLoss(x, adv float64, clip [2]float64, dual float64) (v, dv float64, hit clipHit) {
	r := math.Exp(x)
	c := math.Max(1-clip[0], math.Min(1+clip[1], r))
	obj, grad := r*adv, r*adv
	if x <= -logClamp || x >= logClamp {
		grad = 0
	}
	if c*adv < obj {
		obj, grad = c*adv, 0
		if r > 1 {
			hit = hitHigh
		} else {
			hit = hitLow
		}
	}
	if dual > 0 && adv < 0 && obj < dual*adv {
		obj, grad, hit = dual*adv, 0, hitDual
	}
	return -obj, -grad, hit
}

// SFTCoefficient is dLoss/dlogp of every target of a supervised batch with n
// targets: the mean negative log-likelihood.
func SFTCoefficient(n int) float32 { return float32(-1 / float64(n)) }
