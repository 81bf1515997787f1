package router

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// ErrReplay says that a recorded decision does not follow from its evidence.
var ErrReplay = errors.New("replay differs from the record")

// Query is the question a decision answered.
func (d *Decision) Query() Query {
	return Query{Run: d.Run, TaskID: d.TaskID, TaskText: d.TaskText, Group: d.Group, Purpose: d.Purpose, Step: d.Step, PolicyVersion: d.PolicyVersion}
}

// Replay recomputes a decision from its record and the evidence version it names,
// with no model and no network, and returns the ids it chooses. Ranking, scores,
// repaired votes and choice must equal the record bit for bit; otherwise the error
// wraps ErrReplay and names the first difference.
func Replay(d Decision, v *View) ([]string, error) {
	fail := func(format string, args ...any) ([]string, error) {
		return nil, fmt.Errorf("replay decision of step %d on %s: %w: %s", d.Step, d.TaskID, ErrReplay, fmt.Sprintf(format, args...))
	}
	switch {
	case hashText(d.TaskText) != d.TextHash:
		return fail("task text has another hash")
	case v.Version() != d.EvidenceVersion || v.Digest() != d.EvidenceDigest:
		return fail("evidence is version %d (%.12s), record names %d (%.12s)", v.Version(), v.Digest(), d.EvidenceVersion, d.EvidenceDigest)
	case v.PoolDigest() != d.PoolDigest:
		return fail("evidence is of pool %.12s, record names %.12s", v.PoolDigest(), d.PoolDigest)
	case len(d.Chosen) == 0 || len(d.Chosen) > len(d.Candidates):
		return fail("%d chosen of %d candidates", len(d.Chosen), len(d.Candidates))
	}
	rule, err := d.Params.ranker().Rank(context.Background(), d.Query(), d.Candidates, v)
	if err != nil {
		return nil, fmt.Errorf("replay decision on %s: %w", d.TaskID, err)
	}
	again := Decision{TaskID: d.TaskID, Candidates: d.Candidates, Params: d.Params, Votes: slices.Clone(d.Votes)}
	if err := again.decide(rule, len(d.Chosen)); err != nil {
		return nil, err
	}
	for i, vote := range again.Votes {
		if vote.Status != d.Votes[i].Status || !slices.Equal(vote.Repaired, d.Votes[i].Repaired) {
			return fail("vote %d of %s repairs to another order", i, vote.Voter)
		}
	}
	switch {
	case !slices.Equal(again.Rule, d.Rule):
		return fail("%s ranking is %v, record has %v", d.Params.Base, again.Rule, d.Rule)
	case !slices.Equal(again.Fused, d.Fused):
		return fail("fused ranking is %v, record has %v", again.Fused, d.Fused)
	case !slices.Equal(again.Final, d.Final):
		return fail("final ranking is %v, record has %v", again.Final, d.Final)
	case again.Fallback != d.Fallback || again.KendallW != d.KendallW || again.BordaOverlap != d.BordaOverlap:
		return fail("fallback %v, W %v, overlap %d; record has %v, %v, %d", again.Fallback, again.KendallW, again.BordaOverlap, d.Fallback, d.KendallW, d.BordaOverlap)
	case !slices.Equal(again.Chosen, d.Chosen):
		return fail("choice is %v, record has %v", again.Chosen, d.Chosen)
	}
	return again.Chosen, nil
}

// Counterfactual scores another router on logged rescues. Harnesses that were not
// run are unknown, not failures.
type Counterfactual struct {
	With      string  `json:"with"`
	Decisions int     `json:"decisions"`
	Skipped   int     `json:"skipped"`  // decisions it cannot rank: no votes, or no outcomes
	Coverage  float64 `json:"coverage"` // mean share of its choice that was run
	Known     int     `json:"known"`    // harnesses of its choice with a valid outcome
	Successes int     `json:"successes"`
	Rescued   int     `json:"rescued"` // decisions with a known success in its choice
	Logged    int     `json:"logged_rescued"`
}

// Rate is the success share of its known harnesses, 0 when none is known.
func (c Counterfactual) Rate() float64 {
	if c.Known == 0 {
		return 0
	}
	return float64(c.Successes) / float64(c.Known)
}

// Compare applies another router (rule, random, rrf or borda) to logged rescue
// decisions. view returns the stored evidence of a version; seed keys random.
func Compare(ctx context.Context, ds []Decision, view func(version int) (*View, error), with string, seed uint64) (Counterfactual, error) {
	out := Counterfactual{With: with}
	for _, d := range ds {
		if d.Purpose != Rescue || len(d.Outcomes) == 0 {
			out.Skipped++
			continue
		}
		v, err := view(d.EvidenceVersion)
		if err != nil {
			return out, fmt.Errorf("compare routers: %w", err)
		}
		order, ok, err := alternative(ctx, d, v, with, seed)
		if err != nil {
			return out, fmt.Errorf("compare routers on %s: %w", d.TaskID, err)
		}
		if !ok {
			out.Skipped++
			continue
		}
		out.Decisions++
		choice := order[:len(d.Chosen)]
		ran, hit, logged := 0, false, false
		for _, o := range d.Outcomes {
			logged = logged || o.Success
			if !slices.Contains(choice, o.ID) {
				continue
			}
			ran++
			if o.Valid {
				out.Known++
			}
			if o.Success {
				out.Successes++
				hit = true
			}
		}
		out.Coverage += float64(ran) / float64(len(choice))
		if hit {
			out.Rescued++
		}
		if logged {
			out.Logged++
		}
	}
	if out.Decisions > 0 {
		out.Coverage /= float64(out.Decisions)
	}
	return out, nil
}

func alternative(ctx context.Context, d Decision, v *View, with string, seed uint64) ([]string, bool, error) {
	switch with {
	case "rule":
		r := RuleRanker{A: d.Params.A, M: d.Params.M}
		rs, err := r.Rank(ctx, d.Query(), d.Candidates, v)
		return ids(rs), true, err
	case "random":
		rs, err := RandomRanker{Seed: seed}.Rank(ctx, d.Query(), d.Candidates, v)
		return ids(rs), true, err
	case "rrf", "borda":
		var votes [][]string
		for _, vote := range d.Votes {
			if vote.Status == VoteOK {
				votes = append(votes, vote.Repaired)
			}
		}
		if len(votes) < d.Params.Quorum {
			return nil, false, nil
		}
		rs, err := Fuse(with, votes, ids(d.Rule), d.Params.RRFK)
		return ids(rs), true, err
	}
	return nil, false, fmt.Errorf("router %q, want rule, random, rrf or borda", with)
}
