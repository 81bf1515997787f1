package trainer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"harness-s/env"
	"harness-s/env/harness"
	"harness-s/model/chat"
)

// BenchStepOptions describe a synthetic GRPO step.
type BenchStepOptions struct {
	Groups, Attempts int
	Prompt, New      int // tokens
	Steps            int // measured steps after one warm-up, 0 = 3
	Vocab            int // ids are drawn below this
	Seed             uint64
}

// BenchStepReport is the result; the JSON keys are stable.
type BenchStepReport struct {
	Groups           int     `json:"groups"`
	Attempts         int     `json:"attempts"`
	Prompt           int     `json:"prompt"`
	New              int     `json:"new"`
	Steps            int     `json:"steps"`
	StepSeconds      float64 `json:"step_seconds"` // median
	SampleSeconds    float64 `json:"sample_seconds"`
	TrainSeconds     float64 `json:"train_seconds"`
	RolloutsPerS     float64 `json:"rollouts_per_s"`
	SampleTokensPerS float64 `json:"sample_tokens_per_s"`
	TrainTokensPerS  float64 `json:"train_tokens_per_s"` // prompt counted once per attempt, as a trainer without sharing would compute
	TrainRows        int     `json:"train_rows"`         // rows really computed
	GapMax           float64 `json:"gap_max"`
}

// BenchStep samples groups of random prompts and makes one update per step, with
// the prompt of a group computed once in sampling and once in training. It changes
// the weights of the loaded model.
func BenchStep(ctx context.Context, cfg Config, d *Deps, o BenchStepOptions) (*BenchStepReport, error) {
	if d.Learner == nil {
		return nil, &Error{Op: "bench step", Err: errors.New("no executor"), Hint: "assemble with Train"}
	}
	if o.Groups < 1 || o.Attempts < 2 || o.Prompt < 2 || o.New < 1 || o.Vocab < 2 {
		return nil, hinted("bench step", "", "%d groups x %d attempts, %d + %d tokens, vocabulary %d", o.Groups, o.Attempts, o.Prompt, o.New, o.Vocab)
	}
	if o.Steps == 0 {
		o.Steps = 3
	}
	cfg.Model.MaxLen = max(cfg.Model.MaxLen, o.Prompt+o.New)
	cfg.Rescue.MinGroup = 2
	rep := &BenchStepReport{Groups: o.Groups, Attempts: o.Attempts, Prompt: o.Prompt, New: o.New, Steps: o.Steps}
	bench := *d
	bench.Stop = nil // every attempt samples all its tokens
	var total, sample, train []float64
	err := withEngine(ctx, cfg, &bench, func(ctx context.Context, r *rollouts) error {
		u := &updater{cfg: cfg, d: &bench, gate: &GapGate{}}
		for step := 0; step <= o.Steps; step++ {
			start := time.Now()
			groups, err := benchGroups(ctx, r, cfg, o, step)
			if err != nil {
				return err
			}
			sampled := since(start)
			var st updateStats
			err = r.sched.Exclusive(ctx, func() error {
				return bench.training(func() (err error) {
					st, err = u.update(ctx, step+1, groups)
					return err
				})
			})
			if err != nil {
				return err
			}
			all := since(start)
			rep.TrainRows, rep.GapMax = st.Rows, max(rep.GapMax, st.Gap.Max)
			if step > 0 { // the first warms caches and buffers up
				total, sample, train = append(total, all), append(sample, sampled), append(train, all-sampled)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	rep.StepSeconds, rep.SampleSeconds, rep.TrainSeconds = median(total), median(sample), median(train)
	n := float64(o.Groups * o.Attempts)
	rep.RolloutsPerS = n / rep.StepSeconds
	rep.SampleTokensPerS = n * float64(o.New) / rep.SampleSeconds
	rep.TrainTokensPerS = n * float64(o.Prompt+o.New) / rep.TrainSeconds
	return rep, nil
}

// benchGroups samples one step. Alternating rewards give every group contrast.
func benchGroups(ctx context.Context, r *rollouts, cfg Config, o BenchStepOptions, step int) ([]*Group, error) {
	groups := make([]*Group, o.Groups)
	for g := range groups {
		groups[g] = &Group{Step: step, Index: g, Task: env.TaskRef{ID: fmt.Sprintf("bench-%d", g)}, Kind: Kept, Base: make([]Attempt, o.Attempts)}
	}
	sampling := evalSampling(cfg.Rollout.Temperature)
	err := each(ctx, o.Groups*o.Attempts, func(ctx context.Context, i int) error {
		g, a := i/o.Attempts, i%o.Attempts
		prompt := make([]int32, o.Prompt)
		for j := range prompt {
			prompt[j] = int32(uniform(o.Seed, "bench", step*o.Prompt+j, groups[g].Task.ID) * float64(o.Vocab))
		}
		s := r.sched.Open(KindAttempt, sampling, o.Attempts)
		defer s.Close()
		c, err := s.Generate(ctx, harness.Request{Append: prompt, MaxNew: o.New, Key: harness.RNGKey{Seed: o.Seed, Step: step, Task: groups[g].Task.ID, Attempt: a}})
		if err != nil {
			return err
		}
		seg := harness.LedgerSegment{IDs: append(prompt, c.Tokens...), LogProb: append(make([]float32, o.Prompt), c.LogProb...)}
		seg.Kind, seg.Turn = make([]chat.Kind, len(seg.IDs)), make([]int32, len(seg.IDs))
		for j := o.Prompt; j < len(seg.IDs); j++ {
			seg.Kind[j], seg.Turn[j] = chat.KindPolicy, 1
		}
		out := env.Failed
		if a%2 == 0 {
			out = env.Solved
		}
		groups[g].Base[a] = Attempt{Task: groups[g].Task, Index: a, Outcome: out, Traj: harness.Trajectory{Segments: []harness.LedgerSegment{seg}}}
		return nil
	})
	return groups, err
}

func median(xs []float64) float64 {
	s := slices.Sorted(slices.Values(xs))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

// benchEnv stands where a run has its environment; a benchmark never opens an attempt.
type benchEnv struct{ env.Env }

// Health always passes.
func (benchEnv) Health(context.Context) error { return nil }
