package router

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"
	"sync"

	"harness-s/env"
)

// Row is the outcome of some attempts at one task under one harness.
type Row struct {
	Split         env.Split
	TaskID        string
	TaskText      string
	Group         string
	HarnessID     string
	Success       int            // successes among the valid attempts
	Valid         int            // attempts with a verdict; void ones are not counted
	Causes        map[string]int // cause codes of the failures
	Turns         int            // summed over the valid attempts
	Tokens        int            // policy tokens, summed
	PolicyVersion uint64
}

// ErrTestOutcome refuses evidence from the test split: the process must stop.
var ErrTestOutcome = errors.New("test outcomes are never evidence")

// Evidence is the writer's side: rows are collected and become visible all at
// once with Publish, at a step boundary (method.md R24). Safe for concurrent use.
type Evidence struct {
	mu         sync.Mutex
	allowTrain bool
	work       table
	dirty      bool
	view       *View
}

// cell holds counts of one harness on one task; fractions come from decay.
type cell struct {
	Harness string             `json:"harness"`
	Success float64            `json:"success"`
	Valid   float64            `json:"valid"`
	Causes  map[string]float64 `json:"causes,omitempty"`
	Turns   float64            `json:"turns,omitempty"`
	Tokens  float64            `json:"tokens,omitempty"`
	Policy  uint64             `json:"policy_version"` // newest that contributed
}

// entry is one task with its cells in harness order.
type entry struct {
	Task  string    `json:"task"`
	Split env.Split `json:"split"`
	Group string    `json:"group,omitempty"`
	Text  string    `json:"text"`
	Cells []cell    `json:"cells"`
}

// table is sorted by task id; it is never changed once a View holds it.
type table []entry

// NewEvidence starts an empty store for a pool whose original harness has the
// given id; version 0 is published at once. allowTrain also accepts rows of train
// tasks (default off in the method).
func NewEvidence(poolDigest, original string, allowTrain bool) *Evidence {
	e := &Evidence{allowTrain: allowTrain}
	e.view = newView(viewState{Schema: evidenceSchema, Pool: poolDigest, Original: original})
	return e
}

// Record adds a row to the next version. A row of the test split is refused with
// ErrTestOutcome.
func (e *Evidence) Record(r Row) error {
	switch {
	case r.Split == env.Test:
		return fmt.Errorf("record outcome of %s under %s: %w", r.TaskID, r.HarnessID, ErrTestOutcome)
	case r.Split == env.Train && !e.allowTrain:
		return fmt.Errorf("record outcome of %s: train outcomes are not evidence in this run (router.train_outcomes)", r.TaskID)
	case r.Split != env.Val && r.Split != env.Train:
		return fmt.Errorf("record outcome of %s: unknown split %q", r.TaskID, r.Split)
	case r.TaskID == "" || r.HarnessID == "":
		return fmt.Errorf("record outcome: task %q, harness %q", r.TaskID, r.HarnessID)
	case r.Valid < 0 || r.Success < 0 || r.Success > r.Valid:
		return fmt.Errorf("record outcome of %s: %d successes of %d valid attempts", r.TaskID, r.Success, r.Valid)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	at, ok := slices.BinarySearchFunc(e.work, r.TaskID, func(x entry, id string) int { return strings.Compare(x.Task, id) })
	if !ok {
		e.work = slices.Insert(e.work, at, entry{Task: r.TaskID, Split: r.Split, Group: r.Group, Text: r.TaskText})
	}
	t := &e.work[at]
	if t.Split != r.Split || t.Text != r.TaskText {
		return fmt.Errorf("record outcome of %s: split or text differs from the recorded one", r.TaskID)
	}
	i, ok := slices.BinarySearchFunc(t.Cells, r.HarnessID, func(c cell, id string) int { return strings.Compare(c.Harness, id) })
	if !ok {
		t.Cells = slices.Insert(t.Cells, i, cell{Harness: r.HarnessID})
	}
	c := &t.Cells[i]
	c.Success += float64(r.Success)
	c.Valid += float64(r.Valid)
	c.Turns += float64(r.Turns)
	c.Tokens += float64(r.Tokens)
	c.Policy = max(c.Policy, r.PolicyVersion)
	for cause, n := range r.Causes {
		if c.Causes == nil {
			c.Causes = map[string]float64{}
		}
		c.Causes[cause] += float64(n)
	}
	e.dirty = true
	return nil
}

// Decay multiplies every count of the next version, so that new rows weigh more
// (method.md 6.6).
func (e *Evidence) Decay(factor float64) error {
	if !(factor >= 0 && factor <= 1) {
		return fmt.Errorf("decay evidence: factor %v outside 0..1", factor)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for i := range e.work {
		for j := range e.work[i].Cells {
			c := &e.work[i].Cells[j]
			c.Success, c.Valid, c.Turns, c.Tokens = c.Success*factor, c.Valid*factor, c.Turns*factor, c.Tokens*factor
			for k := range c.Causes {
				c.Causes[k] *= factor
			}
		}
	}
	e.dirty = true
	return nil
}

// Discard drops everything since the last Publish: a recalibration in which most
// attempts were void leaves the old version in place.
func (e *Evidence) Discard() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.work, e.dirty = clone(e.view.s.Table), false
}

// Publish makes the collected rows visible as the next version, stamped with the
// step it is built at, and returns it. Without changes the old view stays.
func (e *Evidence) Publish(step int) *View {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.dirty {
		return e.view
	}
	s := e.view.s
	s.Version, s.Step, s.Table = s.Version+1, step, clone(e.work)
	e.view, e.dirty = newView(s), false
	return e.view
}

// View is the published version.
func (e *Evidence) View() *View {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.view
}

func clone(t table) table {
	out := slices.Clone(t)
	for i := range out {
		out[i].Cells = slices.Clone(out[i].Cells)
		for j := range out[i].Cells {
			out[i].Cells[j].Causes = maps.Clone(out[i].Cells[j].Causes)
		}
	}
	return out
}

const evidenceSchema = 1

// evidenceState is the store as saved in a checkpoint.
type evidenceState struct {
	View       viewState `json:"view"`
	Work       table     `json:"work,omitempty"` // only when it differs from the view
	Dirty      bool      `json:"dirty"`
	AllowTrain bool      `json:"allow_train"`
}

// MarshalJSON saves published and collected rows.
func (e *Evidence) MarshalJSON() ([]byte, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := evidenceState{View: e.view.s, Dirty: e.dirty, AllowTrain: e.allowTrain}
	if e.dirty {
		s.Work = e.work
	}
	return json.Marshal(s)
}

// UnmarshalJSON restores what MarshalJSON saved.
func (e *Evidence) UnmarshalJSON(b []byte) error {
	var s evidenceState
	if err := json.Unmarshal(b, &s); err != nil {
		return fmt.Errorf("read evidence: %w", err)
	}
	v, err := viewOf(s.View)
	if err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.view, e.allowTrain, e.dirty = v, s.AllowTrain, s.Dirty
	if e.work = s.Work; !e.dirty {
		e.work = clone(v.s.Table)
	}
	return nil
}

// viewState is what a view is made of and how it is stored (evidence/vNNN.json).
type viewState struct {
	Schema   int    `json:"schema"`
	Pool     string `json:"pool_digest"`
	Original string `json:"original"`
	Version  int    `json:"version"`
	Step     int    `json:"step"`
	Table    table  `json:"tasks"`
}

// View is one immutable version of the evidence.
type View struct {
	s      viewState
	digest string
	index  *similarity
}

func newView(s viewState) *View {
	v := &View{s: s, index: newSimilarity(s.Table)}
	// Only strings and finite numbers are in the state, so encoding cannot fail;
	// if it did, the digest of nothing would match no record.
	b, err := json.Marshal(s)
	if err == nil {
		h := sha256.Sum256(b)
		v.digest = hex.EncodeToString(h[:])
	}
	return v
}

// viewOf checks a stored state before it is used.
func viewOf(s viewState) (*View, error) {
	if s.Schema != evidenceSchema {
		return nil, fmt.Errorf("read evidence: schema %d, this program reads %d", s.Schema, evidenceSchema)
	}
	var errs []error
	for i, t := range s.Table {
		if t.Split == env.Test {
			errs = append(errs, fmt.Errorf("task %s: %w", t.Task, ErrTestOutcome))
		}
		if i > 0 && s.Table[i-1].Task >= t.Task {
			errs = append(errs, fmt.Errorf("task %s is out of order", t.Task))
		}
		if !sort.SliceIsSorted(t.Cells, func(a, b int) bool { return t.Cells[a].Harness < t.Cells[b].Harness }) {
			errs = append(errs, fmt.Errorf("cells of task %s are out of order", t.Task))
		}
		for _, c := range t.Cells {
			if !(c.Success >= 0 && c.Success <= c.Valid) {
				errs = append(errs, fmt.Errorf("task %s under %s: %v successes of %v", t.Task, c.Harness, c.Success, c.Valid))
			}
		}
	}
	if len(errs) > 0 {
		return nil, fmt.Errorf("read evidence: %w", errors.Join(errs...))
	}
	return newView(s), nil
}

// Version counts publications; 0 is empty. Step is when it was built.
func (v *View) Version() int { return v.s.Version }

// Step is the step at whose boundary the version was built.
func (v *View) Step() int { return v.s.Step }

// PoolDigest names the pool the outcomes belong to.
func (v *View) PoolDigest() string { return v.s.Pool }

// Digest is the SHA-256 of the stored form.
func (v *View) Digest() string { return v.digest }

// Tasks is the number of tasks with outcomes.
func (v *View) Tasks() int { return len(v.s.Table) }

// MarshalJSON is the stored form (evidence/vNNN.json).
func (v *View) MarshalJSON() ([]byte, error) { return json.Marshal(v.s) }

// ParseView reads a stored view; its digest is that of the original.
func ParseView(b []byte) (*View, error) {
	var s viewState
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("read evidence: %w", err)
	}
	return viewOf(s)
}

// Counts returns successes and valid attempts of a harness on a task, after decay.
func (v *View) Counts(task, harnessID string) (success, valid float64) {
	at, ok := slices.BinarySearchFunc(v.s.Table, task, func(x entry, id string) int { return strings.Compare(x.Task, id) })
	if !ok {
		return 0, 0
	}
	c := v.s.Table[at].cell(harnessID)
	return c.Success, c.Valid
}

// cell returns the counts of a harness, zero when it was not run.
func (t *entry) cell(harnessID string) cell {
	i, ok := slices.BinarySearchFunc(t.Cells, harnessID, func(c cell, id string) int { return strings.Compare(c.Harness, id) })
	if !ok {
		return cell{}
	}
	return t.Cells[i]
}
