package embedded

import "strings"

// TokenKind classifies a Token.
type TokenKind uint8

// The kinds of token Scan produces.
const (
	Word     TokenKind = iota // bare identifier or keyword
	Quoted                    // `identifier`, text unquoted
	String                    // 'text' or "text", text unquoted
	Number                    // digits, as written
	Variable                  // @user or @@system variable, as written
	Punct                     // any other single byte
)

// Token is a lexical unit of a statement. Pos is its byte offset.
type Token struct {
	Kind TokenKind
	Text string
	Pos  int
}

// Is reports whether t is the bare word w (upper case), in any case.
func (t Token) Is(w string) bool { return t.Kind == Word && strings.EqualFold(t.Text, w) }

// Scan splits SQL into tokens, leaving out comments; the body of a MySQL
// version comment counts as code, because a server runs it. It never fails: an
// unterminated string or comment ends at the end of the text.
func Scan(q string) []Token {
	var out []Token
	version := 0 // open version comments
	for i := 0; i < len(q); {
		c := q[i]
		switch {
		case c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f' || c == '\v':
			i++
		case c == '#', strings.HasPrefix(q[i:], "--") && (i+2 == len(q) || q[i+2] <= ' '):
			i = skipTo(q, i, "\n")
		case strings.HasPrefix(q[i:], "/*!") || strings.HasPrefix(q[i:], "/*M!"):
			i += strings.IndexByte(q[i:], '!') + 1
			for i < len(q) && q[i] >= '0' && q[i] <= '9' {
				i++
			}
			version++
		case version > 0 && strings.HasPrefix(q[i:], "*/"):
			version--
			i += 2
		case strings.HasPrefix(q[i:], "/*"):
			i = skipTo(q, i+2, "*/")
		case c == '\'' || c == '"' || c == '`':
			text, end := unquote(q, i)
			kind := String
			if c == '`' {
				kind = Quoted
			}
			out = append(out, Token{kind, text, i})
			i = end
		case c == '@':
			end := variable(q, i)
			out = append(out, Token{Variable, q[i:end], i})
			i = end
		case c >= '0' && c <= '9' || c == '.' && i+1 < len(q) && q[i+1] >= '0' && q[i+1] <= '9':
			end := i + 1
			for end < len(q) && (wordByte(q[end]) || q[end] == '.') {
				end++
			}
			kind := Number
			if strings.Trim(q[i:end], "0123456789.xXabcdefABCDEF") != "" {
				kind = Word
			}
			out = append(out, Token{kind, q[i:end], i})
			i = end
		case wordByte(c):
			end := i + 1
			for end < len(q) && wordByte(q[end]) {
				end++
			}
			out = append(out, Token{Word, q[i:end], i})
			i = end
		default:
			out = append(out, Token{Punct, q[i : i+1], i})
			i++
		}
	}
	return out
}

func wordByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '$' || c >= 0x80
}

func skipTo(q string, from int, mark string) int {
	if from >= len(q) {
		return len(q)
	}
	j := strings.Index(q[from:], mark)
	if j < 0 {
		return len(q)
	}
	return from + j + len(mark)
}

// unquote reads the quoted run that starts at i and returns its text and end.
func unquote(q string, i int) (string, int) {
	mark := q[i]
	var b strings.Builder
	for i++; i < len(q); i++ {
		switch {
		case q[i] == '\\' && mark != '`' && i+1 < len(q):
			i++
			b.WriteByte(q[i])
		case q[i] == mark && i+1 < len(q) && q[i+1] == mark:
			i++
			b.WriteByte(mark)
		case q[i] == mark:
			return b.String(), i + 1
		default:
			b.WriteByte(q[i])
		}
	}
	return b.String(), len(q)
}

func variable(q string, i int) int {
	end := i
	for end < len(q) && q[end] == '@' {
		end++
	}
	for end < len(q) {
		switch {
		case wordByte(q[end]) || q[end] == '.':
			end++
		case q[end] == '`' || end == i+1 && (q[end] == '\'' || q[end] == '"'):
			_, end = unquote(q, end)
		default:
			return end
		}
	}
	return end
}

// QuoteForeign puts back-ticks around bare identifiers that are not ASCII. MySQL
// takes them as they are; this engine's parser does not.
func QuoteForeign(q string) string {
	if strings.IndexFunc(q, func(r rune) bool { return r >= 0x80 }) < 0 {
		return q
	}
	var b strings.Builder
	last := 0
	for _, t := range Scan(q) {
		if t.Kind != Word || strings.IndexFunc(t.Text, func(r rune) bool { return r >= 0x80 }) < 0 {
			continue
		}
		b.WriteString(q[last:t.Pos] + "`" + t.Text + "`")
		last = t.Pos + len(t.Text)
	}
	return b.String() + q[last:]
}
