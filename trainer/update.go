package trainer

import (
	"context"
	"fmt"
	"math"

	"harness-s/model"
)

// updateStats is what one update reports.
type updateStats struct {
	Live       int // groups in the update
	Trajs      int // trajectories with an advantage
	NonZero    int // of these, advantage other than 0
	Tokens     int // live tokens
	Rows       int // rows computed per pass
	Micro      int // microbatches
	GradNorm   float64
	LR         float64
	Loss       LossStats
	Gap        GapStats
	Gate       GapDecision
	Masks      MaskStats
	Empty      bool
	TrainTotal int // rows over all passes
}

// optimBatch is one optimiser batch: trajectories of live groups, packed.
type optimBatch struct {
	seqs   []LossSeq
	micro  []*microbatch
	groups []*Group // by LossSeq.Group
}

// prepare decides which groups are live, computes advantages once inside each
// (R17) and packs. Groups without enough valid attempts or without contrast leave
// with their reason (R11, R18).
func prepare(cfg Config, groups []*Group, most packLimits) (*optimBatch, error) {
	b := &optimBatch{}
	var units [][]sequence
	var counts []int
	for _, g := range groups {
		ms := membersOf(g.Members())
		g.Drop = DropOf(ms, cfg.Rescue.MinGroup)
		if g.Kind == AllFail || g.Kind == Incomplete || g.Kind == RescueIncomplete {
			g.Drop = DropIncomplete
			if g.Kind == AllFail {
				g.Drop = DropAllFail
			}
		}
		if g.Drop != DropNone {
			continue
		}
		adv := Advantages(ms, cfg.GRPO.Normalize)
		if err := checkAdvantages(ms, adv); err != nil {
			return nil, fmt.Errorf("step %d, task %s: %w", g.Step, g.Task.ID, err)
		}
		for i := range ms {
			if !ms[i].Valid {
				continue
			}
			a := &g.Members()[i]
			seqs, cols := sequencesOf(a.Traj.Segments, len(b.seqs))
			b.seqs = append(b.seqs, LossSeq{
				Group: len(b.groups), Reward: ms[i].Reward, Advantage: adv[i],
				Sampler: cols.logProb, Turn: cols.turn, Truncated: a.Truncated(),
			})
			counts = append(counts, len(cols.logProb))
			units = append(units, seqs)
		}
		b.groups = append(b.groups, g)
	}
	var err error
	if b.micro, err = pack(units, most); err != nil {
		return nil, err
	}
	return b, checkPacked(b.micro, counts)
}

// checkAdvantages asserts |sum A| < 1e-6 n (method.md 3.11).
func checkAdvantages(ms []Member, adv []float64) error {
	sum, n := 0.0, 0
	for i, m := range ms {
		if m.Valid {
			sum, n = sum+adv[i], n+1
		}
	}
	if math.Abs(sum) >= 1e-6*float64(n) {
		return fmt.Errorf("check advantages: sum %g over %d attempts", sum, n)
	}
	return nil
}

// update makes cfg.GRPO.Updates optimiser steps on the live groups. With none it
// touches nothing (pitfalls.md row 55). It must run while nothing samples.
func (u *updater) update(ctx context.Context, step int, groups []*Group) (updateStats, error) {
	cfg, x := u.cfg, u.d.Learner
	b, err := prepare(cfg, groups, u.d.limits())
	if err != nil {
		return updateStats{}, err
	}
	st := updateStats{Live: len(b.groups), Trajs: len(b.seqs), Micro: len(b.micro), LR: learningRate(cfg.Optim, step, cfg.Run.Steps)}
	for _, m := range b.micro {
		st.Rows += len(m.IDs)
	}
	var gap Gap
	if PlanOld(cfg.GRPO) == OldTrainer { // masks must be known before the denominators
		if err := u.old(ctx, b); err != nil {
			return st, err
		}
		st.TrainTotal += st.Rows
	}
	loss, err := NewLoss(cfg.GRPO, b.seqs)
	if err != nil {
		return st, err
	}
	st.Tokens, st.Masks = loss.Tokens(), loss.Masks()
	for i, g := range b.groups {
		if r := loss.Dropped(i); r != DropNone {
			g.Drop = r
			st.Live--
		}
	}
	for _, s := range b.seqs {
		if s.Advantage != 0 {
			st.NonZero++
		}
	}
	if loss.Tokens() == 0 {
		st.Empty = true
		return st, nil
	}
	for n := range cfg.GRPO.Updates {
		if err := x.ZeroGrad(); err != nil {
			return st, &EngineError{err}
		}
		now := newTable(b.seqs)
		for _, m := range b.micro {
			if err := ctx.Err(); err != nil {
				return st, context.Cause(ctx)
			}
			part, err := u.micro(loss, m, now)
			if err != nil {
				return st, err
			}
			st.Loss.Add(part)
			st.TrainTotal += len(m.IDs)
		}
		if n == 0 {
			for i, s := range b.seqs {
				if err := gap.Add(s.Sampler, now[i], s.Turn); err != nil {
					return st, err
				}
			}
			st.Gap = gap.Stats()
			st.Gate = u.gate.Judge(st.Gap, cfg.GRPO)
			if err := st.Gate.Err(); err != nil {
				return st, err
			}
		}
		if st.GradNorm, err = x.GradNorm(); err != nil {
			return st, &EngineError{err}
		}
		if err := checkGradient(st.GradNorm, st.NonZero); err != nil {
			return st, err
		}
		err = x.Step(model.Hyper{
			LR: st.LR, Beta1: cfg.Optim.Betas[0], Beta2: cfg.Optim.Betas[1], Eps: cfg.Optim.Eps,
			Decay: cfg.Optim.WeightDecay, ClipNorm: cfg.Optim.Clip, GradNorm: st.GradNorm,
		})
		if err != nil {
			return st, &EngineError{err}
		}
	}
	return st, nil
}

// updater is the learning half of a run.
type updater struct {
	cfg  Config
	d    *Deps
	gate *GapGate
}

// newTable makes one column per trajectory.
func newTable(seqs []LossSeq) [][]float32 {
	t := make([][]float32, len(seqs))
	for i, s := range seqs {
		t[i] = make([]float32, len(s.Sampler))
	}
	return t
}

// old fills LossSeq.Old by one forward pass.
func (u *updater) old(ctx context.Context, b *optimBatch) error {
	t := newTable(b.seqs)
	for _, m := range b.micro {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		out, err := u.forward(m)
		if err != nil {
			return err
		}
		for i, a := range m.at {
			t[a.traj][a.tok] = out.LogProb[i]
		}
	}
	for i := range b.seqs {
		b.seqs[i].Old = t[i]
	}
	return nil
}

func (u *updater) forward(m *microbatch) (*model.Output, error) {
	out, err := u.d.Learner.Forward(&m.Batch)
	if err != nil {
		return nil, &EngineError{err}
	}
	if len(out.LogProb) != len(m.at) {
		return nil, &EngineError{fmt.Errorf("executor answered %d of %d targets", len(out.LogProb), len(m.at))}
	}
	return out, nil
}

// micro runs forward, coefficients and backward of one microbatch and notes the
// current log-probs in now.
func (u *updater) micro(loss *Loss, m *microbatch, now [][]float32) (LossStats, error) {
	var st LossStats
	out, err := u.forward(m)
	if err != nil {
		return st, err
	}
	// Pairs of each trajectory in token order.
	byTraj := map[int][]int{}
	var order []int
	for i, a := range m.at {
		if byTraj[a.traj] == nil {
			order = append(order, a.traj)
			byTraj[a.traj] = make([]int, len(now[a.traj]))
		}
		byTraj[a.traj][a.tok] = i
		now[a.traj][a.tok] = out.LogProb[i]
	}
	dLogP := make([]float32, len(m.at))
	var dEnt []float32
	for _, traj := range sorted(order) {
		at := byTraj[traj]
		lp, ent := make([]float32, len(at)), make([]float32, len(at))
		for tok, i := range at {
			lp[tok] = out.LogProb[i]
			if out.Entropy != nil {
				ent[tok] = out.Entropy[i]
			}
		}
		g, err := loss.Coefficients(traj, 0, lp, ent)
		if err != nil {
			return st, err
		}
		st.Add(g.Stats)
		for tok, i := range at {
			dLogP[i] = g.DLogP[tok]
		}
		if g.DEnt != nil {
			if dEnt == nil {
				dEnt = make([]float32, len(m.at))
			}
			for tok, i := range at {
				dEnt[i] = g.DEnt[tok]
			}
		}
	}
	if err := u.d.Learner.Backward(dLogP, dEnt); err != nil {
		return st, &EngineError{err}
	}
	return st, nil
}

// checkGradient stops on a gradient that is not finite, or absent although the
// batch has advantages (pitfalls.md row 58).
func checkGradient(norm float64, nonZero int) error {
	switch {
	case math.IsNaN(norm) || math.IsInf(norm, 0):
		return &Error{Op: "check gradient", Err: fmt.Errorf("%w: gradient norm is %v", ErrGate, norm),
			Hint: "the weights were not changed; resume from the last checkpoint with a lower optim.lr"}
	case norm == 0 && nonZero > 0:
		return &Error{Op: "check gradient", Err: fmt.Errorf("%w: gradient norm is 0 with %d trajectories that have an advantage", ErrGate, nonZero),
			Hint: "this is a fault of the program; please report it"}
	}
	return nil
}

// learningRate of a step (1-based): linear warm-up, then constant, or falling to 0
// at the end of the run.
func learningRate(o OptimConfig, step, steps int) float64 {
	if step <= o.Warmup {
		return o.LR * float64(step) / float64(o.Warmup)
	}
	done := float64(step-o.Warmup-1) / float64(max(steps-o.Warmup, 1))
	switch o.Schedule {
	case "linear":
		return o.LR * (1 - done)
	case "cosine":
		return o.LR * 0.5 * (1 + math.Cos(math.Pi*done))
	}
	return o.LR
}
