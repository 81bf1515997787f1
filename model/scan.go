package model

import (
	"sync"
	"unicode"
	"unicode/utf8"
)

// splitPattern is the pre-tokenizer pattern of Qwen3.5 (model.md 5.2), splitPatternNoMarks that of Qwen2 and Qwen3, in which a combining
// mark counts as punctuation. No other pattern is implemented: scan is the same rule written by hand, because Go's regexp has no
// look-ahead.
const (
	splitPattern        = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
	splitPatternNoMarks = `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
)

// class is what a pattern distinguishes; a set of classes is the sum of its members.
type class uint8

const (
	classOther class = 1 << iota
	classLetter
	classMark
	classNumber
	classSpace
	classBreak // CR or LF, also whitespace

	classWord   = classLetter | classMark
	classSpaces = classSpace | classBreak
)

// splitter is the class of every code point under one pattern.
type splitter [unicode.MaxRune + 1]class

// Code points that are newer than Go's tables (Unicode 15.0) and that the reference's pattern engine knows (16.0).
var (
	newLetters = [][2]rune{{0x1c89, 0x1c8a}, {0xa7cb, 0xa7cd}, {0xa7da, 0xa7dc}, {0x105c0, 0x105f3}, {0x10d4a, 0x10d65}, {0x10d6f, 0x10d85},
		{0x10ec2, 0x10ec4}, {0x11380, 0x11389}, {0x1138b, 0x1138b}, {0x1138e, 0x1138e}, {0x11390, 0x113b5}, {0x113b7, 0x113b7},
		{0x113d1, 0x113d1}, {0x113d3, 0x113d3}, {0x11bc0, 0x11be0}, {0x13460, 0x143fa}, {0x16100, 0x1611d}, {0x16d40, 0x16d6c},
		{0x18cff, 0x18cff}, {0x1e5d0, 0x1e5ed}, {0x1e5f0, 0x1e5f0}, {0x2ebf0, 0x2ee5d}}
	newMarks = [][2]rune{{0x897, 0x897}, {0x10d69, 0x10d6d}, {0x10efc, 0x10efc}, {0x113b8, 0x113c0}, {0x113c2, 0x113c2}, {0x113c5, 0x113c5},
		{0x113c7, 0x113ca}, {0x113cc, 0x113d0}, {0x113d2, 0x113d2}, {0x113e1, 0x113e2}, {0x11f5a, 0x11f5a}, {0x1611e, 0x1612f},
		{0x1e5ee, 0x1e5ef}}
	newNumbers = [][2]rune{{0x10d40, 0x10d49}, {0x116d0, 0x116e3}, {0x11bf0, 0x11bf9}, {0x16130, 0x16139}, {0x16d70, 0x16d79},
		{0x1ccf0, 0x1ccf9}, {0x1e5f1, 0x1e5fa}}
)

var (
	markSplitter = sync.OnceValue(func() *splitter { return newSplitter(classMark) })
	bareSplitter = sync.OnceValue(func() *splitter { return newSplitter(classOther) })
)

// splitterOf returns the splitter of a pattern, nil for an unknown one.
func splitterOf(pattern string) *splitter {
	switch pattern {
	case splitPattern:
		return markSplitter()
	case splitPatternNoMarks:
		return bareSplitter()
	}
	return nil
}

// newSplitter makes the table; marks is the class of combining marks.
func newSplitter(marks class) *splitter {
	t := new(splitter)
	for i := range t {
		t[i] = classOther
	}
	for _, g := range []struct {
		class class
		known *unicode.RangeTable
		late  [][2]rune
	}{{classLetter, unicode.L, newLetters}, {marks, unicode.M, newMarks}, {classNumber, unicode.N, newNumbers}, {classSpace, unicode.White_Space, nil}} {
		for _, r := range g.known.R16 {
			for c := int(r.Lo); c <= int(r.Hi); c += int(r.Stride) {
				t[c] = g.class
			}
		}
		for _, r := range g.known.R32 {
			for c := int(r.Lo); c <= int(r.Hi); c += int(r.Stride) {
				t[c] = g.class
			}
		}
		for _, r := range g.late {
			for c := r[0]; c <= r[1]; c++ {
				t[c] = g.class
			}
		}
	}
	t['\n'], t['\r'] = classBreak, classBreak
	return t
}

// at returns the class of the character at s[i:], which is not empty, and its length.
func (t *splitter) at(s string, i int) (class, int) {
	if c := s[i]; c < utf8.RuneSelf {
		return t[c], 1
	}
	r, n := utf8.DecodeRuneInString(s[i:])
	return t[r], n
}

// run returns the end of the longest run of characters in set that starts at i.
func (t *splitter) run(s string, i int, set class) int {
	for i < len(s) {
		c, n := t.at(s, i)
		if c&set == 0 {
			break
		}
		i += n
	}
	return i
}

// scan returns the length in bytes of the first piece of a non-empty s (model.md 5.2, rules 1 to 6).
func (t *splitter) scan(s string) int {
	if s[0] == '\'' {
		if m := contraction(s[1:]); m > 0 {
			return 1 + m
		}
	}
	c, n := t.at(s, 0)
	switch c {
	case classLetter, classMark:
		return t.run(s, n, classWord)
	case classNumber:
		return n
	}
	var next class
	var m int
	if n < len(s) {
		next, m = t.at(s, n)
	}
	switch {
	case next&classWord != 0 && c != classBreak:
		return t.run(s, n+m, classWord)
	case c == classOther || s[0] == ' ' && next == classOther:
		return t.run(s, t.run(s, n, classOther), classBreak)
	}
	return t.scanSpace(s)
}

// scanSpace is rules 5 and 6 on a run of whitespace.
func (t *splitter) scanSpace(s string) int {
	end, lastBreak, lastRune := 0, 0, 0
	for end < len(s) {
		c, n := t.at(s, end)
		if c&classSpaces == 0 {
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

// contraction returns the length of an English suffix after an apostrophe, 0 when there is none. Case is folded, so that the long s
// (U+017F) counts as s.
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
		case a == 'r' && b == 'e', a == 'v' && b == 'e', a == 'l' && b == 'l', s[:2] == "\u017f":
			return 2
		}
	}
	return 0
}
