package chat

import (
	"encoding/json"
	"fmt"
	"strings"
)

// stepCall waits for the end of a call block and parses it. A value may hold </tool_call>, so when the first one stands inside an open
// value, the next one that follows the end of a function or a parameter decides: a block that is in order up to there wins, else the
// first one was the end.
func (p *Parser) stepCall(end bool) bool {
	at := p.next(tagCallClose, p.pos, p.read)
	switch {
	case at < 0 && end:
		return p.unclosedCall()
	case at < 0:
		return false
	case end, p.next(tagClosed, at, at+1) == at, p.next(tagParameterOpen, p.pos, at) < 0:
	default:
		last := p.next(tagClosed, at, p.read)
		if last < 0 {
			return false
		}
		if p.inOrder(p.pos, last) {
			at = last
		}
	}
	p.endBlock(at)
	return true
}

// inOrder reports whether data[from:to] is a function with closed parameters and nothing else.
func (p *Parser) inOrder(from, to int) bool {
	at := p.skip(from, to)
	if !p.has(tagFunctionOpen, at, to) {
		return false
	}
	_, at, ok := p.name(at+len(functionOpen), to)
	if !ok {
		return false
	}
	if p.walked != to {
		p.walks, p.walked = map[int]bool{}, to
	}
	// Blocks whose values hold other blocks share what follows; its result is kept by place.
	var path []int
	for done := false; !done; {
		if ok, done = p.walks[at]; done {
			break
		}
		path = append(path, at)
		at, ok, done = p.parameter(at, to)
	}
	for _, at := range path {
		p.walks[at] = ok
	}
	return ok
}

// parameter passes one parameter of a block in order that ends at to; done tells that there is none, ok that the function ended.
func (p *Parser) parameter(from, to int) (at int, ok, done bool) {
	at = p.skip(from, to)
	if p.has(tagFunctionClose, at, to) {
		at += len(functionClose)
		return at, p.skip(at, to) == to, true
	}
	if !p.has(tagParameterOpen, at, to) {
		return at, false, true
	}
	_, at, ok = p.name(at+len(parameterOpen), to)
	if !ok {
		return at, false, true
	}
	closer := p.next(tagCloser, at, to)
	if closer < 0 || p.openTag(at, closer) >= 0 {
		return at, false, true
	}
	return closer + len(parameterClose), false, false
}

// endBlock parses the block that ends at a </tool_call>. When the block swallowed the opener of another call, only the first function is
// taken and the rest is parsed again.
func (p *Parser) endBlock(at int) {
	rest := at + len(ToolCallClose)
	if cut := p.next(tagJoint, p.pos, at); cut >= 0 {
		p.defect(true, "</tool_call> is missing", "")
		at = cut + len(functionClose)
		rest = at
	}
	p.finishCall(at)
	p.pos = rest
}

// unclosedCall handles a block without </tool_call> at the end of the turn.
func (p *Parser) unclosedCall() bool {
	p.state = inContent
	if at := p.next(tagFunctionClose, p.pos, p.read); at >= 0 && p.mode == Lenient {
		if p.opened {
			p.defect(true, "</tool_call> is missing", "")
		}
		at += len(functionClose)
		p.finishCall(at)
		p.pos = p.skip(at, p.read)
		return p.pos < p.read
	}
	p.defect(false, "tool call is not closed", p.text(p.pos, p.read))
	p.pos = p.read
	return false
}

// finishCall parses the block data[pos:to] and emits the call or its defects.
func (p *Parser) finishCall(to int) {
	p.state, p.seen = inContent, false
	call, defects := p.parseCall(to)
	for _, d := range defects {
		if !d.repaired {
			p.defect(false, d.reason, p.text(p.pos, to))
			return
		}
		p.defect(true, d.reason, "")
	}
	p.calls++
	p.emit(Event{Type: CallEvent, Call: call})
}

// callDefect is one slip inside a block.
type callDefect struct {
	reason   string
	repaired bool
}

// parseCall parses the block data[pos:to], the text between <tool_call> and </tool_call>. In lenient mode the returned defects may be all
// repaired, and then the call is usable; in strict mode any defect makes it unusable. Values are everything between the newline after
// <parameter=KEY> and the newline before a </parameter> that is followed by another parameter or the end of the function, so they may
// contain any literal else.
func (p *Parser) parseCall(to int) (Call, []callDefect) {
	var ds []callDefect
	slip := func(format string, a ...any) bool {
		ds = append(ds, callDefect{fmt.Sprintf(format, a...), p.mode == Lenient})
		return p.mode == Lenient
	}
	fatal := func(format string, a ...any) (Call, []callDefect) {
		return Call{}, append(ds, callDefect{fmt.Sprintf(format, a...), false})
	}
	at := p.skip(p.pos, to)
	to = p.cut(at, to)
	if !p.has(tagFunctionOpen, at, to) {
		if c, ok := jsonCall(p.text(at, to)); ok && slip("call is JSON instead of <function=...>") {
			return c, ds
		}
		return fatal("no <function= after <tool_call>")
	}
	name, at, ok := p.name(at+len(functionOpen), to)
	if !ok {
		return fatal("function name %q is not closed by >", name)
	}
	c, short := Call{Name: name}, clip(name)
	keys := map[string]int{}
	for {
		p.work++
		at = p.skip(at, to)
		switch {
		case at == to:
			slip("</function> of %q is missing", short)
			return c, ds
		case p.has(tagParameterOpen, at, to):
			key, from, ok := p.name(at+len(parameterOpen), to)
			if !ok {
				return fatal("parameter name %q of %q is not closed by >", key, short)
			}
			val, rest, closed := p.cutValue(from, to)
			if !closed && !slip("</parameter> of %q in %q is missing", clip(key), short) {
				return c, ds
			}
			if i, twice := keys[key]; !twice {
				keys[key] = len(c.Args)
				c.Args = append(c.Args, textArg(key, val))
			} else if !slip("parameter %q of %q is given twice", clip(key), short) {
				return c, ds
			} else {
				c.Args[i] = textArg(key, val)
			}
			at = rest
		case p.has(tagFunctionClose, at, to):
			at = p.skip(at+len(functionClose), to)
			if at < to {
				slip("text %q after </function> of %q", p.clip(at, to), short)
			}
			return c, ds
		default:
			next := to
			for _, t := range [...]tag{tagParameterOpen, tagFunctionClose} {
				if i := p.next(t, at, next); i >= 0 {
					next = i
				}
			}
			if !slip("text %q between the parameters of %q", p.clip(at, p.cut(at, next)), short) {
				return c, ds
			}
			at = next
		}
	}
}

// clip returns data[from:to] shortened for a message.
func (p *Parser) clip(from, to int) string {
	return clip(string(p.data[from:min(to, from+clipLimit+1)]))
}

// cutValue cuts a value and its closer off data[from:to]. closed is false when no closer fits; the value then ends before the next tag.
func (p *Parser) cutValue(from, to int) (val string, rest int, closed bool) {
	at := p.next(tagCloser, from, to)
	if at < 0 && p.ends(tagParameterClose, from, to) {
		at = to - len(parameterClose)
	}
	if at >= 0 && p.openTag(from, at) < 0 {
		return strip(p.text(from, at)), at + len(parameterClose), true
	}
	at = p.openTag(from, to)
	if end := to - len(functionClose); p.ends(tagFunctionClose, from, to) && (at < 0 || end < at) {
		at = end
	}
	if at < 0 {
		at = to
	}
	return strip(p.text(from, at)), at, false
}

// openTag finds what shows that a value's closer is missing: another parameter at the start of a line, or the border of two calls.
func (p *Parser) openTag(from, to int) int {
	at := p.next(tagLineParameter, from+1, to)
	if border := p.next(tagBorder, from, to); border >= 0 && (at < 0 || border < at) && p.next(tagCallOpen, border, to) >= 0 {
		return border
	}
	return at
}

// strip removes exactly one leading and one trailing newline.
func strip(s string) string { return strings.TrimSuffix(strings.TrimPrefix(s, "\n"), "\n") }

// clipLimit is how much of a text a message shows.
const clipLimit = 40

// clip shortens text for a message.
func clip(s string) string {
	if len(s) <= clipLimit {
		return s
	}
	return validUTF8(s[:clipLimit]) + "..."
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
