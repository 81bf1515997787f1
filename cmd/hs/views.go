package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"harness-s/env/harness"
	"harness-s/model"
	"harness-s/model/chat"
	"harness-s/trainer"
)

// groupView is one task of a step as hs show and the report read it from the rollouts file.
type groupView struct {
	Index    int           `json:"index"` // TASK of hs show RUN/STEP/TASK
	Task     string        `json:"task"`
	Family   string        `json:"family,omitempty"`
	Kind     string        `json:"kind"`
	Question string        `json:"question,omitempty"`
	Attempts []attemptView `json:"attempts"`
}

// attemptView is the part of a rollout record that people look at.
type attemptView struct {
	Index      int                  `json:"index"` // ATTEMPT of hs show RUN/STEP/TASK/ATTEMPT
	Step       int                  `json:"step"`
	Group      int                  `json:"group"`
	Task       string               `json:"task"`
	Family     string               `json:"family"`
	Phase      string               `json:"phase"`
	Kind       string               `json:"kind"`
	InUpdate   bool                 `json:"in_update"`
	Advantage  float64              `json:"advantage"`
	Harness    string               `json:"harness"`
	Outcome    string               `json:"outcome"`
	Success    bool                 `json:"success"`
	Turns      int                  `json:"turns"`
	Fault      string               `json:"fault,omitempty"`
	Transcript []harness.TurnRecord `json:"transcript"`
	Ledger     []ledgerView         `json:"ledger"`
	LastAction string               `json:"last_action,omitempty"`

	tok *model.Tokenizer
}

type ledgerView struct {
	IDs   []int32 `json:"ids"`
	Kinds string  `json:"kinds"`
}

var kindOfLetter = map[byte]chat.Kind{'t': chat.KindTemplate, 's': chat.KindSystem, 'u': chat.KindUser, 'o': chat.KindTool, 'p': chat.KindPolicy, 'h': chat.KindHarness}

// readGroups reads the attempts of one step, grouped by task in step order.
func readGroups(dir string, step int) ([]groupView, error) {
	tok := runTokenizer(dir)
	var out []groupView
	err := trainer.ReadRollouts(dir, step, func(line []byte) error {
		a := attemptView{tok: tok}
		if err := json.Unmarshal(line, &a); err != nil {
			return err
		}
		for _, t := range a.Transcript {
			for _, x := range t.Actions {
				a.LastAction = x.Tool + " " + x.Args
			}
		}
		for len(out) <= a.Group {
			out = append(out, groupView{Index: len(out)})
		}
		q := &out[a.Group]
		q.Task, q.Family, q.Kind = a.Task, a.Family, a.Kind
		if q.Question == "" {
			q.Question = a.text(chat.KindUser)
		}
		a.Index = len(q.Attempts)
		q.Attempts = append(q.Attempts, a)
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, usage("the file "+filepath.Join(dir, "rollouts", "step_NNNNNN.jsonl.zst")+" of that step is gone", "no rollouts of step %d in %s", step, dir)
	}
	return out, err
}

// runTokenizer loads the tokenizer of the newest checkpoint; nil without one, then transcripts show turns only.
func runTokenizer(dir string) *model.Tokenizer {
	dirs, _ := filepath.Glob(filepath.Join(dir, "checkpoints", "step_*", "model"))
	slices.Sort(dirs)
	for i := len(dirs) - 1; i >= 0; i-- {
		if t, err := model.LoadTokenizer(os.DirFS(dirs[i])); err == nil {
			return t
		}
	}
	return nil
}

func pickGroup(groups []groupView, name string) (groupView, error) {
	if n, err := strconv.Atoi(name); err == nil && n >= 0 && n < len(groups) {
		return groups[n], nil
	}
	for _, q := range groups {
		if q.Task == name {
			return q, nil
		}
	}
	return groupView{}, usage(fmt.Sprintf("tasks are 0 to %d, or one of the ids that hs show RUN/STEP lists", len(groups)-1), "no task %q in this step", name)
}

// wins is "successes/attempts" of a phase, "-" without attempts; any phase that is not base is a rescue.
func (q groupView) wins(phase string) string {
	n, c := 0, 0
	for _, a := range q.Attempts {
		if (a.Phase == "base") == (phase == "base") {
			n++
			if a.Success {
				c++
			}
		}
	}
	if n == 0 {
		return "-"
	}
	return fmt.Sprintf("%d/%d", c, n)
}

type spanView struct {
	reportSpan
	kind chat.Kind
}

func span(k chat.Kind, text string) spanView { return spanView{reportSpan{k.String(), text}, k} }

// spans is the whole context with the origin of every piece, or the turns alone without a tokenizer.
func (a attemptView) spans() []spanView {
	var out []spanView
	if a.tok == nil {
		for _, t := range a.Transcript {
			out = append(out, span(chat.KindPolicy, t.Output))
			for _, x := range t.Actions {
				out = append(out, span(chat.KindTool, "\n"+x.Observation+"\n"))
			}
			for _, r := range t.Reminders {
				out = append(out, span(chat.KindHarness, r+"\n"))
			}
		}
		return out
	}
	for _, l := range a.Ledger {
		for at := 0; at < len(l.IDs) && at < len(l.Kinds); {
			end := at
			for end < len(l.IDs) && end < len(l.Kinds) && l.Kinds[end] == l.Kinds[at] {
				end++
			}
			out = append(out, span(kindOfLetter[l.Kinds[at]], a.tok.Decode(l.IDs[at:end])))
			at = end
		}
	}
	return out
}

// text joins the spans of one origin.
func (a attemptView) text(k chat.Kind) string {
	var b strings.Builder
	for _, s := range a.spans() {
		if s.kind == k {
			b.WriteString(s.Text)
		}
	}
	return b.String()
}

// transcripts picks by a fixed rule: from the newest step that has one, the first success and the first failure without rescue under the
// original harness; and from the newest step with a rescue, the failed original and the successful rescue of the first rescued task.
func transcripts(dir string, ms metrics) ([]reportTranscript, error) {
	var out []reportTranscript
	add := func(why string, a attemptView) {
		t := reportTranscript{Title: fmt.Sprintf("%s: step %d, %s, under %s: %s", why, a.Step, a.Task, a.Harness, a.Outcome)}
		for _, s := range a.spans() {
			t.Spans = append(t.Spans, s.reportSpan)
		}
		out = append(out, t)
	}
	first := func(q groupView, base, success bool) (attemptView, bool) {
		for _, a := range q.Attempts {
			if (a.Phase == "base") == base && a.Success == success {
				return a, true
			}
		}
		return attemptView{}, false
	}
	var won, lost, rescued bool
	for i := len(ms.steps) - 1; i >= 0 && !(won && lost && rescued); i-- {
		groups, err := readGroups(dir, ms.steps[i])
		if err != nil {
			var code exitError
			if errors.As(err, &code) {
				continue
			}
			return nil, err
		}
		for _, q := range groups {
			if a, ok := first(q, true, true); ok && !won {
				won = true
				add("a success", a)
			}
			if a, ok := first(q, true, false); ok && !lost && q.Kind != string(trainer.Rescued) { // those are shown with their rescue
				lost = true
				add("a failure", a)
			}
			if q.Kind == string(trainer.Rescued) && !rescued {
				rescued = true
				if a, ok := first(q, true, false); ok {
					add("before rescue", a)
				}
				if a, ok := first(q, false, true); ok {
					add("rescue that succeeded", a)
				}
			}
		}
	}
	if len(out) > 0 {
		out[0].Open = true
	}
	return out, nil
}

// frozenSpec is what a run keeps of each harness in pool/NN_name.json.
type frozenSpec struct {
	Name   string   `json:"name"`
	Causes []string `json:"causes"`
}

// frozenPool reads the pool of a run by harness id: the first 12 hex digits of the SHA-256 of the canonical document.
func frozenPool(dir string) (map[string]frozenSpec, error) {
	names, err := filepath.Glob(filepath.Join(dir, "pool", "*.json"))
	if err != nil {
		return nil, err
	}
	out := map[string]frozenSpec{}
	for _, n := range names {
		b, err := os.ReadFile(n)
		if err != nil {
			return nil, err
		}
		var s frozenSpec
		if err := json.Unmarshal(b, &s); err != nil {
			return nil, fmt.Errorf("%s: %w", n, err)
		}
		if s.Name == "" {
			_, s.Name, _ = strings.Cut(strings.TrimSuffix(filepath.Base(n), ".json"), "_")
		}
		sum := sha256.Sum256([]byte(strings.TrimSuffix(string(b), "\n")))
		out[hex.EncodeToString(sum[:])[:12]] = s
	}
	return out, nil
}
