package trainer

import (
	"fmt"
	"math"
	"sort"
	"strings"
)

// GapStats compares the sampler's log-probs with the trainer's over the policy
// tokens of a step, before any update (method.md 3.9). Units are nats.
type GapStats struct {
	Tokens    int       `json:"tokens"`
	Mean      float64   `json:"mean"` // of |trainer - sampler|
	P99       float64   `json:"p99"`
	Max       float64   `json:"max"`
	Pearson   float64   `json:"pearson"` // 1 when either vector is constant
	ESS       float64   `json:"ess"`     // (sum w)^2 / (n sum w^2), 1 = all weights equal
	NonFinite int       `json:"non_finite"`
	ByTurn    []float64 `json:"by_turn,omitempty"` // mean |gap| by turn; index = turn
}

// Gap collects pairs of log-probs; the zero value is ready. Pairs may be added in
// any order of calls, but the order is part of the result's last bits.
type Gap struct {
	abs, sampler, trainer []float64
	turnSum               []float64
	turnN                 []int
	sumW, sumW2           float64
	bad                   int
}

// Add takes equally long columns; turn may be nil.
func (g *Gap) Add(sampler, trainer []float32, turn []int32) error {
	if len(sampler) != len(trainer) || turn != nil && len(turn) != len(sampler) {
		return fmt.Errorf("compare log-probs: %d sampled, %d trained, %d turns", len(sampler), len(trainer), len(turn))
	}
	for i := range sampler {
		s, t := float64(sampler[i]), float64(trainer[i])
		d := t - s
		if math.IsNaN(d) || math.IsInf(d, 0) {
			g.bad++
			continue
		}
		g.abs, g.sampler, g.trainer = append(g.abs, math.Abs(d)), append(g.sampler, s), append(g.trainer, t)
		w := math.Exp(clampLog(d))
		g.sumW += w
		g.sumW2 += w * w
		if turn != nil {
			for len(g.turnN) <= int(turn[i]) {
				g.turnN, g.turnSum = append(g.turnN, 0), append(g.turnSum, 0)
			}
			g.turnN[turn[i]]++
			g.turnSum[turn[i]] += math.Abs(d)
		}
	}
	return nil
}

// Stats reduces what was added.
func (g *Gap) Stats() GapStats {
	n := len(g.abs)
	st := GapStats{Tokens: n, NonFinite: g.bad, Pearson: 1, ESS: 1}
	if n == 0 {
		return st
	}
	sorted := append([]float64(nil), g.abs...)
	sort.Float64s(sorted)
	for _, a := range g.abs {
		st.Mean += a
	}
	st.Mean /= float64(n)
	st.P99 = sorted[int(math.Ceil(0.99*float64(n)))-1]
	st.Max = sorted[n-1]
	st.Pearson = pearson(g.sampler, g.trainer)
	st.ESS = g.sumW * g.sumW / (float64(n) * g.sumW2)
	for i, k := range g.turnN {
		v := 0.0
		if k > 0 {
			v = g.turnSum[i] / float64(k)
		}
		st.ByTurn = append(st.ByTurn, v)
	}
	return st
}

func pearson(x, y []float64) float64 {
	n := float64(len(x))
	mx, my := 0.0, 0.0
	for i := range x {
		mx += x[i]
		my += y[i]
	}
	mx, my = mx/n, my/n
	var xx, yy, xy float64
	for i := range x {
		dx, dy := x[i]-mx, y[i]-my
		xx, yy, xy = xx+dx*dx, yy+dy*dy, xy+dx*dy
	}
	if xx == 0 || yy == 0 {
		return 1 // a constant vector has no correlation; the mean gap judges it
	}
	return xy / math.Sqrt(xx*yy)
}

// GapGate judges the gap of every step. It is part of the state a checkpoint
// stores, because its trend test looks back to the first steps.
type GapGate struct {
	First []float64 `json:"first"` // mean gaps of the first window steps
	Last  []float64 `json:"last"`  // of the most recent ones, oldest first
}

// GapDecision is the verdict on one step.
type GapDecision struct {
	Stop bool
	Warn bool
	Why  []string // one line per threshold that was crossed
}

// Judge adds a step and decides (method.md 3.9): warn above gap_warn, stop above
// gap_stop, below gap_corr, at any non-finite value, or when the mean of the last
// window exceeds gap_trend times that of the first. A step without tokens changes
// nothing.
func (g *GapGate) Judge(st GapStats, c GRPOConfig) GapDecision {
	var d GapDecision
	stop := func(format string, args ...any) {
		d.Stop = true
		d.Why = append(d.Why, fmt.Sprintf(format, args...))
	}
	if st.NonFinite > 0 {
		stop("%d log-probs are not finite", st.NonFinite)
	}
	if st.Tokens == 0 {
		return d
	}
	if st.Mean > c.GapStop {
		stop("mean log-prob gap %.4g nats > %g (grpo.gap_stop)", st.Mean, c.GapStop)
	} else if st.Mean > c.GapWarn {
		d.Warn = true
		d.Why = append(d.Why, fmt.Sprintf("mean log-prob gap %.4g nats > %g (grpo.gap_warn)", st.Mean, c.GapWarn))
	}
	if st.Pearson < c.GapCorr {
		stop("log-prob correlation %.12g < %g (grpo.gap_corr)", st.Pearson, c.GapCorr)
	}
	if len(g.First) < c.GapWindow {
		g.First = append(g.First, st.Mean)
		return d
	}
	g.Last = append(g.Last, st.Mean)
	if k := len(g.Last) - c.GapWindow; k > 0 {
		g.Last = append([]float64(nil), g.Last[k:]...)
	}
	if len(g.Last) == c.GapWindow {
		first, last := mean(g.First), mean(g.Last)
		if last > c.GapTrend*first && last > c.GapFloor {
			stop("mean log-prob gap of the last %d steps %.4g nats > %g x the first %d steps' %.4g (grpo.gap_trend)", c.GapWindow, last, c.GapTrend, c.GapWindow, first)
		}
	}
	return d
}

// Err is the error of a decision to stop, or nil.
func (d GapDecision) Err() error {
	if !d.Stop {
		return nil
	}
	return &Error{Op: "check log-prob gap", Err: fmt.Errorf("%w: %s", ErrGate, strings.Join(d.Why, "; ")),
		Hint: "sampler and trainer disagree: the update would follow a wrong gradient. Check with: hs doctor --deep"}
}

func mean(x []float64) float64 {
	s := 0.0
	for _, v := range x {
		s += v
	}
	return s / float64(len(x))
}
