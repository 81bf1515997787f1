package harness

import "context"

// NewEpisode renders the opening prompt.
func NewEpisode(c Config) (*Episode, error) { return nil, nil }

// Episode joins one harness with one attempt.
type Episode struct{}

// Next returns the pending request, or done.
func (e *Episode) Next(ctx context.Context) (Request, bool, error) { return Request{}, true, nil }

// Deliver hands in the sampled turn.
func (e *Episode) Deliver(c Completion) error { return nil }

// Trajectory is the finished episode.
func (e *Episode) Trajectory() Trajectory { return Trajectory{} }

// Close releases the attempt.
func (e *Episode) Close(ctx context.Context) error { return nil }
