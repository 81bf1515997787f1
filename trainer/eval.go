package trainer

import (
	"context"
	"errors"

	"harness-s/env"
)

// Test-time modes (method.md 4.2).
const (
	ModeOriginal = "original" // the original harness for every task
	ModeRouted   = "routed"   // per task the router's first choice out of the whole pool
)

// EvalOptions select what Evaluate runs.
type EvalOptions struct {
	Split       env.Split
	Mode        string // ModeOriginal or ModeRouted
	K           int
	Attempts    int // per task, at least K
	Tasks       int // first n tasks of the split, 0 = all
	Step        int // part of every random key: the training step, 0 for a bare checkpoint
	Temperature float64
	Resamples   int
	Seed        uint64
	Recorder    env.Recorder // needed for the test split: the run manifest
	Reason      string       // why the test split is opened
	Progress    func(Progress)
}

// TaskScore is the result of one task.
type TaskScore struct {
	Task     string   `json:"task"`
	Group    string   `json:"group"`
	Harness  string   `json:"harness"`
	Valid    int      `json:"valid"`
	Success  int      `json:"success"`
	Missing  int      `json:"missing,omitempty"` // void after every re-run
	Outcomes []string `json:"outcomes"`
	Turns    int      `json:"turns"`
	Tokens   int      `json:"tokens"` // sampled
}

// EvalReport is one evaluation. Strict counts a missing attempt as a failure,
// Complete looks at tasks without missing attempts only.
type EvalReport struct {
	Step          int          `json:"step"`
	Split         env.Split    `json:"split"`
	Mode          string       `json:"mode"`
	K             int          `json:"k"`
	Attempts      int          `json:"attempts"`
	Tasks         int          `json:"tasks"`
	Missing       int          `json:"missing"` // tasks with missing attempts
	Pass1         Interval     `json:"pass1"`
	PassK         Interval     `json:"passk"`
	CompletePass1 float64      `json:"complete_pass1"`
	CompletePassK float64      `json:"complete_passk"`
	ByGroup       []GroupScore `json:"by_group"`
	PolicyVersion uint64       `json:"policy_version"`
	TaskDigest    string       `json:"task_digest"` // sha256 over the task ids in order
	Unseal        string       `json:"unseal,omitempty"`
	Seconds       float64      `json:"seconds"`
	Scores        []TaskScore  `json:"scores"`
}

// GroupScore is the part of a report on one task group.
type GroupScore struct {
	Group string  `json:"group"`
	Tasks int     `json:"tasks"`
	Pass1 float64 `json:"pass1"`
	PassK float64 `json:"passk"`
}

// Evaluate runs a split under the frozen policy and scores it.
func Evaluate(ctx context.Context, cfg Config, d *Deps, o EvalOptions) (*EvalReport, error) {
	return nil, errors.New("evaluate")
}
