package model

import (
	"slices"
	"sync"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// lateMarks are the code points newer than Unicode 9.0 that take part in normalisation: marks with a combining class, and characters
// that compose. The reference tokenizer normalises with the tables of 9.0, where they are ordinary characters; of the others, old and
// new, every version of Unicode gives the same NFC.
var lateMarks = [][2]rune{
	{0x7fd, 0x7fd}, {0x897, 0x89f}, {0x8ca, 0x8d3}, {0x9fe, 0x9fe}, {0xc3c, 0xc3c}, {0xd3b, 0xd3c}, {0xeba, 0xeba}, {0x1715, 0x1715},
	{0x1abf, 0x1add}, {0x1ae0, 0x1aeb}, {0x1df6, 0x1dfa}, {0xa82c, 0xa82c}, {0x105c9, 0x105c9}, {0x105e4, 0x105e4}, {0x10d24, 0x10d27},
	{0x10d69, 0x10d6d}, {0x10eab, 0x10eac}, {0x10efa, 0x10efb}, {0x10efd, 0x10eff}, {0x10f46, 0x10f50}, {0x10f82, 0x10f85},
	{0x11070, 0x11070}, {0x1133b, 0x1133b}, {0x11383, 0x11383}, {0x11385, 0x11385}, {0x1138e, 0x1138e}, {0x11391, 0x11391},
	{0x113b8, 0x113b8}, {0x113bb, 0x113bb}, {0x113c2, 0x113c2}, {0x113c5, 0x113c5}, {0x113c7, 0x113c9}, {0x113ce, 0x113d0},
	{0x1145e, 0x1145e}, {0x11839, 0x1183a}, {0x11930, 0x11930}, {0x11938, 0x11938}, {0x1193d, 0x1193e}, {0x11943, 0x11943},
	{0x119e0, 0x119e0}, {0x11a34, 0x11a34}, {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d42}, {0x11d44, 0x11d45},
	{0x11d97, 0x11d97}, {0x11f41, 0x11f42}, {0x1611e, 0x16129}, {0x1612f, 0x1612f}, {0x16d67, 0x16d6a}, {0x16ff0, 0x16ff1},
	{0x1e08f, 0x1e08f}, {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef}, {0x1e4ec, 0x1e4ef}, {0x1e5ee, 0x1e5ef},
	{0x1e6e3, 0x1e6e3}, {0x1e6e6, 0x1e6e6}, {0x1e6ee, 0x1e6ef}, {0x1e6f5, 0x1e6f5},
}

func isLate(r rune) bool {
	_, found := slices.BinarySearchFunc(lateMarks, r, func(e [2]rune, r rune) int {
		switch {
		case e[1] < r:
			return -1
		case e[0] > r:
			return 1
		}
		return 0
	})
	return found
}

// nfc is NFC with the tables of Unicode 9.0. norm.NFC differs: it knows later characters, and it puts U+034F into a run of more than
// 30 marks. Most text is normal and comes back as it is; the rest is done one stretch between two boundaries at a time. Bytes that are
// not UTF-8 stay as they are.
func nfc(s string) string {
	n := normalSpan(s)
	if n == len(s) {
		return s
	}
	out := make([]byte, 0, len(s)+len(s)/16)
	var c composer
	for {
		out = append(out, s[:n]...)
		if s = s[n:]; s == "" {
			return string(out)
		}
		n = boundary(s)
		out = c.appendNFC(out, s[:n])
		s = s[n:]
		n = normalSpan(s)
	}
}

// normalSpan returns the length of a start of s that is normal whatever follows it: all of s, or up to a boundary.
func normalSpan(s string) int {
	classes := normalClasses()
	last, start := uint8(0), 0
	for i := 0; i < len(s); {
		if s[i] < utf8.RuneSelf {
			last, start = 0, i
			i++
			continue
		}
		r, n := utf8.DecodeRuneInString(s[i:])
		switch c := classes[min(r, rune(len(classes)-1))]; {
		case c == 0:
			start = i
			last = 0
		case c == notNormal || c < last:
			return start
		default:
			last = c
		}
		i += n
	}
	return len(s)
}

// notNormal marks characters that NFC changes or may join to what precedes them, and the late ones. No combining class is as high.
const notNormal = 255

// normalClasses is the combining class or notNormal by character. All from the last one on are 0.
var normalClasses = sync.OnceValue(func() *[0x30001]uint8 {
	t := new([0x30001]uint8)
	for r := rune(utf8.RuneSelf); r < 0x30000; r++ {
		s := string(r)
		switch p := norm.NFC.PropertiesString(s); {
		case isLate(r) || p.Decomposition() != nil && norm.NFC.String(s) != s:
			t[r] = notNormal
		case utf8.ValidRune(r):
			t[r] = p.CCC()
		}
	}
	for pair := range compositions() {
		t[pair[1]] = notNormal
	}
	for r := rune(vowelBase); r < tailBase+tails; r++ {
		t[r] = notNormal
	}
	return t
})

// boundary returns the length of the first character of s and of all that could join it.
func boundary(s string) int {
	_, n := utf8.DecodeRuneInString(s)
	for n < len(s) {
		p := norm.NFC.PropertiesString(s[n:])
		if p.Size() == 0 || p.BoundaryBefore() {
			break
		}
		n += p.Size()
	}
	return n
}

// composer does decomposition, canonical ordering and composition of a stretch of text.
type composer struct {
	runes []markedRune
	next  []markedRune
}

// markedRune is a character and its combining class; a byte that is not UTF-8 is -1 - byte.
type markedRune struct {
	r  rune
	cc uint8
}

func (c *composer) appendNFC(out []byte, s string) []byte {
	c.decompose(s)
	c.order()
	c.compose()
	for _, m := range c.runes {
		if m.r < 0 {
			out = append(out, byte(-1-m.r))
			continue
		}
		out = utf8.AppendRune(out, m.r)
	}
	return out
}

func (c *composer) decompose(s string) {
	c.runes = c.runes[:0]
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			c.runes = append(c.runes, markedRune{r: -1 - rune(s[0])})
		case r < utf8.RuneSelf || isLate(r):
			c.runes = append(c.runes, markedRune{r: r})
		default:
			c.add(r, s)
		}
		s = s[n:]
	}
}

// add appends the decomposition of r, with which s starts.
func (c *composer) add(r rune, s string) {
	if r >= hangulBase && r < hangulEnd {
		i := r - hangulBase
		c.runes = append(c.runes, markedRune{r: leadBase + i/(vowels*tails)}, markedRune{r: vowelBase + i/tails%vowels})
		if tail := i % tails; tail > 0 {
			c.runes = append(c.runes, markedRune{r: tailBase + tail})
		}
		return
	}
	p := norm.NFC.PropertiesString(s)
	d := p.Decomposition()
	if d == nil {
		c.runes = append(c.runes, markedRune{r, p.CCC()})
		return
	}
	for len(d) > 0 {
		r, n := utf8.DecodeRune(d)
		c.runes = append(c.runes, markedRune{r, norm.NFC.Properties(d).CCC()})
		d = d[n:]
	}
}

// order sorts every run of marks by combining class, stably and in linear time.
func (c *composer) order() {
	for i := 0; i < len(c.runes); i++ {
		if c.runes[i].cc == 0 {
			continue
		}
		start, sorted := i, true
		for i < len(c.runes) && c.runes[i].cc != 0 {
			sorted = sorted && (i == start || c.runes[i-1].cc <= c.runes[i].cc)
			i++
		}
		if sorted {
			continue
		}
		run := c.runes[start:i]
		var at [257]int
		for _, m := range run {
			at[int(m.cc)+1]++
		}
		for k := range 256 {
			at[k+1] += at[k]
		}
		c.next = append(c.next[:0], run...)
		for _, m := range c.next {
			run[at[m.cc]] = m
			at[m.cc]++
		}
	}
}

// compose joins each character with the last starter when nothing between them blocks it.
func (c *composer) compose() {
	out := c.runes[:0]
	starter, last := -1, uint8(0)
	for _, m := range c.runes {
		// A mark is blocked by an earlier one of its own class, a starter by anything between.
		if starter >= 0 && (len(out)-1 == starter || last < m.cc && m.cc != 0) {
			if r, ok := composed(out[starter].r, m.r); ok {
				out[starter].r = r
				continue
			}
		}
		if m.cc == 0 {
			starter = len(out)
		}
		last = m.cc
		out = append(out, m)
	}
	c.runes = out
}

// Hangul syllables compose and decompose by arithmetic (Unicode 15, section 3.12).
const (
	hangulBase, hangulEnd         = 0xac00, 0xd7a4
	leadBase, vowelBase, tailBase = 0x1100, 0x1161, 0x11a7
	leads, vowels, tails          = 19, 21, 28
)

// composed returns the character that two characters make.
func composed(a, b rune) (rune, bool) {
	switch {
	case a >= leadBase && a < leadBase+leads && b >= vowelBase && b < vowelBase+vowels:
		return hangulBase + ((a-leadBase)*vowels+b-vowelBase)*tails, true
	case a >= hangulBase && a < hangulEnd && (a-hangulBase)%tails == 0 && b > tailBase && b < tailBase+tails:
		return a + b - tailBase, true
	}
	r, ok := compositions()[[2]rune{a, b}]
	return r, ok
}

// compositions lists the pairs that compose, other than Hangul.
var compositions = sync.OnceValue(func() map[[2]rune]rune {
	m := map[[2]rune]rune{}
	for r := rune(utf8.RuneSelf); r < 0x30000; r++ {
		s := string(r)
		d := norm.NFC.PropertiesString(s).Decomposition()
		if d == nil || norm.NFC.String(s) != s {
			continue // does not decompose, or is excluded from composition
		}
		b, n := utf8.DecodeLastRune(d)
		a, k := utf8.DecodeRune(norm.NFC.Bytes(d[:len(d)-n]))
		if k > 0 && !isLate(r) && !isLate(a) && !isLate(b) {
			m[[2]rune{a, b}] = r
		}
	}
	return m
})
