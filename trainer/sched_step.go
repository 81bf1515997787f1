package trainer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"harness-s/env/harness"
	"harness-s/model"
)

// plan is one step under construction.
type plan struct {
	work  []model.Work
	owner []any // *Session or *prefix, parallel to work
	rows  int   // rows of prefill
	pages int   // pages still free
	order []*Session
}

func (p *plan) has(o any) bool { return slices.Contains(p.owner, o) }

// step builds one batch, runs it and hands the results on.
func (s *Scheduler) step(ctx context.Context) error {
	p := &plan{pages: s.r.FreePages(), order: slices.Clone(s.active)}
	slices.SortFunc(p.order, func(a, b *Session) int {
		return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.order, b.order))
	})
	for _, decode := range []bool{true, false} {
		for _, t := range p.order {
			if p.has(t) || decode != (t.held && t.pieces[t.next] == 1) || !decode && p.rows >= s.o.StepRows {
				continue
			}
			if err := s.addSession(p, t); err != nil {
				return err
			}
		}
	}
	if len(p.work) == 0 {
		return fmt.Errorf("schedule: %d requests and none can run with %d of %d pages free", len(s.active), p.pages, s.total)
	}
	start := time.Now()
	res, err := s.r.Step(ctx, p.work)
	if err != nil {
		return err
	}
	s.stats.Busy += time.Since(start)
	if len(res) != len(p.work) {
		return fmt.Errorf("schedule: runner answered %d of %d rows", len(res), len(p.work))
	}
	s.beats.Add(1)
	s.stats.Steps++
	s.stats.MaxLive = max(s.stats.MaxLive, len(s.active)+len(s.idle))
	s.stats.PagesUsed, s.stats.Pages = max(s.stats.PagesUsed, s.total-s.r.FreePages()), s.total
	for i, o := range p.owner {
		switch o := o.(type) {
		case *prefix:
			o.fed += len(p.work[i].Append)
			o.next++
			s.stats.PrefillTokens += len(p.work[i].Append)
		case *Session:
			if err := s.advance(o, p.work[i], res[i]); err != nil {
				return err
			}
		}
	}
	return s.fault
}

// addSession adds t's next piece to the plan, or what t waits for. A sequence
// that lacks pages takes them from whoever is less urgent; one that has not begun
// waits, unless nothing else runs.
func (s *Scheduler) addSession(p *plan, t *Session) error {
	if !t.held {
		ok, err := s.begin(p, t)
		if err != nil || !ok {
			return err
		}
	}
	n := int(t.pieces[t.next])
	need := s.r.PagesFor(t.fed+n) - s.r.PagesFor(t.fed)
	if !s.makeRoom(p, need, t, true) {
		return nil
	}
	p.pages -= need
	w := model.Work{Seq: t.id, Append: t.ids[t.fed : t.fed+n]}
	if t.fed+n == len(t.ids) {
		w.Sample, w.Sampling, w.Key, w.Ctr = true, t.sampling, t.key, uint64(len(t.out.Tokens))
	}
	if n > 1 {
		p.rows += n
	}
	p.work, p.owner = append(p.work, w), append(p.owner, t)
	return nil
}

// begin gives t a sequence: a fork of its group's prompt when that is ready, or
// an empty one. It reports false when t has to wait.
func (s *Scheduler) begin(p *plan, t *Session) (bool, error) {
	force := len(p.work) == 0
	if t.share > 1 && !t.rebuild && len(t.ids) > 1 {
		pre := s.prefixOf(t)
		if !pre.ready() {
			return false, s.addPrefix(p, pre, t)
		}
		// A fork copies the last partial page.
		id, ok, err := s.take(p, func() (model.SeqID, error) { return s.r.Fork(pre.id) }, 1, t, force)
		if err != nil {
			return false, err
		}
		if ok {
			p.pages = s.freeAfter(p)
			t.id, t.held, t.fed, t.next, t.wait = id, true, pre.fed, len(pre.pieces), nil
			t.rebuild = true
			s.stats.SharedTokens += pre.fed
			if pre.left--; pre.left <= 0 {
				s.dropPrefix(pre)
			}
			return true, nil
		}
		if !force {
			return false, nil
		}
		s.dropPrefix(pre) // prompt and fork do not fit together
	}
	t.rebuild = true
	id, ok, err := s.take(p, s.r.Acquire, s.r.PagesFor(len(t.ids)), t, force)
	if err != nil || !ok {
		return false, err
	}
	t.id, t.held, t.fed, t.next = id, true, 0, 0
	return true, nil
}

// prefixOf finds or makes the shared prompt of t, which has sampled nothing yet.
func (s *Scheduler) prefixOf(t *Session) *prefix {
	if t.wait != nil {
		return t.wait
	}
	ids := t.ids[:len(t.ids)-1]
	h := hashIDs(ids)
	for _, pre := range s.prefixes {
		if pre.hash == h && slices.Equal(pre.ids, ids) {
			t.wait = pre
			return pre
		}
	}
	t.wait = &prefix{ids: slices.Clone(ids), hash: h, left: t.share, pieces: appendChunks(nil, len(ids), s.o.ChunkRows)}
	s.prefixes = append(s.prefixes, t.wait)
	return t.wait
}

// addPrefix puts a shared prompt's next piece into the plan, once.
func (s *Scheduler) addPrefix(p *plan, pre *prefix, t *Session) error {
	if p.has(pre) {
		return nil
	}
	if !pre.held {
		id, ok, err := s.take(p, s.r.Acquire, s.r.PagesFor(len(pre.ids)), t, len(p.work) == 0)
		if err != nil || !ok {
			return err
		}
		pre.id, pre.held, pre.fed, pre.next = id, true, 0, 0
	}
	n := int(pre.pieces[pre.next])
	need := s.r.PagesFor(pre.fed+n) - s.r.PagesFor(pre.fed)
	if !s.makeRoom(p, need, t, true) {
		return nil
	}
	p.pages -= need
	p.rows += n
	p.work = append(p.work, model.Work{Seq: pre.id, Append: pre.ids[pre.fed : pre.fed+n]})
	p.owner = append(p.owner, pre)
	return nil
}

// take obtains a sequence for t once pages are free, evicting if need be.
func (s *Scheduler) take(p *plan, get func() (model.SeqID, error), pages int, t *Session, force bool) (model.SeqID, bool, error) {
	if !s.makeRoom(p, pages, t, force) {
		return 0, false, nil
	}
	for {
		id, err := get()
		if err == nil {
			return id, true, nil
		}
		if !errors.Is(err, model.ErrNoSlot) && !errors.Is(err, model.ErrNoPages) {
			return 0, false, err
		}
		if !s.evict(p, t, force) {
			return 0, false, nil
		}
	}
}

// makeRoom evicts until need pages are free for t.
func (s *Scheduler) makeRoom(p *plan, need int, t *Session, force bool) bool {
	for p.pages < need {
		if !s.evict(p, t, force) {
			return false
		}
	}
	return true
}

// evict frees one sequence that is not part of the plan: a shared prompt nobody
// waits for; with force also the latest idle session, the latest session that
// comes after t, or any other shared prompt.
func (s *Scheduler) evict(p *plan, t *Session, force bool) bool {
	if pre := s.spare(p, t, false); pre != nil {
		s.dropPrefix(pre)
		p.pages = s.freeAfter(p)
		return true
	}
	if !force {
		return false
	}
	var victim *Session
	for _, c := range s.idle {
		if c.held && (victim == nil || c.kind > victim.kind || c.kind == victim.kind && c.order > victim.order) {
			victim = c
		}
	}
	for i := len(p.order) - 1; victim == nil && i >= 0 && p.order[i] != t; i-- {
		if c := p.order[i]; c.held && !p.has(c) {
			victim = c
		}
	}
	if victim == nil {
		pre := s.spare(p, t, true)
		if pre == nil {
			return false
		}
		s.dropPrefix(pre)
	} else {
		s.release(victim)
		s.stats.Preempted++
	}
	p.pages = s.freeAfter(p)
	return true
}

// spare is the latest shared prompt that the plan does not use and t does not
// wait for; unless any is set, nobody else may wait for it either.
func (s *Scheduler) spare(p *plan, t *Session, any bool) *prefix {
	for i := len(s.prefixes) - 1; i >= 0; i-- {
		pre := s.prefixes[i]
		if !pre.held || pre == t.wait || p.has(pre) {
			continue
		}
		if any || !slices.ContainsFunc(s.active, func(c *Session) bool { return c.wait == pre }) {
			return pre
		}
	}
	return nil
}

// freeAfter is what the runner has free minus what the plan will use.
func (s *Scheduler) freeAfter(p *plan) int {
	free := s.r.FreePages()
	for _, w := range p.work {
		n := s.r.Len(w.Seq)
		free -= s.r.PagesFor(n+len(w.Append)) - s.r.PagesFor(n)
	}
	return free
}

func (s *Scheduler) dropPrefix(pre *prefix) {
	if pre.held {
		s.fault = errors.Join(s.fault, s.r.Release(pre.id))
	}
	s.prefixes = slices.DeleteFunc(s.prefixes, func(q *prefix) bool { return q == pre })
	for _, t := range s.active {
		if t.wait == pre {
			t.wait = nil
		}
	}
}

// advance books what a step computed for t and ends its turn when it is over.
func (s *Scheduler) advance(t *Session, w model.Work, r model.Sampled) error {
	t.fed += len(w.Append)
	t.next++
	if !w.Sample {
		s.stats.PrefillTokens += len(w.Append)
		return nil
	}
	s.stats.DecodeTokens++
	s.stats.PrefillTokens += len(w.Append) - 1
	if lp := float64(r.LogProb); math.IsNaN(lp) || math.IsInf(lp, 0) {
		return fmt.Errorf("sample token %d of task %s under %s, turn %d: log-prob %v", len(t.out.Tokens), t.req.Key.Task, t.req.Key.Harness, t.req.Key.Turn, lp)
	}
	t.ids = append(t.ids, r.Token)
	t.out.Tokens = append(t.out.Tokens, r.Token)
	t.out.LogProb = append(t.out.LogProb, r.LogProb)
	switch {
	case slices.Contains(s.o.Stop, r.Token):
		t.out.Finish = harness.Stop
	case len(t.out.Tokens) >= t.maxNew:
		t.out.Finish = t.limit
	default:
		t.pieces = append(t.pieces, 1)
		return nil
	}
	// The last token is fed with the next turn's text.
	s.active = remove(s.active, t)
	s.idle = append(s.idle, t)
	t.reply <- reply{c: t.out}
	return nil
}
