package router

import (
	"fmt"
	"slices"
	"sort"
	"strings"
)

// Profile says when a harness helps and when it hinders the current policy,
// against the original on the same tasks (method.md 6.2). Counts are tasks.
type Profile struct {
	Harness     string             `json:"harness"`
	Tasks       int                `json:"tasks"`                   // with valid attempts under both
	Success     float64            `json:"success"`                 // rate over valid attempts
	GivenFail   float64            `json:"success_given_h0_fails"`  // rate on tasks the original always failed
	Fixes       int                `json:"fixes"`                   // original always failed, this one succeeded
	Breaks      int                `json:"breaks"`                  // original succeeded, this one always failed
	Alone       int                `json:"alone"`                   // tasks only this harness solved
	HelpByCause map[string]int     `json:"help_by_cause,omitempty"` // fixed tasks by the original's failure cause
	HarmByCause map[string]int     `json:"harm_by_cause,omitempty"` // broken tasks by this one's failure cause
	HelpByGroup map[string]int     `json:"help_by_group,omitempty"`
	HarmByGroup map[string]int     `json:"harm_by_group,omitempty"`
	Causes      map[string]float64 `json:"causes,omitempty"` // its own failures by cause
	TurnRatio   float64            `json:"turn_ratio"`       // turns per attempt relative to the original, 0 = unknown
	TokenRatio  float64            `json:"token_ratio"`      // policy tokens likewise
	Policy      uint64             `json:"policy_version"`   // newest policy it was measured with
	Version     int                `json:"evidence_version"`
}

// Profiles derives one profile per candidate from the view, in the order given.
func (v *View) Profiles(cs []Candidate) []Profile {
	out := make([]Profile, 0, len(cs))
	for _, c := range cs {
		out = append(out, v.profile(c.ID))
	}
	return out
}

func (v *View) profile(id string) Profile {
	p := Profile{Harness: id, Version: v.s.Version, HelpByCause: map[string]int{}, HarmByCause: map[string]int{},
		HelpByGroup: map[string]int{}, HarmByGroup: map[string]int{}, Causes: map[string]float64{}}
	var all, cond, base cell
	for i := range v.s.Table {
		t := &v.s.Table[i]
		h0, h := t.cell(v.s.Original), t.cell(id)
		if h.Valid == 0 {
			continue
		}
		all = sum(all, h)
		p.Policy = max(p.Policy, h.Policy)
		for cause, n := range h.Causes {
			p.Causes[cause] += n
		}
		if h.Success > 0 && t.solvers() == 1 {
			p.Alone++
		}
		if h0.Valid == 0 {
			continue
		}
		p.Tasks++
		base = sum(base, h0)
		if h0.Success == 0 {
			cond = sum(cond, h)
		}
		switch {
		case h0.Success == 0 && h.Success > 0:
			p.Fixes++
			p.HelpByGroup[t.Group]++
			for cause := range h0.Causes {
				p.HelpByCause[cause]++
			}
		case h0.Success > 0 && h.Success == 0:
			p.Breaks++
			p.HarmByGroup[t.Group]++
			for cause := range h.Causes {
				p.HarmByCause[cause]++
			}
		}
	}
	p.Success, p.GivenFail = ratio(all.Success, all.Valid), ratio(cond.Success, cond.Valid)
	p.TurnRatio = ratio(ratio(all.Turns, all.Valid), ratio(base.Turns, base.Valid))
	p.TokenRatio = ratio(ratio(all.Tokens, all.Valid), ratio(base.Tokens, base.Valid))
	return p
}

// solvers counts the harnesses with a success on the task.
func (t *entry) solvers() int {
	n := 0
	for _, c := range t.Cells {
		if c.Success > 0 {
			n++
		}
	}
	return n
}

func sum(a, b cell) cell {
	return cell{Success: a.Success + b.Success, Valid: a.Valid + b.Valid, Turns: a.Turns + b.Turns, Tokens: a.Tokens + b.Tokens}
}

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}

// Summary is the profile in at most 120 words, for people and voters.
func (p Profile) Summary() string {
	if p.Tasks == 0 {
		return "No validation outcomes yet."
	}
	var b strings.Builder
	fmt.Fprintf(&b, "Success %.0f%%, %.0f%% where the original always fails. Over %d tasks it fixes %d and breaks %d; it alone solves %d.",
		100*p.Success, 100*p.GivenFail, p.Tasks, p.Fixes, p.Breaks, p.Alone)
	for _, part := range []struct {
		label  string
		counts map[string]int
	}{{"Helps with causes", p.HelpByCause}, {"Helps in", p.HelpByGroup}, {"Harms with causes", p.HarmByCause}, {"Harms in", p.HarmByGroup}} {
		if s := top(part.counts, 5); s != "" {
			fmt.Fprintf(&b, " %s: %s.", part.label, s)
		}
	}
	if p.TurnRatio > 0 {
		fmt.Fprintf(&b, " Turns x%.2f, tokens x%.2f of the original.", p.TurnRatio, p.TokenRatio)
	}
	return b.String()
}

// top renders the n largest counts, ties by name.
func top(counts map[string]int, n int) string {
	keys := make([]string, 0, len(counts))
	for k := range counts {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	sort.SliceStable(keys, func(i, j int) bool { return counts[keys[i]] > counts[keys[j]] })
	parts := make([]string, 0, n)
	for _, k := range keys[:min(n, len(keys))] {
		parts = append(parts, fmt.Sprintf("%s (%d)", k, counts[k]))
	}
	return strings.Join(parts, ", ")
}
