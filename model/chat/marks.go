package chat

import (
	"bytes"
	"slices"
	"strings"
	"unicode/utf8"
)

// tag is a literal of the answer format, or one of them in a place that decides something. No literal contains another and all begin
// with "<", so their places in a text do not depend on where reading starts.
type tag uint8

const (
	tagThinkOpen tag = iota
	tagThinkClose
	tagCallOpen
	tagCallClose
	tagFunctionOpen
	tagFunctionClose
	tagParameterOpen
	tagParameterClose
	numLiterals

	tagLineParameter = numLiterals + iota - 1 // <parameter= at the start of a line
	tagClosed                                 // </tool_call> that follows the end of a function or of a parameter
	tagCloser                                 // </parameter> that another parameter or the end of the function follows
	tagBorder                                 // </tool_call> that another <tool_call> follows
	tagJoint                                  // </function> that another call follows
	numTags
)

var literals = [numLiterals]string{ThinkOpen, ThinkClose, ToolCallOpen, ToolCallClose, functionOpen, functionClose, parameterOpen, parameterClose}

// marks holds a growing text and the places of all tags in it. Text is read once; what follows or precedes a literal means: with nothing
// but white space between. Questions about tags are then answered without reading text again, which keeps the parser's work proportional
// to the length of a turn.
type marks struct {
	data []byte
	read int // data[:read] is searched; what follows is the beginning of a literal or of a character
	at   [numTags][]int
	last tag // the last literal, where it begins and ends
	lo   int
	hi   int
	work int // bytes looked at and questions answered, for tests
}

// add appends text and finds the tags in it. The last bytes, which may become a literal or a character, stay unread until end.
func (m *marks) add(text string, end bool) {
	m.data = append(m.data, text...)
	limit := len(m.data)
	if !end {
		limit -= incomplete(m.data)
	}
	for m.read < limit {
		i := bytes.IndexByte(m.data[m.read:limit], '<')
		if i < 0 {
			m.work += limit - m.read
			m.read = limit
			return
		}
		m.work += i + 1
		m.read += i
		t, open := m.literal(m.data[m.read:limit])
		if open && !end {
			return
		}
		if t == numLiterals {
			m.read++
			continue
		}
		m.mark(t, m.read)
		m.read += len(literals[t])
	}
}

// literal returns the literal that s begins with; open says that s may be the beginning of one.
func (m *marks) literal(s []byte) (t tag, open bool) {
	for t, l := range literals {
		m.work++
		if n := min(len(s), len(l)); string(s[:n]) == l[:n] {
			if n == len(l) {
				return tag(t), false
			}
			open = true
		}
	}
	return numLiterals, open
}

func (m *marks) mark(t tag, at int) {
	put := func(t tag, at int) { m.at[t] = append(m.at[t], at) }
	put(t, at)
	if t == tagParameterOpen && at > 0 && m.data[at-1] == '\n' {
		put(tagLineParameter, at)
	}
	if m.hi > 0 && m.skip(m.hi, at) == at {
		switch last := m.last; {
		case t == tagCallClose && (last == tagFunctionClose || last == tagParameterClose):
			put(tagClosed, at)
		case last == tagParameterClose && (t == tagParameterOpen || t == tagFunctionClose):
			put(tagCloser, m.lo)
		case last == tagCallClose && t == tagCallOpen:
			put(tagBorder, m.lo)
		case last == tagFunctionClose && (t == tagCallOpen || t == tagFunctionOpen):
			put(tagJoint, m.lo)
		}
	}
	m.last, m.lo, m.hi = t, at, at+len(literals[t])
}

// next returns where the first t in data[from:to] begins, or -1. A tag that begins before to is taken to end there too.
func (m *marks) next(t tag, from, to int) int {
	m.work++
	i, _ := slices.BinarySearch(m.at[t], from)
	if i < len(m.at[t]) && m.at[t][i] < to {
		return m.at[t][i]
	}
	return -1
}

// has reports whether data[:to] continues with t at a place.
func (m *marks) has(t tag, at, to int) bool {
	m.work++
	n := len(literals[t])
	return to-at >= n && string(m.data[at:at+n]) == literals[t]
}

// ends reports whether data[from:to] ends with t.
func (m *marks) ends(t tag, from, to int) bool {
	m.work++
	n := len(literals[t])
	return to-from >= n && string(m.data[to-n:to]) == literals[t]
}

// skip returns where the white space at the beginning of data[from:to] ends.
func (m *marks) skip(from, to int) int {
	at := to - len(bytes.TrimLeftFunc(m.data[from:to], isSpace))
	m.work += at - from + 1
	return at
}

// cut returns where the white space at the end of data[from:to] begins.
func (m *marks) cut(from, to int) int {
	at := from + len(bytes.TrimRightFunc(m.data[from:to], isSpace))
	m.work += to - at + 1
	return at
}

// text returns data[from:to].
func (m *marks) text(from, to int) string {
	m.work += to - from
	return string(m.data[from:to])
}

// name reads a name of data[from:to] up to ">"; end is where the text after it begins. A name is not empty and has neither "<" nor a new
// line; when there is none, s is what stands there, clipped for a message.
func (m *marks) name(from, to int) (s string, end int, ok bool) {
	i := bytes.IndexAny(m.data[from:to], "><\n")
	if i > 0 && m.data[from+i] == '>' {
		return m.text(from, from+i), from + i + 1, true
	}
	if m.work += i; i < 0 {
		m.work += to - from
	}
	s = string(m.data[from:min(to, from+clipLimit+1)])
	s, _, _ = strings.Cut(s, ">")
	return clip(s), from, false
}

// incomplete returns the length of the unfinished character at the end of s.
func incomplete(s []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(s); n++ {
		if c := s[len(s)-n]; utf8.RuneStart(c) {
			if !utf8.FullRune(s[len(s)-n:]) {
				return n
			}
			break
		}
	}
	return 0
}
