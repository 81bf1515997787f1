package trainer

import (
	"context"
	"errors"
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
// the prompt of a group computed once in sampling and once in training.
func BenchStep(ctx context.Context, cfg Config, d *Deps, o BenchStepOptions) (*BenchStepReport, error) {
	return nil, errors.New("bench step")
}
