package chat

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Kind is the provenance of a piece of text or of a token.
type Kind uint8

// Kinds. As an override in Message.Kind or Tool.Kind the zero value KindTemplate means "the kind of the role".
const (
	KindTemplate Kind = iota // fixed text of the chat template
	KindSystem               // system message and tool descriptions
	KindUser                 // user message
	KindTool                 // tool result
	KindPolicy               // sampled by the policy
	KindHarness              // supplied by a harness: prompt blocks, reminders, canned assistant turns
)

// String returns the lower-case name used in ledgers and reports.
func (k Kind) String() string {
	switch k {
	case KindTemplate:
		return "template"
	case KindSystem:
		return "system"
	case KindUser:
		return "user"
	case KindTool:
		return "tool"
	case KindPolicy:
		return "policy"
	case KindHarness:
		return "harness"
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Segment is a run of text with one provenance.
type Segment struct {
	Text string
	Kind Kind
}

// Literals of the template that are single tokens of the vocabulary.
const (
	IMStart           = "<|im_start|>"
	IMEnd             = "<|im_end|>"
	EndOfText         = "<|endoftext|>"
	ThinkOpen         = "<think>"
	ThinkClose        = "</think>"
	ToolCallOpen      = "<tool_call>"
	ToolCallClose     = "</tool_call>"
	ToolResponseOpen  = "<tool_response>"
	ToolResponseClose = "</tool_response>"
)

// Message is one message of a conversation. Content is plain text; Parts, when not empty, replaces Content and lets one message mix
// provenances (a system message with harness text). Kind, when not KindTemplate, replaces the kind of the role for Content; by role it
// is KindSystem, KindUser, KindTool, and KindHarness for assistant (a rendered assistant turn was not sampled here).
// Reasoning, Calls belong to assistant messages. A nil Reasoning lets the template look for </think> in the content.
type Message struct {
	Role      string
	Content   string
	Parts     []Segment
	Kind      Kind
	Reasoning *string
	Calls     []Call
}

// Call is one tool call; Args keep their order.
type Call struct {
	Name string
	Args []Arg
}

// Arg is one argument. Value is any JSON value; the parser always produces JSON strings, Call.Typed converts them.
type Arg struct {
	Key   string
	Value json.RawMessage
}

// Tool is one tool description: the whole OpenAI-style object as given. Kind, when not KindTemplate, replaces KindSystem.
type Tool struct {
	JSON json.RawMessage
	Kind Kind
}

// Options of one rendering.
type Options struct {
	// AddGenerationPrompt ends the text with the opening of an assistant turn. Open and Bridge both obey it.
	AddGenerationPrompt bool
	// Thinking is the template's enable_thinking; nil leaves it to Renderer.ThinkDefault.
	Thinking *bool
	// Closed tells Bridge that the sampled turn already ends with <|im_end|>. When false (the turn ended by length, by
	// <|endoftext|> or by an abort) Bridge starts with <|im_end|> itself. Open ignores it.
	Closed bool
}

// raised is an error of the template with its own text.
type raised string

func (e raised) Error() string { return string(e) }

// Errors of rendering; the texts are those of the template.
var (
	ErrNoMessages     error = raised("No messages provided.")
	ErrNoUserQuery    error = raised("No user query found in messages.")
	ErrSystemNotFirst error = raised("System message must be at the beginning.")
	ErrUnexpectedRole error = raised("Unexpected message role.")
)

// Renderer renders the Qwen3.5 template. ThinkDefault is the only difference between its two published versions: true for 4B and 9B,
// false for 0.8B and 2B (model.md 5.5). A Renderer of ForTemplate or FromCheckpoint may render another template instead.
type Renderer struct {
	ThinkDefault bool
	family       Family
	thinking     *bool    // enable_thinking where Options leave it open; nil = the template's default
	foreign      *foreign // nil for the published templates
}

// Family names the template that a Renderer renders.
type Family string

// Families. A template that was not published with Qwen3.5 has a name of its own, which tells its digest.
const (
	BuiltIn Family = "built-in Qwen3.5 format" // NewRenderer: no template was given
	Large   Family = "Qwen3.5 4B and 9B"
	Small   Family = "Qwen3.5 0.8B and 2B"
)

// Family is the template that r renders.
func (r Renderer) Family() Family {
	if r.family == "" {
		return BuiltIn
	}
	return r.family
}

// WithThinking returns a renderer that passes enable_thinking to the template wherever Options do not say otherwise: in generation prompts
// and, where the template looks at it, in the history. It fails with ErrTemplate when the template's generation prompt does not follow.
func (r Renderer) WithThinking(on bool) (Renderer, error) {
	if got := r.Thinks(Options{Thinking: &on}); got != on {
		return Renderer{}, fmt.Errorf("switch thinking: %w: with enable_thinking = %t its generation prompt has thinking %s", ErrTemplate, on, map[bool]string{true: "on", false: "off"}[got])
	}
	r.ThinkDefault, r.thinking = on, &on
	return r, nil
}

// options fills in what o leaves to the renderer.
func (r Renderer) options(o Options) Options {
	if o.Thinking == nil {
		o.Thinking = r.thinking
	}
	return o
}

// NewRenderer returns a renderer with the given thinking default.
func NewRenderer(thinkDefault bool) Renderer { return Renderer{ThinkDefault: thinkDefault} }

// toolInstructions is the fixed text after </tools> (model.md 5.5).
const toolInstructions = `

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within <tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell the user about function calls
</IMPORTANT>`

// builder collects segments and merges neighbours of one kind.
type builder struct{ segs []Segment }

func (b *builder) add(k Kind, text string) {
	if text == "" {
		return
	}
	if n := len(b.segs); n > 0 && b.segs[n-1].Kind == k {
		b.segs[n-1].Text += text
		return
	}
	b.segs = append(b.segs, Segment{Text: text, Kind: k})
}

func (b *builder) tmpl(text string) { b.add(KindTemplate, text) }

func (b *builder) addAll(segs []Segment) {
	for _, s := range segs {
		b.add(s.Kind, s.Text)
	}
}

// Open renders a whole conversation. It fails exactly where the template raises, and when a JSON value does not parse.
func (r Renderer) Open(msgs []Message, tools []Tool, o Options) ([]Segment, error) {
	o = r.options(o)
	if r.foreign != nil {
		return r.foreign.open(msgs, tools, o)
	}
	if len(msgs) == 0 {
		return nil, fmt.Errorf("render chat: %w", ErrNoMessages)
	}
	var b builder
	if err := renderSystem(&b, msgs, tools); err != nil {
		return nil, err
	}
	lastQuery := -1
	for i := len(msgs) - 1; i >= 0 && lastQuery < 0; i-- {
		if msgs[i].Role == "user" && !isToolResponse(Text(msgs[i].content())) {
			lastQuery = i
		}
	}
	if lastQuery < 0 {
		return nil, fmt.Errorf("render chat: %w", ErrNoUserQuery)
	}
	for i := range msgs {
		m := &msgs[i]
		switch m.Role {
		case "system":
			if i != 0 {
				return nil, fmt.Errorf("render message %d: %w", i, ErrSystemNotFirst)
			}
		case "user":
			renderUser(&b, m)
		case "assistant":
			if err := renderAssistant(&b, m, i > lastQuery); err != nil {
				return nil, fmt.Errorf("render message %d: %w", i, err)
			}
		case "tool":
			renderTool(&b, msgs, i, i > 0 && msgs[i-1].Role != "tool")
		default:
			return nil, fmt.Errorf("render message %d: %w (role %q)", i, ErrUnexpectedRole, m.Role)
		}
	}
	if o.AddGenerationPrompt {
		b.tmpl(r.generationPrompt(o))
	}
	return b.segs, nil
}

// Bridge renders what follows a sampled assistant turn: the end of the turn, the given tool and user messages and, with
// AddGenerationPrompt, the opening of the next turn. Thinking that was sampled earlier stays, because ids are only appended.
// Messages must not be empty: an observation with an empty delta would silently vanish.
func (r Renderer) Bridge(msgs []Message, o Options) ([]Segment, error) {
	o = r.options(o)
	if r.foreign != nil {
		return r.foreign.bridge(msgs, o)
	}
	if len(msgs) == 0 {
		return nil, fmt.Errorf("render bridge: %w", ErrNoMessages)
	}
	var b builder
	if !o.Closed {
		b.tmpl(IMEnd)
	}
	b.tmpl("\n")
	for i := range msgs {
		m := &msgs[i]
		switch m.Role {
		case "user":
			renderUser(&b, m)
		case "tool":
			renderTool(&b, msgs, i, i == 0 || msgs[i-1].Role != "tool")
		default:
			return nil, fmt.Errorf("render bridge message %d: %w (role %q, want tool or user)", i, ErrUnexpectedRole, m.Role)
		}
	}
	if o.AddGenerationPrompt {
		b.tmpl(r.generationPrompt(o))
	}
	return b.segs, nil
}

// Thinks reports whether a generation prompt under o leaves the thinking block open, that is the parser's inThink.
func (r Renderer) Thinks(o Options) bool {
	o = r.options(o)
	switch {
	case o.Thinking == nil:
		return r.ThinkDefault
	case r.foreign == nil:
		return *o.Thinking
	case *o.Thinking:
		return r.foreign.thinks[1]
	}
	return r.foreign.thinks[0]
}

func (r Renderer) generationPrompt(o Options) string {
	if r.Thinks(o) {
		return IMStart + "assistant\n" + ThinkOpen + "\n"
	}
	return IMStart + "assistant\n" + ThinkOpen + "\n\n" + ThinkClose + "\n\n"
}

func renderSystem(b *builder, msgs []Message, tools []Tool) error {
	var sys []Segment
	has := msgs[0].Role == "system"
	if has {
		sys = msgs[0].content()
	}
	if len(tools) == 0 {
		if has {
			b.tmpl(IMStart + "system\n")
			b.addAll(sys)
			b.tmpl(IMEnd + "\n")
		}
		return nil
	}
	b.tmpl(IMStart + "system\n# Tools\n\nYou have access to the following functions:\n\n<tools>")
	for i, t := range tools {
		text, err := pythonJSON(t.JSON)
		if err != nil {
			return fmt.Errorf("render tool %d: %w", i, err)
		}
		if text[0] != '{' {
			return fmt.Errorf("render tool %d: not a JSON object", i)
		}
		k := t.Kind
		if k == KindTemplate {
			k = KindSystem
		}
		b.tmpl("\n")
		b.add(k, text)
	}
	b.tmpl("\n</tools>" + toolInstructions)
	if len(sys) > 0 {
		b.tmpl("\n\n")
		b.addAll(sys)
	}
	b.tmpl(IMEnd + "\n")
	return nil
}

func renderUser(b *builder, m *Message) {
	b.tmpl(IMStart + "user\n")
	b.addAll(m.content())
	b.tmpl(IMEnd + "\n")
}

// renderTool renders one tool result; consecutive results share one user turn, opened by the first of the run.
func renderTool(b *builder, msgs []Message, i int, first bool) {
	if first {
		b.tmpl(IMStart + "user")
	}
	b.tmpl("\n" + ToolResponseOpen + "\n")
	b.addAll(msgs[i].content())
	b.tmpl("\n" + ToolResponseClose)
	if i+1 == len(msgs) || msgs[i+1].Role != "tool" {
		b.tmpl(IMEnd + "\n")
	}
}

func renderAssistant(b *builder, m *Message, afterQuery bool) error {
	content := m.content()
	var reasoning string
	if m.Reasoning != nil {
		reasoning = *m.Reasoning
	} else if text := Text(content); strings.Contains(text, ThinkClose) {
		first, last := strings.Index(text, ThinkClose), strings.LastIndex(text, ThinkClose)
		reasoning = strings.TrimRight(text[:first], "\n")
		if at := strings.LastIndex(reasoning, ThinkOpen); at >= 0 {
			reasoning = reasoning[at+len(ThinkOpen):]
		}
		reasoning = strings.TrimLeft(reasoning, "\n")
		content = cutFront(content, last+len(ThinkClose))
		rest := Text(content)
		content = cutFront(content, len(rest)-len(strings.TrimLeft(rest, "\n")))
	}
	b.tmpl(IMStart + "assistant\n")
	if afterQuery {
		b.tmpl(ThinkOpen + "\n")
		b.add(m.kind(), trim(reasoning))
		b.tmpl("\n" + ThinkClose + "\n\n")
	}
	b.addAll(content)
	k := m.kind()
	for i, c := range m.Calls {
		switch {
		case i > 0:
			b.tmpl("\n")
		case trim(Text(content)) != "":
			b.tmpl("\n\n")
		}
		b.tmpl(ToolCallOpen + "\n")
		b.add(k, "<function="+c.Name+">\n")
		for _, a := range c.Args {
			v, err := argText(a.Value)
			if err != nil {
				return fmt.Errorf("render argument %q of call %q: %w", a.Key, c.Name, err)
			}
			b.add(k, "<parameter="+a.Key+">\n"+v+"\n</parameter>\n")
		}
		b.add(k, "</function>\n")
		b.tmpl(ToolCallClose)
	}
	b.tmpl(IMEnd + "\n")
	return nil
}

// isToolResponse reports whether a trimmed user content is a tool result in user clothing; such a message is not a query.
func isToolResponse(text string) bool {
	return strings.HasPrefix(text, ToolResponseOpen) && strings.HasSuffix(text, ToolResponseClose)
}

func (m *Message) kind() Kind {
	if m.Kind != KindTemplate {
		return m.Kind
	}
	switch m.Role {
	case "system":
		return KindSystem
	case "user":
		return KindUser
	case "tool":
		return KindTool
	}
	return KindHarness
}

// content returns the trimmed content as segments without empty ones.
func (m *Message) content() []Segment {
	if len(m.Parts) == 0 {
		if text := trim(m.Content); text != "" {
			return []Segment{{Text: text, Kind: m.kind()}}
		}
		return nil
	}
	whole := Text(m.Parts)
	lead := len(whole) - len(strings.TrimLeftFunc(whole, isSpace))
	if lead == len(whole) {
		return nil
	}
	segs := cutFront(m.Parts, lead)
	tail := len(whole) - len(strings.TrimRightFunc(whole, isSpace))
	for tail > 0 {
		last := &segs[len(segs)-1]
		if n := len(last.Text); n <= tail {
			segs, tail = segs[:len(segs)-1], tail-n
			continue
		}
		last.Text = last.Text[:len(last.Text)-tail]
		tail = 0
	}
	return segs
}

// cutFront returns a copy of segs without the first n bytes and without empty segments.
func cutFront(segs []Segment, n int) []Segment {
	var out []Segment
	for _, s := range segs {
		d := min(n, len(s.Text))
		n -= d
		if s.Text = s.Text[d:]; s.Text != "" {
			out = append(out, s)
		}
	}
	return out
}

// isSpace is Python's str.isspace of one character: White_Space and the four information separators.
func isSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }

func trim(s string) string { return strings.TrimFunc(s, isSpace) }

// Text joins the texts of segments.
func Text(segs []Segment) string {
	if len(segs) == 1 {
		return segs[0].Text
	}
	var b strings.Builder
	for _, s := range segs {
		b.WriteString(s.Text)
	}
	return b.String()
}

// Encoder is the part of a tokenizer that this package needs. Encode recognises added tokens in the text, EncodeOrdinary does not.
type Encoder interface {
	Encode(text string) []int32
	EncodeOrdinary(text string) []int32
}

// tokenBytes is implemented by byte-level tokenizers: the bytes of one token.
type tokenBytes interface {
	TokenBytes(id int32) []byte
}

// Encode turns segments into token ids with the kind of each. Only the template's own literals in template segments become special
// tokens. When e can tell the bytes of a token, the text between two literals is encoded as a whole, which gives the ids of encoding the
// rendered text at once, and a token that crosses segments takes the kind of its first byte; otherwise each segment is encoded alone.
func Encode(e Encoder, segs []Segment) (ids []int32, kinds []Kind) {
	var run []Segment
	flush := func() {
		ids, kinds = encodeRun(e, run, ids, kinds)
		run = run[:0]
	}
	for _, s := range segs {
		text := s.Text
		for s.Kind == KindTemplate && text != "" {
			at, lit := nextLiteral(text)
			if lit == "" {
				break
			}
			if at > 0 {
				run = append(run, Segment{Text: text[:at], Kind: KindTemplate})
			}
			flush()
			for _, id := range e.Encode(lit) {
				ids, kinds = append(ids, id), append(kinds, KindTemplate)
			}
			text = text[at+len(lit):]
		}
		if text != "" {
			run = append(run, Segment{Text: text, Kind: s.Kind})
		}
	}
	flush()
	return ids, kinds
}

func encodeRun(e Encoder, run []Segment, ids []int32, kinds []Kind) ([]int32, []Kind) {
	if tb, ok := e.(tokenBytes); ok && len(run) > 1 {
		whole := Text(run)
		got := e.EncodeOrdinary(whole)
		if ks, ok := alignKinds(tb, got, run, whole); ok {
			return append(ids, got...), append(kinds, ks...)
		}
	}
	for _, s := range run {
		for _, id := range e.EncodeOrdinary(s.Text) {
			ids, kinds = append(ids, id), append(kinds, s.Kind)
		}
	}
	return ids, kinds
}

// alignKinds finds the kind of each token by its first byte. It fails when the tokens do not spell the text (it was normalised).
func alignKinds(tb tokenBytes, ids []int32, run []Segment, whole string) ([]Kind, bool) {
	kinds := make([]Kind, len(ids))
	pos, seg, end := 0, 0, len(run[0].Text)
	for i, id := range ids {
		t := tb.TokenBytes(id)
		if !strings.HasPrefix(whole[pos:], string(t)) || len(t) == 0 {
			return nil, false
		}
		for pos >= end && seg+1 < len(run) {
			seg++
			end += len(run[seg].Text)
		}
		kinds[i] = run[seg].Kind
		pos += len(t)
	}
	return kinds, pos == len(whole)
}

var templateLiterals = [...]string{IMStart, IMEnd, ThinkOpen, ThinkClose, ToolCallOpen, ToolCallClose, ToolResponseOpen, ToolResponseClose}

// nextLiteral finds the first template literal in text; lit is empty when there is none.
func nextLiteral(text string) (at int, lit string) {
	for i := 0; i < len(text); i++ {
		if text[i] != '<' {
			continue
		}
		for _, l := range templateLiterals {
			if strings.HasPrefix(text[i:], l) {
				return i, l
			}
		}
	}
	return 0, ""
}

func validUTF8(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
