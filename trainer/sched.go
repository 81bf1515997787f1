package trainer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"sort"
	"sync/atomic"
	"time"

	"harness-s/env/harness"
	"harness-s/model"
)

// Kind of a generation request. It sets priority, never the sampled result.
type Kind uint8

// Kinds in order of priority: what unblocks a group comes first.
const (
	KindRescue Kind = iota
	KindAttempt
	KindEval
	KindCalibrate
	numKinds
)

func (k Kind) String() string {
	return [...]string{"rescue", "attempt", "eval", "calibrate", "unknown"}[min(k, numKinds)]
}

// SchedOptions bound the batches of a Scheduler.
type SchedOptions struct {
	Stop       []int32
	MaxContext int // tokens of one sequence, sampled ones included
	ChunkRows  int // a feed longer than this is cut into chunks of this size, 0 = 512
	StepRows   int // rows of prefill in one step, 0 = 2048
}

// EngineError is a failure of runner or executor. It ends the run at once and
// never counts as an attempt's result (pitfalls.md row 15).
type EngineError struct{ Err error }

func (e *EngineError) Error() string { return "engine: " + e.Err.Error() }

// Unwrap gives the cause.
func (e *EngineError) Unwrap() error { return e.Err }

// ErrBusy says that weights were about to change with sequences still open.
var ErrBusy = errors.New("sequences are still open")

// SchedStats counts since the last Stats call.
type SchedStats struct {
	Steps         int
	DecodeTokens  int // sampled tokens
	PrefillTokens int // fed rows that sampled nothing, and first rows of turns
	SharedTokens  int // prompt tokens not computed because a sequence was forked
	Preempted     int
	MaxLive       int           // sequences of sessions at once
	PagesUsed     int           // at the peak
	Pages         int           // of the runner
	Busy          time.Duration // inside the runner
	Idle          time.Duration // no request pending
}

// Scheduler is the only way to get tokens. It batches every session's pending
// work into steps of one runner (continuous batching): decode rows always, then
// pieces of prompts and tool results by priority while rows and pages last.
//
// Bits cannot depend on timing: a feed is cut into pieces by its own length
// alone, a sequence's pieces are recorded, and a preempted sequence is rebuilt
// from exactly the same pieces; random numbers are keyed by the request.
//
// With an AheadSampler the scheduler is one step behind the device: it submits
// a step before it has the tokens of the one before, with FromLast for every
// session whose token may go on. If that token ends the turn, it has been fed
// already and what the step drew behind it is dropped.
//
// Run must be called once; it owns the runner until its context ends.
type Scheduler struct {
	r  Sampler
	o  SchedOptions
	in chan func() // executed by Run between steps

	beats atomic.Int64

	// Owned by Run.
	active   []*Session // with a pending request, by kind and age
	idle     []*Session // keep a sequence but ask for nothing
	flight   *flight    // submitted and not waited for
	spare    *flight    // its memory is used again
	plans    uint64     // plans made
	prefixes []*prefix
	seq      uint64
	total    int // pages of the empty runner
	stats    SchedStats
	fault    error         // of a Release; ends the next step
	err      error         // why Run ended
	done     chan struct{} // closed when Run returned
}

// NewScheduler wraps an empty runner.
func NewScheduler(r Sampler, o SchedOptions) *Scheduler {
	if o.ChunkRows == 0 {
		o.ChunkRows = 512
	}
	if o.StepRows == 0 {
		o.StepRows = 2048
	}
	o.StepRows = max(o.StepRows, o.ChunkRows)
	return &Scheduler{r: r, o: o, in: make(chan func()), total: r.FreePages(), done: make(chan struct{})}
}

// Session is the kept context of one episode.
type Session struct {
	s        *Scheduler
	kind     Kind
	sampling model.Sampling
	share    int // attempts expected to open with this prompt, itself included

	// Owned by Run.
	ids     []int32 // whole context, sampled tokens included
	pieces  []int32 // lengths of the pieces that made the context, for an exact rebuild
	covered int     // ids in pieces
	next    int     // piece to feed next
	fed     int     // ids in the runner, as of the last step submitted
	coming  bool    // a step under way draws the next token
	turn    int     // turns begun and ended; rows of another one are dropped
	plan    uint64  // the last plan that t is part of
	id      model.SeqID
	held    bool // id is valid
	rebuild bool // do not look for a shared prompt: it was used, or the context is not a first prompt
	wait    *prefix
	order   uint64
	req     harness.Request
	key     model.Key
	maxNew  int
	limit   harness.Finish // Finish when maxNew is reached
	out     harness.Completion
	reply   chan reply
	closed  bool
}

type reply struct {
	c   harness.Completion
	err error
}

// prefix is a prompt without its last token, computed once for a group.
type prefix struct {
	ids    []int32
	hash   uint64
	pieces []int32
	next   int
	fed    int
	id     model.SeqID
	held   bool
	left   int    // forks still expected
	plan   uint64 // the last plan that it is part of
}

func (p *prefix) ready() bool { return p.held && p.next == len(p.pieces) }

// Open starts a session. share is the number of sessions expected to begin with
// the same first prompt; with more than one it is computed once and forked.
func (s *Scheduler) Open(k Kind, sampling model.Sampling, share int) *Session {
	return &Session{s: s, kind: k, sampling: sampling, share: share, reply: make(chan reply, 1)}
}

// Generate answers one request. It blocks until the turn is sampled, ctx ends
// (Finish Aborted with ctx's error) or the engine fails (*EngineError).
func (t *Session) Generate(ctx context.Context, req harness.Request) (harness.Completion, error) {
	aborted := harness.Completion{Finish: harness.Aborted}
	if err := t.s.do(ctx, func() { t.s.submit(t, req) }); err != nil {
		return aborted, err
	}
	select {
	case r := <-t.reply:
		return r.c, r.err
	case <-ctx.Done():
		// A hung engine must not hold the attempt too.
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), graceAfterDeadline)
		defer cancel()
		if err := t.s.do(late, func() { t.s.drop(t) }); err != nil {
			return aborted, err
		}
		select { // the turn may have ended in between; its result is not wanted
		case <-t.reply:
		default:
		}
		return aborted, context.Cause(ctx)
	}
}

// Close gives the sequence back. It may be called more than once.
func (t *Session) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), graceAfterDeadline)
	defer cancel()
	_ = t.s.do(ctx, func() { t.s.drop(t); t.closed = true }) // fails only when Run ended or hangs: nothing is left to give back
}

// do runs f in Run's goroutine and waits until it is accepted.
func (s *Scheduler) do(ctx context.Context, f func()) error {
	select {
	case s.in <- f:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-s.done:
		return s.failure()
	}
}

func (s *Scheduler) failure() error {
	if s.err != nil {
		return s.err
	}
	return &EngineError{Err: errors.New("scheduler is closed")}
}

// Exclusive runs f in the goroutine that owns the device, with nothing in flight:
// it fails with ErrBusy when a session still holds or asks for tokens. Everything
// computed is dropped before f and must not be used after it, because f may change
// the weights (pitfalls.md row 18).
func (s *Scheduler) Exclusive(ctx context.Context, f func() error) error {
	res := make(chan error, 1)
	err := s.do(ctx, func() {
		if n := len(s.active) + len(s.idle); n > 0 {
			res <- fmt.Errorf("use the device alone: %d sequences: %w", n, ErrBusy)
			return
		}
		s.prefixes = nil
		if err := s.drain(); err != nil {
			res <- &EngineError{Err: err}
			return
		}
		if err := s.r.Reset(); err != nil {
			res <- &EngineError{Err: err}
			return
		}
		res <- f()
	})
	if err != nil {
		return err
	}
	return <-res
}

// Beats counts finished steps; it may be called from any goroutine.
func (s *Scheduler) Beats() int64 { return s.beats.Load() }

// Stats returns and clears the counters.
func (s *Scheduler) Stats(ctx context.Context) (SchedStats, error) {
	res := make(chan SchedStats, 1)
	if err := s.do(ctx, func() { res <- s.stats; s.stats = SchedStats{} }); err != nil {
		return SchedStats{}, err
	}
	return <-res, nil
}

// Run serves sessions until ctx ends (nil) or the engine fails (*EngineError).
// Without work it blocks.
func (s *Scheduler) Run(ctx context.Context) error {
	defer func() {
		if s.flight != nil { // the runner may get another scheduler
			_, _ = s.flight.pending.Wait()
		}
		close(s.done)
		for _, t := range s.active {
			t.reply <- reply{c: harness.Completion{Finish: harness.Aborted}, err: s.failure()}
		}
		s.active = nil
	}()
	for {
		if len(s.active) == 0 {
			if err := s.drain(); err != nil {
				s.err = &EngineError{Err: err}
				return s.err
			}
			start := time.Now()
			select {
			case f := <-s.in:
				f()
			case <-ctx.Done():
				return nil
			}
			s.stats.Idle += time.Since(start)
		}
		for more := true; more; {
			select {
			case f := <-s.in:
				f()
			default:
				more = false
			}
		}
		if ctx.Err() != nil {
			return nil
		}
		if len(s.active) == 0 {
			continue
		}
		if err := s.step(ctx); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			s.err = &EngineError{Err: err}
			return s.err
		}
	}
}

// submit accepts a request, in Run's goroutine.
func (s *Scheduler) submit(t *Session, req harness.Request) {
	if t.closed {
		t.reply <- reply{err: errors.New("generate: session is closed")}
		return
	}
	if req.Restart {
		s.forget(t)
	}
	first := len(t.ids) == 0
	// A first prompt is fed without its last token, then that token alone: the
	// same pieces whether or not the prompt is shared.
	feed := len(t.ids) - t.covered + len(req.Append)
	switch {
	case first && feed > 1:
		t.pieces = appendChunks(t.pieces, feed-1, s.o.ChunkRows)
		t.pieces = append(t.pieces, 1)
	case feed == 0: // the last token has been fed already, and drew another turn's
		s.release(t)
	default:
		t.pieces = appendChunks(t.pieces, feed, s.o.ChunkRows)
	}
	t.covered += feed
	t.ids = append(t.ids, req.Append...)
	t.req, t.key, t.out = req, KeyOf(req.Key), harness.Completion{}
	t.maxNew, t.limit = req.MaxNew, harness.Length
	room := s.o.MaxContext - len(t.ids)
	// What one sequence alone can never hold is refused here, not queued.
	room = min(room, sort.Search(max(room, 0), func(n int) bool { return s.r.PagesFor(len(t.ids)+n+1) > s.total }))
	if room < t.maxNew {
		t.maxNew, t.limit = room, harness.Context
	}
	s.idle = remove(s.idle, t)
	if t.maxNew <= 0 || len(t.ids) == 0 {
		s.release(t)
		t.reply <- reply{c: harness.Completion{Finish: harness.Context}}
		return
	}
	if t.order == 0 {
		s.seq++
		t.order = s.seq
	}
	i, _ := slices.BinarySearchFunc(s.active, t, byUrgency)
	s.active = slices.Insert(s.active, i, t)
}

// byUrgency orders active sessions.
func byUrgency(a, b *Session) int {
	return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.order, b.order))
}

func appendChunks(dst []int32, n, chunk int) []int32 {
	for ; n > chunk; n -= chunk {
		dst = append(dst, int32(chunk))
	}
	if n > 0 {
		dst = append(dst, int32(n))
	}
	return dst
}

// drop forgets a session's request and sequence.
func (s *Scheduler) drop(t *Session) {
	s.active, s.idle = remove(s.active, t), remove(s.idle, t)
	s.forget(t)
	t.turn++
	t.coming = false
}

// forget empties a session's context.
func (s *Scheduler) forget(t *Session) {
	s.release(t)
	t.ids, t.pieces, t.covered, t.rebuild = nil, nil, 0, true
}

func remove(list []*Session, t *Session) []*Session {
	if i := slices.Index(list, t); i >= 0 {
		return slices.Delete(list, i, i+1)
	}
	return list
}

// release gives the runner's sequence back and rewinds to its first piece.
func (s *Scheduler) release(t *Session) {
	if t.held {
		s.fault = errors.Join(s.fault, s.r.Release(t.id))
		t.held = false
	}
	t.next, t.fed, t.wait = 0, 0, nil
}

func hashIDs(ids []int32) uint64 {
	h := uint64(14695981039346656037)
	for _, id := range ids {
		h = (h ^ uint64(uint32(id))) * 1099511628211
	}
	return h
}

// KeyOf derives the Philox key of a turn from its name (R22): two FNV-1a hashes
// of the same bytes, mixed by SplitMix64's finaliser.
func KeyOf(k harness.RNGKey) model.Key {
	b := fmt.Appendf(nil, "%d|%d|%q|%q|%q|%d|%d", k.Seed, k.Step, k.Task, k.Phase, k.Harness, k.Attempt, k.Turn)
	lo, hi := fnv.New64a(), fnv.New64()
	_, _ = lo.Write(b) // hash.Hash never fails
	_, _ = hi.Write(b)
	return model.Key{Lo: mix64(lo.Sum64()), Hi: mix64(hi.Sum64() ^ 0x9e3779b97f4a7c15)}
}

// mix64 is the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
func mix64(z uint64) uint64 {
	z ^= z >> 30
	z *= 0xbf58476d1ce4e5b9
	z ^= z >> 27
	z *= 0x94d049bb133111eb
	return z ^ z>>31
}
