package harness

import (
	"slices"
	"strings"
)

// memoryState holds the entries of each memory mechanism, oldest first.
type memoryState struct {
	keys   [][]string
	values []map[string]string
	dirty  []bool
}

func newMemoryState(n int) memoryState {
	m := memoryState{keys: make([][]string, n), values: make([]map[string]string, n), dirty: make([]bool, n)}
	for i := range m.values {
		m.values[i] = map[string]string{}
	}
	return m
}

// remember updates the memories after a step: ledger and inventory read facts,
// notes and checklist read what the policy wrote.
func (r *ruleSet) remember(s *ruleState, f *facts, output string) {
	for i, m := range r.memories {
		s.hook(func() {
			switch m.Mech {
			case "ledger", "inventory":
				key, ok := m.key.render(f)
				if !ok || key == "" {
					return
				}
				value, ok := m.value.render(f)
				if !ok {
					return
				}
				s.memory.put(i, key, value)
			case "notes":
				for line := range strings.Lines(output) {
					if _, note, ok := strings.Cut(line, "NOTE:"); ok && strings.TrimSpace(note) != "" {
						s.memory.put(i, strings.TrimSpace(note), "")
					}
				}
			case "checklist":
				var items []string
				for line := range strings.Lines(output) {
					if l := strings.TrimSpace(line); strings.HasPrefix(l, "- [") {
						items = append(items, l)
					}
				}
				if len(items) > 0 && !slices.Equal(items, s.memory.keys[i]) {
					s.memory.keys[i], s.memory.dirty[i] = items, true
				}
			}
			if keep := max(m.KeepLast, 0); keep > 0 && len(s.memory.keys[i]) > keep {
				for _, k := range s.memory.keys[i][:len(s.memory.keys[i])-keep] {
					delete(s.memory.values[i], k)
				}
				s.memory.keys[i] = slices.Clone(s.memory.keys[i][len(s.memory.keys[i])-keep:])
			}
		})
	}
}

func (m *memoryState) put(i int, key, value string) {
	old, known := m.values[i][key]
	if known && old == value {
		return
	}
	if !known {
		m.keys[i] = append(m.keys[i], key)
	}
	m.values[i][key] = value
	m.dirty[i] = true
}

// recall renders the memories that changed since they were last shown, each
// within its token cap; the oldest entries go first. Text once shown stays in
// the history, so unchanged memories are not repeated.
func (r *ruleSet) recall(s *ruleState, count func(string) int) []string {
	var out []string
	left := r.memoryTokens
	for i, m := range r.memories {
		if !s.memory.dirty[i] {
			continue
		}
		s.hook(func() {
			s.memory.dirty[i] = false
			limit := left
			if m.CapTokens > 0 {
				limit = min(limit, m.CapTokens)
			}
			for from := range s.memory.keys[i] {
				text := m.show(s.memory.keys[i][from:], s.memory.values[i])
				if n := count(text); n <= limit {
					left -= n
					out = append(out, text)
					return
				}
			}
		})
	}
	return out
}

func (m *memory) show(keys []string, values map[string]string) string {
	lines := []string{m.Title}
	for _, k := range keys {
		switch v := values[k]; {
		case m.Mech == "checklist":
			lines = append(lines, k)
		case v != "":
			lines = append(lines, "- "+k+": "+v)
		default:
			lines = append(lines, "- "+k)
		}
	}
	return strings.TrimSpace(strings.Join(lines, "\n"))
}
