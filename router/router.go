// Package router chooses which sibling harnesses an all-fail task is tried under
// (method.md 6): a rule ranks candidates by validated success near the task, votes
// of language models may be fused with it, and every choice leaves a record that
// replays to the same choice offline.
//
// It must never see a test outcome, a clock or a network: everything is a pure
// function of query, evidence view and pool; randomness, where wanted, is keyed.
// It never runs an episode and knows harnesses by id only.
//
// Start at Router.Select for choosing, Evidence for what it may look at, and
// RuleRanker for the default order.
package router

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sort"
	"strings"

	"harness-s/env/harness"
)

// Candidate is a harness as the router sees it.
type Candidate struct {
	ID       string `json:"id"`
	Name     string `json:"name,omitempty"`
	Original bool   `json:"original,omitempty"`
}

// FromPool lists the pool in its order, original first.
func FromPool(p *harness.Pool) []Candidate {
	out := make([]Candidate, 0, len(p.Specs))
	for i, s := range p.Specs {
		out = append(out, Candidate{ID: s.ID(), Name: s.Name, Original: i == 0})
	}
	return out
}

// Purposes of a decision. A rescue chooses among auxiliaries; test-time routing
// also considers the original (method.md 6.3).
const (
	Rescue = "rescue"
	Test   = "test"
)

// Query is what a decision is about. It holds no outcome of the task.
type Query struct {
	Run, TaskID   string
	TaskText      string // the instruction, as the policy sees it
	Group         string // public metadata: scenario, repository, family
	Purpose       string // Rescue or Test
	Step          int
	PolicyVersion uint64
}

// Ranked is a candidate with its score, best first in a ranking.
type Ranked struct {
	ID    string  `json:"id"`
	Score float64 `json:"score"`
}

// Ranker orders all candidates, best first. It must be a pure function of its
// arguments and its own exported parameters.
type Ranker interface {
	Kind() string // rule or random
	Rank(ctx context.Context, q Query, cs []Candidate, v *View) ([]Ranked, error)
}

// Voter is an external opinion, such as a language model's. Errors make the vote
// void; they never fail a decision.
type Voter interface {
	Vote(ctx context.Context, q Query, cs []Candidate, v *View) Vote
}

// Vote is one voter's answer and what became of it.
type Vote struct {
	Voter      string   `json:"voter"`
	PromptHash string   `json:"prompt_hash,omitempty"`
	Reply      string   `json:"reply,omitempty"` // as received
	IDs        []string `json:"ids"`             // parsed from the reply, unrepaired
	Repaired   []string `json:"repaired,omitempty"`
	Unknown    int      `json:"unknown"`
	Duplicate  int      `json:"duplicate"`
	Missing    int      `json:"missing"`
	LatencyMS  int64    `json:"latency_ms,omitempty"` // measured by the voter
	TokensIn   int      `json:"tokens_in,omitempty"`
	TokensOut  int      `json:"tokens_out,omitempty"`
	Status     string   `json:"status"` // ok, or why it is void: timeout, transport, short
}

// Vote statuses set by the router.
const (
	VoteOK    = "ok"
	VoteShort = "short" // fewer valid distinct ids than minValid
)

// minValid is the number of valid distinct ids a vote needs, method.md 6.4.
const minValid = 8

// Router chooses k harnesses per query. Its fields are fixed before first use.
type Router struct {
	PoolDigest string
	Pool       []Candidate
	Base       Ranker  // nil = RuleRanker{}
	Voters     []Voter // may be empty: then the base ranking is final
	Quorum     int     // valid votes needed, 0 = 2
	Fusion     string  // "" or rrf, or borda
	RRFK       int     // 0 = 60
}

// Params are the router's settings as recorded, enough to replay.
type Params struct {
	Base   string  `json:"base"`
	A      float64 `json:"a,omitempty"`
	M      int     `json:"m,omitempty"`
	Seed   uint64  `json:"seed,omitempty"`
	Quorum int     `json:"quorum"`
	Fusion string  `json:"fusion"`
	RRFK   int     `json:"rrf_k"`
}

// Outcome is what is known of a chosen harness after it was run. Test outcomes
// never come here.
type Outcome struct {
	ID      string `json:"id"`
	Valid   bool   `json:"valid"`
	Success bool   `json:"success"`
}

// Substitution replaced a faulty harness by the next one in the ranking.
type Substitution struct {
	Out    string `json:"out"`
	In     string `json:"in"`
	Reason string `json:"reason"`
}

// Decision is the record of one choice (method.md 6.7).
type Decision struct {
	Schema          int            `json:"schema"`
	Run             string         `json:"run"`
	Step            int            `json:"step"`
	TaskID          string         `json:"task_id"`
	TaskText        string         `json:"task_text"`
	TextHash        string         `json:"task_text_sha256"`
	Group           string         `json:"group,omitempty"`
	Purpose         string         `json:"purpose"`
	PoolDigest      string         `json:"pool_digest"`
	EvidenceVersion int            `json:"evidence_version"`
	EvidenceDigest  string         `json:"evidence_digest"`
	PolicyVersion   uint64         `json:"policy_version"`
	Params          Params         `json:"params"`
	Candidates      []Candidate    `json:"candidates"`
	Rule            []Ranked       `json:"rule_ranking"`
	Votes           []Vote         `json:"votes,omitempty"`
	Fused           []Ranked       `json:"fused,omitempty"`
	Final           []string       `json:"final_ranking"`
	BordaOverlap    int            `json:"borda_overlap"` // of the two first-k sets
	KendallW        float64        `json:"kendall_w"`     // 1 without votes
	Fallback        bool           `json:"fallback"`      // votes were asked for, too few were valid
	Chosen          []string       `json:"chosen"`
	Substitutions   []Substitution `json:"substitutions,omitempty"`
	Outcomes        []Outcome      `json:"outcomes,omitempty"` // rescue only
}

// ErrTooFew says that the pool has fewer candidates than were asked for.
var ErrTooFew = errors.New("not enough candidates")

// Select ranks the candidates of q and takes the first k. For a rescue the
// candidates are the auxiliaries, so the choice is k distinct harnesses and never
// the original.
func (r *Router) Select(ctx context.Context, q Query, v *View, k int) (Decision, error) {
	p := r.params()
	d := Decision{Schema: 1, Run: q.Run, Step: q.Step, TaskID: q.TaskID, TaskText: q.TaskText, TextHash: hashText(q.TaskText), Group: q.Group,
		Purpose: q.Purpose, PoolDigest: r.PoolDigest, EvidenceVersion: v.Version(), EvidenceDigest: v.Digest(), PolicyVersion: q.PolicyVersion, Params: p}
	switch q.Purpose {
	case Rescue, Test:
	default:
		return d, fmt.Errorf("select harnesses for %s: purpose %q, want %s or %s", q.TaskID, q.Purpose, Rescue, Test)
	}
	if v.PoolDigest() != r.PoolDigest {
		return d, fmt.Errorf("select harnesses for %s: evidence is of pool %.12s, run has %.12s", q.TaskID, v.PoolDigest(), r.PoolDigest)
	}
	for _, c := range r.Pool {
		if q.Purpose == Test || !c.Original {
			d.Candidates = append(d.Candidates, c)
		}
	}
	if k < 1 || k > len(d.Candidates) {
		return d, fmt.Errorf("select %d of %d harnesses for %s: %w", k, len(d.Candidates), q.TaskID, ErrTooFew)
	}
	rule, err := p.ranker().Rank(ctx, q, d.Candidates, v)
	if err != nil {
		return d, fmt.Errorf("rank harnesses for %s: %w", q.TaskID, err)
	}
	for _, voter := range r.Voters {
		d.Votes = append(d.Votes, voter.Vote(ctx, q, slices.Clone(d.Candidates), v))
	}
	return d, d.decide(rule, k)
}

// decide fills everything that follows from ranking and raw votes.
func (d *Decision) decide(rule []Ranked, k int) error {
	order := ids(rule)
	if err := checkPermutation(order, d.Candidates); err != nil {
		return fmt.Errorf("rank harnesses for %s: %w", d.TaskID, err)
	}
	d.Rule, d.Final, d.KendallW, d.BordaOverlap = rule, order, 1, k
	var valid [][]string
	for i := range d.Votes {
		vote := &d.Votes[i]
		if vote.Status != VoteOK && vote.Status != VoteShort {
			continue
		}
		rep := Repair(vote.IDs, order)
		vote.Repaired, vote.Unknown, vote.Duplicate, vote.Missing = rep.Order, rep.Unknown, rep.Duplicate, rep.Missing
		vote.Status = VoteOK
		if len(order)-rep.Missing < min(minValid, len(order)) {
			vote.Status, vote.Repaired = VoteShort, nil
			continue
		}
		valid = append(valid, rep.Order)
	}
	if len(d.Votes) > 0 {
		if len(valid) < d.Params.Quorum {
			d.Fallback = true
		} else {
			rrf, err := Fuse("rrf", valid, order, d.Params.RRFK)
			if err != nil {
				return err
			}
			borda, err := Fuse("borda", valid, order, 0)
			if err != nil {
				return err
			}
			if d.Fused = rrf; d.Params.Fusion == "borda" {
				d.Fused = borda
			}
			d.Final = ids(d.Fused)
			d.BordaOverlap = overlap(ids(rrf)[:k], ids(borda)[:k])
			d.KendallW = KendallW(valid)
		}
	}
	d.Chosen = slices.Clone(d.Final[:k])
	return nil
}

// Next returns the best-ranked candidate that used does not contain, for a
// substitution after a harness fault.
func (d *Decision) Next(used map[string]bool) (string, bool) {
	for _, id := range d.Final {
		if !used[id] {
			return id, true
		}
	}
	return "", false
}

func (r *Router) params() Params {
	p := Params{Base: "rule", Quorum: r.Quorum, Fusion: r.Fusion, RRFK: r.RRFK}
	if p.Quorum == 0 {
		p.Quorum = 2
	}
	if p.Fusion == "" {
		p.Fusion = "rrf"
	}
	if p.RRFK == 0 {
		p.RRFK = 60
	}
	switch b := r.Base.(type) {
	case RandomRanker:
		p.Base, p.Seed = b.Kind(), b.Seed
	case RuleRanker:
		p.A, p.M = b.a(), b.m()
	default:
		p.A, p.M = RuleRanker{}.a(), RuleRanker{}.m()
	}
	return p
}

func (p Params) ranker() Ranker {
	if p.Base == "random" {
		return RandomRanker{Seed: p.Seed}
	}
	return RuleRanker{A: p.A, M: p.M}
}

// RandomRanker is the control: a shuffle keyed by seed, step and task.
type RandomRanker struct{ Seed uint64 }

// Kind names the ranker in records.
func (RandomRanker) Kind() string { return "random" }

// Rank shuffles the candidates, starting from id order; scores are 0.
func (r RandomRanker) Rank(_ context.Context, q Query, cs []Candidate, _ *View) ([]Ranked, error) {
	out := make([]Ranked, 0, len(cs))
	for _, c := range cs {
		out = append(out, Ranked{ID: c.ID})
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	key := sha256.Sum256([]byte(fmt.Sprintf("%d\x00%d\x00%s", r.Seed, q.Step, q.TaskID)))
	g := rand.New(rand.NewPCG(binary.LittleEndian.Uint64(key[:8]), binary.LittleEndian.Uint64(key[8:16])))
	g.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out, nil
}

func hashText(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

func ids(rs []Ranked) []string {
	out := make([]string, len(rs))
	for i, r := range rs {
		out[i] = r.ID
	}
	return out
}

func checkPermutation(order []string, cs []Candidate) error {
	have := map[string]bool{}
	for _, id := range order {
		have[id] = true
	}
	var lost []string
	for _, c := range cs {
		if !have[c.ID] {
			lost = append(lost, c.ID)
		}
	}
	if len(order) != len(cs) || len(have) != len(cs) || len(lost) > 0 {
		return fmt.Errorf("%d ids, %d distinct, for %d candidates; missing: %s", len(order), len(have), len(cs), strings.Join(lost, ", "))
	}
	return nil
}

func overlap(a, b []string) int {
	n := 0
	for _, id := range a {
		if slices.Contains(b, id) {
			n++
		}
	}
	return n
}
