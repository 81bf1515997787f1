package trainer

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"harness-s/env/harness"
	"harness-s/model"
)

// flight is a step from its plan to its results.
type flight struct {
	work    []model.Work
	rows    []row   // parallel to work
	prefill int     // rows of prefill
	pages   int     // still free
	plan    uint64  // its number
	pending Pending // once submitted to an AheadSampler
}

// row is who asked for a work: a session's turn, or nobody for a shared prompt.
type row struct {
	t    *Session
	turn int
}

// step plans the next step and starts it, and hands on what is ready: its own
// results, or with an AheadSampler those of the step before.
func (s *Scheduler) step(ctx context.Context) error {
	f := s.newFlight()
	if err := s.fillFlight(f); err != nil {
		return err
	}
	if len(f.work) == 0 {
		if s.flight != nil { // what it draws is what the others wait for
			return s.drain()
		}
		return fmt.Errorf("schedule: %d requests and none can run with %d of %d pages free", len(s.active), f.pages, s.total)
	}
	start := time.Now()
	ahead, ok := s.r.(AheadSampler)
	if !ok {
		res, err := s.r.Step(ctx, f.work)
		if err != nil {
			return err
		}
		s.stats.Busy += time.Since(start)
		s.book()
		return s.deliver(f, res)
	}
	pending, err := ahead.Submit(f.work)
	if err != nil {
		return err
	}
	s.stats.Busy += time.Since(start)
	f.pending = pending
	s.book()
	before := s.flight
	if s.flight = f; before == nil {
		return s.fault
	}
	return s.land(before)
}

// newFlight is an empty plan.
func (s *Scheduler) newFlight() *flight {
	f := s.spare
	if s.spare = nil; f == nil {
		f = &flight{}
	}
	s.plans++
	*f = flight{work: f.work[:0], rows: f.rows[:0], pages: s.r.FreePages(), plan: s.plans}
	return f
}

// fillFlight adds what every session asks for next, decode rows first.
func (s *Scheduler) fillFlight(f *flight) error {
	for _, decode := range []bool{true, false} {
		for _, t := range s.active {
			switch {
			case t.plan == f.plan:
			case t.coming:
				if decode {
					s.addNext(f, t)
				}
			case decode != (t.held && t.pieces[t.next] == 1) || !decode && f.prefill >= s.o.StepRows:
			default:
				if err := s.addSession(f, t); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// book counts the step just started.
func (s *Scheduler) book() {
	s.stats.Steps++
	s.stats.MaxLive = max(s.stats.MaxLive, len(s.active)+len(s.idle))
	s.stats.PagesUsed, s.stats.Pages = max(s.stats.PagesUsed, s.total-s.r.FreePages()), s.total
}

// land waits for a submitted step and hands its results on.
func (s *Scheduler) land(f *flight) error {
	start := time.Now()
	res, err := f.pending.Wait()
	if err != nil {
		return err
	}
	s.stats.Busy += time.Since(start)
	return s.deliver(f, res)
}

// drain leaves no step under way.
func (s *Scheduler) drain() error {
	f := s.flight
	if s.flight = nil; f == nil {
		return nil
	}
	return s.land(f)
}

// deliver hands the results of a step on.
func (s *Scheduler) deliver(f *flight, res []model.Sampled) error {
	if len(res) != len(f.work) {
		return fmt.Errorf("schedule: runner answered %d of %d rows", len(res), len(f.work))
	}
	s.beats.Add(1)
	for i := range f.work {
		w, o := &f.work[i], f.rows[i]
		switch {
		case !w.Sample:
			s.stats.PrefillTokens += w.Rows()
		case o.turn == o.t.turn:
			if err := s.advance(o.t, w, res[i]); err != nil {
				return err
			}
		}
	}
	s.spare = f
	return s.fault
}

// addSession adds t's next piece to the plan, or what t waits for. A sequence
// that lacks pages takes them from whoever is less urgent; one that has not begun
// waits, unless nothing else runs.
func (s *Scheduler) addSession(f *flight, t *Session) error {
	if !t.held {
		ok, err := s.begin(f, t)
		if err != nil || !ok {
			return err
		}
	}
	n := int(t.pieces[t.next])
	need := s.r.PagesFor(t.fed+n) - s.r.PagesFor(t.fed)
	if !s.makeRoom(f, need, t, true) {
		return nil
	}
	f.pages -= need
	w := model.Work{Seq: t.id, Append: t.ids[t.fed : t.fed+n]}
	if t.fed+n == len(t.ids) {
		w.Sample, w.Sampling, w.Key, w.Ctr = true, t.sampling, t.key, uint64(len(t.out.Tokens))
	}
	if n > 1 {
		f.prefill += n
	}
	s.add(f, t, w)
	return nil
}

// addNext adds the row behind the token that is being drawn for t, unless that
// is the turn's last in any case. It takes pages from nobody: the token may be
// the last.
func (s *Scheduler) addNext(f *flight, t *Session) {
	n := len(t.out.Tokens) + 1
	need := s.r.PagesFor(t.fed+1) - s.r.PagesFor(t.fed)
	if !t.held || n >= t.maxNew || !s.makeRoom(f, need, t, false) {
		return
	}
	f.pages -= need
	t.pieces = append(t.pieces, 1)
	t.covered++
	s.add(f, t, model.Work{Seq: t.id, FromLast: true, Sample: true, Sampling: t.sampling, Key: t.key, Ctr: uint64(n)})
}

// add puts a work of t into the plan.
func (s *Scheduler) add(f *flight, t *Session, w model.Work) {
	f.work, f.rows = append(f.work, w), append(f.rows, row{t, t.turn})
	t.plan, t.coming = f.plan, w.Sample
	t.fed += w.Rows()
	t.next++
}

// begin gives t a sequence: a fork of its group's prompt when that is ready, or
// an empty one. It reports false when t has to wait.
func (s *Scheduler) begin(f *flight, t *Session) (bool, error) {
	force := s.alone(f)
	if t.share > 1 && !t.rebuild && len(t.ids) > 1 {
		pre := s.prefixOf(t)
		if !pre.ready() || pre.plan == f.plan {
			return false, s.addPrefix(f, pre, t)
		}
		// A fork copies the last partial page.
		id, ok, err := s.take(f, func() (model.SeqID, error) { return s.r.Fork(pre.id) }, 1, t, force)
		if err != nil {
			return false, err
		}
		if ok {
			t.id, t.held, t.fed, t.next, t.wait = id, true, pre.fed, len(pre.pieces), nil
			t.rebuild = true
			s.stats.SharedTokens += pre.fed
			if pre.left--; pre.left <= 0 {
				s.dropPrefix(pre)
			}
			f.pages = s.freeAfter(f)
			return true, nil
		}
		if !force {
			return false, nil
		}
		s.dropPrefix(pre) // prompt and fork do not fit together
		f.pages = s.freeAfter(f)
	}
	t.rebuild = true
	id, ok, err := s.take(f, s.r.Acquire, s.r.PagesFor(len(t.ids)), t, force)
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
func (s *Scheduler) addPrefix(f *flight, pre *prefix, t *Session) error {
	if pre.plan == f.plan {
		return nil
	}
	if !pre.held {
		id, ok, err := s.take(f, s.r.Acquire, s.r.PagesFor(len(pre.ids)), t, s.alone(f))
		if err != nil || !ok {
			return err
		}
		pre.id, pre.held, pre.fed, pre.next = id, true, 0, 0
	}
	n := int(pre.pieces[pre.next])
	need := s.r.PagesFor(pre.fed+n) - s.r.PagesFor(pre.fed)
	if !s.makeRoom(f, need, t, true) {
		return nil
	}
	f.pages -= need
	f.prefill += n
	f.work, f.rows = append(f.work, model.Work{Seq: pre.id, Append: pre.ids[pre.fed : pre.fed+n]}), append(f.rows, row{})
	pre.plan = f.plan
	pre.fed += n
	pre.next++
	return nil
}

// take obtains a sequence for t once pages are free, evicting if need be.
func (s *Scheduler) take(f *flight, get func() (model.SeqID, error), pages int, t *Session, force bool) (model.SeqID, bool, error) {
	if !s.makeRoom(f, pages, t, force) {
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
		if !s.evict(f, t, force) {
			return 0, false, nil
		}
	}
}

// makeRoom evicts until need pages are free for t.
func (s *Scheduler) makeRoom(f *flight, need int, t *Session, force bool) bool {
	for f.pages < need {
		if !s.evict(f, t, force) {
			return false
		}
	}
	return true
}

// evict frees one sequence that is not part of the plan: a shared prompt nobody
// waits for; with force also the latest idle session, the latest session that
// comes after t, or a shared prompt that only those wait for.
func (s *Scheduler) evict(f *flight, t *Session, force bool) bool {
	if pre := s.unused(f, t, false); pre != nil {
		s.dropPrefix(pre)
		f.pages = s.freeAfter(f)
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
	for i := len(s.active) - 1; victim == nil && i >= 0 && s.active[i] != t; i-- {
		if c := s.active[i]; c.held && c.plan != f.plan {
			victim = c
		}
	}
	if victim == nil {
		pre := s.unused(f, t, true)
		if pre == nil {
			return false
		}
		s.dropPrefix(pre)
	} else {
		s.release(victim)
		s.stats.Preempted++
	}
	f.pages = s.freeAfter(f)
	return true
}

// unused is the latest shared prompt that the plan does not use and nobody waits
// for; with any set, nobody who comes before t, nor t itself. So the most urgent
// session keeps its prompt until it forks it, and there is always one that goes on.
func (s *Scheduler) unused(f *flight, t *Session, any bool) *prefix {
	waiting := s.active
	if any {
		waiting = waiting[:slices.Index(waiting, t)+1]
	}
	for i := len(s.prefixes) - 1; i >= 0; i-- {
		pre := s.prefixes[i]
		if pre.held && pre.plan != f.plan && !slices.ContainsFunc(waiting, func(c *Session) bool { return c.wait == pre }) {
			return pre
		}
	}
	return nil
}

// freeAfter is what the runner has free minus what the plan will use.
func (s *Scheduler) freeAfter(f *flight) int {
	free := s.r.FreePages()
	for i := range f.work {
		n := s.r.Len(f.work[i].Seq)
		free -= s.r.PagesFor(n+f.work[i].Rows()) - s.r.PagesFor(n)
	}
	return free
}

// alone says that nothing else runs: whoever asks may take what others hold.
func (s *Scheduler) alone(f *flight) bool { return len(f.work) == 0 && s.flight == nil }

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

// advance gives t the token that a step drew for it and ends its turn when it is
// over.
func (s *Scheduler) advance(t *Session, w *model.Work, r model.Sampled) error {
	s.stats.DecodeTokens++
	s.stats.PrefillTokens += w.Rows() - 1
	if lp := float64(r.LogProb); math.IsNaN(lp) || math.IsInf(lp, 0) {
		return fmt.Errorf("sample token %d of task %s under %s, turn %d: log-prob %v", len(t.out.Tokens), t.req.Key.Task, t.req.Key.Harness, t.req.Key.Turn, lp)
	}
	t.coming = s.flight != nil && t.plan == s.flight.plan // with the row behind this one
	t.ids = append(t.ids, r.Token)
	t.out.Tokens = append(t.out.Tokens, r.Token)
	t.out.LogProb = append(t.out.LogProb, r.LogProb)
	switch {
	case slices.Contains(s.o.Stop, r.Token):
		t.out.Finish = harness.Stop
	case len(t.out.Tokens) >= t.maxNew:
		t.out.Finish = t.limit
	default:
		if t.covered < len(t.ids) {
			t.pieces = append(t.pieces, 1)
			t.covered++
		}
		return nil
	}
	// The last token is fed with the next turn's text, unless the step under way
	// feeds it.
	t.turn++
	t.coming = false
	s.active = remove(s.active, t)
	s.idle = append(s.idle, t)
	t.reply <- reply{c: t.out}
	return nil
}
