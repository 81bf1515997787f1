package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"

	"harness-s/env"
	"harness-s/model/chat"
)

// phase is where an episode stands between calls.
type phase uint8

const (
	asking phase = iota // a Request is pending
	acting              // a Completion waits for its actions to run
	done
)

// Episode joins one harness with one attempt. One goroutine drives it:
//
//	for {
//		req, done, err := e.Next(ctx) // may block: runs the pending actions
//		if err != nil || done { break }
//		err = e.Deliver(sample(req))  // no I/O
//	}
//	t := e.Trajectory()
//
// Next without a Deliver in between returns the same Request. A history policy
// that rewrites the context opens a new ledger segment (Request.Restart); the
// sampled ids of earlier turns are copied into it by id, never re-encoded.
type Episode struct {
	c      Config
	opts   chat.Options
	rules  *ruleSet
	state  *ruleState
	facts  *facts
	phase  phase
	req    Request
	turn   int // turns delivered
	segs   []LedgerSegment
	prompt []piece // opening prompt, for history rewrites
	turns  []pastTurn
	parsed parsedTurn
	record []TurnRecord

	digested int // turns whose observations the history policy has shortened
	outcome  env.Outcome
	verdict  env.Verdict
	fault    string
	digest   string
	blocked  int // steps refused by guards
	refused  bool
	submits  int
}

// piece is a run of encoded context.
type piece struct {
	ids   []int32
	kinds []chat.Kind
}

// pastTurn is what a history rewrite needs of one turn.
type pastTurn struct {
	sampled []int32
	closed  bool           // sampled ends with the template's own stop token
	msgs    []chat.Message // what followed it
	tools   int            // characters of tool output in msgs
}

// parsedTurn is a delivered turn before its actions run.
type parsedTurn struct {
	text      string
	calls     []chat.Call
	malformed []string
	closed    bool
}

// NewEpisode checks the configuration and renders the opening prompt. A harness
// that cannot render gives an episode that is already done with HarnessFault;
// only a bad Config is an error.
func NewEpisode(c Config) (*Episode, error) {
	var errs []error
	need := func(ok bool, what string) {
		if !ok {
			errs = append(errs, errors.New(what))
		}
	}
	need(c.Spec != nil && c.Spec.rules != nil, "Spec must come from Resolve")
	need(c.Attempt != nil, "Attempt is nil")
	need(c.Encoder != nil && c.Decode != nil, "Encoder and Decode are required")
	need(len(c.Stop) > 0, "Stop is empty")
	need(c.MaxTurns > 0 && c.MaxNew > 0 && c.MaxContext > 0, fmt.Sprintf("MaxTurns %d, MaxNew %d and MaxContext %d must be positive", c.MaxTurns, c.MaxNew, c.MaxContext))
	if len(errs) > 0 {
		return nil, fmt.Errorf("open episode: %w", errors.Join(errs...))
	}
	e := &Episode{c: c, rules: c.Spec.rules, state: c.Spec.rules.newState(), facts: newFacts(), opts: chat.Options{AddGenerationPrompt: true}}
	e.protect("open prompt", e.open)
	return e, nil
}

func (e *Episode) open() {
	first := e.c.Attempt.Initial()
	for k, v := range first.Facts {
		e.facts.now[k] = v
	}
	if d, ok := first.Facts["init_digest"].(string); ok {
		e.digest = d
	}
	e.facts.now["task_text"] = first.Text
	e.facts.now["cond_words"] = condWords(first.Text)
	e.tick()

	var msgs []chat.Message
	system := e.c.Spec.SystemText(e.c.Demos)
	if system == "" {
		system = e.c.Attempt.System()
	}
	if system != "" {
		msgs = append(msgs, chat.Message{Role: "system", Content: system})
	}
	user := []chat.Segment{{Text: strings.TrimRight(first.Text, "\n"), Kind: chat.KindUser}}
	for _, r := range e.rules.remind(e.state, e.facts, "initial", e.count) {
		user = append(user, chat.Segment{Text: "\n" + r, Kind: chat.KindHarness})
	}
	msgs = append(msgs, chat.Message{Role: "user", Parts: user})

	var tools []chat.Tool
	if e.c.Spec.tools == "schema" {
		for _, t := range e.c.Attempt.Tools() {
			if docs := e.rules.toolDocs[t.Name]; len(docs) > 0 {
				t.Description = strings.TrimSpace(t.Description + " " + strings.Join(docs, " "))
			}
			tools = append(tools, t.Chat())
		}
	}
	segs, err := e.c.Renderer.Open(msgs, tools, e.opts)
	if err != nil {
		panic(err)
	}
	ids, kinds := chat.Encode(e.c.Encoder, segs)
	if len(ids)+1 > e.c.MaxContext {
		panic(fmt.Errorf("opening prompt of %d tokens leaves no room in a context of %d", len(ids), e.c.MaxContext))
	}
	e.prompt = []piece{{ids, kinds}}
	e.segs = []LedgerSegment{{}}
	e.append(ids, kinds)
	e.ask(ids, false)
}

// Next returns the pending Request, after running the actions of the last
// delivered turn. done is true once the episode has ended; Trajectory is then
// final. Faults of the environment or the harness end the episode with their
// outcome and are not errors; err is reserved for misuse.
func (e *Episode) Next(ctx context.Context) (Request, bool, error) {
	if e.phase == acting {
		e.protect("run turn", func() { e.act(ctx) })
	}
	if e.phase == done {
		return Request{}, true, nil
	}
	return e.req, false, nil
}

// Deliver hands in the sampled turn and parses it. A Completion that breaks the
// contract is an error and changes nothing.
func (e *Episode) Deliver(c Completion) error {
	if e.phase == done {
		return fmt.Errorf("deliver turn %d of %s: %w", e.turn+1, e.c.Task.ID, ErrDone)
	}
	if e.phase != asking {
		return fmt.Errorf("deliver turn %d of %s: %w", e.turn, e.c.Task.ID, ErrNotAsked)
	}
	if c.Finish == Aborted {
		return nil // Next gives the same Request again
	}
	n := len(c.Tokens)
	var errs []error
	bad := func(format string, a ...any) { errs = append(errs, fmt.Errorf(format, a...)) }
	if len(c.LogProb) != n {
		bad("%d tokens with %d log-probs", n, len(c.LogProb))
	}
	if n > e.req.MaxNew {
		bad("%d tokens, asked for at most %d", n, e.req.MaxNew)
	}
	if c.Finish == Stop && (n == 0 || !slices.Contains(e.c.Stop, c.Tokens[n-1])) {
		bad("finish is stop but the last token is no stop token")
	}
	for i, id := range c.Tokens {
		if slices.Contains(e.c.Stop, id) && (i < n-1 || c.Finish != Stop) {
			bad("stop token %d at position %d of %d (finish %s)", id, i, n, c.Finish)
			break
		}
	}
	if c.Finish > Aborted {
		bad("unknown finish %d", c.Finish)
	}
	if len(errs) > 0 {
		return fmt.Errorf("deliver turn %d of %s: %w", e.turn+1, e.c.Task.ID, errors.Join(errs...))
	}
	e.turn++
	e.cur().add(c.Tokens, chat.KindPolicy, c.LogProb, e.turn)
	body := c.Tokens
	p := parsedTurn{}
	if c.Finish == Stop {
		body = body[:n-1]
		p.closed = c.Tokens[n-1] == e.c.Stop[0]
	}
	e.turns = append(e.turns, pastTurn{sampled: slices.Clone(c.Tokens), closed: p.closed})
	e.protect("parse turn", func() {
		p.text = e.c.Decode(body)
		mode := chat.Strict
		if e.rules.lenient || e.c.Lenient {
			mode = chat.Lenient
		}
		t := chat.ParseTurn(p.text, mode, e.c.Renderer.Thinks(e.opts))
		p.calls, p.malformed = t.Calls, t.Malformed
		if len(p.calls) == 0 && e.rules.sqlBlock {
			if q := sqlBlock(t.Content); q != "" {
				v, _ := json.Marshal(q)
				p.calls, p.malformed = []chat.Call{{Name: "execute_sql", Args: []chat.Arg{{Key: "query", Value: v}}}}, nil
			}
		}
	})
	e.parsed = p
	e.record = append(e.record, TurnRecord{Turn: e.turn, Output: p.text, Finish: c.Finish.String(), Malformed: p.malformed})
	if e.phase == done {
		return nil
	}
	e.phase = acting
	if c.Finish == Context {
		e.finish(env.ContextLimit, "")
	}
	return nil
}

// Trajectory is the finished episode; before that, its state so far with
// outcome 0. Segments are copies.
func (e *Episode) Trajectory() Trajectory {
	t := Trajectory{
		TaskID: e.c.Task.ID, HarnessID: e.c.Spec.id, HarnessName: e.c.Spec.Name, Verdict: e.verdict, Outcome: e.outcome, Turns: e.turn,
		Transcript: slices.Clone(e.record), InitDigest: e.digest, FaultReason: e.fault, BlockedSteps: e.blocked, HookErrors: e.state.hookErrs,
	}
	for i := range e.segs {
		s := &e.segs[i]
		t.Segments = append(t.Segments, LedgerSegment{slices.Clone(s.IDs), slices.Clone(s.Kind), slices.Clone(s.LogProb), slices.Clone(s.Turn)})
	}
	t.Facts = e.summary()
	if e.phase == done && e.outcome.Valid() && !e.outcome.Success() {
		t.Causes = causes(t.Facts)
	}
	return t
}

// Blocked reports whether a guard or a budget refused an action of the last
// turn, so that a scripted policy knows to repeat it.
func (e *Episode) Blocked() bool { return e.refused }

// Turn is the number of turns delivered so far.
func (e *Episode) Turn() int { return e.turn }

// Close releases the attempt. An episode that has not ended counts as void.
func (e *Episode) Close(ctx context.Context) error {
	if e.phase != done {
		e.finish(env.InfraVoid, "closed before the end")
	}
	if err := e.c.Attempt.Close(ctx); err != nil {
		return fmt.Errorf("close attempt of %s: %w", e.c.Task.ID, err)
	}
	return nil
}

func (e *Episode) cur() *LedgerSegment { return &e.segs[len(e.segs)-1] }

func (e *Episode) count(text string) int { return len(e.c.Encoder.EncodeOrdinary(text)) }

// append adds context tokens to the current segment.
func (e *Episode) append(ids []int32, kinds []chat.Kind) {
	s := e.cur()
	for i := range ids {
		s.add(ids[i:i+1], kinds[i], nil, e.turn)
	}
}

// ask sets the pending Request. The caller has left room for at least one token.
func (e *Episode) ask(ids []int32, restart bool) {
	room := e.c.MaxContext - e.cur().Len()
	key := e.c.Key
	key.Turn = e.turn + 1
	e.req = Request{Append: slices.Clone(ids), Restart: restart, MaxNew: min(e.c.MaxNew, room), Key: key}
	e.phase = asking
}

// tick refreshes the counters that rules see.
func (e *Episode) tick() {
	left := e.c.MaxTurns - e.turn
	used := 0
	if len(e.segs) > 0 {
		used = e.cur().Len()
	}
	f := e.facts.now
	f["step"], f["steps_left"], f["step_frac"] = e.turn, left, float64(e.turn)/float64(e.c.MaxTurns)
	f["ctx_left"] = e.c.MaxContext - used
}

func (e *Episode) finish(o env.Outcome, reason string) {
	e.phase = done
	e.outcome = o
	e.verdict.Outcome = o
	e.fault = reason
}

// protect turns a panic of the harness into outcome HarnessFault.
func (e *Episode) protect(op string, f func()) {
	defer func() {
		if r := recover(); r != nil {
			e.verdict = env.Verdict{}
			if err, ok := r.(error); ok && !isRuntime(err) {
				e.finish(env.HarnessFault, fmt.Sprintf("%s: %v", op, err))
				return
			}
			e.finish(env.HarnessFault, fmt.Sprintf("%s: %v\n%s", op, r, debug.Stack()))
		}
	}()
	f()
}

func isRuntime(err error) bool {
	var r interface{ RuntimeError() }
	return errors.As(err, &r)
}

// sqlBlock is the first fenced block of a text that looks like SQL.
func sqlBlock(text string) string {
	_, rest, ok := strings.Cut(text, "```")
	if !ok {
		return ""
	}
	body, _, ok := strings.Cut(rest, "```")
	if !ok {
		return ""
	}
	body = strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(body), "sql"))
	if k := statementKind(normalise(body)); k == "" || k == "other" {
		return ""
	}
	return strings.Join(strings.Fields(body), " ")
}
