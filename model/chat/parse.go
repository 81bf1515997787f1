package chat

import "strings"

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

// Parser turns streamed text into events. The events, joined by type, do not depend on how the text is cut, and the work is proportional
// to the length of the text.
type Parser struct {
	marks
	mode   Mode
	state  state
	pos    int             // data[:pos] is done
	blank  int             // data[pos:blank] is known to be white space
	think  strings.Builder // whole thinking text, for calls inside it
	opened bool            // the call at pos had its <tool_call>
	calls  int
	seen   bool // visible content was emitted
	out    []Event
	piece  []byte // text of the last event of out, while it grows
	walks  map[int]bool
	walked int // the end that walks holds for
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
	p.add(text, false)
	for p.step(false) {
	}
	return p.take()
}

// Finish ends the turn and returns the remaining events. The parser must not be used afterwards.
func (p *Parser) Finish() []Event {
	p.add("", true)
	for p.step(true) {
	}
	if p.state == inThinking {
		p.finishThinking()
	}
	return p.take()
}

func (p *Parser) take() []Event {
	p.close()
	out := p.out
	p.out = nil
	return out
}

// close gives the last event its text.
func (p *Parser) close() {
	if len(p.piece) > 0 {
		p.out[len(p.out)-1].Text = string(p.piece)
		p.piece = p.piece[:0]
	}
}

func (p *Parser) emit(ev Event) {
	p.close()
	p.out = append(p.out, ev)
}

// emitText adds text to the last event or begins a new one.
func (p *Parser) emitText(t EventType, text string) {
	if text == "" {
		return
	}
	if t == Thinking {
		p.think.WriteString(text)
	}
	if n := len(p.out); len(p.piece) == 0 || p.out[n-1].Type != t {
		p.emit(Event{Type: t})
	}
	p.piece = append(p.piece, text...)
}

// defect reports a slip: repaired in lenient mode when it can be, malformed otherwise.
func (p *Parser) defect(repairable bool, reason, dropped string) {
	t := Malformed
	if repairable && p.mode == Lenient {
		t = Repaired
	}
	p.emit(Event{Type: t, Reason: reason, Text: dropped})
}

// step consumes what it can of the text; false means that more text (or the end) is needed.
func (p *Parser) step(end bool) bool {
	p.work++
	switch p.state {
	case atStart:
		return p.stepStart(end)
	case inThinking:
		return p.stepThinking()
	case afterThink:
		for p.pos < p.read && p.data[p.pos] == '\n' {
			p.pos++
			p.work++
		}
		if p.pos < len(p.data) && p.data[p.pos] != '\n' {
			p.state = inContent
		}
		return p.state == inContent
	case inContent:
		return p.stepContent(end)
	}
	return p.stepCall(end)
}

// stepStart looks for a thinking block that the model opens itself.
func (p *Parser) stepStart(end bool) bool {
	p.blank = p.skip(max(p.pos, p.blank), p.read)
	switch {
	case p.has(tagThinkOpen, p.blank, p.read):
		p.pos, p.state = p.blank+len(ThinkOpen), inThinking
	case !end && p.blank == p.read && (len(p.data) == p.read || p.data[p.read] != '<' || strings.HasPrefix(ThinkOpen, string(p.data[p.read:]))):
		return false
	default:
		p.state = inContent
	}
	return true
}

func (p *Parser) stepThinking() bool {
	if at := p.next(tagThinkClose, p.pos, p.read); at >= 0 {
		p.emitText(Thinking, p.text(p.pos, at))
		p.pos, p.state = at+len(ThinkClose), afterThink
		return true
	}
	p.emitText(Thinking, p.text(p.pos, p.read))
	p.pos = p.read
	return false
}

// finishThinking handles a turn that ends inside the thinking block: no answer, but a lenient parser accepts calls made there.
func (p *Parser) finishThinking() {
	think := p.think.String()
	if at := strings.Index(think, ToolCallOpen); at >= 0 && p.mode == Lenient {
		q := NewParser(Lenient, false)
		q.state = inContent
		events := append(q.Push(think[at:]), q.Finish()...)
		p.work += q.work
		if q.calls > 0 {
			p.defect(true, "tool call inside the thinking block", "")
			for _, ev := range events {
				if ev.Type != Content {
					p.emit(ev)
				}
			}
			return
		}
	}
	p.defect(false, "thinking block is not closed", "")
}

// contentTags are what interrupts content.
var contentTags = [...]tag{tagCallOpen, tagFunctionOpen, tagCallClose, tagThinkClose}

func (p *Parser) stepContent(end bool) bool {
	at, t := p.read, numLiterals
	for _, c := range contentTags {
		if i := p.next(c, p.pos, at); i >= 0 {
			at, t = i, c
		}
	}
	switch {
	case t == numLiterals: // white space waits, as it may separate the text from a call
		if !end {
			low := max(p.pos, p.blank)
			if at = p.cut(low, at); at == low {
				at = p.pos
			}
			p.blank = p.read
		}
		p.content(at, end)
		return false
	case t == tagFunctionOpen && !p.callLike(at): // a mention of the syntax
		p.content(at+len(functionOpen), false)
		return true
	}
	p.content(at, t != tagFunctionOpen || p.mode == Lenient)
	switch t {
	case tagCallOpen:
		p.pos, p.state, p.opened = at+len(ToolCallOpen), inCall, true
	case tagFunctionOpen:
		p.defect(true, "<tool_call> is missing before <function=", "")
		if p.mode == Strict {
			p.content(at+len(functionOpen), false)
			return true
		}
		p.state, p.opened = inCall, false
	default:
		p.defect(true, "stray "+literals[t], literals[t])
		p.pos = at + len(literals[t])
	}
	return true
}

// callLike reports whether <function= at a place stands at the start of a line, as a call would.
func (p *Parser) callLike(at int) bool {
	for at > p.pos && (p.data[at-1] == ' ' || p.data[at-1] == '\t') {
		at--
		p.work++
	}
	return at > p.pos && p.data[at-1] == '\n' || at == p.pos && !p.seen
}

// content emits the text up to a place as part of the answer; last drops trailing white space, which only separates it from a call or the
// end.
func (p *Parser) content(to int, last bool) {
	from := p.pos
	p.pos = to
	if last {
		to = p.cut(from, to)
	}
	if !p.seen {
		from = p.skip(from, to)
	}
	if from == to {
		return
	}
	if p.calls > 0 && !p.seen && p.skip(from, to) < to {
		p.defect(true, "text after a tool call", "")
	}
	p.seen = true
	p.emitText(Content, p.text(from, to))
}
