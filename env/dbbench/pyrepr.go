package dbbench

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"harness-s/env/dbbench/embedded"
)

// value is one result cell as a Python driver would hold it: nil, int64, uint64,
// float64, decimal, text, blob, date, datetime or timedelta.
type value any

type (
	decimal string // digits as the server prints them
	blob    []byte
	date    string // YYYY-MM-DD
	moment  string // YYYY-MM-DD hh:mm:ss[.ffffff]
	span    string // [-]hhh:mm:ss[.ffffff]
)

// cell converts what the driver scanned into a value, by the column's database
// type. Driver values are nil, int64, uint64, float32, float64, []byte, string.
func cell(v any, dbType string) value {
	if v == nil {
		return nil
	}
	var s string
	switch x := v.(type) {
	case int64, uint64, float64:
		return x
	case float32:
		f, _ := strconv.ParseFloat(strconv.FormatFloat(float64(x), 'g', -1, 32), 64)
		return f
	case []byte:
		s = string(x)
	case string:
		s = x
	default:
		s = fmt.Sprint(x)
	}
	t := strings.TrimPrefix(dbType, "UNSIGNED ")
	switch t {
	case "TINYINT", "SMALLINT", "MEDIUMINT", "INT", "BIGINT", "YEAR":
		if i, err := strconv.ParseInt(s, 10, 64); err == nil {
			return i
		}
		if u, err := strconv.ParseUint(s, 10, 64); err == nil {
			return u
		}
	case "FLOAT", "DOUBLE":
		if f, err := strconv.ParseFloat(s, 64); err == nil {
			return f
		}
	case "DECIMAL":
		return decimal(s)
	case "DATE":
		if strings.HasPrefix(s, "0000-00-00") {
			return nil
		}
		return date(s)
	case "DATETIME", "TIMESTAMP":
		if strings.HasPrefix(s, "0000-00-00") {
			return nil
		}
		return moment(s)
	case "TIME":
		return span(s)
	case "BIT":
		var u uint64
		for _, c := range []byte(s) {
			u = u<<8 | uint64(c)
		}
		return u
	case "BLOB", "TINYBLOB", "MEDIUMBLOB", "LONGBLOB", "BINARY", "VARBINARY", "GEOMETRY":
		return blob(s)
	}
	return s
}

// appendRow appends the repr of one tuple.
func appendRow(dst []byte, row []value) []byte {
	dst = append(dst, '(')
	for i, v := range row {
		if i > 0 {
			dst = append(dst, ", "...)
		}
		dst = appendRepr(dst, v)
	}
	if len(row) == 1 {
		dst = append(dst, ',')
	}
	return append(dst, ')')
}

// appendRepr appends Python's repr() of v (envs.md 4.6).
func appendRepr(dst []byte, v value) []byte {
	switch x := v.(type) {
	case nil:
		return append(dst, "None"...)
	case int64:
		return strconv.AppendInt(dst, x, 10)
	case uint64:
		return strconv.AppendUint(dst, x, 10)
	case float64:
		return append(dst, embedded.PyFloat(x)...)
	case decimal:
		return append(append(append(dst, "Decimal('"...), x...), "')"...)
	case blob:
		return appendBytes(dst, x)
	case date:
		if n, ok := numbers(string(x), "-"); ok && len(n) == 3 {
			return fmt.Appendf(dst, "datetime.date(%d, %d, %d)", n[0], n[1], n[2])
		}
		return appendStr(dst, string(x))
	case moment:
		return appendMoment(dst, string(x))
	case span:
		return appendSpan(dst, string(x))
	case string:
		return appendStr(dst, x)
	}
	return appendStr(dst, fmt.Sprint(v))
}

// str is Python's str() of v: what an answer made of the value looks like.
func str(v value) string {
	switch x := v.(type) {
	case string:
		return x
	case decimal:
		return string(x)
	case date:
		return string(x)
	case moment:
		return string(x)
	}
	return string(appendRepr(nil, v))
}

func appendStr(dst []byte, s string) []byte {
	q := byte('\'')
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		q = '"'
	}
	dst = append(dst, q)
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			dst = fmt.Appendf(dst, `\x%02x`, s[i])
		case r == rune(q) || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r == '\n':
			dst = append(dst, `\n`...)
		case r == '\r':
			dst = append(dst, `\r`...)
		case r == '\t':
			dst = append(dst, `\t`...)
		case r == ' ' || pyPrintable(r):
			dst = append(dst, s[i:i+n]...)
		case r < 0x100:
			dst = fmt.Appendf(dst, `\x%02x`, r)
		case r < 0x10000:
			dst = fmt.Appendf(dst, `\u%04x`, r)
		default:
			dst = fmt.Appendf(dst, `\U%08x`, r)
		}
		i += n
	}
	return append(dst, q)
}

// pyPrintable is str.isprintable() of one character other than the space: not
// in the categories Other and Separator.
func pyPrintable(r rune) bool {
	if r < 0x7f {
		return r > ' '
	}
	return unicode.In(r, unicode.L, unicode.M, unicode.N, unicode.P, unicode.S)
}

func appendBytes(dst []byte, b []byte) []byte {
	q := byte('\'')
	if s := string(b); strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		q = '"'
	}
	dst = append(dst, 'b', q)
	for _, c := range b {
		switch {
		case c == q || c == '\\':
			dst = append(dst, '\\', c)
		case c == '\n':
			dst = append(dst, `\n`...)
		case c == '\r':
			dst = append(dst, `\r`...)
		case c == '\t':
			dst = append(dst, `\t`...)
		case c < ' ' || c >= 0x7f:
			dst = fmt.Appendf(dst, `\x%02x`, c)
		default:
			dst = append(dst, c)
		}
	}
	return append(dst, q)
}

// appendMoment drops zero seconds and microseconds from the right, as Python does.
func appendMoment(dst []byte, s string) []byte {
	day, clock, _ := strings.Cut(s, " ")
	d, ok1 := numbers(day, "-")
	sec, micro := clockParts(clock)
	c, ok2 := numbers(sec, ":")
	if !ok1 || !ok2 || len(d) != 3 || len(c) != 3 {
		return appendStr(dst, s)
	}
	dst = fmt.Appendf(dst, "datetime.datetime(%d, %d, %d, %d, %d", d[0], d[1], d[2], c[0], c[1])
	if c[2] != 0 || micro != 0 {
		dst = fmt.Appendf(dst, ", %d", c[2])
	}
	if micro != 0 {
		dst = fmt.Appendf(dst, ", %d", micro)
	}
	return append(dst, ')')
}

// appendSpan prints TIME as datetime.timedelta, normalised to non-negative
// seconds and microseconds.
func appendSpan(dst []byte, s string) []byte {
	neg := strings.HasPrefix(s, "-")
	sec, micro := clockParts(strings.TrimPrefix(s, "-"))
	c, ok := numbers(sec, ":")
	if !ok || len(c) != 3 {
		return appendStr(dst, s)
	}
	total := (int64(c[0])*3600+int64(c[1])*60+int64(c[2]))*1e6 + int64(micro)
	if neg {
		total = -total
	}
	const day = 86400 * 1000000
	days := total / day
	if total%day < 0 {
		days--
	}
	rest := total - days*day
	var parts []string
	if days != 0 {
		parts = append(parts, fmt.Sprintf("days=%d", days))
	}
	if rest/1e6 != 0 {
		parts = append(parts, fmt.Sprintf("seconds=%d", rest/1000000))
	}
	if rest%1000000 != 0 {
		parts = append(parts, fmt.Sprintf("microseconds=%d", rest%1000000))
	}
	if len(parts) == 0 {
		parts = []string{"0"}
	}
	return append(append(append(dst, "datetime.timedelta("...), strings.Join(parts, ", ")...), ')')
}

func clockParts(s string) (clock string, micro int) {
	clock, frac, _ := strings.Cut(s, ".")
	if frac != "" {
		micro, _ = strconv.Atoi((frac + "000000")[:6])
	}
	return clock, micro
}

func numbers(s, sep string) ([]int, bool) {
	var out []int
	for p := range strings.SplitSeq(s, sep) {
		n, err := strconv.Atoi(p)
		if err != nil {
			return nil, false
		}
		out = append(out, n)
	}
	return out, true
}

// clip cuts s at max code points and says so.
func clip(s string, max int) (string, bool) {
	n := 0
	for i := range s {
		if n == max {
			return s[:i] + "[TRUNCATED]", true
		}
		n++
	}
	return s, false
}
