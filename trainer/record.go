package trainer

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"harness-s/env"
	"harness-s/env/harness"
	"harness-s/model/chat"
	"harness-s/router"
)

// totals are the counters of a run; a checkpoint stores them.
type totals struct {
	Groups          int                 `json:"groups"`
	AllFail         int                 `json:"all_fail"`
	RescuedGroups   int                 `json:"rescued_groups"`
	RescueSuccesses int                 `json:"rescue_successes"`
	EmptySteps      int                 `json:"empty_steps"`
	Cost            Cost                `json:"cost"`
	Rewards         []float64           `json:"rewards"` // of the last 20 steps
	Solved          map[string][]string `json:"solved"`  // task id -> names of harnesses that solved it
	TrainSeconds    float64             `json:"train_seconds"`
}

// phases are the wall-clock seconds of a step.
type phases struct {
	total, collect, rescue, update, eval float64
	sched                                SchedStats
}

// rewardWindow is the length of reward/ma20.
const rewardWindow = 20

// fill turns a step's groups and update into the record, and books the totals.
func fill(r *Record, t *totals, groups []*Group, u updateStats, cfg Config) {
	var base, rescue []*Attempt
	tally := map[GroupKind]int{}
	drops := map[DropReason]int{}
	var taskReward []Sample
	mixed, rescueLive, solvedTasks, firsts, seqs := 0, 0, 0, 0, 0
	top1, routed, w := 0, 0, 0.0
	r.Harness = map[string]HarnessCount{}
	if t.Solved == nil {
		t.Solved = map[string][]string{}
	}
	for _, g := range groups {
		tally[g.Kind]++
		drops[g.Drop]++
		first, seq := map[string]bool{}, map[string]bool{}
		wins, valid := 0, 0
		for i := range g.Base {
			a := &g.Base[i]
			base = append(base, a)
			f, s := actions(&a.Traj)
			first[f], seq[s] = true, true
			if a.Outcome.Valid() {
				valid++
			}
			if a.Outcome.Success() {
				wins++
			}
			t.solve(g.Task.ID, a)
		}
		firsts, seqs = firsts+len(first), seqs+len(seq)
		if valid > 0 {
			taskReward = append(taskReward, Sample{g.Task.ID, float64(wins) / float64(valid)})
		}
		if wins > 0 {
			solvedTasks++
		}
		if g.Kind == Kept && Contrast(membersOf(g.Base)) {
			mixed++
		}
		if g.Kind == Rescued && g.Drop == DropNone {
			rescueLive++
		}
		for i := range g.Rescue {
			a := &g.Rescue[i]
			rescue = append(rescue, a)
			t.solve(g.Task.ID, a)
			c := r.Harness[a.Spec.ID()]
			c.Picked++
			if a.Outcome.Success() {
				c.Success++
			}
			r.Harness[a.Spec.ID()] = c
		}
		for _, s := range g.Substitutions {
			c := r.Harness[s.From]
			c.Picked++
			c.Fault++
			r.Harness[s.From] = c
		}
		if g.Choice != nil && g.Choice.decision != nil {
			routed++
			w += g.Choice.decision.KendallW
			if g.Rescue[0].Outcome.Success() {
				top1++
			}
		}
	}
	n := float64(len(groups))
	rescues := tally[Rescued] + tally[StillAllFail] + tally[RescueIncomplete]
	allFail := tally[AllFail] + rescues
	iv := Bootstrap(taskReward, 1000, uint64(r.Step))
	r.Reward.Mean, r.Reward.Low, r.Reward.High = iv.Mean, iv.Low, iv.High
	t.Rewards = append(t.Rewards, iv.Mean)
	t.Rewards = t.Rewards[max(0, len(t.Rewards)-rewardWindow):]
	r.Reward.MA = mean(t.Rewards)
	r.Pass.At1, r.Pass.At8 = iv.Mean, float64(solvedTasks)/n

	r.Group.Total, r.Group.Live, r.Group.Kept, r.Group.Mixed = n, float64(u.Live), float64(tally[Kept]), float64(mixed)
	r.Group.AllPass, r.Group.AllFail = float64(drops[DropAllPass]), float64(allFail)
	r.Group.Incomplete, r.Group.Dropped = float64(tally[Incomplete]), n-float64(u.Live)
	r.Group.ContrastLost = float64(drops[DropContrastLost])
	t.Groups += len(groups)
	t.AllFail += allFail
	if u.Empty {
		t.EmptySteps++
	}
	r.Group.EmptySteps = float64(t.EmptySteps)
	t.Cost.Base += len(base)
	t.Cost.Rescue += len(rescue)
	if cfg.Rescue.Mode != "off" {
		r.Group.Rescued, r.Group.RescueLive = float64(tally[Rescued]), float64(rescueLive)
		r.Group.StillAllFail, r.Group.RescueIncomplete = float64(tally[StillAllFail]), float64(tally[RescueIncomplete])
		t.RescuedGroups += rescues
		t.RescueSuccesses += tally[Rescued]
		r.Rescue.Groups, r.Rescue.Rate, r.Rescue.Attempts = float64(rescues), float64(rescues)/n, float64(len(rescue))
		r.Rescue.ExtraPct = 100 * float64(len(rescue)) / float64(len(base))
		r.Rescue.RunPct = 100 * float64(t.Cost.Rescue) / float64(t.Cost.Base)
		if rescues > 0 {
			r.Rescue.Success = float64(tally[Rescued]) / float64(rescues)
		}
		r.Router.Calls = float64(routed)
		t.Cost.Routing += routed
		if routed > 0 {
			r.Router.Top1, r.Router.Agreement = float64(top1)/float64(routed), w/float64(routed)
		}
	}
	fillAttempts(r, t, base, rescue)
	r.Explore.FirstActions, r.Explore.Sequences = float64(firsts)/n, float64(seqs)/n
	single := 0
	for _, hs := range t.Solved {
		if len(hs) == 1 {
			single++
		}
	}
	r.Explore.EverSolved = float64(len(t.Solved))
	if len(t.Solved) > 0 {
		r.Explore.OneHarness = float64(single) / float64(len(t.Solved))
	}
	fillUpdate(r, u)
}

// solve notes a success.
func (t *totals) solve(task string, a *Attempt) {
	if !a.Outcome.Success() {
		return
	}
	if at, ok := slices.BinarySearch(t.Solved[task], a.Spec.Name); !ok {
		t.Solved[task] = slices.Insert(t.Solved[task], at, a.Spec.Name)
	}
}

// fillAttempts counts outcomes and tokens.
func fillAttempts(r *Record, t *totals, base, rescue []*Attempt) {
	var infra, timeout, fault, reruns, turns, cut int
	var by [chat.KindHarness + 1]int
	all := append(slices.Clone(base), rescue...)
	for _, a := range all {
		for _, v := range a.Voids {
			reruns++
			if v.Class == env.ClassInfra.String() {
				infra++
			} else {
				fault++
			}
		}
		switch a.Outcome.Class() {
		case env.ClassInfra:
			infra++
		case env.ClassHarnessFault:
			fault++
		case env.ClassTimeout:
			timeout++
		}
		if a.Truncated() {
			cut++
		}
		turns += a.Traj.Turns
		for i := range a.Traj.Segments {
			for _, k := range a.Traj.Segments[i].Kind {
				by[k]++
			}
		}
	}
	t.Cost.Reruns += reruns
	r.Outcome.Infra, r.Outcome.Timeout, r.Outcome.HarnessFault, r.Outcome.Retries = float64(infra), float64(timeout), float64(fault), float64(reruns)
	r.Tokens.Prompt = float64(by[chat.KindTemplate] + by[chat.KindSystem] + by[chat.KindUser])
	r.Tokens.Policy, r.Tokens.Tool, r.Tokens.Harness = float64(by[chat.KindPolicy]), float64(by[chat.KindTool]), float64(by[chat.KindHarness])
	if len(all) > 0 {
		r.Turns.Mean, r.Trunc.Pct = float64(turns)/float64(len(all)), 100*float64(cut)/float64(len(all))
	}
}

// fillUpdate reports the update.
func fillUpdate(r *Record, u updateStats) {
	r.Tokens.Trained, r.Adv.NonZero, r.Adv.Total = float64(u.Tokens), float64(u.NonZero), float64(u.Trajs)
	r.Optim.LR = u.LR
	r.Masked = u.Masks.Tokens
	if u.Empty {
		return
	}
	live := math.Max(float64(u.Loss.Tokens), 1)
	r.Loss.PG, r.Grad.Norm = u.Loss.Loss, u.GradNorm
	r.Clip.Low, r.Clip.High, r.Clip.Dual = float64(u.Loss.ClipLow)/live, float64(u.Loss.ClipHigh)/live, float64(u.Loss.Dual)/live
	r.Entropy.Mean, r.KL.Old = u.Loss.Entropy/live, u.Loss.KLOld/live
	r.Gap.Mean, r.Gap.P99, r.Gap.Max, r.Gap.Corr, r.Gap.ESS = u.Gap.Mean, u.Gap.P99, u.Gap.Max, u.Gap.Pearson, u.Gap.ESS
}

// fillTimes reports what depends on the machine.
func fillTimes(r *Record, p phases, rows int) {
	s := p.sched
	r.Time.Total, r.Time.Gen, r.Time.Env = p.total, s.Busy.Seconds(), s.Idle.Seconds()
	r.Time.Rescue, r.Time.Update, r.Time.Eval = p.rescue, p.update, p.eval
	if s.Busy > 0 {
		r.Perf.Decode = float64(s.DecodeTokens) / s.Busy.Seconds()
	}
	if p.update > 0 && rows > 0 {
		r.Perf.Train = float64(rows) / p.update
	}
	if s.Pages > 0 {
		r.Mem.KV = float64(s.PagesUsed) / float64(s.Pages)
	}
	r.Mem.RSS = peakRSS()
}

// actions returns the first action of an episode and all of them, as keys.
func actions(t *harness.Trajectory) (first, all string) {
	var b strings.Builder
	for i := range t.Transcript {
		for _, a := range t.Transcript[i].Actions {
			b.WriteString(a.Tool + " " + a.Args + "\n")
			if first == "" {
				first = b.String()
			}
		}
	}
	return first, b.String()
}

// peakRSS is the peak resident size of the process in bytes, 0 when unknown.
func peakRSS() float64 {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return float64(u.Maxrss) * 1024
}

// rolloutRecord is one line of a rollouts file: the attempt with everything R23
// asks for. It holds no times, so that equal runs write equal files.
type rolloutRecord struct {
	Step            int                  `json:"step"`
	Group           int                  `json:"group"`
	Task            string               `json:"task"`
	Family          string               `json:"family,omitempty"`
	Phase           string               `json:"phase"`
	Attempt         int                  `json:"attempt"`
	Kind            GroupKind            `json:"kind"`
	Drop            DropReason           `json:"drop,omitempty"`
	InUpdate        bool                 `json:"in_update"`
	Advantage       float64              `json:"advantage"`
	HarnessID       string               `json:"harness_id"`
	HarnessName     string               `json:"harness"`
	HarnessHash     string               `json:"harness_hash"`
	PoolDigest      string               `json:"pool_digest"`
	EvidenceVersion int                  `json:"evidence_version"`
	PolicyVersion   uint64               `json:"policy_version"`
	InitDigest      string               `json:"init_digest"`
	Outcome         env.Outcome          `json:"outcome"`
	Success         bool                 `json:"success"`
	Score           float64              `json:"score"`
	Turns           int                  `json:"turns"`
	Fault           string               `json:"fault,omitempty"`
	Causes          []string             `json:"causes,omitempty"`
	Voids           []Void               `json:"voids,omitempty"`
	Ledger          []ledgerRecord       `json:"ledger"`
	Transcript      []harness.TurnRecord `json:"transcript"`
}

// ledgerRecord is a ledger segment; kinds is one letter per token: t template,
// s system, u user, o tool, p policy, h harness.
type ledgerRecord struct {
	IDs     []int32  `json:"ids"`
	Kinds   string   `json:"kinds"`
	LogProb logProbs `json:"log_prob"` // of policy tokens, in order
	Turn    []int32  `json:"turn"`
}

// logProbs encodes log-probs with the digits that give back the same float32.
type logProbs []float32

// MarshalJSON writes an array; a value that is not finite becomes null.
func (l logProbs) MarshalJSON() ([]byte, error) {
	b := []byte{'['}
	for i, v := range l {
		if i > 0 {
			b = append(b, ',')
		}
		if f := float64(v); math.IsNaN(f) || math.IsInf(f, 0) {
			b = append(b, "null"...)
		} else {
			b = strconv.AppendFloat(b, f, 'g', -1, 32)
		}
	}
	return append(b, ']'), nil
}

const kindLetters = "tsuoph"

// rolloutRecords lists every attempt of a step, replaced ones included.
func rolloutRecords(groups []*Group, cfg Config, pool string, evidence int) []any {
	var out []any
	for _, g := range groups {
		adv := Advantages(membersOf(g.Members()), cfg.GRPO.Normalize)
		for i := range len(g.Base) + len(g.Rescue) {
			a, member := &g.Base[min(i, len(g.Base)-1)], i
			in := g.Rescue == nil
			if i >= len(g.Base) {
				member = i - len(g.Base)
				a, in = &g.Rescue[member], true
			}
			in = in && g.Drop == DropNone && a.Outcome.Valid()
			r := rolloutRecord{
				Step: g.Step, Group: g.Index, Task: g.Task.ID, Family: g.Task.Group, Phase: a.Phase, Attempt: a.Index,
				Kind: g.Kind, Drop: g.Drop, InUpdate: in, HarnessID: a.Spec.ID(), HarnessName: a.Spec.Name, HarnessHash: a.Spec.Hash(),
				PoolDigest: pool, EvidenceVersion: evidence, PolicyVersion: a.PolicyVersion, InitDigest: a.Traj.InitDigest,
				Outcome: a.Outcome, Success: a.Outcome.Success(), Score: a.Traj.Verdict.Score, Turns: a.Traj.Turns,
				Fault: a.Traj.FaultReason, Causes: a.Traj.Causes, Voids: a.Voids, Transcript: a.Traj.Transcript, Ledger: ledgerRecords(&a.Traj),
			}
			if in {
				r.Advantage = adv[member]
			}
			out = append(out, r)
		}
	}
	return out
}

func ledgerRecords(t *harness.Trajectory) []ledgerRecord {
	out := make([]ledgerRecord, len(t.Segments))
	for i := range t.Segments {
		s := &t.Segments[i]
		kinds := make([]byte, len(s.Kind))
		r := ledgerRecord{IDs: s.IDs, Turn: s.Turn, LogProb: logProbs{}}
		for j, k := range s.Kind {
			kinds[j] = kindLetters[min(int(k), len(kindLetters)-1)]
			if k == chat.KindPolicy {
				r.LogProb = append(r.LogProb, s.LogProb[j])
			}
		}
		r.Kinds = string(kinds)
		out[i] = r
	}
	return out
}

// decisionOf completes a group's router record with what became of the choice.
func decisionOf(g *Group) *router.Decision {
	if g.Choice == nil || g.Choice.decision == nil {
		return nil
	}
	d := *g.Choice.decision
	for _, s := range g.Substitutions {
		d.Substitutions = append(d.Substitutions, router.Substitution{Out: s.From, In: s.To, Reason: s.Cause})
	}
	for i := range g.Rescue {
		a := &g.Rescue[i]
		d.Outcomes = append(d.Outcomes, router.Outcome{ID: a.Spec.ID(), Valid: a.Outcome.Valid(), Success: a.Outcome.Success()})
	}
	return &d
}

// serial makes a callback safe to call from any goroutine, and nil when there is
// none.
func serial(f func(Progress)) func(Progress) {
	if f == nil {
		return nil
	}
	var mu sync.Mutex
	return func(p Progress) {
		mu.Lock()
		defer mu.Unlock()
		f(p)
	}
}

// since is seconds from a start.
func since(t time.Time) float64 { return time.Since(t).Seconds() }
