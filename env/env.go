// Package env is the contract between tasks and everything that runs them: an
// Env lists tasks and opens attempts, an Attempt is the environment side of one
// episode, a Verdict says how it ended and whether that counts.
//
// Three rules shape it. Infrastructure faults are errors (*InfraError) and the
// outcome InfraVoid, never failures of the policy. Every attempt starts from the
// task's initial state, shown by a digest. The test split is sealed: its tasks
// need an Unsealed value, which can only be had by writing a record first.
//
// The package must never know a model, a harness, a router or a trainer, and
// holds no registry: the command wires environments by name. Start with Env and
// Attempt; envtest.Run is the executable form of the rules (envs.md 1.2).
package env

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"harness-s/model/chat"
)

// Split names a disjoint part of an environment's tasks.
type Split string

// The splits. Test is sealed.
const (
	Train Split = "train"
	Val   Split = "val"
	Test  Split = "test"
)

// TaskRef identifies one task. It carries no question text and no gold.
type TaskRef struct {
	Env, ID    string
	Split      Split
	Group      string            // scenario, repository or task family: sampling and routing
	Difficulty int               // 0 unknown
	Tags       map[string]string // "type": "INSERT", "causes": "D-SET,D-PROTO"
}

// Env is a source of tasks and attempts. All methods may be called from many
// goroutines.
type Env interface {
	Info() Info
	// Tasks lists train or val; test returns ErrSealed.
	Tasks(ctx context.Context, s Split) ([]TaskRef, error)
	// TestTasks lists the sealed split.
	TestTasks(ctx context.Context, u Unsealed) ([]TaskRef, error)
	// Open starts an attempt, always from the task's initial state.
	Open(ctx context.Context, t TaskRef, o OpenOptions) (Attempt, error)
	Health(ctx context.Context) error
	Close() error
}

// Info describes an environment and what stands behind it.
type Info struct {
	Name       string            `json:"name"`    // "dbbench"
	Label      string            `json:"label"`   // what reports may call the numbers, e.g. "TinyDB"
	Backend    string            `json:"backend"` // "embedded" or "mysql"
	Versions   map[string]string `json:"versions,omitempty"`
	DataDigest string            `json:"data_digest"` // sha256 of the task data
	Flags      []string          `json:"flags,omitempty"`
	Counts     map[Split]int     `json:"counts"`
	Invalid    []Invalid         `json:"invalid,omitempty"`
}

// Invalid is a task left out of every split, with the reason.
type Invalid struct {
	ID     string `json:"id"`
	Reason string `json:"reason"`
}

// OpenOptions are the limits of one attempt; zero values mean the
// environment's defaults.
type OpenOptions struct {
	AttemptID                   string        // globally unique; every external name derives from it
	MaxSteps                    int           // environment-side ceiling on Step calls; the same for base and auxiliaries
	StepTimeout, EpisodeTimeout time.Duration // the episode's own deadline reaches Step through its context
	Seed                        uint64
	Unsealed                    Unsealed // required for a test task
}

// Attempt is the environment side of one episode. It is used by one goroutine.
type Attempt interface {
	// Initial is the task as the policy sees it: Text is the first user message.
	Initial() Observation
	// System is text the environment itself puts first; empty when the protocol
	// text belongs to the harness.
	System() string
	Tools() []ToolSpec
	// Step runs one action. Bad actions are observations; only faults of the
	// infrastructure (*InfraError) and misuse (ErrDone) are errors.
	Step(ctx context.Context, a Action) (Step, error)
	// Grade is terminal and idempotent; its result is never shown to a policy or
	// a harness. After an infrastructure fault it returns outcome InfraVoid
	// together with the *InfraError.
	Grade(ctx context.Context) (Verdict, error)
	// Close releases everything. It is idempotent, has its own deadline and works
	// after ctx is cancelled.
	Close(ctx context.Context) error
}

// Observation is what an attempt shows before the first action.
type Observation struct {
	Text  string
	Facts map[string]any
}

// ToolSpec declares one tool. A harness may re-document it, not add power.
type ToolSpec struct {
	Name        string
	Description string
	Parameters  json.RawMessage // JSON schema of the argument object
}

// Chat is the tool as the chat renderer takes it: the OpenAI-style object
// {"type": "function", "function": {...}}.
func (t ToolSpec) Chat() chat.Tool {
	type fn struct {
		Name        string          `json:"name"`
		Description string          `json:"description"`
		Parameters  json.RawMessage `json:"parameters"`
	}
	params := t.Parameters
	if len(params) == 0 {
		params = json.RawMessage(`{"type":"object","properties":{}}`)
	}
	b, err := json.Marshal(struct {
		Type     string `json:"type"`
		Function fn     `json:"function"`
	}{"function", fn{t.Name, t.Description, params}})
	if err != nil {
		b = []byte(`null`) // only a Parameters value that is not JSON gets here
	}
	return chat.Tool{JSON: b}
}

// Action is one thing a policy asks the environment to do.
type Action struct {
	Tool string          // empty: no tool call could be made out
	Args json.RawMessage // argument object, keys in the order written
	Code string          // for environments that run code
	Raw  string          // the policy's text, for messages
}

// CallAction is the action of one parsed tool call; the argument object keeps
// the order in which the policy wrote it. raw is the policy's text.
func CallAction(c chat.Call, raw string) Action {
	args := []byte{'{'}
	for i, a := range c.Args {
		if i > 0 {
			args = append(args, ',')
		}
		key, err := json.Marshal(a.Key)
		if err != nil {
			key = []byte(`""`) // a Go string always marshals
		}
		args = append(append(args, key...), ':')
		if len(a.Value) == 0 {
			args = append(args, "null"...)
		}
		args = append(args, a.Value...)
	}
	return Action{Tool: c.Name, Args: append(args, '}'), Raw: raw}
}

// StepKind classifies an observation.
type StepKind uint8

// The kinds of observation.
const (
	KindOK StepKind = iota
	KindToolError
	KindTimeout
	KindFormatError
	KindLimit
)

func (k StepKind) String() string {
	return pick(int(k), "ok", "tool_error", "timeout", "format_error", "limit")
}

// Step is the result of one action.
type Step struct {
	Obs   string // exact text as the real environment gives it, before harness formatting
	Kind  StepKind
	Done  bool           // the episode cannot go on: terminal action accepted, or limit reached
	Facts map[string]any // derived from action and observation only: no hidden state, no gold
}

// Check is one requirement of a verifier.
type Check struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail,omitempty"`
}

// Verdict is the result of grading. Audit["init_digest"] is always set when the
// attempt got as far as an initial state.
type Verdict struct {
	Success bool
	Score   float64
	Checks  []Check
	Outcome Outcome
	Audit   map[string]any
}

// Outcome is how an attempt ended. The zero value is no outcome.
type Outcome uint8

// The outcomes (envs.md 1.1).
const (
	Solved Outcome = iota + 1
	Failed
	NoSubmission
	StepLimit
	ContextLimit
	Timeout
	InfraVoid
	HarnessFault
	TaskInvalid
)

var outcomeNames = [...]string{"none", "solved", "failed", "no_submission", "step_limit", "context_limit", "timeout",
	"infra_void", "harness_fault", "task_invalid"}

func (o Outcome) String() string { return pick(int(o), outcomeNames[:]...) }

// MarshalText writes the name, so records stay readable.
func (o Outcome) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// UnmarshalText reads a name written by MarshalText.
func (o *Outcome) UnmarshalText(b []byte) error {
	for i, n := range outcomeNames {
		if n == string(b) {
			*o = Outcome(i)
			return nil
		}
	}
	return fmt.Errorf("parse outcome: unknown name %q", b)
}

// Class groups outcomes by what the trainer does with them (method.md 3.1).
type Class uint8

// The classes.
const (
	ClassNone Class = iota
	ClassSuccess
	ClassPolicyFail
	ClassTimeout
	ClassInfra
	ClassHarnessFault
	ClassInvalid
)

func (c Class) String() string {
	return pick(int(c), "none", "success", "policy_fail", "timeout", "infra", "harness_fault", "invalid")
}

// Class maps an outcome to its class. An unknown outcome counts as infra: it
// must never become a failure.
func (o Outcome) Class() Class {
	switch o {
	case Solved:
		return ClassSuccess
	case Failed, NoSubmission, StepLimit, ContextLimit:
		return ClassPolicyFail
	case Timeout:
		return ClassTimeout
	case HarnessFault:
		return ClassHarnessFault
	case TaskInvalid:
		return ClassInvalid
	}
	return ClassInfra
}

// Valid reports whether the attempt may enter a group's statistics.
func (o Outcome) Valid() bool {
	switch o.Class() {
	case ClassSuccess, ClassPolicyFail, ClassTimeout:
		return true
	}
	return false
}

// Success reports whether the verifier was satisfied.
func (o Outcome) Success() bool { return o == Solved }

// Sentinels for what callers branch on.
var (
	// ErrSealed refuses the test split without an Unsealed value.
	ErrSealed = errors.New("test split is sealed")
	// ErrInfra matches every *InfraError.
	ErrInfra = errors.New("infrastructure fault")
	// ErrDone refuses a Step after the episode ended.
	ErrDone = errors.New("attempt is already done")
	// ErrUnknownTask refuses a TaskRef the environment does not have.
	ErrUnknownTask = errors.New("unknown task")
	// ErrTaskInvalid refuses to open a task whose data is broken: outcome TaskInvalid.
	ErrTaskInvalid = errors.New("task is invalid")
)

// InfraError is a fault the policy cannot cause: a dead server, a lost
// connection, a full host.
type InfraError struct {
	Phase     string // open, step, grade, close
	Retryable bool
	Err       error
}

func (e *InfraError) Error() string {
	return fmt.Sprintf("%s: infrastructure fault: %v", e.Phase, e.Err)
}

// Unwrap gives the cause.
func (e *InfraError) Unwrap() error { return e.Err }

// Is makes errors.Is(err, ErrInfra) true.
func (e *InfraError) Is(target error) bool { return target == ErrInfra }

// Unsealed is the permission to read test tasks. The zero value is refused.
type Unsealed struct {
	id   string
	envs []Info
}

// ID is the id of the record written by Unseal; test results carry it.
func (u Unsealed) ID() string { return u.id }

// Check returns nil when u permits the test split of the environment described
// by i, and an error wrapping ErrSealed otherwise. A value made for named
// environments covers those alone, at the data digest they had.
func (u Unsealed) Check(i Info) error {
	if u.id == "" {
		return fmt.Errorf("open test split of %s: %w", i.Name, ErrSealed)
	}
	if len(u.envs) == 0 {
		return nil
	}
	for _, e := range u.envs {
		if e.Name == i.Name && e.DataDigest == i.DataDigest {
			return nil
		}
	}
	return fmt.Errorf("open test split of %s (data %.12s): record %s is for other data: %w", i.Name, i.DataDigest, u.id, ErrSealed)
}

// UnsealRecord is the line of the run manifest that precedes any look at test
// tasks.
type UnsealRecord struct {
	ID     string       `json:"id"`
	Reason string       `json:"reason"`
	Split  Split        `json:"split"`
	Envs   []UnsealData `json:"envs,omitempty"`
}

// UnsealData names the data a record covers.
type UnsealData struct {
	Env        string `json:"env"`
	Backend    string `json:"backend"`
	DataDigest string `json:"data_digest"`
}

// Recorder writes unseal records durably: the run manifest.
type Recorder interface {
	RecordUnseal(r UnsealRecord) error
}

// Unseal writes the record first and only then returns the permission. With
// infos the permission covers those environments alone; without, the recorder's
// run decides what it covers.
func Unseal(reason string, r Recorder, infos ...Info) (Unsealed, error) {
	if reason == "" {
		return Unsealed{}, errors.New("unseal test split: empty reason")
	}
	if r == nil {
		return Unsealed{}, errors.New("unseal test split: no recorder")
	}
	rec := UnsealRecord{Reason: reason, Split: Test}
	for _, i := range infos {
		rec.Envs = append(rec.Envs, UnsealData{Env: i.Name, Backend: i.Backend, DataDigest: i.DataDigest})
	}
	b, err := json.Marshal(rec)
	if err != nil {
		return Unsealed{}, fmt.Errorf("unseal test split: %w", err)
	}
	sum := sha256.Sum256(b)
	rec.ID = hex.EncodeToString(sum[:6])
	if err := r.RecordUnseal(rec); err != nil {
		return Unsealed{}, fmt.Errorf("unseal test split: write record: %w", err)
	}
	return Unsealed{id: rec.ID, envs: infos}, nil
}

// Demonstrator is implemented by environments that can show how train tasks are
// solved. Styles: "good" solves directly, "sloppy" makes the mistakes the
// harnesses exist for, "recover" makes one and repairs it.
type Demonstrator interface {
	Demos(t TaskRef, style string) ([]Demo, error)
}

// Demo is one scripted episode.
type Demo struct {
	Turns []DemoTurn
	Good  bool // the script is meant to be graded as solved
}

// DemoTurn is one assistant turn, tool call included, without the end token.
type DemoTurn struct {
	Text string
}

func pick(i int, names ...string) string {
	if i < 0 || i >= len(names) {
		return fmt.Sprintf("unknown(%d)", i)
	}
	return names[i]
}
