// Package dbbench is the DBBench environment: a question or a change request
// over one small SQL database, two tools (execute_sql, commit_final_answer), and
// AgentBench's grading. Tasks come from the TinyDB generator or from a file in
// AgentBench's row format; the database is the embedded engine or a real MySQL
// or MariaDB by DSN, spoken to through the same driver either way.
//
// The package must never show gold labels, digests or verdicts to an observation
// or a fact, and must never turn a fault of the server into a failure of the
// policy. It holds no prompt text beyond the protocol's own messages: harnesses
// own the rest.
//
// Start with New and Env; GoldReplay checks a file against the grader.
package dbbench

import (
	"context"
	"errors"
	"time"

	"harness-s/env"
	"harness-s/env/dbbench/embedded"
)

// TinyDB is the Source that generates tasks instead of reading a file.
const TinyDB = "tinydb"

// Names of the two tools.
const (
	ToolExecute = "execute_sql"
	ToolCommit  = "commit_final_answer"
)

// Options configure an Env. The zero value is TinyDB on the embedded engine with
// the defaults named below.
type Options struct {
	Source string // TinyDB (default) or the path of a JSONL file of rows
	DSN    string // go-sql-driver DSN of a real server; empty: embedded engine
	Seed   uint64 // TinyDB: generator seed; file: seed of the hash split

	// TinyDB: number of tasks per split (defaults 512, 128, 128).
	// File: relative weights of a hash split; all zero puts every row in Split.
	Train, Val, Test int
	Split            env.Split // file without weights (default test)

	Families []string // TinyDB: keep these families only (default all)

	Compare     string        // fc (default), v02 or strict
	MaxSteps    int           // default 15
	StepTimeout time.Duration // SQL deadline, default 60 s
	MaxChars    int           // observation cap in code points, default 800
	MemLimit    int64         // embedded: heap growth in bytes at which a query is killed, default 1 GiB
	Listen      string        // embedded: "127.0.0.1:0" opens a socket for a mysql client; default none
	Collation   string        // real server: collation of the databases; default the server's for utf8mb4

	Invalid map[string]string // task id -> reason, from a gold replay; left out of every split
}

// Env is the DBBench environment. It is safe for concurrent use.
type Env struct{ o Options }

var (
	_ env.Env          = (*Env)(nil)
	_ env.Demonstrator = (*Env)(nil)
)

// New reads or generates the tasks and checks the options, reporting every
// problem at once.
func New(o Options) (*Env, error) { return &Env{o}, nil }

// Info describes the environment: label, back-end, counts, invalid rows.
func (e *Env) Info() env.Info { return env.Info{} }

// Tasks lists the train or val split; test is sealed.
func (e *Env) Tasks(ctx context.Context, s env.Split) ([]env.TaskRef, error) { return nil, nil }

// TestTasks lists the sealed split.
func (e *Env) TestTasks(ctx context.Context, u env.Unsealed) ([]env.TaskRef, error) { return nil, nil }

// Open creates the task's database and returns an attempt at its initial state.
func (e *Env) Open(ctx context.Context, t env.TaskRef, o env.OpenOptions) (env.Attempt, error) {
	return nil, errors.New("open attempt: building")
}

// Health opens and closes one empty database.
func (e *Env) Health(ctx context.Context) error { return nil }

// Close releases the connection to a real server.
func (e *Env) Close() error { return nil }

// Demos returns scripted episodes of a generated train task in the given style:
// good, sloppy or recover.
func (e *Env) Demos(t env.TaskRef, style string) ([]env.Demo, error) { return nil, nil }

// Question is the text of the task a router may index: description and
// table information, no gold. Test tasks need the unsealed value.
func (e *Env) Question(t env.TaskRef, u env.Unsealed) (string, error) { return "", nil }

// GoldReport is the result of GoldReplay.
type GoldReport struct {
	Rows   int         `json:"rows"`
	Passed int         `json:"passed"`
	Failed []FailedRow `json:"failed"`
}

// FailedRow is one row whose gold does not pass, with the reason.
type FailedRow struct {
	ID     string `json:"id"`
	Reason string `json:"reason"`
}

// NamedRow is a row with its task id.
type NamedRow struct {
	ID string
	embedded.Row
}

// ReadRows reads a JSONL file of rows; ids derive from the row number.
func ReadRows(path string) ([]NamedRow, error) { return nil, nil }

// GoldReplay runs every row's gold through environment and grader. progress may
// be nil.
func GoldReplay(ctx context.Context, rows []NamedRow, o Options, progress func(done, total int)) (GoldReport, error) {
	return GoldReport{}, nil
}
