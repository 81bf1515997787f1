package chat

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
)

// Errors of content and arguments that are not text; the texts are those of the template where it has one.
var (
	ErrUnexpectedContent error = raised("Unexpected content type.")
	ErrUnexpectedItem    error = raised("Unexpected item type in content.")
	ErrSystemImage       error = raised("System message cannot contain images.")
	ErrSystemVideo       error = raised("System message cannot contain videos.")
	ErrVision                  = errors.New("images and videos need a vision model; send text parts only")
	ErrArguments         error = raised("Can only get item pairs from a mapping.")
)

// maxJSONDepth bounds the nesting of values that are rendered.
const maxJSONDepth = 512

// jsonKind is the kind of an ordered JSON value.
type jsonKind uint8

const (
	jsonNull jsonKind = iota
	jsonBool
	jsonNumber
	jsonString
	jsonArray
	jsonObject
)

// value is a JSON value that keeps key order and number text.
type value struct {
	kind jsonKind
	b    bool
	text string // number text or string
	keys []string
	vals []value // of an object parallel to keys
}

// parseJSON parses exactly one JSON value.
func parseJSON(raw []byte) (value, error) {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	v, err := readValue(d, 0)
	if err != nil {
		return value{}, fmt.Errorf("parse json: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return value{}, fmt.Errorf("parse json: data after the value at byte %d", d.InputOffset())
	}
	return v, nil
}

func readValue(d *json.Decoder, depth int) (value, error) {
	if depth > maxJSONDepth {
		return value{}, fmt.Errorf("nesting deeper than %d", maxJSONDepth)
	}
	t, err := d.Token()
	if err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return value{}, err
	}
	switch t := t.(type) {
	case nil:
		return value{kind: jsonNull}, nil
	case bool:
		return value{kind: jsonBool, b: t}, nil
	case json.Number:
		return value{kind: jsonNumber, text: t.String()}, nil
	case string:
		return value{kind: jsonString, text: t}, nil
	case json.Delim:
		if t == '[' {
			return readArray(d, depth)
		}
		return readObject(d, depth)
	}
	return value{}, fmt.Errorf("token %v of type %T", t, t)
}

func readArray(d *json.Decoder, depth int) (value, error) {
	v := value{kind: jsonArray}
	for d.More() {
		e, err := readValue(d, depth+1)
		if err != nil {
			return value{}, err
		}
		v.vals = append(v.vals, e)
	}
	_, err := d.Token()
	return v, err
}

// readObject keeps the place of the first and the value of the last of equal keys, like a Python dict.
func readObject(d *json.Decoder, depth int) (value, error) {
	v := value{kind: jsonObject}
	at := map[string]int{}
	for d.More() {
		k, err := d.Token()
		if err != nil {
			return value{}, err
		}
		key, _ := k.(string)
		e, err := readValue(d, depth+1)
		if err != nil {
			return value{}, err
		}
		if i, dup := at[key]; dup {
			v.vals[i] = e
			continue
		}
		at[key] = len(v.keys)
		v.keys, v.vals = append(v.keys, key), append(v.vals, e)
	}
	_, err := d.Token()
	return v, err
}

func (v *value) get(key string) (*value, bool) {
	for i, k := range v.keys {
		if k == key {
			return &v.vals[i], true
		}
	}
	return nil, false
}

// write appends v as Python's json.dumps(json.loads(text), ensure_ascii=False): ", " and ": ", key order kept, numbers as number
// writes their text.
func (v *value) write(b *strings.Builder, number func(string) string) {
	switch v.kind {
	case jsonNull:
		b.WriteString("null")
	case jsonBool:
		b.WriteString(strconv.FormatBool(v.b))
	case jsonNumber:
		b.WriteString(number(v.text))
	case jsonString:
		writeString(b, v.text)
	case jsonArray:
		b.WriteByte('[')
		for i := range v.vals {
			if i > 0 {
				b.WriteString(", ")
			}
			v.vals[i].write(b, number)
		}
		b.WriteByte(']')
	case jsonObject:
		b.WriteByte('{')
		for i := range v.vals {
			if i > 0 {
				b.WriteString(", ")
			}
			writeString(b, v.keys[i])
			b.WriteString(": ")
			v.vals[i].write(b, number)
		}
		b.WriteByte('}')
	}
}

func writeString(b *strings.Builder, s string) {
	b.WriteByte('"')
	for _, r := range s {
		switch r {
		case '"', '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case '\b':
			b.WriteString(`\b`)
		case '\f':
			b.WriteString(`\f`)
		case '\n':
			b.WriteString(`\n`)
		case '\r':
			b.WriteString(`\r`)
		case '\t':
			b.WriteString(`\t`)
		default:
			if r < 0x20 {
				fmt.Fprintf(b, `\u%04x`, r)
			} else {
				b.WriteRune(r)
			}
		}
	}
	b.WriteByte('"')
}

// pythonJSON re-encodes raw as Python's json.dumps writes it.
func pythonJSON(raw []byte) (string, error) {
	v, err := parseJSON(raw)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	v.write(&b, dumpsNumber)
	return b.String(), nil
}

// argText renders an argument: mappings and lists as JSON, strings verbatim, the rest as Python's str. An absent value is None.
func argText(raw json.RawMessage) (string, error) {
	if len(raw) == 0 {
		return "None", nil
	}
	v, err := parseJSON(raw)
	if err != nil {
		return "", err
	}
	return v.python(), nil
}

func (v *value) python() string {
	switch v.kind {
	case jsonNull:
		return "None"
	case jsonBool:
		if v.b {
			return "True"
		}
		return "False"
	case jsonNumber:
		return pythonNumber(v.text)
	case jsonString:
		return v.text
	}
	var b strings.Builder
	v.write(&b, dumpsNumber)
	return b.String()
}

// pythonNumber is str(json.loads(text)): integers keep their digits, anything with a fraction or exponent is a float.
func pythonNumber(text string) string {
	if !strings.ContainsAny(text, ".eE") {
		if text == "-0" {
			return "0"
		}
		return text
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil && !math.IsInf(f, 0) {
		return text
	}
	return pythonFloat(f)
}

// dumpsNumber is json.dumps(json.loads(text)).
func dumpsNumber(text string) string {
	return strings.Replace(pythonNumber(text), "inf", "Infinity", 1)
}

// pythonFloat is Python's repr of a float: shortest digits, exponent form below 1e-4 and from 1e16 on.
func pythonFloat(f float64) string {
	switch {
	case math.IsInf(f, 1):
		return "inf"
	case math.IsInf(f, -1):
		return "-inf"
	}
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.FormatFloat(f, 'e', -1, 64)
	}
	s := strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}

// ParseMessages decodes an OpenAI-style JSON list of messages: content is a string, null, absent or a list of text parts,
// reasoning_content a string, tool_calls a list whose entries may wrap the call in "function", arguments a mapping. As in transformers,
// reasoning_content that is null or absent may be under the older names thinking and reasoning.
func ParseMessages(raw []byte) ([]Message, error) {
	v, err := parseJSON(raw)
	if err != nil {
		return nil, fmt.Errorf("parse messages: %w", err)
	}
	if v.kind != jsonArray {
		return nil, fmt.Errorf("parse messages: not a JSON list")
	}
	out := make([]Message, len(v.vals))
	for i := range v.vals {
		if out[i], err = toMessage(&v.vals[i]); err != nil {
			return nil, fmt.Errorf("parse message %d: %w", i, err)
		}
	}
	return out, nil
}

func toMessage(v *value) (Message, error) {
	var m Message
	if v.kind != jsonObject {
		return m, fmt.Errorf("not a JSON object")
	}
	if r, ok := v.get("role"); ok && r.kind == jsonString {
		m.Role = r.text
	}
	if c, ok := v.get("content"); ok {
		text, err := contentText(c, m.Role == "system")
		if err != nil {
			return m, err
		}
		m.Content = text
	}
	for _, name := range [...]string{"reasoning_content", "thinking", "reasoning"} {
		if r, ok := v.get(name); ok && r.kind != jsonNull {
			if r.kind == jsonString {
				m.Reasoning = &r.text
			}
			break
		}
	}
	cs, ok := v.get("tool_calls")
	if ok && cs.kind == jsonString && cs.text != "" {
		return m, fmt.Errorf("tool_calls is a string, not a list")
	}
	if ok && cs.kind == jsonArray {
		for i := range cs.vals {
			c, err := toCall(&cs.vals[i])
			if err != nil {
				return m, fmt.Errorf("tool call %d: %w", i, err)
			}
			m.Calls = append(m.Calls, c)
		}
	}
	return m, nil
}

func contentText(v *value, system bool) (string, error) {
	switch v.kind {
	case jsonNull:
		return "", nil
	case jsonString:
		return v.text, nil
	case jsonArray:
	default:
		return "", ErrUnexpectedContent
	}
	var b strings.Builder
	for i := range v.vals {
		p := &v.vals[i]
		typ, _ := p.get("type")
		is := func(names ...string) bool {
			for _, n := range names {
				if _, ok := p.get(n); ok || typ != nil && typ.kind == jsonString && typ.text == n && n != "image_url" {
					return true
				}
			}
			return false
		}
		text, hasText := p.get("text")
		switch {
		case is("image", "image_url"):
			if system {
				return "", ErrSystemImage
			}
			return "", ErrVision
		case is("video"):
			if system {
				return "", ErrSystemVideo
			}
			return "", ErrVision
		case hasText && text.kind < jsonArray:
			b.WriteString(text.python())
		default:
			return "", ErrUnexpectedItem
		}
	}
	return b.String(), nil
}

func toCall(v *value) (Call, error) {
	if f, ok := v.get("function"); ok {
		v = f
	}
	name, ok := v.get("name")
	if !ok || name.kind != jsonString {
		return Call{}, fmt.Errorf("no name")
	}
	c := Call{Name: name.text}
	args, ok := v.get("arguments")
	if !ok {
		return c, nil
	}
	if args.kind != jsonObject {
		return Call{}, fmt.Errorf("arguments of %q: %w Parse a JSON string first", c.Name, ErrArguments)
	}
	for i := range args.vals {
		var b strings.Builder
		args.vals[i].write(&b, func(text string) string { return text })
		c.Args = append(c.Args, Arg{Key: args.keys[i], Value: json.RawMessage(b.String())})
	}
	return c, nil
}
