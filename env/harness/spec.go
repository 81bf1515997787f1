package harness

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/pelletier/go-toml/v2"
)

// Doc is one pool document as written. The original has Sections and no
// Parent; a sibling has Parent and Edits.
type Doc struct {
	Name      string    `toml:"name" json:"name"`
	Env       string    `toml:"env" json:"env"`
	V         int       `toml:"v" json:"v"`
	Parent    string    `toml:"parent" json:"parent,omitempty"`
	Causes    []string  `toml:"causes" json:"causes,omitempty"`
	Predicted string    `toml:"predicted" json:"predicted,omitempty"` // which failures it should fix, for people and voters
	Tools     string    `toml:"tools" json:"tools,omitempty"`         // schema | text: how tools reach the prompt (original only)
	Sections  []Section `toml:"sections" json:"sections,omitempty"`
	Edits     []Edit    `toml:"edits" json:"edits,omitempty"`
}

// Section is a named part of the system prompt.
type Section struct {
	Name string `toml:"name" json:"name"`
	Text string `toml:"text" json:"text"`
}

// Edit is one catalogue edit (envs.md 5.5-5.7): an ordered list of operations.
type Edit struct {
	ID         string   `toml:"id" json:"id"`
	Causes     []string `toml:"causes" json:"causes,omitempty"`
	CostTokens int      `toml:"cost_tokens" json:"cost_tokens,omitempty"`
	Ops        []Op     `toml:"ops" json:"ops"`
}

// Op is one operation on a slot. Which fields a slot reads is the table of
// envs.md 5.1; Validate refuses the others.
type Op struct {
	Slot string `toml:"slot" json:"slot"`
	Op   string `toml:"op" json:"op,omitempty"`
	ID   string `toml:"id" json:"id,omitempty"`
	Text string `toml:"text" json:"text,omitempty"`

	Section string `toml:"section" json:"section,omitempty"` // system
	Tool    string `toml:"tool" json:"tool,omitempty"`       // tool_doc

	When     *Pred  `toml:"when" json:"when,omitempty"`
	Place    string `toml:"place" json:"place,omitempty"` // reminder: initial | before_obs | after_obs
	Max      int    `toml:"max" json:"max,omitempty"`
	Cooldown int    `toml:"cooldown" json:"cooldown,omitempty"`
	Every    int    `toml:"every" json:"every,omitempty"`

	On       string `toml:"on" json:"on,omitempty"`         // guard: submit | execute | edit | dml
	Action   string `toml:"action" json:"action,omitempty"` // guard: block_once | block_max | warn
	BlockMax int    `toml:"block_max" json:"block_max,omitempty"`

	Unit   string  `toml:"unit" json:"unit,omitempty"` // observation truncate: char | token
	Cap    int     `toml:"cap" json:"cap,omitempty"`
	Head   float64 `toml:"head" json:"head,omitempty"`
	Notice string  `toml:"notice" json:"notice,omitempty"`
	Hints  []Hint  `toml:"hints" json:"hints,omitempty"` // observation error_hint

	Mech      string `toml:"mech" json:"mech,omitempty"` // memory: ledger | inventory | notes | checklist | history
	Key       string `toml:"key" json:"key,omitempty"`
	Value     string `toml:"value" json:"value,omitempty"`
	Title     string `toml:"title" json:"title,omitempty"`
	CapTokens int    `toml:"cap_tokens" json:"cap_tokens,omitempty"`
	KeepLast  int    `toml:"keep_last" json:"keep_last,omitempty"`

	Steps    int   `toml:"steps" json:"steps,omitempty"` // budget reserve
	WarnAt   []int `toml:"warn_at" json:"warn_at,omitempty"`
	Restrict bool  `toml:"restrict" json:"restrict,omitempty"`

	Accept []string `toml:"accept" json:"accept,omitempty"` // parse: lenient | sql_block

	ReminderTokens int `toml:"reminder_tokens" json:"reminder_tokens,omitempty"` // limits
	MemoryTokens   int `toml:"memory_tokens" json:"memory_tokens,omitempty"`
}

// Hint adds Text under an observation that matches RE2 pattern Match.
type Hint struct {
	Match string `toml:"match" json:"match"`
	Text  string `toml:"text" json:"text"`
}

// Spec is one resolved, immutable harness: the original's sections with every
// system edit applied, and the remaining operations in order.
type Spec struct {
	Name      string
	Env       string
	Parent    string
	Causes    []string
	Predicted string
	Edits     []Edit

	tools    string
	sections []Section
	ops      []Op // operations other than slot system
	rules    *ruleSet
	canon    []byte
	id, hash string
	behave   string
}

// Locked section of the system prompt: no edit may touch it.
const protocolSection = "protocol"

// sectionOrder is the order in which sections appear in the prompt.
var sectionOrder = [...]string{"role", "protocol", "tools", "planning", "data", "verification", "completion"}

// ID is the first 12 hex digits of the SHA-256 of Canonical.
func (s *Spec) ID() string { return s.id }

// Hash is the full SHA-256 in hex.
func (s *Spec) Hash() string { return s.hash }

// Canonical is the resolved document as JSON with sorted keys and a final LF.
func (s *Spec) Canonical() []byte { return slices.Clone(s.canon) }

// Original reports whether the spec has no parent.
func (s *Spec) Original() bool { return s.Parent == "" }

// Ops lists every operation in order, system ones included.
func (s *Spec) Ops() []Op {
	var out []Op
	for _, e := range s.Edits {
		out = append(out, e.Ops...)
	}
	return out
}

// Sections is the resolved system prompt by section.
func (s *Spec) Sections() []Section { return slices.Clone(s.sections) }

// System is the system prompt text, sections joined by a line feed.
func (s *Spec) System() string {
	var parts []string
	for _, name := range sectionOrder {
		for _, sec := range s.sections {
			if sec.Name == name && sec.Text != "" {
				parts = append(parts, sec.Text)
			}
		}
	}
	return strings.Join(parts, "\n")
}

// ParseDoc decodes one TOML document strictly: an unknown key is an error.
func ParseDoc(b []byte) (Doc, error) {
	var d Doc
	dec := toml.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&d); err != nil {
		var strict *toml.StrictMissingError
		if errors.As(err, &strict) {
			return d, &Error{Op: "parse harness", Err: fmt.Errorf("unknown keys:\n%s", strict.String()), Hint: "see the field list of harness.Doc and harness.Op"}
		}
		return d, fmt.Errorf("parse harness: %w", err)
	}
	return d, nil
}

// Resolve applies a document to its original (nil for the original itself) and
// freezes the result. It fails on a malformed document; protocol compliance is
// Validate's business.
func Resolve(d Doc, original *Spec) (*Spec, error) {
	s := &Spec{Name: d.Name, Env: d.Env, Parent: d.Parent, Causes: slices.Clone(d.Causes), Predicted: d.Predicted, Edits: cloneEdits(d.Edits), tools: d.Tools}
	var errs []error
	if d.Name == "" || d.Env == "" || d.V < 1 {
		errs = append(errs, fmt.Errorf("resolve harness %q: name, env and v >= 1 are required (env %q, v %d)", d.Name, d.Env, d.V))
	}
	switch {
	case original == nil:
		if d.Parent != "" || len(d.Edits) > 0 || len(d.Sections) == 0 {
			errs = append(errs, fmt.Errorf("resolve harness %q: the original has sections, no parent and no edits", d.Name))
		}
		s.sections = slices.Clone(d.Sections)
	default:
		if d.Parent == "" || len(d.Sections) > 0 || d.Tools != "" || len(d.Edits) == 0 {
			errs = append(errs, fmt.Errorf("resolve harness %q: a sibling has a parent and edits; sections and tools come from the original", d.Name))
		}
		s.sections = original.Sections()
		s.tools = original.tools
	}
	if s.tools == "" {
		s.tools = "schema"
	}
	errs = append(errs, checkDoc(d)...)
	for i, e := range s.Edits {
		for j, op := range e.Ops {
			if op.Slot != "system" {
				s.ops = append(s.ops, op)
				continue
			}
			if err := s.editSection(op); err != nil {
				errs = append(errs, fmt.Errorf("resolve harness %q: edit %d (%s) op %d: %w", d.Name, i, e.ID, j, err))
			}
		}
	}
	rules, err := compile(s.ops)
	if err != nil {
		errs = append(errs, fmt.Errorf("resolve harness %q: %w", d.Name, err))
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	s.rules = rules
	s.canon = canonical(map[string]any{
		"name": s.Name, "env": s.Env, "v": d.V, "parent": s.Parent, "causes": s.Causes, "predicted": s.Predicted,
		"tools": s.tools, "sections": s.sections, "edits": s.Edits,
	})
	sum := sha256.Sum256(s.canon)
	s.hash = hex.EncodeToString(sum[:])
	s.id = s.hash[:12]
	b := sha256.Sum256(canonical(map[string]any{"env": s.Env, "tools": s.tools, "sections": s.sections, "ops": s.ops}))
	s.behave = hex.EncodeToString(b[:])
	return s, nil
}

func (s *Spec) editSection(op Op) error {
	if op.Section == protocolSection {
		return errors.New("section protocol is locked")
	}
	if !slices.Contains(sectionOrder[:], op.Section) {
		return fmt.Errorf("unknown section %q, want one of %s", op.Section, strings.Join(sectionOrder[:], ", "))
	}
	i := slices.IndexFunc(s.sections, func(x Section) bool { return x.Name == op.Section })
	if i < 0 {
		s.sections = append(s.sections, Section{Name: op.Section})
		i = len(s.sections) - 1
	}
	switch op.Op {
	case "replace":
		s.sections[i].Text = op.Text
	case "append":
		s.sections[i].Text = strings.TrimSpace(s.sections[i].Text + "\n" + op.Text)
	default:
		return fmt.Errorf("system op %q, want append or replace", op.Op)
	}
	return nil
}

// canonical marshals through a generic value so that keys are sorted and
// numbers have one spelling, whatever format the document came from.
func canonical(v any) []byte {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(fmt.Sprintf("canonicalise harness: %v", err)) // only strings, numbers, bools and lists reach this
	}
	var generic any
	if err := json.Unmarshal(raw, &generic); err != nil {
		panic(fmt.Sprintf("canonicalise harness: %v", err))
	}
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(generic); err != nil {
		panic(fmt.Sprintf("canonicalise harness: %v", err))
	}
	return buf.Bytes()
}

func cloneEdits(in []Edit) []Edit {
	out := slices.Clone(in)
	for i := range out {
		out[i].Ops = slices.Clone(out[i].Ops)
	}
	return out
}

// Diff lists what a spec changes against another, one line per section or
// operation: "+ " added, "- " removed.
func Diff(from, to *Spec) []string {
	var out []string
	text := func(s *Spec, name string) string {
		for _, x := range s.sections {
			if x.Name == name {
				return x.Text
			}
		}
		return ""
	}
	for _, name := range sectionOrder {
		a, b := text(from, name), text(to, name)
		if a == b {
			continue
		}
		al, bl := strings.Split(a, "\n"), strings.Split(b, "\n")
		for _, l := range al {
			if l != "" && !slices.Contains(bl, l) {
				out = append(out, "- system/"+name+": "+l)
			}
		}
		for _, l := range bl {
			if l != "" && !slices.Contains(al, l) {
				out = append(out, "+ system/"+name+": "+l)
			}
		}
	}
	lines := func(s *Spec) []string {
		var ls []string
		for _, op := range s.ops {
			ls = append(ls, op.Slot+": "+strings.TrimSpace(string(canonical(op))))
		}
		return ls
	}
	fl, tl := lines(from), lines(to)
	for _, l := range fl {
		if !slices.Contains(tl, l) {
			out = append(out, "- "+l)
		}
	}
	for _, l := range tl {
		if !slices.Contains(fl, l) {
			out = append(out, "+ "+l)
		}
	}
	return out
}

// Diff is the package function Diff with s as the result.
func (s *Spec) Diff(parent *Spec) []string { return Diff(parent, s) }

// SystemText is the whole system message: sections, then tool documentation
// when tools are presented as text, then the demonstrations named by the spec.
func (s *Spec) SystemText(demos map[string]string) string {
	var parts []string
	if t := s.System(); t != "" {
		parts = append(parts, t)
	}
	if s.tools == "text" {
		names := slices.Sorted(maps.Keys(s.rules.toolDocs))
		for _, name := range names {
			parts = append(parts, name+": "+strings.Join(s.rules.toolDocs[name], " "))
		}
	}
	for _, id := range s.rules.demos {
		if d := demos[id]; d != "" {
			parts = append(parts, "Example:\n"+d)
		}
	}
	return strings.Join(parts, "\n")
}
