package trainer

import (
	"bytes"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
)

// KeyDoc documents one key.
type KeyDoc struct {
	Path    string `json:"path"`
	Type    string `json:"type"`
	Default string `json:"default"` // as TOML
	Range   string `json:"range"`
	Doc     string `json:"doc"`
}

// Doc lists every key in file order.
func Doc() []KeyDoc {
	def := reflect.ValueOf(Defaults())
	var out []KeyDoc
	for _, l := range leaves() {
		d := renderValue(def.FieldByIndex(l.index))
		if l.typ.Kind() == reflect.Map {
			d = "{}"
		}
		out = append(out, KeyDoc{l.path, typeName(l.typ), d, rangeText(l.tag), l.tag.Get("doc")})
	}
	return out
}

// Value renders the value of a key as TOML; ok is false when there is no such key.
func (c Config) Value(path string) (text string, ok bool) {
	l, ok := findLeaf(path)
	if !ok {
		return "", false
	}
	return renderValue(reflect.ValueOf(c).FieldByIndex(l.index)), true
}

// TOML is the canonical text: every key in file order. Loading it gives an equal
// configuration, and rendering that gives equal bytes.
func (c Config) TOML() []byte { return c.render(nil) }

// Commented is TOML with the documentation of each key above it.
func (c Config) Commented() []byte {
	return c.render(func(l leaf) string {
		r := rangeText(l.tag)
		if r == "any" {
			return l.tag.Get("doc")
		}
		return l.tag.Get("doc") + " [" + r + "]"
	})
}

func (c Config) render(comment func(leaf) string) []byte {
	var b bytes.Buffer
	v, section := reflect.ValueOf(c), ""
	for _, l := range leaves() {
		sec, key, _ := strings.Cut(l.path, ".")
		if sec != section {
			if section != "" {
				b.WriteByte('\n')
			}
			if section = sec; comment != nil {
				fmt.Fprintf(&b, "# %s\n", v.Type().Field(l.index[0]).Tag.Get("doc"))
			}
			fmt.Fprintf(&b, "[%s]\n", sec)
		}
		f := v.FieldByIndex(l.index)
		if comment != nil {
			fmt.Fprintf(&b, "# %s\n", comment(l))
		}
		if f.Kind() == reflect.Map && f.Len() == 0 {
			if comment != nil {
				fmt.Fprintf(&b, "# %s = {}\n", key)
			}
			continue
		}
		fmt.Fprintf(&b, "%s = %s\n", key, renderValue(f))
	}
	return b.Bytes()
}

// renderValue writes a value as TOML.
func renderValue(v reflect.Value) string {
	if d, ok := v.Interface().(Duration); ok {
		return quote(d.String())
	}
	switch v.Kind() {
	case reflect.String:
		return quote(v.String())
	case reflect.Bool:
		return strconv.FormatBool(v.Bool())
	case reflect.Int:
		return strconv.FormatInt(v.Int(), 10)
	case reflect.Uint64:
		return strconv.FormatUint(v.Uint(), 10)
	case reflect.Float64:
		return number(v.Float())
	case reflect.Array, reflect.Slice:
		parts := make([]string, v.Len())
		for i := range parts {
			parts[i] = renderValue(v.Index(i))
		}
		return "[" + strings.Join(parts, ", ") + "]"
	case reflect.Map:
		m, ok := v.Interface().(map[string]float64)
		if !ok {
			break
		}
		parts := make([]string, 0, len(m))
		for _, k := range sortedKeys(m) {
			parts = append(parts, quote(k)+" = "+number(m[k]))
		}
		return "{ " + strings.Join(parts, ", ") + " }"
	}
	return fmt.Sprint(v.Interface())
}

// number writes a float so that TOML reads it back as the same float.
func number(x float64) string {
	switch {
	case math.IsNaN(x):
		return "nan"
	case math.IsInf(x, 0):
		return strings.ToLower(strconv.FormatFloat(x, 'g', -1, 64))
	}
	s := strconv.FormatFloat(x, 'g', -1, 64)
	if !strings.ContainsAny(s, ".e") {
		s += ".0"
	}
	return s
}

// quote writes a TOML basic string.
func quote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r < 0x20 || r == 0x7f:
			fmt.Fprintf(&b, `\u%04X`, r)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}

func typeName(t reflect.Type) string {
	switch {
	case t == reflect.TypeFor[Duration]():
		return "duration"
	case t.Kind() == reflect.Array:
		return fmt.Sprintf("[%d]%s", t.Len(), typeName(t.Elem()))
	case t.Kind() == reflect.Slice:
		return "list of " + typeName(t.Elem())
	case t.Kind() == reflect.Map:
		return "table of number"
	case t.Kind() == reflect.Float64:
		return "number"
	case t.Kind() == reflect.Int || t.Kind() == reflect.Uint64:
		return "integer"
	}
	return t.Kind().String()
}
