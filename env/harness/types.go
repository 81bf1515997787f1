package harness

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"harness-s/env"
	"harness-s/model/chat"
)

// RNGKey names one turn's random stream. It is data only: the sampler derives
// its counter-based key from it, so the order in which attempts finish cannot
// change a token.
type RNGKey struct {
	Seed    uint64 `json:"seed"`
	Step    int    `json:"step"`
	Task    string `json:"task"`
	Phase   string `json:"phase"` // base, rescue, eval, retry
	Harness string `json:"harness"`
	Attempt int    `json:"attempt"`
	Turn    int    `json:"turn"`
}

// Request asks the policy for one turn.
type Request struct {
	Append  []int32 // context tokens since the last Request; the whole prompt on the first
	Restart bool    // the history was rewritten: Append is the whole context again
	MaxNew  int     // upper bound on sampled tokens, stop token included
	Key     RNGKey
}

// Finish says why sampling ended.
type Finish uint8

// Finish values. Aborted makes Next return the same Request again.
const (
	Stop Finish = iota
	Length
	Context
	Aborted
)

func (f Finish) String() string {
	return [...]string{"stop", "length", "context", "aborted"}[min(int(f), 3)]
}

// Completion is one sampled turn. Tokens holds the stop token when Finish is
// Stop. LogProb has one entry per token.
type Completion struct {
	Tokens  []int32
	LogProb []float32
	Finish  Finish
}

// Config joins a harness, an attempt and the text functions of a model.
type Config struct {
	Spec     *Spec
	Attempt  env.Attempt
	Task     env.TaskRef
	Encoder  chat.Encoder
	Decode   func([]int32) string
	Renderer chat.Renderer
	Stop     []int32 // ids that end a turn; the first is the one the template writes

	MaxTurns   int // model turns, equal for every harness
	MaxNew     int // sampled tokens per turn
	MaxContext int // tokens of context, sampled ones included

	Key         RNGKey // Turn is filled in by the episode
	StepTimeout time.Duration
	// Demos are the demonstrations that a `demo` op may name, by id.
	Demos map[string]string
	// Lenient accepts near-miss tool-call syntax (parse ops switch it on too).
	Lenient bool
}

// LedgerSegment is one uninterrupted context. The four columns have equal
// length; LogProb is 0 where Kind is not chat.KindPolicy.
type LedgerSegment struct {
	IDs     []int32
	Kind    []chat.Kind
	LogProb []float32
	Turn    []int32 // 0 for the opening prompt, then the turn that the token belongs to (1-based)
}

// Len is the number of tokens.
func (s *LedgerSegment) Len() int { return len(s.IDs) }

// PolicyTokens counts the tokens that may carry gradient.
func (s *LedgerSegment) PolicyTokens() int {
	n := 0
	for _, k := range s.Kind {
		if k == chat.KindPolicy {
			n++
		}
	}
	return n
}

func (s *LedgerSegment) add(ids []int32, kind chat.Kind, lp []float32, turn int) {
	for i, id := range ids {
		p := float32(0)
		if kind == chat.KindPolicy && i < len(lp) {
			p = lp[i]
		}
		s.IDs = append(s.IDs, id)
		s.Kind = append(s.Kind, kind)
		s.LogProb = append(s.LogProb, p)
		s.Turn = append(s.Turn, int32(turn))
	}
}

// TurnRecord is one turn as text, for people.
type TurnRecord struct {
	Turn      int          `json:"turn"`
	Output    string       `json:"output"` // what the policy wrote
	Finish    string       `json:"finish"`
	Actions   []ActionText `json:"actions,omitempty"`
	Reminders []string     `json:"reminders,omitempty"`
	Malformed []string     `json:"malformed,omitempty"`
}

// ActionText is one tool call and what came back.
type ActionText struct {
	Tool        string `json:"tool"`
	Args        string `json:"args"`
	Observation string `json:"observation"`
	Kind        string `json:"kind"`
	Blocked     string `json:"blocked,omitempty"` // id of the guard that refused it
}

// Trajectory is the finished episode. Immutable.
type Trajectory struct {
	TaskID, HarnessID, HarnessName string
	Segments                       []LedgerSegment
	Verdict                        env.Verdict
	Outcome                        env.Outcome
	Turns                          int
	Transcript                     []TurnRecord
	Facts                          map[string]any // behaviour summary (facts.go)
	Causes                         []string       // cause codes of a valid failure (causes.go)
	InitDigest                     string
	FaultReason                    string
	BlockedSteps                   int
	HookErrors                     int // hooks that failed and degraded to "no effect"
}

// NumTokens is the ledger length over all segments.
func (t *Trajectory) NumTokens() int {
	n := 0
	for i := range t.Segments {
		n += t.Segments[i].Len()
	}
	return n
}

// Check verifies the ledger's invariants: equal columns, log-probs only on
// policy tokens, turns that never decrease.
func (t *Trajectory) Check() error {
	var errs []error
	for i := range t.Segments {
		s := &t.Segments[i]
		if n := len(s.IDs); len(s.Kind) != n || len(s.LogProb) != n || len(s.Turn) != n {
			errs = append(errs, fmt.Errorf("check ledger of %s under %s: segment %d has %d ids, %d kinds, %d log-probs, %d turns",
				t.TaskID, t.HarnessID, i, n, len(s.Kind), len(s.LogProb), len(s.Turn)))
			continue
		}
		for j := range s.IDs {
			if s.Kind[j] != chat.KindPolicy && s.LogProb[j] != 0 {
				errs = append(errs, fmt.Errorf("check ledger of %s: segment %d token %d is %s and has log-prob %g", t.TaskID, i, j, s.Kind[j], s.LogProb[j]))
				break
			}
			if j > 0 && s.Turn[j] < s.Turn[j-1] {
				errs = append(errs, fmt.Errorf("check ledger of %s: segment %d token %d goes back from turn %d to %d", t.TaskID, i, j, s.Turn[j-1], s.Turn[j]))
				break
			}
		}
	}
	return errors.Join(errs...)
}

// Sentinels callers branch on.
var (
	ErrNotAsked = errors.New("no request is pending")
	ErrDone     = errors.New("episode is done")
)

// Error is a problem the user can fix.
type Error struct {
	Op   string
	Err  error
	Hint string
}

func (e *Error) Error() string { return e.Op + ": " + e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// Digest is the SHA-256 of the ledger: ids, producers and turns of every
// segment. Log-probs are left out, so it compares contexts, not samplers.
func (t *Trajectory) Digest() string {
	h := sha256.New()
	var b []byte
	for i := range t.Segments {
		s := &t.Segments[i]
		b = binary.LittleEndian.AppendUint32(b[:0], uint32(len(s.IDs)))
		for j := range s.IDs {
			b = binary.LittleEndian.AppendUint32(b, uint32(s.IDs[j]))
			b = append(b, byte(s.Kind[j]))
			b = binary.LittleEndian.AppendUint32(b, uint32(s.Turn[j]))
		}
		h.Write(b)
	}
	return hex.EncodeToString(h.Sum(nil))
}
