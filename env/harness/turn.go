package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"harness-s/env"
	"harness-s/model/chat"
)

// act runs the parsed turn: guard, env.Step and facts per call, then observation
// format, memory, reminders, budget text and history policy for the turn, in the
// order of envs.md 5.1.
func (e *Episode) act(ctx context.Context) {
	e.refused = false
	e.tick()
	rec := &e.record[len(e.record)-1]
	var msgs []chat.Message
	toolChars := 0
	terminal := false
	for _, call := range e.parsed.calls {
		args, first, answers := arguments(call, e.c.Attempt.Tools())
		a := newAction(call.Name, string(args), first, answers)
		e.facts.pending(a)
		blockedBy, text, warnings := e.rules.check(e.state, e.facts, a)
		if blockedBy != "" {
			e.refused = true
			e.blocked++
			msgs = append(msgs, chat.Message{Role: "tool", Content: text, Kind: chat.KindHarness})
			rec.Actions = append(rec.Actions, ActionText{Tool: a.tool, Args: a.args, Observation: text, Kind: "blocked", Blocked: blockedBy})
			continue
		}
		st, ok := e.step(ctx, env.Action{Tool: call.Name, Args: args, Raw: e.parsed.text})
		if !ok {
			return // the episode has ended
		}
		e.facts.record(a, st)
		e.facts.now["obs_tokens"] = e.count(st.Obs)
		e.facts.now["last_obs_text"] = st.Obs
		if a.submit {
			e.submits++
		}
		rec.Actions = append(rec.Actions, ActionText{Tool: a.tool, Args: a.args, Observation: st.Obs, Kind: st.Kind.String()})
		if st.Done {
			terminal = true
			break
		}
		segs := []chat.Segment{{Text: st.Obs, Kind: chat.KindTool}}
		e.state.hook(func() { segs = e.rules.format(e.state, e.facts, st, e.c.Encoder, e.c.Decode) })
		for _, w := range warnings {
			segs = append(segs, chat.Segment{Text: "\n" + w, Kind: chat.KindHarness})
		}
		toolChars += len(st.Obs)
		msgs = append(msgs, chat.Message{Role: "tool", Parts: segs})
	}
	if terminal {
		e.grade(ctx)
		return
	}
	for _, reason := range e.parsed.malformed {
		e.formatError()
		text := "Error: Failed to parse tool call: " + reason
		rec.Actions = append(rec.Actions, ActionText{Observation: text, Kind: env.KindFormatError.String()})
		msgs = append(msgs, chat.Message{Role: "tool", Content: text})
	}
	if len(msgs) == 0 {
		e.formatError()
		text := e.rules.retry
		if text == "" {
			text = "Call " + strings.Join(e.toolNames(), " or ") + "."
		}
		text = "Internal error: no tool call found. " + text
		rec.Actions = append(rec.Actions, ActionText{Observation: text, Kind: env.KindFormatError.String()})
		msgs = append(msgs, chat.Message{Role: "user", Content: text})
	}
	if e.turn >= e.c.MaxTurns {
		e.finish(env.StepLimit, "")
		e.audit(ctx)
		return
	}
	e.decorate(msgs, rec)
	e.turns[len(e.turns)-1].msgs = msgs
	e.turns[len(e.turns)-1].tools = toolChars
	if e.rewrite() {
		return
	}
	ids, kinds := e.bridge(e.turns[len(e.turns)-1])
	if e.cur().Len()+len(ids) >= e.c.MaxContext {
		// The observation leaves no room for a token, so it stays out of the
		// ledger, which never exceeds the context.
		e.finish(env.ContextLimit, "")
		e.audit(ctx)
		return
	}
	e.append(ids, kinds)
	e.ask(ids, false)
}

// decorate adds memory, reminders and budget text around a turn's messages.
func (e *Episode) decorate(msgs []chat.Message, rec *TurnRecord) {
	e.state.hook(func() { e.rules.remember(e.state, e.facts, e.parsed.text) })
	before := e.rules.remind(e.state, e.facts, "before_obs", e.count)
	after := e.rules.recall(e.state, e.count)
	after = append(after, e.rules.remind(e.state, e.facts, "after_obs", e.count)...)
	after = append(after, e.rules.warn(e.state, e.facts)...)
	rec.Reminders = slices.Concat(before, after)
	if len(rec.Reminders) == 0 {
		return
	}
	whole := func(m *chat.Message) {
		if len(m.Parts) > 0 {
			return
		}
		k := m.Kind
		if k == chat.KindTemplate {
			k = chat.KindTool
			if m.Role == "user" {
				k = chat.KindUser
			}
		}
		m.Parts = []chat.Segment{{Text: m.Content, Kind: k}}
	}
	if len(before) > 0 {
		m := &msgs[0]
		whole(m)
		m.Parts = slices.Insert(slices.Clone(m.Parts), 0, chat.Segment{Text: strings.Join(before, "\n") + "\n", Kind: chat.KindHarness})
	}
	if len(after) > 0 {
		m := &msgs[len(msgs)-1]
		whole(m)
		m.Parts = append(slices.Clone(m.Parts), chat.Segment{Text: "\n" + strings.Join(after, "\n"), Kind: chat.KindHarness})
	}
}

// bridge encodes what follows a sampled turn.
func (e *Episode) bridge(t pastTurn) ([]int32, []chat.Kind) {
	o := e.opts
	o.Closed = t.closed
	segs, err := e.c.Renderer.Bridge(t.msgs, o)
	if err != nil {
		panic(err)
	}
	ids, kinds := chat.Encode(e.c.Encoder, segs)
	if len(ids) == 0 {
		panic(errors.New("an observation rendered to no tokens"))
	}
	return ids, kinds
}

// rewriteEvery is how many observations may wait before a history rewrite, so
// that a restart pays for itself.
const rewriteEvery = 4

// rewrite applies the history policy: observations older than keep_last turns
// shrink to their size, and a new ledger segment starts. Sampled ids are copied
// as context (they carry gradient only where they were sampled).
func (e *Episode) rewrite() bool {
	keep := e.rules.keepLast
	if keep == 0 || len(e.turns)-keep-e.digested < rewriteEvery {
		return false
	}
	e.digested = len(e.turns) - keep
	var seg LedgerSegment
	put := func(ids []int32, kinds []chat.Kind, turn int) {
		for i := range ids {
			seg.add(ids[i:i+1], kinds[i], nil, turn)
		}
	}
	for _, p := range e.prompt {
		put(p.ids, p.kinds, 0)
	}
	for i, t := range e.turns {
		put(t.sampled, slices.Repeat([]chat.Kind{chat.KindHarness}, len(t.sampled)), i+1)
		if i < e.digested {
			t.msgs = []chat.Message{{Role: t.msgs[0].Role, Content: fmt.Sprintf("[older result, %d characters]", t.tools), Kind: chat.KindHarness}}
		}
		ids, kinds := e.bridge(t)
		put(ids, kinds, i+1)
	}
	if seg.Len() >= e.c.MaxContext {
		e.finish(env.ContextLimit, "")
		return true
	}
	e.segs = append(e.segs, seg)
	e.ask(seg.IDs, true)
	return true
}

// step runs one action with its deadline. ok is false when the episode ended.
func (e *Episode) step(ctx context.Context, a env.Action) (st env.Step, ok bool) {
	if err := ctx.Err(); err != nil {
		e.finish(env.InfraVoid, "before an action: "+err.Error())
		return st, false
	}
	actx, cancel := ctx, context.CancelFunc(func() {})
	if e.c.StepTimeout > 0 {
		actx, cancel = context.WithTimeout(ctx, e.c.StepTimeout)
	}
	defer cancel()
	st, err := e.callEnv(func() (env.Step, error) { return e.c.Attempt.Step(actx, a) })
	switch {
	case err == nil:
		return st, true
	case errors.Is(actx.Err(), context.DeadlineExceeded):
		// The policy's own action ran past a deadline: its failure, not ours.
		e.finish(env.Timeout, "")
		e.audit(context.WithoutCancel(ctx))
	default:
		e.finish(env.InfraVoid, err.Error())
	}
	return st, false
}

// callEnv keeps a panic of the environment from looking like the harness's.
func (e *Episode) callEnv(f func() (env.Step, error)) (st env.Step, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = &env.InfraError{Phase: "step", Err: fmt.Errorf("environment panic: %v", r)}
		}
	}()
	return f()
}

// grade ends an episode whose terminal action was accepted.
func (e *Episode) grade(ctx context.Context) {
	v, err := e.gradeOnce(ctx)
	if err != nil {
		e.finish(env.InfraVoid, err.Error())
		return
	}
	o := v.Outcome
	switch {
	case o == 0 && v.Success:
		o = env.Solved
	case o == 0:
		o = env.Failed
	}
	e.finish(o, "")
	e.verdict = v
	e.verdict.Outcome = o
	e.noteDigest(v)
}

// audit takes the digest of the initial state from the grader when the episode
// ended without a submission. A grader that fails here changes nothing.
func (e *Episode) audit(ctx context.Context) {
	if e.digest != "" {
		return
	}
	if v, err := e.gradeOnce(ctx); err == nil {
		e.verdict.Audit = v.Audit
		e.noteDigest(v)
	}
}

func (e *Episode) gradeOnce(ctx context.Context) (v env.Verdict, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = &env.InfraError{Phase: "grade", Err: fmt.Errorf("environment panic: %v", r)}
		}
	}()
	return e.c.Attempt.Grade(ctx)
}

func (e *Episode) noteDigest(v env.Verdict) {
	if d, ok := v.Audit["init_digest"].(string); ok {
		e.digest = d
	}
}

func (e *Episode) formatError() {
	f := e.facts.now
	f["format_errors"] = e.facts.int("format_errors") + 1
	f["consecutive_errors"] = e.facts.int("consecutive_errors") + 1
}

func (e *Episode) toolNames() []string {
	var out []string
	for _, t := range e.c.Attempt.Tools() {
		out = append(out, t.Name)
	}
	return out
}

// arguments builds the argument object in the order written. A value whose
// declared type is not string is used as JSON when it parses as such; the text
// stays a string otherwise, which the environment judges.
func arguments(c chat.Call, tools []env.ToolSpec) (args json.RawMessage, first string, answers []string) {
	types := map[string]string{}
	for _, t := range tools {
		if t.Name == c.Name {
			types = schemaTypes(t.Parameters)
		}
	}
	var b bytes.Buffer
	b.WriteByte('{')
	for i, a := range c.Args {
		if i > 0 {
			b.WriteByte(',')
		}
		key, err := json.Marshal(a.Key)
		if err != nil {
			key = []byte(`""`)
		}
		val := a.Value
		var text string
		if json.Unmarshal(val, &text) == nil && types[a.Key] != "string" && types[a.Key] != "" {
			if trimmed := strings.TrimSpace(text); json.Valid([]byte(trimmed)) {
				val = json.RawMessage(trimmed)
			}
		}
		if !json.Valid(val) {
			val = json.RawMessage("null")
		}
		b.Write(key)
		b.WriteByte(':')
		b.Write(val)
		if i == 0 {
			first = valueText(val)
			answers = valueList(val)
		}
	}
	b.WriteByte('}')
	return b.Bytes(), first, answers
}

func schemaTypes(params json.RawMessage) map[string]string {
	var s struct {
		Properties map[string]struct {
			Type string `json:"type"`
		} `json:"properties"`
	}
	out := map[string]string{}
	if json.Unmarshal(params, &s) != nil {
		return out
	}
	for k, p := range s.Properties {
		out[k] = p.Type
	}
	return out
}

func valueText(v json.RawMessage) string {
	var s string
	if json.Unmarshal(v, &s) == nil {
		return s
	}
	return string(v)
}

func valueList(v json.RawMessage) []string {
	var items []json.RawMessage
	if json.Unmarshal(v, &items) != nil {
		return []string{valueText(v)}
	}
	out := make([]string, len(items))
	for i, it := range items {
		out[i] = valueText(it)
	}
	return out
}
