package dbbench

import (
	"errors"
	"strconv"
	"strings"
	"unicode/utf8"

	"harness-s/env/dbbench/embedded"
)

// tuple marks a parsed Python tuple; a list is []value.
type tuple []value

type boolean bool

var errLiteral = errors.New("not a Python literal")

// parseLiteral reads a Python literal made of lists, tuples, quoted strings,
// numbers, None, True, False and Decimal('...'): everything an answer can
// honestly be, and nothing that could run.
func parseLiteral(s string) (value, error) {
	p := &literal{s: s}
	v, err := p.value(0)
	if err != nil {
		return nil, err
	}
	if p.space(); p.i != len(s) {
		return nil, errLiteral
	}
	return v, nil
}

type literal struct {
	s string
	i int
}

const maxDepth = 64

func (p *literal) space() {
	for p.i < len(p.s) && strings.IndexByte(" \t\r\n\f", p.s[p.i]) >= 0 {
		p.i++
	}
}

func (p *literal) eat(c byte) bool {
	p.space()
	if p.i < len(p.s) && p.s[p.i] == c {
		p.i++
		return true
	}
	return false
}

func (p *literal) value(depth int) (value, error) {
	if depth > maxDepth {
		return nil, errLiteral
	}
	p.space()
	if p.i == len(p.s) {
		return nil, errLiteral
	}
	switch c := p.s[p.i]; {
	case c == '[':
		p.i++
		items, _, err := p.items(']', depth)
		return items, err
	case c == '(':
		p.i++
		items, comma, err := p.items(')', depth)
		if err == nil && len(items) == 1 && !comma {
			return items[0], nil
		}
		return tuple(items), err
	case c == '\'' || c == '"':
		out, err := p.str()
		for err == nil { // adjacent strings are one
			p.space()
			if p.i == len(p.s) || p.s[p.i] != '\'' && p.s[p.i] != '"' {
				break
			}
			var more string
			more, err = p.str()
			out += more
		}
		return out, err
	case c == '-' || c == '+' || c == '.' || c >= '0' && c <= '9':
		return p.number()
	}
	start := p.i
	for p.i < len(p.s) && (p.s[p.i] >= 'a' && p.s[p.i] <= 'z' || p.s[p.i] >= 'A' && p.s[p.i] <= 'Z') {
		p.i++
	}
	switch p.s[start:p.i] {
	case "None":
		return nil, nil
	case "True":
		return boolean(true), nil
	case "False":
		return boolean(false), nil
	case "Decimal":
		if !p.eat('(') {
			return nil, errLiteral
		}
		v, err := p.value(depth + 1)
		text, ok := v.(string)
		if err != nil || !ok || !p.eat(')') {
			return nil, errLiteral
		}
		if _, ok := pyFloat(text); !ok {
			return nil, errLiteral
		}
		return decimal(strings.TrimSpace(text)), nil
	}
	return nil, errLiteral
}

func (p *literal) items(end byte, depth int) (items []value, comma bool, err error) {
	items = []value{}
	for {
		if p.eat(end) {
			return items, comma, nil
		}
		if len(items) > 0 && !comma {
			return nil, false, errLiteral
		}
		v, err := p.value(depth + 1)
		if err != nil {
			return nil, false, err
		}
		items = append(items, v)
		comma = p.eat(',')
	}
}

func (p *literal) number() (value, error) {
	start := p.i
	for p.i < len(p.s) && (p.s[p.i] == '+' || p.s[p.i] == '-') {
		p.i++
	}
	for p.i < len(p.s) && (strings.IndexByte("0123456789._eE", p.s[p.i]) >= 0 || strings.IndexByte("+-", p.s[p.i]) >= 0 && strings.IndexByte("eE", p.s[p.i-1]) >= 0) {
		p.i++
	}
	text := p.s[start:p.i]
	digits := strings.TrimLeft(text, "+-")
	neg := strings.Count(text[:len(text)-len(digits)], "-")%2 == 1
	f, ok := pyFloat(digits)
	if !ok || digits == "" {
		return nil, errLiteral
	}
	if !strings.ContainsAny(digits, ".eE") {
		n := strings.ReplaceAll(digits, "_", "")
		if t := strings.TrimLeft(n, "0"); t != n && t != "" {
			return nil, errLiteral // Python refuses leading zeros
		} else if t == "" {
			n, neg = "0", false
		}
		if neg {
			n = "-" + n
		}
		return integer(n), nil
	}
	if neg {
		f = -f
	}
	return f, nil
}

// integer is a Python int of any size, as text.
type integer string

func (p *literal) str() (string, error) {
	q := p.s[p.i]
	p.i++
	var b strings.Builder
	for p.i < len(p.s) {
		c := p.s[p.i]
		p.i++
		switch {
		case c == q:
			return b.String(), nil
		case c == '\n':
			return "", errLiteral
		case c != '\\':
			b.WriteByte(c)
		case p.i == len(p.s):
			return "", errLiteral
		default:
			if err := p.escape(&b); err != nil {
				return "", err
			}
		}
	}
	return "", errLiteral
}

func (p *literal) escape(b *strings.Builder) error {
	c := p.s[p.i]
	p.i++
	if i := strings.IndexByte("abfnrtv\\'\"", c); i >= 0 {
		b.WriteByte("\a\b\f\n\r\t\v\\'\""[i])
		return nil
	}
	width := map[byte]int{'x': 2, 'u': 4, 'U': 8}[c]
	switch {
	case c == '\n':
	case width > 0:
		if p.i+width > len(p.s) {
			return errLiteral
		}
		n, err := strconv.ParseUint(p.s[p.i:p.i+width], 16, 32)
		if err != nil || n > utf8.MaxRune {
			return errLiteral
		}
		p.i += width
		b.WriteRune(rune(n))
	case c >= '0' && c <= '7':
		n := int(c - '0')
		for k := 0; k < 2 && p.i < len(p.s) && p.s[p.i] >= '0' && p.s[p.i] <= '7'; k++ {
			n = n*8 + int(p.s[p.i]-'0')
			p.i++
		}
		b.WriteRune(rune(n))
	default:
		b.WriteByte('\\')
		b.WriteByte(c)
	}
	return nil
}

// literalStr is Python's str() of a parsed literal.
func literalStr(v value) string {
	if s, ok := v.(string); ok {
		return s
	}
	if d, ok := v.(decimal); ok {
		return string(d)
	}
	return literalRepr(v)
}

func literalRepr(v value) string {
	switch x := v.(type) {
	case integer:
		return string(x)
	case float64:
		return embedded.PyFloat(x)
	case boolean:
		if x {
			return "True"
		}
		return "False"
	case []value:
		return "[" + joinRepr(x) + "]"
	case tuple:
		if len(x) == 1 {
			return "(" + literalRepr(x[0]) + ",)"
		}
		return "(" + joinRepr(x) + ")"
	}
	return string(appendRepr(nil, v))
}

func joinRepr(vs []value) string {
	parts := make([]string, len(vs))
	for i, v := range vs {
		parts[i] = literalRepr(v)
	}
	return strings.Join(parts, ", ")
}

// pyFloat is Python's float(str): surrounding space, underscores between
// digits, inf and nan by name, no hexadecimal.
func pyFloat(s string) (float64, bool) {
	s = strings.TrimSpace(s)
	body := strings.TrimLeft(s, "+-")
	if len(s)-len(body) > 1 || body == "" {
		return 0, false
	}
	switch strings.ToLower(body) {
	case "inf", "infinity", "nan":
		f, err := strconv.ParseFloat(s, 64)
		if strings.EqualFold(body, "nan") {
			f, err = strconv.ParseFloat("nan", 64)
		}
		return f, err == nil
	}
	for i := 0; i < len(body); i++ {
		c := body[i]
		switch {
		case c >= '0' && c <= '9', c == '.':
		case c == 'e' || c == 'E':
		case c == '+' || c == '-':
			if i == 0 || body[i-1] != 'e' && body[i-1] != 'E' {
				return 0, false
			}
		case c == '_':
			if i == 0 || i+1 == len(body) || !digit(body[i-1]) || !digit(body[i+1]) {
				return 0, false
			}
		default:
			return 0, false
		}
	}
	f, err := strconv.ParseFloat(strings.ReplaceAll(s, "_", ""), 64)
	var ne *strconv.NumError
	if err != nil && !(errors.As(err, &ne) && errors.Is(ne.Err, strconv.ErrRange)) {
		return 0, false
	}
	return f, true
}

func digit(c byte) bool { return c >= '0' && c <= '9' }
