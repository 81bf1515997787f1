package dbbench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"harness-s/env"
	"harness-s/env/dbbench/embedded"
)

// GoldReport is the result of GoldReplay.
type GoldReport struct {
	Rows   int         `json:"rows"`
	Passed int         `json:"passed"`
	Failed []FailedRow `json:"failed"`
}

// FailedRow is one row whose gold does not pass, with the reason.
type FailedRow struct {
	ID     string `json:"id"`
	Line   int    `json:"line,omitempty"` // in the data file, from 1
	Reason string `json:"reason"`
}

// GoldReplay runs every row's gold through environment and grader: the label is
// committed for questions, and run and then committed for modifications. Rows
// the importer refuses fail with its reason. An infrastructure fault ends the
// replay with an error. progress may be nil.
func GoldReplay(ctx context.Context, rows []NamedRow, o Options, progress func(done, total int)) (GoldReport, error) {
	o.Source, o.Train, o.Val, o.Test = TinyDB, 1, 0, 0 // the rows are given; one generated task keeps New general
	e, err := New(o)
	if err != nil {
		return GoldReport{}, err
	}
	rep := GoldReport{Rows: len(rows), Failed: []FailedRow{}}
	for i, r := range rows {
		if progress != nil {
			progress(i, len(rows))
		}
		why := invalidReason(&r.Row)
		if why == "" {
			if why, err = e.replay(ctx, e.rowTask(r)); err != nil {
				return rep, errors.Join(fmt.Errorf("replay gold of %s: %w", r.ID, err), e.Close())
			}
		}
		if why == "" {
			rep.Passed++
		} else {
			rep.Failed = append(rep.Failed, FailedRow{r.ID, r.Line, why})
		}
	}
	if progress != nil {
		progress(len(rows), len(rows))
	}
	return rep, e.Close()
}

// goldActions are the actions that solve a row by its gold.
func goldActions(t *task) []env.Action {
	var acts []env.Action
	answers := t.row.Label
	if t.row.Modifies() {
		for _, q := range t.row.Label {
			acts = append(acts, call(ToolExecute, "query", q))
		}
		answers = []string{"done"}
	}
	return append(acts, call(ToolCommit, "answers", answers))
}

func call(tool, key string, v any) env.Action {
	b, err := json.Marshal(map[string]any{key: v})
	if err != nil {
		b = []byte("{}") // strings and lists of strings always marshal
	}
	return env.Action{Tool: tool, Args: b}
}

// replay returns the reason why the gold fails, "" when it passes.
func (e *Env) replay(ctx context.Context, t *task) (reason string, err error) {
	acts := goldActions(t)
	a, err := e.open(ctx, t, env.OpenOptions{AttemptID: "gold/" + t.ref.ID, MaxSteps: len(acts)})
	if errors.Is(err, env.ErrTaskInvalid) {
		return err.Error(), nil
	}
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, a.Close(ctx)) }()
	for _, act := range acts {
		st, err := a.Step(ctx, act)
		if err != nil {
			return "", err
		}
		if st.Kind != env.KindOK {
			return "gold statement fails: " + st.Obs, nil
		}
	}
	v, err := a.Grade(ctx)
	switch {
	case err != nil:
		return "", err
	case v.Success:
		return "", nil
	case t.row.Modifies():
		return fmt.Sprintf("gold statement gives table digest %v, answer_md5 is %s", v.Audit["digest"], *t.row.AnswerMD5), nil
	}
	return "the grader does not accept the label", nil
}

// TinyRows generates the first n rows of a TinyDB split, for gold replay. The test split is sealed and refused.
func TinyRows(seed uint64, split env.Split, n int) ([]NamedRow, error) {
	if split == env.Test {
		return nil, fmt.Errorf("generate rows: %w", env.ErrSealed)
	}
	out := make([]NamedRow, n)
	for i := range out {
		t, err := embedded.Generate(seed, string(split), i)
		if err != nil {
			return nil, fmt.Errorf("generate rows: %w", err)
		}
		out[i] = NamedRow{ID: t.ID, Row: t.Row}
	}
	return out, nil
}
