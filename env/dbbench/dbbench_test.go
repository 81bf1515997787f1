package dbbench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"harness-s/env"
	"harness-s/env/dbbench/embedded"
	"harness-s/env/envtest"
	"harness-s/model/chat"
)

func newEnv(t *testing.T, o Options) *Env {
	t.Helper()
	e, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

func sqlCall(q string) env.Action { return call(ToolExecute, "query", q) }

// conformance are the suite's hooks for this adapter.
func conformance(e *Env, kill func(*testing.T, env.Attempt)) envtest.Options {
	row := func(ref env.TaskRef) *embedded.Row { return &e.byID[ref.ID].row }
	return envtest.Options{
		Gold: func(ref env.TaskRef) []env.Action { return goldActions(e.byID[ref.ID]) },
		Mark: func(ref env.TaskRef) env.Action { return sqlCall("DELETE FROM " + ident(row(ref).Tables[0].Name)) },
		Look: func(ref env.TaskRef) env.Action {
			return sqlCall("SELECT COUNT(*) FROM " + ident(row(ref).Tables[0].Name))
		},
		Submit: func(env.TaskRef) env.Action { return call(ToolCommit, "answers", []string{"surely wrong"}) },
		Kill:   kill,
	}
}

func killEmbedded(t *testing.T, a env.Attempt) {
	if err := a.(*attempt).db.srv.Close(); err != nil {
		t.Error(err)
	}
}

func TestConformanceTinyDB(t *testing.T) {
	e := newEnv(t, Options{Train: 40, Val: 12, Test: 12, Seed: 3})
	o := conformance(e, killEmbedded)
	o.Tasks, o.Parallel = 24, 32
	envtest.Run(t, e, o)
}

// sampleRows is a small file in AgentBench's format: our own data.
func sampleRows(t *testing.T) string {
	t.Helper()
	md5 := func(rows ...[]string) string { return embedded.Tuple(embedded.TableMD5(rows)) }
	cols := []embedded.Column{{Name: "Boat name", Type: "TEXT"}, {Name: "Rank", Type: "INT"}}
	tab := func(name string) []embedded.Table {
		return []embedded.Table{{Name: name, Columns: cols, Rows: [][]string{{"Terns", "1"}, {"O'Hara", "1,200"}}}}
	}
	empty := ""
	ins := md5([]string{"Terns", "1"}, []string{"O'Hara", "1,200"}, []string{"Gull", "3"})
	del := md5([]string{"Terns", "1"})
	rows := []embedded.Row{
		{Description: "Which boat ranks 1,200?", AddDescription: "The table is Boats.", Evidence: "ranks are text", Type: []string{"other"},
			Label: []string{"O'Hara"}, Tables: tab("Boats")},
		{Description: "Add Gull, 3.", Type: []string{"INSERT"}, Label: []string{"INSERT INTO `Boats` VALUES ('Gull','3')"}, AnswerMD5: &ins, Tables: tab("Boats")},
		{Description: "Remove O'Hara.", Type: []string{"DELETE"}, Label: []string{"DELETE FROM Boats WHERE `Boat name`='O''Hara';"}, AnswerMD5: &del, Tables: tab("Boats")},
		{Description: "Rank Terns 2.", Type: []string{"UPDATE"}, Label: []string{"UPDATE Boats SET `Rank`='2' WHERE `Boat name`='Terns'"},
			SQL: "UPDATE Boats SET `Rank`='2' WHERE `Boat name`='Terns'", AnswerMD5: &empty, Tables: tab("Boats")},
		{Description: "no digest", Type: []string{"INSERT"}, Label: []string{"x"}, Tables: tab("Boats")},
		{Description: "empty column", Type: []string{"other"}, Label: []string{"x"}, Tables: []embedded.Table{{Name: "t", Columns: []embedded.Column{{}}}}},
	}
	var b strings.Builder
	for _, r := range rows {
		j, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		b.Write(j)
		b.WriteByte('\n')
	}
	path := filepath.Join(t.TempDir(), "sample.jsonl")
	if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestConformanceFile(t *testing.T) {
	e := newEnv(t, Options{Source: sampleRows(t), Split: env.Val})
	if i := e.Info(); i.Counts[env.Val] != 4 || len(i.Invalid) != 2 || i.Invalid[0].ID != "sample-4" || i.Label != "DBBench rows, embedded engine" {
		t.Errorf("info %+v", i)
	}
	_, err := e.Open(t.Context(), env.TaskRef{ID: "sample-5"}, env.OpenOptions{})
	if !errors.Is(err, env.ErrTaskInvalid) || !strings.Contains(err.Error(), "1166") {
		t.Errorf("open of an invalid row = %v", err)
	}
	q, err := e.Question(env.TaskRef{ID: "sample-0"}, env.Unsealed{})
	want := "Evidence about the question: ranks are text\nAdditional table information about the question: The table is Boats.\nQuestion: Which boat ranks 1,200?\n"
	if err != nil || q != want {
		t.Errorf("question %q, %v", q, err)
	}
	envtest.Run(t, e, conformance(e, killEmbedded))
}

func TestConformanceMariaDB(t *testing.T) {
	dsn, stop := mariaDSN(t)
	e := newEnv(t, Options{Train: 8, Val: 4, Test: 4, DSN: dsn})
	var kill func(*testing.T, env.Attempt)
	if stop != nil {
		kill = func(*testing.T, env.Attempt) { stop() }
	}
	t.Run("faults", func(t *testing.T) { faults(t, e) })
	t.Run("no leftovers", func(t *testing.T) {
		a := openFirst(t, e, env.OpenOptions{AttemptID: "left"})
		name := a.db.name
		if err := a.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
		var n int
		if err := e.backend.(*realBackend).db.QueryRow("SELECT COUNT(*) FROM information_schema.schemata WHERE schema_name=?", name).Scan(&n); err != nil || n != 0 {
			t.Errorf("%d databases left: %v", n, err)
		}
	})
	t.Run("room", func(t *testing.T) {
		var server int
		if err := e.backend.(*realBackend).db.QueryRow("SELECT @@max_connections").Scan(&server); err != nil {
			t.Fatal(err)
		}
		if n, err := e.MaxAttempts(t.Context()); err != nil || n < 1 || n >= server {
			t.Errorf("room for %d attempts on %d connections, %v", n, server, err)
		}
		if n, err := newEnv(t, Options{Train: 1}).MaxAttempts(t.Context()); err != nil || n != 0 {
			t.Errorf("embedded: room for %d attempts, %v; want no limit", n, err)
		}
	})
	t.Run("same observations", func(t *testing.T) { sameObservations(t, dsn) })
	envtest.Run(t, e, conformance(e, kill))
}

// sameObservations plays the demonstrations of generated tasks on both back-ends:
// what the policy reads must not depend on the back-end.
func sameObservations(t *testing.T, dsn string) {
	o := Options{Train: 40, Seed: 9}
	ours := newEnv(t, o)
	o.DSN = dsn
	theirs := newEnv(t, o)
	compared := 0
	for i, tk := range ours.tasks[env.Train] {
		for _, p := range []embedded.Program{tk.demo.Good, tk.demo.Sloppy, tk.demo.Recover} {
			x, err := ours.open(t.Context(), tk, env.OpenOptions{})
			if err != nil {
				t.Fatal(err)
			}
			y, err := theirs.open(t.Context(), theirs.tasks[env.Train][i], env.OpenOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if x.initDigest != y.initDigest {
				t.Errorf("%s: initial digests %s, %s", tk.ref.ID, x.initDigest, y.initDigest)
			}
			for _, c := range p {
				if c.SQL == "" {
					continue
				}
				a, b := run(t, x, c.SQL), run(t, y, c.SQL)
				b.Obs = strings.ReplaceAll(strings.ReplaceAll(b.Obs, y.db.name, x.db.name), "MariaDB server", "MySQL server")
				if compared++; a.Obs != b.Obs {
					t.Errorf("%s: %s\nembedded %s\nserver   %s", tk.ref.ID, c.SQL, a.Obs, b.Obs)
				}
			}
			if err := errors.Join(x.Close(t.Context()), y.Close(t.Context())); err != nil {
				t.Error(err)
			}
		}
	}
	t.Logf("%d observations compared", compared)
}

func TestSplits(t *testing.T) {
	a := newEnv(t, Options{Train: 60, Val: 30, Test: 30, Seed: 5})
	b := newEnv(t, Options{Train: 60, Val: 30, Test: 30, Seed: 5})
	c := newEnv(t, Options{Train: 60, Val: 30, Test: 30, Seed: 6})
	if a.Info().DataDigest != b.Info().DataDigest || a.Info().DataDigest == c.Info().DataDigest {
		t.Error("the data digest does not follow the seed")
	}
	questions := map[string]env.Split{}
	for s, ts := range a.tasks {
		for _, tk := range ts {
			if tk.ref.Group != tk.demo.Family || tk.ref.Tags["causes"] != strings.Join(tk.demo.Causes, ",") {
				t.Errorf("reference %+v", tk.ref)
			}
			key, err := json.Marshal(tk.row)
			if err != nil {
				t.Fatal(err)
			}
			if other, ok := questions[string(key)]; ok && other != s {
				t.Errorf("one row in %s and %s", other, s)
			}
			questions[string(key)] = s
		}
	}
	if len(a.tasks[env.Train]) != 60 || len(a.tasks[env.Val]) != 30 || len(a.tasks[env.Test]) != 30 {
		t.Errorf("counts %v", a.Info().Counts)
	}
	f := newEnv(t, Options{Source: sampleRows(t), Train: 1, Val: 1, Test: 1})
	splits := map[env.Split]bool{}
	for _, tk := range f.byID {
		splits[tk.ref.Split] = true
	}
	if len(splits) != 1 {
		t.Errorf("rows over one table are spread over %v", splits)
	}
}

func TestOptions(t *testing.T) {
	_, err := New(Options{Train: -1, Val: 1, Compare: "x", Split: "y", MaxSteps: -1, Collation: "a;b", Source: "rows"})
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"train = -1", `compare = "x"`, `split = "y"`, "max_steps -1", "collation"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not mention %s", err, want)
		}
	}
	var e *Error
	if _, err := New(Options{Source: "/nonexistent/rows.jsonl"}); !errors.As(err, &e) || e.Hint == "" {
		t.Errorf("missing file: %v", err)
	}
	if _, err := New(Options{Train: 1, DSN: "nonsense"}); !errors.As(err, &e) || e.Hint == "" {
		t.Errorf("bad dsn: %v", err)
	}
	bad := filepath.Join(t.TempDir(), "bad.jsonl")
	if err := os.WriteFile(bad, []byte("{\"table\":3}\n\nnot json\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := New(Options{Source: bad}); err == nil || !strings.Contains(err.Error(), "line 1") || !strings.Contains(err.Error(), "line 3") {
		t.Errorf("bad file: %v", err)
	}
	dead := newEnv(t, Options{Train: 1, DSN: "root@tcp(127.0.0.1:1)/"})
	if err := dead.Health(t.Context()); !errors.Is(err, env.ErrInfra) || !errors.As(err, &e) {
		t.Errorf("health of a dead server: %v", err)
	}
	if _, err := dead.Open(t.Context(), dead.tasks[env.Train][0].ref, env.OpenOptions{}); !errors.Is(err, env.ErrInfra) {
		t.Errorf("open on a dead server: %v", err)
	}
}

func openFirst(t *testing.T, e *Env, o env.OpenOptions) *attempt {
	t.Helper()
	for _, s := range []env.Split{env.Train, env.Val, env.Test} {
		if len(e.tasks[s]) > 0 {
			a, err := e.open(t.Context(), e.tasks[s][0], o)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { a.Close(context.Background()) })
			return a
		}
	}
	t.Fatal("no tasks")
	return nil
}

func run(t *testing.T, a *attempt, q string) env.Step {
	t.Helper()
	st, err := a.Step(t.Context(), sqlCall(q))
	if err != nil {
		t.Fatalf("%.200s: %v", q, err)
	}
	return st
}

func TestFaultsEmbedded(t *testing.T) {
	faults(t, newEnv(t, Options{Train: 2}))
}

// faults are failures that a policy can cause: all of them observations, none of
// them the end of the episode.
func faults(t *testing.T, e *Env) {
	a := openFirst(t, e, env.OpenOptions{MaxSteps: 100, StepTimeout: 150 * time.Millisecond, AttemptID: "faults"})
	table := ident(a.task.row.Tables[0].Name)
	for _, q := range []string{
		"SELECT SLEEP(120)",
		"SELECT COUNT(*) FROM " + strings.TrimSuffix(strings.Repeat(table+" t%d, ", 14), ", ") + " WHERE RAND() < 2",
	} {
		n := 0
		for strings.Contains(q, "t%d") {
			n++
			q = strings.Replace(q, "t%d", fmt.Sprintf("t%d", n), 1)
		}
		st := run(t, a, q)
		if st.Obs != textTimeout || st.Kind != env.KindTimeout || st.Done || st.Facts["timeout"] != true {
			t.Fatalf("%.60s: %+v", q, st)
		}
		if st := run(t, a, "SELECT 1"); st.Obs != "[(1,)]" {
			t.Fatalf("after a timeout: %s", st.Obs)
		}
	}
	a.stepTimeout = 20 * time.Second
	for q, errno := range map[string]int{
		"SELECT 1; SELECT 2":                    1064,
		"":                                      1065,
		"  -- nothing":                          1065,
		";":                                     1065,
		"SELECT '" + strings.Repeat("x", 5<<20): 1153,
		strings.Repeat("(", 1000000):            0,
		"SELECT " + strings.Repeat("1+", 50000) + "1": 0,
		"\x00\xff\xfe": 1064,
	} {
		st := run(t, a, q)
		if n := len([]rune(st.Obs)); n > 811 {
			t.Errorf("%.30q: observation of %d characters", q, n)
		}
		if errno != 0 && (st.Kind != env.KindToolError || st.Facts["errno"] != errno) {
			t.Errorf("%.30q: errno %v, want %d: %.200s", q, st.Facts["errno"], errno, st.Obs)
		}
	}
	big := run(t, a, "SELECT '"+strings.Repeat("é", 1000000)+"'")
	if !strings.HasSuffix(big.Obs, "[TRUNCATED]") || len([]rune(big.Obs)) != 811 || big.Facts["truncated"] != true {
		t.Errorf("10^6 characters: %.50s... of %d", big.Obs, len(big.Obs))
	}
	// A connection that dies on a living server is repaired.
	st := run(t, a, fmt.Sprintf("KILL %d", a.ses.id))
	if a.infra != nil {
		t.Fatalf("kill of the own connection: %v", a.infra)
	}
	t.Logf("kill of the own connection shows %s", st.Obs)
	if st := run(t, a, "SELECT COUNT(*) FROM "+table); st.Kind != env.KindOK {
		if st = run(t, a, "SELECT COUNT(*) FROM "+table); st.Kind != env.KindOK {
			t.Errorf("after the kill: %s", st.Obs)
		}
	}
	// Dropping the database is the policy's own doing.
	if st := run(t, a, "DROP DATABASE "+a.db.name); st.Kind != env.KindOK {
		t.Fatalf("drop: %s", st.Obs)
	}
	if st := run(t, a, "SELECT * FROM "+table); st.Kind != env.KindToolError {
		t.Errorf("after the drop: %s", st.Obs)
	}
	if _, err := a.Step(t.Context(), call(ToolCommit, "answers", []string{"x"})); err != nil {
		t.Fatal(err)
	}
	if v, err := a.Grade(t.Context()); err != nil || v.Outcome != env.Failed {
		t.Errorf("graded %v, %v", v.Outcome, err)
	}
	if err := a.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestEpisodeDeadlineIsTheEnd(t *testing.T) {
	a := openFirst(t, newEnv(t, Options{Train: 1}), env.OpenOptions{})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	st, err := a.Step(ctx, sqlCall("SELECT SLEEP(120)"))
	if err != nil || !st.Done || st.Kind != env.KindTimeout {
		t.Fatalf("%+v, %v", st, err)
	}
	if v, err := a.Grade(t.Context()); err != nil || v.Outcome != env.Timeout {
		t.Errorf("graded %v, %v", v.Outcome, err)
	}
}

func TestMemoryGuard(t *testing.T) {
	a := openFirst(t, newEnv(t, Options{Train: 1, MemLimit: 96 << 20}), env.OpenOptions{StepTimeout: 30 * time.Second})
	table := ident(a.task.row.Tables[0].Name)
	st := run(t, a, "SELECT REPEAT('x', 100000), a.*, b.* FROM "+table+" a, "+table+" b, "+table+" c, "+table+" d, "+table+" e ORDER BY RAND()")
	if st.Facts["errno"] != 1041 {
		t.Errorf("%.100s", st.Obs)
	}
	if st := run(t, a, "SELECT 1"); st.Obs != "[(1,)]" {
		t.Errorf("after the guard: %s", st.Obs)
	}
}

// Close leaves nothing behind, whatever state the attempt is in.
func TestNoLeaks(t *testing.T) {
	e := newEnv(t, Options{Train: 4})
	before := goleak.IgnoreCurrent()
	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			a, err := e.open(context.Background(), e.tasks[env.Train][i%4], env.OpenOptions{})
			if err != nil {
				t.Error(err)
				return
			}
			a.Step(context.Background(), sqlCall("SELECT * FROM "+ident(a.task.row.Tables[0].Name)))
			if err := a.Close(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	goleak.VerifyNone(t, before)
	runtime.GC()
}

func TestRefusedSettings(t *testing.T) {
	a := openFirst(t, newEnv(t, Options{Train: 1}), env.OpenOptions{MaxSteps: 50})
	for _, q := range []string{"SET GLOBAL sql_mode=''", "SET @@global.sql_mode=''", "SET PERSIST sql_mode=''", "PREPARE s FROM 'SET GLOBAL sql_mode=1'"} {
		if st := run(t, a, q); st.Facts["errno"] != 1227 {
			t.Errorf("%s: %s", q, st.Obs)
		}
	}
}

func TestTransactionsAreCommitted(t *testing.T) {
	e := newEnv(t, Options{Train: 64})
	for _, tk := range e.tasks[env.Train] {
		if tk.row.Kind() != "UPDATE" {
			continue
		}
		a, err := e.open(t.Context(), tk, env.OpenOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close(t.Context())
		run(t, a, "START TRANSACTION")
		for _, act := range goldActions(tk) {
			if _, err := a.Step(t.Context(), act); err != nil {
				t.Fatal(err)
			}
		}
		if v, err := a.Grade(t.Context()); err != nil || !v.Success {
			t.Errorf("graded %v, %v", v.Outcome, err)
		}
		return
	}
	t.Fatal("no UPDATE task")
}

func TestGradingIgnoresSessionState(t *testing.T) {
	e := newEnv(t, Options{Source: sampleRows(t), Split: env.Train})
	a, err := e.open(t.Context(), e.byID["sample-1"], env.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close(t.Context())
	run(t, a, "INSERT INTO Boats VALUES ('Gull','3')")
	for _, q := range []string{"SET SESSION group_concat_max_len=4", "SET NAMES latin1", "CREATE DATABASE other", "USE other", "LOCK TABLES dbbench.Boats WRITE"} {
		run(t, a, q)
	}
	if _, err := a.Step(t.Context(), call(ToolCommit, "answers", []string{})); err != nil {
		t.Fatal(err)
	}
	if v, err := a.Grade(t.Context()); err != nil || !v.Success {
		t.Errorf("graded %v (%v), %v", v.Outcome, v.Audit, err)
	}
}

func TestDemos(t *testing.T) {
	e := newEnv(t, Options{Train: 30, Val: 2, Test: 2})
	ref := e.tasks[env.Train][0].ref
	for _, style := range []string{"good", "sloppy", "recover"} {
		ds, err := e.Demos(ref, style)
		if err != nil || len(ds) > 0 && (ds[0].Good != (style != "sloppy") || !strings.HasPrefix(ds[0].Turns[0].Text, "<tool_call>\n<function=")) {
			t.Errorf("%s: %+v, %v", style, ds, err)
		}
	}
	if _, err := e.Demos(ref, "x"); err == nil {
		t.Error("unknown style accepted")
	}
	if _, err := e.Demos(e.tasks[env.Test][0].ref, "good"); err == nil {
		t.Error("test task demonstrated")
	}
}

// Demonstrations, run as actions, end as their style says.
func TestDemoPrograms(t *testing.T) {
	e := newEnv(t, Options{Train: 80})
	for _, tk := range e.tasks[env.Train] {
		for _, p := range []struct {
			prog embedded.Program
			good bool
		}{{tk.demo.Good, true}, {tk.demo.Recover, true}, {tk.demo.Sloppy, false}} {
			if len(p.prog) == 0 {
				continue
			}
			a, err := e.open(t.Context(), tk, env.OpenOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for _, text := range p.prog.Turns() { // through the parser, as an episode does
				turn := chat.ParseTurn(text, chat.Strict, false)
				if len(turn.Calls) != 1 || len(turn.Malformed) > 0 {
					t.Fatalf("turn %q parses to %+v", text, turn)
				}
				if _, err := a.Step(t.Context(), env.CallAction(turn.Calls[0], text)); err != nil {
					t.Fatal(err)
				}
			}
			v, err := a.Grade(t.Context())
			if err != nil || v.Success != p.good {
				t.Errorf("%s %s: success %v, want %v (%v)", tk.ref.ID, tk.demo.Family, v.Success, p.good, err)
			}
			if err := a.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestFirstValue(t *testing.T) {
	for args, want := range map[string]string{
		`{"query":"a"}`:                `"a"`,
		`{"whatever":"a","query":"b"}`: `"a"`,
		`{"a":"1","b":"2","a":"3"}`:    `"3"`,
		` {"a" : [1, 2]} `:             `[1, 2]`,
	} {
		if got, err := firstValue(json.RawMessage(args)); err != nil || string(got) != want {
			t.Errorf("%s: %s, %v", args, got, err)
		}
	}
}

func TestObservationsAndFacts(t *testing.T) {
	e := newEnv(t, Options{Source: sampleRows(t), Split: env.Train})
	a, err := e.open(t.Context(), e.byID["sample-0"], env.OpenOptions{MaxSteps: 100})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close(t.Context())
	type facts = map[string]any
	for _, c := range []struct {
		q, obs string
		want   facts
	}{
		{"DESCRIBE Boats", "[('Boat name', 'text', 'YES', '', None, ''), ('Rank', 'text', 'YES', '', None, '')]",
			facts{"stmt_kind": "show", "schema_seen": true, "sample_seen": false, "tables": []string{"Boats"}}},
		{"SELECT * FROM Boats", `[('Terns', '1'), ("O'Hara", '1,200')]`,
			facts{"stmt_kind": "select", "sample_seen": true, "rows_returned": 2, "truncated": false, "has_limit": false, "sample_thousands": true}},
		{"select  *  from Boats ; ", `[('Terns', '1'), ("O'Hara", '1,200')]`, facts{"repeat_of": 2}},
		{"SELECT Rank FROM Boats", "1064 (42000): You have an error in your SQL syntax; check the manual that corresponds to your MySQL server version " +
			"for the right syntax to use near 'FROM Boats' at line 1", facts{"errno": 1064, "reserved_unquoted": []string{"Rank"}}},
		{"SELECT `Boat name` FROM Boats WHERE `Rank` > 5 AND `Boat name` = 'x' ORDER BY `Rank` LIMIT 1", "[]",
			facts{"where_conjuncts": 2, "has_order": true, "has_limit": true, "limit_one": true, "ordered_text_col_uncast": true,
				"uncast_numeric_compare": true, "empty_result": true, "where_columns": []string{"Rank", "Boat name"}, "where_equality": true}},
		{"SELECT MAX(`Rank`) FROM Boats", "[('1,200',)]", facts{"aggregates": []string{"MAX"}, "uncast_aggregate": true, "last_select_values": []string{"1,200"}}},
		{"SELECT COUNT(*), SUM(1), AVG(2), SUM(CAST(REPLACE(`Rank`, ',', '') AS SIGNED)), 7 % 2, 1/4, SUM(`Rank` > 5) FROM Boats",
			"[(2, Decimal('2'), Decimal('2.0000'), Decimal('1201'), 1, Decimal('0.2500'), Decimal('0'))]", facts{"null_result": false}},
		{"SELECT NULL", "[(None,)]", facts{"null_result": true}},
		{"SELECT nope FROM Boats", "1054 (42S22): Unknown column 'nope' in 'field list'", facts{"errno": 1054}},
		{"SELECT * FROM nope", "1146 (42S02): Table 'dbbench.nope' doesn't exist", facts{"errno": 1146, "tables": []string{"nope"}}},
		{"UPDATE Boats SET `Rank`='9' WHERE `Boat name`='nobody'", "[]", facts{"stmt_kind": "update", "affected_rows": 0, "dml_done": true, "post_dml_select": false}},
		{"UPDATE Boats SET `Rank`='9' WHERE `Boat name`='terns'", "[]", facts{"affected_rows": 1, "dml_repeat": false}},
		{"UPDATE Boats SET `Rank`='9' WHERE `Boat name`='terns'", "[]", facts{"affected_rows": 0, "dml_repeat": true, "repeat_of": 12}},
		{"SELECT `Rank` FROM Boats WHERE `Boat name`='Terns' OR 1=2 AND 1=1", "[('9',)]", facts{"post_dml_select": true, "and_or_mixed": true}},
		{"SELECT 1; DROP TABLE Boats", "1064 (42000): You have an error in your SQL syntax; check the manual that corresponds to your MySQL server version " +
			"for the right syntax to use near 'DROP TABLE Boats' at line 1", facts{"multi_statement": true, "errno": 1064}},
		{"SELECT CAST('2020-01-02' AS DATE), CAST('2020-01-02 03:04:00' AS DATETIME), CAST('01:02:03' AS TIME)",
			"[(datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3, 4), datetime.timedelta(seconds=3723))]", nil},
		{"WITH x AS (SELECT * FROM Boats) SELECT COUNT(*) FROM x", "[(2,)]", facts{"stmt_kind": "select", "tables": []string{"Boats"}}},
		{"SELECT SUM(c), AVG(c), MAX(c) FROM (SELECT COUNT(*) AS c FROM Boats GROUP BY `Boat name`) t", "[(Decimal('2'), Decimal('1.0000'), 1)]", nil},
		{"WITH w AS (SELECT CAST('3' AS SIGNED) AS n) SELECT SUM(n) FROM w", "[(Decimal('3'),)]", nil},
		{"SELECT 1.50, 2e0, 'a\nb', x'41', TRUE", "[(Decimal('1.50'), 2.0, 'a\\nb', b'A', 1)]", nil},
	} {
		st := run(t, a, c.q)
		if st.Obs != c.obs {
			t.Errorf("%s\n got %s\nwant %s", c.q, st.Obs, c.obs)
		}
		for k, v := range c.want {
			if !reflect.DeepEqual(st.Facts[k], v) {
				t.Errorf("%s: fact %s = %v (%T), want %v", c.q, k, st.Facts[k], st.Facts[k], v)
			}
		}
	}
	// Facts carry no gold.
	gold := a.task.row.Label[0]
	if o := a.Initial(); strings.Contains(fmt.Sprint(o.Facts), gold) {
		t.Error("initial facts hold the label")
	}
	st, err := a.Step(t.Context(), env.Action{Tool: ToolCommit, Args: json.RawMessage(`{"answers":"[\"O'Hara\"]"}`)})
	if err != nil || !st.Done || st.Facts["committed"] != true || !slices.Equal(st.Facts["answers"].([]string), []string{gold}) {
		t.Errorf("commit: %+v, %v", st, err)
	}
	if v, err := a.Grade(t.Context()); err != nil || !v.Success {
		t.Errorf("graded %v, %v", v, err)
	}
}
