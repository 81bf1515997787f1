package harness

import (
	"context"
	"errors"
	"fmt"

	"harness-s/model/chat"
)

// ErrScriptEnded reports that a script ran out before the episode was done.
var ErrScriptEnded = errors.New("script ended before the episode")

// RunScripted plays turn texts through the ordinary episode, so that ledger and
// mask are those of reinforcement learning: each text is encoded as policy
// tokens and closed with the first stop token. A turn that a guard refuses is
// repeated, as a policy that follows the guard would. Texts come from
// demonstrations and may hold the template's own literals (<tool_call>).
// Log-probs are 0. The episode is not closed.
func RunScripted(ctx context.Context, e *Episode, turns []string, enc chat.Encoder) (Trajectory, error) {
	for i := 0; ; {
		req, done, err := e.Next(ctx)
		if err != nil {
			return e.Trajectory(), err
		}
		if done {
			return e.Trajectory(), nil
		}
		if i > 0 && e.Blocked() {
			i--
		}
		if i == len(turns) {
			return e.Trajectory(), fmt.Errorf("play script of %d turns on %s: %w", len(turns), e.c.Task.ID, ErrScriptEnded)
		}
		ids := append(enc.Encode(turns[i]), e.c.Stop[0])
		if len(ids) > req.MaxNew {
			return e.Trajectory(), fmt.Errorf("play script on %s: turn %d has %d tokens, the limit is %d", e.c.Task.ID, i+1, len(ids), req.MaxNew)
		}
		if err := e.Deliver(Completion{Tokens: ids, LogProb: make([]float32, len(ids)), Finish: Stop}); err != nil {
			return e.Trajectory(), err
		}
		i++
	}
}
