package model

import (
	"context"
	"errors"
	"fmt"
	"math"

	"harness-s/kernels"
)

// Pending is a submitted step.
type Pending struct {
	r     *Runner
	works int
	rows  []int // work of each row that samples, in the order of the results
	half  int   // of the ring
	out   []Sampled
	err   error
	over  bool
}

// Step feeds each Work's tokens to its sequence and samples where asked; result i belongs to work[i] and is zero without Sample.
// Sequences must be distinct. Errors before any work is done: ErrNoPages, invalid works (all of them listed). After a device error
// the Runner must not be used any more.
func (r *Runner) Step(ctx context.Context, work []Work) ([]Sampled, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if len(work) == 0 {
		return nil, nil
	}
	p, err := r.Submit(work)
	if err != nil {
		return nil, err
	}
	return p.Wait()
}

// Submit issues a step and returns, where the device runs by itself, before it has run. The next step may be submitted before Wait, one with
// Work.FromLast for instance; a third has to wait for the first, whose results lie where its own would. work is not kept. Errors: Step's.
func (r *Runner) Submit(work []Work) (*Pending, error) {
	if p := r.issued[r.ring.cur]; p != nil && !p.over {
		return nil, errors.New("submit sampler step: nobody has waited for the step before the last, whose results it would take the place of")
	}
	if err := r.usable(); err != nil {
		return nil, err
	}
	if err := r.checkWork(work); err != nil {
		return nil, err
	}
	r.ids, r.extra = r.ids[:0], r.extra[:0]
	for i := range work {
		r.ids, r.extra = append(r.ids, work[i].Seq), append(r.extra, work[i].Rows())
	}
	if err := r.cache.grow(r.ids, r.extra); err != nil {
		return nil, err
	}
	r.steps++
	r.sendPages(work)
	p := &Pending{r: r, works: len(work), half: r.ring.cur}
	for _, batch := range r.split(work) {
		if _, err := r.pass(work, batch, len(p.rows)); err != nil {
			return nil, err
		}
		for _, b := range batch {
			if b.sample {
				p.rows = append(p.rows, b.work)
			}
		}
	}
	if len(p.rows) > 0 {
		r.st.DownloadAsync(r.ring.buf, r.ring.resultsAt(p.half), r.ix.logp, r.opt.resultBytes(r.dt))
	}
	r.ring.turn()
	if err := r.st.Err(); err != nil {
		return nil, fmt.Errorf("sampler step of %d works: %w", len(work), err)
	}
	r.issued[p.half] = p
	return p, nil
}

// Wait blocks until the step has run and returns what Step returns. Further calls return the same.
func (p *Pending) Wait() ([]Sampled, error) {
	if !p.over {
		p.over = true
		if p.out, p.err = p.collect(); p.err != nil {
			p.r.st.Fail(p.err)
		}
	}
	return p.out, p.err
}

func (p *Pending) collect() ([]Sampled, error) {
	r := p.r
	if err := errors.Join(r.ring.done[p.half].Wait(), r.st.Err()); err != nil {
		return nil, fmt.Errorf("sampler step of %d works: %w", p.works, err)
	}
	s, at, wide := int64(r.opt.MaxSeqs), r.ring.resultsAt(p.half), r.dt.Wide()
	size := int64(wide.Size())
	tokens := kernels.HostSlice[int32](r.ring.buf, at+2*s*size, len(p.rows))
	logp, entropy := r.ring.reals(at, len(p.rows), wide), r.ring.reals(at+s*size, len(p.rows), wide)
	out := make([]Sampled, p.works)
	for i, w := range p.rows {
		if tokens[i] < 0 { // abi.h: the logits have no distribution
			return nil, fmt.Errorf("sample work %d: logits are not finite: %w", w, ErrNonFinite)
		}
		out[w] = Sampled{Token: tokens[i], LogProb: logp[i], Entropy: entropy[i]}
	}
	return out, nil
}

func (r *Runner) checkWork(work []Work) error {
	r.checks++
	var p problems
	for i := range work {
		w := &work[i]
		s, err := r.cache.seq(w.Seq)
		if err != nil {
			p.addf("work %d: %v", i, err)
			continue
		}
		if s.seen == r.checks {
			p.addf("work %d: sequence %d appears twice in one step", i, w.Seq)
		}
		s.seen = r.checks
		switch n := s.len + w.Rows(); {
		case w.FromLast && len(w.Append) > 0:
			p.addf("work %d: %d tokens to feed beside the last one sampled", i, len(w.Append))
		case w.FromLast && s.drawnIn != r.steps:
			p.addf("work %d: the step before sampled no token for sequence %d", i, w.Seq)
		case w.Rows() == 0:
			p.addf("work %d: no token to feed; a sequence needs at least one per step", i)
		case n > r.opt.MaxContext && r.opt.MaxContext < r.opt.MaxTokens:
			p.addf("work %d: %d tokens in sequence %d, at most %d fit (RunnerOptions.MaxContext)", i, n, w.Seq, r.opt.MaxContext)
		}
		for j, id := range w.Append {
			if id < 0 || int(id) >= r.m.Config.VocabSize {
				p.addf("work %d: token %d at %d is outside the vocabulary of %d", i, id, j, r.m.Config.VocabSize)
				break
			}
		}
		if s := w.Sampling; w.Sample && (!(s.Temperature >= 0) || math.IsInf(float64(s.Temperature), 0) || s.TopP < 0 || s.TopP > 1 || s.MinP < 0 || s.MinP > 1 || s.TopK < 0) {
			p.addf("work %d: sampling %+v: want temperature >= 0, top_p and min_p in [0, 1], top_k >= 0", i, s)
		}
	}
	if len(p) > 0 {
		return fmt.Errorf("sampler step: %w", p.err())
	}
	return nil
}

// split cuts works into passes of at most MaxRows rows. Where a long append is cut, and which kernels a row goes through, depends on
// its own append only, so that a row's bits do not depend on its company. Rows of decode are the first pass, alone where they run as a graph.
// Only rows that read the last token and sample nothing come before it, since what is sampled takes the place of what they read.
func (r *Runner) split(work []Work) [][]piece {
	read, pure, one, many := r.pieces[0][:0], r.pieces[1][:0], r.pieces[2][:0], r.pieces[3][:0]
	for i := range work {
		w := &work[i]
		pos, ids := r.cache.seqs[w.Seq].len, w.Append
		if w.FromLast {
			ids = r.unread[:] // the device reads it
		}
		for at := 0; at < len(ids); at += r.opt.MaxRows {
			end := min(at+r.opt.MaxRows, len(ids))
			p := piece{work: i, seq: w.Seq, ids: ids[at:end], pos: pos + at, decode: len(ids) == 1, sample: w.Sample && end == len(ids)}
			switch {
			case w.FromLast && !w.Sample:
				read = append(read, p)
			case r.graphs != nil && w.pure():
				pure = append(pure, p)
			case p.decode:
				one = append(one, p)
			default:
				many = append(many, p)
			}
		}
	}
	r.pieces = [4][]piece{read, pure, one, many}
	var out [][]piece
	for _, list := range [][]piece{read, pure} {
		if len(list) > 0 {
			out = append(out, list)
		}
	}
	var cur []piece
	rows := 0
	for _, list := range [][]piece{one, many} {
		for _, p := range list {
			if rows+len(p.ids) > r.opt.MaxRows || len(cur) > 0 && cur[len(cur)-1].seq == p.seq {
				out, cur, rows = append(out, cur), nil, 0
			}
			cur, rows = append(cur, p), rows+len(p.ids)
		}
	}
	if len(cur) > 0 {
		out = append(out, cur)
	}
	return out
}
