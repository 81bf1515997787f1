package dbbench

import (
	"encoding/json"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strings"

	"harness-s/env/dbbench/embedded"
)

// Names of the comparators (envs.md 4.4).
const (
	CompareFC     = "fc"     // AgentBench's function-calling branch; the default
	CompareV02    = "v02"    // AgentBench v0.2
	CompareStrict = "strict" // no null -> 0, exact decimals
)

// answer is what was committed: a list of items, or one string to be read as a
// list or a single value.
type answer struct {
	items  []string
	text   string
	isText bool
}

// parseAnswer reads the committed argument. Lists keep Python's str() of every
// item; a string stays a string; anything else is str() of the value.
func parseAnswer(raw json.RawMessage) (answer, error) {
	t := strings.TrimSpace(string(raw))
	switch {
	case t == "":
		return answer{}, fmt.Errorf("read answers: empty argument")
	case t[0] == '[':
		var row embedded.Row
		if err := json.Unmarshal([]byte(`{"label":`+t+`}`), &row); err != nil {
			return answer{}, fmt.Errorf("read answers: %w", err)
		}
		return answer{items: row.Label}, nil
	case t[0] == '"':
		var s string
		if err := json.Unmarshal(raw, &s); err != nil {
			return answer{}, fmt.Errorf("read answers: %w", err)
		}
		return answer{text: s, isText: true}, nil
	}
	var row embedded.Row
	if err := json.Unmarshal([]byte(`{"label":[`+t+`]}`), &row); err != nil {
		return answer{}, fmt.Errorf("read answers: %w", err)
	}
	return answer{text: row.Label[0], isText: true}, nil
}

// list is the answer as items before cleaning.
func (a answer) list() []string {
	if !a.isText {
		return a.items
	}
	return splitAnswer(a.text)
}

// compare judges a committed answer against the gold label. nullZero reports a
// success that only the mapping of null-like words to 0 made.
func compare(mode string, a answer, gold []string) (ok, nullZero bool) {
	got, want := a.list(), gold
	if !a.isText {
		// A label or answer that is a list of one string stays a list.
		got = a.items
	}
	switch mode {
	case CompareV02:
		return compareV02(got, want), false
	case CompareStrict:
		return compareStrict(cleanAll(got, false), cleanAll(want, false)), false
	}
	if !compareFC(cleanAll(got, true), cleanAll(want, true)) {
		return false, false
	}
	return true, !compareFC(cleanAll(got, false), cleanAll(want, false))
}

// splitAnswer turns the text of an answer into its items: a literal list, else a
// list split at commas outside quotes, else one value.
func splitAnswer(text string) []string {
	if strings.HasPrefix(text, "[") && strings.HasSuffix(text, "]") {
		if v, err := parseLiteral(text); err == nil {
			if list, ok := v.([]value); ok && allTuples(list) {
				out := []string{}
				for _, it := range list {
					if t := it.(tuple); len(t) == 1 { // wider tuples are dropped, as upstream drops them
						out = append(out, literalStr(t[0]))
					}
				}
				return out
			}
		}
	}
	text = strings.TrimSpace(text)
	if !strings.HasPrefix(text, "[") || !strings.HasSuffix(text, "]") || len(text) < 2 {
		return []string{text}
	}
	if v, err := parseLiteral(text); err == nil {
		if list, ok := v.([]value); ok {
			out := make([]string, len(list))
			for i, it := range list {
				if t, ok := it.(tuple); ok && len(t) == 1 {
					it = t[0]
				}
				out[i] = literalStr(it)
			}
			return out
		}
	}
	var row embedded.Row // JSON lists that are no Python literal: null, true, \/
	if json.Unmarshal([]byte(`{"label":`+text+`}`), &row) == nil {
		return row.Label
	}
	var out []string
	var cur strings.Builder
	quoted := false
	flush := func() {
		if cur.Len() > 0 {
			out = append(out, cur.String())
			cur.Reset()
		}
	}
	for _, r := range text[1 : len(text)-1] {
		switch {
		case r == '"' || r == '\'':
			quoted = !quoted
		case r == ',' && !quoted:
			flush()
		default:
			cur.WriteRune(r)
		}
	}
	flush()
	return out
}

func allTuples(list []value) bool {
	for _, v := range list {
		if _, ok := v.(tuple); !ok {
			return false
		}
	}
	return true
}

func cleanAll(in []string, nullZero bool) []string {
	out := make([]string, len(in))
	for i, s := range in {
		out[i] = clean(s, nullZero)
	}
	return out
}

// clean normalises one value: outer space and quotes, percent sign, thousands
// separators, and null-like words when nullZero is set.
func clean(s string, nullZero bool) string {
	s = strings.TrimSpace(strings.Trim(strings.TrimSpace(s), `'"`))
	if strings.HasSuffix(s, "%") {
		return strings.TrimSpace(s[:len(s)-1])
	}
	if strings.Contains(s, ",") && !strings.HasPrefix(s, "[") && !strings.HasSuffix(s, "]") {
		s = strings.ReplaceAll(s, ",", "")
	}
	if nullZero {
		switch strings.ToLower(s) {
		case "none", "null", "undefined", "nan", "inf", "infinity", "-inf", "-infinity", "":
			return "0"
		}
	}
	return s
}

const tolerance = 0.01

func near(a, b float64) bool { return math.Abs(a-b) <= tolerance }

func floats(in []string) ([]float64, bool) {
	out := make([]float64, len(in))
	for i, s := range in {
		f, ok := pyFloat(s)
		if !ok {
			return nil, false
		}
		out[i] = f
	}
	return out, true
}

func compareFC(got, want []string) bool {
	gf, gok := floats(got)
	wf, wok := floats(want)
	if len(got) == 1 && len(want) == 1 {
		return gok && wok && near(gf[0], wf[0]) || got[0] == want[0] && !(gok && wok)
	}
	if !gok || !wok {
		return sameSet(got, want)
	}
	if len(gf) != len(wf) {
		return false
	}
	used := make([]bool, len(wf))
	for _, g := range gf {
		i := -1
		for j, w := range wf {
			if !used[j] && near(g, w) {
				i = j
				break
			}
		}
		if i < 0 {
			return false
		}
		used[i] = true
	}
	return true
}

func compareV02(got, want []string) bool {
	if len(got) == 1 && len(want) == 1 {
		g, gok := pyFloat(got[0])
		w, wok := pyFloat(want[0])
		if gok && wok {
			return g == w
		}
		return got[0] == want[0]
	}
	return sameSet(got, want)
}

// compareStrict compares sets of values, numbers as exact decimals.
func compareStrict(got, want []string) bool {
	exact := func(in []string) []string {
		out := make([]string, len(in))
		for i, s := range in {
			out[i] = s
			if _, ok := pyFloat(s); !ok || len(s) > 64 {
				continue
			}
			if f, _, err := big.ParseFloat(strings.ReplaceAll(strings.TrimSpace(s), "_", ""), 10, 64, big.ToNearestEven); err != nil || f.IsInf() || f.MantExp(nil) > 512 || f.MantExp(nil) < -512 {
				continue // keep the text: a Rat of such a number would be huge
			}
			if r, ok := new(big.Rat).SetString(strings.ReplaceAll(strings.TrimSpace(s), "_", "")); ok {
				out[i] = r.RatString()
			}
		}
		return out
	}
	return sameSet(exact(got), exact(want))
}

func sameSet(a, b []string) bool {
	in := func(list []string) map[string]bool {
		m := make(map[string]bool, len(list))
		for _, s := range list {
			m[s] = true
		}
		return m
	}
	x, y := in(a), in(b)
	if len(x) != len(y) {
		return false
	}
	for s := range x {
		if !y[s] {
			return false
		}
	}
	return true
}

// digestQuery is the one statement that hashes a table: five hex digits of the
// MD5 of each row's non-null cells, sorted, joined by commas, hashed again.
func digestQuery(t embedded.Table) string {
	var b strings.Builder
	b.WriteString("SELECT MD5(GROUP_CONCAT(rowhash ORDER BY rowhash)) AS hash FROM (SELECT SUBSTRING(MD5(CONCAT_WS(','")
	for _, c := range t.Columns {
		b.WriteString(", " + ident(c.Name))
	}
	b.WriteString(")), 1, 5) AS rowhash FROM " + ident(t.Name) + ") AS hashes")
	return b.String()
}

// goldDigest reads answer_md5's text form; a bare digest is accepted as well.
func goldDigest(text string) string {
	items := splitAnswer(text)
	if len(items) != 1 {
		return text
	}
	return clean(items[0], true)
}

// joinDigests combines the digests of several tables.
func joinDigests(d []string) string {
	d = slices.Clone(d)
	slices.Sort(d)
	return strings.Join(d, "_")
}

func ident(name string) string { return "`" + strings.ReplaceAll(name, "`", "``") + "`" }
