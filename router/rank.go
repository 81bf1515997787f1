package router

import (
	"fmt"
	"sort"
)

// Repaired is a vote turned into a full permutation.
type Repaired struct {
	Order                       []string
	Unknown, Duplicate, Missing int // ids dropped, dropped, appended
}

// Repair makes a permutation of rule out of reply (method.md 6.4): unknown ids
// are dropped, of duplicates the first stays, missing ids follow in rule order.
func Repair(reply, rule []string) Repaired {
	known := make(map[string]bool, len(rule))
	for _, id := range rule {
		known[id] = true
	}
	var r Repaired
	seen := make(map[string]bool, len(rule))
	for _, id := range reply {
		switch {
		case !known[id]:
			r.Unknown++
		case seen[id]:
			r.Duplicate++
		default:
			seen[id] = true
			r.Order = append(r.Order, id)
		}
	}
	for _, id := range rule {
		if !seen[id] {
			r.Missing++
			r.Order = append(r.Order, id)
		}
	}
	return r
}

// Fuse joins permutations of one candidate set, best first (method.md 6.5).
// Method rrf scores sum of 1/(k + rank), borda sum of n - rank, ranks from 1.
// Ties: smaller rank sum, then place in rule, then id. Votes must be full
// permutations of rule.
func Fuse(method string, votes [][]string, rule []string, k int) ([]Ranked, error) {
	n := len(rule)
	place := make(map[string]int, n)
	for i, id := range rule {
		place[id] = i
	}
	if len(place) != n {
		return nil, fmt.Errorf("fuse votes: rule order of %d ids has duplicates", n)
	}
	score, sum := make([]float64, n), make([]int, n)
	for v, vote := range votes {
		seen := make(map[string]bool, n)
		for i, id := range vote {
			at, ok := place[id]
			if !ok || seen[id] {
				return nil, fmt.Errorf("fuse votes: vote %d is not a permutation at %q", v, id)
			}
			seen[id] = true
			rank := i + 1
			sum[at] += rank
			switch method {
			case "rrf":
				score[at] += 1 / float64(k+rank)
			case "borda":
				score[at] += float64(n - rank)
			default:
				return nil, fmt.Errorf("fuse votes: method %q, want rrf or borda", method)
			}
		}
		if len(seen) != n {
			return nil, fmt.Errorf("fuse votes: vote %d has %d of %d ids", v, len(seen), n)
		}
	}
	out := make([]Ranked, n)
	for i, id := range rule {
		out[i] = Ranked{id, score[i]}
	}
	// Places in rule are distinct, so the id tie-break of the method can never be
	// reached here; the rule order itself ends on it.
	sort.SliceStable(out, func(i, j int) bool {
		a, b := out[i], out[j]
		if a.Score != b.Score {
			return a.Score > b.Score
		}
		if sa, sb := sum[place[a.ID]], sum[place[b.ID]]; sa != sb {
			return sa < sb
		}
		return place[a.ID] < place[b.ID]
	})
	return out, nil
}

// KendallW is the agreement of permutations, 0 (none) to 1 (all equal), method.md
// 6.5. Fewer than two votes or candidates agree trivially.
func KendallW(votes [][]string) float64 {
	if len(votes) < 2 || len(votes[0]) < 2 {
		return 1
	}
	sum := map[string]float64{}
	for _, vote := range votes {
		for i, id := range vote {
			sum[id] += float64(i + 1)
		}
	}
	v, n := float64(len(votes)), float64(len(votes[0]))
	mean, s := v*(n+1)/2, 0.0
	for _, id := range votes[0] {
		s += (sum[id] - mean) * (sum[id] - mean)
	}
	return 12 * s / (v * v * (n*n*n - n))
}
