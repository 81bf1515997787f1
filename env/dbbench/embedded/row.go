package embedded

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
)

// Row is one task in AgentBench's DBBench row format (envs.md 4.1). Cells are
// already Python's str() of the JSON value, which is what the original loader
// binds when it fills the table. A Row is immutable once made.
type Row struct {
	Description    string   // the question
	AddDescription string   // table and header names
	Evidence       string   // optional hint
	Type           []string // first entry decides: INSERT, UPDATE, DELETE are modifications
	Label          []string // SELECT: gold answers; modification: gold SQL
	AnswerMD5      *string  // text "[('hex',)]"; nil when the file has none
	Tables         []Table  // one, or several when the file holds a list
	SQL            string   // sql.query; not gold for SELECT rows
	Database, Init string   // create.database, create.init
	Heads          []string
	Source         string
}

// Table is one table of a Row. Every column is created TEXT whatever Type says.
type Table struct {
	Name    string
	Columns []Column
	Rows    [][]string
}

// Column is a column as the file declares it.
type Column struct {
	Name string `json:"name"`
	Type string `json:"type"`
}

// Kind is the first type in upper case for modifications (INSERT, UPDATE,
// DELETE) and as written otherwise ("other", "counting", ...).
func (r *Row) Kind() string {
	if len(r.Type) == 0 {
		return ""
	}
	if up := strings.ToUpper(r.Type[0]); up == "INSERT" || up == "UPDATE" || up == "DELETE" {
		return up
	}
	return r.Type[0]
}

// Modifies reports whether the row is graded by the table hash.
func (r *Row) Modifies() bool {
	k := r.Kind()
	return k == "INSERT" || k == "UPDATE" || k == "DELETE"
}

// Tuple is the text form in which answer_md5 holds a digest.
func Tuple(hexDigest string) string { return "[('" + hexDigest + "',)]" }

// wire mirrors the JSON; raw messages are where files disagree on the type.
type wire struct {
	Description    string          `json:"description"`
	AddDescription string          `json:"add_description"`
	Evidence       json.RawMessage `json:"evidence,omitempty"`
	Type           json.RawMessage `json:"type"`
	Label          json.RawMessage `json:"label"`
	AnswerMD5      *string         `json:"answer_md5,omitempty"`
	Table          json.RawMessage `json:"table"`
	SQL            *wireSQL        `json:"sql,omitempty"`
	Create         *wireCreate     `json:"create,omitempty"`
	Heads          json.RawMessage `json:"heads,omitempty"`
	Source         string          `json:"source,omitempty"`
}

type wireSQL struct {
	Query  string `json:"query"`
	Length int    `json:"length"`
}

type wireCreate struct {
	Database string `json:"database"`
	Init     string `json:"init"`
}

type wireTable struct {
	Name string `json:"table_name"`
	Info struct {
		Columns []Column            `json:"columns"`
		Rows    [][]json.RawMessage `json:"rows"`
	} `json:"table_info"`
}

// UnmarshalJSON reads a row tolerantly: unknown fields are ignored, single
// values stand for one-element lists, and a table may be a list of tables.
func (r *Row) UnmarshalJSON(b []byte) error {
	var w wire
	if err := json.Unmarshal(b, &w); err != nil {
		return decodeError("", err)
	}
	*r = Row{Description: w.Description, AddDescription: w.AddDescription, AnswerMD5: w.AnswerMD5, Source: w.Source}
	var errs []error
	take := func(field string, raw json.RawMessage) []string {
		out, err := textList(raw)
		if err != nil {
			errs = append(errs, decodeError(field, err))
		}
		return out
	}
	r.Type = take("type", w.Type)
	r.Label = take("label", w.Label)
	r.Heads = take("heads", w.Heads)
	r.Evidence = strings.Join(take("evidence", w.Evidence), "\n")
	if w.SQL != nil {
		r.SQL = w.SQL.Query
	}
	if w.Create != nil {
		r.Database, r.Init = w.Create.Database, w.Create.Init
	}
	tables, err := tableList(w.Table)
	if err != nil {
		errs = append(errs, err)
	}
	r.Tables = tables
	return errors.Join(errs...)
}

// MarshalJSON writes the row in the same format, one table as an object and
// several as a list.
func (r Row) MarshalJSON() ([]byte, error) {
	list := func(v []string) json.RawMessage {
		if v == nil {
			v = []string{}
		}
		b, _ := json.Marshal(v)
		return b
	}
	var tabs []wireTable
	for _, t := range r.Tables {
		wt := wireTable{Name: t.Name}
		wt.Info.Columns = t.Columns
		for _, row := range t.Rows {
			cells := make([]json.RawMessage, len(row))
			for i, c := range row {
				b, err := json.Marshal(c)
				if err != nil {
					return nil, fmt.Errorf("encode cell: %w", err)
				}
				cells[i] = b
			}
			wt.Info.Rows = append(wt.Info.Rows, cells)
		}
		tabs = append(tabs, wt)
	}
	var table any = tabs
	if len(tabs) == 1 {
		table = tabs[0]
	}
	rawTable, err := json.Marshal(table)
	if err != nil {
		return nil, fmt.Errorf("encode table: %w", err)
	}
	w := wire{Description: r.Description, AddDescription: r.AddDescription, Type: list(r.Type), Label: list(r.Label),
		AnswerMD5: r.AnswerMD5, Table: rawTable, Heads: list(r.Heads), Source: r.Source}
	if r.Evidence != "" {
		w.Evidence, _ = json.Marshal(r.Evidence)
	}
	if r.SQL != "" {
		w.SQL = &wireSQL{Query: r.SQL, Length: len(r.SQL)}
	}
	if r.Database != "" || r.Init != "" {
		w.Create = &wireCreate{Database: r.Database, Init: r.Init}
	}
	return json.Marshal(w)
}

// decodeError names the key below parent that holds a value of the wrong kind, what it holds and what is wanted.
func decodeError(parent string, err error) error {
	var te *json.UnmarshalTypeError
	if !errors.As(err, &te) {
		if parent == "" {
			return fmt.Errorf("decode row: %w", err)
		}
		return fmt.Errorf("decode row: key %q: %w", parent, err)
	}
	key := strings.Trim(parent+"."+te.Field, ".")
	want := te.Type.Kind().String()
	switch te.Type.Kind() {
	case reflect.Struct, reflect.Map:
		want = "an object"
	case reflect.Slice:
		want = "a list"
	case reflect.String:
		want = "a string"
	case reflect.Int:
		want = "a number"
	}
	if key == "" {
		return fmt.Errorf("the row is a JSON %s, want %s", te.Value, want)
	}
	return fmt.Errorf("key %q holds a JSON %s, want %s", key, te.Value, want)
}

func tableList(raw json.RawMessage) ([]Table, error) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	var tabs []wireTable
	if raw[0] == '[' {
		if err := json.Unmarshal(raw, &tabs); err != nil {
			return nil, decodeError("table", err)
		}
	} else {
		var one wireTable
		if err := json.Unmarshal(raw, &one); err != nil {
			return nil, decodeError("table", err)
		}
		tabs = []wireTable{one}
	}
	out := make([]Table, len(tabs))
	for i, wt := range tabs {
		t := Table{Name: wt.Name, Columns: wt.Info.Columns, Rows: make([][]string, len(wt.Info.Rows))}
		for j, row := range wt.Info.Rows {
			cells := make([]string, len(row))
			for k, c := range row {
				s, err := pyText(c)
				if err != nil {
					return nil, fmt.Errorf("decode table %q row %d cell %d: %w", wt.Name, j, k, err)
				}
				cells[k] = s
			}
			t.Rows[j] = cells
		}
		out[i] = t
	}
	return out, nil
}

func textList(raw json.RawMessage) ([]string, error) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	if raw[0] != '[' {
		s, err := pyText(raw)
		if err != nil {
			return nil, err
		}
		return []string{s}, nil
	}
	var items []json.RawMessage
	if err := json.Unmarshal(raw, &items); err != nil {
		return nil, err
	}
	out := make([]string, len(items))
	for i, it := range items {
		s, err := pyText(it)
		if err != nil {
			return nil, fmt.Errorf("item %d: %w", i, err)
		}
		out[i] = s
	}
	return out, nil
}

// pyText is Python's str() of a JSON scalar; lists and objects keep their JSON
// text, which no known file holds.
func pyText(raw json.RawMessage) (string, error) {
	raw = bytes.TrimSpace(raw)
	switch {
	case len(raw) == 0 || string(raw) == "null":
		return "None", nil
	case string(raw) == "true":
		return "True", nil
	case string(raw) == "false":
		return "False", nil
	case raw[0] == '"':
		var s string
		err := json.Unmarshal(raw, &s)
		return s, err
	case raw[0] == '[' || raw[0] == '{':
		return string(raw), nil
	}
	s := string(raw)
	if !strings.ContainsAny(s, ".eE") {
		if s == "-0" {
			return "0", nil
		}
		return s, nil
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil && !math.IsInf(f, 0) {
		return "", fmt.Errorf("parse number %s: %w", s, err)
	}
	return PyFloat(f), nil
}

// PyFloat is Python's repr() of a float: shortest digits that round-trip,
// fixed notation for exponents -4..15, always a point or an exponent.
func PyFloat(f float64) string {
	switch {
	case math.IsNaN(f):
		return "nan"
	case math.IsInf(f, 1):
		return "inf"
	case math.IsInf(f, -1):
		return "-inf"
	}
	e := strconv.FormatFloat(f, 'e', -1, 64)
	i := strings.IndexByte(e, 'e')
	exp, _ := strconv.Atoi(e[i+1:])
	if exp < -4 || exp >= 16 {
		return e // Go prints at least two exponent digits, as Python does
	}
	s := strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}
