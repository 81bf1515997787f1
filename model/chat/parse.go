package chat

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Mode says what the parser does with defects.
type Mode uint8

// Strict accepts only the template's own format and reports every defect as Malformed. Lenient repairs the slips that models make
// (a missing </parameter>, </function>, <tool_call> or </tool_call>, a call inside an unfinished thinking block, a JSON body) and
// reports each as Repaired.
const (
	Strict Mode = iota
	Lenient
)

// EventType is the type of a parser event.
type EventType uint8

// Event types.
const (
	Thinking  EventType = iota // Text is a piece of the thinking block
	Content                    // Text is a piece of the answer
	CallEvent                  // Call is a complete tool call
	Malformed                  // Reason names a defect; Text is the text that was dropped, if any
	Repaired                   // Reason names a defect that Lenient repaired
)

// Event is one result of parsing.
type Event struct {
	Type   EventType
	Text   string
	Call   Call
	Reason string
}

// Turn is a completely parsed turn. Thinking and Content are trimmed.
type Turn struct {
	Thinking, Content string
	Calls             []Call
	Malformed         []string
	Repairs           []string
}

// ParseTurn parses the text of a whole turn. One stop literal at the end of the text is ignored.
func ParseTurn(text string, mode Mode, inThink bool) Turn {
	text = strings.TrimSuffix(text, EndOfText)
	text = strings.TrimSuffix(text, IMEnd)
	p := NewParser(mode, inThink)
	var t Turn
	var think, content strings.Builder
	for _, ev := range append(p.Push(text), p.Finish()...) {
		switch ev.Type {
		case Thinking:
			think.WriteString(ev.Text)
		case Content:
			content.WriteString(ev.Text)
		case CallEvent:
			t.Calls = append(t.Calls, ev.Call)
		case Malformed:
			t.Malformed = append(t.Malformed, ev.Reason)
		case Repaired:
			t.Repairs = append(t.Repairs, ev.Reason)
		}
	}
	t.Thinking, t.Content = trim(think.String()), trim(content.String())
	return t
}

// Literals inside a call.
const (
	functionOpen   = "<function="
	functionClose  = "</function>"
	parameterOpen  = "<parameter="
	parameterClose = "</parameter>"
)

// state is where the parser stands in the turn.
type state uint8

const (
	atStart state = iota // before the first visible character of a turn without open thinking
	inThinking
	afterThink // leading newlines of the content are dropped
	inContent
	inCall
)

// Parser turns streamed text into events. The events, joined by type, do not depend on how the text is cut.
type Parser struct {
	mode   Mode
	state  state
	buf    string          // text not yet decided on
	tail   string          // an unfinished character
	think  strings.Builder // whole thinking text, for calls inside it
	opened bool            // the buffered call had its <tool_call>
	scan   int             // in a call: where the search for the end goes on
	first  int             // in a call: the first </tool_call> that may belong to a value, or -1
	calls  int
	text   bool // visible content was emitted
	out    []Event
}

// NewParser returns a parser. inThink says that the prompt ends inside an open thinking block (Renderer.Thinks).
func NewParser(mode Mode, inThink bool) *Parser {
	p := &Parser{mode: mode}
	if inThink {
		p.state = inThinking
	}
	return p
}

// Push adds text and returns the events that are certain by now.
func (p *Parser) Push(text string) []Event {
	text = p.tail + text
	n := len(text) - incomplete(text)
	p.buf, p.tail = p.buf+text[:n], text[n:]
	for p.step(false) {
	}
	return p.take()
}

// incomplete returns the length of the unfinished character at the end of s.
func incomplete(s string) int {
	for n := 1; n < utf8.UTFMax && n <= len(s); n++ {
		if c := s[len(s)-n]; utf8.RuneStart(c) {
			if !utf8.FullRuneInString(s[len(s)-n:]) {
				return n
			}
			break
		}
	}
	return 0
}

// Finish ends the turn and returns the remaining events. The parser must not be used afterwards.
func (p *Parser) Finish() []Event {
	p.buf, p.tail = p.buf+p.tail, ""
	for p.step(true) {
	}
	if p.state == inThinking {
		p.finishThinking()
	}
	return p.take()
}

func (p *Parser) take() []Event {
	out := p.out
	p.out = nil
	return out
}

func (p *Parser) emit(t EventType, text string) {
	if text == "" {
		return
	}
	if t == Thinking {
		p.think.WriteString(text)
	}
	if n := len(p.out); n > 0 && p.out[n-1].Type == t {
		p.out[n-1].Text += text
		return
	}
	p.out = append(p.out, Event{Type: t, Text: text})
}

// defect reports a slip: repaired in lenient mode when it can be, malformed otherwise.
func (p *Parser) defect(repairable bool, reason, dropped string) {
	t := Malformed
	if repairable && p.mode == Lenient {
		t = Repaired
	}
	p.out = append(p.out, Event{Type: t, Reason: reason, Text: dropped})
}

// step consumes what it can of the buffer; false means that more text (or the end) is needed.
func (p *Parser) step(end bool) bool {
	switch p.state {
	case atStart:
		return p.stepStart(end)
	case inThinking:
		return p.stepThinking(end)
	case afterThink:
		p.buf = strings.TrimLeft(p.buf, "\n")
		if p.buf != "" {
			p.state = inContent
		}
		return p.buf != ""
	case inContent:
		return p.stepContent(end)
	}
	return p.stepCall(end)
}

// stepStart looks for a thinking block that the model opens itself.
func (p *Parser) stepStart(end bool) bool {
	rest := strings.TrimLeftFunc(p.buf, isSpace)
	switch {
	case strings.HasPrefix(rest, ThinkOpen):
		p.buf, p.state = rest[len(ThinkOpen):], inThinking
	case !end && strings.HasPrefix(ThinkOpen, rest):
		return false
	default:
		p.state = inContent
	}
	return true
}

func (p *Parser) stepThinking(end bool) bool {
	if at := strings.Index(p.buf, ThinkClose); at >= 0 {
		p.emit(Thinking, p.buf[:at])
		p.buf, p.state = p.buf[at+len(ThinkClose):], afterThink
		return true
	}
	keep := 0
	if !end {
		keep = partial(p.buf, ThinkClose)
	}
	p.emit(Thinking, p.buf[:len(p.buf)-keep])
	p.buf = p.buf[len(p.buf)-keep:]
	return false
}

// finishThinking handles a turn that ends inside the thinking block: no answer, but a lenient parser accepts calls made there.
func (p *Parser) finishThinking() {
	think := p.think.String()
	if at := strings.Index(think, ToolCallOpen); at >= 0 && p.mode == Lenient {
		q := NewParser(Lenient, false)
		q.state = inContent
		events := append(q.Push(think[at:]), q.Finish()...)
		if q.calls > 0 {
			p.defect(true, "tool call inside the thinking block", "")
			for _, ev := range events {
				if ev.Type != Content {
					p.out = append(p.out, ev)
				}
			}
			return
		}
	}
	p.defect(false, "thinking block is not closed", "")
}

// contentTags are what interrupts content.
var contentTags = [...]string{ToolCallOpen, functionOpen, ToolCallClose, ThinkClose}

func (p *Parser) stepContent(end bool) bool {
	at, tag := len(p.buf), ""
	for _, t := range contentTags {
		if i := strings.Index(p.buf, t); i >= 0 && i < at {
			at, tag = i, t
		}
	}
	if tag == functionOpen && !callLike(p.buf[:at], p.text) { // a mention of the syntax
		p.content(p.buf[:at+len(functionOpen)], false)
		p.buf = p.buf[at+len(functionOpen):]
		return true
	}
	if tag == "" {
		keep := 0
		if !end {
			for _, t := range contentTags {
				keep = max(keep, partial(p.buf, t))
			}
			head := p.buf[:len(p.buf)-keep]
			keep += len(head) - len(strings.TrimRightFunc(head, isSpace))
		}
		p.content(p.buf[:len(p.buf)-keep], end)
		p.buf = p.buf[len(p.buf)-keep:]
		return false
	}
	p.content(p.buf[:at], tag != functionOpen || p.mode == Lenient)
	switch tag {
	case ToolCallOpen:
		p.buf, p.state, p.opened, p.scan, p.first = p.buf[at+len(tag):], inCall, true, 0, -1
	case functionOpen:
		p.defect(true, "<tool_call> is missing before <function=", "")
		if p.mode == Strict {
			p.content(tag, false)
			p.buf = p.buf[at+len(tag):]
			return true
		}
		p.buf, p.state, p.opened, p.scan, p.first = p.buf[at:], inCall, false, 0, -1
	default:
		p.defect(true, "stray "+tag, tag)
		p.buf = p.buf[at+len(tag):]
	}
	return true
}

// callLike reports whether <function= at the end of before stands at the start of a line, as a call would.
func callLike(before string, hasText bool) bool {
	line := strings.TrimRight(before, " \t")
	return strings.HasSuffix(line, "\n") || line == "" && !hasText
}

// content emits answer text; last drops trailing whitespace, which only separates the text from a call or the end.
func (p *Parser) content(text string, last bool) {
	if last {
		text = strings.TrimRightFunc(text, isSpace)
	}
	if !p.text {
		text = strings.TrimLeftFunc(text, isSpace)
	}
	if text == "" {
		return
	}
	if p.calls > 0 && trim(text) != "" && !p.text {
		p.defect(true, "text after a tool call", "")
	}
	p.text = true
	p.emit(Content, text)
}

// stepCall waits for the end of a call block and parses it. A value may hold </tool_call>, so a block that ends inside an open value is
// kept in first until a later </tool_call> decides: a block without defects wins, else the first one was the end.
func (p *Parser) stepCall(end bool) bool {
	if end {
		p.scan, p.first = 0, -1
	}
	for {
		i := strings.Index(p.buf[p.scan:], ToolCallClose)
		if i < 0 {
			break
		}
		at := p.scan + i
		p.scan = at + len(ToolCallClose)
		body := p.buf[:at]
		_, defects := parseCall(body, Strict)
		switch {
		case len(defects) == 0:
		case p.first >= 0 && ended(body):
			at = p.first
		case end || ended(body):
		default:
			if p.first < 0 {
				p.first = at
			}
			continue
		}
		p.endBlock(at)
		return true
	}
	if !end {
		p.scan = max(p.scan, len(p.buf)-len(ToolCallClose)+1)
		return false
	}
	return p.unclosedCall()
}

// ended reports whether nothing more of a block can follow: its function or its last parameter is closed, or it has no parameter.
func ended(body string) bool {
	tail := strings.TrimRightFunc(body, isSpace)
	return strings.HasSuffix(tail, functionClose) || strings.HasSuffix(tail, parameterClose) || !strings.Contains(body, parameterOpen)
}

// endBlock parses the block that ends at </tool_call> at buf[at:]. When the block swallowed the opener of another call, only the first
// function is taken and the rest is parsed again.
func (p *Parser) endBlock(at int) {
	body, rest := p.buf[:at], p.buf[at+len(ToolCallClose):]
	if cut := nextCall(body); cut >= 0 {
		p.defect(true, "</tool_call> is missing", "")
		body, rest = body[:cut], p.buf[cut:]
	}
	p.finishCall(body)
	p.buf = rest
}

// nextCall finds the end of a function that another call follows at once, -1 when there is none.
func nextCall(body string) int {
	for from := 0; ; {
		i := strings.Index(body[from:], functionClose)
		if i < 0 {
			return -1
		}
		from += i + len(functionClose)
		next := strings.TrimLeftFunc(body[from:], isSpace)
		if strings.HasPrefix(next, ToolCallOpen) || strings.HasPrefix(next, functionOpen) {
			return from
		}
	}
}

// unclosedCall handles a block without </tool_call> at the end of the turn.
func (p *Parser) unclosedCall() bool {
	body := p.buf
	p.buf = ""
	p.state = inContent
	if at := strings.Index(body, functionClose); at >= 0 && p.mode == Lenient {
		if p.opened {
			p.defect(true, "</tool_call> is missing", "")
		}
		cut := at + len(functionClose)
		p.finishCall(body[:cut])
		p.buf = strings.TrimLeftFunc(body[cut:], isSpace)
		return p.buf != ""
	}
	p.defect(false, "tool call is not closed", body)
	return false
}

// finishCall parses a block and emits the call or its defects.
func (p *Parser) finishCall(body string) {
	p.state, p.text = inContent, false
	call, defects := parseCall(body, p.mode)
	for _, d := range defects {
		dropped := ""
		if !d.repaired {
			dropped = body
		}
		p.defect(d.repaired, d.reason, dropped)
		if !d.repaired {
			return
		}
	}
	p.calls++
	p.out = append(p.out, Event{Type: CallEvent, Call: call})
}

// partial returns the length of the longest suffix of s that is a proper prefix of tag.
func partial(s, tag string) int {
	for n := min(len(s), len(tag)-1); n > 0; n-- {
		if strings.HasSuffix(s, tag[:n]) {
			return n
		}
	}
	return 0
}

// callDefect is one slip inside a block.
type callDefect struct {
	reason   string
	repaired bool
}

// parseCall parses the text between <tool_call> and </tool_call>. In lenient mode the returned defects may be all repaired, and then the
// call is usable; in strict mode any defect makes it unusable. Values are everything between the newline after <parameter=KEY> and the
// newline before a </parameter> that is followed by another parameter or the end of the function, so they may contain any literal else.
func parseCall(body string, mode Mode) (Call, []callDefect) {
	var ds []callDefect
	slip := func(format string, a ...any) bool {
		ds = append(ds, callDefect{fmt.Sprintf(format, a...), mode == Lenient})
		return mode == Lenient
	}
	fatal := func(format string, a ...any) (Call, []callDefect) {
		return Call{}, append(ds, callDefect{fmt.Sprintf(format, a...), false})
	}
	s := strings.TrimFunc(body, isSpace)
	if !strings.HasPrefix(s, functionOpen) {
		if c, ok := jsonCall(s); ok && slip("call is JSON instead of <function=...>") {
			return c, ds
		}
		return fatal("no <function= after <tool_call>")
	}
	name, s, ok := strings.Cut(s[len(functionOpen):], ">")
	if !ok || name == "" || strings.ContainsAny(name, "<\n") {
		return fatal("function name %q is not closed by >", clip(name))
	}
	c := Call{Name: name}
	for {
		s = strings.TrimLeftFunc(s, isSpace)
		switch {
		case strings.HasPrefix(s, parameterOpen):
			key, rest, ok := strings.Cut(s[len(parameterOpen):], ">")
			if !ok || key == "" || strings.ContainsAny(key, "<\n") {
				return fatal("parameter name %q of %q is not closed by >", clip(key), name)
			}
			val, rest, closed := cutValue(rest)
			if !closed && !slip("</parameter> of %q in %q is missing", key, name) {
				return c, ds
			}
			if c.Arg(key) != nil {
				if !slip("parameter %q of %q is given twice", key, name) {
					return c, ds
				}
				*c.Arg(key) = textArg(key, val)
			} else {
				c.Args = append(c.Args, textArg(key, val))
			}
			s = rest
		case strings.HasPrefix(s, functionClose):
			if rest := trim(s[len(functionClose):]); rest != "" && !slip("text %q after </function> of %q", clip(rest), name) {
				return c, ds
			}
			return c, ds
		case s == "":
			slip("</function> of %q is missing", name)
			return c, ds
		default:
			next := nextTag(s)
			if !slip("text %q between the parameters of %q", clip(trim(s[:next])), name) {
				return c, ds
			}
			s = s[next:]
		}
	}
}

// nextTag finds where the next parameter or the end of the function begins.
func nextTag(s string) int {
	at := len(s)
	for _, t := range [...]string{parameterOpen, functionClose} {
		if i := strings.Index(s, t); i >= 0 {
			at = min(at, i)
		}
	}
	return at
}

// cutValue cuts a value and its closer off s. closed is false when no closer fits; the value then ends before the next tag.
func cutValue(s string) (val, rest string, closed bool) {
	for from := 0; ; {
		i := strings.Index(s[from:], parameterClose)
		if i < 0 {
			break
		}
		at := from + i
		from = at + len(parameterClose)
		next := strings.TrimLeftFunc(s[from:], isSpace)
		if next == "" || strings.HasPrefix(next, parameterOpen) || strings.HasPrefix(next, functionClose) {
			if openTag(s[:at]) >= 0 {
				break
			}
			return strip(s[:at]), s[from:], true
		}
	}
	at := openTag(s)
	if t := strings.TrimRightFunc(s, isSpace); strings.HasSuffix(t, functionClose) && (at < 0 || len(t)-len(functionClose) < at) {
		at = len(t) - len(functionClose)
	}
	if at < 0 {
		at = len(s)
	}
	return strip(s[:at]), s[at:], false
}

// openTag finds what shows that a value's closer is missing: another parameter at the start of a line, or the border of two calls.
func openTag(s string) int {
	at := -1
	if i := strings.Index(s, "\n"+parameterOpen); i >= 0 {
		at = i + 1
	}
	for from := 0; ; {
		i := strings.Index(s[from:], ToolCallClose)
		if i < 0 || at >= 0 && from+i > at {
			return at
		}
		from += i + len(ToolCallClose)
		if strings.HasPrefix(strings.TrimLeftFunc(s[from:], isSpace), ToolCallOpen) {
			return from - len(ToolCallClose)
		}
	}
}

// strip removes exactly one leading and one trailing newline.
func strip(s string) string { return strings.TrimSuffix(strings.TrimPrefix(s, "\n"), "\n") }

// clip shortens text for a message.
func clip(s string) string {
	const limit = 40
	if len(s) <= limit {
		return s
	}
	return validUTF8(s[:limit]) + "..."
}

func textArg(key, val string) Arg {
	var b strings.Builder
	writeString(&b, validUTF8(val))
	return Arg{Key: key, Value: json.RawMessage(b.String())}
}

// jsonCall reads the call format of earlier models: {"name": ..., "arguments": {...}}.
func jsonCall(s string) (Call, bool) {
	v, err := parseJSON([]byte(s))
	if err != nil || v.kind != jsonObject {
		return Call{}, false
	}
	c, err := toCall(&v)
	return c, err == nil && c.Name != ""
}

// Arg returns the argument with a key, or nil.
func (c *Call) Arg(key string) *Arg {
	for i := range c.Args {
		if c.Args[i].Key == key {
			return &c.Args[i]
		}
	}
	return nil
}

// Text returns the argument as the template writes it: a string verbatim, other values as JSON or Python's str.
func (a Arg) Text() string {
	s, err := argText(a.Value)
	if err != nil {
		return string(a.Value)
	}
	return s
}
