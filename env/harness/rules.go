package harness

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"harness-s/env"
	"harness-s/model/chat"
)

// Default caps of envs.md 5.1 and 5.8, in tokens.
const (
	maxReminderTokens = 160
	maxMemoryTokens   = 400
	maxSystemTokens   = 400 // added over the original
	maxOpChars        = 400
)

// ruleSet is a spec's operations compiled; immutable and shared by episodes.
type ruleSet struct {
	reminders []reminder
	guards    []guard
	observe   []observeOp
	memories  []memory
	budgets   []budget
	toolDocs  map[string][]string
	demos     []string
	retry     string // text for a turn without a usable action
	lenient   bool
	sqlBlock  bool

	reminderTokens, memoryTokens int
	keepLast                     int // history policy; 0 keeps everything
}

type reminder struct {
	place                string
	when                 test
	text                 template
	max, cooldown, every int
}

type guard struct {
	id, on string
	when   test
	text   string
	limit  int // refusals per episode; 0: warn only
}

type budget struct {
	reserve  int
	warnAt   []int
	restrict bool
	text     template
}

type observeOp struct {
	Op
	hints  []hint
	footer template
}

type hint struct {
	re   *regexp.Regexp
	text string
}

type memory struct {
	Op
	key, value template
}

// compile builds the rules of the operations other than system ones.
func compile(ops []Op) (*ruleSet, error) {
	r := &ruleSet{toolDocs: map[string][]string{}, reminderTokens: maxReminderTokens, memoryTokens: maxMemoryTokens}
	var errs []error
	fail := func(i int, op Op, err error) {
		errs = append(errs, fmt.Errorf("op %d (%s %s): %w", i, op.Slot, op.ID, err))
	}
	tmpl := func(i int, op Op, s string) template {
		t, err := parseTemplate(s)
		if err != nil {
			fail(i, op, err)
		}
		return t
	}
	when := func(i int, op Op) test {
		t, err := op.When.compile()
		if err != nil {
			fail(i, op, err)
			t = func(*facts) bool { return false }
		}
		return t
	}
	for i, op := range ops {
		switch op.Slot {
		case "tool_doc":
			r.toolDocs[op.Tool] = append(r.toolDocs[op.Tool], op.Text)
		case "demo":
			if op.Op == "remove" {
				r.demos = slices.DeleteFunc(r.demos, func(d string) bool { return d == op.ID })
			} else {
				r.demos = append(r.demos, op.ID)
			}
		case "parse":
			r.lenient = r.lenient || slices.Contains(op.Accept, "lenient")
			r.sqlBlock = r.sqlBlock || slices.Contains(op.Accept, "sql_block")
			if op.Text != "" {
				r.retry = op.Text
			}
		case "reminder":
			r.reminders = append(r.reminders, reminder{op.Place, when(i, op), tmpl(i, op, op.Text), op.Max, op.Cooldown, op.Every})
		case "guard":
			g := guard{id: op.ID, on: op.On, when: when(i, op), text: op.Text}
			switch op.Action {
			case "block_once":
				g.limit = 1
			case "block_max":
				g.limit = op.BlockMax
			}
			r.guards = append(r.guards, g)
		case "budget":
			r.budgets = append(r.budgets, budget{op.Steps, op.WarnAt, op.Restrict, tmpl(i, op, op.Text)})
		case "observation":
			o := observeOp{Op: op, footer: tmpl(i, op, op.Text)}
			for _, h := range op.Hints {
				re, err := regexp.Compile(h.Match)
				if err != nil {
					fail(i, op, err)
					continue
				}
				o.hints = append(o.hints, hint{re, h.Text})
			}
			r.observe = append(r.observe, o)
		case "memory":
			if op.Mech == "history" {
				r.keepLast = op.KeepLast
				continue
			}
			r.memories = append(r.memories, memory{op, tmpl(i, op, op.Key), tmpl(i, op, op.Value)})
		case "limits":
			if op.ReminderTokens > 0 {
				r.reminderTokens = min(r.reminderTokens, op.ReminderTokens)
			}
			if op.MemoryTokens > 0 {
				r.memoryTokens = min(r.memoryTokens, op.MemoryTokens)
			}
		}
	}
	return r, errors.Join(errs...)
}

// ruleState is what the rules of one episode remember.
type ruleState struct {
	fired    []int // reminders: times shown
	last     []int // reminders: step last shown
	blocked  []int // guards: times refused
	memory   memoryState
	lastObs  string
	obsRun   int
	hookErrs int
}

func (r *ruleSet) newState() *ruleState {
	return &ruleState{fired: make([]int, len(r.reminders)), last: make([]int, len(r.reminders)), blocked: make([]int, len(r.guards)), memory: newMemoryState(len(r.memories))}
}

// hook runs one rule; a panic degrades it to no effect and is counted.
func (s *ruleState) hook(f func()) {
	defer func() {
		if recover() != nil {
			s.hookErrs++
		}
	}()
	f()
}

// remind collects the reminder texts due at a place, in pool order, within the
// token cap of a step. count measures tokens.
func (r *ruleSet) remind(s *ruleState, f *facts, place string, count func(string) int) []string {
	var out []string
	left := r.reminderTokens
	step := f.int("step")
	for i, rem := range r.reminders {
		if rem.place != place && !(rem.place == "" && place == "after_obs") {
			continue
		}
		s.hook(func() {
			switch {
			case rem.max > 0 && s.fired[i] >= rem.max,
				s.fired[i] > 0 && rem.cooldown > 0 && step-s.last[i] <= rem.cooldown,
				rem.every > 0 && step%rem.every != 0,
				!rem.when(f):
				return
			}
			text, ok := rem.text.render(f)
			if !ok {
				return
			}
			n := count(text)
			if n > left {
				return
			}
			left -= n
			s.fired[i]++
			s.last[i] = step
			out = append(out, text)
		})
	}
	return out
}

// check asks the guards about a pending action: refused names the guard that
// blocks it and text is then the observation; warnings are appended to the
// observation of an action that runs.
func (r *ruleSet) check(s *ruleState, f *facts, a action) (refused, text string, warnings []string) {
	for i, g := range r.guards {
		if refused != "" {
			break
		}
		s.hook(func() {
			if !guards(g.on, a) || g.limit > 0 && s.blocked[i] >= g.limit || !g.when(f) {
				return
			}
			if g.limit == 0 {
				warnings = append(warnings, g.text)
				return
			}
			s.blocked[i]++
			refused, text = g.id, g.text
		})
	}
	if refused != "" || a.submit {
		return refused, text, warnings
	}
	for _, b := range r.budgets {
		if b.restrict && f.int("steps_left") < b.reserve {
			s.hook(func() { text, _ = b.text.render(f) })
			if text == "" {
				text = "Only the final submission is accepted now."
			}
			return "reserve", text, warnings
		}
	}
	return "", "", warnings
}

// guards reports whether a guard's trigger covers the action.
func guards(on string, a action) bool {
	switch on {
	case "submit":
		return a.submit
	case "execute":
		return !a.submit
	case "dml":
		return isDML(a.stmt)
	case "edit":
		return strings.Contains(a.tool, "edit") || strings.Contains(a.tool, "str_replace") || strings.Contains(a.tool, "write")
	}
	return false
}

// warn collects the budget texts due after a step.
func (r *ruleSet) warn(s *ruleState, f *facts) []string {
	var out []string
	left := f.int("steps_left")
	for _, b := range r.budgets {
		if !slices.Contains(b.warnAt, left) {
			continue
		}
		s.hook(func() {
			if text, ok := b.text.render(f); ok && text != "" {
				out = append(out, text)
			}
		})
	}
	return out
}

// format turns an observation into segments: what the tool said, and what the
// harness adds or puts in its place.
func (r *ruleSet) format(s *ruleState, f *facts, st env.Step, enc chat.Encoder, decode func([]int32) string) []chat.Segment {
	segs := []chat.Segment{{Text: st.Obs, Kind: chat.KindTool}}
	add := func(text string) { segs = append(segs, chat.Segment{Text: "\n" + text, Kind: chat.KindHarness}) }
	if st.Obs == s.lastObs {
		s.obsRun++
	} else {
		s.lastObs, s.obsRun = st.Obs, 0
	}
	// Later operations see the body as earlier ones left it; additions follow it.
	for _, want := range [...]string{"collapse_repeats", "truncate"} {
		for _, o := range r.observe {
			if o.Op.Op != want {
				continue
			}
			s.hook(func() {
				if want == "collapse_repeats" {
					if s.obsRun > 0 && len(st.Obs) > 80 {
						segs[0] = chat.Segment{Text: "[same output as before]", Kind: chat.KindHarness}
					}
					return
				}
				if len(segs) == 1 && segs[0].Kind == chat.KindTool {
					segs = truncate(segs[0].Text, o.Op, enc, decode)
				}
			})
		}
	}
	for _, o := range r.observe {
		s.hook(func() {
			switch o.Op.Op {
			case "error_hint":
				for _, h := range o.hints {
					if h.re.MatchString(st.Obs) {
						add(h.text)
						return
					}
				}
			case "footer":
				if text, ok := o.footer.render(f); ok {
					add(text)
				}
			}
		})
	}
	return segs
}

// truncate keeps the head and the tail of a long observation.
func truncate(text string, op Op, enc chat.Encoder, decode func([]int32) string) []chat.Segment {
	head := op.Head
	if head <= 0 || head > 1 {
		head = 1
	}
	var a, b string
	cut := 0
	if op.Unit == "token" {
		ids := enc.EncodeOrdinary(text)
		if len(ids) <= op.Cap {
			return []chat.Segment{{Text: text, Kind: chat.KindTool}}
		}
		n := int(head * float64(op.Cap))
		a, b = decode(ids[:n]), decode(ids[len(ids)-(op.Cap-n):])
		cut = len([]rune(text)) - len([]rune(a)) - len([]rune(b))
	} else {
		runes := []rune(text)
		if len(runes) <= op.Cap {
			return []chat.Segment{{Text: text, Kind: chat.KindTool}}
		}
		n := int(head * float64(op.Cap))
		a, b = string(runes[:n]), string(runes[len(runes)-(op.Cap-n):])
		cut = len(runes) - op.Cap
	}
	notice := strings.ReplaceAll(op.Notice, "{cut}", fmt.Sprint(max(cut, 0)))
	if notice == "" {
		notice = "[...]"
	}
	segs := []chat.Segment{{Text: strings.ToValidUTF8(a, ""), Kind: chat.KindTool}, {Text: notice, Kind: chat.KindHarness}}
	if b != "" {
		segs = append(segs, chat.Segment{Text: strings.ToValidUTF8(b, ""), Kind: chat.KindTool})
	}
	return segs
}
