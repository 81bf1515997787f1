package dbbench

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/go-sql-driver/mysql"

	"harness-s/env"
	"harness-s/env/dbbench/embedded"
)

// task is a row with its place in a split. It is immutable.
type task struct {
	ref  env.TaskRef
	row  embedded.Row
	demo *embedded.Task // generated tasks only
}

// question is the first user message (envs.md 4.3).
func (t *task) question() string {
	var b strings.Builder
	line := func(head, text string) {
		if text != "" {
			b.WriteString(head + text + "\n")
		}
	}
	line("Evidence about the question: ", t.row.Evidence)
	line("Additional table information about the question: ", t.row.AddDescription)
	b.WriteString("Question: " + t.row.Description + "\n")
	return b.String()
}

// NamedRow is a row with its task id.
type NamedRow struct {
	ID   string
	Line int // in the file, from 1; 0 = not from lines
	embedded.Row
}

// ReadRows reads a JSONL file (or one JSON list) of rows. Ids are the file's
// base name and the zero-based row number: "dev-5".
func ReadRows(path string) ([]NamedRow, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, &Error{"read rows", err, "pass a JSONL file of DBBench rows, such as data/dbbench/dev.jsonl of an AgentBench clone"}
	}
	base := strings.TrimSuffix(filepath.Base(path), filepath.Ext(path))
	rows, err := parseRows(b)
	if err != nil {
		return nil, &Error{"read rows of " + path, err, "each line must be one DBBench row, a JSON object; correct the line or take it out"}
	}
	for i := range rows {
		rows[i].ID = fmt.Sprintf("%s-%d", base, i)
	}
	return rows, nil
}

// maxRowErrors is how many broken lines an error names.
const maxRowErrors = 10

// parseRows reads a JSON list or one row per line; errors name every line that is not a row. Ids are left empty.
func parseRows(b []byte) ([]NamedRow, error) {
	if t := bytes.TrimSpace(b); len(t) > 0 && t[0] == '[' {
		var list []embedded.Row
		if err := json.Unmarshal(t, &list); err != nil {
			return nil, err
		}
		rows := make([]NamedRow, len(list))
		for i, r := range list {
			rows[i].Row = r
		}
		return rows, nil
	}
	var rows []NamedRow
	var errs []error
	r := bufio.NewReader(bytes.NewReader(b))
	for n := 1; ; n++ {
		line, err := r.ReadBytes('\n')
		if len(bytes.TrimSpace(line)) > 0 {
			var row embedded.Row
			if err := json.Unmarshal(line, &row); err != nil {
				errs = append(errs, fmt.Errorf("line %d%s: %w", n, column(line, err), err))
			}
			rows = append(rows, NamedRow{Line: n, Row: row})
		}
		if errors.Is(err, io.EOF) {
			break
		}
	}
	if len(rows) == 0 {
		errs = append(errs, errors.New("no rows"))
	}
	if n := len(errs) - maxRowErrors; n > 0 {
		errs = append(errs[:maxRowErrors], fmt.Errorf("and %d more", n))
	}
	return rows, errors.Join(errs...)
}

// column says where in a line its JSON breaks and what stands there.
func column(line []byte, err error) string {
	var se *json.SyntaxError
	if !errors.As(err, &se) || se.Offset < 1 || se.Offset > int64(len(line)) {
		return ""
	}
	near := bytes.TrimSpace(line[se.Offset-1:])
	if len(near) == 0 {
		return fmt.Sprintf(" column %d", se.Offset)
	}
	return fmt.Sprintf(" column %d near %.24q", se.Offset, near)
}

// invalidReason is why a row cannot be a task, or "". These rules do not depend
// on the back-end: the embedded engine accepts some names that servers refuse.
func invalidReason(r *embedded.Row) string {
	if len(r.Tables) == 0 {
		return `no table: key "table" must hold an object with table_name and table_info {columns, rows}`
	}
	if len(r.Type) == 0 {
		return `no type: key "type" must hold a list such as ["counting"] or ["INSERT"]`
	}
	if strings.TrimSpace(r.Description) == "" {
		return `no description: key "description" must hold the question`
	}
	seen := map[string]bool{}
	for _, t := range r.Tables {
		if why := badName(t.Name); why != "" {
			return "table name " + why
		}
		if seen[t.Name] {
			return fmt.Sprintf("table %q twice", t.Name)
		}
		seen[t.Name] = true
		if len(t.Columns) == 0 {
			return fmt.Sprintf("table %q has no columns", t.Name)
		}
		cols := map[string]bool{}
		for i, c := range t.Columns {
			if why := badName(c.Name); why != "" {
				return fmt.Sprintf("column %d of table %q: name %s", i, t.Name, why)
			}
			if low := strings.ToLower(c.Name); cols[low] {
				return fmt.Sprintf("column %q of table %q twice", c.Name, t.Name)
			} else {
				cols[low] = true
			}
		}
		for i, row := range t.Rows {
			if len(row) != len(t.Columns) {
				return fmt.Sprintf("row %d of table %q has %d cells for %d columns", i, t.Name, len(row), len(t.Columns))
			}
		}
	}
	switch {
	case r.Modifies() && r.AnswerMD5 == nil:
		return `no answer_md5: key "answer_md5" must hold the digest of the changed table, or the row can never be accepted`
	case r.Modifies() && *r.AnswerMD5 == "" && r.SQL == "":
		return "empty answer_md5 and no sql.query"
	case !r.Modifies() && len(r.Label) == 0:
		return `no label: key "label" must hold the list of answers`
	}
	return ""
}

func badName(n string) string {
	switch {
	case n == "":
		return "is empty (error 1166 on a server)"
	case utf8.RuneCountInString(n) > 64:
		return fmt.Sprintf("%q is longer than 64 characters", n)
	case strings.HasSuffix(n, " "):
		return fmt.Sprintf("%q ends in a space", n)
	case strings.ContainsRune(n, 0) || !utf8.ValidString(n):
		return fmt.Sprintf("%q is not text", n)
	}
	return ""
}

// load fills the splits from the generator or a file.
func (e *Env) load() error {
	e.tasks, e.byID = map[env.Split][]*task{}, map[string]*task{}
	sum := sha256.New()
	var all []*task
	var err error
	if e.o.Source == TinyDB {
		all, err = e.generate()
	} else {
		all, err = e.importFile()
	}
	if err != nil {
		return err
	}
	for _, t := range all {
		b, err := json.Marshal(t.row)
		if err != nil {
			return fmt.Errorf("hash task %s: %w", t.ref.ID, err)
		}
		fmt.Fprintf(sum, "%s %s %d\n", t.ref.ID, t.ref.Split, len(b))
		sum.Write(b)
		why := cmp.Or(invalidReason(&t.row), e.o.Invalid[t.ref.ID])
		if why != "" {
			e.info.Invalid = append(e.info.Invalid, env.Invalid{ID: t.ref.ID, Reason: why})
			continue
		}
		e.byID[t.ref.ID] = t
		e.tasks[t.ref.Split] = append(e.tasks[t.ref.Split], t)
		e.info.Counts[t.ref.Split]++
	}
	e.info.DataDigest = hex.EncodeToString(sum.Sum(nil))
	return nil
}

// generate makes the TinyDB splits. Two indices can give the same task; the
// second is passed over.
func (e *Env) generate() ([]*task, error) {
	var all []*task
	seen := map[string]bool{}
	for _, s := range []struct {
		split env.Split
		n     int
	}{{env.Train, e.o.Train}, {env.Val, e.o.Val}, {env.Test, e.o.Test}} {
		for i, have := 0, 0; have < s.n; i++ {
			if i > 50*s.n+1000 {
				return nil, &Error{"generate tasks", fmt.Errorf("split %s: %d distinct tasks found, %d wanted", s.split, have, s.n),
					"ask for fewer tasks or more families"}
			}
			g, err := embedded.GenerateMix(e.o.Mix, e.o.Seed, string(s.split), i)
			if err != nil {
				return nil, fmt.Errorf("generate task %d of %s: %w", i, s.split, err)
			}
			if seen[g.ID] {
				continue
			}
			seen[g.ID] = true
			have++
			all = append(all, &task{row: g.Row, demo: &g, ref: env.TaskRef{Env: "dbbench", ID: g.ID, Split: s.split, Group: g.Family,
				Difficulty: g.Difficulty, Tags: map[string]string{"type": g.Row.Kind(), "causes": strings.Join(g.Causes, ","), "hard": strconv.FormatBool(g.Hard)}}})
		}
	}
	return all, nil
}

// importFile reads a row file and assigns splits.
func (e *Env) importFile() ([]*task, error) {
	rows, err := ReadRows(e.o.Source)
	if err != nil {
		return nil, err
	}
	all := make([]*task, len(rows))
	for i, r := range rows {
		all[i] = e.rowTask(r)
	}
	return all, nil
}

func (e *Env) rowTask(r NamedRow) *task {
	kind := r.Kind()
	group := kind
	if !r.Modifies() {
		group = "SELECT"
	}
	return &task{row: r.Row, ref: env.TaskRef{Env: "dbbench", ID: r.ID, Split: e.splitOf(r), Group: group,
		Tags: map[string]string{"type": kind, "source": r.Source, "causes": ""}}}
}

// splitOf assigns a row by hash of its tables, so that rows over one table never
// meet across splits; without weights every row is in Options.Split.
func (e *Env) splitOf(r NamedRow) env.Split {
	total := e.o.Train + e.o.Val + e.o.Test
	if total == 0 {
		return e.o.Split
	}
	h := sha256.New()
	binary.Write(h, binary.LittleEndian, e.o.Seed)
	names := make([]string, len(r.Tables))
	for i, t := range r.Tables {
		names[i] = t.Name
	}
	slices.Sort(names)
	h.Write([]byte(strings.Join(names, "\x00")))
	n := int(binary.LittleEndian.Uint64(h.Sum(nil)) % uint64(total))
	switch {
	case n < e.o.Train:
		return env.Train
	case n < e.o.Train+e.o.Val:
		return env.Val
	}
	return env.Test
}

// refused reports an error of the server about the statement, not about itself.
func refused(err error) bool {
	var my *mysql.MySQLError
	return errors.As(err, &my) && !serverFault(my) && my.Number != 1049 && my.Number != 1044 && my.Number != 1045
}

// digestAfter runs one statement on a fresh copy of the row's tables and hashes them.
func (e *Env) digestAfter(ctx context.Context, row *embedded.Row, query, id string) (string, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), infraTimeout)
	defer cancel()
	db, ses, _, err := e.prepare(ctx, row, id)
	if err != nil {
		return "", err
	}
	_, runErr := ses.conn.ExecContext(ctx, query)
	if runErr != nil && refused(runErr) {
		runErr = nil // the original ignores it too: the gold is then the untouched table
	}
	d, err := ses.digests(ctx, row.Tables)
	ses.close()
	return joinDigests(d), errors.Join(runErr, err, db.drop(ctx))
}
