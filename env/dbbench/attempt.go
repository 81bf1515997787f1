package dbbench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"harness-s/env"
	"harness-s/env/dbbench/embedded"
)

// Texts of the protocol (envs.md 4.3).
const (
	textTimeout   = "Error: SQL execution timed out."
	textNothing   = "No response from database."
	textNoCall    = "Internal error: the reply contained no tool call."
	textBadArgs   = "Error: Failed to parse tool call. The arguments must be a JSON object whose first value is the argument."
	textBadTool   = "Invalid function call. Use execute_sql or commit_final_answer."
	textCommitted = "Answer submitted."
	textNoSteps   = "No steps are left."
)

// attempt is one episode's database and its protocol state.
type attempt struct {
	e    *Env
	task *task
	db   *database
	ses  *session

	stepTimeout time.Duration
	maxSteps    int
	initDigest  string

	steps      int
	done       bool
	committed  bool
	answer     answer
	dropped    bool // a statement of the policy may have dropped the database
	explicit   bool // a statement opened a transaction: commit after every one
	reconnects int
	ledger     *ledger
	ended      env.Outcome // StepLimit or Timeout once that happened
	infra      *env.InfraError
	verdict    *env.Verdict
	closed     bool
}

// fault makes the attempt void.
func (a *attempt) fault(phase string, err error) error {
	if a.infra == nil {
		a.infra = &env.InfraError{Phase: phase, Retryable: true, Err: err}
	}
	a.done = true
	return a.infra
}

// Initial implements env.Attempt.
func (a *attempt) Initial() env.Observation {
	tables := make([]string, len(a.task.row.Tables))
	columns := map[string]any{}
	for i, t := range a.task.row.Tables {
		tables[i] = t.Name
		names := make([]string, len(t.Columns))
		for j, c := range t.Columns {
			names[j] = c.Name
		}
		columns[t.Name] = names
	}
	return env.Observation{Text: a.task.question(), Facts: map[string]any{"tables": tables, "columns": columns, "init_digest": a.initDigest}}
}

// System implements env.Attempt: the protocol text belongs to the harness.
func (a *attempt) System() string { return "" }

// Tools implements env.Attempt.
func (a *attempt) Tools() []env.ToolSpec { return Tools() }

// Tools are the two tools of the protocol.
func Tools() []env.ToolSpec {
	return []env.ToolSpec{
		{Name: ToolExecute, Description: "Run one SQL statement on the database and return its result.",
			Parameters: json.RawMessage(`{"type":"object","properties":{"query":{"type":"string","description":"The statement, in one line."}},"required":["query"]}`)},
		{Name: ToolCommit, Description: "Submit the final answer and end the task.",
			Parameters: json.RawMessage(`{"type":"object","properties":{"answers":{"type":"array","items":{"type":"string"},"description":"One item per value of the answer."}},"required":["answers"]}`)},
	}
}

// Step implements env.Attempt.
func (a *attempt) Step(ctx context.Context, act env.Action) (env.Step, error) {
	switch {
	case a.infra != nil:
		return env.Step{}, a.infra
	case a.done || a.closed:
		return env.Step{}, fmt.Errorf("step %s: %w", a.task.ref.ID, env.ErrDone)
	case a.steps >= a.maxSteps:
		a.done, a.ended = true, env.StepLimit
		return env.Step{Obs: textNoSteps, Kind: env.KindLimit, Done: true, Facts: map[string]any{}}, nil
	}
	a.steps++
	bad := func(obs, fact string) (env.Step, error) {
		return env.Step{Obs: obs, Kind: env.KindFormatError, Facts: map[string]any{"format_error": fact, "committed": false}}, nil
	}
	if act.Tool == "" {
		return bad(textNoCall, "no_tool_call")
	}
	if act.Tool != ToolExecute && act.Tool != ToolCommit {
		return bad(textBadTool, "unknown_tool")
	}
	arg, err := firstValue(act.Args)
	if err != nil {
		return bad(textBadArgs, "bad_arguments")
	}
	if act.Tool == ToolCommit {
		ans, err := parseAnswer(arg)
		if err != nil {
			return bad(textBadArgs, "bad_arguments")
		}
		a.answer, a.committed, a.done, a.ledger.committed = ans, true, true, true
		return env.Step{Obs: textCommitted, Done: true, Facts: map[string]any{"committed": true, "answers": ans.list()}}, nil
	}
	var query string
	if err := json.Unmarshal(arg, &query); err != nil {
		return bad(textBadArgs, "bad_arguments")
	}
	return a.execute(ctx, query)
}

// execute runs one statement and turns whatever happens into an observation.
func (a *attempt) execute(ctx context.Context, query string) (env.Step, error) {
	if e, multi := refuse(query, a.db.srv != nil); e != nil {
		st := a.errorStep(query, e)
		st.Facts["multi_statement"] = multi
		return st, nil
	}
	if a.ses == nil { // the connection was lost with the server gone; it may be back
		if err := a.reconnect(ctx); err != nil {
			return env.Step{}, a.fault("step", err)
		}
	}
	if a.db.srv != nil {
		query = embedded.QuoteForeign(query)
		if !a.explicit { // a SET may have changed the mode
			if e := fullGroupBy(a.db.name, query); e != nil {
				return a.errorStep(query, e), nil
			}
		}
	}
	r := a.exec(ctx, query)
	if r.stop != ranOn {
		return a.stopped(ctx, query, r)
	}
	if r.err == nil {
		r.err = a.settle(ctx, query)
	}
	if r.err != nil {
		e, err := a.failure(ctx, query, r.err)
		if err != nil {
			return env.Step{}, err
		}
		return a.errorStep(query, e), nil
	}
	text, cut := clip(r.text, a.e.o.MaxChars)
	if text == "" {
		text = textNothing
	}
	return env.Step{Obs: text, Facts: a.ledger.observe(query, shown{res: &r, truncated: cut})}, nil
}

// settle makes every statement durable, as the original commits after each, and
// notes what a statement did to the session.
func (a *attempt) settle(ctx context.Context, query string) error {
	toks := embedded.Scan(query)
	for i, t := range toks {
		switch {
		case t.Is("DATABASE") || t.Is("SCHEMA"):
			a.dropped = a.dropped || i > 0 && toks[i-1].Is("DROP")
		case i == 0 && (t.Is("CALL") || t.Is("EXECUTE")): // what it did cannot be read from the text
			a.explicit, a.dropped = true, true
		case i == 0 && (t.Is("BEGIN") || t.Is("START") || t.Is("SAVEPOINT") || t.Is("SET") || t.Is("XA")):
			a.explicit = true
		}
	}
	if !a.explicit {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), infraTimeout)
	defer cancel()
	_, err := a.ses.conn.ExecContext(ctx, "COMMIT")
	return err
}

// stopped reports a statement that was killed.
func (a *attempt) stopped(ctx context.Context, query string, r execResult) (env.Step, error) {
	if r.err != nil && lost(r.err) {
		if err := a.reconnect(ctx); err != nil {
			return env.Step{}, a.fault("step", err)
		}
		a.reconnects++
	}
	switch r.stop {
	case cancelled:
		return env.Step{}, a.fault("step", context.Cause(ctx))
	case outOfMemory:
		return a.errorStep(query, sqlError(1041, "HY000", "Out of memory.")), nil
	}
	st := env.Step{Obs: textTimeout, Kind: env.KindTimeout, Facts: a.ledger.observe(query, shown{timeout: true})}
	if r.stop == expired {
		st.Done, a.done, a.ended = true, true, env.Timeout
	}
	return st, nil
}

func (a *attempt) errorStep(query string, e *mysql.MySQLError) env.Step {
	text, cut := clip(errorText(e), a.e.o.MaxChars)
	return env.Step{Obs: text, Kind: env.KindToolError, Facts: a.ledger.observe(query, shown{errno: int(e.Number), truncated: cut})}
}

// refuse rejects before execution what must not reach a server: several
// statements, nothing at all, oversized text, and (embedded) process-wide settings.
func refuse(query string, inProcess bool) (e *mysql.MySQLError, multi bool) {
	if len(query) > maxStatement {
		return sqlError(1153, "08S01", "Got a packet bigger than 'max_allowed_packet' bytes"), false
	}
	toks := embedded.Scan(query)
	if len(toks) == 0 || toks[0].Kind == embedded.Punct && toks[0].Text == ";" {
		return sqlError(1065, "42000", "Query was empty"), false
	}
	for i, t := range toks {
		if t.Kind == embedded.Punct && t.Text == ";" && i+1 < len(toks) {
			if toks[i+1].Text == ";" && toks[i+1].Kind == embedded.Punct {
				continue
			}
			if compound(toks) {
				break
			}
			return syntaxError(query, toks[i+1].Pos), true
		}
	}
	if inProcess && (len(toks) > maxTokens || nesting(toks) > maxNesting) {
		return sqlError(1436, "HY000", "Thread stack overrun: the statement has too many or too deeply nested terms"), false
	}
	if inProcess {
		var my *mysql.MySQLError
		if errors.As(embedded.Refuse(query), &my) {
			return my, false
		}
	}
	return nil, false
}

// Planning on the embedded engine recurses over the syntax tree and cannot be
// killed; these bounds keep it well under a second.
const (
	maxTokens  = 10000
	maxNesting = 200
)

func nesting(toks []embedded.Token) int {
	depth, most := 0, 0
	for _, t := range toks {
		switch {
		case t.Kind == embedded.Punct && t.Text == "(", t.Is("CASE"):
			depth++
		case t.Kind == embedded.Punct && t.Text == ")", t.Is("END"):
			depth--
		}
		most = max(most, depth)
	}
	return most
}

// compound reports a CREATE whose body may hold semicolons.
func compound(toks []embedded.Token) bool {
	if !toks[0].Is("CREATE") {
		return false
	}
	for _, t := range toks[:min(len(toks), 12)] {
		if t.Is("PROCEDURE") || t.Is("FUNCTION") || t.Is("TRIGGER") || t.Is("EVENT") {
			return true
		}
	}
	return false
}

// firstValue is the first value of the argument object, whatever its key. Of a
// repeated key the last value counts, as in Python.
func firstValue(args json.RawMessage) (json.RawMessage, error) {
	dec := json.NewDecoder(bytes.NewReader(args))
	t, err := dec.Token()
	if err != nil || t != json.Delim('{') {
		return nil, errors.New("read arguments: not a JSON object")
	}
	var first string
	var out json.RawMessage
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return nil, fmt.Errorf("read arguments: %w", err)
		}
		var v json.RawMessage
		if err := dec.Decode(&v); err != nil {
			return nil, fmt.Errorf("read arguments: %w", err)
		}
		name, _ := key.(string) // object keys are always strings
		if out == nil {
			first = name
		}
		if name == first {
			out = v
		}
	}
	if _, err := dec.Token(); err != nil {
		return nil, fmt.Errorf("read arguments: %w", err)
	}
	if strings.TrimSpace(string(args[dec.InputOffset():])) != "" {
		return nil, errors.New("read arguments: text after the object")
	}
	if out == nil {
		return nil, errors.New("read arguments: empty object")
	}
	return out, nil
}

func mentions(msg, name string) bool { return strings.Contains(msg, "'"+name+"'") }

// Grade implements env.Attempt. It works on a fresh connection after the last
// statement of the policy, whose own connection is closed first: its locks,
// temporary tables and settings do not reach the grader.
func (a *attempt) Grade(ctx context.Context) (env.Verdict, error) {
	if a.verdict != nil {
		if a.infra != nil {
			return *a.verdict, a.infra
		}
		return *a.verdict, nil
	}
	a.done = true
	v := env.Verdict{Audit: map[string]any{"init_digest": a.initDigest, "compare": a.e.o.Compare, "steps": a.steps, "reconnects": a.reconnects,
		"type": a.task.row.Kind()}}
	switch {
	case a.infra != nil:
		v.Outcome = env.InfraVoid
	case !a.committed:
		v.Outcome = env.NoSubmission
		if a.steps >= a.maxSteps {
			v.Outcome = env.StepLimit
		}
		if a.ended != 0 {
			v.Outcome = a.ended
		}
	default:
		a.judge(ctx, &v)
	}
	a.verdict = &v
	if a.infra != nil {
		return v, a.infra
	}
	return v, nil
}

// judge fills v for a committed attempt.
func (a *attempt) judge(ctx context.Context, v *env.Verdict) {
	row := &a.task.row
	ok := false
	if !row.Modifies() {
		var nullZero bool
		ok, nullZero = compare(a.e.o.Compare, a.answer, row.Label)
		v.Audit["null_zero"] = nullZero
		v.Checks = []env.Check{{Name: "answer", OK: ok}}
	} else {
		got, err := a.finalDigest(ctx)
		want := ""
		if err == nil {
			want, err = a.wantDigest(ctx)
		}
		if err != nil {
			a.fault("grade", err)
			v.Outcome = env.InfraVoid
			return
		}
		ok = got == want
		v.Audit["digest"] = got
		v.Checks = []env.Check{{Name: "table digest", OK: ok}}
	}
	v.Outcome = env.Failed
	if ok {
		v.Success, v.Score, v.Outcome = true, 1, env.Solved
	}
}

// finalDigest hashes the tables. A table, column or database that the policy
// removed gives the server's error text, which equals no digest.
func (a *attempt) finalDigest(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), infraTimeout)
	defer cancel()
	a.ses.close()
	a.ses = nil
	s, err := a.db.connect(ctx)
	if err == nil {
		defer s.close()
		var d []string
		if d, err = s.digests(ctx, a.task.row.Tables); err == nil {
			return joinDigests(d), nil
		}
	}
	var my *mysql.MySQLError
	if !errors.As(err, &my) || serverFault(my) || my.Number == 1049 && !a.dropped {
		return "", err
	}
	return errorText(my), nil
}

// wantDigest is the gold digest. An empty answer_md5 means: run sql.query on a
// fresh database and hash that.
func (a *attempt) wantDigest(ctx context.Context) (string, error) {
	row := &a.task.row
	if *row.AnswerMD5 != "" {
		return goldDigest(*row.AnswerMD5), nil
	}
	return a.e.digestAfter(ctx, row, row.SQL, a.db.name+"/gold")
}

// Close implements env.Attempt.
func (a *attempt) Close(ctx context.Context) error {
	if a.closed {
		return nil
	}
	a.closed = true
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), infraTimeout)
	defer cancel()
	a.ses.close()
	a.ses = nil
	if err := a.db.drop(ctx); err != nil {
		if a.infra != nil {
			return nil // the fault is on record; there is nothing left to drop
		}
		return &env.InfraError{Phase: "close", Retryable: false, Err: err}
	}
	return nil
}
