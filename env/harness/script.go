package harness

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"harness-s/env"
	"harness-s/model/chat"
)

// ErrScriptEnded reports that a script ran out before the episode was done.
var ErrScriptEnded = errors.New("script ended before the episode")

// Play drives an episode with a scripted policy, so that ledger and mask are
// those of reinforcement learning. next gives the text of each turn (1-based),
// knowing whether a guard refused an action of the turn before, or ok = false
// when the script has ended. Texts come from demonstrations: they may hold the
// template's own literals (<tool_call>) and are closed with the first stop
// token. Log-probs are 0. The episode is not closed.
func Play(ctx context.Context, e *Episode, enc chat.Encoder, next func(turn int, refused bool) (text string, ok bool)) (Trajectory, error) {
	for {
		req, done, err := e.Next(ctx)
		if err != nil || done {
			return e.Trajectory(), err
		}
		turn := e.Turn() + 1
		text, ok := next(turn, e.Blocked())
		if !ok {
			return e.Trajectory(), fmt.Errorf("play script on %s: turn %d: %w", e.c.Task.ID, turn, ErrScriptEnded)
		}
		ids := append(enc.Encode(text), e.c.Stop[0])
		if len(ids) > req.MaxNew {
			return e.Trajectory(), fmt.Errorf("play script on %s: turn %d has %d tokens, the limit is %d", e.c.Task.ID, turn, len(ids), req.MaxNew)
		}
		if err := e.Deliver(Completion{Tokens: ids, LogProb: make([]float32, len(ids)), Finish: Stop}); err != nil {
			return e.Trajectory(), err
		}
	}
}

// RunScripted plays turn texts in order. A turn that a guard refuses is
// repeated, as a policy that heeds the guard would.
func RunScripted(ctx context.Context, e *Episode, turns []string, enc chat.Encoder) (Trajectory, error) {
	i := -1
	return Play(ctx, e, enc, func(_ int, refused bool) (string, bool) {
		if !refused {
			i++
		}
		if i >= len(turns) {
			return "", false
		}
		return turns[i], true
	})
}

// Smoke is the part of the compliance gate that needs episodes (envs.md 5.8):
// a known-good script, played twice from the task's initial state, must end the
// same way both times, without harness fault or failing hook, and still be
// graded as solved. It also returns the ledger's digest: a candidate whose
// digests equal a sibling's on every smoke task is a duplicate. open must give a
// fresh episode of the same task under the candidate each time.
func Smoke(ctx context.Context, open func() (*Episode, error), turns []string, enc chat.Encoder) (digest string, problems []Problem, err error) {
	for i := range 2 {
		e, err := open()
		if err != nil {
			return "", nil, fmt.Errorf("smoke episode: %w", err)
		}
		t, err := RunScripted(ctx, e, turns, enc)
		if cerr := e.Close(ctx); cerr != nil && err == nil {
			err = cerr
		}
		if t.Outcome.Class() == env.ClassInfra && t.Outcome != 0 {
			return "", nil, fmt.Errorf("smoke episode of %s: void: %s", t.TaskID, t.FaultReason)
		}
		switch {
		case err != nil:
			problems = append(problems, Problem{Check: "liveness", Text: err.Error()})
		case t.Outcome == env.HarnessFault || t.HookErrors > 0:
			problems = append(problems, Problem{Check: "liveness", Text: fmt.Sprintf("%s, %d failing hooks: %s", t.Outcome, t.HookErrors, t.FaultReason)})
		case !t.Success():
			problems = append(problems, Problem{Check: "protocol", Text: fmt.Sprintf("the good script of %s ends as %s", t.TaskID, t.Outcome)})
		}
		d := t.Digest()
		if i == 1 && d != digest {
			problems = append(problems, Problem{Check: "determinism", Text: fmt.Sprintf("two replays of %s give different ledgers", t.TaskID)})
		}
		digest = d
		if len(problems) > 0 {
			break
		}
	}
	return digest, slices.Clip(problems), nil
}
