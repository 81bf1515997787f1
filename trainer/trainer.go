package trainer

import (
	"context"
	"errors"
)

// ErrInterrupted says that a run stopped on request after a clean checkpoint
// (exit code 130).
var ErrInterrupted = errors.New("interrupted after a checkpoint")

// Progress is a report from a long phase.
type Progress struct {
	Phase string // evidence, eval, collect, rescue, update, demos, sft, corpus, bench
	Done  int
	Total int // 0 = unknown
	Note  string
}

// Event is one line of events.jsonl: what happened beside the metrics.
type Event struct {
	Step  int            `json:"step"`
	Event string         `json:"event"` // start, resume, evidence, eval, checkpoint, warning, gate, empty_step, breaker, interrupted, done
	Text  string         `json:"text,omitempty"`
	Data  map[string]any `json:"data,omitempty"`
}

// RunOptions are where a run writes and how it is stopped.
type RunOptions struct {
	Dir      *RunDir // nil keeps nothing on disk
	Resume   int     // step of the checkpoint the model was loaded from, 0 = fresh start
	Sinks    []Sink  // one record per step; closed by the caller
	Progress func(Progress)
	Event    func(Event)
	// Interrupt, when closed, lets the step finish, saves a checkpoint and ends
	// with ErrInterrupted. Cancelling the context stops at once, without one.
	Interrupt <-chan struct{}
}

// Summary is the result of a run; the JSON keys are stable.
type Summary struct {
	Pass1Before     float64 `json:"pass1_before"`
	Pass1After      float64 `json:"pass1_after"`
	Pass3Before     float64 `json:"pass3_before"`
	Pass3After      float64 `json:"pass3_after"`
	Groups          int     `json:"groups"`
	AllFailGroups   int     `json:"all_fail_groups"`
	RescuedGroups   int     `json:"rescued_groups"`   // groups that got rescue attempts
	RescueSuccesses int     `json:"rescue_successes"` // of these, with at least one success
	Steps           int     `json:"steps"`
	TrainSeconds    float64 `json:"train_seconds"`
	TotalSeconds    float64 `json:"total_seconds"`
	PeakRSSMiB      float64 `json:"peak_rss_mib"`
	WeightsSHA256   string  `json:"weights_sha256"`

	Before *EvalReport `json:"before,omitempty"` // first evaluation, with intervals
	After  *EvalReport `json:"after,omitempty"`  // last one
	Cost   Cost        `json:"cost"`
}

// Cost counts attempts by ledger line (method.md 7.5). Routing and profiling
// never mix with training rollouts.
type Cost struct {
	Base      int `json:"base_attempts"`
	Rescue    int `json:"rescue_attempts"`
	Reruns    int `json:"void_reruns"`
	Profiling int `json:"profiling_attempts"`
	Eval      int `json:"eval_attempts"`
	Routing   int `json:"routing_decisions"`
}

// Run trains. It returns the summary also with ErrInterrupted; an error wrapping
// ErrGate says that a gate stopped the run.
func Run(ctx context.Context, cfg Config, d *Deps, o RunOptions) (*Summary, error) {
	return nil, errors.New("run")
}
