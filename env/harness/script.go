package harness

import (
	"context"

	"harness-s/model/chat"
)

// RunScripted feeds turn texts through the ordinary episode.
func RunScripted(ctx context.Context, e *Episode, turns []string, enc chat.Encoder) (Trajectory, error) {
	return Trajectory{}, nil
}
