package harness

import (
	"errors"
	"fmt"
	"hash/fnv"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"harness-s/model/chat"
)

// slotRule lists what a slot accepts: its ops (nil: none) and the fields it
// must have.
type slotRule struct {
	ops  []string
	need func(op Op) string // "" or what is wrong
}

func slotRules() map[string]slotRule {
	text := func(op Op) string {
		if op.Text == "" {
			return "text is required"
		}
		return ""
	}
	return map[string]slotRule{
		"system": {[]string{"append", "replace"}, text},
		"tool_doc": {[]string{"append"}, func(op Op) string {
			if op.Tool == "" {
				return "tool is required"
			}
			return text(op)
		}},
		"demo": {[]string{"add", "remove"}, func(op Op) string {
			if op.ID == "" {
				return "id is required"
			}
			return ""
		}},
		"parse": {[]string{""}, func(op Op) string {
			for _, a := range op.Accept {
				if a != "lenient" && a != "sql_block" {
					return fmt.Sprintf("accept %q, want lenient or sql_block", a)
				}
			}
			if len(op.Accept) == 0 && op.Text == "" {
				return "accept or text is required"
			}
			return ""
		}},
		"observation": {[]string{"truncate", "collapse_repeats", "footer", "error_hint"}, func(op Op) string {
			switch {
			case op.Op == "truncate" && (op.Cap < 1 || op.Unit != "char" && op.Unit != "token" || op.Head < 0 || op.Head > 1):
				return "truncate needs unit char or token, cap >= 1 and head in 0..1"
			case op.Op == "error_hint" && len(op.Hints) == 0:
				return "error_hint needs hints"
			case op.Op == "footer":
				return text(op)
			}
			return ""
		}},
		"reminder": {[]string{""}, func(op Op) string {
			if !slices.Contains([]string{"", "initial", "before_obs", "after_obs"}, op.Place) {
				return fmt.Sprintf("place %q, want initial, before_obs or after_obs", op.Place)
			}
			return text(op)
		}},
		"memory": {[]string{""}, func(op Op) string {
			switch op.Mech {
			case "history":
				if op.KeepLast < 1 {
					return "history needs keep_last >= 1"
				}
			case "ledger", "inventory":
				if op.Key == "" {
					return op.Mech + " needs key"
				}
			case "notes", "checklist":
			default:
				return fmt.Sprintf("mech %q, want ledger, inventory, notes, checklist or history", op.Mech)
			}
			return ""
		}},
		"budget": {[]string{"reserve"}, func(op Op) string {
			if op.Steps < 0 || op.Steps == 0 && len(op.WarnAt) == 0 {
				return "budget needs steps >= 1 or warn_at"
			}
			return text(op)
		}},
		"guard": {[]string{""}, func(op Op) string {
			switch {
			case !slices.Contains([]string{"submit", "execute", "edit", "dml"}, op.On):
				return fmt.Sprintf("on %q, want submit, execute, edit or dml", op.On)
			case !slices.Contains([]string{"block_once", "block_max", "warn"}, op.Action):
				return fmt.Sprintf("action %q, want block_once, block_max or warn", op.Action)
			case op.Action == "block_max" && (op.BlockMax < 1 || op.BlockMax > 3):
				return fmt.Sprintf("block_max %d, want 1..3", op.BlockMax)
			case strings.ContainsAny(op.Text, "{}"):
				return "guard texts have no holes"
			}
			return text(op)
		}},
		"limits": {[]string{""}, func(op Op) string {
			if op.ReminderTokens < 0 || op.ReminderTokens > maxReminderTokens || op.MemoryTokens < 0 || op.MemoryTokens > maxMemoryTokens {
				return fmt.Sprintf("limits may only lower %d reminder and %d memory tokens", maxReminderTokens, maxMemoryTokens)
			}
			return ""
		}},
	}
}

var causePattern = regexp.MustCompile(`^[A-Z]-[A-Z]+$`)

// checkDoc finds everything wrong with a document that needs no original.
func checkDoc(d Doc) []error {
	var errs []error
	bad := func(format string, a ...any) {
		errs = append(errs, fmt.Errorf("check harness %q: %s", d.Name, fmt.Sprintf(format, a...)))
	}
	if d.Tools != "" && d.Tools != "schema" && d.Tools != "text" {
		bad("tools %q, want schema or text", d.Tools)
	}
	for _, s := range d.Sections {
		if !slices.Contains(sectionOrder[:], s.Name) {
			bad("unknown section %q, want one of %s", s.Name, strings.Join(sectionOrder[:], ", "))
		}
	}
	for _, c := range d.Causes {
		if !causePattern.MatchString(c) {
			bad("cause %q is not a code like D-SET", c)
		}
	}
	if d.Parent != "" && (len(d.Causes) < 1 || len(d.Causes) > 3) {
		bad("%d causes, want 1 to 3", len(d.Causes))
	}
	rules := slotRules()
	for i, e := range d.Edits {
		if e.ID == "" || len(e.Ops) == 0 {
			bad("edit %d needs an id and ops", i)
		}
		for j, op := range e.Ops {
			at := func(problem string) { bad("edit %s op %d (%s): %s", e.ID, j, op.Slot, problem) }
			rule, ok := rules[op.Slot]
			if !ok {
				at("unknown slot")
				continue
			}
			if !slices.Contains(rule.ops, op.Op) {
				at(fmt.Sprintf("op %q, want one of %q", op.Op, rule.ops))
			}
			if problem := rule.need(op); problem != "" {
				at(problem)
			}
			for _, text := range append([]string{op.Text, op.Notice, op.Title, op.Key, op.Value}, hintTexts(op)...) {
				if n := utf8.RuneCountInString(text); n > maxOpChars {
					at(fmt.Sprintf("text of %d characters, at most %d", n, maxOpChars))
				}
				if !utf8.ValidString(text) || strings.Contains(text, "<|") || strings.ContainsFunc(text, func(r rune) bool { return unicode.IsControl(r) && r != '\n' }) {
					at("text holds control characters, chat markers or invalid UTF-8")
				}
			}
			if op.Max < 0 || op.Cooldown < 0 || op.Every < 0 {
				at("max, cooldown and every must not be negative")
			}
		}
	}
	return errs
}

func hintTexts(op Op) []string {
	var out []string
	for _, h := range op.Hints {
		out = append(out, h.Text)
	}
	return out
}

// Validate checks protocol compliance of a spec against its original: same
// environment, same protocol section, same way of presenting tools. It reports
// every problem.
func Validate(s, original *Spec) error {
	if s == original {
		return nil
	}
	var errs []error
	bad := func(format string, a ...any) {
		errs = append(errs, fmt.Errorf("validate harness %s (%s): %s", s.Name, s.id, fmt.Sprintf(format, a...)))
	}
	if s.Env != original.Env {
		bad("env %q, the original is for %q", s.Env, original.Env)
	}
	if s.tools != original.tools {
		bad("tools %q, the original has %q", s.tools, original.tools)
	}
	section := func(x *Spec) string {
		for _, sec := range x.sections {
			if sec.Name == protocolSection {
				return sec.Text
			}
		}
		return ""
	}
	if section(s) != section(original) {
		bad("section protocol differs from the original")
	}
	if s.behave == original.behave {
		bad("behaves like the original")
	}
	return errors.Join(errs...)
}

// Problem is one finding of the lint or the gate.
type Problem struct {
	Check string `json:"check"` // schema, protocol, leak, entity, budget, determinism, duplicate
	Edit  string `json:"edit,omitempty"`
	Op    int    `json:"op"`
	Text  string `json:"text"` // the offending text
}

func (p Problem) Error() string {
	return fmt.Sprintf("%s: edit %s op %d: %q", p.Check, p.Edit, p.Op, p.Text)
}

// LintData is what harness texts must not contain. Task texts arrive as hashes
// of 8-grams, so that a lint over the sealed split sees no plain text.
type LintData struct {
	Forbidden []string            // task ids, verifier names, digests, answers of 4 or more characters
	Grams     map[uint64]struct{} // HashGrams of task texts
}

// gramLen is the overlap in words that counts as copied task text.
const gramLen = 8

// HashGrams hashes every run of 8 words of a text, case and punctuation aside.
func HashGrams(text string) []uint64 {
	words := strings.FieldsFunc(strings.ToLower(text), func(r rune) bool { return !unicode.IsLetter(r) && !unicode.IsDigit(r) })
	var out []uint64
	for i := 0; i+gramLen <= len(words); i++ {
		h := fnv.New64a()
		h.Write([]byte(strings.Join(words[i:i+gramLen], " ")))
		out = append(out, h.Sum64())
	}
	return out
}

var taskIDPattern = regexp.MustCompile(`\b[0-9a-f]{7}_[123]\b|\b[a-z]+-[0-9a-f]{10}\b|\b[0-9a-f]{32}\b`)

// Lint finds leaks: forbidden strings, task ids and digests, text shared with a
// task, and credentials or absolute paths. Any finding rejects a candidate.
func Lint(s *Spec, d LintData) []Problem {
	var out []Problem
	for _, e := range s.Edits {
		for i, op := range e.Ops {
			for _, text := range append([]string{op.Text, op.Notice, op.Title, op.Key, op.Value}, hintTexts(op)...) {
				add := func(check, what string) { out = append(out, Problem{check, e.ID, i, what}) }
				lower := strings.ToLower(text)
				for _, f := range d.Forbidden {
					if len(f) >= 4 && containsWord(lower, strings.ToLower(f)) {
						add("leak", f)
					}
				}
				if m := taskIDPattern.FindString(lower); m != "" {
					add("entity", m)
				}
				if m := credentialPattern.FindString(text); m != "" {
					add("entity", m)
				}
				for _, g := range HashGrams(text) {
					if _, hit := d.Grams[g]; hit {
						add("leak", "8 words shared with a task text")
						break
					}
				}
			}
		}
	}
	return out
}

var credentialPattern = regexp.MustCompile(`(?i)(password|api[_ ]?key|token)\s*[:=]\s*\S+|(^|\s)/(home|root|etc|usr|tmp)/\S+`)

func containsWord(text, word string) bool {
	for from := 0; ; {
		at := strings.Index(text[from:], word)
		if at < 0 {
			return false
		}
		at += from
		end := at + len(word)
		before, _ := utf8.DecodeLastRuneInString(text[:at])
		after, _ := utf8.DecodeRuneInString(text[end:])
		isWord := func(r rune) bool { return r != utf8.RuneError && (unicode.IsLetter(r) || unicode.IsDigit(r)) }
		if !isWord(before) && !isWord(after) {
			return true
		}
		from = end
	}
}

// Gate runs the checks on a candidate that need no episode: schema, locked
// protocol, lint, token budgets, and that it is neither a no-op nor a duplicate
// of a sibling. nil means it passes. Liveness and determinism need episodes:
// run a scripted good program under the candidate twice and compare ledgers.
func Gate(s, original *Spec, siblings []*Spec, enc chat.Encoder, d LintData) []Problem {
	var out []Problem
	if err := Validate(s, original); err != nil {
		out = append(out, Problem{Check: "protocol", Text: err.Error()})
	}
	out = append(out, Lint(s, d)...)
	count := func(text string) int { return len(enc.EncodeOrdinary(text)) }
	if n := count(s.SystemText(nil)) - count(original.SystemText(nil)); n > maxSystemTokens {
		out = append(out, Problem{Check: "budget", Text: fmt.Sprintf("system prompt grows by %d tokens, at most %d", n, maxSystemTokens)})
	}
	for _, e := range s.Edits {
		for i, op := range e.Ops {
			if n := count(op.Text); op.Slot == "reminder" && n > maxReminderTokens {
				out = append(out, Problem{"budget", e.ID, i, fmt.Sprintf("reminder of %d tokens, at most %d", n, maxReminderTokens)})
			}
		}
	}
	for _, sib := range siblings {
		if sib != s && sib.behave == s.behave {
			out = append(out, Problem{Check: "duplicate", Text: "behaves like " + sib.Name})
		}
	}
	return out
}
