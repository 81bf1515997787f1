package trainer

import (
	"context"
	"errors"

	"harness-s/env"
	"harness-s/env/harness"
	"harness-s/model/chat"
)

// PlayOptions select one episode.
type PlayOptions struct {
	Task        string // id of a train or validation task
	Harness     string // id or name; empty = original
	Seed        uint64
	Attempt     int
	Temperature float64
	// Span, when set, receives the ledger piece by piece while the episode runs.
	Span func(PlaySpan)
}

// PlaySpan is a run of tokens of one producer.
type PlaySpan struct {
	Kind    chat.Kind `json:"kind"`
	Turn    int       `json:"turn"`
	Text    string    `json:"text"`
	Tokens  int       `json:"tokens"`
	LogProb float64   `json:"log_prob,omitempty"` // sum over a policy span, nats
}

// PlayReport is one finished episode.
type PlayReport struct {
	Task       env.TaskRef        `json:"task"`
	Harness    string             `json:"harness"`
	Spans      []PlaySpan         `json:"spans"`
	Outcome    env.Outcome        `json:"outcome"`
	Success    bool               `json:"success"`
	Turns      int                `json:"turns"`
	Trajectory harness.Trajectory `json:"-"`
}

// Play runs one episode of a train or validation task.
func Play(ctx context.Context, cfg Config, d *Deps, o PlayOptions) (*PlayReport, error) {
	return nil, errors.New("play")
}
