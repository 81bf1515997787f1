package chat

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/ardanlabs/jinja"
)

// foreign is a template that only the Jinja engine can render.
type foreign struct {
	t       *jinja.Template
	special map[string]string
	thinks  [2]bool // whether enable_thinking false, true leave the thinking block open
}

// newForeign compiles a template and tries it.
func newForeign(source string, special map[string]string) (Renderer, error) {
	t, err := jinja.Compile(source)
	if err != nil {
		return Renderer{}, fmt.Errorf("%w: %w", ErrTemplate, err)
	}
	f := &foreign{t: t, special: special}
	r := Renderer{foreign: f}
	query := []Message{{Role: "user", Content: "query"}}
	no, yes := false, true
	for i, thinking := range []*bool{nil, &no, &yes} {
		bare, err := f.text(query, nil, Options{Thinking: thinking})
		if err != nil {
			return Renderer{}, fmt.Errorf("%w: a conversation of one message: %w", ErrTemplate, err)
		}
		whole, err := f.text(query, nil, Options{Thinking: thinking, AddGenerationPrompt: true})
		if err != nil {
			return Renderer{}, fmt.Errorf("%w: a generation prompt: %w", ErrTemplate, err)
		}
		prompt, ok := strings.CutPrefix(whole, bare)
		if !ok || !strings.HasPrefix(prompt, IMStart) {
			return Renderer{}, fmt.Errorf("%w: its generation prompt %q does not open a turn with %s", ErrTemplate, clip(prompt), IMStart)
		}
		open := strings.LastIndex(prompt, ThinkOpen) > strings.LastIndex(prompt, ThinkClose)
		if i == 0 {
			r.ThinkDefault = open
		} else {
			f.thinks[i-1] = open
		}
	}
	for _, role := range []string{"user", "tool"} {
		if _, err := r.Bridge([]Message{{Role: role, Content: "one"}, {Role: role, Content: "two"}}, Options{AddGenerationPrompt: true}); err != nil {
			return Renderer{}, fmt.Errorf("%w: %s messages after an answer: %w", ErrTemplate, role, err)
		}
	}
	return r, nil
}

// open renders a whole conversation.
func (f *foreign) open(msgs []Message, tools []Tool, o Options) ([]Segment, error) {
	if len(msgs) == 0 {
		return nil, fmt.Errorf("render chat: %w", ErrNoMessages)
	}
	segs, err := f.segments(msgs, tools, o)
	if err != nil {
		return nil, fmt.Errorf("render chat: %w", err)
	}
	return segs, nil
}

// bridge renders what follows a sampled turn: what the template writes after an answer that stands for it.
func (f *foreign) bridge(msgs []Message, o Options) ([]Segment, error) {
	if len(msgs) == 0 {
		return nil, fmt.Errorf("render bridge: %w", ErrNoMessages)
	}
	spoken := func(segs []Segment) (text string) {
		for _, s := range segs {
			if s.Kind != KindTemplate {
				text += s.Text
			}
		}
		return text
	}
	var want string
	for i := range msgs {
		if r := msgs[i].Role; r != "user" && r != "tool" {
			return nil, fmt.Errorf("render bridge message %d: %w (role %q, want tool or user)", i, ErrUnexpectedRole, r)
		}
		want += spoken(msgs[i].content())
	}
	turns := append([]Message{{Role: "user", Content: "query"}, {Role: "assistant", Content: "answer", Kind: KindPolicy}}, msgs...)
	segs, err := f.segments(turns, nil, o)
	if err != nil {
		return nil, fmt.Errorf("render bridge: %w", err)
	}
	at := slices.IndexFunc(segs, func(s Segment) bool { return s.Kind == KindPolicy })
	if at < 0 {
		return nil, fmt.Errorf("render bridge: %w: the answer before it is not in the text", ErrTemplate)
	}
	segs = segs[at+1:]
	if spoken(segs) != want {
		return nil, fmt.Errorf("render bridge: %w: the messages are not in the text", ErrTemplate)
	}
	if len(segs) == 0 || segs[0].Kind != KindTemplate || !strings.HasPrefix(segs[0].Text, IMEnd) {
		return nil, fmt.Errorf("render bridge: %w: an answer is not followed by %s", ErrTemplate, IMEnd)
	}
	if o.Closed {
		segs = cutFront(segs, len(IMEnd))
	}
	return segs, nil
}

// text renders a conversation without the kinds of its text.
func (f *foreign) text(msgs []Message, tools []Tool, o Options) (string, error) {
	return f.render(msgs, tools, o, values{})
}

// segments renders a conversation twice, plainly and with message text between marks that tell its kind. When the marks change what the
// template does, the text has one kind, which is only possible while no message holds a literal that would become a token.
func (f *foreign) segments(msgs []Message, tools []Tool, o Options) ([]Segment, error) {
	plain, err := f.text(msgs, tools, o)
	if err != nil {
		return nil, err
	}
	for _, v := range variants {
		if !slices.ContainsFunc(msgs, func(m Message) bool {
			return strings.ContainsAny(m.Content+Text(m.Parts)+pointed(m.Reasoning), v.chars)
		}) {
			continue
		}
		if alt, err := f.render(msgs, tools, o, values{variant: v.to}); err != nil || v.from.Replace(alt) != plain {
			return nil, fmt.Errorf("%w: a message holds one of %+q", ErrEngine, v.chars)
		}
	}
	segs := []Segment{{Text: plain}}
	if marked, err := f.render(msgs, tools, o, values{mark: true}); err == nil {
		if got, ok := unmark(marked); ok && Text(got) == plain {
			segs = got
		}
	}
	if len(segs) == 1 {
		for i := range msgs {
			if at, lit := nextLiteral(messageText(&msgs[i])); lit != "" {
				return nil, fmt.Errorf("%w: it changes message %d, whose text holds %s at byte %d", ErrTemplate, i, lit, at)
			}
		}
		for i, t := range tools {
			if _, lit := nextLiteral(string(t.JSON)); lit != "" {
				return nil, fmt.Errorf("%w: tool %d holds %s", ErrTemplate, i, lit)
			}
		}
	}
	for _, s := range segs {
		if s.Kind != KindTemplate {
			continue
		}
		for _, lit := range specialToken.FindAllString(s.Text, -1) {
			if !slices.Contains(templateLiterals[:], lit) {
				return nil, fmt.Errorf("%w: it writes %s, which is no token of Qwen3.5's template", ErrTemplate, lit)
			}
		}
	}
	return segs, nil
}

// specialToken is what a special token of some vocabulary looks like.
var specialToken = regexp.MustCompile(`<\|[^|<>\s]*\|>|\[/?INST\]|</?s>|<(start|end)_of_turn>`)

// messageText is all text of a message.
func messageText(m *Message) string {
	var b strings.Builder
	b.WriteString(m.Content)
	b.WriteString(Text(m.Parts))
	b.WriteString(pointed(m.Reasoning))
	for _, c := range m.Calls {
		b.WriteString(c.Name)
		for _, a := range c.Args {
			b.WriteString(a.Key)
			b.Write(a.Value)
		}
	}
	return b.String()
}

// Private characters: two stand for line separators, which the engine escapes in JSON and Python does not, the others mark text.
const (
	markLine      = '\U000ff000'
	markParagraph = '\U000ff001'
	markEnd       = '\U000ff002'
	markKind      = '\U000ff003' // and the kinds after it
	markLast      = markKind + rune(KindHarness)
)

var (
	toMarks   = strings.NewReplacer("\u2028", string(markLine), "\u2029", string(markParagraph))
	fromMarks = strings.NewReplacer(string(markLine), "\u2028", string(markParagraph), "\u2029")
)

// variants find out whether a template does something to the text of a message that the engine does in another way: the engine escapes
// line separators in JSON, and its trim leaves the information separators. Text with other characters in their place, which do not have
// that property, must give the same result.
var variants = [...]struct {
	chars    string
	to, from *strings.Replacer
}{
	{"\u2028\u2029", toMarks, fromMarks},
	{"\x1c\x1d\x1e\x1f", strings.NewReplacer("\x1c", "\u2002", "\x1d", "\u2004", "\x1e", "\u2005", "\x1f", "\u2006"),
		strings.NewReplacer("\u2002", "\x1c", "\u2004", "\x1d", "\u2005", "\x1e", "\u2006", "\x1f")},
}

func pointed(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// unmark splits marked text at its marks; ok is false when marks are not in pairs.
func unmark(text string) (segs []Segment, ok bool) {
	var b builder
	kind, from := KindTemplate, 0
	for i, r := range text {
		if r < markEnd || r > markLast {
			continue
		}
		b.add(kind, text[from:i])
		from = i + len(string(r))
		if (r == markEnd) == (kind == KindTemplate) {
			return nil, false
		}
		kind = KindTemplate
		if r != markEnd {
			kind = Kind(r - markKind)
		}
	}
	b.add(kind, text[from:])
	return b.segs, kind == KindTemplate
}

// render runs the engine. Its panics are errors of the template.
func (f *foreign) render(msgs []Message, tools []Tool, o Options, w values) (text string, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: %v", ErrTemplate, r)
		}
	}()
	data := map[string]jinja.Value{"add_generation_prompt": jinja.NewBool(o.AddGenerationPrompt), "tools": jinja.None(), "documents": jinja.None()}
	for name, token := range f.special {
		data[name] = jinja.NewString(token)
	}
	if o.Thinking != nil {
		data["enable_thinking"] = jinja.NewBool(*o.Thinking)
	}
	var list []jinja.Value
	for i := range msgs {
		list = append(list, w.message(&msgs[i]))
	}
	data["messages"] = jinja.NewList(list)
	list = nil
	for i, t := range tools {
		v, err := parseJSON(t.JSON)
		if err != nil {
			return "", fmt.Errorf("tool %d: %w", i, err)
		}
		if v.kind != jsonObject {
			return "", fmt.Errorf("tool %d: not a JSON object", i)
		}
		k := t.Kind
		if k == KindTemplate {
			k = KindSystem
		}
		list = append(list, w.value(&v, k))
	}
	if len(list) > 0 {
		data["tools"] = jinja.NewList(list)
	}
	if w.err != nil {
		return "", w.err
	}
	text, err = f.t.RenderValues(data)
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrTemplate, err)
	}
	return fromMarks.Replace(text), nil
}

// values builds the engine's values and keeps the first error.
type values struct {
	mark    bool              // text is marked
	variant *strings.Replacer // other characters for text of messages
	err     error
}

func (w *values) fail(format string, a ...any) {
	if w.err == nil {
		w.err = fmt.Errorf("%w: "+format, append([]any{ErrEngine}, a...)...)
	}
}

func (w *values) message(m *Message) jinja.Value {
	v := jinja.NewDict()
	d := v.AsDict()
	d.Set("role", jinja.NewString(m.Role))
	d.Set("content", w.content(m))
	if m.Reasoning != nil {
		d.Set("reasoning_content", w.tagged(*m.Reasoning, m.kind(), w.text))
	}
	var calls []jinja.Value
	for _, c := range m.Calls {
		arguments := jinja.NewDict()
		for _, a := range c.Args {
			arguments.AsDict().Set(w.nested(a.Key), w.argument(a, m.kind()))
		}
		function := jinja.NewDict()
		function.AsDict().Set("name", jinja.NewString(w.nested(c.Name)))
		function.AsDict().Set("arguments", arguments)
		call := jinja.NewDict()
		call.AsDict().Set("type", jinja.NewString("function"))
		call.AsDict().Set("function", function)
		calls = append(calls, call)
	}
	if len(calls) > 0 {
		d.Set("tool_calls", jinja.NewList(calls))
	}
	return v
}

// content is the content with marks inside the white space at its ends, where a template that trims does not touch them.
func (w *values) content(m *Message) jinja.Value {
	parts := m.Parts
	if len(parts) == 0 {
		parts = []Segment{{Text: m.Content, Kind: m.kind()}}
	}
	whole := Text(parts)
	if !w.mark || trim(whole) == "" {
		return jinja.NewString(w.text(whole))
	}
	var b strings.Builder
	b.WriteString(w.text(whole[:len(whole)-len(strings.TrimLeftFunc(whole, isSpace))]))
	for _, s := range m.content() {
		if s.Kind == KindTemplate {
			b.WriteString(w.text(s.Text))
			continue
		}
		b.WriteString(string(markKind+rune(s.Kind)) + w.text(s.Text) + string(markEnd))
	}
	b.WriteString(w.text(whole[len(strings.TrimRightFunc(whole, isSpace)):]))
	return jinja.NewString(b.String())
}

// tagged marks a string that could be taken for a tag, inside the white space at its ends.
func (w *values) tagged(s string, k Kind, prepare func(string) string) jinja.Value {
	body := trim(s)
	if !w.mark || !strings.Contains(body, "<") {
		return jinja.NewString(prepare(s))
	}
	at := strings.Index(s, body)
	return jinja.NewString(prepare(s[:at]) + string(markKind+rune(k)) + prepare(body) + string(markEnd) + prepare(s[at+len(body):]))
}

// text prepares text of a message.
func (w *values) text(s string) string {
	s = w.safe(s)
	if w.variant != nil {
		s = w.variant.Replace(s)
	}
	return s
}

// safe is text without the package's own marks.
func (w *values) safe(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool { return r >= markLine && r <= markLast }) {
		w.fail("private characters U+%X to U+%X", markLine, markLast)
	}
	return validUTF8(s)
}

// nested prepares a string of a tool or an argument, which templates write as JSON.
func (w *values) nested(s string) string {
	out := toMarks.Replace(w.safe(s))
	if s != "" && !w.mark && trim(s) != fromMarks.Replace(strings.TrimSpace(out)) {
		w.fail("separator characters at the ends of %q", clip(s))
	}
	return out
}

// argument is the value of an argument. None alone prints as nothing in the engine.
func (w *values) argument(a Arg, k Kind) jinja.Value {
	if len(a.Value) == 0 {
		w.fail("null of argument %q", a.Key)
		return jinja.None()
	}
	v, err := parseJSON(a.Value)
	if err != nil {
		w.err = errors.Join(w.err, fmt.Errorf("argument %q: %w", a.Key, err))
		return jinja.None()
	}
	if v.kind == jsonNull {
		w.fail("null of argument %q", a.Key)
	}
	return w.value(&v, k)
}

func (w *values) value(v *value, k Kind) jinja.Value {
	switch v.kind {
	case jsonBool:
		return jinja.NewBool(v.b)
	case jsonNumber:
		return w.number(v.text)
	case jsonString:
		return w.tagged(v.text, k, w.nested)
	case jsonArray:
		list := make([]jinja.Value, len(v.vals))
		for i := range v.vals {
			list[i] = w.value(&v.vals[i], k)
		}
		return jinja.NewList(list)
	case jsonObject:
		d := jinja.NewDict()
		for i, key := range v.keys {
			d.AsDict().Set(w.nested(key), w.value(&v.vals[i], k))
		}
		return d
	}
	return jinja.None()
}

func (w *values) number(text string) jinja.Value {
	want := pythonNumber(text)
	if n, err := strconv.ParseInt(want, 10, 64); err == nil {
		return jinja.NewInt(n)
	}
	f, err := strconv.ParseFloat(want, 64)
	if err != nil || strconv.FormatFloat(f, 'g', -1, 64) != want || !strings.ContainsAny(want, ".e") {
		w.fail("number %s", text)
	}
	return jinja.NewFloat(f)
}
