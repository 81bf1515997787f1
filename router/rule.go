package router

import (
	"context"
	"math"
	"slices"
	"sort"
	"strings"
	"unicode"
)

// RuleRanker is the default order (method.md 6.3): smoothed success near the task
// times success given that the original fails. The zero value has the method's
// parameters.
type RuleRanker struct {
	A float64 // prior strength in attempts, 0 = 4
	M int     // nearest tasks looked at, 0 = 16
}

// Kind names the ranker in records.
func (RuleRanker) Kind() string { return "rule" }

func (r RuleRanker) a() float64 {
	if r.A == 0 {
		return 4
	}
	return r.A
}

func (r RuleRanker) m() int {
	if r.M == 0 {
		return 16
	}
	return r.M
}

// Rank scores every candidate, best first, ties by id. With F the tasks on which
// every valid attempt of the original failed (all tasks when there are none, or
// for test-time routing), p the pooled success of the candidates on F:
//
//	C(h)   = (sum_F succ + a p) / (sum_F n + a)
//	L(h|x) = (sum_N k succ + a C) / (sum_N k n + a)
//	score  = L C
func (r RuleRanker) Rank(_ context.Context, q Query, cs []Candidate, v *View) ([]Ranked, error) {
	failed := v.failedTasks(q.Purpose)
	near := v.index.nearest(q, r.m())
	sumS, sumN := 0.0, 0.0
	for _, c := range cs {
		for _, t := range failed {
			x := v.s.Table[t].cell(c.ID)
			sumS += x.Success
			sumN += x.Valid
		}
	}
	p := 0.0
	if sumN > 0 {
		p = sumS / sumN
	}
	out := make([]Ranked, 0, len(cs))
	for _, c := range cs {
		s, n := 0.0, 0.0
		for _, t := range failed {
			x := v.s.Table[t].cell(c.ID)
			s += x.Success
			n += x.Valid
		}
		cond := (s + r.a()*p) / (n + r.a())
		s, n = 0, 0
		for _, nb := range near {
			x := v.s.Table[nb.task].cell(c.ID)
			s += nb.k * x.Success
			n += nb.k * x.Valid
		}
		local := (s + r.a()*cond) / (n + r.a())
		out = append(out, Ranked{c.ID, local * cond})
	}
	sort.Slice(out, func(i, j int) bool {
		if out[i].Score != out[j].Score {
			return out[i].Score > out[j].Score
		}
		return out[i].ID < out[j].ID
	})
	return out, nil
}

// failedTasks returns the indices of F, method.md 6.3.
func (v *View) failedTasks(purpose string) []int {
	var all, failed []int
	for i := range v.s.Table {
		all = append(all, i)
		if h0 := v.s.Table[i].cell(v.s.Original); h0.Valid > 0 && h0.Success == 0 {
			failed = append(failed, i)
		}
	}
	if purpose == Test || len(failed) == 0 {
		return all
	}
	return failed
}

// similarity holds TF-IDF vectors of the view's tasks. Each vector has two
// blocks, words and character 3-5-grams, each scaled to length 1/sqrt(2), so the
// dot product of two vectors is their cosine and both blocks weigh the same.
// Term weight is (1 + ln count) * (1 + ln((1+N) / (1+df))).
type similarity struct {
	tasks   []string
	vectors [][]term
	df      map[string]int
}

// term is one coordinate; vectors are sorted by key, so sums have a fixed order.
type term struct {
	key string
	w   float64
}

type neighbour struct {
	task int // index in the view's table
	k    float64
}

func newSimilarity(t table) *similarity {
	s := &similarity{df: map[string]int{}}
	counts := make([]map[string]int, len(t))
	for i := range t {
		s.tasks = append(s.tasks, t[i].Task)
		counts[i] = terms(t[i].Text, t[i].Group)
		for k := range counts[i] {
			s.df[k]++
		}
	}
	for _, c := range counts {
		s.vectors = append(s.vectors, s.vector(c))
	}
	return s
}

// vector weighs and scales term counts. Terms no task has are kept: they lengthen
// the vector as they should.
func (s *similarity) vector(counts map[string]int) []term {
	v := make([]term, 0, len(counts))
	for k, n := range counts {
		idf := 1 + math.Log(float64(1+len(s.tasks))/float64(1+s.df[k]))
		v = append(v, term{k, (1 + math.Log(float64(n))) * idf})
	}
	slices.SortFunc(v, func(a, b term) int { return strings.Compare(a.key, b.key) })
	norm := map[byte]float64{}
	for _, t := range v {
		norm[t.key[0]] += t.w * t.w
	}
	blocks := float64(len(norm))
	for i := range v {
		v[i].w /= math.Sqrt(norm[v[i].key[0]] * blocks)
	}
	return v
}

// nearest returns the m most similar tasks other than q's own, ties by task id.
func (s *similarity) nearest(q Query, m int) []neighbour {
	x := s.vector(terms(q.TaskText, q.Group))
	var out []neighbour
	for i, v := range s.vectors {
		if s.tasks[i] != q.TaskID {
			out = append(out, neighbour{i, math.Max(0, dot(x, v))})
		}
	}
	sort.SliceStable(out, func(i, j int) bool { return out[i].k > out[j].k })
	return out[:min(m, len(out))]
}

func dot(a, b []term) float64 {
	s := 0.0
	for i, j := 0, 0; i < len(a) && j < len(b); {
		switch c := strings.Compare(a[i].key, b[j].key); {
		case c < 0:
			i++
		case c > 0:
			j++
		default:
			s += a[i].w * b[j].w
			i++
			j++
		}
	}
	return s
}

// terms counts words (keys "w...") and character 3-5-grams (keys "c...") of the
// lower-cased text; the group counts as one word of its own.
func terms(text, group string) map[string]int {
	out := map[string]int{}
	words := strings.FieldsFunc(strings.ToLower(text), func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
	for _, w := range words {
		out["w"+w]++
	}
	if group != "" {
		out["w group="+group]++
	}
	chars := []rune(" " + strings.Join(words, " ") + " ")
	for n := 3; n <= 5; n++ {
		for i := 0; i+n <= len(chars); i++ {
			out["c"+string(chars[i:i+n])]++
		}
	}
	return out
}
