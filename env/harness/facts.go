package harness

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"

	"harness-s/env"
)

// facts is everything rules may look at: the latest value of each fact and the
// facts of every action, oldest first. It holds nothing that is not derivable
// from actions and observations.
type facts struct {
	now   map[string]any
	steps []map[string]any
}

func newFacts() *facts { return &facts{now: map[string]any{}} }

// get finds the latest value; a dotted name also reaches into map facts.
func (f *facts) get(name string) (any, bool) { return find(f.now, name) }

// step finds a value in the action back positions before the last.
func (f *facts) step(name string, back int) (any, bool) {
	if i := len(f.steps) - 1 - back; i >= 0 {
		return find(f.steps[i], name)
	}
	return nil, false
}

func find(m map[string]any, name string) (any, bool) {
	if v, ok := m[name]; ok {
		return v, true
	}
	head, rest, dotted := strings.Cut(name, ".")
	if !dotted {
		return nil, false
	}
	switch sub := m[head].(type) {
	case map[string]any:
		return find(sub, rest)
	case map[string]bool:
		v, ok := sub[rest]
		return v, ok
	}
	return nil, false
}

func (f *facts) int(name string) int {
	v, _ := f.get(name)
	n, _ := number(v)
	return int(n)
}

// record stores the facts of one executed action and refreshes the counters
// that depend on it.
func (f *facts) record(act action, st env.Step) {
	m := map[string]any{}
	for k, v := range st.Facts {
		m[k] = v
	}
	derive(m, act, st)
	m["tool"] = act.tool
	m["action_hash"] = act.hash
	m["is_submit"] = act.submit
	m["error"] = st.Kind != env.KindOK
	repeat := 0
	for _, s := range f.steps {
		if s["action_hash"] == act.hash {
			repeat++
		}
	}
	m["repeat_count"] = repeat
	near := false
	for i := range min(3, len(f.steps)) {
		words, _ := f.steps[len(f.steps)-1-i]["action_words"].([]string)
		near = near || jaccard(words, act.words) >= 0.9
	}
	m["near_repeat"] = near
	m["action_words"] = act.words
	if act.sql != "" {
		m["sql_ok"] = st.Kind == env.KindOK
		m["is_dml"] = isDML(act.stmt)
	}
	if changes(m) {
		m["changed"], m["any_change"] = true, true
	}
	errs := 0
	if st.Kind != env.KindOK {
		errs = f.int("consecutive_errors") + 1
		m["last_error"] = firstLine(st.Obs)
	}
	m["consecutive_errors"] = errs
	idle := f.int("idle_steps") + 1
	if changes(m) {
		idle = 0
	}
	m["idle_steps"] = idle
	f.steps = append(f.steps, m)
	for k, v := range m {
		f.now[k] = v
	}
}

// changes reports whether an action changed the environment's state.
func changes(m map[string]any) bool {
	if b, ok := m["state_changed"].(bool); ok {
		return b
	}
	kind, _ := m["stmt_kind"].(string)
	return isDML(kind) && m["error"] == false
}

// derive fills in the facts of envs.md 4.6 that follow from the texts alone,
// where the environment has not given them.
func derive(m map[string]any, act action, st env.Step) {
	set := func(k string, v any) {
		if _, ok := m[k]; !ok {
			m[k] = v
		}
	}
	set("truncated", strings.HasSuffix(st.Obs, "[TRUNCATED]"))
	if act.sql == "" {
		return
	}
	set("stmt_kind", act.stmt)
	set("where_conjuncts", act.conjuncts)
	m["where_text"] = act.where
	if st.Kind == env.KindOK && act.stmt == "select" {
		set("empty_result", strings.TrimSpace(st.Obs) == "[]")
		set("null_result", strings.TrimSpace(st.Obs) == "[(None,)]")
	}
	if code := errnoPattern.FindStringSubmatch(st.Obs); code != nil && st.Kind != env.KindOK {
		n, _ := strconv.Atoi(code[1])
		set("errno", n)
	}
	casts := strings.Contains(act.norm, "cast(") || strings.Contains(act.norm, "convert(")
	m["sql_casts"] = casts
	extreme := strings.Contains(act.norm, " order by ") || (strings.Contains(act.norm, "max(") || strings.Contains(act.norm, "min(")) && numericText.MatchString(st.Obs)
	m["uncast_extreme"] = st.Kind == env.KindOK && act.stmt == "select" && extreme && !casts
	m["counted_rows"] = st.Kind == env.KindOK && strings.Contains(act.norm, "count(") && !strings.Contains(act.norm, "distinct")
}

// numericText is a row whose value is a number kept as text.
var numericText = regexp.MustCompile(`\('-?[0-9]+',\)`)

var errnoPattern = regexp.MustCompile(`^(\d{4}) \(`)

// action is a parsed tool call with what rules need to know beforehand.
type action struct {
	tool, args string
	sql, norm  string // first argument value; lower case and single blanks outside quotes
	stmt       string // select, insert, update, delete, replace, show, other; "" when there is no text
	where      string // normalised WHERE clause
	conjuncts  int
	submit     bool
	answers    []string
	hash       string
	words      []string
}

// submitTools end an episode, in every environment of the project.
var submitTools = [...]string{"commit_final_answer", "complete_task", "submit"}

func newAction(tool, args, first string, answers []string) action {
	a := action{tool: tool, args: args, submit: slices.Contains(submitTools[:], tool)}
	if a.submit {
		a.answers = answers
	} else {
		a.sql = first
		a.norm = normalise(first)
		a.stmt = statementKind(a.norm)
		a.where = whereClause(a.norm)
		a.conjuncts = conjuncts(a.where)
	}
	text := a.norm
	if a.submit {
		text = strings.Join(answers, "\x00")
	}
	sum := sha256.Sum256([]byte(tool + "\x00" + text))
	a.hash = hex.EncodeToString(sum[:8])
	a.words = strings.Fields(text)
	return a
}

func statementKind(norm string) string {
	word, _, _ := strings.Cut(norm, " ")
	switch word {
	case "select", "insert", "update", "delete", "replace":
		return word
	case "show", "describe", "desc", "explain":
		return "show"
	case "":
		return ""
	}
	return "other"
}

func isDML(kind string) bool {
	return kind == "insert" || kind == "update" || kind == "delete" || kind == "replace" ||
		kind == "INSERT" || kind == "UPDATE" || kind == "DELETE" || kind == "REPLACE"
}

// normalise lower-cases and squeezes blanks outside quotes and drops a final
// semicolon; literals keep their spelling.
func normalise(s string) string {
	var b strings.Builder
	var quote rune
	blank := false
	for _, r := range strings.TrimSpace(s) {
		if quote != 0 {
			b.WriteRune(r)
			if r == quote {
				quote = 0
			}
			continue
		}
		switch r {
		case ' ', '\t', '\n', '\r':
			blank = true
			continue
		case '\'', '"', '`':
			quote = r
		}
		if blank {
			b.WriteByte(' ')
			blank = false
		}
		b.WriteString(strings.ToLower(string(r)))
	}
	return strings.TrimRight(b.String(), "; ")
}

var whereEnd = regexp.MustCompile(` (group by|order by|having|limit) `)

func whereClause(norm string) string {
	_, rest, ok := strings.Cut(norm, " where ")
	if !ok {
		return ""
	}
	if at := whereEnd.FindStringIndex(rest + " "); at != nil {
		rest = rest[:at[0]]
	}
	return rest
}

// conjuncts counts the parts of a WHERE clause that AND joins.
func conjuncts(where string) int {
	if where == "" {
		return 0
	}
	return 1 + strings.Count(stripQuoted(where), " and ")
}

func stripQuoted(s string) string {
	var b strings.Builder
	var quote rune
	for _, r := range s {
		switch {
		case quote != 0:
			if r == quote {
				quote = 0
			}
		case r == '\'' || r == '"' || r == '`':
			quote = r
			b.WriteByte('x')
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

// pending adds the facts of an action that is about to run, under next.*.
func (f *facts) pending(a action) {
	n := map[string]any{
		"tool": a.tool, "kind": a.stmt, "submit": a.submit, "conjuncts": a.conjuncts, "answers": len(a.answers),
		"exploratory": a.stmt == "show" || strings.Contains(a.norm, "information_schema") || a.stmt == "select" && a.where == "" && strings.Contains(a.norm, " limit "),
		"casts":       strings.Contains(a.norm, "cast("),
	}
	repeat, repeatOK, checked := 0, false, a.where == ""
	for _, s := range f.steps {
		if s["action_hash"] == a.hash {
			repeat++
			repeatOK = repeatOK || s["error"] == false
		}
		kind, _ := s["stmt_kind"].(string)
		if strings.EqualFold(kind, "select") && s["where_text"] == a.where {
			checked = true
		}
	}
	n["repeat"], n["repeat_ok"], n["where_checked"] = repeat, repeatOK, checked
	if a.submit {
		last, _ := f.get("last_obs_text")
		text, _ := last.(string)
		novel := false
		for _, ans := range a.answers {
			novel = novel || !strings.Contains(text, ans)
		}
		n["novel_answer"] = novel
	}
	f.now["next"] = n
}

func jaccard(a, b []string) float64 {
	if len(a) == 0 || len(b) == 0 {
		return 0
	}
	seen := map[string]int{}
	for _, w := range a {
		seen[w] |= 1
	}
	for _, w := range b {
		seen[w] |= 2
	}
	both := 0
	for _, v := range seen {
		if v == 3 {
			both++
		}
	}
	return float64(both) / float64(len(seen))
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	if len(line) > 200 {
		line = strings.ToValidUTF8(line[:200], "")
	}
	return line
}

// condWords estimates how many conditions a question joins: "with a and b" is
// two. No condition word at all is none.
func condWords(text string) int {
	t := " " + strings.ToLower(text) + " "
	n := 0
	for _, w := range [...]string{" with ", " have ", " where ", " when ", " has ", " whose "} {
		if strings.Contains(t, w) {
			n = 1
			break
		}
	}
	if n == 0 {
		return 0
	}
	return n + strings.Count(t, " and ")
}

// template is a text with {fact} holes.
type template struct {
	lit  []string
	hole []string
}

func parseTemplate(s string) (template, error) {
	var t template
	for {
		open := strings.IndexAny(s, "{}")
		if open < 0 {
			t.lit = append(t.lit, s)
			return t, nil
		}
		end := strings.IndexByte(s, '}')
		if s[open] == '}' || end < open || !holePattern.MatchString(s[open+1:end]) {
			return t, fmt.Errorf("template %q: braces must enclose a fact name", s)
		}
		t.lit = append(t.lit, s[:open])
		t.hole = append(t.hole, s[open+1:end])
		s = s[end+1:]
	}
}

var holePattern = regexp.MustCompile(`^[a-z_][a-z0-9_.]*$`)

// render fills the holes; ok is false when a fact is missing.
func (t template) render(f *facts) (string, bool) {
	var b strings.Builder
	for i, lit := range t.lit {
		b.WriteString(lit)
		if i < len(t.hole) {
			v, ok := f.get(t.hole[i])
			if !ok {
				return "", false
			}
			s, ok := factText(v)
			if !ok {
				return "", false
			}
			b.WriteString(s)
		}
	}
	return b.String(), true
}

// factText spells a fact for a prompt; empty lists count as missing.
func factText(v any) (string, bool) {
	switch x := v.(type) {
	case nil:
		return "", false
	case string:
		return x, true
	case bool:
		return strconv.FormatBool(x), true
	}
	if n, ok := number(v); ok {
		return strconv.FormatFloat(n, 'f', -1, 64), true
	}
	r := reflect.ValueOf(v)
	switch r.Kind() {
	case reflect.Slice:
		var parts []string
		for i := range r.Len() {
			s, ok := factText(r.Index(i).Interface())
			if !ok {
				return "", false
			}
			parts = append(parts, s)
		}
		return strings.Join(parts, ", "), len(parts) > 0
	case reflect.Map:
		var keys []string
		for _, k := range r.MapKeys() {
			keys = append(keys, fmt.Sprint(k.Interface()))
		}
		sort.Strings(keys)
		return strings.Join(keys, ", "), len(keys) > 0
	}
	return "", false
}
