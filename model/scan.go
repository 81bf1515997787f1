package model

import (
	"unicode"
	"unicode/utf8"
)

// splitPattern is the only pre-tokenizer pattern this package implements (model.md 5.2); scan is the same rule written by hand, because
// Go's regexp has no look-ahead.
const splitPattern = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`

// class is what the pattern distinguishes.
type class uint8

const (
	classOther class = iota
	classLetter
	classMark
	classNumber
	classSpace
	classBreak // CR or LF, also whitespace
)

func classOf(r rune) class {
	switch {
	case r < utf8.RuneSelf:
		switch {
		case 'a' <= r|0x20 && r|0x20 <= 'z':
			return classLetter
		case '0' <= r && r <= '9':
			return classNumber
		case r == '\n' || r == '\r':
			return classBreak
		case r == ' ' || '\t' <= r && r <= '\r':
			return classSpace
		}
		return classOther
	case unicode.IsLetter(r):
		return classLetter
	case unicode.IsMark(r):
		return classMark
	case unicode.IsNumber(r):
		return classNumber
	case unicode.IsSpace(r):
		return classSpace
	}
	return classOther
}

func (c class) word() bool  { return c == classLetter || c == classMark }
func (c class) space() bool { return c == classSpace || c == classBreak }

// scan returns the length in bytes of the first piece of a non-empty s (model.md 5.2, rules 1 to 6).
func scan(s string) int {
	r, n := utf8.DecodeRuneInString(s)
	if r == '\'' {
		if m := contraction(s[1:]); m > 0 {
			return 1 + m
		}
	}
	c := classOf(r)
	var next class
	if n < len(s) {
		r1, _ := utf8.DecodeRuneInString(s[n:])
		next = classOf(r1)
	}
	prefix := n < len(s) && next.word() && c != classBreak && c != classLetter && c != classNumber
	switch {
	case prefix || c.word():
		return n + skip(s[n:], class.word)
	case c == classNumber:
		return n
	case c == classOther || r == ' ' && n < len(s) && next == classOther:
		n += skip(s[n:], func(c class) bool { return c == classOther })
		return n + skip(s[n:], func(c class) bool { return c == classBreak })
	}
	return scanSpace(s)
}

// scanSpace is rules 5 and 6 on a run of whitespace.
func scanSpace(s string) int {
	end, lastBreak, lastRune := 0, 0, 0
	for end < len(s) {
		r, n := utf8.DecodeRuneInString(s[end:])
		c := classOf(r)
		if !c.space() {
			break
		}
		lastRune = end
		end += n
		if c == classBreak {
			lastBreak = end
		}
	}
	switch {
	case lastBreak > 0:
		return lastBreak
	case end == len(s) || lastRune == 0:
		return end
	}
	return lastRune
}

// skip returns the length of the longest prefix whose characters satisfy ok.
func skip(s string, ok func(class) bool) int {
	i := 0
	for i < len(s) {
		r, n := utf8.DecodeRuneInString(s[i:])
		if !ok(classOf(r)) {
			break
		}
		i += n
	}
	return i
}

// contraction returns the length of an English suffix after an apostrophe, 0 when there is none.
func contraction(s string) int {
	if s == "" {
		return 0
	}
	a := s[0] | 0x20
	switch a {
	case 's', 't', 'm', 'd':
		return 1
	}
	if len(s) > 1 {
		switch b := s[1] | 0x20; {
		case a == 'r' && b == 'e', a == 'v' && b == 'e', a == 'l' && b == 'l':
			return 2
		}
	}
	return 0
}
