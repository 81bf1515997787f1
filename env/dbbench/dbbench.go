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
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
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

	Mix embedded.Mix // TinyDB: weight per task family; nil is the default mix

	Compare     string        // fc (default), v02 or strict
	MaxSteps    int           // default 15
	StepTimeout time.Duration // SQL deadline, default 60 s
	MaxChars    int           // observation cap in code points, default 800
	MemLimit    int64         // embedded: heap growth in bytes at which a query is killed, default 1 GiB
	Listen      string        // embedded: "127.0.0.1:0" opens a socket for a mysql client; default none
	Collation   string        // real server: collation of databases and connections; default the server's for utf8mb4

	Invalid map[string]string // task id -> reason, from a gold replay; left out of every split
}

// Error is a failure the user can fix.
type Error struct {
	Op   string
	Err  error
	Hint string
}

func (e *Error) Error() string { return e.Op + ": " + e.Err.Error() }

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// withDefaults fills in zero values and reports every value out of range.
func (o Options) withDefaults() (Options, error) {
	def := func(p *int, v int) {
		if *p == 0 {
			*p = v
		}
	}
	if o.Source == "" {
		o.Source = TinyDB
	}
	if o.Source == TinyDB && o.Train == 0 && o.Val == 0 && o.Test == 0 {
		o.Train, o.Val, o.Test = 512, 128, 128
	}
	if o.Split == "" {
		o.Split = env.Test
	}
	if o.Compare == "" {
		o.Compare = CompareFC
	}
	def(&o.MaxSteps, 15)
	def(&o.MaxChars, 800)
	if o.StepTimeout == 0 {
		o.StepTimeout = time.Minute
	}
	if o.MemLimit == 0 {
		o.MemLimit = 1 << 30
	}
	var errs []error
	for name, n := range map[string]int{"train": o.Train, "val": o.Val, "test": o.Test} {
		if n < 0 {
			errs = append(errs, fmt.Errorf("%s = %d, want >= 0", name, n))
		}
	}
	if !slices.Contains([]string{CompareFC, CompareV02, CompareStrict}, o.Compare) {
		errs = append(errs, fmt.Errorf("compare = %q, want fc, v02 or strict", o.Compare))
	}
	if !slices.Contains([]env.Split{env.Train, env.Val, env.Test}, o.Split) {
		errs = append(errs, fmt.Errorf("split = %q, want train, val or test", o.Split))
	}
	if o.MaxSteps < 1 || o.MaxChars < 1 || o.StepTimeout < 0 || o.MemLimit < 0 {
		errs = append(errs, fmt.Errorf("max_steps %d, max_chars %d, step timeout %v, memory limit %d: want positive values",
			o.MaxSteps, o.MaxChars, o.StepTimeout, o.MemLimit))
	}
	if strings.Trim(o.Collation, "abcdefghijklmnopqrstuvwxyz0123456789_") != "" {
		errs = append(errs, fmt.Errorf("collation = %q, want a name such as utf8mb4_0900_ai_ci", o.Collation))
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return o, errors.Join(errs...)
}

// Env is the DBBench environment. It is safe for concurrent use.
type Env struct {
	o       Options
	info    env.Info
	tasks   map[env.Split][]*task
	byID    map[string]*task
	backend backend
	trans   *translator
}

var (
	_ env.Env          = (*Env)(nil)
	_ env.Demonstrator = (*Env)(nil)
)

// New reads or generates the tasks and checks the options, reporting every
// problem at once. A server given by DSN is dialled by Health and Open, not here.
func New(o Options) (*Env, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("configure dbbench: %w", err)
	}
	e := &Env{o: o, trans: newTranslator(embeddedName), backend: embeddedBackend{o.Listen}}
	e.info = env.Info{Name: "dbbench", Backend: "embedded", Versions: map[string]string{"engine": embedded.Version}, Counts: map[env.Split]int{}}
	if err := e.load(); err != nil {
		return nil, err
	}
	if o.DSN != "" {
		real, err := newReal(o.DSN, o.Collation)
		if err != nil {
			return nil, &Error{"open server", err, "check the dsn: root@tcp(127.0.0.1:3306)/ or user:password@unix(/path/to/socket)/"}
		}
		e.backend = real
		e.info.Backend = "mysql"
		e.info.Versions = map[string]string{}
	}
	e.info.Label = label(o.Source, o.DSN != "")
	e.info.Flags = []string{"compare=" + o.Compare}
	return e, nil
}

// label is what reports may call the numbers (envs.md 6.1).
func label(source string, real bool) string {
	switch {
	case source == TinyDB && real:
		return "TinyDB, MySQL server"
	case source == TinyDB:
		return "TinyDB"
	case real:
		return "DBBench"
	}
	return "DBBench rows, embedded engine"
}

// Info describes the environment: label, back-end, counts, invalid rows. The
// server's version is known after Health.
func (e *Env) Info() env.Info {
	i := e.info
	i.Counts = maps.Clone(i.Counts)
	i.Versions = maps.Clone(i.Versions)
	i.Invalid = slices.Clone(i.Invalid)
	return i
}

// Tasks lists the train or val split; test is sealed.
func (e *Env) Tasks(_ context.Context, s env.Split) ([]env.TaskRef, error) {
	switch s {
	case env.Train, env.Val:
		return refs(e.tasks[s]), nil
	case env.Test:
		return nil, fmt.Errorf("list tasks of dbbench: %w", env.ErrSealed)
	}
	return nil, fmt.Errorf("list tasks of dbbench: split %q, want train or val", s)
}

// TestTasks lists the sealed split.
func (e *Env) TestTasks(_ context.Context, u env.Unsealed) ([]env.TaskRef, error) {
	if err := u.Check(e.info); err != nil {
		return nil, err
	}
	return refs(e.tasks[env.Test]), nil
}

func refs(ts []*task) []env.TaskRef {
	out := make([]env.TaskRef, len(ts))
	for i, t := range ts {
		out[i] = t.ref
		out[i].Tags = maps.Clone(t.ref.Tags)
	}
	return out
}

// find resolves a reference; the split is ours to say, not the caller's.
func (e *Env) find(t env.TaskRef, u env.Unsealed) (*task, error) {
	tk, ok := e.byID[t.ID]
	if !ok {
		for _, bad := range e.info.Invalid {
			if bad.ID == t.ID {
				return nil, fmt.Errorf("open task %s: %w: %s", t.ID, env.ErrTaskInvalid, bad.Reason)
			}
		}
		return nil, fmt.Errorf("open task %q of dbbench: %w", t.ID, env.ErrUnknownTask)
	}
	if tk.ref.Split == env.Test {
		if err := u.Check(e.info); err != nil {
			return nil, err
		}
	}
	return tk, nil
}

// Open creates the task's database and returns an attempt at its initial state.
// A server that cannot be used gives an *env.InfraError; a server that refuses
// the task's tables gives env.ErrTaskInvalid.
func (e *Env) Open(ctx context.Context, t env.TaskRef, o env.OpenOptions) (env.Attempt, error) {
	tk, err := e.find(t, o.Unsealed)
	if err != nil {
		return nil, err
	}
	return e.open(ctx, tk, o)
}

func (e *Env) open(ctx context.Context, tk *task, o env.OpenOptions) (*attempt, error) {
	id := o.AttemptID
	if id == "" {
		id = rand.Text() // external names alone depend on it
	}
	a := &attempt{e: e, task: tk, ledger: newLedger(), stepTimeout: o.StepTimeout, maxSteps: o.MaxSteps}
	if a.stepTimeout <= 0 {
		a.stepTimeout = e.o.StepTimeout
	}
	if a.maxSteps <= 0 {
		a.maxSteps = e.o.MaxSteps
	}
	ctx, cancel := context.WithTimeout(ctx, infraTimeout)
	defer cancel()
	db, ses, digest, err := e.prepare(ctx, &tk.row, id)
	if err != nil {
		return nil, err
	}
	a.db, a.ses, a.initDigest = db, ses, digest
	return a, nil
}

// prepare makes a database, fills it and hashes it.
func (e *Env) prepare(ctx context.Context, row *embedded.Row, id string) (*database, *session, string, error) {
	db, err := e.backend.create(ctx, id)
	if err != nil {
		return nil, nil, "", &env.InfraError{Phase: "open", Retryable: true, Err: err}
	}
	ses, err := db.connect(ctx)
	var digest string
	if err == nil {
		if err = ses.load(ctx, row.Tables); err == nil {
			var d []string
			d, err = ses.digests(ctx, row.Tables)
			digest = joinDigests(d)
		}
	}
	if err == nil {
		return db, ses, digest, nil
	}
	ses.close()
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), infraTimeout)
	defer cancel()
	err = errors.Join(err, db.drop(clean))
	if refused(err) {
		return nil, nil, "", fmt.Errorf("open task: %w: %w", env.ErrTaskInvalid, err)
	}
	return nil, nil, "", &env.InfraError{Phase: "open", Retryable: true, Err: err}
}

// MaxAttempts is how many attempts may be open at once, 0 = any number. An attempt holds one connection of a real server, and needs
// another for short times; a tenth of the connections is left to them and to other clients.
func (e *Env) MaxAttempts(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, infraTimeout)
	defer cancel()
	n, err := e.backend.connections(ctx)
	if err != nil {
		return 0, &env.InfraError{Phase: "health", Retryable: true, Err: err}
	}
	if n == 0 {
		return 0, nil
	}
	return max(1, n*9/10-16), nil
}

// Health opens and closes one empty database; on a real server it also drops
// what dead runs left behind.
func (e *Env) Health(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, infraTimeout)
	defer cancel()
	infra := func(err error) error {
		return &env.InfraError{Phase: "health", Retryable: true, Err: &Error{"reach database", err, "start the server or correct the DSN (task.dsn, --dsn); without one the embedded database is used"}}
	}
	if _, err := e.backend.version(ctx); err != nil {
		return infra(err)
	}
	if r, ok := e.backend.(*realBackend); ok {
		if err := r.reap(ctx); err != nil {
			return infra(err)
		}
	}
	db, err := e.backend.create(ctx, "health-"+rand.Text())
	if err != nil {
		return infra(err)
	}
	ses, err := db.connect(ctx)
	ses.close()
	if err := errors.Join(err, db.drop(ctx)); err != nil {
		return infra(err)
	}
	return nil
}

// ServerVersion asks the back-end for its version.
func (e *Env) ServerVersion(ctx context.Context) (string, error) { return e.backend.version(ctx) }

// Close releases the connections to a real server.
func (e *Env) Close() error { return e.backend.close() }

// Question is the text of the task as the policy first sees it, for routers and
// leak scans; it holds no gold. Test tasks need the unsealed value.
func (e *Env) Question(t env.TaskRef, u env.Unsealed) (string, error) {
	tk, err := e.find(t, u)
	if err != nil {
		return "", err
	}
	return tk.question(), nil
}

// Demos returns the scripted episode of a generated train task in the given
// style: good, sloppy or recover.
func (e *Env) Demos(t env.TaskRef, style string) ([]env.Demo, error) {
	tk, ok := e.byID[t.ID]
	if !ok {
		return nil, fmt.Errorf("demonstrate task %q: %w", t.ID, env.ErrUnknownTask)
	}
	if tk.ref.Split != env.Train || tk.demo == nil {
		return nil, fmt.Errorf("demonstrate task %s: only generated train tasks have demonstrations", t.ID)
	}
	var p embedded.Program
	switch style {
	case "good":
		p = tk.demo.Good
	case "sloppy":
		p = tk.demo.Sloppy
	case "recover":
		p = tk.demo.Recover
	default:
		return nil, fmt.Errorf("demonstrate task %s: style %q, want good, sloppy or recover", t.ID, style)
	}
	if len(p) == 0 {
		return nil, nil
	}
	d := env.Demo{Good: style != "sloppy"}
	for _, text := range p.Turns() {
		d.Turns = append(d.Turns, env.DemoTurn{Text: text})
	}
	return []env.Demo{d}, nil
}
